"""Part: whole generations of tiny models: the same tokens with recorded graphs and without, with overlapped steps and without.

In float32, where a row that is computed beside others or beside padding is the same to a few last places: a choice between two
tokens hangs on that next to never, and one request of all may differ. In bfloat16 the last place decides often, so all batches
there have a size that is recorded.
"""

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from minivllm_plugin.bench.gpu.engines import driven, model_runner, opened, record_launches, tiny_model
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
COMMON: dict[str, Any] = {"max_num_sequences": 16, "max_num_batched_tokens": 64, "num_blocks": 200}
LONG, SHORT = 40, 6

Tokens = list[list[int]]


def run(given: Given, record: Recorder) -> None:
    """Checks: every way against the first."""
    for family in ("llama", "qwen3"):
        with tiny_model(family) as model:
            _compare(f"{family} float32", partial(_served, model, _mixed(given), given, record), 1, given, record)
            if not given.rehearse:
                _compare(f"{family} bfloat16", partial(_stepped, model, given, record), 0, given, record)


def _compare(name: str, generate: Callable[[str, str], Tokens], may_differ: int, given: Given, record: Recorder) -> None:
    """``may_differ``: requests in which a choice may hang on a last place; what is wrong with graphs or buffers shows in more."""
    expected: Tokens | None = None
    for way in WAYS:
        if given.rehearse and way.startswith("all graphs"):
            continue  # on a CPU there are none
        tokens = generate(name, way)
        if expected is None:
            expected = tokens
            continue
        wrong = [row for row, (got, want) in enumerate(zip(tokens, expected, strict=True)) if got != want]
        told = f"requests {wrong} of {len(tokens)} differ" if wrong else f"{len(tokens)} requests"
        record.check(f"{name}: {way} = eager", len(wrong) <= may_differ, told)


def _served(
    model: str, work: Sequence[tuple[list[int], SamplingParams]], given: Given, record: Recorder, name: str, way: str
) -> Tokens:
    """Through an LLM and its thread, as users have it."""
    with opened(model, given, dtype="float32", **COMMON, **WAYS[way]) as (llm, runner):
        outputs = llm.generate([prompt for prompt, _ in work], [params for _, params in work], use_tqdm=False)
        record_launches(runner, f"{name}, {way}", given, record, graphs="graphs" in way)
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    whole = [len(row) for row in tokens] == [params.max_tokens for _, params in work]
    record.check(f"{name}, {way}: every request ends where it should", whole, f"{sum(map(len, tokens))} tokens")
    return tokens


def _stepped(model: str, given: Given, record: Recorder, name: str, way: str) -> Tokens:
    """Eight requests of one length, added before the first step: every batch has eight rows, or their 64 tokens."""
    rng = random.Random(4)
    prompts = [[rng.randrange(5, 990) for _ in range(8)] for _ in range(8)]
    with driven(model, given, dtype="bfloat16", **COMMON, **WAYS[way]) as engine:
        tokens = engine.generate(prompts, _params(LONG, temperature=0.0))
        record_launches(model_runner(engine), f"{name}, {way}", given, record, graphs="graphs" in way)
    return tokens


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


def _params(max_tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **options)
