"""Every op in plain torch: the oracle of the kernel tests, and the path of last resort on any device.

Rows of one sequence never depend on the others in the batch. Slots that were never written are never read, so a fresh
cache may hold anything, NaN included.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

import minivllm_kernels
from minivllm_kernels.draws import DrawTensors, TokenDraw
from minivllm_kernels.metadata import AttentionMetadata

__all__ = [
    "add_rms_norm",
    "argmax",
    "attention",
    "embedding",
    "filter_probabilities",
    "linear",
    "norm_rotary_store",
    "rms_norm",
    "rotary",
    "sample",
    "sample_rows",
    "silu_and_mul",
    "store_kv",
]

# Decode rows are gathered into one padded tensor until this many bytes of keys; longer batches go in groups.
GATHER_LIMIT_BYTES = 64 * 2**20
FLOATS_OF_8_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)
# Tokens below this share of the most likely one are looked at only when the others do not reach top_p.
NUCLEUS_FLOOR = 1e-3


def embedding(token_ids: Tensor, weight: Tensor) -> Tensor:
    return F.embedding(token_ids, weight)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight, bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype) * weight


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + residual
    return rms_norm(total, weight, eps), total


def rotary(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos_sin.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    # Without a look at the slots on the host. Rows that go nowhere repeat the first row that goes somewhere, which changes
    # nothing; where there is none, all write back what stands in slot 0.
    if not slot_mapping.shape[0]:
        return
    live = slot_mapping >= 0
    rows = torch.where(live, torch.arange(slot_mapping.shape[0], device=slot_mapping.device), live.int().argmax(dim=0))
    slots = slot_mapping.index_select(0, rows)
    is_live = (slots >= 0).view(-1, 1, 1)
    slots = slots.clamp(min=0)
    for new, cache in ((k, k_cache), (v, v_cache)):
        stored = _stored(cache)
        values = _stored(_narrow(new.index_select(0, rows), cache.dtype))
        stored.index_copy_(0, slots, torch.where(is_live, values, stored.index_select(0, slots)))


def norm_rotary_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
) -> Tensor:
    # Through the public ops: another backend may have one of the three.
    if q_weight is not None and k_weight is not None:
        q, k = minivllm_kernels.rms_norm(q, q_weight, eps), minivllm_kernels.rms_norm(k, k_weight, eps)
    q, k = minivllm_kernels.rotary(q, k, positions, cos_sin)
    minivllm_kernels.store_kv(k, v, k_cache, v_cache, slot_mapping)
    return q


def attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, scale: float) -> Tensor:
    plan = metadata.scratch.get("reference")
    if plan is None:
        bytes_per_token = k_cache.shape[2] * k_cache.shape[3] * k_cache.element_size()
        most = max(1, GATHER_LIMIT_BYTES // bytes_per_token)
        make = _plan if metadata.seq_lens is not None else _plan_on_the_device
        plan = metadata.scratch["reference"] = make(metadata, q.device, most)
    keys, values = _stored(k_cache), _stored(v_cache)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for rows, slots, mask in plan:
        # [n, Q, H, D] against [n, S, K, D]: n sequences with the same number Q of new tokens. index_select copies whole
        # rows and is several times faster than advanced indexing on a CPU.
        count, width = slots.shape
        query = q.index_select(0, rows).view(count, -1, *q.shape[1:]).transpose(1, 2)
        key, value = (
            stored.index_select(0, slots.view(-1))
            .view(cache.dtype)
            .view(count, width, *cache.shape[2:])
            .transpose(1, 2)
            .to(q.dtype)
            for stored, cache in ((keys, k_cache), (values, v_cache))
        )
        result = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=True)
        out.index_copy_(0, rows, result.transpose(1, 2).reshape(-1, *q.shape[1:]))
    return out


def argmax(logits: Tensor) -> Tensor:
    return logits.argmax(dim=-1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def _stored(x: Tensor) -> Tensor:
    """``[..., K, D]`` as ``[n, K, D]``, floats of 8 bits as bytes: torch moves those, but indexes no such floats."""
    flat = x.view(-1, *x.shape[-2:])
    return flat.view(torch.uint8) if x.dtype in FLOATS_OF_8_BITS else flat


def _narrow(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` in ``dtype``; what 8 bits cannot hold becomes the largest that they can."""
    if dtype in FLOATS_OF_8_BITS:
        most = torch.finfo(dtype).max
        x = x.float().clamp(-most, most)
    return x.to(dtype)


def _plan(metadata: AttentionMetadata, device: torch.device, max_tokens: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Groups of sequences that can share one SDPA call: all decode rows together (in bounded groups), each prefill alone."""
    assert metadata.seq_lens is not None
    starts, start = [], 0
    for length in metadata.query_lens:
        starts.append(start)
        start += length
    decodes = [b for b, length in enumerate(metadata.query_lens) if length == 1]
    prefills = [[b] for b, length in enumerate(metadata.query_lens) if length > 1]
    groups = [*_bounded(decodes, metadata.seq_lens, max_tokens), *prefills]
    return [_group(members, starts, metadata, device) for members in groups]


def _bounded(members: list[int], seq_lens: tuple[int, ...], max_tokens: int) -> list[list[int]]:
    """Split by length, so that a long neighbour does not pad a short one, and by size."""
    groups: list[list[int]] = []
    longest = 0
    for b in sorted(members, key=lambda member: -seq_lens[member]):
        if not groups or seq_lens[b] * 2 < longest or (len(groups[-1]) + 1) * longest > max_tokens:
            groups.append([])
            longest = seq_lens[b]
        groups[-1].append(b)
    return groups


def _plan_on_the_device(
    metadata: AttentionMetadata, device: torch.device, max_tokens: int
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """The same for decode rows whose lengths only the device knows: every row as wide as its table, the rest masked."""
    count, width = metadata.block_tables.shape[0], metadata.block_tables.shape[1] * metadata.block_size
    positions = torch.arange(width, device=device)
    lengths = metadata.lengths.unsqueeze(1)
    # As in _group; a row of length 0 reads one slot, and nobody reads what it makes of it.
    readable = torch.minimum(positions, (lengths - 1).clamp(min=0))
    blocks = metadata.block_tables.long().gather(1, readable // metadata.block_size)
    slots = blocks * metadata.block_size + readable % metadata.block_size
    mask = (positions < lengths).view(count, 1, 1, width)
    rows = torch.arange(count, device=device)
    step = max(1, max_tokens // width)
    return [(rows[i : i + step], slots[i : i + step], mask[i : i + step]) for i in range(0, count, step)]


def _group(
    members: list[int], starts: list[int], metadata: AttentionMetadata, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    assert metadata.seq_lens is not None
    new = metadata.query_lens[members[0]]
    lengths = torch.tensor([metadata.seq_lens[b] for b in members], device=device)
    width = int(max(metadata.seq_lens[b] for b in members))
    positions = torch.arange(width, device=device).expand(len(members), width)
    # Padding columns point at the sequence's last token: a slot that is written, and masked below.
    readable = torch.minimum(positions, lengths.unsqueeze(1) - 1)
    tables = metadata.block_tables[members].long()
    blocks = tables.gather(1, readable // metadata.block_size)
    slots = blocks * metadata.block_size + readable % metadata.block_size
    query_positions = lengths.unsqueeze(1) - new + torch.arange(new, device=device)
    mask = positions.unsqueeze(1) <= query_positions.unsqueeze(2)
    rows = torch.tensor([starts[b] + i for b in members for i in range(new)], device=device)
    return rows, slots, mask.unsqueeze(1)


def sample(logits: Tensor, draws: Sequence[TokenDraw]) -> Tensor:
    return torch.stack([_draw(row, draw) for row, draw in zip(logits, draws, strict=True)])


def sample_rows(logits: Tensor, draws: DrawTensors) -> Tensor:
    # Through the public ops: another backend may have one of the two.
    best = minivllm_kernels.argmax(logits)
    healthy = logits.gather(1, best.unsqueeze(1)).squeeze(1).isfinite()  # a NaN counts as the largest
    tokens = torch.where(healthy, best, -1)
    wanted = draws.tolist()
    random = [row for row, fine in enumerate(healthy.tolist()) if fine and wanted[row].temperature > 0]
    if random:
        tokens[random] = minivllm_kernels.sample(logits[random], [wanted[row] for row in random])
    return tokens


def _draw(logits: Tensor, draw: TokenDraw) -> Tensor:
    # The peak is taken off first, so that dividing by a small temperature cannot overflow.
    probabilities = torch.softmax((logits - logits.max()) / draw.temperature, dim=-1)
    cumulative = filter_probabilities(probabilities, draw).double().cumsum(0)
    # right=True: the first token whose cumulative mass is above the target, so a token of no mass is never drawn.
    token = torch.searchsorted(cumulative, draw.uniform * cumulative[-1], right=True)
    # Rounding may leave the target at the very end: then the last token that has any mass.
    return torch.where(token < logits.shape[0], token, cumulative.argmax())


def filter_probabilities(probabilities: Tensor, params: TokenDraw) -> Tensor:
    """Zero what min_p, top_k and top_p leave out of ``probabilities [V]``; not renormalised. The most likely token stays."""
    if params.min_p > 0.0:
        probabilities = probabilities.where(probabilities >= params.min_p * probabilities.max(), 0.0)
    top_k = params.top_k if 0 < params.top_k < probabilities.numel() else 0
    if not top_k and params.top_p == 1.0:
        return probabilities
    # Ties fall to the lower token id: candidates keep their order, and the sort is stable.
    candidates = _candidates(probabilities, top_k, params.top_p).nonzero().squeeze(1)
    ordered, order = probabilities[candidates].sort(descending=True, stable=True)
    if top_k:
        ordered, order = ordered[:top_k], order[:top_k]
    if params.top_p < 1.0:
        total = ordered.double().sum() if top_k else probabilities.double().sum()
        before = ordered.double().cumsum(0) - ordered.double()  # mass of the more likely ones: keep while short of top_p
        keep = before < params.top_p * total
        keep[0] = True
        ordered, order = ordered[keep], order[keep]
    return torch.zeros_like(probabilities).scatter_(0, candidates[order], ordered)


def _candidates(probabilities: Tensor, top_k: int, top_p: float) -> Tensor:
    """A mask that holds every token that can survive: sorting a whole vocabulary would cost more than the rest of a step."""
    if top_k:
        return probabilities >= probabilities.topk(top_k).values[-1]
    likely = probabilities >= probabilities.max() * NUCLEUS_FLOOR
    enough = probabilities.where(likely, 0.0).double().sum() >= top_p * probabilities.double().sum()
    return likely if bool(enough) else torch.ones_like(likely)
