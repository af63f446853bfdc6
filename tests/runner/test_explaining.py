"""A slow path is never silent: which backend computes each op, how steps were launched, and one warning a reason."""

import logging
import os
import subprocess
import sys

import pytest
from graph_runs import PLAIN_TORCH, Pool, engine_of, graph_runner, make_prompts, serve, tiny_model
from recorded_graphs import RecordingGraphApi

from minivllm_kernels import OPS, AttentionGeometry, reference
from minivllm_kernels.dispatch import BackendTable, Choice
from minivllm_plugin.models.loader import LoadedModel
from minivllm_plugin.runner.explaining import explain_choices, explain_steps, warn_of_plain_torch
from minivllm_plugin.runner.step_counts import StepCounts


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return tiny_model("Llama", tmp_path_factory.mktemp("model"))


def choice(op: str, backend: str, *passed_over: tuple[str, str]) -> Choice:
    return Choice(op, "cuda", backend, lambda: None, passed_over)


def test_plain_torch_on_a_gpu_is_warned_of_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    broken = ("triton", "does not import (ImportError: no triton)")
    warn_of_plain_torch(
        [
            choice("linear", "reference", broken),
            choice("rms_norm", "reference", broken),
            choice("attention", "reference", ("flash", "serves only cpu"), broken),
            choice("argmax", "triton"),
            choice("sample", "reference", ("triton", "a vocabulary of that size")),
        ],
        "cuda:0",
    )
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == (
        "plain torch computes on cuda:0, which is slower: rms_norm, attention (triton: does not import (ImportError: no triton))"
        "; sample (triton: a vocabulary of that size)"
    )
    caplog.clear()
    warn_of_plain_torch([choice("linear", "reference", broken), choice("attention", "triton")], "cuda:0")
    assert not caplog.records


def test_a_backend_that_cannot_do_the_model_is_passed_over_and_named(model: LoadedModel) -> None:
    asked: list[AttentionGeometry] = []

    class Picky:
        silu_and_mul = staticmethod(reference.silu_and_mul)
        attention = staticmethod(reference.attention)

        @staticmethod
        def unsupported(op: str, geometry: AttentionGeometry) -> str | None:
            asked.append(geometry)
            return "head_dim=8 is too small" if op == "attention" else None

    table = BackendTable({"picky": (Picky(), ("cpu",)), "reference": (reference, ("cpu",))})
    runner = graph_runner(model, Pool(block_size=8), None, table, kv_cache_dtype="bfloat16")
    told = runner.explain()
    assert list(told) == [*OPS, "cuda graphs"]
    assert told["silu_and_mul"] == "picky"
    assert told["attention"] == "reference  (not picky: head_dim=8 is too small)"
    geometry = asked[0]
    assert (geometry.num_heads, geometry.num_kv_heads, geometry.head_dim, geometry.block_size) == (6, 3, 8, 8)
    assert str(geometry.cache_dtype) == "torch.bfloat16"


def test_steps_are_counted_and_told(model: LoadedModel) -> None:
    pool = Pool()
    runner = graph_runner(model, pool, RecordingGraphApi(), PLAIN_TORCH)
    serve(engine_of(runner, pool), make_prompts(3))
    counts = runner.counts
    assert runner.explain()["cuda graphs"] == (
        f"lazy, up to 6 sequences, {counts.graph_captures} captured, {counts.graph_replays} steps replayed, "
        f"{counts.eager_steps['a prompt in the batch']} eager: a prompt in the batch"
    )
    plain = graph_runner(model, pool, None, PLAIN_TORCH, cuda_graphs="off")
    assert plain.explain()["cuda graphs"] == "none"
    serve(engine_of(plain, pool), make_prompts(1))
    assert plain.explain()["cuda graphs"].endswith("eager: graphs are switched off)")


def test_a_reason_is_warned_of_once_and_counted_always(caplog: pytest.LogCaptureFixture) -> None:
    counts = StepCounts()
    for _ in range(3):
        counts.eager("too wide", expected=False)
        counts.eager("a prompt", expected=True)
    assert counts.eager_steps == {"too wide": 3, "a prompt": 3}
    assert [record.getMessage() for record in caplog.records] == [
        "decode steps run without CUDA graphs, or a part of them does, which is slower: too wide"
    ]
    assert explain_steps(counts, "full", (1, 2)) == (
        "full, up to 2 sequences, 0 captured, 0 steps replayed, 3 eager: too wide; 3 eager: a prompt"
    )
    assert explain_choices([choice("argmax", "triton")]) == {"argmax": "triton"}


def test_a_cpu_run_loads_no_triton() -> None:  # J06
    code = (
        "import sys\n"
        "from minivllm_plugin import LLM, SamplingParams\n"
        "with LLM('smollm2-135m', load_format='dummy', num_blocks=8, max_model_len=64, dtype='float16') as llm:\n"
        "    llm.generate([1, 2, 3], SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True), use_tqdm=False)\n"
        "    assert llm.kernels == 'torch'\n"
        "print('LOADED', *(name for name in ('triton', 'flash_attn') if name in sys.modules))"
    )
    environment = {**os.environ, "MINIVLLM_KERNELS": "reference"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120, env=environment)
    assert done.stdout.strip().splitlines()[-1] == "LOADED"


@pytest.mark.parametrize("kind", ["fp8_e4m3", "fp8_e5m2", "bfloat16"])
def test_narrow_caches_serve_whole_generations(model: LoadedModel, kind: str) -> None:
    """Replayed and eager steps agree on every token; with two bits of mantissa the rounding shows in what is said."""
    pool = Pool(num_blocks=13)
    narrow = [graph_runner(model, pool, api, kv_cache_dtype=kind) for api in (RecordingGraphApi(), None)]
    first, second = (serve(engine_of(runner, pool), make_prompts(5)) for runner in narrow)
    assert first == second
    assert narrow[0].counts.graph_replays
    assert narrow[0]._cache is not None
    assert narrow[0]._cache.layers[0][0].dtype.itemsize == (2 if kind == "bfloat16" else 1)
    if kind == "fp8_e5m2":
        assert first != serve(engine_of(graph_runner(model, pool, None), pool), make_prompts(5))
