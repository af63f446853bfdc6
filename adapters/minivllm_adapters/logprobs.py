"""Log-probabilities in the shapes of OpenAI's chats and of vLLM's server. Imports LiteLLM's types; for the response builders."""

from collections.abc import Mapping, Sequence

from litellm.types.utils import ChatCompletionTokenLogprob, ChoiceLogprobs, TopLogprob

from minivllm_plugin.serving.logprobs import Logprob

__all__ = ["chat_logprobs", "prompt_logprobs"]

IMPOSSIBLE = -9999.0  # for minus infinity, which JSON lacks; OpenAI's API and vLLM's server say the same


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
        logprob=_finite(chosen),
        top_logprobs=[
            TopLogprob(token=one.decoded_token or "", bytes=list((one.decoded_token or "").encode()), logprob=_finite(one))
            for one in top
        ],
    )


def prompt_logprobs(entries: "Sequence[Mapping[int, Logprob] | None]") -> list[dict[str, dict[str, object]] | None]:
    """One dictionary a prompt token, token id (as text, since it becomes JSON) -> how likely it was; None for the first."""
    return [
        None if entry is None else {str(token): {**one._asdict(), "logprob": _finite(one)} for token, one in entry.items()}
        for entry in entries
    ]


def _finite(one: "Logprob") -> float:
    return max(one.logprob, IMPOSSIBLE)
