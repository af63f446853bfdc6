"""Embeddings: what a LiteLLM embedding call asks for, and the engine's vectors as LiteLLM's response. Imports LiteLLM.

LiteLLM lets neither ``dimensions`` nor ``encoding_format`` of a custom provider through; it refuses them, or drops them with
``drop_params``. In ``extra_body`` they arrive, and that is where :mod:`minivllm_adapters.proxy_hooks` puts them for clients of a
proxy. Runs on the caller's thread; nothing here waits for the engine.
"""

import base64
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from litellm import EmbeddingResponse, Usage
from litellm.types.utils import Embedding, PromptTokensDetailsWrapper

from minivllm_adapters.parameters_table import IGNORED
from minivllm_adapters.value_checks import integer, shortened
from minivllm_plugin.errors import InvalidRequestError, UnsupportedFeatureError

if TYPE_CHECKING:
    from minivllm_plugin.serving.embedding import EmbeddingOutput, EmbeddingRequest
    from minivllm_plugin.serving.llm import LLM

__all__ = ["EmbeddingPlan", "aresults", "embedding_response", "plan_embedding", "results", "submit"]

SUPPORTED = frozenset({"dimensions", "encoding_format", "priority"})
ENCODINGS = ("float", "base64")
MAX_TEXTS = 2048  # OpenAI's limit of one call; more are better sent in several calls than all queued at once


@dataclass(frozen=True, slots=True)
class EmbeddingPlan:
    """One call, understood and checked as far as that is possible without the model.

    Attributes:
        prompts: each a text or token ids.
        dimensions: of the vectors; None: as many as the model has.
        as_base64: little-endian float32 values in base64 instead of numbers.
        priority: smaller is served earlier under the engine's priority policy.
    """

    prompts: tuple[str | list[int], ...]
    dimensions: int | None = None
    as_base64: bool = False
    priority: int = 0


def plan_embedding(given: object, kwargs: Mapping[str, Any]) -> EmbeddingPlan:
    """Read one call.

    Args:
        given: OpenAI's ``input``: a text, token ids, or a list of either.
        kwargs: as LiteLLM hands them over. Every keyword that it did not keep for itself is in ``optional_params``; what stands
            there in ``extra_body`` is merged and wins.

    Raises:
        UnsupportedFeatureError: a parameter is unknown.
        InvalidRequestError: a value has the wrong type or range.
    """
    optional_params = kwargs.get("optional_params") or {}
    extra = optional_params.get("extra_body") or {}
    if not isinstance(extra, Mapping):
        raise InvalidRequestError(f"extra_body must be a dict of parameters, got {shortened(extra)}")
    wanted = {k: v for k, v in {**optional_params, **extra}.items() if v is not None and k != "extra_body" and k not in IGNORED}
    for name in sorted(wanted.keys() - SUPPORTED):
        raise UnsupportedFeatureError(
            f"unknown parameter {name}={shortened(wanted[name])} of an embedding; supported are {', '.join(sorted(SUPPORTED))}"
        )
    encoding = wanted.get("encoding_format", "float")
    if encoding not in ENCODINGS:
        raise InvalidRequestError(f"encoding_format must be float or base64, got {shortened(encoding)}")
    dimensions = integer(wanted, "dimensions", 0) if "dimensions" in wanted else None
    if dimensions is not None and dimensions < 1:
        raise InvalidRequestError(f"dimensions={dimensions} must be at least 1; leave it out for all of the model's")
    return EmbeddingPlan(_prompts(given), dimensions, encoding == "base64", integer(wanted, "priority", 0))


def submit(llm: "LLM", plan: EmbeddingPlan, timeout: float | None) -> "list[EmbeddingRequest]":
    """Queue every text of a call, or none: what was queued before a refusal is aborted."""
    requests: list[EmbeddingRequest] = []
    try:
        for prompt in plan.prompts:
            requests.append(llm.submit_embedding(prompt, dimensions=plan.dimensions, timeout=timeout, priority=plan.priority))
    except BaseException:
        _close_all(requests)
        raise
    return requests


def results(requests: "Sequence[EmbeddingRequest]") -> "list[EmbeddingOutput]":
    """Wait for every vector; a text that fails takes the others of the call with it."""
    try:
        return [request.result() for request in requests]
    except BaseException:
        _close_all(requests)
        raise


async def aresults(requests: "Sequence[EmbeddingRequest]") -> "list[EmbeddingOutput]":
    """The same on an event loop; a cancelled task aborts them all."""
    try:
        return [await request.aresult() for request in requests]
    except BaseException:
        _close_all(requests)
        raise


def embedding_response(model: str, plan: EmbeddingPlan, outputs: "Sequence[EmbeddingOutput]") -> EmbeddingResponse:
    """The vectors in the order of the texts, with the engine's own count of their tokens."""
    num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    cached = sum(output.num_cached_tokens for output in outputs)
    usage = Usage(
        prompt_tokens=num_tokens,
        completion_tokens=0,
        total_tokens=num_tokens,
        prompt_tokens_details=PromptTokensDetailsWrapper(cached_tokens=cached),
    )
    data = [
        Embedding(embedding=_base64(output.embedding) if plan.as_base64 else output.embedding, index=index, object="embedding")
        for index, output in enumerate(outputs)
    ]
    return EmbeddingResponse(model=model, data=data, usage=usage)


def _close_all(requests: "Sequence[EmbeddingRequest]") -> None:
    for request in requests:
        request.close()


def _base64(vector: Sequence[float]) -> str:
    values = array("f", vector)
    if array("H", [1]).tobytes() != b"\x01\x00":  # OpenAI's format is little-endian everywhere
        values.byteswap()
    return base64.b64encode(values.tobytes()).decode("ascii")


def _prompts(given: object) -> tuple[str | list[int], ...]:
    if isinstance(given, str) and given:
        return (given,)
    if not isinstance(given, list) or not given:
        raise InvalidRequestError(
            f"input must be a text, token ids, or a list of either that is not empty; got {shortened(given)}"
        )
    if all(isinstance(entry, int) and not isinstance(entry, bool) for entry in given):
        return (list(given),)
    if len(given) > MAX_TEXTS:
        raise InvalidRequestError(f"input has {len(given)} texts; at most {MAX_TEXTS} fit in one call")
    for index, entry in enumerate(given):
        if not isinstance(entry, str | list) or not entry:
            raise InvalidRequestError(f"input[{index}] must be a text or token ids that are not empty, got {shortened(entry)}")
    return tuple(given)
