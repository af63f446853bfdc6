"""Part: whole generations of tiny models: the same tokens with recorded graphs and without, with overlapped steps and without.

In float32, where a row that is computed beside others or beside padding is the same to a few last places: a choice between two
tokens hangs on that next to never. In bfloat16 the last place decides often, so all batches there have a size that is recorded.
"""

import random
from collections.abc import Sequence
from typing import Any

from minivllm_plugin.bench.gpu.engines import opened, record_launches, tiny_model
from minivllm_plugin.bench.gpu.records import Given, Recorder
from minivllm_plugin.sampling_parameters import SamplingParams

__all__ = ["run"]

WAYS: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True, "async_scheduling": False},
    "graphs": {"enforce_eager": False, "async_scheduling": False},
    "eager, overlapped": {"enforce_eager": True, "async_scheduling": True},
    "graphs, overlapped": {"enforce_eager": False, "async_scheduling": True},
    "all graphs at once, overlapped": {"cuda_graphs": "full", "async_scheduling": True},
}
LONG, SHORT = 40, 6


def run(given: Given, record: Recorder) -> None:
    """Checks: every way against the first."""
    for family in ("llama", "qwen3"):
        with tiny_model(family) as model:
            _compare(model, f"{family} float32", "float32", _mixed(given), given, record)
            if not given.rehearse:
                _compare(model, f"{family} bfloat16", "bfloat16", _alike(), given, record)


def _compare(
    model: str, name: str, dtype: str, work: Sequence[tuple[list[int], SamplingParams]], given: Given, record: Recorder
) -> None:
    expected: list[list[int]] | None = None
    for way, options in WAYS.items():
        if given.rehearse and way.startswith("all graphs"):
            continue  # on a CPU there are none
        with opened(model, given, dtype=dtype, max_num_sequences=16, max_num_batched_tokens=64, num_blocks=200, **options) as (
            llm,
            runner,
        ):
            outputs = llm.generate([prompt for prompt, _ in work], [params for _, params in work], use_tqdm=False)
            record_launches(runner, f"{name}, {way}", given, record, graphs="graphs" in way)
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        if expected is None:
            expected = tokens
            counts = [len(row) for row in tokens]
            whole = counts == [params.max_tokens for _, params in work]
            record.check(f"{name}, {way}: every request ends where it should", whole, f"{sum(counts)} tokens")
            continue
        wrong = [row for row, (got, want) in enumerate(zip(tokens, expected, strict=True)) if got != want]
        record.check(f"{name}: {way} = eager", not wrong, f"requests {wrong} differ" if wrong else f"{len(tokens)} requests")


def _mixed(given: Given) -> list[tuple[list[int], SamplingParams]]:
    """More requests than run at once, of different lengths, so that batches shrink and grow; every third is drawn."""
    rng = random.Random(3)
    longest = SHORT if given.rehearse else LONG
    return [
        (
            [rng.randrange(5, 990) for _ in range(rng.randint(1, 100))],
            _params(rng.randint(1, longest), temperature=0.9 if index % 3 == 2 else 0.0, seed=index, top_k=20, top_p=0.95),
        )
        for index in range(6 if given.rehearse else 37)
    ]


def _alike() -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(4)
    return [([rng.randrange(5, 990) for _ in range(8)], _params(LONG, temperature=0.0)) for _ in range(8)]


def _params(max_tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **options)
