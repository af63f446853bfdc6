"""Traces that nobody recorded: random arrivals, lengths, conversations and tenants. The same seed gives the same trace."""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from minivllm_plugin.config import check_integer
from minivllm_plugin.errors import ConfigError
from minivllm_plugin.simulation.trace import Trace, TraceRequest

__all__ = ["Lengths", "generate_trace"]

FORMS = "'200', 'uniform:LOW:HIGH' or 'lognormal:MEDIAN:SIGMA[:MOST]'"


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of token counts, at least 1.

    Attributes:
        kind: ``uniform`` between ``first`` and ``second``; ``lognormal`` with median ``first`` and sigma ``second``.
        most: longer draws are cut to this.
    """

    kind: Literal["uniform", "lognormal"]
    first: float
    second: float
    most: int = 2**20

    @classmethod
    def parse(cls, text: "str | int | Lengths") -> "Lengths":
        """From ``200``, ``uniform:32:256`` or ``lognormal:500:0.8:4000``.

        Raises:
            ConfigError: another form, or numbers that make no distribution.
        """
        if isinstance(text, Lengths):
            return text
        kind, *numbers = str(text).split(":")
        try:
            if not numbers:
                made = cls("uniform", int(kind), int(kind))
            elif kind == "uniform" and len(numbers) == 2:
                made = cls("uniform", int(numbers[0]), int(numbers[1]))
            elif kind == "lognormal" and len(numbers) in (2, 3):
                made = cls("lognormal", float(numbers[0]), float(numbers[1]), int((numbers[2:] or ["1048576"])[0]))
            else:
                raise ValueError
        except ValueError:
            raise ConfigError(f"lengths must be given as {FORMS}, got {text!r}") from None
        if not made.first >= 1 or made.second < (made.first if made.kind == "uniform" else 0) or made.most < 1:
            raise ConfigError(f"lengths {text!r} must be at least 1 and in order (sigma at least 0); the forms are {FORMS}")
        return made

    def draw(self, rng: random.Random) -> int:
        if self.kind == "uniform":
            return min(rng.randint(int(self.first), int(self.second)), self.most)
        return min(max(1, round(self.first * rng.lognormvariate(0.0, self.second))), self.most)


def generate_trace(
    num_requests: int,
    *,
    rate: float = 1.0,
    burstiness: float = 1.0,
    prompt_tokens: str | int | Lengths = "uniform:32:256",
    output_tokens: str | int | Lengths = "uniform:32:128",
    shared_prefix_tokens: int = 0,
    num_prefixes: int = 1,
    turns: int = 1,
    think_seconds: float = 10.0,
    tenants: int | Mapping[str, float] = 1,
    seed: int = 0,
) -> Trace:
    """Draw a trace.

    Conversations begin at random times; each later turn quotes all that was said before, answers included.

    Args:
        rate: requests a second, on average.
        burstiness: variance of the gaps between conversations in units of a Poisson process's (gamma gaps): 1 is Poisson, more
            comes in bursts, 0 is regular.
        prompt_tokens: of what a turn adds; see :meth:`Lengths.parse`.
        shared_prefix_tokens: every conversation begins with so many tokens, equal in all with the same prefix.
        num_prefixes: different ones, chosen at random.
        turns: of a conversation.
        think_seconds: mean of the (exponential) gap between the turns of one conversation.
        tenants: how many, all alike; or name -> share of the conversations.

    Raises:
        ConfigError: naming the argument.
    """
    for name, value in (("num_requests", num_requests), ("num_prefixes", num_prefixes), ("turns", turns)):
        check_integer(name, value, at_least=1)
    if rate <= 0 or burstiness < 0 or think_seconds < 0 or shared_prefix_tokens < 0:
        raise ConfigError(
            f"rate={rate} must be greater than 0, burstiness={burstiness}, think_seconds={think_seconds} and "
            f"shared_prefix_tokens={shared_prefix_tokens} at least 0"
        )
    rng = random.Random(seed)
    prompts, outputs = Lengths.parse(prompt_tokens), Lengths.parse(output_tokens)
    names, weights = _tenants(tenants)
    next_id = num_prefixes
    requests: list[TraceRequest] = []
    clock = 0.0
    while len(requests) < num_requests:
        gap = turns / rate
        clock += rng.gammavariate(1 / burstiness, gap * burstiness) if burstiness else gap
        tenant = rng.choices(names, weights)[0]
        segments = [(rng.randrange(num_prefixes), shared_prefix_tokens)] if shared_prefix_tokens else []
        arrival = clock
        for turn in range(min(turns, num_requests - len(requests))):
            arrival += rng.expovariate(1 / think_seconds) if turn and think_seconds else 0.0
            segments.append((next_id, prompts.draw(rng)))
            output = outputs.draw(rng)
            length = sum(tokens for _, tokens in segments)
            requests.append(TraceRequest(arrival, length, output, (), tuple(segments), next_id + 1, tenant))
            segments.append((next_id + 1, output))
            next_id += 2
    return Trace(tuple(requests), name="synthetic")


def _tenants(tenants: int | Mapping[str, float]) -> tuple[list[str], list[float]]:
    if isinstance(tenants, Mapping):
        if not tenants or any(share < 0 for share in tenants.values()) or not sum(tenants.values()):
            raise ConfigError(f"tenants must map names to shares of at least 0, not all 0, got {dict(tenants)!r}")
        return list(tenants), list(tenants.values())
    check_integer("tenants", tenants, at_least=1)
    return [f"tenant-{number}" for number in range(tenants)] if tenants > 1 else [""], [1.0] * tenants
