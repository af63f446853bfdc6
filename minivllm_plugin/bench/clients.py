"""Readers of many streams on one event loop, with a clock. What a server's users would see."""

import asyncio
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from minivllm_plugin.sampling_parameters import SamplingParams
from minivllm_plugin.serving.llm import LLM

__all__ = ["Reading", "exact_length", "fresh_salts", "read_all", "read_one"]


@dataclass(frozen=True, slots=True)
class Reading:
    """One request as its reader saw it.

    Attributes:
        submitted: seconds on ``time.perf_counter()``'s clock.
        arrivals: when each delta came, same clock.
        num_tokens: tokens in each delta; more than one where the reader lagged.
    """

    submitted: float
    arrivals: tuple[float, ...]
    num_tokens: tuple[int, ...]
    num_prompt_tokens: int
    num_cached_tokens: int

    @property
    def first_token_seconds(self) -> float:
        return self.arrivals[0] - self.submitted

    @property
    def gaps(self) -> list[float]:
        """Seconds between one delta and the next."""
        return [later - earlier for earlier, later in zip(self.arrivals, self.arrivals[1:], strict=False)]


def exact_length(num_tokens: int) -> SamplingParams:
    """Greedy, and exactly so many tokens."""
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)


def fresh_salts(count: int) -> list[str]:
    """Salts that no request has had, so that none finds anything in the prefix cache but what comes under the same one."""
    return [uuid.uuid4().hex for _ in range(count)]


def read_all(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    output_lengths: Sequence[int],
    *,
    concurrency: int,
    salts: Sequence[str],
) -> list[Reading]:
    """Send every prompt, at most ``concurrency`` at a time and the next as soon as one has ended; read each token by token.

    Args:
        salts: of each prompt; prompts share cached prefixes only where these are equal.

    Returns:
        A reading per prompt, in their order.
    """

    async def run() -> list[Reading]:
        gate = asyncio.Semaphore(concurrency)

        async def one(prompt: Sequence[int], length: int, salt: str) -> Reading:
            async with gate:
                return await read_one(llm, prompt, length, salt=salt)

        return await asyncio.gather(*map(one, prompts, output_lengths, salts))

    return asyncio.run(run())


async def read_one(llm: LLM, prompt: Sequence[int], length: int, *, salt: str, progress: list[int] | None = None) -> Reading:
    """Send one prompt and read it to its end. ``progress`` gets the number of tokens of every delta, as they come."""
    arrivals: list[float] = []
    counts = [] if progress is None else progress
    submitted = time.perf_counter()
    async with llm.submit(list(prompt), exact_length(length), cache_salt=salt) as stream:
        async for delta in stream:
            arrivals.append(time.perf_counter())
            counts.append(len(delta.token_ids))
        output = stream.output
    return Reading(submitted, tuple(arrivals), tuple(counts), len(prompt), output.num_cached_tokens)
