"""LLM: an engine in the caller's process, with vLLM's names. Any thread and any event loop may use one object at once.

Owns the pairing of a service with its tokenizer and the forms in which prompts come in. Callers' threads tokenise and
check; the engine thread computes.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from minivllm_plugin.config import EngineConfig
from minivllm_plugin.engine.admission import check_request
from minivllm_plugin.engine.llm_engine import LLMEngine
from minivllm_plugin.engine.snapshot import EngineSnapshot
from minivllm_plugin.errors import InvalidRequestError
from minivllm_plugin.extensions import Extensions
from minivllm_plugin.parsing.chat_output import ChatOutputParser
from minivllm_plugin.parsing.formats import OutputFormats
from minivllm_plugin.plugins.manager import EnginePlugins
from minivllm_plugin.plugins.reports import PluginReport
from minivllm_plugin.sampling_parameters import SamplingParams
from minivllm_plugin.serving import batch
from minivllm_plugin.serving.chat import render_chat
from minivllm_plugin.serving.choices import Choice
from minivllm_plugin.serving.detokenizer import Detokenizer
from minivllm_plugin.serving.embedding import EmbeddingOutput, EmbeddingRequest
from minivllm_plugin.serving.live_requests import Request
from minivllm_plugin.serving.loading import Loaded, load
from minivllm_plugin.serving.outbox import Outbox
from minivllm_plugin.serving.outputs import RequestOutput
from minivllm_plugin.serving.plugging import PluginLifecycle
from minivllm_plugin.serving.preparation import RequestPreparation
from minivllm_plugin.serving.prompts import (
    Prompt,
    TokenizedPrompt,
    as_prompt_list,
    check_queueing,
    one_for_each,
    tokenize_prompt,
)
from minivllm_plugin.serving.service import EngineService
from minivllm_plugin.serving.stream import RequestStream, deadline_after
from minivllm_plugin.serving.tokenizer import Tokenizer

__all__ = ["LLM"]

EMBEDDING_PARAMS = SamplingParams(max_tokens=None, temperature=0.0)  # nothing is sampled

Messages = Sequence[Mapping[str, Any]]
Loader = Callable[[EngineConfig], tuple[LLMEngine, Loaded]]


class LLM:
    """A model, ready to answer.

    Args:
        model: catalog name, hub id, directory or ``.gguf`` file.
        options: fields of :class:`minivllm_plugin.config.EngineConfig`.

    Raises:
        ConfigError, ModelError: from the constructor; nothing is left running.
    """

    def __init__(self, model: str = "smollm2-135m", **options: Any) -> None:
        self._start(EngineConfig.from_options(model, options), None)

    @classmethod
    def from_loader(cls, config: EngineConfig, loader: Loader) -> "LLM":
        """An LLM over an engine of your own making, such as one with a scripted runner. ``loader`` runs on the engine thread."""
        llm = cls.__new__(cls)
        llm._start(config, loader)
        return llm

    def _start(self, config: EngineConfig, loader: Loader | None) -> None:
        plugins = EnginePlugins(config, Extensions.builtin())
        config = plugins.configure(config)
        loader = partial(load, extensions=plugins.extensions) if loader is None else loader
        loaded: list[Loaded] = []

        def build() -> LLMEngine:  # must not hold the LLM, or it could never be collected
            engine, about = loader(config)
            engine.attach(plugins)
            plugins.extensions.attach(engine, about.tokenizer)
            loaded.append(about)
            return engine

        self.config = config
        self._plugins = plugins
        self._service = EngineService(
            build,
            name=config.model,
            max_unfinished=config.max_num_sequences + config.max_queue_size,
            lifecycle=PluginLifecycle(plugins),
        )
        try:
            self._service.wait_started()
        except BaseException:  # KeyboardInterrupt: what is being loaded must not stay
            self._service.close_soon()
            raise
        self._loaded = loaded[0]
        self._formats = OutputFormats(
            plugins.extensions.parsers,
            tool_call_parser=config.tool_call_parser,
            reasoning_parser=config.reasoning_parser,
            chat_template=self._chat_template(),
        )
        self._preparation = RequestPreparation(self._loaded.tokenizer, self._loaded.limits, plugins.extensions)
        weakref.finalize(self, self._service.close_soon)

    # --- about ---------------------------------------------------------------------------------------------------

    @property
    def model_name(self) -> str:
        return self.config.model

    @property
    def tokenizer(self) -> Tokenizer | None:
        """None for dummy weights without tokenizer files."""
        return self._loaded.tokenizer

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and completion together: the model's window, the pool or the setting, whichever is least."""
        return self._loaded.limits.max_model_len

    @property
    def vocab_size(self) -> int:
        return self._loaded.limits.vocab_size

    @property
    def num_blocks(self) -> int:
        return self._loaded.num_blocks

    @property
    def dtype(self) -> str:
        """Of the weights: float32, bfloat16, float16 or int8."""
        return self._loaded.dtype

    @property
    def kernels(self) -> str:
        """What computes: ``cpu`` (the compiled kernels) or ``torch``."""
        return self._loaded.kernels

    @property
    def device(self) -> str:
        return self._loaded.device

    @property
    def is_healthy(self) -> bool:
        """True while requests are served; False once closed or dead."""
        return self._service.is_healthy

    def snapshot(self) -> EngineSnapshot:
        """Queues, pool and totals as of a recent step."""
        return self._service.snapshot()

    def plugins(self) -> list[PluginReport]:
        """The plugins of this engine: what they implement, cost and got wrong."""
        return self._plugins.reports()

    def default_sampling_params(self) -> SamplingParams:
        """What the model's ``generation_config.json`` recommends, without a token limit."""
        return SamplingParams(max_tokens=None).replace(**self._loaded.generation_defaults)

    def output_parser(
        self, tools: Sequence[Mapping[str, Any]] = (), *, prompt_token_ids: Sequence[int] = (), reasoning: bool = True
    ) -> ChatOutputParser:
        """What takes one answer of this model apart into reasoning, text and tool calls, whole or as it streams.

        Args:
            tools: of the request, in OpenAI's form; without any, calls are not looked for.
            prompt_token_ids: of the request: they tell whether the template has already opened the reasoning.
            reasoning: False leaves reasoning in the text.
        """
        names = [tool["function"]["name"] for tool in tools]
        tail = "" if self.tokenizer is None else self.tokenizer.decode(prompt_token_ids[-8:], skip_special_tokens=False)
        return ChatOutputParser(
            self._formats.reasoning_parser(tail, self.tokenizer) if reasoning else None,
            self._formats.tool_parser(names, self.tokenizer) if names else None,
        )

    @property
    def tool_format(self) -> str:
        """How this model writes tool calls: ``hermes``, ``json``, ``none``, or the name of a plugin's parser."""
        return self._formats.tool_format

    def count_tokens(self, prompt: Prompt | Messages) -> int:
        """Tokens of a prompt, or of a conversation as :meth:`chat` would render it."""
        if isinstance(prompt, Sequence) and not isinstance(prompt, str) and prompt and isinstance(prompt[0], Mapping):
            return len(self._render(prompt, {}))  # type: ignore[arg-type]  # a list of mappings is a conversation
        return len(tokenize_prompt(prompt, self.tokenizer).token_ids)  # type: ignore[arg-type]

    # --- many at once --------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete all prompts; results in their order.

        Args:
            prompts: text, token ids, a dictionary, or a list of these.
            sampling_params: one for all, or one each; None is vLLM's default of 16 tokens with the model's own sampling.
            use_tqdm: show a progress bar on standard error.

        Raises:
            InvalidRequestError: any prompt or parameter is bad; then none has been started.
        """
        tokenized = [tokenize_prompt(prompt, self.tokenizer) for prompt in as_prompt_list(prompts)]
        params = one_for_each(sampling_params, len(tokenized), self.default_sampling_params().replace(max_tokens=16))
        return self._run_all(tokenized, params, use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several; always a list. None for ``sampling_params`` runs until the model ends."""
        options = _template_options(tools, add_generation_prompt, continue_final_message, chat_template_kwargs)
        rendered = [TokenizedPrompt(self._render(conversation, options)) for conversation in _conversations(messages)]
        params = one_for_each(sampling_params, len(rendered), self.default_sampling_params())
        return self._run_all(rendered, params, use_tqdm)

    def embed(
        self, prompts: Prompt | Sequence[Prompt], *, dimensions: int | None = None, use_tqdm: bool = True
    ) -> list[EmbeddingOutput]:
        """One vector a text, of length 1, pooled as the model asks for; results in the order of the texts.

        Args:
            dimensions: keep the first so many values (for models trained with Matryoshka losses); None keeps all.

        Raises:
            InvalidRequestError: any prompt is bad; then none has been started.
        """
        tokenized = [tokenize_prompt(prompt, self.tokenizer) for prompt in as_prompt_list(prompts)]
        for prompt in tokenized:
            check_request(prompt.token_ids, EMBEDDING_PARAMS, self._loaded.limits)
        jobs = [lambda prompt=prompt: self._submit_embedding(prompt, dimensions) for prompt in tokenized]
        return batch.run_all(jobs, progress=use_tqdm, tokens_of=lambda output: len(output.prompt_token_ids))

    # --- one at a time -------------------------------------------------------------------------------------------

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> RequestStream:
        """Start one prompt and iterate over what comes: ``for delta in llm.stream("…"): print(delta.text)``."""
        return self.submit(prompt, sampling_params)

    def submit(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        timeout: float | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> RequestStream:
        """Check and queue one prompt; the handle is iterated, awaited or asked for its ``result()``.

        Args:
            request_id: unique among unfinished requests; None takes a number.
            timeout: seconds from now until the request is aborted with RequestTimeoutError.
            priority: smaller goes first under ``scheduling_policy="priority"``.
            cache_salt: share cached prefixes only with requests of the same salt.
            metadata: for plugins, such as ``{"tenant": "acme"}``; the engine itself does not look at it.

        Raises:
            InvalidRequestError, ContextWindowExceededError: it can never be served.
            QueueFullError, EngineClosedError, EngineDeadError: it cannot be served now.
        """
        tokenized = tokenize_prompt(prompt, self.tokenizer)
        params = one_for_each(sampling_params, 1, self.default_sampling_params().replace(max_tokens=16))[0]
        return self._submit(tokenized, params, request_id, timeout, priority, cache_salt, metadata)

    def submit_chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        request_id: str | None = None,
        timeout: float | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> RequestStream:
        """:meth:`submit` for a conversation, rendered by the model's chat template."""
        options = _template_options(tools, add_generation_prompt, continue_final_message, chat_template_kwargs)
        tokenized = TokenizedPrompt(self._render(messages, options))
        params = one_for_each(sampling_params, 1, self.default_sampling_params())[0]
        return self._submit(tokenized, params, request_id, timeout, priority, cache_salt, metadata)

    def submit_embedding(
        self, prompt: Prompt, *, dimensions: int | None = None, timeout: float | None = None, priority: int = 0
    ) -> EmbeddingRequest:
        """Check and queue one text for :meth:`embed`; the handle is asked for its ``result()`` or ``await aresult()``."""
        return self._submit_embedding(tokenize_prompt(prompt, self.tokenizer), dimensions, timeout, priority)

    def abort(self, request_id: str) -> None:
        """End a request before the next step; its reader sees reason ``abort``. Unknown ids are ignored."""
        if not isinstance(request_id, str):
            raise InvalidRequestError(f"request_id must be a string, got {request_id!r:.100}")
        self._service.abort(request_id)

    def close(self) -> None:
        """Stop the engine and give its memory back. Unfinished requests fail with EngineClosedError. Idempotent."""
        self._service.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # --- helpers -------------------------------------------------------------------------------------------------

    def _chat_template(self) -> str | None:
        """Its text, if there is one."""
        wanted, tokenizer = self._loaded.chat_template, self._loaded.tokenizer
        if tokenizer is None:
            return wanted
        return tokenizer.chat_template if wanted is None else tokenizer.chat_templates.get(wanted, wanted)

    def _render(self, messages: Messages, options: Mapping[str, Any]) -> list[int]:
        if self.tokenizer is None:
            raise InvalidRequestError("this model has no tokenizer (dummy weights); pass token ids to generate() or submit()")
        return render_chat(
            self.tokenizer, messages, chat_template=self._loaded.chat_template or self.config.chat_template, **options
        )

    def _submit(
        self,
        prompt: TokenizedPrompt,
        params: SamplingParams,
        request_id: str | None = None,
        timeout: float | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> RequestStream:
        if params.stop and self.tokenizer is None:
            raise InvalidRequestError(f"stop={params.stop!r} needs a tokenizer, and this model has none; use stop_token_ids")
        deadline = None if timeout is None else deadline_after(timeout)
        if timeout is not None and timeout <= 0:
            raise InvalidRequestError(f"timeout={timeout} must be greater than 0 seconds, or None")
        salt = cache_salt if cache_salt is not None else prompt.cache_salt
        check_queueing(request_id, priority, salt, metadata)
        check_request(prompt.token_ids, params, self._loaded.limits)
        params = self._preparation.prepare(params)
        identity = request_id if request_id is not None else self._service.next_request_id()
        service = self._service
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
                    Detokenizer(self.tokenizer, params, prompt.token_ids),
                    self.tokenizer,
                    wants_logprobs=params.logprobs is not None,
                )
                for index in range(params.n)
            ],
            outbox=outbox,
            deadline=deadline,
            has_stop_strings=bool(params.stop),
            tokenizer=self.tokenizer,
        )
        service.submit(request)
        stream.arm(
            lambda choice: self._service.abort_request(request, choice)
        )  # holds the LLM, which else might be collected, and close
        return stream

    def _submit_embedding(
        self, prompt: TokenizedPrompt, dimensions: int | None, timeout: float | None = None, priority: int = 0
    ) -> EmbeddingRequest:
        deadline = None if timeout is None else deadline_after(timeout)
        check_queueing(None, priority, prompt.cache_salt)
        check_request(prompt.token_ids, EMBEDDING_PARAMS, self._loaded.limits)
        identity = self._service.next_request_id()
        service = self._service
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

    def _run_all(self, prompts: list[TokenizedPrompt], params: list[SamplingParams], progress: bool) -> list[RequestOutput]:
        for prompt, one in zip(prompts, params, strict=True):
            check_request(prompt.token_ids, one, self._loaded.limits)
            self._preparation.prepare(one)  # again when it is submitted: grammars are kept
        jobs = [lambda prompt=prompt, one=one: self._submit(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
        return batch.run_all(jobs, progress=progress, tokens_of=_num_tokens)


def _conversations(messages: object) -> list[Any]:
    """The conversations of :meth:`LLM.chat`, one or several; what is neither goes on, to be refused by its name."""
    if isinstance(messages, Sequence) and messages and isinstance(messages[0], Sequence) and not isinstance(messages[0], str):
        return list(messages)
    return [messages]


def _template_options(
    tools: Sequence[Mapping[str, Any]] | None,
    add_generation_prompt: bool,
    continue_final_message: bool,
    chat_template_kwargs: Mapping[str, Any] | None,
) -> dict[str, Any]:
    if chat_template_kwargs is not None and not isinstance(chat_template_kwargs, Mapping):
        raise InvalidRequestError(f"chat_template_kwargs must be a dictionary, got {chat_template_kwargs!r:.100}")
    return {
        "tools": tools,
        "add_generation_prompt": add_generation_prompt,
        "continue_final_message": continue_final_message,
        "template_kwargs": dict(chat_template_kwargs or {}),
    }


def _num_tokens(output: RequestOutput) -> int:
    return sum(len(completion.token_ids) for completion in output.outputs)
