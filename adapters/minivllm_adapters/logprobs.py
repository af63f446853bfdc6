"""Log-probabilities in OpenAI's shape for chats. Imports LiteLLM's types; used by the response builders."""

from collections.abc import Mapping, Sequence

from litellm.types.utils import ChatCompletionTokenLogprob, ChoiceLogprobs, TopLogprob

from minivllm_plugin.serving.logprobs import Logprob

__all__ = ["chat_logprobs"]


def chat_logprobs(entries: "Sequence[Mapping[int, Logprob]] | None", count: int) -> ChoiceLogprobs | None:
    """One entry a token, with the ``count`` most likely ones; None when they were not asked for."""
    if entries is None:
        return None
    return ChoiceLogprobs(content=[_entry(entry, count) for entry in entries])


def _entry(entry: "Mapping[int, Logprob]", count: int) -> ChatCompletionTokenLogprob:
    chosen = next(iter(entry.values()))
    top = sorted(entry.values(), key=lambda one: one.rank)[:count]
    text = chosen.decoded_token or ""
    return ChatCompletionTokenLogprob(
        token=text,
        bytes=list(text.encode()),
        logprob=chosen.logprob,
        top_logprobs=[
            TopLogprob(token=one.decoded_token or "", bytes=list((one.decoded_token or "").encode()), logprob=one.logprob)
            for one in top
        ],
    )
