"""Trace events of an engine: which spans, instants and counters its records become. Writes into a TraceFile.

Owns nothing but the spans that are open. Shapes of the trace event format used here: ``X`` a whole span, ``B`` and ``E`` its two
ends, ``i`` an instant, ``C`` counters, ``M`` names of tracks. Fixed parts are spelt out: a step costs a few strings, no
dictionary.
"""

import json
from collections.abc import Mapping, Sequence

from minivllm_plugin.events import (
    AllBlocksCleared,
    BlockEvent,
    BlockRemoved,
    BlocksAllocated,
    BlocksFreed,
    BlocksHit,
    RequestOutcome,
    StepPlan,
    StepReport,
)
from minivllm_plugin.plugins.first_party.trace_file import TraceFile, microseconds
from minivllm_plugin.views import EngineState, RequestView

__all__ = ["EngineTracks", "RequestTrack"]

ENGINE, REQUESTS = 1, 2  # "processes" of the trace
STEPS, BLOCKS = 1, 2  # "threads" of the engine
MAX_BLOCK_IDS = 32  # shown of one event


class EngineTracks:
    """Steps, block events and counters.

    Args:
        name: of the model.
    """

    def __init__(self, file: TraceFile, name: str) -> None:
        self._file = file
        self._plan: StepPlan | None = None
        self._shown: EngineState | None = None
        file.add(_name("process_name", ENGINE, 0, f"engine {name}"))
        file.add(_name("process_name", REQUESTS, 0, "requests"))
        file.add(_name("thread_name", ENGINE, STEPS, "steps"))
        file.add(_name("thread_name", ENGINE, BLOCKS, "blocks"))

    def step_started(self, plan: StepPlan) -> None:
        self._plan = plan

    def step_finished(self, report: StepReport) -> None:
        """The step and its phases. Plugins are what lies between schedule and run; what they take between two steps is in
        ``hook_us``."""
        plan, state = self._plan, report.state
        self._plan = None
        if plan is None:  # it began before anybody listened
            return
        end = state.now
        scheduled = plan.state.now
        start = scheduled - report.schedule_seconds
        postprocess = end - report.postprocess_seconds
        run = max(postprocess - report.run_seconds, scheduled)
        num_prompt = sum(tokens for tokens, is_prompt in zip(plan.num_tokens, plan.is_prompt, strict=True) if is_prompt)
        self._span(
            f"step {state.step}",
            start,
            end,
            f'{{"step":{state.step},"requests":{len(plan.request_ids)},"tokens":{report.num_batched_tokens},'
            f'"prompt_tokens":{num_prompt},"new_tokens":{len(report.token_ids)},"budget":{plan.budget},'
            f'"preempted":{len(plan.preempted)},"hook_us":{microseconds(report.hook_seconds)}}}',
        )
        self._span("schedule", start, scheduled)
        self._span("plugins", scheduled, run)
        self._span("run", run, postprocess)
        self._span("postprocess", postprocess, end)
        seconds = max(end - start, 1e-9)
        self._count(
            "tokens/s",
            start,
            f'"generated":{len(report.token_ids) / seconds:.1f},"computed":{report.num_batched_tokens / seconds:.1f}',
        )
        self._count_state(state)
        if not state.num_running and not state.num_waiting:
            self._count("tokens/s", end, '"generated":0,"computed":0')

    def blocks_changed(self, events: Sequence[BlockEvent], now: float) -> None:
        """Instants at ``now``, which is when they were told, at the end of their step."""
        for event in events:
            name, args = _block_event(event)
            self._file.add(
                f'{{"ph":"i","s":"t","pid":{ENGINE},"tid":{BLOCKS},"ts":{microseconds(now)},"cat":"blocks","name":"{name}",'
                f'"args":{{{args}}}}}'
            )

    def died(self, error: BaseException, plan: StepPlan | None, now: float) -> None:
        """An instant over all tracks. The text of ``error`` is left out: it might quote a request."""
        args = {"error": type(error).__name__, "requests": list(plan.request_ids) if plan is not None else []}
        self._file.add(
            f'{{"ph":"i","s":"g","pid":{ENGINE},"tid":{STEPS},"ts":{microseconds(now)},"cat":"engine","name":"engine died",'
            f'"args":{json.dumps(args)}}}'
        )

    def _span(self, name: str, start: float, end: float, args: str = "{}") -> None:
        began, ended = round(start * 1e9), round(end * 1e9)
        length = max(ended - began, 0)
        self._file.add(
            f'{{"ph":"X","pid":{ENGINE},"tid":{STEPS},"ts":{began // 1000}.{began % 1000:03d},'
            f'"dur":{length // 1000}.{length % 1000:03d},"cat":"step","name":"{name}","args":{args}}}'
        )

    def _count(self, name: str, now: float, args: str) -> None:
        self._file.add(f'{{"ph":"C","pid":{ENGINE},"tid":0,"ts":{microseconds(now)},"name":"{name}","args":{{{args}}}}}')

    def _count_state(self, state: EngineState) -> None:
        shown, self._shown = self._shown, state
        cached, blank = state.num_cached_blocks, state.num_free_blocks - state.num_cached_blocks
        if shown is None or (shown.num_free_blocks, shown.num_cached_blocks) != (state.num_free_blocks, cached):
            self._count("blocks", state.now, f'"used":{state.num_used_blocks},"cached":{cached},"free":{blank}')
        if shown is None or (shown.num_running, shown.num_waiting) != (state.num_running, state.num_waiting):
            self._count("queues", state.now, f'"running":{state.num_running},"waiting":{state.num_waiting}')


class RequestTrack:
    """One request: a span of its whole life; in it ``queued``, ``prefill`` and ``decode``, one after another; and in the last two
    a ``preempted`` for each time that it waited again. Spans are begun and ended as it happens, so a crash loses only their ends.

    Attributes:
        has_first_token: :meth:`first_token` was called.
    """

    __slots__ = ("_file", "_open", "_tid", "has_first_token")

    def __init__(self, file: TraceFile, request: RequestView) -> None:
        self.has_first_token = False
        self._file = file
        self._tid = request.arrival + 1
        self._open: list[str] = []  # names, the innermost last
        file.add(_name("thread_name", REQUESTS, self._tid, request.request_id))
        file.add(
            f'{{"ph":"M","pid":{REQUESTS},"tid":{self._tid},"name":"thread_sort_index","args":{{"sort_index":{self._tid}}}}}'
        )
        args = {"prompt_tokens": request.num_prompt_tokens, "priority": request.priority}
        if request.max_tokens is not None:
            args["max_tokens"] = request.max_tokens
        self._begin(f"request {request.request_id}", request.arrival_time, json.dumps(args))
        self._begin("queued", request.arrival_time)

    @staticmethod
    def rejected(file: TraceFile, request: RequestView, now: float) -> None:
        """An instant for a request that a policy refused; it has no track."""
        file.add(
            f'{{"ph":"i","s":"p","pid":{REQUESTS},"tid":0,"ts":{microseconds(now)},"cat":"request","name":"rejected",'
            f'"args":{{"request_id":{json.dumps(request.request_id)}}}}}'
        )

    def scheduled(self, now: float) -> None:
        """It is in a batch: for the first time, or again."""
        if self._open[-1] == "queued":
            self._end(now)
            self._begin("prefill", now)
        elif self._open[-1] == "preempted":
            self._end(now)

    def preempted(self, now: float) -> None:
        if self._open[-1] != "preempted":
            self._begin("preempted", now)

    def first_token(self, now: float) -> None:
        self.has_first_token = True
        if self._open[-1] == "prefill":
            self._end(now)
            self._begin("decode", now)

    def finished(self, outcome: RequestOutcome) -> None:
        args = {
            "reason": outcome.reason,
            "prompt_tokens": outcome.num_prompt_tokens,
            "completion_tokens": outcome.num_completion_tokens,
            "cached_tokens": outcome.num_cached_tokens,
            "preemptions": outcome.num_preemptions,
        }
        self._end_all(outcome.finished_time, args)

    def cut_off(self, because: str, now: float) -> None:
        """It ends with its engine."""
        self._end_all(now, {"reason": because})

    def _begin(self, name: str, now: float, args: str = "{}") -> None:
        self._open.append(name)
        self._file.add(
            f'{{"ph":"B","pid":{REQUESTS},"tid":{self._tid},"ts":{microseconds(now)},"cat":"request","name":{json.dumps(name)},'
            f'"args":{args}}}'
        )

    def _end(self, now: float, args: str = "{}") -> None:
        name = self._open.pop()
        self._file.add(
            f'{{"ph":"E","pid":{REQUESTS},"tid":{self._tid},"ts":{microseconds(now)},"cat":"request","name":{json.dumps(name)},'
            f'"args":{args}}}'
        )

    def _end_all(self, now: float, args: Mapping[str, object]) -> None:
        while len(self._open) > 1:
            self._end(now)
        self._end(now, json.dumps(dict(args)))


def _block_event(event: BlockEvent) -> tuple[str, str]:
    """Name and arguments. Tokens, hashes and salts are left out: they tell of the prompt."""
    if isinstance(event, AllBlocksCleared):
        return "cleared", ""
    ids = ",".join(map(str, event.block_ids[:MAX_BLOCK_IDS]))
    blocks = f'"num_blocks":{len(event.block_ids)},"block_ids":[{ids}]'
    if isinstance(event, BlocksAllocated | BlocksHit | BlocksFreed):
        name = "allocated" if isinstance(event, BlocksAllocated) else "hit" if isinstance(event, BlocksHit) else "freed"
        return name, f'"request_id":{json.dumps(event.request_id)},{blocks}'
    return (event.cause if isinstance(event, BlockRemoved) else "stored"), blocks


def _name(kind: str, pid: int, tid: int, name: str) -> str:
    return f'{{"ph":"M","pid":{pid},"tid":{tid},"name":"{kind}","args":{{"name":{json.dumps(name)}}}}}'
