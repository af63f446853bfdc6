"""A comparison as one HTML file: tables and drawings, readable in light and dark, with nothing to fetch."""

from collections.abc import Callable, Iterable, Sequence
from html import escape
from itertools import groupby

from minivllm_plugin.errors import ConfigError
from minivllm_plugin.simulation.drawing import Line, bars, lines
from minivllm_plugin.simulation.figures import ROWS, TENANT_COLUMNS, number, seconds, tenant_row
from minivllm_plugin.simulation.records import RequestRecord, TimelinePoint
from minivllm_plugin.simulation.result import SimulationResult

__all__ = ["render_page"]

MAX_SERIES = 8
MAX_POINTS = 300

STYLE = """
:root { color-scheme: light dark; --text: #1b1f24; --soft: #5b6470; --grid: #d9dee4; --paper: #ffffff; --card: #f6f8fa;
  --c0: #0b62c4; --c1: #c2410c; --c2: #15803d; --c3: #9333ea; --c4: #0e7490; --c5: #b91c1c; --c6: #854d0e; --c7: #be185d; }
@media (prefers-color-scheme: dark) { :root {
  --text: #e6e9ed; --soft: #9aa4b0; --grid: #343b44; --paper: #14171b; --card: #1c2026;
  --c0: #6cb0ff; --c1: #ff9d6b; --c2: #5fd38a; --c3: #c79bff; --c4: #5fd0e4; --c5: #ff8b8b; --c6: #e5b95c; --c7: #ff8fc2; } }
body { margin: 2rem auto; max-width: 72rem; padding: 0 1rem; background: var(--paper); color: var(--text);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; } p { color: var(--soft); }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(22rem, 1fr)); gap: 1rem; }
.charts svg { background: var(--card); border-radius: 8px; padding: 10px; width: 100%; height: auto; box-sizing: border-box; }
svg text { fill: var(--text); font: 12px system-ui, sans-serif; } svg .title { font-weight: 600; font-size: 13px; }
svg .axis { fill: var(--soft); font-size: 11px; } svg .grid { stroke: var(--grid); stroke-width: 1; }
.line { fill: none; stroke-width: 2; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .8rem; text-align: right; border-bottom: 1px solid var(--grid); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
.key { display: inline-block; width: 1.6rem; height: .5rem; margin-right: .4rem; }
"""


def render_page(results: Sequence[SimulationResult]) -> str:
    """The page for one simulation or several of the same trace.

    Raises:
        ConfigError: none, or more than 8: their colours could not be told apart.
    """
    if not 1 <= len(results) <= MAX_SERIES:
        raise ConfigError(f"a page shows 1 to {MAX_SERIES} simulations, got {len(results)}; draw several pages")
    title = f"{results[0].trace}: {' / '.join(result.name for result in results)}"
    cost = results[0].settings.get("cost_model")
    described = cost.get("description") if isinstance(cost, dict) else cost
    intro = (
        f"{len(results[0].requests):,} requests through the scheduler of minivllm-plugin under a virtual clock. "
        f"Time of a step: {described or 'a linear model'}. "
        f"{number(results[0].settings['num_blocks'])} KV blocks of {results[0].settings['block_size']} tokens a replica."
    )
    legend = " ".join(
        f'<span><span class="key" style="background: var(--c{series})"></span>{escape(result.name)}&emsp;</span>'
        for series, result in enumerate(results)
    )
    sections = [
        f"<h1>{escape(title)}</h1><p>{escape(intro)}</p><p>{legend}</p>",
        f'<div class="charts">{"".join(_charts(results))}</div>',
        "<h2>Figures</h2>" + _figures(results),
    ]
    if any(len(result.tenants) > 1 for result in results):
        rows = [(result.name, *tenant_row(tenant)) for result in results for tenant in result.tenants]
        sections.append("<h2>Tenants</h2>" + _table(("simulation", *TENANT_COLUMNS), rows))
    colours = "".join(f".line.s{n} {{ stroke: var(--c{n}) }} .bar.s{n} {{ fill: var(--c{n}) }}\n" for n in range(MAX_SERIES))
    dashes = "".join(f".line.s{n} {{ stroke-dasharray: {n * 2 + 2} 3 }}\n" for n in range(1, MAX_SERIES))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}{colours}{dashes}</style></head>\n<body>\n"
        + "\n".join(sections)
        + "\n</body></html>\n"
    )


def _charts(results: Sequence[SimulationResult]) -> list[str]:
    return [
        bars("Output tokens per second", [(result.name, result.output_throughput) for result in results], number),
        bars("Prefix hits, share of blocks", [(result.name, result.block_hit_rate) for result in results], _percent),
        _cumulative("Time to first token", results, lambda record: record.ttft),
        _cumulative("Time per output token", results, lambda record: record.tpot),
        _cumulative("End to end", results, lambda record: record.latency),
        bars("Mean queueing time", [(result.name, result.queue_time.mean) for result in results], seconds),
        _over_time("KV blocks in use", results, lambda point: point.num_used_blocks),
        _over_time("Running requests", results, lambda point: point.num_running),
        _over_time("Waiting requests", results, lambda point: point.num_waiting),
        bars(
            "Fairness (Jain, of shares served)",
            [(result.name, result.fairness) for result in results],
            lambda value: f"{value:.3f}",
        ),
    ]


def _cumulative(title: str, results: Sequence[SimulationResult], pick: Callable[[RequestRecord], float | None]) -> str:
    curves = []
    for series, result in enumerate(results):
        ordered = sorted(value for record in result.requests if (value := pick(record)) is not None)
        curves.append(Line(series, result.name, [(ordered[at], (at + 1) / len(ordered)) for at in _spread(len(ordered))]))
    label = "at most so long, share of requests"
    return lines(title, curves, x_label=label, x_format=seconds, y_format=_percent, log_x=True)


def _over_time(title: str, results: Sequence[SimulationResult], pick: Callable[[TimelinePoint], int]) -> str:
    """Summed over replicas: each holds its last value until its next point."""
    curves = []
    for series, result in enumerate(results):
        changes = sorted(
            (point.time, number, pick(point)) for number, one in enumerate(result.replicas) for point in one.timeline
        )
        latest = [0] * len(result.replicas)
        points: list[tuple[float, float]] = []
        for moment, group in groupby(changes, key=lambda change: change[0]):
            for _, replica, value in group:
                latest[replica] = value
            points.append((moment, float(sum(latest))))
        curves.append(Line(series, result.name, [points[at] for at in _spread(len(points))]))
    return lines(title, curves, x_label="virtual time", x_format=seconds, y_format=number)


def _figures(results: Sequence[SimulationResult]) -> str:
    return _table(("", *(result.name for result in results)), [(label, *map(value, results)) for label, value in ROWS])


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    header = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{header}</tr></thead><tbody>{body}</tbody></table></div>'


def _spread(count: int) -> list[int]:
    """At most 300 places among ``count``, the first and the last included."""
    if count <= MAX_POINTS:
        return list(range(count))
    return [round(number * (count - 1) / (MAX_POINTS - 1)) for number in range(MAX_POINTS)]


def _percent(value: float) -> str:
    return f"{value:.0%}" if value in (0.0, 1.0) or value >= 0.1 else f"{value:.1%}"
