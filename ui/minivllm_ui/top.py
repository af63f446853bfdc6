"""``minivllm top``: the engine's state, from a running page's ``/engine/state``, drawn with rich. Main thread.

The same frames as the browser's panel; nothing is asked of the engine that the page does not ask.
"""

import time
import urllib.error
from urllib.parse import urlsplit

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from minivllm_plugin.errors import ConfigError, EngineError
from minivllm_ui.check import open_url
from minivllm_ui.frames import Frame, decode
from minivllm_ui.pool_map import CACHED, FREE, HELD, SHARED

__all__ = ["picture", "watch"]

COLOURS = ("blue", "dark_orange3", "cyan", "purple", "yellow4", "deep_sky_blue3", "green4", "slate_blue1", "orange4", "magenta")
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijkmnpqrstuvwxyz"
MOST_MAP_LINES = 16
EVENTS_SHOWN = 8
ICONS = {"admitted": "→", "shared": "=", "preempted": "×", "resumed": "←", "evicted": "○", "finished": "✓", "stopped": "■"}
STATES = {"prefill": "reading prompt", "decode": "writing", "waiting": "waiting", "preempted": "pushed out"}


def watch(url: str, auth: str | None, *, interval: float, once: bool, console: Console | None = None) -> None:
    """Draw until Ctrl-C, or one picture.

    Args:
        url: of the page.
        auth: ``user:password`` or None.

    Raises:
        ConfigError: the page wants another user or password, or the URL is none.
        EngineError: nobody answers there (with ``once``, or at the start).
    """
    console = console or Console()
    page = _page(url)
    frame = _fetch(page, auth, "")
    assert frame is not None
    if once:
        console.print(picture(frame, console.width))
        return
    with Live(picture(frame, console.width), console=console, auto_refresh=False, screen=console.is_terminal) as live:
        while True:
            time.sleep(interval)
            try:
                frame = _fetch(page, auth, str(frame.header["version"])) or frame
                live.update(picture(frame, console.width), refresh=True)
            except EngineError as error:
                live.update(Group(Text(str(error), style="bold red"), picture(frame, console.width)), refresh=True)


def picture(frame: Frame, width: int) -> Group:
    """One frame for a terminal of ``width`` columns."""
    h = frame.header
    title = Text.assemble(
        (f"minivllm · {h['model']}", "bold"),
        f"   {h['status']}   policy {h['policy']}   {h['num_blocks']} blocks of {h['block_size']} tokens",
        (f"   {h['error']}", "bold red") if h["error"] else "",
    )
    first = "–" if h["ttft_ms"] is None else f"{h['ttft_ms']} ms"
    hits = "–" if h["hit_rate"] is None else f"{100 * h['hit_rate']:.0f} %"
    numbers = Text(
        f"{h['tokens_per_second']:.1f} tok/s   first token {first}   prompt cached {hits}   running {h['running']}   "
        f"waiting {h['waiting']}   pushed out {h['preempted']} ({h['preemptions']} so far)"
    )
    counts = Text.assemble(
        ("A in use ", "bold"), f"{h['held']}   ", ("2 shared ", "bold"), f"{h['shared']}   ", ("▪ reusable ", "bold"),
        f"{h['cached']}   ", ("· free ", "bold"), f"{h['free']}",
    )  # fmt: skip
    events = [Text(f"{ICONS.get(one['kind'], '·')} {one['text']}", style="dim") for one in h["events"][-EVENTS_SHOWN:][::-1]]
    return Group(title, numbers, _bar(frame, width), counts, _map(frame, width), _sequences(frame), *events)


def _bar(frame: Frame, width: int) -> Text:
    h, columns = frame.header, max(10, width - 1)
    bar, used = Text(), 0
    for name, mark, style in (("held", "█", "blue"), ("shared", "▓", "bold"), ("cached", "▒", "bright_black")):
        length = round(columns * h[name] / max(1, h["num_blocks"]))
        bar.append(mark * length, style)
        used += length
    return bar.append("░" * max(0, columns - used), "bright_black")


def _map(frame: Frame, width: int) -> Text:
    """One character a block; of a pool too large for that, the first lines and a word about the rest."""
    columns = max(10, width - 1)
    shown = min(len(frame.state), columns * MOST_MAP_LINES)
    text = Text()
    for block_id in range(shown):
        value = frame.state[block_id]
        if value == FREE:
            text.append("·", "bright_black")
        elif value == CACHED:
            text.append("▪", "bright_black")
        elif value == SHARED:
            text.append(str(min(frame.holders[block_id], 9)), "bold reverse")
        else:
            slot = value - HELD
            text.append(LETTERS[slot % len(LETTERS)], COLOURS[slot % len(COLOURS)])
        if (block_id + 1) % columns == 0:
            text.append("\n")
    if shown < len(frame.state):
        text.append(f"… and {len(frame.state) - shown} blocks more", "dim")
    return text


def _sequences(frame: Frame) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("", "who", "state", "prompt", "cached", "answer", "blocks", "shared"):
        table.add_column(name, justify="left" if name in ("", "who", "state") else "right")
    for one, blocks in zip(frame.header["sequences"], frame.tables, strict=True):
        shared = sum(1 for block_id in blocks if frame.state[block_id] == SHARED)
        numbers = (one["prompt"], one["cached"], one["generated"], one["blocks"], shared)
        letter = Text(LETTERS[one["slot"] % len(LETTERS)], COLOURS[one["slot"] % len(COLOURS)])
        table.add_row(letter, Text(one["label"]), STATES.get(one["state"], one["state"]), *map(str, numbers))
    return table


def _page(url: str) -> str:
    parts = urlsplit(url if "//" in url else f"http://{url}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{url!r} is no address of a page; give one like http://127.0.0.1:7860/")
    path = parts.path.removesuffix("engine/state")
    return f"{parts.scheme}://{parts.netloc}{path.rstrip('/')}/"


def _fetch(page: str, auth: str | None, since: str) -> Frame | None:
    user, _, password = (auth or "").partition(":")
    try:
        data = open_url(f"{page}engine/state?since={since}", (user, password) if auth else None)
    except urllib.error.HTTPError as error:
        if error.code in (401, 403):
            raise ConfigError(f"{page} refuses ({error.code}); give its user and password: --auth USER:PASSWORD") from error
        raise EngineError(f"{page} answers {error.code}; is it a page of `minivllm ui`?") from error
    except OSError as error:
        raise EngineError(f"nobody answers at {page} ({error}); start a page with `minivllm ui`") from error
    return decode(data) if data else None
