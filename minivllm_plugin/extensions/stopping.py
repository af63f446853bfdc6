"""Stop criteria: what a plugin writes, the registry, and the check that the scheduler asks. Pure Python.

The check runs on the engine thread after every token of a request that names a criterion.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from minivllm_plugin.engine.sequence import Sequence as EngineSequence
from minivllm_plugin.errors import RequestFailedError
from minivllm_plugin.extensions.extra_args import FailureLog, RequestedRegistry
from minivllm_plugin.extensions.requests import RequestStart, TokenView, request_start
from minivllm_plugin.sampling_parameters import SamplingParams

__all__ = ["StopContext", "StopCriterion", "StopCriterionFailed", "StopCriterionRegistry", "StopPipeline"]

KEY = "stopping"

Decode = Callable[[Sequence[int]], str]


class StopContext:
    """One request that asked for a criterion. The same object at every token, until the request ends.

    Attributes:
        value: from its ``extra_args``.
        state: what ``new_state`` returned; change it in place.
        output_token_ids: its completion so far, the newest token included.
    """

    __slots__ = ("_decode", "output_token_ids", "prompt_token_ids", "request_id", "state", "value")

    def __init__(
        self,
        request_id: str,
        value: Any,
        state: Any,
        prompt_token_ids: tuple[int, ...],
        output_token_ids: TokenView,
        decode: Decode | None,
    ) -> None:
        self.request_id = request_id
        self.value = value
        self.state = state
        self.prompt_token_ids = prompt_token_ids
        self.output_token_ids = output_token_ids
        self._decode = decode

    def text(self, last_n_tokens: int | None = None) -> str:
        """Text of the last ``last_n_tokens`` of the completion (None: of all), decoded now: ask for no more than you need.

        Half a character at either end is U+FFFD.

        Raises:
            ValueError: the model has no tokenizer, or ``last_n_tokens`` is less than 1.
        """
        if self._decode is None:
            raise ValueError("this model has no tokenizer, so there is no text; look at output_token_ids")
        if last_n_tokens is not None and last_n_tokens < 1:
            raise ValueError(f"last_n_tokens={last_n_tokens} must be at least 1, or None for all")
        return self._decode(self.output_token_ids[0 if last_n_tokens is None else -last_n_tokens :])


class StopCriterion(Protocol):
    """Decides after a token whether a request is done. One object serves all requests of an engine."""

    def validate(self, value: Any, params: SamplingParams) -> None:
        """Refuse an impossible value with ValueError, before the request is queued. On the caller's thread."""
        ...

    def new_state(self, request: RequestStart) -> Any:
        """The state of one request, made at its first check; it lives until the request ends. None keeps none."""
        ...

    def check(self, context: StopContext) -> str | None:
        """The reason to stop, which becomes ``stop_reason`` (with ``finish_reason`` "stop"), or None to go on.

        Asked after every token from ``min_tokens`` on that nothing else ends the request with; the token stays in the
        completion. An exception, or another answer, ends the request with RequestFailedError.
        """
        ...


class StopCriterionFailed(RequestFailedError):  # noqa: N818  # says what happened, as the scheduler reads it
    """A criterion raised, or answered nonsense. Names criterion, plugin and cause."""


class StopCriterionRegistry(RequestedRegistry[StopCriterion]):
    """Name in ``extra_args`` -> criterion."""

    kind = "stop criterion"
    methods = ("validate", "new_state", "check")


class StopPipeline:
    """The criteria of one engine, in the order in which they were added; the first reason counts.

    Args:
        registry: what is in it now is used; later additions are not.
        decode: token ids -> text; None for a model without a tokenizer.
    """

    def __init__(self, registry: StopCriterionRegistry, decode: Decode | None = None) -> None:
        self._criteria: tuple[tuple[str, StopCriterion], ...] = tuple(registry.items().items())
        self._described = {name: registry.describe(name) for name, _ in self._criteria}
        self._decode = decode
        self._log = FailureLog()

    def __call__(self, seq: EngineSequence) -> str | None:
        """What ``Scheduler.stop_check`` is.

        Raises:
            StopCriterionFailed: a criterion failed; ``seq.failure`` says the same.
        """
        asked = seq.sampling_params.extra_args or {}
        for name, criterion in self._criteria:
            if name not in asked:
                continue
            try:
                reason = criterion.check(self._context(name, criterion, seq, asked[name]))
            except Exception as error:  # a plugin's own code
                raise self._failed(name, seq, f"{type(error).__name__}: {error}", error) from error
            if reason is None:
                continue
            if not isinstance(reason, str) or not reason:
                raise self._failed(name, seq, f"check() must return a reason or None, got {reason!r:.100}")
            return reason
        return None

    def _context(self, name: str, criterion: StopCriterion, seq: EngineSequence, value: Any) -> StopContext:
        contexts: dict[str, StopContext] = seq.attachments.setdefault(KEY, {})
        if name not in contexts:
            start = request_start(seq, value)
            completion = TokenView(seq.token_ids, seq.num_prompt_tokens)
            state = criterion.new_state(start)
            contexts[name] = StopContext(start.request_id, value, state, start.prompt_token_ids, completion, self._decode)
        return contexts[name]

    def _failed(self, name: str, seq: EngineSequence, cause: str, error: Exception | None = None) -> StopCriterionFailed:
        seq.failure = f"{self._described[name]} failed: {cause}"
        self._log.write(name, seq.request_id, seq.failure, error)
        return StopCriterionFailed(seq.failure)
