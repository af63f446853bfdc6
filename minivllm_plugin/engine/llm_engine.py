"""One scheduler and one runner, advanced a step at a time. Pure Python, no thread of its own, no text.

``schedule -> run -> postprocess``: what a step produced is returned as plain records. The serving layer drives this from
its engine thread; tests and researchers drive it by hand.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as SequenceABC
from typing import Any, cast

from minivllm_plugin.engine.admission import Limits, check_request
from minivllm_plugin.engine.hooks import Hooks, Observer, StepTimes
from minivllm_plugin.engine.pipeline import Pipeline
from minivllm_plugin.engine.progress import (
    NOTHING,
    EngineStalledError,
    RequestProgress,
    StepOutput,
    known_lengths,
    progress_of,
    stalled,
)
from minivllm_plugin.engine.runner import AsyncRunner, Runner, RunnerAnswers
from minivllm_plugin.engine.scheduler import Scheduler
from minivllm_plugin.engine.sequence import Pooling, Sequence
from minivllm_plugin.errors import EngineError, InvalidRequestError, UnsupportedFeatureError
from minivllm_plugin.sampling_parameters import SamplingParams

__all__ = ["AsyncRunner", "EngineStalledError", "LLMEngine", "RequestProgress", "Runner", "RunnerAnswers", "StepOutput"]


class LLMEngine:
    """Turns prompts into tokens, a batch at a time.

    Args:
        scheduler: owns the queues and the pool.
        runner: computes batches; shares the scheduler's block geometry.
        limits: vocabulary and window that requests are checked against.
        encode: text -> token ids; without it only token ids are taken.
        clock: seconds, for arrival times and for what plugins are told.
        asynchronous: schedule and launch each batch before the tokens of the one before it are known; the runner is an
            :class:`AsyncRunner`. The tokens are the same, a token's way out is a step longer, and the device does not idle.

    Attributes:
        extra_arg_names: names in a request's ``extra_args`` that something here looks at; any other is refused.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        limits: Limits,
        encode: Callable[[str], list[int]] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        asynchronous: bool = False,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.limits = limits
        self.clock = clock
        self.extra_arg_names: frozenset[str] = frozenset()
        self._encode = encode
        self._hooks: Hooks | None = None
        self._observer: Observer | None = None
        self._pipeline = Pipeline(scheduler, cast(AsyncRunner, runner), clock) if asynchronous else None

    def attach(self, hooks: Hooks) -> None:
        """Let plugins watch and steer this engine. Once, before the first request."""
        self._hooks = hooks
        self._observer = hooks.attach(self.scheduler, self.clock)

    def add_prompt(
        self,
        prompt: str | SequenceABC[int],
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        pooling: Pooling | None = None,
    ) -> Sequence:
        """Tokenise and check a prompt, and put it into ``waiting``.

        Raises:
            InvalidRequestError, ContextWindowExceededError: before anything is queued.
            RequestRejectedError: a policy refused it.
        """
        self._refuse_reentry()
        if isinstance(prompt, str):
            if self._encode is None:
                raise InvalidRequestError("this engine has no tokenizer; pass token ids instead of text")
            prompt = self._encode(prompt)
        params = sampling_params if sampling_params is not None else SamplingParams()
        check_request(prompt, params, self.limits)
        unknown = sorted(set(params.extra_args or ()) - self.extra_arg_names)
        if unknown:
            known = ", ".join(sorted(self.extra_arg_names)) or "none"
            raise InvalidRequestError(f"nothing in this engine looks at {unknown[0]!r} in extra_args; known are {known}")
        if pooling is not None and not getattr(self.runner, "can_pool", False):
            raise UnsupportedFeatureError(
                "this engine gives no embeddings: what computes its model shows no hidden states; with "
                "MINIVLLM_KERNELS=reference, or on another device than the CPU, plain torch computes it, which does"
            )
        window = min(self.limits.max_model_len, params.max_model_length or self.limits.max_model_len)
        sequence = Sequence(
            prompt,
            sampling_params=params,
            request_id=request_id,
            priority=priority,
            cache_salt=cache_salt,
            metadata=metadata,
            pooling=pooling,
            max_model_length=window,
        )
        sequence.arrival_time = self.clock()
        if self._hooks is not None:
            self._hooks.before_queueing(sequence)
        self.scheduler.add_sequence(sequence)
        if self._observer is not None:
            self._observer.request_queued(sequence)
        return sequence

    def step(self) -> StepOutput:
        """Run one batch. Returns an empty output, of the same shape, when there is nothing to do.

        Raises:
            EngineStalledError: there is work but no batch.
        """
        self._refuse_reentry()
        if self._pipeline is not None:
            return self._pipeline.step(self._observer)
        observer = self._observer
        began = self.clock()
        batch, is_prefill = self.scheduler.schedule()
        if not batch:
            if not self.scheduler.is_finished():
                raise stalled(self.scheduler)
            return NOTHING
        num_tokens = sum(seq.num_scheduled_tokens for seq in batch)
        scheduled = self.clock()
        if observer is not None:
            observer.step_started(observer.step_planned(batch))
        run_began = self.clock()
        token_ids = self.runner.run(batch, is_prefill)
        ran = self.clock()
        lengths = known_lengths(batch)
        self.scheduler.postprocess(batch, token_ids)
        progress = progress_of(batch, lengths)
        if observer is not None:
            times = StepTimes(began, scheduled - began, ran - run_began, self.clock() - ran)
            observer.step_finished([seq for seq in batch if seq.is_finished], progress, num_tokens, times)
        return StepOutput(tuple(batch), is_prefill, num_tokens, progress, self.scheduler.num_steps)

    def abort(self, request_id: str) -> Sequence | None:
        """End a live request now and return it, since no later step mentions it; unknown ids are ignored."""
        self._refuse_reentry()
        sequence = self.scheduler.abort(request_id)
        if sequence is not None and self._observer is not None:
            self._observer.request_aborted(sequence)
        return sequence

    def generate(
        self, prompts: Iterable[str | SequenceABC[int]], sampling_params: SamplingParams | None = None
    ) -> list[list[int]]:
        """Run all prompts to their ends; completion token ids in the order of the prompts.

        A refused prompt or a failing step leaves none of them behind in the queues.
        """
        sequences: list[Sequence] = []
        try:
            for prompt in [prompts] if isinstance(prompts, str) else prompts:
                sequences.append(self.add_prompt(prompt, sampling_params))
            while not all(seq.is_finished for seq in sequences):
                self.step()
        except BaseException:
            for seq in sequences:
                self.abort(seq.request_id or "")
            raise
        return [seq.completion_token_ids for seq in sequences]

    def _refuse_reentry(self) -> None:
        if self._hooks is not None and self._hooks.is_calling:
            raise EngineError(
                "a plugin called back into the engine from inside a hook; hand the work to another thread, or use the handle "
                "of minivllm_engine_started"
            )
