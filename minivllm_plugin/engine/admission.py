"""What may enter the engine at all. Pure checks, called on the caller's thread before anything is queued.

Every refusal names the value, the limit and the remedy. Nothing here changes state.
"""

from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass

from minivllm_plugin.errors import ContextWindowExceededError, InvalidRequestError
from minivllm_plugin.sampling_parameters import SamplingParams

__all__ = ["Limits", "check_prompt_fits", "check_request"]


@dataclass(frozen=True, slots=True)
class Limits:
    """The bounds of one engine.

    Attributes:
        vocab_size: rows of the model's output layer; token ids are below it (the tokenizer's own count may differ).
        max_model_len: most tokens of prompt and completion together.
    """

    vocab_size: int
    max_model_len: int


def check_request(token_ids: SequenceABC[int], params: SamplingParams, limits: Limits) -> None:
    """Raise unless a request with this prompt and these parameters can be served to its end.

    Raises:
        InvalidRequestError: an empty prompt, a token id that the model does not have, or an argument of another type.
        ContextWindowExceededError: prompt, or prompt plus ``max_tokens``, longer than the window.
    """
    if not isinstance(token_ids, SequenceABC) or isinstance(token_ids, (str, bytes)):
        raise InvalidRequestError(f"the prompt must be a list of token ids, got {token_ids!r}")
    if not isinstance(params, SamplingParams):
        raise InvalidRequestError(f"sampling_params must be a SamplingParams, got {params!r}")
    if not token_ids:
        raise InvalidRequestError("the prompt is empty; pass at least one token")
    for token in token_ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < limits.vocab_size:
            raise InvalidRequestError(
                f"token id {token!r} in the prompt is outside the model's vocabulary 0..{limits.vocab_size - 1}"
            )
    for token in params.stop_token_ids or ():
        if token >= limits.vocab_size:
            raise InvalidRequestError(f"stop_token_ids has {token}, outside the model's vocabulary 0..{limits.vocab_size - 1}")
    for name, tokens in (
        ("allowed_token_ids", params.allowed_token_ids or ()),
        ("logit_bias", params.logit_bias or ()),
        ("bad_words_token_ids", [token for word in params.bad_words_token_ids for token in word]),
    ):
        for token in tokens:
            if token >= limits.vocab_size:
                raise InvalidRequestError(f"{name} has token {token}, outside the model's vocabulary 0..{limits.vocab_size - 1}")
    if params.top_k > limits.vocab_size:
        raise InvalidRequestError(f"top_k={params.top_k} is greater than the vocabulary of {limits.vocab_size}; 0 keeps all")
    room = limits.max_model_len - len(token_ids)
    if room < 1:
        raise ContextWindowExceededError(
            f"the prompt has {len(token_ids)} tokens; the context window is {limits.max_model_len} and one token must be left "
            "for the answer. Shorten the prompt, or, if the model allows more, start with a larger max_model_len and pool"
        )
    wanted = max(params.max_tokens or 0, params.min_tokens)
    if wanted > room:
        raise ContextWindowExceededError(
            f"the prompt has {len(token_ids)} tokens and {wanted} more are asked for; the context window is "
            f"{limits.max_model_len}, which leaves {room}. Lower max_tokens to {room} (None means: as many as fit), shorten the "
            "prompt, or, if the model allows more, start with a larger max_model_len and pool"
        )


def check_prompt_fits(num_tokens: int, *, num_blocks: int, block_size: int, max_num_batched_tokens: int | None) -> None:
    """Raise unless a prompt of ``num_tokens`` can ever be computed in this pool (and, if given, in one step)."""
    needed = (num_tokens + block_size - 1) // block_size
    if needed > num_blocks:
        raise ContextWindowExceededError(
            f"the prompt of {num_tokens} tokens needs {needed} KV blocks of {block_size} tokens, the pool has {num_blocks}; "
            "shorten the prompt or enlarge the pool (num_blocks or kv_cache_bytes)"
        )
    if max_num_batched_tokens is not None and num_tokens > max_num_batched_tokens:
        raise ContextWindowExceededError(
            f"the prompt has {num_tokens} tokens and one step may compute {max_num_batched_tokens}; "
            "raise max_num_batched_tokens or switch enable_chunked_prefill on"
        )
