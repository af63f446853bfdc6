"""Which figures are shown, in which order and how written: the same in the terminal and on the page."""

import math
from collections.abc import Callable, Sequence

from minivllm_plugin.simulation.metrics import Distribution, TenantFigures
from minivllm_plugin.simulation.result import SimulationResult

__all__ = ["ROWS", "TENANT_COLUMNS", "number", "seconds", "tenant_row"]


def number(value: float) -> str:
    """With as many digits as can be read at a glance."""
    if not math.isfinite(value):
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def seconds(value: float) -> str:
    """In s or ms."""
    if not math.isfinite(value):
        return "-"
    return f"{value:,.2f} s" if value >= 10 else f"{value:.3f} s" if value >= 1 else f"{value * 1e3:.1f} ms"


def _times(name: str, pick: Callable[[SimulationResult], Distribution]) -> list[tuple[str, Callable[[SimulationResult], str]]]:
    def percentiles(result: SimulationResult) -> str:
        found = pick(result)
        return " / ".join(seconds(value) for value in (found.p50, found.p90, found.p99))

    return [(f"{name}, mean", lambda result: seconds(pick(result).mean)), (f"{name}, p50 / p90 / p99", percentiles)]


ROWS: Sequence[tuple[str, Callable[[SimulationResult], str]]] = (
    ("finished", lambda result: number(result.num_finished)),
    ("rejected", lambda result: number(result.num_rejected)),
    ("makespan", lambda result: seconds(result.makespan)),
    ("requests/s", lambda result: number(result.request_throughput)),
    ("output tokens/s", lambda result: number(result.output_throughput)),
    ("all tokens/s", lambda result: number(result.total_throughput)),
    *_times("TTFT", lambda result: result.ttft),
    *_times("TPOT", lambda result: result.tpot),
    *_times("end to end", lambda result: result.latency),
    *_times("queueing", lambda result: result.queue_time),
    ("prefix hits, of tokens", lambda result: f"{result.token_hit_rate:.4f}"),
    ("prefix hits, of blocks", lambda result: f"{result.block_hit_rate:.4f}"),
    ("preemptions", lambda result: number(result.num_preemptions)),
    ("evicted blocks", lambda result: number(result.num_evicted_blocks)),
    ("KV usage, mean / peak", lambda result: f"{result.mean_usage:.1%} / {max(one.peak_usage for one in result.replicas):.1%}"),
    ("fairness of shares (Jain)", lambda result: f"{result.fairness:.4f}"),
    ("largest less smallest share", lambda result: f"{result.share_gap:.4f}"),
    ("steps", lambda result: number(result.num_steps)),
)

TENANT_COLUMNS = (
    "tenant",
    "requests",
    "rejected",
    "tokens asked for",
    "share by last arrival",
    "TTFT p50",
    "TTFT p99",
    "end to end p50",
)


def tenant_row(tenant: TenantFigures) -> tuple[str, ...]:
    """In the order of TENANT_COLUMNS."""
    return (
        tenant.tenant or "(none)",
        number(tenant.num_requests),
        number(tenant.num_rejected),
        number(tenant.demand_tokens),
        f"{tenant.share:.4f}",
        seconds(tenant.ttft.p50),
        seconds(tenant.ttft.p99),
        seconds(tenant.latency.p50),
    )
