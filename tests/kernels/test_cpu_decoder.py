"""The compiled decoder against the torch modules in float32: every architecture, shape, block size and length that differs."""

from typing import Any

import pytest
import torch
from cpu_models import (
    CACHE_KINDS,
    CpuDriver,
    build_module,
    driver_for,
    make_cos_sin,
    model_config,
    need_cpu_kernels,
    random_tokens,
    torch_logits,
)
from torch import Tensor

from minivllm_kernels.cpu.decoder import CpuDecoder, unsupported
from minivllm_plugin.models.decoder import CausalLM
from minivllm_plugin.runner.cpu_weights import decoder_geometry, pack_module

TOLERANCE = 1e-4
LENGTHS = (1, 15, 16, 17, 127, 128, 129, 300)
BLOCK_SIZES = (1, 8, 16, 24, 32)
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 10000.0,
}


def heads(query: int, kv: int, size: int, **more: Any) -> dict[str, Any]:
    return {"num_attention_heads": query, "num_key_value_heads": kv, "head_dim": size, **more}


SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama 9:3, 64, tied": ("Llama", heads(9, 3, 64, hidden_size=576)),
    "llama 1:1, 80, untied": ("Llama", heads(4, 4, 80, hidden_size=320, tie_word_embeddings=False)),
    "llama 4:1, 96, llama3 rope": ("Llama", heads(4, 1, 96, hidden_size=160, intermediate_size=48, rope_parameters=LLAMA3_ROPE)),
    "llama 7:1, 64, all biases": ("Llama", heads(7, 1, 64, hidden_size=96, attention_bias=True, mlp_bias=True)),
    "llama 1:1, one head, 16": ("Llama", heads(1, 1, 16, hidden_size=32, intermediate_size=16, vocab_size=33)),
    "qwen2 12:2, 128": ("Qwen2", {**heads(12, 2, 128, hidden_size=1536), "rms_norm_eps": 1e-6}),
    "qwen2 14:2, 64, untied": ("Qwen2", {**heads(14, 2, 64, hidden_size=896), "tie_word_embeddings": False}),
    "qwen3 4:2, 128, wider than hidden": ("Qwen3", heads(4, 2, 128, hidden_size=128)),
    "qwen3 2:1, 256, untied, bias": ("Qwen3", heads(2, 1, 256, hidden_size=224, attention_bias=True, tie_word_embeddings=False)),
}


@pytest.fixture(autouse=True, scope="module")
def _kernels() -> None:
    need_cpu_kernels()


@pytest.fixture(scope="module", params=list(SHAPES))
def model(request: pytest.FixtureRequest) -> tuple[CausalLM, dict[int, Tensor]]:
    """A module, and its own logits for one sequence of each length."""
    architecture, fields = SHAPES[request.param]
    config = model_config(architecture, **fields)
    module = build_module(config)
    return module, {length: torch_logits(module, random_tokens(length, config, seed=length)) for length in LENGTHS}


def check(logits: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_prompts_chunks_and_decodes_equal_the_reference(model: Any, block_size: int) -> None:
    """Every length at once: whole prompts; then cut prompts and their last tokens; decodes beside new prompts."""
    module, expected = model
    config = module.config
    tokens = {length: random_tokens(length, config, seed=length) for length in LENGTHS}
    driver = driver_for(module, block_size=block_size, num_blocks=2048 // block_size)
    whole = driver.step(*[(driver.request(length), tokens[length]) for length in LENGTHS])
    for length, logits in zip(LENGTHS, whole, strict=True):
        check(logits, expected[length])
    # Half of the requests come a step later, when the others send one token or another piece.
    early, late = LENGTHS[2::2], LENGTHS[1::2]
    requests = {length: driver.request(length) for length in LENGTHS[1:]}
    cut = {length: max(1, length - 1 if length % 4 else length // 2) for length in early}
    first = driver.step(*[(requests[length], tokens[length][: cut[length]]) for length in early])
    second = driver.step(
        *[(requests[length], tokens[length][cut[length] :]) for length in early],
        *[(requests[length], tokens[length]) for length in late],
    )
    for length, *parts in zip(early, first, second[: len(early)], strict=True):
        check(torch.cat(parts), expected[length])
    for length, logits in zip(late, second[len(early) :], strict=True):
        check(logits, expected[length])


def test_last_rows_are_the_rows_that_were_asked_for(model: Any) -> None:
    module, expected = model
    driver = driver_for(module)
    work = [(driver.request(length), random_tokens(length, module.config, seed=length)) for length in (17, 1, 128)]
    for (request, _), logits in zip(work, driver.step(*work, rows="last"), strict=True):
        check(logits, expected[request.length][-1:])


@pytest.mark.parametrize("kind", CACHE_KINDS)
def test_a_step_that_samples_nothing(kind: str) -> None:
    """A piece of a prompt: keys and values are stored, no logits are computed."""
    config = model_config()
    module = build_module(config)
    driver = driver_for(module, kind, cache_kind=kind)
    tokens = random_tokens(40, config)
    expected = driver.run(tokens)
    request = driver.request(40)
    logits = driver.decoder.forward(tokens[:30], [30], [30], [request.table], [])
    assert logits.shape == (0, config.vocab_size)
    request.length = 30
    assert torch.equal(driver.step((request, tokens[30:]))[0], expected[30:])


def test_reduced_kinds_stay_close() -> None:
    """Each step down in precision costs what it should: bfloat16 rounding is 2^-9, int8 steps are 1/127 of a peak."""
    config = model_config(hidden_size=256, num_hidden_layers=3)
    module = build_module(config)
    tokens = random_tokens(200, config)
    expected = torch_logits(module, tokens)

    def error(weights: str, cache: str) -> float:
        difference = driver_for(module, weights, cache_kind=cache).run(tokens) - expected
        return float(difference.norm() / expected.norm())

    assert error("float32", "float32") < 1e-5
    assert error("float32", "bfloat16") < 0.01
    assert error("float32", "int8") < 0.03
    assert error("bfloat16", "float32") < 0.02
    assert error("bfloat16_dot", "float32") < 0.02
    assert error("bfloat16_dot", "bfloat16") < 0.03
    assert error("int8", "float32") < 0.1
    assert error("int8", "int8") < 0.12
    assert error("int4", "float32") < 0.5


def test_a_bfloat16_checkpoint_is_computed_exactly_in_bfloat16() -> None:
    """Weights that are bfloat16 numbers give the same logits packed as bfloat16 and as float32."""
    module = build_module(model_config()).bfloat16().float()
    tokens = random_tokens(50, module.config)
    assert torch.equal(driver_for(module, "bfloat16").run(tokens), driver_for(module, "float32").run(tokens))


@pytest.mark.parametrize("cache_kind", CACHE_KINDS)
def test_offsets_beyond_two_to_the_31(cache_kind: str) -> None:
    """Block ids far out in a pool that nobody wrote to: its memory is not there until it is touched."""
    config = model_config("Qwen3", hidden_size=64, num_hidden_layers=1, **heads(8, 8, 256))
    per_block = 16 * 8 * 256
    num_blocks = 2**31 // per_block + 64 if cache_kind == "int8" else 70_000 // 16 + 64
    weights = pack_module(build_module(config), "float32")
    near = CpuDriver(config, weights, cache_kind=cache_kind, num_blocks=16)
    decoder = CpuDecoder(
        decoder_geometry(config),
        weights,
        make_cos_sin(config),
        num_blocks=num_blocks,
        block_size=16,
        cache_kind=cache_kind,
        threads=2,
    )
    tokens = random_tokens(40, config)
    expected = near.run(tokens)
    for table in ([num_blocks - 1, 0, num_blocks - 2], [num_blocks - 40, num_blocks // 2 + 1, num_blocks - 3]):
        first = decoder.forward(tokens[:20], [20], [20], [table], range(20))
        rest = decoder.forward(tokens[20:], [20], [40], [table], range(20))
        assert torch.equal(torch.cat((first, rest)), expected)


@pytest.mark.parametrize("block_size", [1, 4, 24])
@pytest.mark.parametrize("cache_kind", ["float32", "bfloat16"])
def test_block_sizes_that_sixteen_does_not_divide_beyond_70_000_slots(block_size: int, cache_kind: str) -> None:
    module = build_module(model_config())
    tokens = random_tokens(30, module.config)
    num_blocks = 80_000 // block_size
    driver = driver_for(module, block_size=block_size, num_blocks=num_blocks, cache_kind=cache_kind)
    needed = -(-30 // block_size)
    far = driver.request(30, table=range(num_blocks - needed, num_blocks))
    assert torch.equal(driver.step((far, tokens))[0], driver_for(module, cache_kind=cache_kind).run(tokens))


def test_a_hidden_size_that_dwarfs_the_heads() -> None:
    """A thread's scratch holds one row of whatever is widest."""
    config = model_config("Qwen3", hidden_size=16384, intermediate_size=16, num_hidden_layers=1, vocab_size=40, **heads(1, 1, 16))
    module = build_module(config)
    tokens = random_tokens(3, config)
    check(driver_for(module).run(tokens), torch_logits(module, tokens))


@pytest.mark.parametrize(
    ("fields", "block_size", "cache_kind", "reason"),
    [
        ({"hidden_size": 48}, 16, "float32", "hidden_size=48 is not a multiple of 32"),
        ({"intermediate_size": 40}, 16, "float32", "intermediate_size=40 is not a multiple of 16"),
        ({"head_dim": 24}, 16, "float32", "head_dim=24 is not a multiple of 16"),
        ({"head_dim": 272}, 16, "float32", "head_dim=272 is greater than 256"),
        ({}, 8, "int8", "multiple of 16, got 8"),
        ({}, 8, "bfloat16", None),
        ({}, 48, "int8", None),
    ],
)
def test_what_the_kernels_cannot_do_is_said(fields: dict[str, Any], block_size: int, cache_kind: str, reason: str | None) -> None:
    config = model_config(**fields)
    said = unsupported(decoder_geometry(config), block_size, cache_kind)
    assert (said is None) == (reason is None)
    if reason is None:
        return
    assert reason in str(said)
    weights: Any = None  # refused before they are looked at
    with pytest.raises(ValueError, match=reason):
        CpuDecoder(
            decoder_geometry(config),
            weights,
            make_cos_sin(config),
            num_blocks=1,
            block_size=block_size,
            cache_kind=cache_kind,
            threads=1,
        )
