"""The runs behind the conformance checks: the same requests without a plugin, with it, in bad company, and step by step.

Part of the conformance kit (:mod:`minivllm_plugin.testing.conformance`).
"""

import contextlib
import io
import logging
from collections.abc import Iterator
from typing import Any

from minivllm_plugin.config import EngineConfig
from minivllm_plugin.engine.admission import Limits
from minivllm_plugin.engine.llm_engine import LLMEngine
from minivllm_plugin.engine.prompt_lookup import PromptLookup
from minivllm_plugin.engine.scheduler import Scheduler
from minivllm_plugin.engine.sequence import Sequence
from minivllm_plugin.engine.snapshot import take_snapshot
from minivllm_plugin.errors import RequestRejectedError
from minivllm_plugin.extensions import Extensions
from minivllm_plugin.plugins.facade import EngineHandle
from minivllm_plugin.plugins.manager import EnginePlugins
from minivllm_plugin.sampling_parameters import SamplingParams
from minivllm_plugin.testing.candidates import Candidate, neighbours
from minivllm_plugin.testing.choosers import RepeatingTokens
from minivllm_plugin.testing.invariants import assert_invariants
from minivllm_plugin.testing.ledger import LedgerRunner

__all__ = [
    "FIRST_SECRET",
    "NUM_SPECULATIVE_TOKENS",
    "VOCABULARY",
    "ConformanceError",
    "compare",
    "drive_by_hand",
    "listening",
    "options_with",
    "params_of",
    "refuse_errors",
    "secret_prompts",
    "serve",
]

VOCABULARY = 100_000
FIRST_SECRET = 70_001  # prompts are token ids from here on: numbers that nobody prints by chance
NUM_REQUESTS = 14
NUM_SPECULATIVE_TOKENS = 7
Completions = list[list[int] | None]


class ConformanceError(AssertionError):
    """The plugin breaks a rule; the message says which, and what to do."""


def secret_prompts() -> list[list[int]]:
    """Of several lengths; every other one begins like the first, so that prefixes are shared."""
    shared = list(range(FIRST_SECRET, FIRST_SECRET + 9))
    own = [
        list(range(FIRST_SECRET + 50 * number, FIRST_SECRET + 50 * number + 2 + number)) for number in range(1, NUM_REQUESTS + 1)
    ]
    return [shared + tokens[:4] if number % 2 else tokens for number, tokens in enumerate(own)]


def params_of(number: int) -> SamplingParams:
    """What prompt ``number`` asks for: 2 to 14 tokens."""
    return SamplingParams(max_tokens=2 + number % 5 * 3, ignore_eos=True)


def _plugins(candidate: Candidate | None, in_company: bool) -> tuple[list[Any], list[Any]]:
    plugins, policies = neighbours() if in_company else ([], [])
    if candidate is not None:
        plugin = candidate.make()
        plugins = [*plugins[:1], plugin, *plugins[1:]]
        policies = [*policies[:1], plugin, *policies[1:]] if candidate.is_policy() else policies
    return plugins, policies


def options_with(candidate: Candidate | None, in_company: bool = False) -> dict[str, Any]:
    """Settings of an engine with the candidate, named as a policy if it is one, and perhaps in bad company."""
    plugins, policies = _plugins(candidate, in_company)
    return {"plugins": plugins, "policies": policies, "max_num_sequences": 4, "max_num_batched_tokens": 16}


def serve(
    candidate: Candidate | None = None, *, in_company: bool = False, num_speculative_tokens: int | None = None
) -> Completions:
    """The completions of all prompts, submitted together to a live engine; None for one that was rejected.

    Args:
        num_speculative_tokens: the model repeats itself, and so many tokens are guessed in a step. None: every token depends on
            all before it, which nobody guesses.
    """
    from minivllm_plugin.testing.live import scripted_llm

    logger = logging.getLogger("minivllm_plugin")
    logger.addFilter(_is_no_neighbour)
    try:
        options = {**options_with(candidate, in_company), "num_speculative_tokens": num_speculative_tokens}
        choose = None if num_speculative_tokens is None else _repeating()
        llm, _ = scripted_llm(num_blocks=24, vocab_size=VOCABULARY, options=options, choose=choose)
        more = {} if num_speculative_tokens is None else {"max_tokens": 50}
        with llm:
            tenants = [{"tenant": f"tenant-{number % 3}"} for number in range(NUM_REQUESTS)]
            streams = [
                llm.submit(prompt, params_of(number).replace(**more), metadata=tenants[number], priority=number % 3)
                for number, prompt in enumerate(secret_prompts())
            ]
            completions: Completions = []
            for stream in streams:
                try:
                    completions.append(list(stream.result(timeout=60).outputs[0].token_ids))
                except RequestRejectedError:
                    completions.append(None)
        refuse_errors(llm.plugins())
    finally:
        logger.removeFilter(_is_no_neighbour)
    return completions


def compare(expected: Completions, found: Completions) -> None:
    """Raise ConformanceError unless every request that was not rejected got the expected tokens."""
    for prompt, (wanted, got) in enumerate(zip(expected, found, strict=True)):
        if got is not None and got != wanted:
            raise ConformanceError(f"request {prompt} got the tokens {got}; without the plugin it gets {wanted}")


def refuse_errors(reports: Any) -> None:
    """Raise if the candidate failed. That it was slow is no error here: the machine may be."""
    for report in reports:
        errors = [error for error in report.errors if "slow:" not in error]
        if errors and not report.name.endswith("-neighbour"):
            raise ConformanceError(f"plugin {report.name!r} raised, or answered what is no answer: {'; '.join(errors)}")


def drive_by_hand(candidate: Candidate, *, chunked: bool, caching: bool, guessing: bool) -> None:
    """All prompts through a small pool, some of them aborted, with the invariants checked after every call.

    Args:
        guessing: the model repeats itself, and tokens are guessed.

    Raises:
        ConformanceError: the plugin failed, or requests did not end.
        InvariantError: from the checks.
    """
    scheduler = Scheduler(3, 24, 11, 4, 0, enable_chunked_prefill=chunked, enable_prefix_caching=caching)
    scheduler.speculation = PromptLookup(NUM_SPECULATIVE_TOKENS) if guessing else None
    choose = _repeating() if guessing else None
    runner = LedgerRunner.for_scheduler(scheduler, vocab_size=VOCABULARY, choose=choose, can_speculate=guessing)
    engine = LLMEngine(scheduler, runner, Limits(VOCABULARY, 44))
    plugins, policies = _plugins(candidate, in_company=False)
    attached = EnginePlugins(EngineConfig(plugins=tuple(plugins), policies=tuple(policies)), Extensions.builtin())
    engine.attach(attached)
    to_abort: list[str] = []  # by the plugin, through its handle
    handle = EngineHandle("by-hand", lambda: take_snapshot(scheduler), to_abort.append, list, attached.totals)
    attached.started(handle)
    try:
        _drive(engine, to_abort)
    finally:
        attached.stopped(handle, None)  # a plugin's thread must not outlive the check
    refuse_errors(attached.reports())


def _drive(engine: LLMEngine, to_abort: list[str]) -> None:
    scheduler = engine.scheduler
    sequences: list[Sequence] = []

    def step() -> None:
        while to_abort:
            engine.abort(to_abort.pop())
        engine.step()
        assert_invariants(scheduler, sequences)

    for number, prompt in enumerate(secret_prompts()):
        with contextlib.suppress(RequestRejectedError):
            sequences.append(engine.add_prompt(prompt, params_of(number).replace(max_tokens=20), metadata={"tenant": "t"}))
        step()
        if number % 5 == 4 and sequences:
            engine.abort(sequences[-1].request_id or "")
            assert_invariants(scheduler, sequences)
    for _ in range(5000):
        if scheduler.is_finished():
            return
        step()
    raise ConformanceError(f"requests did not end: {scheduler.num_live_sequences} are left after 5000 steps")


def _repeating() -> RepeatingTokens:
    """Of three tokens: it runs into a loop at once."""
    return RepeatingTokens(3)


def _is_no_neighbour(record: logging.LogRecord) -> bool:
    return "-neighbour" not in record.getMessage()


@contextlib.contextmanager
def listening() -> Iterator[io.StringIO]:
    """What is printed and logged meanwhile."""
    heard = io.StringIO()
    handler = logging.StreamHandler(heard)
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    try:
        with contextlib.redirect_stdout(heard), contextlib.redirect_stderr(heard):
            yield heard
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
