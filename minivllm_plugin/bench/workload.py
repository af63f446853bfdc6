"""Prompts of random token ids: the same seed gives the same prompts on every machine. Knows no engine, loads nothing."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Workload", "offline_workload", "prefill_prompt", "prefix_workload", "warm_up_prompt"]

FIRST_TOKEN_ID = 5  # below are control tokens in many vocabularies
LAST_TOKEN_ID = 10_000
INPUT_LENGTHS = (32, 256)
OUTPUT_LENGTHS = (32, 128)
SINGLE_INPUT, SINGLE_OUTPUT = 32, 128


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts, and how many tokens each of them is to be continued by, end tokens ignored."""

    prompts: tuple[tuple[int, ...], ...]
    output_lengths: tuple[int, ...]

    @property
    def num_input_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def num_output_tokens(self) -> int:
        return sum(self.output_lengths)


def offline_workload(num_prompts: int, *, seed: int = 0, last_token_id: int = LAST_TOKEN_ID) -> Workload:
    """The offline workload: 32–256 tokens in, 32–128 out, uniform. A single prompt is cut to 32 in, 128 out.

    Args:
        last_token_id: largest id drawn; a smaller vocabulary gives other prompts.
    """
    rng = random.Random(seed)
    prompts = _draw_prompts(rng, [None] * num_prompts, last_token_id)
    outputs = tuple(rng.randint(*OUTPUT_LENGTHS) for _ in range(num_prompts))
    if num_prompts == 1:
        return Workload((prompts[0][:SINGLE_INPUT],), (SINGLE_OUTPUT,))
    return Workload(prompts, outputs)


def prefix_workload(
    num_prompts: int,
    *,
    shared: int = 1000,
    own: int = 32,
    output: int = 32,
    seed: int = 0,
    last_token_id: int = LAST_TOKEN_ID,
) -> Workload:
    """Prompts that begin with the same ``shared`` tokens and go on with ``own`` tokens each."""
    rng = random.Random(seed)
    prefix, *tails = _draw_prompts(rng, [shared] + [own] * num_prompts, last_token_id)
    return Workload(tuple(prefix + tail for tail in tails), (output,) * num_prompts)


def prefill_prompt(num_tokens: int, *, last_token_id: int = LAST_TOKEN_ID) -> tuple[int, ...]:
    """One long prompt without repeats (of up to 10,000 tokens)."""
    return tuple(index * 7 % (last_token_id - FIRST_TOKEN_ID + 1) + FIRST_TOKEN_ID for index in range(num_tokens))


def warm_up_prompt(num_tokens: int = 48) -> tuple[int, ...]:
    """Tokens that begin no other prompt here, so that nothing measured finds them cached."""
    return tuple(FIRST_TOKEN_ID + index % 3 for index in range(num_tokens))


def _draw_prompts(rng: random.Random, lengths: Sequence[int | None], last: int) -> tuple[tuple[int, ...], ...]:
    """Prompts of these lengths; None draws the length first."""
    return tuple(
        tuple(rng.randint(FIRST_TOKEN_ID, last) for _ in range(rng.randint(*INPUT_LENGTHS) if length is None else length))
        for length in lengths
    )
