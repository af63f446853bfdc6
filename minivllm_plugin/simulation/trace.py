"""What arrives when: requests as numbers, without a token. Frozen; knows neither files nor engine.

A prompt's content is described just well enough for prefix sharing: by hash ids, one per block of ``Trace.block_tokens`` tokens
(equal ids mean equal content), or by segments of any length, which may quote another request's answer. What is
described by neither belongs to that request alone.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from minivllm_plugin.config import check_integer
from minivllm_plugin.errors import ConfigError
from minivllm_plugin.simulation.content import MAX_CONTENT_ID, SyntheticTokens, own_completion, own_prompt, shared_content

__all__ = ["DEFAULT_BLOCK_TOKENS", "Trace", "TraceRequest"]

DEFAULT_BLOCK_TOKENS = 512
"""Tokens that a hash id stands for where a trace does not say: those of the Mooncake traces."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request.

    Attributes:
        arrival: seconds since the start of the trace.
        prompt_tokens, output_tokens: lengths, at least 1.
        hash_ids: content of each block of the prompt, in order; the last block may be filled in part.
        segments: instead of hash ids: (content id, tokens) from the start of the prompt on.
        output_id: content id of the completion, if a later prompt quotes it.
        tenant: on whose behalf.
        priority: smaller runs first under the ``priority`` policy.
        id_offset: added to every content id; what tells repetitions of a trace apart.
    """

    arrival: float
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()
    segments: tuple[tuple[int, int], ...] = ()
    output_id: int | None = None
    tenant: str = ""
    priority: int = 0
    id_offset: int = 0

    def check(self, block_tokens: int) -> None:
        """Raise ConfigError unless this request makes sense with hash ids of so many tokens each."""
        if not math.isfinite(self.arrival) or self.arrival < 0:
            raise ConfigError(f"arrival must be a finite number of seconds of at least 0, got {self.arrival!r}")
        for name, value in (("prompt_tokens", self.prompt_tokens), ("output_tokens", self.output_tokens)):
            check_integer(name, value, at_least=1)
        if self.hash_ids and self.segments:
            raise ConfigError("hash_ids and segments both describe the prompt; give one")
        most = -(-self.prompt_tokens // block_tokens)
        if len(self.hash_ids) > most:
            raise ConfigError(
                f"{len(self.hash_ids)} hash_ids of {block_tokens} tokens describe more than {self.prompt_tokens} prompt tokens; "
                f"at most {most} are possible (set block_tokens if an id stands for another number)"
            )
        described = sum(tokens for _, tokens in self.segments)
        if described > self.prompt_tokens or any(tokens < 1 for _, tokens in self.segments):
            raise ConfigError(
                f"segments of {described} tokens do not fit into a prompt of {self.prompt_tokens}; each needs at least 1"
            )
        for content in self.content_ids():
            if not 0 <= content < MAX_CONTENT_ID:
                raise ConfigError(f"content ids must be between 0 and {MAX_CONTENT_ID - 1}, got {content}")

    def content_ids(self) -> Iterator[int]:
        """All ids that this request names, offset included."""
        offset = self.id_offset
        yield from (content + offset for content in self.hash_ids)
        yield from (content + offset for content, _ in self.segments)
        if self.output_id is not None:
            yield self.output_id + offset

    def tokens(self, index: int, block_tokens: int, whole_blocks: int | None = None) -> SyntheticTokens:
        """The prompt of the request that has this ``index`` in its trace.

        Args:
            block_tokens: what a hash id stands for.
            whole_blocks: if given, each hash id stands for exactly so many tokens, also the last one, and one token of its
                own follows, so that the whole of what the ids describe can be found in a cache.
        """
        offset = self.id_offset
        if self.segments:
            contents = [shared_content(content + offset) for content, _ in self.segments]
            lengths = [tokens for _, tokens in self.segments]
        else:
            contents = [shared_content(content + offset) for content in self.hash_ids]
            lengths = [whole_blocks or block_tokens] * len(contents)
        ends: list[int] = []
        end = 0
        for length in lengths:
            end += length
            ends.append(end)
        total = end + 1 if whole_blocks and self.hash_ids else self.prompt_tokens
        if end > total:
            ends[-1] = total
        elif end < total:
            contents.append(own_prompt(index))
            ends.append(total)
        completion = own_completion(index) if self.output_id is None else shared_content(self.output_id + offset)
        return SyntheticTokens(contents, ends, completion)


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of their arrival.

    Attributes:
        block_tokens: what one hash id stands for.
        name: for tables.
        num_skipped: unusable lines that a reader was told to leave out.
    """

    requests: tuple[TraceRequest, ...]
    block_tokens: int = DEFAULT_BLOCK_TOKENS
    name: str = "trace"
    num_skipped: int = field(default=0, compare=False)

    def __post_init__(self) -> None:
        if not self.requests:
            raise ConfigError(f"{self.name}: a trace needs at least one request")
        check_integer("block_tokens", self.block_tokens, at_least=1)
        in_order = tuple(sorted(self.requests, key=lambda request: request.arrival))
        object.__setattr__(self, "requests", in_order)

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[TraceRequest]:
        return iter(self.requests)

    @property
    def has_hash_ids(self) -> bool:
        return any(request.hash_ids for request in self.requests)

    @property
    def duration(self) -> float:
        """Seconds from the start to the last arrival."""
        return self.requests[-1].arrival

    def scaled(self, rate: float) -> "Trace":
        """The same requests, arriving ``rate`` times as often."""
        if not math.isfinite(rate) or rate <= 0:
            raise ConfigError(f"the rate must be scaled by a finite number greater than 0, got {rate!r}")
        return replace(self, requests=tuple(replace(one, arrival=one.arrival / rate) for one in self.requests))

    def resized(self, num_requests: int) -> "Trace":
        """The first ``num_requests``; for more than there are, the trace again and again, one after another.

        A repetition shares no content with those before it: it has the shape of the trace, not a cache filled by it.
        """
        check_integer("num_requests", num_requests, at_least=1)
        number = len(self.requests)
        if num_requests <= number:
            return replace(self, requests=self.requests[:num_requests])
        first, last = self.requests[0].arrival, self.duration
        period = (last - first) * number / (number - 1) if number > 1 else 1.0
        offset = 1 + max((content for one in self.requests for content in one.content_ids()), default=0)
        made: list[TraceRequest] = []
        for copy in range(-(-num_requests // number)):
            for one in self.requests[: num_requests - len(made)]:
                arrival, shift = one.arrival + copy * period, one.id_offset + copy * offset
                made.append(replace(one, arrival=arrival, id_offset=shift))
        return replace(self, requests=tuple(made))

    def ideal_hits(self) -> tuple[int, int]:
        """Blocks of hash ids that were there before, and all of them: what an unlimited cache finds, one request at a time."""
        seen: set[int] = set()
        hits = total = 0
        for request in self.requests:
            ids = [content + request.id_offset for content in request.hash_ids]
            total += len(ids)
            hits += next((position for position, content in enumerate(ids) if content not in seen), len(ids))
            seen.update(ids)
        return hits, total
