"""flash-attn as a backend, with a stand-in that checks what the real functions check: results, refusals, reasons (trials J06)."""

import dataclasses
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fake_flash_attn import fake_flash_attn_2, fake_flash_attn_3
from torch import Tensor

from minivllm_kernels import AttentionGeometry, AttentionMetadata, dispatch, flash, reference

GEOMETRY = AttentionGeometry(
    num_heads=8, num_kv_heads=2, head_dim=64, block_size=256, dtype=torch.bfloat16, cache_dtype=torch.bfloat16
)
Calls = list[tuple[str, tuple[int, ...]]]


@pytest.fixture(autouse=True)
def _as_on_a_card(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An A100, where nothing is installed, as far as flash.py can see."""
    monkeypatch.delenv(dispatch.ENVIRONMENT_VARIABLE, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(flash, "_device", lambda: torch.device("cpu"))
    for name in ("flash_attn", "flash_attn_interface"):
        monkeypatch.setitem(sys.modules, name, None)
    on(monkeypatch, (8, 0))
    yield
    forget()


def on(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], **modules: types.ModuleType) -> None:
    """As if on a card of this compute capability, with these packages as well."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    forget()


def forget() -> None:
    flash.unavailable.cache_clear()
    flash._package.cache_clear()
    dispatch.choose.cache_clear()


def batch(
    query_lens: list[int], seq_lens: list[int], block_size: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, AttentionMetadata]:
    """Queries that are a slice of a wider product, a cache that is NaN where nothing was written, and blocks out of order."""
    generator = torch.Generator().manual_seed(0)
    heads, kv_heads, head_dim = 8, 2, 64
    needed = [-(-length // block_size) for length in seq_lens]
    order = torch.randperm(sum(needed) + 1, generator=generator).tolist()
    tables = [[order.pop() for _ in range(count)] for count in needed]
    caches = [torch.full((sum(needed) + 1, block_size, kv_heads, head_dim), torch.nan, dtype=dtype) for _ in range(2)]
    for table, length in zip(tables, seq_lens, strict=True):
        for position in range(length):
            for cache in caches:
                new = torch.randn(kv_heads, head_dim, generator=generator)
                cache[table[position // block_size], position % block_size] = new.to(dtype)
    q = torch.randn(sum(query_lens), heads + 2, head_dim, generator=generator).to(dtype)[:, :heads]
    return q, caches[0], caches[1], AttentionMetadata.build(query_lens, seq_lens, tables, block_size)


def close(got: Tensor, expected: Tensor) -> None:
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    torch.testing.assert_close(got.float(), expected.float(), atol=2e-2, rtol=2e-2)


CASES = {
    "decode": ([1, 1, 1], [300, 1, 256]),
    "prefill": ([5, 17], [5, 17]),
    "chunks, a warm prefix and a decode": ([3, 1, 40], [260, 300, 297]),
    "one": ([1], [513]),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", list(CASES))
def test_version_2_computes_what_the_reference_does(case: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Calls = []
    on(monkeypatch, (8, 0), flash_attn=fake_flash_attn_2(calls))
    q, k_cache, v_cache, metadata = batch(*CASES[case], 256, dtype)
    got = flash.attention(q, k_cache, v_cache, metadata, 0.2)
    close(got, reference.attention(q, k_cache, v_cache, metadata, 0.2))
    decodes = set(CASES[case][0]) == {1}
    assert calls == [("with_kvcache", (q.shape[0], 1, 8, 64)) if decodes else ("varlen", (q.shape[0], 8, 64))]
    again = metadata.scratch[flash.SCRATCH]
    assert torch.equal(flash.attention(q, k_cache, v_cache, metadata, 0.2), got)
    assert metadata.scratch[flash.SCRATCH] is again  # the second layer derives nothing


@pytest.mark.parametrize("block_size", [3, 16, 256])
@pytest.mark.parametrize("case", list(CASES))
def test_version_3_takes_any_block_size(case: str, block_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Calls = []
    on(monkeypatch, (9, 0), flash_attn_interface=fake_flash_attn_3(calls))
    q, k_cache, v_cache, metadata = batch(*CASES[case], block_size, torch.bfloat16)
    close(flash.attention(q, k_cache, v_cache, metadata, 0.2), reference.attention(q, k_cache, v_cache, metadata, 0.2))
    assert [name for name, _ in calls] == ["with_kvcache"]
    assert flash.unsupported("attention", dataclasses.replace(GEOMETRY, block_size=block_size)) is None


@pytest.mark.parametrize("version", [2, 3])
def test_a_captured_pass_reads_nothing_but_its_tensors(version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials J01: a graph for four rows replayed with two; the rows of padding give no NaN, and nothing old is read."""
    calls: Calls = []
    fakes = {2: {"flash_attn": fake_flash_attn_2(calls)}, 3: {"flash_attn_interface": fake_flash_attn_3(calls)}}
    on(monkeypatch, (9, 0), **fakes[version])
    q, k_cache, v_cache, two = batch([1, 1], [300, 20], 256, torch.bfloat16)
    static = AttentionMetadata(
        query_lens=(1,) * 4,
        seq_lens=None,
        block_tables=torch.zeros(4, 8, dtype=torch.int32)[:, :5],  # a slice of the widest batch's
        slot_mapping=torch.full((4,), -1),
        block_size=256,
        query_starts=torch.arange(5, dtype=torch.int32),
        lengths=torch.zeros(4, dtype=torch.int32),
        max_seq_len=1280,
    )
    queries = torch.zeros(4, 8, 64, dtype=torch.bfloat16)
    assert torch.equal(flash.attention(queries, k_cache, v_cache, static, 0.2), torch.zeros_like(queries))
    queries[:2] = q
    static.block_tables[:2, : two.block_tables.shape[1]] = two.block_tables
    static.lengths[:2] = two.lengths
    out = flash.attention(queries, k_cache, v_cache, static, 0.2)
    close(out[:2], reference.attention(q, k_cache, v_cache, two, 0.2))
    assert bool(out.isfinite().all())
    assert static.scratch == {}
    assert calls == [("with_kvcache", (4, 1, 8, 64))] * 2


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"block_size": 16}, "block_size 16 is no multiple of 256, which flash-attn 2 needs (flash_attn 2.8.3)"),
        ({"dtype": torch.float32, "cache_dtype": torch.float32}, "dtype float32 is neither bfloat16 nor float16"),
        ({"cache_dtype": torch.float8_e4m3fn}, "keys and values of float8_e4m3fn are not of the queries' bfloat16"),
        ({"head_dim": 264}, "head_dim 264 is no multiple of 8 up to 256"),
        ({"head_dim": 100}, "head_dim 100 is no multiple of 8 up to 256"),
        ({"num_heads": 7}, "7 query heads do not share 2 KV heads evenly"),
        ({}, None),
        ({"head_dim": 80, "block_size": 512}, None),
    ],
)
def test_what_it_cannot_do_is_said_by_explain(
    change: dict[str, object], reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(monkeypatch, (8, 0), flash_attn=fake_flash_attn_2([]))
    geometry = dataclasses.replace(GEOMETRY, **change)  # type: ignore[arg-type]
    attention = next(choice for choice in dispatch.explain("cuda", geometry) if choice.op == "attention")
    assert dict(attention.passed_over).get("flash") == reason
    assert (attention.backend == "flash") == (reason is None)
    by_op = {choice.op: choice for choice in dispatch.explain("cuda", geometry)}
    assert ("flash", "does not have this op") in by_op["linear"].passed_over


@pytest.mark.parametrize(
    "error", ["ImportError('undefined symbol: _ZN2at')", "RuntimeError('no driver')", "OSError('libcudart')"]
)
def test_one_that_fails_to_import_is_passed_over_with_the_reason(
    error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("flash_attn", "flash_attn_interface"):
        (tmp_path / f"{name}.py").write_text(f"raise {error}\n")
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    on(monkeypatch, (9, 0))
    choice = dispatch.choose("attention", "cuda")
    assert choice.backend != "flash"
    kind = error.partition("(")[0]
    for name in ("flash_attn_interface", "flash_attn"):
        assert f"{name} does not import ({kind}: " in dict(choice.passed_over)["flash"]
    assert dict(dispatch.fitted(GEOMETRY).choose("attention", "cuda").passed_over)["flash"].startswith(
        "flash_attn_interface does not"
    )
    with pytest.raises(RuntimeError, match=kind):
        flash.attention(*batch([1], [3], 256, torch.bfloat16), 0.2)
    monkeypatch.setenv(dispatch.ENVIRONMENT_VARIABLE, "flash")
    with pytest.raises(dispatch.KernelUnavailableError, match=f"flash: flash_attn_interface does not import .{kind}"):
        dispatch.BackendTable(dispatch.builtin_backends()).choose("attention", "cuda")


def test_without_a_card_it_is_not_even_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    forget()
    monkeypatch.setitem(sys.modules, "flash_attn", fake_flash_attn_2([]))
    assert dict(dispatch.choose("attention", "cuda").passed_over)["flash"] == "no CUDA device is available to torch"
    assert ("flash", "serves only cuda") in dispatch.choose("attention", "cpu").passed_over or dispatch.choose(
        "attention", "cpu"
    ).backend == "cpu"


def test_an_old_card_an_old_version_and_one_that_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, (7, 5), flash_attn=fake_flash_attn_2([]))
    assert flash.unavailable() == "flash-attn needs a device of compute capability 8.0, this one has 7.5"

    old = types.ModuleType("flash_attn")
    old.__version__ = "2.4.2"  # type: ignore[attr-defined]
    old.flash_attn_with_kvcache = lambda q, k_cache, v_cache, cache_seqlens=None: q  # type: ignore[attr-defined]
    on(monkeypatch, (8, 6), flash_attn=old)
    assert flash.unavailable() == "flash_attn_with_kvcache of flash_attn 2.4.2 takes no block_table; install a newer one"

    broken = fake_flash_attn_2([])
    working = broken.flash_attn_with_kvcache

    def no_kernel(*arguments: object, block_table: Tensor, **named: object) -> Tensor:
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device")

    def wrong(*arguments: object, block_table: Tensor, **named: object) -> Tensor:
        result: Tensor = working(*arguments, block_table=block_table, **named)
        return result * 2

    for function, reason in (
        (no_kernel, "does not run here (RuntimeError: CUDA error: no kernel"),
        (wrong, "computes wrong numbers"),
    ):
        broken.flash_attn_with_kvcache = function
        on(monkeypatch, (10, 0), flash_attn=broken)
        assert str(flash.unavailable()).startswith(f"flash_attn 2.8.3 {reason}")


def test_on_hopper_version_3_is_preferred_and_version_2_stands_in(monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = fake_flash_attn_2([]), fake_flash_attn_3([])
    on(monkeypatch, (9, 0), flash_attn=old, flash_attn_interface=new)
    assert (flash.unavailable(), flash.unsupported("attention", dataclasses.replace(GEOMETRY, block_size=16))) == (None, None)
    on(monkeypatch, (8, 0))
    assert "no multiple of 256" in str(flash.unsupported("attention", dataclasses.replace(GEOMETRY, block_size=16)))
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    on(monkeypatch, (9, 0))
    assert flash.unavailable() is None
    assert "no multiple of 256" in str(flash.unsupported("attention", dataclasses.replace(GEOMETRY, block_size=16)))


def test_no_rows_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Calls = []
    on(monkeypatch, (8, 0), flash_attn=fake_flash_attn_2(calls))
    _, k_cache, v_cache, _ = batch([1], [3], 256, torch.bfloat16)
    nothing = torch.empty(0, 8, 64, dtype=torch.bfloat16)
    assert flash.attention(nothing, k_cache, v_cache, AttentionMetadata.build([], [], [], 256), 0.2).shape == (0, 8, 64)
    assert calls == []
