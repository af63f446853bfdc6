"""How likely tokens were: plain records that travel from the sampler to the caller. Pure Python."""

from typing import NamedTuple

__all__ = ["TokenLogprobs"]


class TokenLogprobs(NamedTuple):
    """One place of a text: the token that stands there, and the most likely ones.

    Attributes:
        token_id: the one that was chosen (of a prompt: that is there).
        logprob: natural logarithm of its probability under the model's raw logits, before any parameter changes them.
        rank: 1 for the most likely token, counting those that are strictly more likely.
        top_token_ids, top_logprobs: as many as asked for, the most likely first.
    """

    token_id: int
    logprob: float
    rank: int
    top_token_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]
