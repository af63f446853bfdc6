"""The kernels between matrix products, and the choice of tokens, each against the reference on the device's own tensors.

Odd widths and head sizes, strided inputs whose other columns are NaN, slots of -1, caches that are NaN where nothing is stored.
"""

from typing import Any

import torch
from torch import Tensor

from minivllm_kernels import DrawTensors, TokenDraw, reference
from minivllm_kernels.dispatch import BackendTable, builtin_backends, using
from minivllm_plugin.bench.gpu.comparing import comparing
from minivllm_plugin.bench.gpu.records import Given, Recorder

__all__ = ["check_choices", "check_pointwise"]

WIDTHS = ((3, 13), (5, 576), (256, 3072), (2, 20000))
HEADS = ((16, 8, 128), (9, 3, 64), (4, 1, 80), (6, 2, 256), (5, 5, 6))
BLOCK_SIZE, NUM_BLOCKS, TOKENS = 16, 5, 7
PLAIN = BackendTable({"reference": builtin_backends()["reference"]})
DRAWS = (
    TokenDraw(0.0, temperature=0.0),
    TokenDraw(0.31, temperature=0.6),
    TokenDraw(0.97, temperature=1.0, top_k=50, top_p=0.9),
    TokenDraw(0.5, temperature=1.3, min_p=0.05),
    TokenDraw(0.02, temperature=0.8, top_p=0.5),
)


def check_pointwise(ops: Any, given: Given, record: Recorder) -> None:
    """``ops``: the module of the backend."""
    torch.manual_seed(0)
    # All shapes in the dtype that models have, some in the others: each is a kernel to be compiled, half a second or more.
    for dtype in (torch.float32,) if given.rehearse else (torch.bfloat16, torch.float16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        is_main = dtype == torch.bfloat16
        for rows, width in WIDTHS if is_main else WIDTHS[:2]:
            _widths(ops, given.device, dtype, f"{name} {rows} x {width}", rows, width, record)
        for shape in HEADS if is_main else HEADS[1:3]:
            _heads(ops, given.device, dtype, dtype, f"{name} {'/'.join(map(str, shape))}", shape, record)
    if not given.rehearse:
        for stored in (torch.float8_e4m3fn, torch.float8_e5m2):
            _heads(
                ops, given.device, torch.bfloat16, stored, f"bfloat16 in {str(stored).removeprefix('torch.')}", HEADS[0], record
            )


def _widths(ops: Any, device: str, dtype: torch.dtype, name: str, rows: int, width: int, record: Recorder) -> None:
    x, residual = _strided(rows, width, dtype, device), _strided(rows, width, dtype, device)
    weight = torch.randn(width, device=device).to(dtype)
    with comparing(record, f"rms_norm {name}") as found:
        found.close("result", ops.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6), times=2)
    with comparing(record, f"add_rms_norm {name}") as found:
        normed, total = ops.add_rms_norm(x, residual, weight, 1e-6)
        expected, expected_total = reference.add_rms_norm(x, residual, weight, 1e-6)
        found.close("result", normed, expected, times=2)
        found.same("sum", total, expected_total)
    with comparing(record, f"silu_and_mul {name}") as found:
        gate_up = _strided(rows, 2 * width, dtype, device)
        found.close("result", ops.silu_and_mul(gate_up), reference.silu_and_mul(gate_up), times=2)


def _heads(
    ops: Any, device: str, dtype: torch.dtype, stored: torch.dtype, name: str, shape: tuple[int, int, int], record: Recorder
) -> None:
    q_heads, kv_heads, dim = shape
    q, k, v = (_strided(TOKENS, n * dim, dtype, device).view(TOKENS, n, dim) for n in (q_heads, kv_heads, kv_heads))
    positions = torch.arange(TOKENS, device=device) * 3
    slots = torch.tensor([4, -1, 79, 0, 33, -1, 17], device=device)
    angles = torch.randn(64, dim // 2, device=device)
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    norms = [torch.randn(dim, device=device).to(dtype) for _ in range(2)]
    with comparing(record, f"rotary {name}") as found:
        for part, got, expected in zip(
            "qk", ops.rotary(q, k, positions, table), reference.rotary(q, k, positions, table), strict=True
        ):
            found.close(part, got, expected, of_row=True)
    with comparing(record, f"store_kv {name}") as found:
        caches, expected_caches = ([_poisoned(kv_heads, dim, stored, device) for _ in "kv"] for _ in range(2))
        ops.store_kv(k, v, *caches, slots)
        reference.store_kv(k, v, expected_caches[0], expected_caches[1], slots)
        for part, cache, expected_cache in zip("kv", caches, expected_caches, strict=True):
            found.same(part, cache.float(), expected_cache.float())
    for title, weights in (("norm_rotary_store", norms), ("norm_rotary_store without norms", [None, None])):
        with comparing(record, f"{title} {name}") as found:
            caches, expected_caches = ([_poisoned(kv_heads, dim, stored, device) for _ in "kv"] for _ in range(2))
            got = ops.norm_rotary_store(q, k, v, positions, table, *caches, slots, *weights, 1e-6)
            q_want, k_want = (x if w is None else reference.rms_norm(x, w, 1e-6) for x, w in zip((q, k), weights, strict=True))
            q_want, k_want = reference.rotary(q_want, k_want, positions, table)
            reference.store_kv(k_want, v, expected_caches[0], expected_caches[1], slots)
            found.close("q", got, q_want, times=2, of_row=True)
            if stored == dtype:
                found.close("keys", caches[0], expected_caches[0], times=2, of_row=True)
            found.same("values", caches[1].float(), expected_caches[1].float())


def check_choices(ops: Any, given: Given, record: Recorder) -> None:
    """argmax and sample_rows over vocabularies of several sizes, rows without an answer among them."""
    torch.manual_seed(1)
    for rows, width in ((6, 500),) if given.rehearse else ((6, 500), (1, 151936), (7, 151936), (64, 128256)):
        logits = torch.randn(rows, width, device=given.device) * 4
        if rows > 5:
            logits[4, 7], logits[5] = torch.nan, -torch.inf
        ties = logits.clone()
        ties[:, width // 2 :] = ties[:, : width - width // 2]
        with comparing(record, f"argmax {rows} x {width}") as found:
            found.same("tokens", ops.argmax(ties), reference.argmax(ties))
        with comparing(record, f"sample_rows {rows} x {width}") as found:
            draws = DrawTensors.build([DRAWS[row % len(DRAWS)] for row in range(rows)], given.device)
            got = ops.sample_rows(logits, draws)
            with using(PLAIN):  # it goes through the public ops
                expected = reference.sample_rows(logits, draws)
            found.same("tokens", got, expected, but=rows // 50)


def _strided(rows: int, width: int, dtype: torch.dtype, device: str) -> Tensor:
    """Random ``[rows, width]``, a view of wider rows whose other columns are NaN."""
    whole = torch.full((rows, width + 24), torch.nan, dtype=dtype, device=device)
    whole[:, 8 : 8 + width] = torch.randn(rows, width, device=device) * 2
    return whole[:, 8 : 8 + width]


def _poisoned(kv_heads: int, dim: int, dtype: torch.dtype, device: str) -> Tensor:
    return torch.full((NUM_BLOCKS, BLOCK_SIZE, kv_heads, dim), torch.nan, device=device).to(dtype)
