"""One completion of a request on its consumer's side: its tokens, their text, their log-probabilities, its end.

Owned by a stream, which feeds it what the engine sent; one thread at a time.
"""

from collections.abc import Sequence

from minivllm_plugin.engine.llm_engine import RequestProgress
from minivllm_plugin.engine.logprobs import TokenLogprobs
from minivllm_plugin.engine.sequence import FinishReason
from minivllm_plugin.serving.detokenizer import Detokenizer
from minivllm_plugin.serving.logprobs import Logprob, as_mapping
from minivllm_plugin.serving.outputs import CompletionOutput, StreamDelta
from minivllm_plugin.serving.tokenizer import Tokenizer

__all__ = ["Choice"]


class Choice:
    """State of one completion.

    Args:
        index: its number among those of its request.
        detokenizer: fresh.
        tokenizer: for the texts beside log-probabilities.
        wants_logprobs: whether the request asked for them.
    """

    def __init__(self, index: int, detokenizer: Detokenizer, tokenizer: Tokenizer | None, *, wants_logprobs: bool) -> None:
        self.index = index
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self._detokenizer = detokenizer
        self._tokenizer = tokenizer
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] | None = [] if wants_logprobs else None

    @property
    def num_tokens(self) -> int:
        return len(self._token_ids)

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def output(self) -> CompletionOutput:
        """What has been read so far."""
        logprobs = self._logprobs
        return CompletionOutput(
            index=self.index,
            text=self._detokenizer.text,
            token_ids=list(self._token_ids),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            cumulative_logprob=None if logprobs is None else sum(entry.logprob for entry in logprobs),
            logprobs=None if logprobs is None else self._mappings(logprobs),
        )

    def advance(self, arrived: Sequence[RequestProgress]) -> tuple[StreamDelta, bool]:
        """Take in what the engine sent for this completion since the last time.

        Returns:
            What is new, and whether a stop string ended it here while the engine still runs: then it is to be aborted.
        """
        last = arrived[-1]
        ended = last if last.finish_reason is not None else None
        tokens = [progress.token_id for progress in arrived if progress.token_id is not None]
        closing = _closing_token(ended)
        before = len(self._token_ids)
        fed = self._detokenizer.feed(tokens[:-1] if closing is not None else tokens)
        text, stopped_here = fed.text, False
        if fed.stop_reason is not None:
            tokens = tokens[: fed.num_tokens]
            self.stop_reason, self.finish_reason = fed.stop_reason, "stop"
            stopped_here = ended is None
        elif ended is not None:
            self.finish_reason, self.stop_reason = ended.finish_reason, ended.stop_reason
            text += self._detokenizer.finish(ended.finish_reason or "stop", closing).text
        self._token_ids += tokens
        told: list[dict[int, Logprob]] | None = None
        if self._logprobs is not None:
            fresh = [progress.logprobs for progress in arrived if progress.logprobs is not None][: len(tokens)]
            self._logprobs += fresh
            told = self._mappings(fresh)
        delta = StreamDelta(
            text, tuple(self._token_ids[before:]), self.finish_reason, self.stop_reason, index=self.index, logprobs=told
        )
        return delta, stopped_here

    def _mappings(self, entries: Sequence[TokenLogprobs]) -> list[dict[int, Logprob]]:
        return [as_mapping(entry, self._tokenizer) for entry in entries]


def _closing_token(ended: RequestProgress | None) -> int | None:
    """The token that ended the request (end or stop token): it is in ``token_ids``, but not in the text."""
    if ended is None or ended.finish_reason != "stop" or ended.token_id is None:
        return None
    if isinstance(ended.stop_reason, str):  # a stop criterion's word: its token is part of the answer
        return None
    return ended.token_id
