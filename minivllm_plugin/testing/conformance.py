"""What every plugin must stand, as checks: run by pytest (:mod:`minivllm_plugin.testing.pytest_plugin`) or one by one.

A check takes a :class:`Candidate` and raises :class:`ConformanceError` with a sentence for the plugin's author. The engines are
real, with a :class:`~minivllm_plugin.testing.LedgerRunner` for a model, so all of them together take a few seconds.
"""

import contextlib
import io
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from minivllm_plugin import hookspecs
from minivllm_plugin.config import EngineConfig
from minivllm_plugin.engine.admission import Limits
from minivllm_plugin.engine.llm_engine import LLMEngine
from minivllm_plugin.engine.scheduler import Scheduler
from minivllm_plugin.errors import EngineDeadError, MinivllmError, RequestRejectedError
from minivllm_plugin.extensions import Extensions
from minivllm_plugin.plugins.calls import describe_error
from minivllm_plugin.plugins.discovery import why_incompatible
from minivllm_plugin.plugins.manager import EnginePlugins
from minivllm_plugin.sampling_parameters import SamplingParams
from minivllm_plugin.testing.candidates import Candidate, neighbours
from minivllm_plugin.testing.invariants import assert_invariants
from minivllm_plugin.testing.ledger import LedgerRunner

__all__ = [
    "CHECKS",
    "SHORT_IMPORT_SECONDS",
    "Candidate",
    "ConformanceError",
    "check_alone",
    "check_company",
    "check_death",
    "check_hooks",
    "check_invariants",
    "check_loads",
    "check_privacy",
    "check_threads",
    "report_import",
]

SHORT_IMPORT_SECONDS = 0.05
VOCABULARY = 100_000
FIRST_SECRET = 70_001  # prompts are token ids from here on: numbers that nobody prints by chance
NUMBER = re.compile(r"(?<![\d.])\d{5}(?![\d.])")
FEWEST_SHOWN = 3  # of them in one line; fewer may be a coincidence
NUM_REQUESTS = 14
THREAD_PATIENCE = 6.0  # seconds; a QueuedObserver may take five to deliver what it holds
Completions = list[list[int] | None]


class ConformanceError(AssertionError):
    """The plugin breaks a rule; the message says which, and what to do."""


# --- the checks -------------------------------------------------------------------------------------------------------


def check_loads(candidate: Candidate) -> None:
    """It imports, can be made, and fits this version of the hooks."""
    try:
        plugin = candidate.make()
    except Exception as error:
        raise ConformanceError(f"{candidate.target} cannot be loaded: {describe_error(error)}") from error
    reason = why_incompatible(plugin)
    if reason is not None:
        raise ConformanceError(f"{candidate.target}: {reason}")


def check_hooks(candidate: Candidate) -> None:
    """It implements only hooks that exist, with arguments that they have, and none without the mark."""
    plugin = candidate.make()
    known = {name for name in dir(hookspecs) if hasattr(getattr(hookspecs, name), "minivllm_spec")}
    unmarked = [name for name in sorted(known & set(dir(plugin))) if not hasattr(getattr(plugin, name), "minivllm_impl")]
    if unmarked:
        raise ConformanceError(f"{unmarked[0]} is not marked with @hookimpl: nobody would ever call it")
    try:
        EnginePlugins(EngineConfig(plugins=(plugin,), plugin_errors="raise"), Extensions.builtin())
    except MinivllmError as error:
        raise ConformanceError(str(error)) from error


def check_alone(candidate: Candidate) -> None:
    """With it, every request gets the tokens that it gets without it, and it raises nothing."""
    _compare(_serve(), _serve(candidate))


def check_company(candidate: Candidate) -> None:
    """So it does beside plugins that raise, dawdle and answer nonsense."""
    _compare(_serve(), _serve(candidate, in_company=True))


def check_invariants(candidate: Candidate) -> None:
    """Queues and blocks stay whole after every step: small pool, preemptions, aborts, both modes, with and without cache."""
    for chunked in (True, False):
        for caching in (True, False):
            _drive(candidate, chunked=chunked, caching=caching)


def check_death(candidate: Candidate) -> None:
    """It stands the death of an engine, and an engine with requests that is closed."""
    from minivllm_plugin.testing.live import scripted_llm

    dying: dict[str, Any] = {"fail_on_call": 3}
    for options in (dying, {}):
        llm, _ = scripted_llm(num_blocks=32, vocab_size=VOCABULARY, options=_options(candidate), **options)
        streams = [
            llm.submit([FIRST_SECRET + number, 1, 2], SamplingParams(max_tokens=40, ignore_eos=True)) for number in range(3)
        ]
        if options:
            with contextlib.suppress(EngineDeadError, RequestRejectedError):
                streams[0].result()
        llm.close()
        _refuse_errors(llm.plugins())


def check_threads(candidate: Candidate) -> None:
    """No thread of it is left once its engine is closed."""
    before = set(threading.enumerate())
    _serve(candidate)
    end = time.monotonic() + THREAD_PATIENCE
    while (left := [thread for thread in threading.enumerate() if thread not in before]) and time.monotonic() < end:
        time.sleep(0.005)
    if left:
        names = ", ".join(sorted(thread.name for thread in left))
        raise ConformanceError(f"threads are left after its engine was closed: {names}; end them in minivllm_engine_stopped")


def check_privacy(candidate: Candidate) -> None:
    """It neither prints nor logs what is in prompts."""
    with _listening() as heard:
        _serve(candidate)
    secrets = {token for prompt in _prompts() for token in prompt}
    for line in heard.getvalue().splitlines():
        shown = secrets.intersection(int(number) for number in NUMBER.findall(line))
        if len(shown) >= FEWEST_SHOWN:
            raise ConformanceError(f"it shows tokens of a prompt, which belong to the user: {line:.200}")


def report_import(candidate: Candidate) -> str:
    """How long its import takes, in words. No check: it depends on the machine."""
    seconds = candidate.import_seconds()
    verdict = "fine" if seconds <= SHORT_IMPORT_SECONDS else "too long: import heavy modules in minivllm_configure or later"
    return (
        f"plugin {candidate.name!r} imports in {seconds * 1e3:.0f} ms, {SHORT_IMPORT_SECONDS * 1e3:.0f} are the limit: {verdict}"
    )


CHECKS: dict[str, Callable[[Candidate], None]] = {
    "loads": check_loads,
    "implements_only_known_hooks": check_hooks,
    "keeps_tokens_and_raises_nothing": check_alone,
    "keeps_tokens_in_bad_company": check_company,
    "keeps_invariants": check_invariants,
    "stands_the_death_of_an_engine": check_death,
    "leaves_no_thread": check_threads,
    "shows_no_prompt": check_privacy,
}
"""Name -> check, in the order in which they make sense."""


# --- what they share --------------------------------------------------------------------------------------------------


def _prompts() -> list[list[int]]:
    """Of several lengths; every other one begins like the first, so that prefixes are shared."""
    shared = list(range(FIRST_SECRET, FIRST_SECRET + 9))
    own = [
        list(range(FIRST_SECRET + 50 * number, FIRST_SECRET + 50 * number + 2 + number)) for number in range(1, NUM_REQUESTS + 1)
    ]
    return [shared + tokens[:4] if number % 2 else tokens for number, tokens in enumerate(own)]


def _params(number: int) -> SamplingParams:
    return SamplingParams(max_tokens=2 + number % 5 * 3, ignore_eos=True)


def _plugins(candidate: Candidate | None, in_company: bool) -> tuple[list[Any], list[Any]]:
    plugins, policies = neighbours() if in_company else ([], [])
    if candidate is not None:
        plugin = candidate.make()
        plugins = [*plugins[:1], plugin, *plugins[1:]]
        policies = [*policies[:1], plugin, *policies[1:]] if candidate.is_policy() else policies
    return plugins, policies


def _options(candidate: Candidate | None, in_company: bool = False) -> dict[str, Any]:
    plugins, policies = _plugins(candidate, in_company)
    return {"plugins": plugins, "policies": policies, "max_num_sequences": 4, "max_num_batched_tokens": 16}


def _serve(candidate: Candidate | None = None, *, in_company: bool = False) -> Completions:
    """The completions of all prompts, submitted together to a live engine; None for one that was rejected."""
    from minivllm_plugin.testing.live import scripted_llm

    logger = logging.getLogger("minivllm_plugin")
    logger.addFilter(_is_no_neighbour)
    try:
        llm, _ = scripted_llm(num_blocks=24, vocab_size=VOCABULARY, options=_options(candidate, in_company))
        with llm:
            tenants = [{"tenant": f"tenant-{number % 3}"} for number in range(NUM_REQUESTS)]
            streams = [
                llm.submit(prompt, _params(number), metadata=tenants[number], priority=number % 3)
                for number, prompt in enumerate(_prompts())
            ]
            completions: Completions = []
            for stream in streams:
                try:
                    completions.append(list(stream.result(timeout=60).outputs[0].token_ids))
                except RequestRejectedError:
                    completions.append(None)
        _refuse_errors(llm.plugins())
    finally:
        logger.removeFilter(_is_no_neighbour)
    return completions


def _compare(expected: Completions, found: Completions) -> None:
    for prompt, (wanted, got) in enumerate(zip(expected, found, strict=True)):
        if got is not None and got != wanted:
            raise ConformanceError(f"request {prompt} got the tokens {got}; without the plugin it gets {wanted}")


def _refuse_errors(reports: Any) -> None:
    """Raise if the candidate failed. That it was slow is no error here: the machine may be."""
    for report in reports:
        errors = [error for error in report.errors if "slow:" not in error]
        if errors and not report.name.endswith("-neighbour"):
            raise ConformanceError(f"plugin {report.name!r} raised, or answered what is no answer: {'; '.join(errors)}")


def _drive(candidate: Candidate, *, chunked: bool, caching: bool) -> None:
    scheduler = Scheduler(3, 24, 11, 4, 0, enable_chunked_prefill=chunked, enable_prefix_caching=caching)
    runner = LedgerRunner.for_scheduler(scheduler, vocab_size=VOCABULARY)
    engine = LLMEngine(scheduler, runner, Limits(VOCABULARY, 44))
    plugins, policies = _plugins(candidate, in_company=False)
    attached = EnginePlugins(EngineConfig(plugins=tuple(plugins), policies=tuple(policies)), Extensions.builtin())
    engine.attach(attached)
    sequences = []
    for number, prompt in enumerate(_prompts()):
        with contextlib.suppress(RequestRejectedError):
            sequences.append(engine.add_prompt(prompt, _params(number).replace(max_tokens=20), metadata={"tenant": "t"}))
        engine.step()
        assert_invariants(scheduler, sequences)
        if number % 5 == 4 and sequences:
            engine.abort(sequences[-1].request_id or "")
            assert_invariants(scheduler, sequences)
    for _ in range(5000):
        if scheduler.is_finished():
            break
        engine.step()
        assert_invariants(scheduler, sequences)
    else:
        raise ConformanceError(f"requests did not end: {scheduler.num_live_sequences} are left after 5000 steps")
    _refuse_errors(attached.reports())


def _is_no_neighbour(record: logging.LogRecord) -> bool:
    return "-neighbour" not in record.getMessage()


@contextlib.contextmanager
def _listening() -> Iterator[io.StringIO]:
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
