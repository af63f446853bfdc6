"""Log-probabilities as callers get them: vLLM's shape, one dictionary a token, with the text of each token."""

from collections.abc import Sequence
from typing import NamedTuple

from minivllm_plugin.engine.logprobs import TokenLogprobs
from minivllm_plugin.serving.tokenizer import Tokenizer

__all__ = ["Logprob", "as_mapping", "prompt_mappings"]


class Logprob(NamedTuple):
    """How likely one token was.

    Attributes:
        logprob: natural logarithm of its probability under the model's raw logits.
        rank: 1 for the most likely token of the vocabulary; equally likely ones share it.
        decoded_token: its text by itself (half a character is U+FFFD); None without a tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


def as_mapping(entry: TokenLogprobs, tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    """Token id -> how likely it was: the chosen one first, then the most likely ones."""

    def text(token_id: int) -> str | None:
        return None if tokenizer is None else tokenizer.decode([token_id], skip_special_tokens=False)

    told = {entry.token_id: Logprob(entry.logprob, entry.rank, text(entry.token_id))}
    for token_id, logprob in zip(entry.top_token_ids, entry.top_logprobs, strict=True):
        rank = entry.top_logprobs.index(logprob) + 1  # equal ones share a rank, as the chosen one does with its equals
        told.setdefault(token_id, Logprob(logprob, rank, text(token_id)))
    return told


def prompt_mappings(
    entries: Sequence[TokenLogprobs] | None, tokenizer: Tokenizer | None
) -> list[dict[int, Logprob] | None] | None:
    """One entry a prompt token; None for the first, before which nothing stands. None when they were not asked for."""
    return None if entries is None else [None, *(as_mapping(entry, tokenizer) for entry in entries)]
