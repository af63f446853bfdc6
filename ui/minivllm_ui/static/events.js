// The event strip: what the engine did, newest on top, as it happens. Lines are text, never markup.

const ICONS = { admitted: '→', shared: '=', preempted: '×', resumed: '←', evicted: '○', finished: '✓', stopped: '■', engine: '●' };
const KEPT = 120;

export function makeEvents(root) {
  const list = root.querySelector('ol.events'), latest = root.querySelector('.latest');
  let seen = 0;

  function add(event) {
    const item = document.createElement('li'), icon = document.createElement('b'), time = document.createElement('time');
    item.className = event.kind;
    icon.textContent = ICONS[event.kind] ?? '·';
    icon.setAttribute('aria-hidden', 'true');
    time.textContent = new Date(event.time * 1000).toLocaleTimeString([], { hour12: false });
    item.append(icon, event.text, time);
    list.prepend(item);
    while (list.children.length > KEPT) list.lastChild.remove();
    if (event.kind !== 'evicted' || !latest.textContent) {
      latest.textContent = event.text;
      latest.dataset.kind = event.kind;
      latest.dataset.icon = ICONS[event.kind] ?? '·';
    }
  }

  return {
    show(events) {
      if (events.length && events[events.length - 1].number < seen) seen = 0;  // another server
      for (const event of events) if (event.number > seen) { seen = event.number; add(event); }
    },
  };
}
