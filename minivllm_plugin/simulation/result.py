"""What a simulation found. Frozen; figures are derived once, when it is made."""

import math
from collections.abc import Mapping
from collections.abc import Sequence as SequenceABC
from dataclasses import asdict, dataclass, field
from typing import Any

from minivllm_plugin.simulation.metrics import Distribution, TenantFigures, jain_index, per_tenant
from minivllm_plugin.simulation.records import RequestRecord, Timeline, TimelinePoint

__all__ = ["ReplicaFigures", "SimulationResult"]


@dataclass(frozen=True, slots=True)
class ReplicaFigures:
    """One replica.

    Attributes:
        busy_seconds: spent in steps.
        mean_usage: share of its pool that was in use, averaged over the time of its steps; ``peak_usage`` the most.
        timeline: a sample of its steps, at most 1,024.
    """

    num_requests: int
    num_steps: int
    num_leapt_steps: int
    num_batched_tokens: int
    busy_seconds: float
    num_blocks: int
    block_size: int
    mean_usage: float
    peak_usage: float
    num_preemptions: int
    num_evicted_blocks: int
    timeline: tuple[TimelinePoint, ...]

    @classmethod
    def of(
        cls,
        timeline: Timeline,
        *,
        num_requests: int,
        num_leapt_steps: int,
        num_blocks: int,
        block_size: int,
        num_preemptions: int,
        num_evicted_blocks: int,
    ) -> "ReplicaFigures":
        busy = timeline.busy_seconds
        return cls(
            num_requests,
            timeline.num_steps,
            num_leapt_steps,
            timeline.num_batched_tokens,
            busy,
            num_blocks,
            block_size,
            timeline.block_seconds / busy / num_blocks if busy else 0.0,
            timeline.peak_blocks / num_blocks,
            num_preemptions,
            num_evicted_blocks,
            tuple(timeline.points),
        )


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """Figures of one run. Times are virtual seconds, except ``wall_seconds``.

    Attributes:
        name: of what was simulated, for comparisons: policies, router.
        settings: what was asked for.
        makespan: from the first arrival to the last end.
        requests: every request, in the order of the trace.
        served_at_last_arrival: tenant -> tokens; see :class:`~minivllm_plugin.simulation.metrics.TenantFigures`.
        wall_seconds: what the simulation itself took.
    """

    name: str
    trace: str
    settings: Mapping[str, Any]
    makespan: float
    requests: tuple[RequestRecord, ...]
    replicas: tuple[ReplicaFigures, ...]
    served_at_last_arrival: Mapping[str, int]
    wall_seconds: float = field(compare=False)

    num_finished: int = field(init=False)
    num_rejected: int = field(init=False)
    num_output_tokens: int = field(init=False)
    ttft: Distribution = field(init=False)
    tpot: Distribution = field(init=False)
    latency: Distribution = field(init=False)
    queue_time: Distribution = field(init=False)
    tenants: tuple[TenantFigures, ...] = field(init=False)

    def __post_init__(self) -> None:
        requests = self.requests
        derived = {
            "num_finished": sum(record.finished is not None for record in requests),
            "num_rejected": sum(record.rejected is not None for record in requests),
            "num_output_tokens": sum(record.num_completion_tokens for record in requests),
            "ttft": Distribution.of(record.ttft for record in requests),
            "tpot": Distribution.of(record.tpot for record in requests),
            "latency": Distribution.of(record.latency for record in requests),
            "queue_time": Distribution.of(record.queue_time for record in requests),
            "tenants": per_tenant(requests, self.served_at_last_arrival),
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    @property
    def request_throughput(self) -> float:
        """Finished requests per virtual second."""
        return self.num_finished / self.makespan if self.makespan else math.nan

    @property
    def output_throughput(self) -> float:
        """Generated tokens per virtual second."""
        return self.num_output_tokens / self.makespan if self.makespan else math.nan

    @property
    def total_throughput(self) -> float:
        """Prompt and generated tokens of finished requests per virtual second."""
        finished = [record for record in self.requests if record.finished is not None]
        tokens = sum(record.num_prompt_tokens + record.num_completion_tokens for record in finished)
        return tokens / self.makespan if self.makespan else math.nan

    @property
    def token_hit_rate(self) -> float:
        """Of the prompt tokens of all requests that ran, those found in the prefix cache at the first admission."""
        return self._ratio("num_cached_tokens", "num_prompt_tokens")

    @property
    def block_hit_rate(self) -> float:
        """The same in blocks of the prompts, the partly filled last ones included."""
        return self._ratio("num_hit_blocks", "num_prompt_blocks")

    @property
    def num_preemptions(self) -> int:
        return sum(replica.num_preemptions for replica in self.replicas)

    @property
    def num_evicted_blocks(self) -> int:
        return sum(replica.num_evicted_blocks for replica in self.replicas)

    @property
    def num_steps(self) -> int:
        return sum(replica.num_steps for replica in self.replicas)

    @property
    def num_leapt_steps(self) -> int:
        """Of these, leapt over: they cost the simulator little and change nothing."""
        return sum(replica.num_leapt_steps for replica in self.replicas)

    @property
    def mean_usage(self) -> float:
        """Share of the KV pools in use, averaged over the time in which replicas were busy."""
        busy = sum(replica.busy_seconds for replica in self.replicas)
        return sum(one.mean_usage * one.busy_seconds for one in self.replicas) / busy if busy else 0.0

    @property
    def fairness(self) -> float:
        """Jain's index over the tenants' shares: what each was served by the last arrival, of what it asked for."""
        return jain_index([tenant.share for tenant in self.tenants])

    @property
    def share_gap(self) -> float:
        """The largest of these shares less the smallest."""
        shares = [tenant.share for tenant in self.tenants]
        return max(shares) - min(shares) if shares else 0.0

    @property
    def service_fairness(self) -> float:
        """Jain's index over the tokens themselves that each tenant was served by the last arrival."""
        return jain_index([tenant.served_tokens for tenant in self.tenants])

    def to_dict(self, *, requests: bool = False, timeline: bool = True) -> dict[str, Any]:
        """Everything as JSON can hold it (NaN becomes None); each request only if asked for."""
        made: dict[str, Any] = {
            "name": self.name,
            "trace": self.trace,
            "settings": dict(self.settings),
            "num_requests": len(self.requests),
        }
        made |= {name: getattr(self, name) for name in FIGURES}
        made |= {name: asdict(getattr(self, name)) for name in ("ttft", "tpot", "latency", "queue_time")}
        made["tenants"] = [{**asdict(tenant), "share": tenant.share} for tenant in self.tenants]
        made["replicas"] = [_replica(replica, timeline) for replica in self.replicas]
        if requests:
            made["requests"] = [_request(record) for record in self.requests]
        return {name: _without_nan(value) for name, value in made.items()}

    def _ratio(self, part: str, whole: str) -> float:
        ran: SequenceABC[RequestRecord] = [record for record in self.requests if record.scheduled is not None]
        total = sum(getattr(record, whole) for record in ran)
        return sum(getattr(record, part) for record in ran) / total if total else 0.0


FIGURES = (
    *("num_finished", "num_rejected", "num_output_tokens", "makespan"),
    *("request_throughput", "output_throughput", "total_throughput"),
    *("token_hit_rate", "block_hit_rate", "num_preemptions", "num_evicted_blocks", "mean_usage"),
    *("fairness", "share_gap", "service_fairness", "num_steps", "num_leapt_steps", "wall_seconds"),
)


def _replica(replica: ReplicaFigures, timeline: bool) -> dict[str, Any]:
    made = asdict(replica)
    points = made.pop("timeline")
    if timeline:
        made["timeline"] = [list(point) for point in points]
    return made


def _request(record: RequestRecord) -> dict[str, Any]:
    made = asdict(record)
    made["token_times"] = None if record.token_times is None else list(record.token_times)
    return made


def _without_nan(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _without_nan(entry) for key, entry in value.items()}
    return [_without_nan(entry) for entry in value] if isinstance(value, list | tuple) else value
