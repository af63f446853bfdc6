"""Every hook of the engine: what a plugin may implement, under exactly these names.

A plugin is a module, or an instance of a class, whose functions carry :data:`hookimpl`. Implementations name the arguments
that they want; the rest are left out, and new arguments may be added in later versions.

Three kinds, told apart by their verbs. **Past tense observes** (``minivllm_step_finished``): told what happened, answers
nothing. **Imperative decides** (``minivllm_order_waiting``): a *policy*, asked only when it is named in
``LLM(policies=[…])``; None means "no opinion", the first other answer counts, in the order of that list. **register_
contributes**: called once when the plugin is loaded, fills a registry.

Rules for all observers and policies. They run on the engine thread between two steps, so what they cost, every request
pays; they must not block, and a call back into the engine is refused with EngineError. They get records from
:mod:`minivllm_plugin.views` and :mod:`minivllm_plugin.events`. No hook may be a wrapper or async. What policies answer is
checked: a wrong one can be unfair, never incorrect.

When one raises: an observer is logged once, counted, and taken out after five errors in a row; a policy's decision is
made by the engine, and after three errors in all the policy is taken out. With ``plugin_errors="raise"`` the exception ends the
engine instead: for tests. When one is slow (on average over ``plugin_budget`` of the step, and over a millisecond), it is
reported, then an observer is moved to a thread of its own and a policy is taken out. docs/hooks.md tells it all.

The interface is versioned: :data:`API`. A plugin may say which it needs: ``minivllm_api = ">=1.0,<2"``.
"""

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import pluggy

from minivllm_plugin.events import BlockEvent, RequestOutcome, StepPlan, StepReport
from minivllm_plugin.views import Admit, Budget, CandidateBlock, EngineState, Reject, RequestView

if TYPE_CHECKING:
    import typer

    from minivllm_plugin.extensions.adapters import AdapterRegistry
    from minivllm_plugin.extensions.attention import AttentionBackendRegistry
    from minivllm_plugin.extensions.logits import LogitsProcessorRegistry
    from minivllm_plugin.extensions.metrics import MetricRegistry
    from minivllm_plugin.extensions.models import ModelRegistry
    from minivllm_plugin.extensions.parsers import ParserRegistry
    from minivllm_plugin.extensions.stopping import StopCriterionRegistry
    from minivllm_plugin.extensions.weights import WeightLoaderRegistry
    from minivllm_plugin.plugins.facade import ConfigDraft, EngineHandle

__all__ = [
    "API",
    "LIFECYCLE_HOOKS",
    "OBSERVER_HOOKS",
    "POLICY_HOOKS",
    "PROJECT",
    "hookimpl",
    "hookspec",
    "minivllm_admit",
    "minivllm_blocks_changed",
    "minivllm_cache_salt",
    "minivllm_configure",
    "minivllm_engine_error",
    "minivllm_engine_started",
    "minivllm_engine_stopped",
    "minivllm_order_eviction",
    "minivllm_order_waiting",
    "minivllm_register_adapters",
    "minivllm_register_attention_backends",
    "minivllm_register_commands",
    "minivllm_register_logits_processors",
    "minivllm_register_metrics",
    "minivllm_register_models",
    "minivllm_register_parsers",
    "minivllm_register_stop_criteria",
    "minivllm_register_weight_loaders",
    "minivllm_request_finished",
    "minivllm_request_queued",
    "minivllm_select_victims",
    "minivllm_step_budget",
    "minivllm_step_finished",
    "minivllm_step_started",
    "version_text",
]

PROJECT = "minivllm"
API = (1, 0)
"""Major and minor version of the hooks, views and events. The minor one grows with every addition."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


# --- lifecycle -------------------------------------------------------------------------------------------------------


@hookspec
def minivllm_configure(config: "ConfigDraft") -> None:
    """Read or change an engine's settings before anything is loaded.

    When: once an engine, on the thread that makes it, after the caller's options were checked.
    Answer: none; set attributes of ``config`` (the fields of EngineConfig). They are checked again afterwards.
    Plugins themselves (``plugins``, ``policies``, ``plugin_errors``, …) are chosen by then.
    On error: the engine does not start; the ConfigError names the plugin. Cost: none while serving.
    """


@hookspec
def minivllm_engine_started(engine: "EngineHandle") -> None:
    """The engine is loaded and serves from now on.

    When: once, on the engine thread. ``engine`` may be kept and used from any thread: ``snapshot()``,
    ``abort(id)``, ``metrics()``, ``plugin_totals()``. It does not keep the engine alive.
    On error: logged; the engine serves without it. Cost: none while serving.
    """


@hookspec
def minivllm_engine_stopped(engine: "EngineHandle", error: BaseException | None) -> None:
    """The engine is closed (``error`` is None) or died of ``error``. The place to close files and sockets.

    When: once, on the engine thread, after the last request was answered; also for an engine that died, but not for one that
    never started. Reaches every plugin, whatever the others raise; an observer that was moved to a thread of its own has heard
    everything else by then. On error: logged. Cost: none while serving.
    """


# --- extension -------------------------------------------------------------------------------------------------------


@hookspec(historic=True)
def minivllm_register_models(registry: "ModelRegistry") -> None:
    """Add model architectures: the name in a checkpoint's ``config.json`` -> class, or dotted path of one.

    When: once, when the plugin is loaded. On error: none of this plugin's hooks is used; the engine starts, unless the
    checkpoint asks for that architecture. Cost: none.
    """


@hookspec(historic=True)
def minivllm_register_attention_backends(registry: "AttentionBackendRegistry") -> None:
    """Add implementations of the kernel ops (attention first of all) for some devices, before or behind the built-in ones.

    When: once, when the plugin is loaded. On error: as for models. Cost: that of the kernels.
    """


@hookspec(historic=True)
def minivllm_register_weight_loaders(registry: "WeightLoaderRegistry") -> None:
    """Add readers of checkpoint files: a file suffix or a ``quantization_config`` method -> loader of named tensors.

    When: once, when the plugin is loaded. On error: as for models. Cost: while a model is loaded.
    """


@hookspec(historic=True)
def minivllm_register_logits_processors(registry: "LogitsProcessorRegistry") -> None:
    """Add logits processors. A request uses one by naming it: ``SamplingParams(extra_args={"name": value})``.

    When: once, when the plugin is loaded; the processor itself is called directly, on the engine thread, once a step for all rows
    that asked for it (rows with a state of their own one by one, unless it says ``repeatable``). On error there: those requests
    fail with RequestFailedError, since a constraint dropped in silence is a wrong answer; their neighbours go on. Cost: what it
    takes a row, in every step with such a row.
    """


@hookspec(historic=True)
def minivllm_register_stop_criteria(registry: "StopCriterionRegistry") -> None:
    """Add conditions that end a request; used by naming it: ``SamplingParams(extra_args={"name": value})``.

    When: once, when the plugin is loaded; the criterion is called on the engine thread after every token of such a request.
    On error there: that request fails with RequestFailedError. Cost: what it takes, a token.
    """


@hookspec(historic=True)
def minivllm_register_parsers(registry: "ParserRegistry") -> None:
    """Add parsers of model output by name: tool calls and reasoning; and chat templates by name.

    When: once, when the plugin is loaded; a parser runs on the caller's thread. On error there: the raw text is returned, with a
    warning. Cost: none for the engine.
    """


@hookspec(historic=True)
def minivllm_register_metrics(registry: "MetricRegistry") -> None:
    """Add metrics: a name and a function of EngineState, asked when somebody collects (``engine.metrics()``, Prometheus).

    When: once, when the plugin is loaded; the function runs on the collecting thread. On error there: that metric is left out of
    the collection and the error is logged once. Cost: none for the engine.
    """


@hookspec(historic=True)
def minivllm_register_commands(cli: "typer.Typer") -> None:
    """Add subcommands to ``minivllm``.

    When: at the start of the command line, if help is shown or the command is none of ours; so it must import nothing heavy.
    On error: the command line works without it and says so. Cost: its import, whenever it is called.
    """


@hookspec(historic=True)
def minivllm_register_adapters(registry: "AdapterRegistry") -> None:
    """Add doors to the engine: a name -> the function behind ``minivllm_plugin.register(name)``. LiteLLM's enters here.

    When: once, when the plugin is loaded. On error: that adapter is missing. Cost: none for the engine.
    """


# --- observation -----------------------------------------------------------------------------------------------------


@hookspec
def minivllm_request_queued(request: RequestView, state: EngineState) -> None:
    """A request was accepted into the waiting queue.

    When: once a request. Cost: about 3 µs a request.
    """


@hookspec
def minivllm_step_started(plan: StepPlan) -> None:
    """The scheduler chose a batch; nothing is computed yet.

    When: once a step. Cost: building the record, about 15 µs at 32 sequences, and what you do with it.
    """


@hookspec
def minivllm_step_finished(report: StepReport) -> None:
    """A step was computed and taken in.

    When: once a step, also for the step in which the last request ends. Cost: as for ``minivllm_step_started``.
    """


@hookspec
def minivllm_blocks_changed(events: Sequence[BlockEvent]) -> None:
    """Blocks were allocated, hit, stored, freed, removed or cleared, in this order. Folded one by one they equal the index.

    When: at the end of a step in which something changed, and after an abort. Nothing is recorded unless
    somebody implements this. Cost: about 1 µs an event.
    """


@hookspec
def minivllm_request_finished(request: RequestView, outcome: RequestOutcome) -> None:
    """A request ended: stop, length, abort, error, or rejected by a policy before it was queued.

    When: exactly once for every queued (or rejected) request, also for those that an engine being closed aborts; not for those
    that die with their engine (``minivllm_engine_error``). Cost: about 3 µs a request.
    """


@hookspec
def minivllm_engine_error(error: BaseException, plan: StepPlan | None) -> None:
    """The engine is about to die of ``error``; ``plan`` is the step that failed, with overlapping steps perhaps one that nobody
    was told of yet. The last chance to write something down.

    When: at most once, before every waiter is failed. On error: logged. Cost: none while serving.
    """


# --- policies --------------------------------------------------------------------------------------------------------


@hookspec(firstresult=True)
def minivllm_admit(request: RequestView, state: EngineState) -> Admit | Reject | None:
    """May this request queue?

    When: once a request, before it is queued (``max_queue_size`` was checked before). Anything but a Reject admits.
    Cost: about 3 µs a request.
    """


@hookspec(firstresult=True)
def minivllm_order_waiting(waiting: Sequence[RequestView], state: EngineState) -> Sequence[str] | None:
    """In which order should these be admitted? They are asked from the front until one does not fit.

    When: in every step with a waiting request and a free place. ``waiting`` is the first 64 of the queue, preempted ones first;
    or as many as the plugin object's attribute ``minivllm_waiting_window`` says, if those are more.
    Answer: ids, the best first. Unknown and repeated ids are dropped, missing ones follow in their present order. The oldest
    waiting request is overtaken in at most 64 steps of its life; from then on it goes first.
    Cost: about 1 µs a waiting request for the records, and the lookup of its cached prefix.
    """


@hookspec(firstresult=True)
def minivllm_step_budget(state: EngineState) -> Budget | None:
    """How much may the next step compute?

    When: once a step. Answer: limits, each clamped to 1 and the engine's own; without chunked prefill only ``num_sequences``
    counts.
    Cost: about 15 µs a step.
    """


@hookspec(firstresult=True)
def minivllm_select_victims(running: Sequence[RequestView], blocks_needed: int, state: EngineState) -> Sequence[str] | None:
    """Who is put back into the waiting queue, to be computed again later, so that somebody else can go on?

    When: only if the pool has no free block. ``running`` are those that have no place in the current batch yet; the last of them
    is the one that needs the block. Answer: ids, the first victim first; as many are taken as are needed. Unknown ids are
    dropped, and so are requests that were preempted 16 times before; when the rest does not suffice, the engine chooses.
    Cost: about 1 µs a running request, on shortage only.
    """


@hookspec(firstresult=True)
def minivllm_order_eviction(candidates: Sequence[CandidateBlock], num_needed: int, state: EngineState) -> Sequence[int] | None:
    """Which of these findable blocks should be given up first?

    When: blocks are needed and none of the oldest free ones is blank. ``candidates`` are the four times ``num_needed`` (at
    least 16) blocks freed longest ago, oldest first. Answer: block ids, the first to go first. Unknown ids are dropped;
    missing ones follow, oldest first. Cost: about 1 µs a candidate, on eviction only.
    """


@hookspec
def minivllm_cache_salt(request: RequestView) -> str | None:
    """What must be equal for two requests to share cached prefixes, beside the tokens and the request's own salt?

    When: once a request, before it is queued. Answer: a string, None for nothing; those of all policies count together.
    On error, or any other answer: **closed**: this request gets a random salt and shares with nobody. Cost: about 3 µs a request.
    """


def version_text() -> str:
    """``"1.0"``."""
    return ".".join(map(str, API))


POLICY_HOOKS: Collection[str] = (
    "minivllm_admit",
    "minivllm_order_waiting",
    "minivllm_step_budget",
    "minivllm_select_victims",
    "minivllm_order_eviction",
    "minivllm_cache_salt",
)
OBSERVER_HOOKS: Collection[str] = (
    "minivllm_request_queued",
    "minivllm_step_started",
    "minivllm_step_finished",
    "minivllm_blocks_changed",
    "minivllm_request_finished",
    "minivllm_engine_error",
)
LIFECYCLE_HOOKS: Collection[str] = ("minivllm_configure", "minivllm_engine_started", "minivllm_engine_stopped")
