// The sequences, a row each: who, in what state, and its blocks in the order of its tokens. Two rows that start alike show the
// same dark cells at their head. One that has ended stays for a moment, while its blocks turn grey: they are reusable.

import { CACHED, SHARED, HELD, conversationOf } from './frame.js';
import { cell, hue, letter, sharpen, theme } from './paint.js';

const LINGER_MS = 5000, WIDEST = 16, HEIGHT = 16;
const STATES = { prefill: 'reading prompt', decode: 'writing', waiting: 'waiting', preempted: 'pushed out' };

export function makeSequences(root, { onHover }) {
  const body = root.querySelector('tbody'), none = root.querySelector('.nobody');
  const rows = new Map();  // request id -> {tr, cells, sequence, table, gone}

  function makeRow(id) {
    const tr = document.createElement('tr'), cells = {};
    for (const name of ['who', 'state', 'strip', 'tokens', 'cached']) {
      const td = document.createElement(name === 'who' ? 'th' : 'td');
      if (name === 'who') td.scope = 'row';
      td.className = name;
      tr.append(td);
      cells[name] = td;
    }
    cells.canvas = document.createElement('canvas');
    cells.canvas.setAttribute('role', 'img');
    cells.strip.append(cells.canvas);
    tr.addEventListener('mouseenter', () => onHover(rows.get(id)?.table ?? null));
    tr.addEventListener('mouseleave', () => onHover(null));
    return { tr, cells, sequence: null, table: [], gone: 0 };
  }

  const put = (element, text) => { if (element.textContent !== text) element.textContent = text; };

  function strip(row, frame, colours, mine) {
    const canvas = row.cells.canvas, width = canvas.parentElement.clientWidth - 12, { sequence, table } = row;
    if (width < 10) return;
    const lost = sequence.state === 'preempted' && !table.length;
    canvas.setAttribute('aria-label', lost ? 'no blocks' : `${table.length} blocks, ${table.filter(id => frame.state[id] === SHARED).length} shared`);
    const size = Math.max(2, Math.min(WIDEST, Math.floor(width / Math.max(1, table.length)))), gap = size > 5 ? 2 : size > 3 ? 1 : 0;
    canvas.style.width = width + 'px';
    const g = sharpen(canvas, width, HEIGHT), per = frame.header.block_size;
    table.forEach((id, place) => {
      let kind = frame.state[id];
      if (row.gone && kind >= HELD) return;  // somebody else has it by now
      if (!row.gone && kind <= CACHED) kind = HELD + sequence.slot;
      const fill = row.gone ? 1 : Math.max(0, Math.min(1, (sequence.computed - place * per) / per));
      cell(g, colours, place * size, 0, size - gap, HEIGHT, kind, { mine, holders: frame.holders[id], fill });
    });
    if (lost) {
      g.fillStyle = colours.bad;
      g.font = '12px system-ui, sans-serif';
      g.textAlign = 'left';
      g.textBaseline = 'middle';
      g.fillText('× gave up its blocks; computed again later', 0, HEIGHT / 2 + 1);
    }
  }

  function show(frame, mine) {
    const colours = theme(root), now = performance.now(), present = new Set();
    const live = frame.header.sequences.map((sequence, i) => ({ sequence, table: frame.tables[i] }));
    live.sort((a, b) => (conversationOf(b.sequence.id) === mine) - (conversationOf(a.sequence.id) === mine));
    for (const { sequence, table } of live) {
      let row = rows.get(sequence.id);
      if (!row) rows.set(sequence.id, row = makeRow(sequence.id));
      row.sequence = sequence;
      row.table = table;
      row.gone = 0;
      present.add(sequence.id);
    }
    for (const [id, row] of rows) {
      if (present.has(id)) continue;
      row.gone ||= now;
      if (now - row.gone > LINGER_MS) { row.tr.remove(); rows.delete(id); }
    }
    const wanted = [...live.map(l => rows.get(l.sequence.id)), ...[...rows.values()].filter(row => row.gone)].slice(0, 40);
    wanted.forEach((row, place) => { if (body.children[place] !== row.tr) body.insertBefore(row.tr, body.children[place] ?? null); });
    while (body.children.length > wanted.length) body.lastChild.remove();
    for (const row of wanted) {
      const { sequence: s, cells } = row, own = conversationOf(s.id) === mine;
      row.tr.className = (own ? 'own ' : '') + (row.gone ? 'gone' : s.state);
      if (cells.who.dataset.key !== s.slot + s.label + own) {
        cells.who.dataset.key = s.slot + s.label + own;
        const badge = document.createElement('i');
        badge.textContent = own ? '★' : letter(s.slot);
        badge.style.background = own ? 'var(--kv-mine)' : hue(s.slot);
        cells.who.replaceChildren(badge, own ? 'You' : s.label);
      }
      put(cells.state, row.gone ? 'ended' : STATES[s.state] + (s.preemptions && s.state !== 'preempted' ? ' again' : ''));
      put(cells.tokens, `${s.prompt} + ${s.generated}`);
      put(cells.cached, s.prompt ? `${Math.round(100 * s.cached / s.prompt)} %` : '–');
      strip(row, frame, colours, own);
    }
    none.hidden = wanted.length > 0;
  }
  return { show, clear() { rows.clear(); body.replaceChildren(); } };
}
