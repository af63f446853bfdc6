// How a block looks. Each state has a shape of its own, so that nothing depends on colour: free is an outline, reusable a small
// grey square in an outline, held a full square with its owner's letter, shared dark with the number of its holders, yours a star.

import { FREE, CACHED, SHARED, HELD } from './frame.js';

const HUES = ['#2563eb', '#c2650a', '#0d9488', '#9333ea', '#a37803', '#0881a3', '#578a06', '#4f46e5', '#a34408', '#05875f', '#7c3aed'];
const LETTERS = 'ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijkmnpqrstuvwxyz';

export const hue = slot => HUES[slot % HUES.length];
export const letter = slot => LETTERS[slot % LETTERS.length];

export function theme(element) {
  const style = getComputedStyle(element);
  const read = name => style.getPropertyValue('--kv-' + name).trim();
  return {
    line: read('line'), cached: read('cached'), shared: read('shared'), onShared: read('on-shared'), mine: read('mine'),
    card: read('card'), fresh: read('fresh'), text: read('text'), used: read('used'), bad: read('bad'), edge: read('edge'),
  };
}

export function sharpen(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.height = height + 'px';
  }
  const g = canvas.getContext('2d');
  g.setTransform(ratio, 0, 0, ratio, 0, 0);
  g.clearRect(0, 0, width, height);
  return g;
}

function mark(g, x, y, size, text, colour) {
  g.fillStyle = colour;
  g.font = `600 ${Math.round(size * 0.62)}px ui-monospace, monospace`;
  g.textAlign = 'center';
  g.textBaseline = 'middle';
  g.fillText(text, x + size / 2, y + size / 2 + 0.5);
}

function outline(g, x, y, width, height, colour, thickness) {
  g.strokeStyle = colour;
  g.lineWidth = thickness;
  g.strokeRect(x + thickness / 2, y + thickness / 2, width - thickness, height - thickness);
}

// kind: a state byte. look: {mine, holders, fill: share of the block that holds computed tokens}.
export function cell(g, colours, x, y, width, height, kind, look = {}) {
  const size = Math.min(width, height), { mine = false, holders = 1, fill = 1 } = look;
  if (kind === FREE) {
    if (size < 5) { g.fillStyle = colours.edge; g.fillRect(x, y, width, height); } else outline(g, x, y, width, height, colours.line, 1);
    return;
  }
  if (kind === CACHED) {
    const inset = size < 6 ? 0 : Math.max(1, Math.round(size * 0.18));
    g.fillStyle = colours.cached;
    g.fillRect(x + inset, y + inset, width - 2 * inset, height - 2 * inset);
    if (inset) outline(g, x, y, width, height, mine ? colours.mine : colours.cached, mine ? 2 : 1);
    return;
  }
  const colour = kind === SHARED ? colours.shared : mine ? colours.mine : hue(kind - HELD);
  if (fill < 1) outline(g, x, y, width, height, colour, 1);
  g.fillStyle = colour;
  g.fillRect(x, y, width * Math.max(0, fill), height);
  if (kind === SHARED && mine) outline(g, x, y, width, height, colours.mine, Math.max(1, Math.round(size / 7)));
  if (size < 11 || fill < 1) {
    if (kind === SHARED && size >= 5 && fill === 1) {  // too small for a number: a hole
      const hole = Math.max(1, Math.round(size / 3));
      g.fillStyle = colours.onShared;
      g.fillRect(x + (width - hole) / 2, y + (height - hole) / 2, hole, hole);
    }
    return;
  }
  if (kind === SHARED) mark(g, x, y, size, holders > 9 ? '+' : String(holders), colours.onShared);
  else mark(g, x, y, size, mine ? '★' : letter(kind - HELD), '#ffffff');
}
