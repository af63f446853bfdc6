"""An engine with plugins and no thread: what the tests of the hook seam drive by hand, and plugins made of plain functions."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any

from minivllm_plugin import hookspecs
from minivllm_plugin.config import EngineConfig
from minivllm_plugin.engine.admission import Limits
from minivllm_plugin.engine.llm_engine import LLMEngine
from minivllm_plugin.engine.scheduler import Scheduler
from minivllm_plugin.engine.sequence import Sequence as EngineSequence
from minivllm_plugin.extensions import Extensions
from minivllm_plugin.hookspecs import hookimpl
from minivllm_plugin.plugins.manager import EnginePlugins
from minivllm_plugin.plugins.reports import PluginReport
from minivllm_plugin.sampling_parameters import SamplingParams
from minivllm_plugin.testing import HashedTokens, LedgerRunner, assert_invariants

VOCABULARY = 1000


def make_plugin(plugin_name: str = "acme", /, **hooks: Callable[..., Any]) -> ModuleType:
    """A module plugin: ``make_plugin("acme", step_started=lambda plan: …)``; names of hooks without the prefix.

    A builtin, such as ``[].append``, gets the first argument of its hook.
    """
    module = ModuleType(plugin_name)
    for name, function in hooks.items():
        if inspect.isbuiltin(function):
            first = next(iter(inspect.signature(getattr(hookspecs, f"minivllm_{name}")).parameters))
            function = _with_arguments(function, [first], [])  # pluggy needs argument names
        setattr(module, f"minivllm_{name}", hookimpl(specname=f"minivllm_{name}")(function))
    return module


def raising(error: BaseException, *arguments: str) -> Callable[..., Any]:
    """A hook of these arguments that always raises; its calls are counted in ``calls``."""
    calls: list[int] = []

    def fail(*values: Any) -> Any:
        calls.append(1)
        raise error

    return _with_arguments(fail, arguments, calls)


def answering(answer: Callable[[], Any], *arguments: str) -> Callable[..., Any]:
    """A hook of these arguments that answers ``answer()``, whatever it is asked; its calls are counted in ``calls``."""
    calls: list[int] = []

    def reply(*values: Any) -> Any:
        calls.append(1)
        return answer()

    return _with_arguments(reply, arguments, calls)


def _with_arguments(inner: Callable[..., Any], arguments: Sequence[str], calls: list[int]) -> Callable[..., Any]:
    names = ", ".join(arguments)
    namespace: dict[str, Any] = {"inner": inner}
    exec(f"def hook({names}):\n    return inner({names})", namespace)
    hook: Any = namespace["hook"]
    hook.calls = calls
    return hook  # type: ignore[no-any-return]  # made by exec


class Bench:
    """One engine over a ledger, with everything checked after each step."""

    def __init__(
        self,
        *,
        plugins: Iterable[object] = (),
        policies: Iterable[object] = (),
        errors: str = "isolate",
        budget: float | None = None,
        max_num_sequences: int = 4,
        max_num_batched_tokens: int = 64,
        num_blocks: int = 32,
        block_size: int = 4,
        chunked: bool = True,
        caching: bool = True,
        scheduling_policy: Any = "fcfs",
        clock: Callable[[], float] | None = None,
        **runner_options: Any,
    ) -> None:
        self.scheduler = Scheduler(
            max_num_sequences,
            max_num_batched_tokens,
            num_blocks,
            block_size,
            0,
            enable_chunked_prefill=chunked,
            enable_prefix_caching=caching,
            policy=scheduling_policy,
        )
        self.runner = LedgerRunner.for_scheduler(self.scheduler, **runner_options)
        options: dict[str, Any] = {} if clock is None else {"clock": clock}
        self.engine = LLMEngine(self.scheduler, self.runner, Limits(VOCABULARY, num_blocks * block_size), **options)
        config = EngineConfig(plugins=tuple(plugins), policies=tuple(policies), plugin_errors=errors, plugin_budget=budget or 0.1)
        # The machine of a test may be busy; nobody is called slow unless the test is about that.
        self.plugins = EnginePlugins(config, Extensions.builtin(), judges_speed=budget is not None)
        self.engine.attach(self.plugins)
        self.sequences: list[EngineSequence] = []

    def add(self, prompt: Sequence[int], max_tokens: int = 4, **options: Any) -> EngineSequence:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        seq = self.engine.add_prompt(prompt, params, **options)
        self.sequences.append(seq)
        return seq

    def step(self) -> None:
        self.engine.step()
        assert_invariants(self.scheduler, self.sequences)

    def finish(self, max_steps: int = 2000) -> int:
        """Step until everybody has ended; returns how many steps that took."""
        for number in range(max_steps):
            if self.scheduler.is_finished():
                return number
            self.step()
        raise AssertionError(f"unfinished after {max_steps} steps: {self.scheduler.waiting} {self.scheduler.running}")

    def check_tokens(self, hashed: HashedTokens | None = None) -> None:
        """Every completion is what its prompt alone decides. ``hashed``: what chose them, if it was not the ledger's own."""
        hashed = hashed or HashedTokens(VOCABULARY)
        for seq in self.sequences:
            expected = hashed.continue_prompt(seq.prompt_token_ids, seq.num_completion_tokens)
            assert seq.completion_token_ids == expected, seq

    def report(self, name: str = "acme") -> PluginReport:
        return next(report for report in self.plugins.reports() if report.name == name)


def prompts(count: int, length: int = 6) -> list[list[int]]:
    """Prompts that share nothing."""
    return [list(range(1 + 20 * number, 1 + 20 * number + length)) for number in range(count)]
