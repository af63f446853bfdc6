"""What every plugin must stand, as checks: run by pytest (:mod:`minivllm_plugin.testing.pytest_plugin`) or one by one.

A check takes a :class:`Candidate` and raises :class:`ConformanceError` with a sentence for the plugin's author. The engines are
real, with a :class:`~minivllm_plugin.testing.LedgerRunner` for a model, so all of them together take a few seconds.
"""

import contextlib
import re
import threading
import time
from collections.abc import Callable
from itertools import product
from typing import Any

from minivllm_plugin import hookspecs
from minivllm_plugin.config import EngineConfig
from minivllm_plugin.errors import EngineDeadError, MinivllmError, RequestRejectedError
from minivllm_plugin.extensions import Extensions
from minivllm_plugin.plugins.calls import describe_error
from minivllm_plugin.plugins.discovery import why_incompatible
from minivllm_plugin.plugins.manager import EnginePlugins
from minivllm_plugin.sampling_parameters import SamplingParams
from minivllm_plugin.testing.candidates import Candidate
from minivllm_plugin.testing.conformance_runs import (
    FIRST_SECRET,
    NUM_SPECULATIVE_TOKENS,
    VOCABULARY,
    ConformanceError,
    compare,
    drive_by_hand,
    listening,
    options_with,
    refuse_errors,
    secret_prompts,
    serve,
)

__all__ = [
    "CHECKS",
    "SHORT_IMPORT_SECONDS",
    "Candidate",
    "ConformanceError",
    "check_alone",
    "check_company",
    "check_death",
    "check_guesses",
    "check_hooks",
    "check_invariants",
    "check_loads",
    "check_privacy",
    "check_threads",
    "report_import",
]

SHORT_IMPORT_SECONDS = 0.05
NUMBER = re.compile(r"(?<![\d.])\d{5}(?![\d.])")
FEWEST_SHOWN = 3  # of them in one line; fewer may be a coincidence
THREAD_PATIENCE = 6.0  # seconds; a QueuedObserver may take five to deliver what it holds


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
    compare(serve(), serve(candidate))


def check_company(candidate: Candidate) -> None:
    """So it does beside plugins that raise, dawdle and answer nonsense."""
    compare(serve(), serve(candidate, in_company=True))


def check_guesses(candidate: Candidate) -> None:
    """So it does where tokens are guessed: a request then gains several in one step."""
    expected = serve(num_speculative_tokens=0)
    for in_company in (False, True):
        compare(expected, serve(candidate, in_company=in_company, num_speculative_tokens=NUM_SPECULATIVE_TOKENS))


def check_invariants(candidate: Candidate) -> None:
    """Queues and blocks stay whole after every step: small pool, preemptions, aborts, both modes, with and without cache, and
    with guesses."""
    for chunked, caching, guessing in product((True, False), repeat=3):
        drive_by_hand(candidate, chunked=chunked, caching=caching, guessing=guessing)


def check_death(candidate: Candidate) -> None:
    """It stands the death of an engine, and an engine with requests that is closed."""
    from minivllm_plugin.testing.live import scripted_llm

    dying: dict[str, Any] = {"fail_on_call": 3}
    for options in (dying, {}):
        llm, _ = scripted_llm(num_blocks=32, vocab_size=VOCABULARY, options=options_with(candidate), **options)
        streams = [
            llm.submit([FIRST_SECRET + number, 1, 2], SamplingParams(max_tokens=40, ignore_eos=True)) for number in range(3)
        ]
        if options:
            with contextlib.suppress(EngineDeadError, RequestRejectedError):
                streams[0].result()
        llm.close()
        refuse_errors(llm.plugins())


def check_threads(candidate: Candidate) -> None:
    """No thread of it is left once its engine is closed."""
    before = set(threading.enumerate())
    serve(candidate)
    end = time.monotonic() + THREAD_PATIENCE
    while (left := [thread for thread in threading.enumerate() if thread not in before]) and time.monotonic() < end:
        time.sleep(0.005)
    if left:
        names = ", ".join(sorted(thread.name for thread in left))
        raise ConformanceError(f"threads are left after its engine was closed: {names}; end them in minivllm_engine_stopped")


def check_privacy(candidate: Candidate) -> None:
    """It neither prints nor logs what is in prompts."""
    with listening() as heard:
        serve(candidate)
    secrets = {token for prompt in secret_prompts() for token in prompt}
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
    "keeps_tokens_under_guesses": check_guesses,
    "keeps_invariants": check_invariants,
    "stands_the_death_of_an_engine": check_death,
    "leaves_no_thread": check_threads,
    "shows_no_prompt": check_privacy,
}
"""Name -> check, in the order in which they make sense."""
