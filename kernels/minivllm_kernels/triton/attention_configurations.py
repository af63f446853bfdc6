"""How large the tiles of the attention kernels are, by card, head size and dtype.

A configuration is a function of the model's shape and the card, never of the batch: rows are then computed alike whatever their
company. The first of each tuple is the default. The defaults spill no register on sm_80, sm_90 and sm_100 (float32 over an
8-bit cache at D > 128 apart) and fit the shared memory of a block (163 KB there, 99 KB on sm_86, sm_89 and sm_120), which
``compilation`` shows. They are reasoned, not measured:

- Prefill, 16-bit: 128 rows are two warpgroups' worth of ``wgmma`` on sm_90, and eight warps leave 255 registers a thread for
  128 x D sums. Keys in tiles of 64, two tiles ahead; of 32 at D = 256, where the sums alone take half of the registers.
- float32 has no exact instruction in tensor cores: products are ordinary multiply-adds, so tiles are small. A narrower cache
  under float32 queries is for comparing, not for speed.
- Decode: 16 rows are the least of a tensor core's tile, and bytes are the limit: 64 keys, two tiles ahead, are 64 KB in flight
  a program at D = 128, and two or three programs fit an SM; to keep 4.8 TB/s busy over some 800 ns of latency an SM needs 30
  KB.

``MINIVLLM_TUNE=1`` measures the alternatives once a card and shape, and remembers the best
(:mod:`minivllm_kernels.triton.attention_tuning`).
"""

from dataclasses import dataclass

__all__ = ["LEAST_SPLIT", "Tiles", "decode_tiles", "max_splits", "prefill_tiles"]

LEAST_SPLIT = 256
"""Keys of one split at least: the partial sums of a group of 4 are then 3 % of the bytes of its keys and values."""

PROGRAMS = 128
"""As many programs at least as a card has SMs, about, share one long sequence."""

SMALL_MEMORY = ((8, 6), (8, 7), (8, 9), (12, 0), (12, 1))


@dataclass(frozen=True, slots=True)
class Tiles:
    """``m`` query rows by ``n`` keys, and the launch options that go with them."""

    m: int
    n: int
    num_warps: int
    num_stages: int


def prefill_tiles(capability: tuple[int, int], head_dim: int, element_bits: int, kv_bits: int) -> tuple[Tiles, ...]:
    """Configurations for heads of ``head_dim`` and queries and keys of so many bits."""
    if element_bits == 32 and kv_bits == 32:
        return (Tiles(32, 32, 8, 2) if head_dim <= 64 else Tiles(32, 16, 8, 2) if head_dim <= 128 else Tiles(16, 16, 8, 2),)
    if element_bits == 32:
        return (Tiles(32, 32, 8, 2) if head_dim <= 64 else Tiles(16, 16, 8, 2),)
    major = capability[0] if capability not in SMALL_MEMORY else 8
    if head_dim <= 64 and major >= 10 and kv_bits == 8:
        return (Tiles(128, 128, 8, 3), Tiles(128, 64, 8, 2))
    if head_dim <= 64:
        return (Tiles(128, 64, 8, 3), Tiles(128, 128, 8, 3), Tiles(64, 64, 4, 3))
    if head_dim <= 128:
        if major == 8:
            # Masked lanes and conversions take registers: half the keys where either is needed.
            first = Tiles(128, 32, 8, 3) if kv_bits == 8 or head_dim < 128 else Tiles(128, 64, 8, 3)
            return (first, Tiles(128, 32, 8, 4), Tiles(64, 32, 4, 3))
        return (Tiles(128, 64, 8, 3), Tiles(128, 128, 8, 2), Tiles(64, 64, 4, 3))
    if major == 8:
        return (Tiles(64, 32, 8, 2 if capability in SMALL_MEMORY else 3),)
    return (Tiles(128, 32, 8, 3), Tiles(64, 64, 4, 2))


def decode_tiles(head_dim: int, element_bits: int, kv_bits: int, group: int) -> tuple[Tiles, ...]:
    """Configurations for ``group`` query heads that share a KV head; more than ``m`` are served in parts."""
    m = 32 if group > 16 and element_bits == 16 else 16
    if element_bits == 32:
        wide = head_dim <= 64 or (head_dim <= 128 and kv_bits == 32)
        return (Tiles(16, 32, 4, 3) if wide else Tiles(16, 16, 8 if head_dim <= 128 else 4, 2),)
    if m == 32:
        return (Tiles(m, 64 if head_dim <= 64 else 32, 4, 3),)
    if head_dim <= 64:
        return (Tiles(m, 64, 4, 3), Tiles(m, 128, 4, 3))
    if head_dim <= 128:
        return (Tiles(m, 64, 4, 3), Tiles(m, 32, 4, 4))
    return (Tiles(m, 32, 4, 3), Tiles(m, 64, 8, 2))


def max_splits(num_programs: int) -> int:
    """A power of two: most splits of one sequence, where ``num_programs`` (KV heads, mostly) work on each split."""
    wanted = -(-PROGRAMS // num_programs)
    return min(max(1 << (wanted - 1).bit_length(), 16), 64)
