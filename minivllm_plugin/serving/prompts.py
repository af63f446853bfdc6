"""The forms in which a prompt may be given, reduced to one. Caller's thread; nothing is queued here."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minivllm_plugin.errors import InvalidRequestError
from minivllm_plugin.sampling_parameters import SamplingParams
from minivllm_plugin.serving.tokenizer import Tokenizer

__all__ = ["Prompt", "TokenizedPrompt", "as_prompt_list", "check_queueing", "one_for_each", "tokenize_prompt"]

# Text, token ids, or vLLM's dictionaries: {"prompt": text} or {"prompt_token_ids": ids}, either with "cache_salt".
Prompt = str | Sequence[int] | Mapping[str, Any]

DICTIONARY_KEYS = {"prompt", "prompt_token_ids", "cache_salt"}


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """A prompt as the engine takes it. ``text`` is None when token ids were given."""

    token_ids: list[int]
    text: str | None = None
    cache_salt: str | None = None


def tokenize_prompt(prompt: Prompt, tokenizer: Tokenizer | None) -> TokenizedPrompt:
    """Raises InvalidRequestError for anything that is not a prompt, naming it."""
    if isinstance(prompt, Mapping):
        return _from_dictionary(prompt, tokenizer)
    if isinstance(prompt, str):
        if not prompt:
            raise InvalidRequestError("the prompt is an empty string; pass some text")
        if tokenizer is None:
            raise InvalidRequestError("this model has no tokenizer (dummy weights); pass token ids instead of text")
        return TokenizedPrompt(tokenizer.encode(prompt), prompt)
    if isinstance(prompt, Sequence) and not isinstance(prompt, bytes | bytearray):
        return TokenizedPrompt([*prompt])
    raise InvalidRequestError(
        f"a prompt is text, a list of token ids or a dictionary, got {type(prompt).__name__}: {prompt!r:.80}"
    )


def as_prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or a list of them; a list of integers is one prompt."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes | bytearray):
        raise InvalidRequestError(f"prompts must be a prompt or a list of prompts, got {type(prompts).__name__}")
    if prompts and all(isinstance(item, int) for item in prompts):
        return [prompts]  # type: ignore[list-item]  # the check above is what a type checker cannot see
    return list(prompts)  # type: ignore[arg-type]


def one_for_each(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int, default: SamplingParams
) -> list[SamplingParams]:
    """One SamplingParams for all prompts, or one each."""
    if params is None:
        return [default] * count
    if isinstance(params, SamplingParams):
        return [params] * count
    if isinstance(params, Sequence) and all(isinstance(item, SamplingParams) for item in params):
        if len(params) != count:
            raise InvalidRequestError(f"{len(params)} SamplingParams for {count} prompts; pass one, or one for each")
        return list(params)
    raise InvalidRequestError(f"sampling_params must be a SamplingParams or a list of them, got {params!r:.80}")


def check_queueing(request_id: object, priority: object, cache_salt: object, metadata: object = None) -> None:
    """Raise InvalidRequestError unless the engine can queue a request under these; None stands for what is not given."""
    if request_id is not None and not isinstance(request_id, str):
        raise InvalidRequestError(f"request_id must be a string or None, got {request_id!r:.100}")
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise InvalidRequestError(f"priority must be an integer (smaller runs first), got {priority!r:.100}")
    if cache_salt is not None and (not isinstance(cache_salt, str) or not cache_salt):
        raise InvalidRequestError(f"cache_salt must be a non-empty string, got {cache_salt!r:.100}")
    if metadata is not None and not isinstance(metadata, Mapping):
        raise InvalidRequestError(f"metadata must be a dictionary or None, got {metadata!r:.100}")


def _from_dictionary(prompt: Mapping[str, Any], tokenizer: Tokenizer | None) -> TokenizedPrompt:
    unknown = sorted(set(prompt) - DICTIONARY_KEYS)
    if unknown:
        raise InvalidRequestError(
            f"unknown key {unknown[0]!r} in a prompt dictionary; known are {', '.join(sorted(DICTIONARY_KEYS))}"
        )
    salt = prompt.get("cache_salt")
    check_queueing(None, 0, salt)
    content = [prompt[key] for key in ("prompt_token_ids", "prompt") if prompt.get(key) is not None]
    if not content or isinstance(content[0], Mapping):
        raise InvalidRequestError("a prompt dictionary needs 'prompt' (text) or 'prompt_token_ids'")
    parsed = tokenize_prompt(content[0], tokenizer)
    text = prompt.get("prompt")
    return TokenizedPrompt(parsed.token_ids, text if isinstance(text, str) else parsed.text, salt)
