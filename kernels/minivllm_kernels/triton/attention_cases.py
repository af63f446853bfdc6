"""What of the attention kernels is compiled ahead of time: the default configuration of each kind of types and head size, and
for the most usual kind the others that ``MINIVLLM_TUNE`` chooses among."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from minivllm_kernels.triton.attention_configurations import LEAST_SPLIT, Tiles, decode_tiles, prefill_tiles
from minivllm_kernels.triton.attention_decode import attention_decode_kernel, merge_splits_kernel
from minivllm_kernels.triton.attention_prefill import attention_prefill_kernel
from minivllm_kernels.triton.compilation import TARGETS, CompileCase
from minivllm_kernels.triton.launch import next_power_of_2

__all__ = ["COMPILE_CASES"]

BITS = {"bf16": 16, "fp16": 16, "fp32": 32, "u8": 8}


@dataclass(frozen=True, slots=True)
class _Kind:
    """dtype of queries and of the cache, how its bytes are read, and heads that share a KV head."""

    dtype: str
    cache: str
    kind: str
    head_dim: int
    group: int = 4


BF16 = tuple(_Kind("bf16", "bf16", "plain", head_dim) for head_dim in (64, 128, 256))
E4M3, E4M3_HARDWARE = _Kind("bf16", "u8", "e4m3", 128), _Kind("bf16", "u8", "e4m3_hardware", 128)
ODD = _Kind("fp16", "fp16", "plain", 80, 3)
PREFILL = (
    *BF16,
    E4M3,
    E4M3_HARDWARE,
    ODD,
    _Kind("bf16", "u8", "e5m2", 256),
    *(_Kind("fp32", "fp32", "plain", d) for d in (64, 256)),
)
DECODE = (*BF16, E4M3, E4M3_HARDWARE, ODD, _Kind("bf16", "bf16", "plain", 128, 24), _Kind("fp32", "fp32", "plain", 128))
ALTERNATIVES = _Kind("bf16", "bf16", "plain", 128)  # of which the candidates for tuning are compiled too


def _prefill(what: _Kind, tiles: Tiles, targets: Sequence[int], why: str) -> CompileCase:
    return CompileCase(
        name=f"attention_prefill {_words(what, tiles)}",
        kernel=attention_prefill_kernel,
        signature={**_arguments(what), "tiles": "*i32"},
        constexprs=_constants(what, tiles),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        targets=targets,
        reason=why,
    )


def _decode(what: _Kind, tiles: Tiles, targets: Sequence[int], why: str, *, split: bool = True) -> CompileCase:
    workspace = {"sums": "*fp32", "logs": "*fp32", "rows": "*i32"}
    return CompileCase(
        name=f"attention_decode {_words(what, tiles)}{'' if split else ', one split'}",
        kernel=attention_decode_kernel,
        signature={**_arguments(what), **(workspace if split else {})},
        constexprs={
            **_constants(what, tiles),
            **({} if split else dict.fromkeys(workspace)),
            "LEAST_SPLIT": LEAST_SPLIT,
            "MAX_SPLITS": 16,
        },
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        targets=targets,
        reason=why,
    )


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


def _words(what: _Kind, tiles: Tiles) -> str:
    cache = what.cache if what.kind == "plain" else what.kind
    return f"{what.dtype} over {cache}, {what.group} x {what.head_dim}, tiles {tiles.m} x {tiles.n}, {tiles.num_stages} stages"


def _arguments(what: _Kind) -> dict[str, str]:
    return {
        **dict.fromkeys(("q", "out"), f"*{what.dtype}"),
        **dict.fromkeys(("k_cache", "v_cache"), f"*{what.cache}"),
        **dict.fromkeys(("query_starts", "lengths"), "*i32"),
        "tables": "*i32",
        **dict.fromkeys(("q_row_stride", "q_head_stride", "block_stride", "slot_stride", "kv_head_stride"), "i32:16"),
        "table_stride": "i32",
        **dict.fromkeys(("score_scale", "v_scale"), "fp32"),
    }


def _constants(what: _Kind, tiles: Tiles) -> dict[str, Any]:
    return {
        "KV_HEADS": 8,
        "GROUP": what.group,
        "HEADS": -(-what.group // -(-what.group // tiles.m)),
        "HEAD_DIM": what.head_dim,
        "BLOCK_SIZE": 16,
        "FORMAT": what.kind,
        "BLOCK_M": tiles.m,
        "BLOCK_N": tiles.n,
        "BLOCK_D": next_power_of_2(what.head_dim),
        "STAGES": tiles.num_stages,
    }


def _prefill_tiles(what: _Kind, target: int) -> tuple[Tiles, ...]:
    return prefill_tiles((target // 10, target % 10), what.head_dim, BITS[what.dtype], BITS[what.cache])


def _decode_tiles(what: _Kind, target: int) -> tuple[Tiles, ...]:
    return decode_tiles(what.head_dim, BITS[what.dtype], BITS[what.cache], what.group)


def _cases(
    kinds: Sequence[_Kind],
    tiles_of: Callable[[_Kind, int], tuple[Tiles, ...]],
    make: Callable[[_Kind, Tiles, Sequence[int], str], CompileCase],
) -> list[CompileCase]:
    """One for each kind and configuration, with the targets that launch it."""
    targets: dict[tuple[_Kind, Tiles], list[int]] = {}
    for what in kinds:
        for target in TARGETS:
            if (what == E4M3 and target != 80) or (what == E4M3_HARDWARE and target == 80):
                continue
            candidates = tiles_of(what, target)
            for tiles in candidates if what == ALTERNATIVES else candidates[:1]:
                targets.setdefault((what, tiles), []).append(target)
    return [
        make(what, tiles, found, "" if len(found) == len(TARGETS) else "other cards have another configuration")
        for (what, tiles), found in targets.items()
    ]


COMPILE_CASES = (
    *_cases(PREFILL, _prefill_tiles, _prefill),
    *_cases(DECODE, _decode_tiles, _decode),
    _decode(ALTERNATIVES, decode_tiles(128, 16, 16, 4)[0], TARGETS, "", split=False),
    _merge("bf16", 128, 16),
    _merge("fp32", 256, 64),
)
