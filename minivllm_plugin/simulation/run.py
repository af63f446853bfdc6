"""``simulate()``: a trace, policies and a cost model in; figures out. Replicas advance together, from arrival to arrival.

Nothing here is concurrent but :func:`compare`, which may give each of its simulations a process of its own.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as SequenceABC
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from minivllm_plugin.config import check_integer
from minivllm_plugin.errors import ConfigError
from minivllm_plugin.simulation.cost_model import CostFunction, CostModel
from minivllm_plugin.simulation.records import RequestRecord
from minivllm_plugin.simulation.replica import Replica
from minivllm_plugin.simulation.result import ReplicaFigures, SimulationResult
from minivllm_plugin.simulation.routers import Router, make_router, route
from minivllm_plugin.simulation.settings import Settings
from minivllm_plugin.simulation.trace import Trace, TraceRequest
from minivllm_plugin.simulation.trace_files import read_trace

__all__ = ["BUILT_IN_ORDERS", "compare", "simulate", "variant"]

TraceLike = Trace | str | Path | Iterable[TraceRequest]
BUILT_IN_ORDERS = ("fcfs", "priority")
"""Names that :func:`compare` takes for the engine's own orders; every other one is a scheduling policy."""


def simulate(
    trace: TraceLike,
    policies: SequenceABC[Any] = (),
    cost_model: CostFunction | None = None,
    *,
    replicas: int = 1,
    router: str | Router = "round_robin",
    leap: bool = True,
    record_tokens: bool = False,
    name: str | None = None,
    **settings: Any,
) -> SimulationResult:
    """Run a trace through the real scheduler under a virtual clock.

    Args:
        trace: a Trace, a file that :func:`read_trace` understands, or requests.
        policies: scheduling policies, by name or as plugin objects; several replicas share an object.
        cost_model: seconds of a step from its :class:`StepWork`; default :meth:`CostModel.illustrative`.
        replicas: engines of equal settings behind ``router``.
        router: ``round_robin``, ``least_loaded``, ``prefix_aware``, or a callable (see :mod:`.routers`).
        leap: leap over steps without decisions; changes the time that it takes and nothing else.
        record_tokens: keep the time of every token in ``requests[i].token_times``.
        settings: fields of :class:`Settings`: ``num_blocks``, ``block_size``, ``max_num_sequences``, ``policy``, …

    Raises:
        ConfigError: an impossible setting, trace or answer of the cost model or router.
        PluginError: a policy cannot be had or fails.
    """
    began = time.perf_counter()
    trace = _as_trace(trace)
    check_integer("replicas", replicas, at_least=1)
    if isinstance(policies, str):
        policies = (policies,)
    unknown = sorted(set(settings) - set(Settings.__dataclass_fields__))
    if unknown:
        raise ConfigError(f"unknown setting {unknown[0]!r}; known are {', '.join(Settings.__dataclass_fields__)}")
    made = Settings(policies=tuple(policies), **settings)
    cost = CostModel.illustrative() if cost_model is None else cost_model
    chosen_router = make_router(router)
    engines = [Replica(made, trace, cost, number=number, leap=leap, record_tokens=record_tokens) for number in range(replicas)]
    records, served = _run(engines, trace, chosen_router)
    first = trace.requests[0].arrival
    ends = [record.finished for record in records if record.finished is not None]
    size = made.resolved_block_size(trace)
    return SimulationResult(
        name=name or _name(made, replicas, router),
        trace=trace.name,
        settings=_describe(made, trace, replicas, router, cost),
        makespan=max(ends, default=first) - first,
        requests=tuple(records),
        replicas=tuple(_figures(engine, size) for engine in engines),
        served_at_last_arrival=served,
        wall_seconds=time.perf_counter() - began,
    )


def compare(
    trace: TraceLike,
    variants: SequenceABC[str] | Mapping[str, Mapping[str, Any]],
    cost_model: CostFunction | None = None,
    *,
    processes: int = 1,
    **common: Any,
) -> list[SimulationResult]:
    """The same trace under several variants.

    Args:
        variants: names: ``fcfs`` and ``priority`` are the engine's own orders, others are policies, several joined by ``+``; or
            name -> arguments of :func:`simulate`.
        processes: simulations at a time. More than 1 needs arguments that can be pickled.
        common: arguments of all of them.
    """
    check_integer("processes", processes, at_least=1)
    trace = _as_trace(trace)
    named = variants if isinstance(variants, Mapping) else {name: variant(name) for name in variants}
    jobs = [{**common, **arguments, "name": name} for name, arguments in named.items()]
    if processes == 1 or len(jobs) < 2:
        return [_job(trace, cost_model, job) for job in jobs]
    with ProcessPoolExecutor(min(processes, len(jobs)), mp_context=get_context("spawn")) as pool:
        pending = [pool.submit(_job, trace, cost_model, job) for job in jobs]
        return [future.result() for future in pending]


def variant(name: str) -> dict[str, Any]:
    """Arguments of :func:`simulate` for a name such as ``fcfs``, ``sjf`` or ``lpm+slru``."""
    parts = [part.strip() for part in name.split("+") if part.strip()]
    if not parts:
        raise ConfigError(f"a variant is named by policies joined with '+', such as fcfs or lpm+slru; got {name!r}")
    arguments: dict[str, Any] = {"policies": tuple(part for part in parts if part not in BUILT_IN_ORDERS)}
    if "priority" in parts:
        arguments["policy"] = "priority"
    return arguments


def _job(trace: Trace, cost_model: CostFunction | None, arguments: Mapping[str, Any]) -> SimulationResult:
    return simulate(trace, cost_model=cost_model, **arguments)


def _run(engines: list[Replica], trace: Trace, router: Router) -> tuple[list[RequestRecord], dict[str, int]]:
    """All requests, and what each tenant was served by the last arrival."""
    records: list[RequestRecord] = []
    loads = [0] * len(engines)
    served: dict[str, int] = {}
    last = len(trace) - 1
    for index, request in enumerate(trace):
        for number, engine in enumerate(engines):
            engine.advance(request.arrival)
            loads[number] -= _collect(engine, request.arrival)
        if index == last:
            served = _served(engines, records)
        chosen = route(router, index, request, trace.block_tokens, loads) if len(engines) > 1 else 0
        record = engines[chosen].submit(index, request)
        if record.rejected is None:
            loads[chosen] += record.num_prompt_tokens + record.num_output_tokens
        records.append(record)
    for engine in engines:
        engine.advance()
    return records, served


def _collect(engine: Replica, moment: float) -> int:
    """Tokens asked for in requests that have ended by ``moment``; those that end later in the current step stay for later."""
    tokens = 0
    while engine.finished:
        record = engine.finished[0]
        assert record.finished is not None
        if record.finished > moment:
            break
        engine.finished.popleft()
        tokens += record.num_prompt_tokens + record.num_output_tokens
    return tokens


def _served(engines: list[Replica], records: list[RequestRecord]) -> dict[str, int]:
    served: dict[str, int] = {}
    for record in records:
        served.setdefault(record.tenant, 0)
        if record.finished is not None:
            served[record.tenant] += record.num_prompt_tokens + record.num_completion_tokens
    for engine in engines:
        for tenant, tokens in engine.service().items():
            served[tenant] += tokens
    return served


def _figures(engine: Replica, block_size: int) -> ReplicaFigures:
    scheduler = engine.scheduler
    return ReplicaFigures.of(
        engine.timeline,
        num_requests=len(engine.records),
        num_leapt_steps=engine.num_leapt_steps,
        num_blocks=scheduler.block_manager.num_blocks,
        block_size=block_size,
        num_preemptions=scheduler.num_preemptions,
        num_evicted_blocks=scheduler.block_manager.statistics.evicted_blocks,
    )


def _as_trace(trace: TraceLike) -> Trace:
    if isinstance(trace, Trace):
        return trace
    if isinstance(trace, str | Path):
        return read_trace(trace)
    made = Trace(tuple(trace))
    for request in made:
        request.check(made.block_tokens)
    return made


def _label(thing: Any) -> str:
    if isinstance(thing, str):
        return thing
    return str(getattr(thing, "minivllm_name", None) or getattr(thing, "__name__", None) or type(thing).__name__)


def _name(settings: Settings, replicas: int, router: str | Router) -> str:
    parts = [_label(policy) for policy in settings.policies]
    name = "+".join(parts if settings.policy == "fcfs" and parts else [settings.policy, *parts])
    return name if replicas == 1 else f"{name}, {replicas} x {_label(router)}"


def _describe(
    settings: Settings, trace: Trace, replicas: int, router: str | Router, cost: Callable[..., float]
) -> dict[str, Any]:
    described = {name: getattr(settings, name) for name in Settings.__dataclass_fields__}
    described |= {
        "num_blocks": settings.resolved_num_blocks(trace),
        "block_size": settings.resolved_block_size(trace),
        "policies": [_label(policy) for policy in settings.policies],
        "replicas": replicas,
        "router": _label(router) if replicas > 1 else None,
        "duration": trace.duration,
    }
    if isinstance(cost, CostModel):
        described["cost_model"] = {name: getattr(cost, name) for name in CostModel.__dataclass_fields__ if name != "error"}
        described["cost_model"]["error"] = None if math.isnan(cost.error) else cost.error
    else:
        described["cost_model"] = _label(cost)
    return described
