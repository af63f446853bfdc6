"""Logits processors: what a plugin writes, and the registry it adds it to. They run in
:mod:`minivllm_plugin.extensions.logits_pipeline`. Nothing here imports torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from minivllm_plugin.extensions.extra_args import RequestedRegistry
from minivllm_plugin.extensions.registry import BUILTIN
from minivllm_plugin.extensions.requests import RequestStart, TokenView
from minivllm_plugin.sampling_parameters import SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["LogitsProcessor", "LogitsProcessorRegistry", "LogitsRow"]


@dataclass(frozen=True, slots=True)
class LogitsRow:
    """One request that asked for a processor. The same object at every step, until the request ends.

    Attributes:
        value: from its ``extra_args``.
        state: what ``new_state`` returned; change it in place.
        output_token_ids: its completion so far, one token longer at each step.
    """

    request_id: str
    value: Any
    state: Any
    prompt_token_ids: tuple[int, ...]
    output_token_ids: TokenView


class LogitsProcessor(Protocol):
    """Changes logits before a token is chosen. One object serves all requests of an engine; what belongs to one of them stands
    in its state.

    Place among the steps, as in vLLM: after the end tokens are masked for ``min_tokens``, before temperature; several
    processors in the order in which they were added. All calls but ``validate`` come from the engine thread.

    Attributes:
        argmax_invariant: True if the most likely token stays the most likely. A greedy request whose processors all say so
            skips them.
    """

    argmax_invariant: bool

    def validate(self, value: Any, params: SamplingParams) -> None:
        """Refuse an impossible value with ValueError, before the request is queued. On the caller's thread."""
        ...

    def new_state(self, request: RequestStart) -> Any:
        """The state of one request, made when its first token is about to be sampled. None keeps none.

        It lives until the request ends: preemption and chunked prefill neither reset nor repeat anything, and ``apply`` sees
        the completion grow by one token from call to call.
        """
        ...

    def apply(self, logits: "Tensor", rows: Sequence[LogitsRow]) -> "Tensor | None":
        """Change ``logits`` (float32 ``[R, V]``, row r for ``rows[r]``) in place, or return a tensor of this shape.

        Once a step. Rows without a state come together, R of them. Rows with a state come one by one, so that an exception
        cannot leave a neighbour's state half advanced; a processor with the attribute ``repeatable = True`` promises that being
        asked again about the same token gives the same (its state follows from ``output_token_ids``), and gets them together,
        too.

        A row in which this raises, or leaves another shape, NaN, +inf or no finite logit, fails: its request ends with
        RequestFailedError. The others go on.
        """
        ...


class LogitsProcessorRegistry(RequestedRegistry[LogitsProcessor]):
    """Name in ``extra_args`` -> processor."""

    kind = "logits processor"
    methods = ("validate", "new_state", "apply")

    @classmethod
    def builtin(cls) -> "LogitsProcessorRegistry":
        """With what structured outputs and thinking budgets need."""
        from minivllm_plugin.structured.processor import NAME, StructuredOutputProcessor
        from minivllm_plugin.structured.thinking import NAME as THINKING
        from minivllm_plugin.structured.thinking import ThinkingBudgetProcessor

        registry = cls()
        with registry.owned_by(BUILTIN):
            registry.add(NAME, StructuredOutputProcessor())
            registry.add(THINKING, ThinkingBudgetProcessor())
        return registry

    def add(self, name: str, extension: LogitsProcessor) -> None:
        """Offer ``extension`` under ``name``. Raises ConfigError: the name is taken, or it is no :class:`LogitsProcessor`."""
        if not isinstance(getattr(extension, "argmax_invariant", None), bool):
            from minivllm_plugin.errors import ConfigError

            raise ConfigError(
                f"{self.kind} {name!r} of plugin {self._adding!r} must say argmax_invariant = True or False; "
                "False is always right, True lets greedy requests skip it"
            )
        super().add(name, extension)
