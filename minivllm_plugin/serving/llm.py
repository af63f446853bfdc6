"""LLM: an engine in the caller's process, with vLLM's names. Any thread and any event loop may use one object at once.

Owns the pairing of a service with its tokenizer and its plugins, and the forms in which prompts come in. Callers' threads
tokenise and check (:mod:`minivllm_plugin.serving.submission`); the engine thread computes.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from minivllm_plugin.config import EngineConfig
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
from minivllm_plugin.serving.conversations import (
    ConversationRenderer,
    Messages,
    as_conversation_list,
    is_conversation,
    template_options,
)
from minivllm_plugin.serving.embedding import EmbeddingOutput, EmbeddingRequest
from minivllm_plugin.serving.loading import Loaded, load
from minivllm_plugin.serving.outputs import RequestOutput
from minivllm_plugin.serving.plugging import PluginLifecycle
from minivllm_plugin.serving.preparation import RequestPreparation
from minivllm_plugin.serving.prompts import Prompt, TokenizedPrompt, as_prompt_list, one_for_each, tokenize_prompt
from minivllm_plugin.serving.service import EngineService
from minivllm_plugin.serving.stream import RequestStream
from minivllm_plugin.serving.submission import RequestSubmission
from minivllm_plugin.serving.tokenizer import Tokenizer

__all__ = ["LLM"]

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
        self._renderer = ConversationRenderer(self.tokenizer, self._loaded.chat_template or config.chat_template)
        self._formats = OutputFormats(
            plugins.extensions.parsers,
            tool_call_parser=config.tool_call_parser,
            reasoning_parser=config.reasoning_parser,
            chat_template=self._renderer.template_text,
        )
        self._preparation = RequestPreparation(self.tokenizer, self._loaded.limits, plugins.extensions)
        self._submission = RequestSubmission(self._service, self._loaded, self._preparation)
        # The engine goes with the last who can ask it for something: the LLM, or the handle of a request that is not over.
        weakref.finalize(self._submission, self._service.close_soon)

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
        if is_conversation(prompt):
            return len(self._renderer.render(prompt, template_options()).token_ids)  # type: ignore[arg-type]  # what was asked
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
        options = template_options(tools, add_generation_prompt, continue_final_message, chat_template_kwargs)
        rendered = [self._renderer.render(conversation, options) for conversation in as_conversation_list(messages)]
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
        submission = self._submission
        for prompt in tokenized:
            submission.check_embedding(prompt)
        jobs = [lambda prompt=prompt: submission.submit_embedding(prompt, dimensions=dimensions) for prompt in tokenized]
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
        return self._submission.submit(
            tokenized,
            params,
            request_id=request_id,
            timeout=timeout,
            priority=priority,
            cache_salt=cache_salt,
            metadata=metadata,
        )

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
        options = template_options(tools, add_generation_prompt, continue_final_message, chat_template_kwargs)
        rendered = self._renderer.render(messages, options)
        params = one_for_each(sampling_params, 1, self.default_sampling_params())[0]
        return self._submission.submit(
            rendered,
            params,
            request_id=request_id,
            timeout=timeout,
            priority=priority,
            cache_salt=cache_salt,
            metadata=metadata,
        )

    def submit_embedding(
        self, prompt: Prompt, *, dimensions: int | None = None, timeout: float | None = None, priority: int = 0
    ) -> EmbeddingRequest:
        """Check and queue one text for :meth:`embed`; the handle is asked for its ``result()`` or ``await aresult()``."""
        tokenized = tokenize_prompt(prompt, self.tokenizer)
        return self._submission.submit_embedding(tokenized, dimensions=dimensions, timeout=timeout, priority=priority)

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

    def _run_all(self, prompts: list[TokenizedPrompt], params: list[SamplingParams], progress: bool) -> list[RequestOutput]:
        submission = self._submission
        pairs = list(zip(prompts, params, strict=True))
        for prompt, one in pairs:
            submission.check(prompt, one)
        jobs = [lambda prompt=prompt, one=one: submission.submit(prompt, one) for prompt, one in pairs]
        return batch.run_all(jobs, progress=progress, tokens_of=_num_tokens)


def _num_tokens(output: RequestOutput) -> int:
    return sum(len(completion.token_ids) for completion in output.outputs)
