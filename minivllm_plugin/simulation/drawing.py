"""Line and bar charts as inline SVG. Colours come from the page's style; nothing is fetched, nothing moves."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["Line", "bars", "lines"]

WIDTH, HEIGHT = 520, 260
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 30, 40
Format = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Line:
    """One curve. ``series`` chooses its colour and dash: class ``s0``, ``s1``, … of the page's style."""

    series: int
    name: str
    points: Sequence[tuple[float, float]]


def lines(title: str, curves: Sequence[Line], *, x_label: str, x_format: Format, y_format: Format, log_x: bool = False) -> str:
    """Curves over a common x axis that begins where the data do; y begins at 0.

    Args:
        log_x: of positive values; others are drawn at the left edge.
    """
    places = [x for curve in curves for x, _ in curve.points if not log_x or x > 0]
    if not places:
        return _frame(title, '<text class="axis" x="260" y="140" text-anchor="middle">no data</text>')
    low, high = min(places), max(places)
    if low == high:
        low, high = (low / 2, high * 2) if log_x else (low, low + 1)
    top = max((y for curve in curves for _, y in curve.points), default=0.0) or 1.0
    ticks = _log_ticks(low, high) if log_x else _ticks(low, high)

    def across(x: float) -> float:
        if log_x:
            share = math.log(max(x, low) / low) / math.log(high / low)
        else:
            share = (x - low) / (high - low)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    parts = _grid([(across(tick), x_format(tick)) for tick in ticks], top, y_format, x_label)
    for curve in curves:
        path = " ".join(f"{across(x):.1f},{_up(y, top):.1f}" for x, y in curve.points)
        parts.append(f'<polyline class="line s{curve.series}" points="{path}"><title>{escape(curve.name)}</title></polyline>')
    return _frame(title, "".join(parts))


def bars(title: str, values: Sequence[tuple[str, float]], y_format: Format) -> str:
    """A bar each, labelled with its value; the n-th in the colour of series n."""
    known = [value for _, value in values if math.isfinite(value)]
    top = max(known, default=0.0) or 1.0
    parts = _grid([], top, y_format, "")
    room = (WIDTH - LEFT - RIGHT) / max(1, len(values))
    for position, (name, value) in enumerate(values):
        shown = value if math.isfinite(value) else 0.0
        x, y = LEFT + room * (position + 0.18), _up(shown, top)
        middle, label = x + room * 0.32, escape(_short(name, room))
        parts.append(
            f'<rect class="bar s{position}" x="{x:.1f}" y="{y:.1f}" width="{room * 0.64:.1f}" height="{HEIGHT - BOTTOM - y:.1f}">'
            f"<title>{escape(name)}: {escape(y_format(value))}</title></rect>"
            f'<text class="value" x="{middle:.1f}" y="{y - 4:.1f}" text-anchor="middle">{escape(y_format(value))}</text>'
            f'<text class="axis" x="{middle:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{label}</text>'
        )
    return _frame(title, "".join(parts))


def _frame(title: str, inside: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
        f'<text class="title" x="0" y="16">{escape(title)}</text>{inside}</svg>'
    )


def _grid(x_ticks: Sequence[tuple[float, str]], top: float, y_format: Format, x_label: str) -> list[str]:
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    parts = []
    for value in (tick for tick in _ticks(0.0, top) if tick <= top * 1.001):
        y = _up(value, top)
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="axis" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{escape(y_format(value))}</text>'
        )
    for x, label in x_ticks:
        anchor = "end" if x > right - 24 else "middle"  # or the last label would be cut off
        parts.append(
            f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom}"/>'
            f'<text class="axis" x="{x:.1f}" y="{bottom + 16}" text-anchor="{anchor}">{escape(label)}</text>'
        )
    parts.append(f'<text class="axis" x="{right}" y="{HEIGHT - 6}" text-anchor="end">{escape(x_label)}</text>')
    return parts


def _up(value: float, top: float) -> float:
    return HEIGHT - BOTTOM - value / (top * 1.08) * (HEIGHT - BOTTOM - TOP)


def _ticks(low: float, high: float) -> list[float]:
    """About five round numbers."""
    raw = (high - low) / 5
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= raw)
    first = math.ceil(low / step - 1e-9)
    return [step * number for number in range(first, math.floor(high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten, thinned to at most six; the ends when there are fewer than two."""
    powers = list(range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1))
    kept = powers[:: max(1, -(-len(powers) // 6))]
    return [10.0**power for power in kept] if len(kept) > 1 else [low, high]


def _short(name: str, room: float) -> str:
    most = max(3, int(room / 7))
    return name if len(name) <= most else name[: most - 1] + "…"
