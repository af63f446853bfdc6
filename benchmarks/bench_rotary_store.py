"""Between the projections and attention: rotation by position and the store into the paged cache, apart and in one op.

    python benchmarks/bench_rotary_store.py smollm2-135m --rows 1 32 512

Slots are spread over the cache, as those of many sequences are.
"""

from collections.abc import Sequence

import torch
from op_table import OpTable, op_options
from op_timing import finish

from minivllm_kernels import norm_rotary_store, rotary, store_kv
from minivllm_plugin.models.layers import RotaryTable

BLOCK_SIZE = 16
POSITIONS = 2048


def main(arguments: Sequence[str] | None = None) -> None:
    options = op_options(__doc__, arguments)
    table = OpTable.of(options)
    config = table.config
    cos_sin = RotaryTable(config.rope, config.head_dim, POSITIONS).cos_sin.to(options.device)
    blocks = 4 * max(options.rows)
    k_cache, v_cache = (table.random(blocks, BLOCK_SIZE, config.num_kv_heads, config.head_dim) for _ in range(2))
    shuffled = torch.randperm(blocks * BLOCK_SIZE, generator=torch.Generator().manual_seed(0)).to(options.device)
    for count in options.rows:
        q = table.random(count, config.num_heads, config.head_dim)
        k, v = (table.random(count, config.num_kv_heads, config.head_dim) for _ in range(2))
        positions = torch.arange(count, device=options.device) % POSITIONS
        slots = shuffled[:count]
        turned, stored = 2 * (q.nbytes + k.nbytes), 2 * (k.nbytes + v.nbytes)

        def both(q=q, k=k, v=v, positions=positions, slots=slots) -> torch.Tensor:  # type: ignore[no-untyped-def]  # bound here
            return norm_rotary_store(q, k, v, positions, cos_sin, k_cache, v_cache, slots)

        table.add("rotary", count, lambda: rotary(q, k, positions, cos_sin), turned)  # noqa: B023  # called at once
        table.add("store_kv", count, lambda: store_kv(k, v, k_cache, v_cache, slots), stored)  # noqa: B023
        table.add("norm_rotary_store", count, both, 2 * (q.nbytes + k.nbytes + v.nbytes))
    table.add_compiled({"rotary": "rotation and store, bfloat16 cache"})
    finish("rotary-store", table.title, options, table.rows)


if __name__ == "__main__":
    main()
