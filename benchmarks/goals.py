"""The table of goals of ``docs/performance.md``: what was asked, the best peer, and what was reached, out of reports.

Knows what is asked; what was measured it takes from the reports only, and what is in none of them is "not measured".
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

__all__ = ["COLUMNS", "NOT_MEASURED", "goal_rows", "reports_named"]

COLUMNS = ("goal", "asked", "best peer", "ours", "ratio", "least–most over rounds", "reached")
NOT_MEASURED = "not measured"

Report = Mapping[str, Any]
Reports = Mapping[str, Report]
Found = tuple[str, float]
"""Of a report of this engine alone: what is shown, and the value that is compared with what was asked."""


@dataclass(frozen=True, slots=True)
class PeerGoal:
    """To be so many times as good as the best peer in one case. ``modes`` are this engine's, the best one counts."""

    title: str
    case: str
    modes: Sequence[str]
    times: float

    def row(self, reports: Sequence[Report]) -> list[str]:
        asked = f"{self.times:g} x the best peer"
        rows = [row for report in reports for row in report["summary"] if row["case"] == self.case and row["ours"] in self.modes]
        if not rows:
            return [self.title, asked, *[NOT_MEASURED] * 4, ""]
        # The best peer is the one that this engine's best mode is least ahead of.
        best = {peer: max((row for row in rows if row["peer"] == peer), key=_ratio) for peer in {row["peer"] for row in rows}}
        row = min(best.values(), key=_ratio)
        return [
            self.title,
            asked,
            f"{row['peer']}: {_speed(row, 'peer_median')}",
            f"{row['ours']}: {_speed(row, 'ours_median')}",
            f"**{row['ratio']:g}**",
            f"{row['ratio_least']:g}–{row['ratio_most']:g}",
            "yes" if row["ratio"] >= self.times else "no",
        ]


@dataclass(frozen=True, slots=True)
class OwnGoal:
    """A limit that this engine keeps by itself."""

    title: str
    report: str
    limit: float
    unit: str
    find: Callable[[Report], Found | None]

    def row(self, reports: Reports) -> list[str]:
        asked = f"at most {self.limit:g} {self.unit}"
        found = self.find(reports[self.report]) if self.report in reports else None
        if found is None:
            return [self.title, asked, "", NOT_MEASURED, "", "", ""]
        shown, value = found
        return [self.title, asked, "", shown, "", "", "yes" if value <= self.limit else "no"]


def goal_rows(reports: Reports, pattern: str | None = None) -> Iterator[list[str]]:
    """A row of :data:`COLUMNS` per goal; with a ``pattern`` only those against the peers, out of reports of such names."""
    against = reports_named(reports, pattern or PEERS)
    for goal in AGAINST_PEERS:
        yield goal.row(against)
    for limit in () if pattern else ALONE:
        yield limit.row(reports)


def reports_named(reports: Reports, pattern: str) -> list[Report]:
    """Those whose name is ``pattern``, in which ``*`` stands for anything; in the order of their names."""
    return [reports[name] for name in sorted(reports) if fnmatchcase(name, pattern)]


def _ratio(row: Mapping[str, Any]) -> float:
    return float(row["ratio"])


def _speed(row: Mapping[str, Any], name: str) -> str:
    return f"{row[name]:,.0f} {row['unit']}" if row[name] >= 1000 else f"{row[name]:g} {row['unit']}"


def _ready(report: Report) -> Found | None:
    row = next((row for row in report["summary"] if row["phase"] == "engine ready, in all"), None)
    return None if row is None else (f"{row['seconds']:g} s ({row['fastest_s']:g}–{row['slowest_s']:g})", row["seconds"])


def _int8_loss(report: Report) -> Found | None:
    """The most that int8 costs, over the groups of activations that were tried, with the cache that it has by itself."""
    rows = [row for row in report["summary"] if row["weights"] == "int8" and row["cache"] == "bfloat16"]
    shown = ", ".join(f"{row['percent_over_float32']:+g} % (groups of {row['activation_group']})" for row in rows)
    return (shown, max(row["percent_over_float32"] for row in rows)) if rows else None


def _outside(report: Report) -> Found | None:
    row = next((row for row in report["summary"] if row["part"] == "outside kernels"), None)
    if row is None or report["settings"]["num_sequences"] != 32:
        return None
    return f"{row['median_ms']:g} ms (p90 {row['p90_ms']:g})", row["median_ms"]


def _memory(report: Report) -> Found | None:
    resident, peak = report["facts"].get("memory_resident_bytes"), report["facts"].get("memory_peak_bytes")
    return None if resident is None else (f"{resident / 1e6:.0f} MB, at its peak {peak / 1e6:.0f} MB", peak / 1e6)


QUANTISED, EXACT = ("int8", "int4"), ("bfloat16", "float32")
WITHOUT_GUESSES = tuple(f"{mode} num_speculative_tokens=0" for mode in QUANTISED)
PEERS = "peers-*"
AGAINST_PEERS = (
    PeerGoal("n=1 decode, int8 or int4", "n=1", QUANTISED, 2.0),
    PeerGoal("the same without prompt lookup", "n=1", WITHOUT_GUESSES, 2.0),
    PeerGoal("n=8, int8", "n=8", ("int8",), 1.75),
    PeerGoal("n=32, int8", "n=32", ("int8",), 2.0),
    PeerGoal("the same with keys and values of int8", "n=32", ("int8 kv_cache_dtype=int8",), 2.0),
    PeerGoal("n=32, 16- or 32-bit", "n=32", EXACT, 1.3),
    PeerGoal("512-token prefill, int8", "prefill 512", ("int8",), 1.6),
)
ALONE = (
    OwnGoal("engine ready, imports included, files cached", "startup", 3.0, "s", _ready),
    OwnGoal("perplexity of int8 over float32", "perplexity", 1.0, "%", _int8_loss),
    OwnGoal("Python time per step outside kernels, n=32", "step", 1.5, "ms", _outside),
    OwnGoal("resident memory, n=32, int8, 2,048-token window", "step", 900.0, "MB", _memory),
)
