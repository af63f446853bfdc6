// What changes the engine: synthetic users, the pool's size, the policy, and starting a dead engine again.

const SETTLING_MS = 600;

export function makeControls(root) {
  const find = selector => root.querySelector(selector);
  const guests = find('.guests output'), fewer = find('.fewer'), more = find('.more'), pool = find('select.pool'), policy = find('select.policy');
  const small = find('button.small'), failed = find('.failed'), revive = find('button.revive');
  const settings = find('details.settings');
  let now = null, settled = 0;  // until then, what a picture says may be older than our order

  async function order(what) {
    settled = Infinity;
    failed.textContent = '';
    try {
      const reply = await fetch(new URL('engine/control', document.baseURI), {
        method: 'POST', headers: { 'Content-Type': 'application/json' }, body: JSON.stringify(what),
      });
      if (!reply.ok) failed.textContent = (await reply.json()).detail ?? `refused: ${reply.status}`;
    } catch { failed.textContent = 'the server cannot be reached'; }
    settled = performance.now() + SETTLING_MS;
  }

  function invite(count) {
    guests.textContent = String(count);
    order({ guests: count });
  }

  const restart = (blocks, name) => order({ num_blocks: blocks, policy: name });
  fewer.addEventListener('click', () => invite(Math.max(0, Number(guests.textContent) - 1)));
  more.addEventListener('click', () => invite(Number(guests.textContent) + (guests.textContent === '0' ? 3 : 1)));
  small.addEventListener('click', () => restart(now.num_blocks === now.small_blocks ? now.normal_blocks : now.small_blocks, now.policy));
  pool.addEventListener('change', () => restart(Number(pool.value), now.policy));
  policy.addEventListener('change', () => restart(now.num_blocks, policy.value));
  revive.addEventListener('click', () => order({ revive: true }));
  document.addEventListener('click', event => settings.contains(event.target) || settings.removeAttribute('open'));  // it hides the map
  document.addEventListener('keydown', event => event.key === 'Escape' && settings.removeAttribute('open'));

  function options(select, entries, chosen) {
    const key = JSON.stringify([entries, chosen]);
    if (select.dataset.key === key || document.activeElement === select) return;
    select.dataset.key = key;
    select.replaceChildren(...entries.map(([value, text]) => new Option(text, value, false, value === String(chosen))));
  }

  return {
    show(h) {
      now = h;
      if (performance.now() > settled) {
        guests.textContent = String(h.guests);
        fewer.disabled = h.guests === 0;
        more.disabled = h.guests >= h.most_guests;
      }
      const sizes = [...new Set([h.small_blocks, h.normal_blocks, 2 * h.normal_blocks, h.num_blocks])].filter(Boolean).sort((a, b) => a - b);
      options(pool, sizes.map(n => [String(n), `${n} blocks`]), h.num_blocks);
      options(policy, h.policies.map(name => [name, name]), h.policy);
      small.textContent = h.num_blocks === h.small_blocks ? `Normal pool (${h.normal_blocks})` : `Small pool (${h.small_blocks})`;
      for (const control of [small, pool, policy]) control.disabled = h.status === 'restarting';
      revive.hidden = h.status !== 'dead' && h.status !== 'closed';
    },
  };
}
