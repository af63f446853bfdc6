"""One request as the engine sees it: its tokens, how far they are computed, and the blocks that hold them.

Written by the Scheduler and the BlockManager on the engine thread, by nobody else. Lengths are derived from the token
list, so they cannot disagree with it. Text, stop strings and deadlines are not known here.
"""

import secrets
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceABC
from enum import Enum, auto
from types import MappingProxyType
from typing import Any, Literal

from minivllm_plugin.engine.logprobs import TokenLogprobs
from minivllm_plugin.errors import InvalidRequestError
from minivllm_plugin.sampling_parameters import SamplingParams
from minivllm_plugin.views import EMPTY

__all__ = ["FAILED_TOKEN", "MAX_TOKEN_ID", "FinishReason", "Pooling", "Sequence", "SequenceStatus", "computes_prompt"]

Pooling = Literal["last", "mean"]
FinishReason = Literal["stop", "length", "abort", "error"]

# What a runner returns for a row that has no usable logits (NaN, everything masked): that request alone ends with "error".
FAILED_TOKEN = -1

# Token ids travel as signed 64-bit integers: in the chain keys of the prefix index and in the runner's tensors.
MAX_TOKEN_ID = 2**63 - 1


class SequenceStatus(Enum):
    """Where a sequence stands: in ``waiting``, in ``running``, or done."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class Sequence:
    """A prompt and what was generated after it.

    Args:
        token_ids: the prompt, at least one token id >= 0; copied.
        block_size: tokens per KV block; left out, the scheduler's own is taken on ``add_sequence``. A different one is
            refused there.
        sampling_params: how to decode; default ``SamplingParams()``.
        request_id: unique among live requests; left out, the scheduler numbers it.
        priority: smaller runs first under the ``priority`` policy.
        cache_salt: prefix blocks are shared only between requests with an equal salt.
        metadata: for plugins; the engine itself does not look at it.
        pooling: the sequence ends with its prompt, and its result is one vector: the hidden state of its ``last`` token, or the
            ``mean`` over all. None generates.
        max_model_length: overrides ``sampling_params.max_model_length``.

    Raises:
        InvalidRequestError: the prompt is empty or holds something that is not a token id, or another argument has a type
            that would only fail later, inside a step that others share.
    """

    __slots__ = (
        "arrival",
        "arrival_time",
        "attachments",
        "block_keys",
        "block_size",
        "block_table",
        "cache_salt",
        "draft_token_ids",
        "embedding",
        "failure",
        "finish_reason",
        "first_scheduled_step",
        "last_scheduled_step",
        "last_turn",
        "logprobs",
        "max_model_length",
        "metadata",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_hashed_blocks",
        "num_overtaken",
        "num_pending_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_scheduled_tokens",
        "pooling",
        "prefix_entry",
        "priority",
        "prompt_cached_tokens",
        "prompt_logprobs",
        "request_id",
        "sampling_params",
        "sampling_seed",
        "status",
        "stop_reason",
        "token_ids",
    )

    def __init__(
        self,
        token_ids: SequenceABC[int],
        block_size: int | None = None,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        pooling: Pooling | None = None,
        max_model_length: int | None = None,
    ) -> None:
        self.token_ids = _checked_tokens(token_ids)
        if not isinstance(sampling_params, SamplingParams | None):
            raise InvalidRequestError(f"sampling_params must be a SamplingParams, got {sampling_params!r}")
        _check_optional_string("request_id", request_id)
        _check_optional_string("cache_salt", cache_salt)
        if not isinstance(metadata, Mapping | None):
            raise InvalidRequestError(f"metadata must be a dictionary or None, got {metadata!r:.100}")
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise InvalidRequestError(f"priority must be an integer (smaller runs first), got {priority!r}")
        if max_model_length is not None and (
            isinstance(max_model_length, bool) or not isinstance(max_model_length, int) or max_model_length < 1
        ):
            raise InvalidRequestError(f"max_model_length must be an integer of at least 1 or None, got {max_model_length!r}")
        self.num_prompt_tokens = len(self.token_ids)
        self.block_size = block_size
        self.sampling_params = sampling_params if sampling_params is not None else SamplingParams()
        seed = self.sampling_params.seed
        self.sampling_seed = seed if seed is not None else secrets.randbits(64)
        self.max_model_length = max_model_length if max_model_length is not None else self.sampling_params.max_model_length
        self.request_id = request_id
        self.priority = priority
        self.cache_salt = cache_salt
        self.metadata: Mapping[str, Any] = MappingProxyType(dict(metadata)) if metadata else EMPTY
        self.pooling = pooling
        self.embedding: list[float] | None = None  # with ``pooling``, once the prompt is computed; written by the runner
        self.arrival = -1  # its number among all that were ever added to its scheduler
        self.arrival_time = 0.0  # seconds on the engine's clock

        # Written by extensions: what they keep for this request from token to token, and why one of them ended it.
        self.attachments: dict[str, Any] = {}
        self.logprobs: list[TokenLogprobs] = []  # one a completion token, if asked for; written by the sampler
        self.prompt_logprobs: list[TokenLogprobs] = []  # one a prompt token but the first, if asked for
        self.failure: str | None = None

        self.status = SequenceStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.num_computed_tokens = 0  # tokens whose K/V stand in the cache
        self.num_scheduled_tokens = 0  # tokens given in the latest schedule()
        self.draft_token_ids: list[int] = []  # guessed to follow, and scheduled with them; the runner says which are right
        self.num_pending_tokens = 0  # launched, not known here yet; when a batch is launched, 0 or 1, at position num_tokens
        self.num_cached_tokens = 0  # of the computed ones, found in the prefix cache at the latest admission
        self.prompt_cached_tokens: int | None = None  # the same at the first admission: what a usage report shows
        self.num_preemptions = 0
        self.num_overtaken = 0  # steps in which a policy let others in while nobody had waited longer
        self.first_scheduled_step: int | None = None
        self.last_scheduled_step = -1
        self.last_turn = -1  # like the step, but counted on within it: who came first in a batch is first to come again

        # Owned by the BlockManager.
        self.block_table: list[int] = []
        self.block_keys: list[int] = []  # chain keys of the full blocks; depend on tokens and salt only
        self.num_hashed_blocks = 0  # leading blocks that the index knows (or has an equal for)
        self.prefix_entry: int | None = None  # index entry of the last of these; None at the root, -1 once the chain is cut

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether every one of its prompt tokens is to be computed, cached or not: something is taken from each."""
        return self.sampling_params.prompt_logprobs is not None or self.pooling == "mean"

    @property
    def num_tokens(self) -> int:
        """Prompt plus completion."""
        return len(self.token_ids)

    @property
    def num_completion_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def length(self) -> int:
        """Its tokens, counting one that only the device knows."""
        return len(self.token_ids) + self.num_pending_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens whose K/V are missing; 1 for a sequence that is decoding."""
        return len(self.token_ids) + self.num_pending_tokens - self.num_computed_tokens

    @property
    def last_token(self) -> int:
        return self.token_ids[-1]

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.token_ids[: self.num_prompt_tokens]

    @property
    def completion_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def max_tokens(self) -> int | None:
        return self.sampling_params.max_tokens

    @property
    def ignore_eos(self) -> bool:
        return self.sampling_params.ignore_eos

    @property
    def is_finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED

    @property
    def num_blocks(self) -> int:
        """Blocks that hold ``num_tokens``, the last one perhaps in part."""
        size = self._known_block_size()
        return (len(self.token_ids) + size - 1) // size

    @property
    def last_block_num_tokens(self) -> int:
        return len(self.token_ids) - (self.num_blocks - 1) * self._known_block_size()

    def block(self, index: int) -> list[int]:
        """The token ids of logical block ``index`` (0 is the first); shorter than ``block_size`` only if it is the last."""
        if not 0 <= index < self.num_blocks:
            raise IndexError(f"block {index} of a sequence with {self.num_blocks} blocks")
        size = self._known_block_size()
        return self.token_ids[index * size : (index + 1) * size]

    def append_token(self, token_id: int) -> None:
        """Add one sampled token; its K/V are computed in the next step."""
        self.token_ids.append(token_id)

    def _known_block_size(self) -> int:
        if self.block_size is None:
            raise InvalidRequestError("block_size is not known yet; pass it, or add the sequence to a scheduler first")
        return self.block_size

    def __len__(self) -> int:
        return len(self.token_ids)

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request_id!r}, {self.status.name}, prompt={self.num_prompt_tokens}, "
            f"completion={self.num_completion_tokens}, computed={self.num_computed_tokens}, blocks={self.block_table})"
        )


def computes_prompt(seq: Sequence) -> bool:
    """Whether any of the tokens that it was given belongs to its prompt, or is computed again after a preemption."""
    return seq.num_scheduled_tokens - len(seq.draft_token_ids) > 1 or seq.num_computed_tokens < seq.num_prompt_tokens


def _checked_tokens(token_ids: object) -> list[int]:
    if not isinstance(token_ids, Iterable):
        raise InvalidRequestError(f"the prompt must be a list of token ids, got {token_ids!r}")
    tokens = list(token_ids)
    if not tokens:
        raise InvalidRequestError("the prompt is empty; pass at least one token")
    for token in tokens:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token <= MAX_TOKEN_ID:
            raise InvalidRequestError(f"token ids must be integers between 0 and {MAX_TOKEN_ID}, got {token!r}")
    return tokens


def _check_optional_string(name: str, value: object) -> None:
    if value is not None and not isinstance(value, str):
        raise InvalidRequestError(f"{name} must be a string or None, got {value!r}")
