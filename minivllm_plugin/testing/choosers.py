"""What a fake model answers: callables that choose the next token of one sequence.

Each looks at the sequence alone, never at the batch, so an engine that treats sequences as it should gives the same tokens
whatever the company. Called by the runner, once for every token that a sequence gains, in order.
"""

import math
import random
from array import array
from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as SequenceABC
from typing import TypeAlias

import xxhash

from minivllm_plugin.engine.sequence import Sequence

__all__ = ["ChooseToken", "HashedTokens", "RepeatingTokens", "ScriptedLogits", "ScriptedTokens"]

ChooseToken: TypeAlias = Callable[[Sequence], int]


class HashedTokens:
    """The next token is a fixed hash of all tokens so far: any lost, doubled or foreign token changes everything after it.

    Args:
        vocab_size: tokens are in ``0 .. vocab_size - 1``.
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def __call__(self, seq: Sequence) -> int:
        return self._after(seq.token_ids)

    def continue_prompt(self, prompt: SequenceABC[int], num_tokens: int) -> list[int]:
        """The completion that a prompt must get, worked out with no engine at all."""
        token_ids = list(prompt)
        for _ in range(num_tokens):
            token_ids.append(self._after(token_ids))
        return token_ids[len(prompt) :]

    def _after(self, token_ids: list[int]) -> int:
        return xxhash.xxh3_64_intdigest(array("q", token_ids).tobytes()) % self.vocab_size


class RepeatingTokens(HashedTokens):
    """The next token is a fixed hash of the last two: completions run into loops, as small models do, and can be guessed."""

    def _after(self, token_ids: list[int]) -> int:
        return super()._after(token_ids[-2:])


class ScriptedTokens:
    """Completion tokens written down beforehand; ``FAILED_TOKEN`` among them makes that row fail.

    Args:
        scripts: request id -> its completion tokens.
        otherwise: answers for requests without a script, and beyond the end of one.
    """

    def __init__(self, scripts: Mapping[str, SequenceABC[int]], otherwise: ChooseToken) -> None:
        self.scripts = {request_id: tuple(tokens) for request_id, tokens in scripts.items()}
        self.otherwise = otherwise

    def __call__(self, seq: Sequence) -> int:
        script = self.scripts.get(seq.request_id or "", ())
        index = seq.num_completion_tokens
        return script[index] if index < len(script) else self.otherwise(seq)


class ScriptedLogits:
    """Samples from given logits: end tokens masked below ``min_tokens``, then greedy, or a draw at ``temperature``.

    Each request draws from a stream of its own that remembers its position. An engine that throws a sampled token away, or
    asks twice for the same one, therefore changes what a seed gives. Other filters (top_k, top_p, min_p) are not applied.

    Args:
        logits: one number per token of the vocabulary, or a function of the sequence that returns them.
        end_token_ids: masked, like the request's ``stop_token_ids``, until ``min_tokens`` are there.
    """

    def __init__(
        self, logits: SequenceABC[float] | Callable[[Sequence], SequenceABC[float]], end_token_ids: Collection[int] = ()
    ) -> None:
        self.logits = logits
        self.end_token_ids = frozenset(end_token_ids)
        self._streams: dict[str, tuple[Sequence, random.Random]] = {}

    @property
    def num_streams(self) -> int:
        """Requests that have drawn a random number; greedy ones never do."""
        return len(self._streams)

    def __call__(self, seq: Sequence) -> int:
        params = seq.sampling_params
        logits = list(self.logits(seq) if callable(self.logits) else self.logits)
        if seq.num_completion_tokens < params.min_tokens:
            held_back = set(params.stop_token_ids or ()) | (set() if seq.ignore_eos else self.end_token_ids)
            for token in held_back:
                logits[token] = -math.inf
        peak = max(logits)
        if params.greedy:
            return logits.index(peak)
        weights = [math.exp((logit - peak) / params.temperature) for logit in logits]
        return self._stream(seq).choices(range(len(weights)), weights)[0]

    def _stream(self, seq: Sequence) -> random.Random:
        request_id = seq.request_id or ""
        owner, stream = self._streams.get(request_id, (None, None))
        if stream is None or owner is not seq:  # an id may be used again once its request has ended
            stream = random.Random(seq.sampling_seed)
            self._streams[request_id] = (seq, stream)
        return stream
