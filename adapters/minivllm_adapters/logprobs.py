"""Log-probabilities in the shapes of OpenAI's chats and of vLLM's server. Imports LiteLLM's types; for the response builders."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from litellm.types.utils import ChatCompletionTokenLogprob, ChoiceLogprobs, TopLogprob

from minivllm_plugin.serving.logprobs import Logprob

if TYPE_CHECKING:
    from minivllm_plugin.serving.tokenizer import Tokenizer

__all__ = ["chat_logprobs", "prompt_logprobs"]

IMPOSSIBLE = -9999.0  # for minus infinity, which JSON lacks; OpenAI's API and vLLM's server say the same


def chat_logprobs(
    entries: "Sequence[Mapping[int, Logprob]] | None", count: int, tokenizer: "Tokenizer | None"
) -> ChoiceLogprobs | None:
    """One entry a token, with the ``count`` most likely ones; None when they were not asked for."""
    if entries is None:
        return None
    return ChoiceLogprobs(content=[_entry(entry, count, tokenizer) for entry in entries])


def _entry(entry: "Mapping[int, Logprob]", count: int, tokenizer: "Tokenizer | None") -> ChatCompletionTokenLogprob:
    told = {
        token: TopLogprob(token=one.decoded_token or "", bytes=_bytes(token, one, tokenizer), logprob=_finite(one))
        for token, one in entry.items()
    }
    chosen = told[next(iter(entry))]
    top = sorted(entry, key=lambda token: entry[token].rank)[:count]
    return ChatCompletionTokenLogprob(
        token=chosen.token, bytes=chosen.bytes, logprob=chosen.logprob, top_logprobs=[told[token] for token in top]
    )


def _bytes(token: int, one: "Logprob", tokenizer: "Tokenizer | None") -> list[int]:
    """Joined over all tokens they are the text, even where a character is spread over several tokens."""
    spelt = b"" if tokenizer is None else tokenizer.token_bytes(token)
    return list(spelt or (one.decoded_token or "").encode())


def prompt_logprobs(entries: "Sequence[Mapping[int, Logprob] | None]") -> list[dict[str, dict[str, object]] | None]:
    """One dictionary a prompt token, token id (as text, since it becomes JSON) -> how likely it was; None for the first."""
    return [
        None if entry is None else {str(token): {**one._asdict(), "logprob": _finite(one)} for token, one in entry.items()}
        for entry in entries
    ]


def _finite(one: "Logprob") -> float:
    return max(one.logprob, IMPOSSIBLE)
