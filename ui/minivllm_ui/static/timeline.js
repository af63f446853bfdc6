// The last minutes, five at most: how full the pool was, when somebody was pushed out, and a slider that brings an earlier picture back.

import { decode } from './frame.js';
import { sharpen, theme } from './paint.js';

const SHORTEST = 60, LONGEST = 300, HEIGHT = 44, ASK_EVERY_MS = 100;

export function makeTimeline(root, { onPast, onLive }) {
  const canvas = root.querySelector('canvas.past'), slider = root.querySelector('.when input'), words = root.querySelector('.when output');
  const back = root.querySelector('.when button');
  let samples = [], moment = null, wanted = null, asked = 0, offset = 0;  // offset: the server's clock less ours

  const now = () => Date.now() / 1000 + offset;
  const span = () => Math.max(SHORTEST, Math.min(LONGEST, samples.length ? now() - samples[0][0] : 0));  // seconds shown

  function draw() {
    const width = canvas.clientWidth;
    if (!width) return;
    const g = sharpen(canvas, width, HEIGHT), colours = theme(root), end = now(), shown = span();
    const x = time => width * (1 + (time - end) / shown), height = HEIGHT - 8;
    const area = (share, colour) => {
      g.beginPath();
      g.moveTo(x(samples[0]?.[0] ?? end), height);
      let last = 0;
      for (const s of samples) { g.lineTo(x(s[0]), height - last); last = height * share(s) / Math.max(1, s[4]); g.lineTo(x(s[0]), height - last); }
      g.lineTo(width, height - last);
      g.lineTo(width, height);
      g.fillStyle = colour;
      g.fill();
    };
    if (samples.length) {
      area(s => s[1] + s[2] + s[3], colours.cached);
      area(s => s[1] + s[2], colours.used);
      area(s => s[2], colours.shared);
    }
    g.fillStyle = colours.bad;
    samples.forEach((s, i) => {
      if (i && s[5] > samples[i - 1][5]) { const at = x(s[0]); g.beginPath(); g.moveTo(at - 4, HEIGHT); g.lineTo(at + 4, HEIGHT); g.lineTo(at, height); g.fill(); }
    });
    if (moment !== null) { g.fillStyle = colours.text; g.fillRect(x(moment) - 1, 0, 2, HEIGHT); }
  }

  function place() {
    const ago = moment === null ? 0 : Math.min(span(), Math.max(0, now() - moment));
    slider.min = String(-span());
    slider.value = String(-ago);
    const text = moment === null ? 'live' : `${Math.round(ago)} s ago`;
    words.textContent = text;
    slider.setAttribute('aria-valuetext', text);
    back.hidden = moment === null;
    root.classList.toggle('in-the-past', moment !== null);
  }

  async function fetchPast() {
    if (wanted === null || performance.now() - asked < ASK_EVERY_MS) return;
    const at = wanted;
    wanted = null;
    asked = performance.now();
    const reply = await fetch(new URL('engine/state?at=' + at, document.baseURI), { cache: 'no-store' });
    if (reply.status === 200 && moment !== null) onPast(decode(await reply.arrayBuffer()));
    if (wanted !== null) setTimeout(() => fetchPast().catch(() => {}), ASK_EVERY_MS);
  }

  function goLive() { moment = null; place(); draw(); onLive(); }

  slider.addEventListener('input', () => {
    const value = Number(slider.value);
    if (value >= -0.5) { goLive(); return; }
    moment = wanted = now() + value;
    place();
    draw();
    setTimeout(() => fetchPast().catch(() => {}), Math.max(0, ASK_EVERY_MS - (performance.now() - asked)));
  });
  back.addEventListener('click', goLive);

  return {
    isLive: () => moment === null,
    begin(past) { samples = past.samples; draw(); },
    add(h) {
      offset = h.time - Date.now() / 1000;
      const last = samples[samples.length - 1], sample = [h.time, h.held, h.shared, h.cached, h.num_blocks, h.preemptions, h.tokens_per_second];
      if (last && last[4] === h.num_blocks && h.preemptions < last[5]) samples.push([h.time, 0, 0, 0, h.num_blocks, 0, 0]);
      samples.push(sample);
      while (samples.length && samples[0][0] < h.time - LONGEST) samples.shift();
    },
    tick() { place(); draw(); },
    rates: () => samples.filter(s => s[0] > now() - 60).map(s => [s[0], s[6]]),
    now,
  };
}
