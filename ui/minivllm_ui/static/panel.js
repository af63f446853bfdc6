// The live panel: polls the engine's state five times a second while the page is visible, and hands each picture to its parts.

import { decode } from './frame.js';
import { sharpen, theme } from './paint.js';
import { makeBlockMap } from './block_map.js';
import { makeControls } from './controls.js';
import { makeEvents } from './events.js';
import { makeSequences } from './sequences.js';
import { makeTimeline } from './timeline.js';

const PERIOD_MS = 200, SLOWEST_MS = 5000, PATIENCE_MS = 4000;

export function mount(root, whose) {
  const fields = {};
  root.querySelectorAll('[data-f]').forEach(element => { fields[element.dataset.f] = element; });
  const set = (name, value) => { const text = String(value ?? '–'); if (fields[name] && fields[name].textContent !== text) fields[name].textContent = text; };
  const spark = root.querySelector('canvas.spark');
  let frame = null, version = '', asMine = null, failures = 0, timer = 0;

  const map = makeBlockMap(root, { isLive: () => timeline.isLive() });
  const sequences = makeSequences(root, { onHover: ids => map.light(ids && ids.length ? ids : null) });
  const controls = makeControls(root), events = makeEvents(root);
  const timeline = makeTimeline(root, { onPast: paint, onLive: () => { if (frame) paint(frame); } });

  function paint(picture) {
    const h = picture.header, percent = n => (100 * n / Math.max(1, h.num_blocks)) + '%';
    for (const name of ['free', 'cached', 'shared', 'held', 'running', 'waiting', 'preempted', 'preemptions', 'evicted', 'num_blocks', 'block_size']) set(name, h[name]);
    set('tps', h.tokens_per_second.toFixed(h.tokens_per_second < 100 ? 1 : 0));
    set('ttft', h.ttft_ms);
    set('hit', h.hit_rate === null ? null : Math.round(100 * h.hit_rate));
    set('used', Math.round(100 * (h.held + h.shared) / Math.max(1, h.num_blocks)));
    root.querySelector('.bar .held').style.width = percent(h.held);
    root.querySelector('.bar .shared').style.width = percent(h.shared);
    root.querySelector('.bar .cached').style.width = percent(h.cached);
    root.classList.toggle('full', h.preempted > 0);
    map.show(picture, whose());
    sequences.show(picture, whose());
    window.__kvFrames = (window.__kvFrames || 0) + 1;
  }

  function drawSpark() {
    const width = spark.clientWidth, rates = timeline.rates(), end = timeline.now();
    if (!width) return;
    const g = sharpen(spark, width, 20), top = Math.max(1, ...rates.map(r => r[1]));
    g.beginPath();
    rates.forEach(([time, rate]) => g.lineTo(width * (1 + (time - end) / 60), 18 - 16 * rate / top));
    g.strokeStyle = theme(root).used;
    g.lineWidth = 1.5;
    g.stroke();
  }

  function status(h) {
    const words = { serving: 'engine running', starting: 'engine starting', restarting: 'engine restarting …', closed: 'engine closed',
      dead: `engine died: ${h.error}. The next message starts a new one.` };
    set('status', words[h.status] ?? h.status);
    root.dataset.status = h.status;
  }

  async function tick() {
    clearTimeout(timer);
    if (!root.isConnected || document.hidden) return;
    const began = performance.now(), mine = whose();
    let wait = PERIOD_MS;
    try {
      const since = mine === asMine ? version : '';
      const reply = await fetch(new URL(`engine/state?since=${since}&mine=${encodeURIComponent(mine)}`, document.baseURI),
        { cache: 'no-store', signal: AbortSignal.timeout(PATIENCE_MS) });
      if (reply.status === 200) {
        frame = decode(await reply.arrayBuffer());
        version = frame.header.version;
        asMine = mine;
        timeline.add(frame.header);
        events.show(frame.header.events);
        controls.show(frame.header);
        if (timeline.isLive()) paint(frame);
      } else if (reply.status !== 204) throw new Error(String(reply.status));
      else if (frame && timeline.isLive()) sequences.show(frame, mine);
      failures = 0;
      if (frame) status(frame.header);
    } catch {
      wait = Math.min(SLOWEST_MS, 500 * ++failures);
      set('status', 'the server cannot be reached, trying again …');
      root.dataset.status = 'unreachable';
    }
    timeline.tick();
    drawSpark();
    timer = setTimeout(tick, Math.max(20, wait - (performance.now() - began)));
  }

  document.addEventListener('visibilitychange', () => { if (!document.hidden) tick(); });
  new MutationObserver(() => map.draw()).observe(document.body, { attributes: true, attributeFilter: ['class'] });
  fetch(new URL('engine/past', document.baseURI), { cache: 'no-store' })
    .then(reply => reply.json()).then(past => { timeline.begin(past); events.show(past.events); }).catch(() => {}).finally(tick);
}
