"""From a tokenised prompt to a queued request and its handle: checked, prepared, put into the engine's inbox.

One per LLM, any caller's thread. A handle keeps this object, and with it the engine, until the request is over.
"""

from collections.abc import Mapping
from typing import Any

from minivllm_plugin.engine.admission import check_request
from minivllm_plugin.errors import InvalidRequestError
from minivllm_plugin.sampling_parameters import SamplingParams
from minivllm_plugin.serving.choices import Choice
from minivllm_plugin.serving.deadlines import deadline_after
from minivllm_plugin.serving.detokenizer import Detokenizer
from minivllm_plugin.serving.embedding import EmbeddingRequest
from minivllm_plugin.serving.live_requests import Request
from minivllm_plugin.serving.loading import Loaded
from minivllm_plugin.serving.outbox import Outbox
from minivllm_plugin.serving.preparation import RequestPreparation
from minivllm_plugin.serving.prompts import TokenizedPrompt, check_queueing
from minivllm_plugin.serving.service import EngineService
from minivllm_plugin.serving.stream import RequestStream

__all__ = ["RequestSubmission"]

EMBEDDING_PARAMS = SamplingParams(max_tokens=None, temperature=0.0)  # nothing is sampled


class RequestSubmission:
    """Submits the requests of one engine.

    Args:
        service: takes them.
        loaded: what the model can take.
        preparation: of sampling parameters.
    """

    def __init__(self, service: EngineService, loaded: Loaded, preparation: RequestPreparation) -> None:
        self._service = service
        self._loaded = loaded
        self._preparation = preparation

    def check(self, prompt: TokenizedPrompt, params: SamplingParams) -> None:
        """Raise what :meth:`submit` would raise for a request that can never be served. What was compiled for it is kept."""
        check_request(prompt.token_ids, params, self._loaded.limits)
        self._preparation.prepare(params)

    def check_embedding(self, prompt: TokenizedPrompt) -> None:
        """:meth:`check` for :meth:`submit_embedding`."""
        check_request(prompt.token_ids, EMBEDDING_PARAMS, self._loaded.limits)

    def submit(
        self,
        prompt: TokenizedPrompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        timeout: float | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> RequestStream:
        """Queue a request that generates. Arguments and errors as of :meth:`minivllm_plugin.LLM.submit`."""
        tokenizer, service = self._loaded.tokenizer, self._service
        if params.stop and tokenizer is None:
            raise InvalidRequestError(f"stop={params.stop!r} needs a tokenizer, and this model has none; use stop_token_ids")
        deadline = _deadline(timeout)
        salt = cache_salt if cache_salt is not None else prompt.cache_salt
        check_queueing(request_id, priority, salt, metadata)
        check_request(prompt.token_ids, params, self._loaded.limits)
        params = self._preparation.prepare(params)
        identity = request_id if request_id is not None else service.next_request_id()
        outbox = Outbox(on_lost_reader=lambda: service.abort_request(request))
        request = Request(identity, prompt.token_ids, params, outbox, priority, salt, deadline, metadata)
        # The stream exists before the request is queued, so that nothing can be queued that nobody can abort.
        stream = RequestStream(
            request_id=identity,
            prompt=prompt.text,
            prompt_token_ids=prompt.token_ids,
            choices=[
                Choice(
                    index,
                    Detokenizer(tokenizer, params, prompt.token_ids),
                    tokenizer,
                    wants_logprobs=params.logprobs is not None,
                )
                for index in range(params.n)
            ],
            outbox=outbox,
            deadline=deadline,
            has_stop_strings=bool(params.stop),
            tokenizer=tokenizer,
        )
        service.submit(request)
        stream.arm(lambda choice: self._service.abort_request(request, choice))  # by ``self``: that keeps the engine open
        return stream

    def submit_embedding(
        self, prompt: TokenizedPrompt, *, dimensions: int | None = None, timeout: float | None = None, priority: int = 0
    ) -> EmbeddingRequest:
        """Queue a request that ends with a vector. Arguments and errors as of :meth:`minivllm_plugin.LLM.submit_embedding`."""
        service = self._service
        deadline = _deadline(timeout)
        check_queueing(None, priority, prompt.cache_salt)
        self.check_embedding(prompt)
        identity = service.next_request_id()
        outbox = Outbox(on_lost_reader=lambda: service.abort_request(request))
        request = Request(
            identity,
            prompt.token_ids,
            EMBEDDING_PARAMS,
            outbox,
            priority,
            prompt.cache_salt,
            deadline,
            None,
            self._loaded.pooling,
        )
        handle = EmbeddingRequest(
            request_id=identity, prompt_token_ids=prompt.token_ids, outbox=outbox, deadline=deadline, dimensions=dimensions
        )
        service.submit(request)
        handle.arm(lambda: self._service.abort_request(request))
        return handle


def _deadline(timeout: float | None) -> float | None:
    """When a request with this timeout must have ended. One that could only expire is refused."""
    deadline = None if timeout is None else deadline_after(timeout)
    if timeout is not None and timeout <= 0:
        raise InvalidRequestError(f"timeout={timeout} must be greater than 0 seconds, or None")
    return deadline
