// The pool as a grid: one cell a block, in the order of the block ids. Hover, or the arrow keys, tell what a block is.

import { FREE, CACHED, SHARED, HELD, conversationOf } from './frame.js';
import { cell, sharpen, theme } from './paint.js';

const LARGEST = 32, SMALLEST = 3, TALLEST = 256, FRESH_MS = 500, ASK_AFTER_MS = 120;

export function makeBlockMap(root, { isLive }) {
  const canvas = root.querySelector('canvas.map'), tip = root.querySelector('.tip'), spoken = root.querySelector('.spoken');
  const changed = new Map();  // block id -> when its state last changed here
  let frame = null, mine = '', grid = null, before = null, generation = -1, lit = null, cursor = -1, asking = 0, told = null;

  function draw() {
    const width = canvas.clientWidth;
    if (!frame || !width) return;
    const { state, holders } = frame, count = state.length;
    let size = LARGEST;
    while (size > SMALLEST && Math.ceil(count / Math.floor(width / size)) * size > TALLEST) size--;
    const columns = Math.max(1, Math.floor(width / size)), gap = size >= 8 ? 2 : size > 3 ? 1 : 0.5;
    grid = { size, columns };
    const g = sharpen(canvas, width, Math.max(1, Math.ceil(count / columns)) * size), colours = theme(root), now = performance.now();
    const own = new Set();
    frame.header.sequences.forEach((s, i) => { if (conversationOf(s.id) === mine) frame.tables[i].forEach(id => own.add(id)); });
    frame.leftBehind.forEach(id => own.add(id));
    for (let i = 0; i < count; i++) {
      const x = (i % columns) * size, y = Math.floor(i / columns) * size, side = size - gap;
      g.globalAlpha = lit && !lit.has(i) ? 0.22 : 1;
      cell(g, colours, x, y, side, side, state[i], { mine: own.has(i), holders: holders[i] });
      if (size >= 8 && state[i] > CACHED && now - (changed.get(i) ?? -1e9) < FRESH_MS) {
        g.strokeStyle = colours.fresh;
        g.lineWidth = 2;
        g.strokeRect(x - 0.5, y - 0.5, side + 1, side + 1);
      }
    }
    g.globalAlpha = 1;
    if (cursor >= 0 && document.activeElement === canvas) {
      g.strokeStyle = colours.text;
      g.lineWidth = 2;
      g.strokeRect((cursor % columns) * size - 0.5, Math.floor(cursor / columns) * size - 0.5, size - gap + 1, size - gap + 1);
    }
  }

  function show(next, whose) {
    mine = whose;
    if (before && next.header.generation === generation && before.length === next.state.length) {
      const now = performance.now();
      for (let i = 0; i < before.length; i++) if (before[i] !== next.state[i] && next.state[i] > CACHED) changed.set(i, now);
    } else changed.clear();
    frame = next;
    before = next.state;
    generation = next.header.generation;
    const h = next.header;
    canvas.setAttribute('aria-label', `KV block map: of ${h.num_blocks} blocks ${h.held} are held by one sequence, ${h.shared} shared, `
      + `${h.cached} reusable, ${h.free} free. Arrow keys move from block to block.`);
    draw();
    if (told && !tip.hidden && told.id < next.state.length && describe(told.id) !== told.line) tell(told.id, told.x, told.y);
  }

  // --- what is this block? ---
  function describe(id) {
    const value = frame.state[id], owners = [];
    frame.header.sequences.forEach((s, i) => {
      const place = frame.tables[i].indexOf(id);
      if (place < 0) return;
      const from = place * frame.header.block_size, to = Math.min(from + frame.header.block_size, s.prompt + s.generated);
      owners.push(`${conversationOf(s.id) === mine ? 'you' : s.label} (tokens ${from + 1}–${Math.max(to, from + 1)})`);
    });
    const what = value === FREE ? 'free' : value === CACHED ? 'reusable: its content can still be found' : value === SHARED
      ? `shared by ${frame.holders[id]}` : 'in use';
    return `Block ${id}: ${what}${owners.length ? ' · ' + owners.join(', ') : ''}`;
  }

  function tell(id, x, y) {
    const line = describe(id);
    told = { id, x, y, line };
    spoken.textContent = line;
    tip.textContent = line;
    tip.hidden = false;
    const box = root.querySelector('.mapwrap').getBoundingClientRect(), at = canvas.getBoundingClientRect();
    tip.style.left = Math.max(4, Math.min(x + 14, box.width - tip.offsetWidth - 8)) + 'px';
    tip.style.top = y + (at.top - box.top) + 18 + 'px';
    clearTimeout(asking);
    if (isLive()) asking = setTimeout(() => ask(id, line), ASK_AFTER_MS);
  }

  async function ask(id, line) {
    try {
      const reply = await fetch(new URL('engine/block/' + id, document.baseURI), { cache: 'no-store' });
      if (!reply.ok || tip.hidden || !tip.textContent.startsWith(line)) return;
      const d = await reply.json();
      tip.textContent = line + (d.hash ? ` · content hash ${d.hash}…` : '') + ` · ${d.age < 100 ? d.age.toFixed(1) : Math.round(d.age)} s old`
        + (!d.holders.length && d.last_holder ? ` · left by ${d.last_holder}` : '');
    } catch { /* the poll tells when the engine cannot be reached */ }
  }

  function hide() { clearTimeout(asking); tip.hidden = true; }

  canvas.addEventListener('mousemove', event => {
    if (!grid || !frame) return;
    const at = canvas.getBoundingClientRect(), x = event.clientX - at.left, y = event.clientY - at.top;
    const column = Math.floor(x / grid.size), id = Math.floor(y / grid.size) * grid.columns + column;
    if (column >= grid.columns || id < 0 || id >= frame.state.length) hide(); else tell(id, x, y);
  });
  canvas.addEventListener('mouseleave', hide);
  canvas.addEventListener('blur', () => { hide(); draw(); });
  canvas.addEventListener('keydown', event => {
    if (!grid || !frame) return;
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: grid.columns, ArrowUp: -grid.columns }[event.key];
    if (event.key === 'Escape') hide();
    if (step === undefined) return;
    event.preventDefault();
    cursor = Math.max(0, Math.min(frame.state.length - 1, cursor < 0 ? 0 : cursor + step));
    draw();
    tell(cursor, (cursor % grid.columns) * grid.size, Math.floor(cursor / grid.columns) * grid.size);
  });
  new ResizeObserver(draw).observe(root.querySelector('.mapwrap'));
  return { show, draw, light(ids) { lit = ids ? new Set(ids) : null; draw(); } };
}
