"""What of the attention kernels is compiled ahead of time: all configurations of the usual types, the defaults of others."""

from typing import Any

from minivllm_kernels.triton.attention_configurations import LEAST_SPLIT, Tiles, decode_tiles, prefill_tiles
from minivllm_kernels.triton.attention_decode import attention_decode_kernel, merge_splits_kernel
from minivllm_kernels.triton.attention_prefill import attention_prefill_kernel
from minivllm_kernels.triton.compilation import TARGETS, CompileCase
from minivllm_kernels.triton.launch import next_power_of_2

__all__ = ["COMPILE_CASES"]

BITS = {"bf16": 16, "fp16": 16, "fp32": 32, "u8": 8}


def _prefill(
    target: int, dtype: str, cache: str, kind: str, head_dim: int, group: int = 4, *, all_tiles: bool = False
) -> list[CompileCase]:
    candidates = prefill_tiles((target // 10, target % 10), head_dim, BITS[dtype], BITS[cache])
    return [
        CompileCase(
            name=f"attention_prefill {_words(dtype, cache, kind, head_dim, tiles)}",
            kernel=attention_prefill_kernel,
            signature={**_arguments(dtype, cache), "tiles": "*i32"},
            constexprs=_constants(kind, head_dim, group, -(-group // -(-group // tiles.m)), tiles),
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
            targets=(target,),
        )
        for tiles in (candidates if all_tiles else candidates[:1])
    ]


def _decode(
    target: int,
    dtype: str,
    cache: str,
    kind: str,
    head_dim: int,
    group: int = 4,
    *,
    all_tiles: bool = False,
    split: bool = True,
) -> list[CompileCase]:
    candidates = decode_tiles(head_dim, BITS[dtype], BITS[cache], group)
    workspace = {"sums": "*fp32", "logs": "*fp32", "rows": "*i32"}
    return [
        CompileCase(
            name=f"attention_decode {_words(dtype, cache, kind, head_dim, tiles)}{'' if split else ', one split'}",
            kernel=attention_decode_kernel,
            signature={**_arguments(dtype, cache), **(workspace if split else {})},
            constexprs={
                **_constants(kind, head_dim, group, -(-group // -(-group // tiles.m)), tiles),
                **({} if split else dict.fromkeys(workspace)),
                "LEAST_SPLIT": LEAST_SPLIT,
                "MAX_SPLITS": 16,
            },
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
            targets=(target,),
        )
        for tiles in (candidates if all_tiles else candidates[:1])
    ]


def _merge(dtype: str, head_dim: int, most: int) -> CompileCase:
    return CompileCase(
        name=f"attention_decode, merging {most} splits to {dtype} {head_dim}",
        kernel=merge_splits_kernel,
        signature={
            **dict.fromkeys(("sums", "logs"), "*fp32"),
            "out": f"*{dtype}",
            **dict.fromkeys(("rows", "query_starts", "lengths"), "*i32"),
        },
        constexprs={
            "NUM_HEADS": 32,
            "HEAD_DIM": head_dim,
            "BLOCK_N": 64,
            "BLOCK_D": next_power_of_2(head_dim),
            "LEAST_SPLIT": LEAST_SPLIT,
            "MAX_SPLITS": most,
        },
        num_warps=4,
        num_stages=1,
    )


def _words(dtype: str, cache: str, kind: str, head_dim: int, tiles: Tiles) -> str:
    return f"{dtype} over {cache if kind == 'plain' else kind} {head_dim}, {tiles.m} x {tiles.n}"


def _arguments(dtype: str, cache: str) -> dict[str, str]:
    return {
        **dict.fromkeys(("q", "out"), f"*{dtype}"),
        **dict.fromkeys(("k_cache", "v_cache"), f"*{cache}"),
        **dict.fromkeys(("query_starts", "lengths"), "*i32"),
        "tables": "*i32" if dtype == "bf16" else "*i64",
        **dict.fromkeys(("q_row_stride", "q_head_stride", "block_stride", "slot_stride", "kv_head_stride"), "i32:16"),
        "table_stride": "i32",
        **dict.fromkeys(("score_scale", "v_scale"), "fp32"),
    }


def _constants(kind: str, head_dim: int, group: int, heads: int, tiles: Tiles) -> dict[str, Any]:
    return {
        "KV_HEADS": 8,
        "GROUP": group,
        "HEADS": heads,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": 16,
        "FORMAT": kind,
        "BLOCK_M": tiles.m,
        "BLOCK_N": tiles.n,
        "BLOCK_D": next_power_of_2(head_dim),
        "STAGES": tiles.num_stages,
    }


def _cases(target: int) -> list[CompileCase]:
    e4m3 = "e4m3" if target == 80 else "e4m3_hardware"
    cases: list[CompileCase] = []
    for head_dim in (64, 128, 256):
        cases += _prefill(target, "bf16", "bf16", "plain", head_dim, all_tiles=True)
        cases += _decode(target, "bf16", "bf16", "plain", head_dim, all_tiles=True)
        for make in (_prefill, _decode):
            cases += make(target, "bf16", "u8", e4m3, head_dim)
            cases += make(target, "fp32", "fp32", "plain", head_dim)
    for make in (_prefill, _decode):
        cases += make(target, "fp16", "fp16", "plain", 80, 3)
        cases += make(target, "fp16", "u8", "e5m2", 128, 1)
        cases += make(target, "bf16", "bf16", "plain", 128, 24)
        cases += make(target, "fp32", "u8", "e4m3", 128)
    return cases + _decode(target, "bf16", "bf16", "plain", 128, split=False)


COMPILE_CASES = (*(case for target in TARGETS for case in _cases(target)), _merge("bf16", 128, 16), _merge("fp32", 256, 64))
