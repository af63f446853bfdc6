"""One hook of one plugin: called with the arguments that it wants, timed, counted, and taken out when it keeps failing.

Plugins are called from here and from nowhere else, on the engine thread (an observer that was too slow: on its own). pluggy
checks signatures and order; its own call loop is not used, since there one exception stops everybody.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from minivllm_plugin.errors import PluginError

__all__ = ["CallPolicy", "HookCall", "HookStatistics", "describe_error"]

logger = logging.getLogger(__name__)

AVERAGE_OVER = 16  # calls that the running average looks back on
FIRST_JUDGED_CALL = 16  # before that many calls a plugin is not called slow: the first ones import and allocate
LEAST_SLOW_SECONDS = 1e-3
# A busy machine may stop any thread for some milliseconds now and then, which is not the plugin's doing. So its average counts
# only if a quarter of its calls took too long, or if it is so far off that a pause now and then cannot explain it.
SLOW_SHARE = 0.25
FAR_TOO_SLOW = 10


def describe_error(error: BaseException) -> str:
    """Kind and text of an exception of a plugin, also of one whose own ``str()`` raises."""
    try:
        text = str(error)
    except Exception:
        text = "(it has no text: its str() raises)"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


@dataclass(slots=True)
class HookStatistics:
    """Totals of one hook of one plugin. ``average_seconds`` is a running average over the last 16 calls or so; ``slow_share``
    the share of these that took longer than allowed."""

    num_calls: int = 0
    num_errors: int = 0
    total_seconds: float = 0.0
    average_seconds: float = 0.0
    slow_share: float = 0.0


@dataclass(slots=True)
class CallPolicy:
    """What becomes of plugins that fail or are slow, in one engine.

    Attributes:
        raise_errors: an exception of a plugin ends the engine instead of being counted.
        budget: share of a step that one hook of one plugin may take on average.
        judges_speed: whether anybody is called slow at all.
        step_seconds: running average of a step, without what observers take.
        is_calling: whether plugin code runs on the engine thread right now.
        total_seconds: what all plugins took together on the engine thread.
    """

    raise_errors: bool = False
    budget: float = 0.1
    judges_speed: bool = True
    step_seconds: float = 0.0
    is_calling: bool = False
    total_seconds: float = 0.0

    def note_step(self, seconds: float) -> None:
        self.step_seconds += (seconds - self.step_seconds) / AVERAGE_OVER if self.step_seconds else seconds


@dataclass(slots=True)
class HookCall:
    """A plugin's implementation of one hook.

    Attributes:
        argument_names: passed by position. ``optional_names``: those that it gives a default, passed by name.
        title: the plugin's name and distribution, for messages. ``owner``: the plugin itself.
        most_in_a_row, most_in_all: errors after which it is taken out.
        is_enabled: False once it was taken out.
        disabled_because: why, in words.
    """

    plugin: str
    hook: str
    function: Callable[..., Any]
    argument_names: tuple[str, ...]
    policy: CallPolicy
    most_in_a_row: int | None = None
    most_in_all: int | None = None
    optional_names: tuple[str, ...] = ()
    title: str = ""
    owner: object = None
    statistics: HookStatistics = field(default_factory=HookStatistics)
    is_enabled: bool = True
    disabled_because: str | None = None
    errors_in_a_row: int = 0

    def __post_init__(self) -> None:
        self.title = self.title or repr(self.plugin)

    def invoke(self, arguments: Mapping[str, Any]) -> Any:
        """The bare call: neither timed nor counted."""
        positional = [arguments[name] for name in self.argument_names]
        return self.function(*positional, **{name: arguments[name] for name in self.optional_names})

    def call(self, arguments: Mapping[str, Any], check: Callable[[Any], Any] | None = None) -> Any:
        """The plugin's answer, passed through ``check`` unless it is None. Looking at an answer may run more of the plugin's
        code (a generator's), so that is timed, counted and kept from calling back, too.

        Raises:
            Exception: whatever the plugin or ``check`` raises. SystemExit and its like, which would end more than the
                plugin, come as RuntimeError; only a KeyboardInterrupt on the main thread is the user's, and passes.
        """
        policy, statistics = self.policy, self.statistics
        policy.is_calling = True
        began = time.perf_counter()
        try:
            answer = self.invoke(arguments)
            return answer if check is None or answer is None else check(answer)
        except Exception:
            raise
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
                raise
            raise RuntimeError(f"it raised {type(error).__name__}, which is meant to end a program") from error
        finally:
            seconds = time.perf_counter() - began
            policy.is_calling = False
            policy.total_seconds += seconds
            statistics.num_calls += 1
            statistics.total_seconds += seconds
            weight = 1 / min(statistics.num_calls, AVERAGE_OVER)
            statistics.average_seconds += (seconds - statistics.average_seconds) * weight
            statistics.slow_share += ((seconds > self._allowed_seconds()) - statistics.slow_share) * weight

    def deliver(self, arguments: Mapping[str, Any]) -> None:
        """Call it on a thread of its own, where nobody waits: not timed, errors counted. After too many in a row, do nothing."""
        if self.most_in_a_row is not None and self.errors_in_a_row >= self.most_in_a_row:
            return
        try:
            self.invoke(arguments)
        except BaseException as error:  # also SystemExit, which would end the thread
            self.failed(error)
        else:
            self.succeeded()

    def succeeded(self) -> None:
        self.errors_in_a_row = 0

    def failed(self, error: BaseException) -> None:
        """Count ``error``, log the first of its kind, and take the hook out when it was one too many.

        Raises:
            PluginError: errors are to be raised.
        """
        if self.policy.raise_errors:
            raise PluginError(f"plugin {self.title} failed in {self.hook}: {describe_error(error)}") from error
        self.statistics.num_errors += 1
        self.errors_in_a_row += 1
        if self.statistics.num_errors == 1:
            logger.error("plugin %s failed in %s; its later errors there are only counted", self.title, self.hook, exc_info=error)
        if self.most_in_a_row is not None and self.errors_in_a_row >= self.most_in_a_row:
            self.disable(f"{self.errors_in_a_row} errors in a row")
        elif self.most_in_all is not None and self.statistics.num_errors >= self.most_in_all:
            self.disable(f"{self.statistics.num_errors} errors")

    def disable(self, because: str, consequence: str = "is not called any more") -> None:
        """Take it out, with one line that says why."""
        self.is_enabled = False
        self.disabled_because = because
        logger.warning("plugin %s: %s %s (%s)", self.title, self.hook, consequence, because)

    def is_slow(self) -> bool:
        """Whether it takes more of a step than it may, on average and not only at first."""
        statistics = self.statistics
        if statistics.num_calls < FIRST_JUDGED_CALL or not self.policy.judges_speed:
            return False
        allowed = self._allowed_seconds()
        return statistics.average_seconds > (allowed if statistics.slow_share >= SLOW_SHARE else FAR_TOO_SLOW * allowed)

    def slowness(self) -> str:
        """Its average beside what it may take, in words."""
        return f"{self.statistics.average_seconds * 1e3:.2f} ms a call, {self._allowed_seconds() * 1e3:.2f} ms are allowed"

    def _allowed_seconds(self) -> float:
        return max(self.policy.budget * self.policy.step_seconds, LEAST_SLOW_SECONDS)
