"""``slru``: segmented LRU eviction. Decides which cached blocks go first from how often each was found again.

No state: what a block has earned stands in its record. Engine thread.
"""

from collections.abc import Sequence

from minivllm_plugin.config import check_integer
from minivllm_plugin.hookspecs import hookimpl
from minivllm_plugin.plugins.first_party.arguments import check_number
from minivllm_plugin.views import CandidateBlock

__all__ = ["SegmentedLRU"]


class SegmentedLRU:
    """Blocks that nobody found again go before blocks that somebody did; in each of the two segments the oldest goes first.

    So a run of prompts that are never seen again does not wash out a prefix that many share. A new block is on probation; with
    ``protected_hits`` hits it is protected. The protected may be ``protected_share`` of what is up for eviction; beyond it the
    oldest of them are on probation again, so yesterday's favourites leave in the end.

    Source: Karedla, Love and Wherry, "Caching Strategies to Improve Disk System Performance" (1994), where the share is of the
    whole cache; here it is of the candidates, the blocks freed longest ago, since a policy sees no others. SGLang's ``slru``
    (pull request 18843) protects by hits, too, and has no bound.

    Args:
        protected_hits: hits that protect a block. At least 1.
        protected_share: at most this part of the candidates is protected. Between 0 (plain LRU) and 1 (no bound).

    Cost: one pass over the candidates (at least 16, four for each block needed), on eviction only.

    Raises:
        ConfigError: an argument outside its range.
    """

    minivllm_name = "slru"

    def __init__(self, *, protected_hits: int = 1, protected_share: float = 0.8) -> None:
        self.protected_hits = check_integer("protected_hits", protected_hits, at_least=1)
        self.protected_share = check_number("protected_share", protected_share, at_most=1.0)

    @hookimpl
    def minivllm_order_eviction(self, candidates: Sequence[CandidateBlock]) -> list[int]:
        protected = [block for block in candidates if block.num_hits >= self.protected_hits]
        surplus = len(protected) - int(self.protected_share * len(candidates))
        kept = {block.block_id for block in protected[max(0, surplus) :]}  # candidates come oldest first
        probation = [block.block_id for block in candidates if block.block_id not in kept]
        return probation + [block.block_id for block in protected if block.block_id in kept]
