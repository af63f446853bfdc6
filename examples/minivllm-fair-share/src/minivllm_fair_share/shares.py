"""Who was served how much: a clock a tenant, which runs slower the greater its weight. Plain Python, knows no engine.

The tenant whose clock is furthest behind goes first, and the one furthest ahead makes room. A tenant that comes back from a
pause is set to the clock of those who are there: nobody can save up.
"""

from collections import Counter
from collections.abc import Sequence

from minivllm_fair_share.settings import Settings
from minivllm_plugin.plugins import RequestView

__all__ = ["Shares"]


class Shares:
    """The clocks of all tenants, in computed tokens divided by weight. Not thread-safe: one engine's thread calls it."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.clocks: dict[str, float] = {}
        self._tenants: dict[str, str] = {}  # request id -> its tenant, while it lives
        self._num_live: Counter[str] = Counter()
        self._floor = 0.0  # the clock of the tenant furthest behind among those who are there

    def join(self, request_id: str, tenant: str) -> None:
        """A request of ``tenant`` was queued."""
        self._raise_floor()
        if not self._num_live[tenant]:
            self.clocks[tenant] = max(self.clocks.get(tenant, 0.0), self._floor)
        self._tenants[request_id] = tenant
        self._num_live[tenant] += 1

    def charge(self, request_id: str, num_tokens: int) -> None:
        """So many tokens were computed for it. Unknown ids are ignored."""
        tenant = self._tenants.get(request_id)
        if tenant is not None:
            self.clocks[tenant] += num_tokens / self.settings.weight_of(tenant)

    def leave(self, request_id: str) -> None:
        """It ended. Unknown ids (a request that was refused) are ignored."""
        tenant = self._tenants.pop(request_id, None)
        if tenant is None:
            return
        self._num_live[tenant] -= 1
        if not +self._num_live:  # the last one leaves: whoever comes next starts where it stopped
            self._floor = max(self._floor, self.clocks[tenant])
        self._raise_floor()
        self._num_live = +self._num_live
        self.clocks = {name: clock for name, clock in self.clocks.items() if name in self._num_live or clock > self._floor}

    def order(self, waiting: Sequence[RequestView]) -> list[str]:
        """Ids in the order in which they should be admitted, as if each were charged for its tokens on the spot."""
        clocks = {request.tenant: self.clocks.get(request.tenant, self._floor) for request in waiting}
        queues: dict[str, list[RequestView]] = {tenant: [] for tenant in clocks}
        for request in sorted(waiting, key=lambda request: request.arrival, reverse=True):
            queues[request.tenant].append(request)
        ids: list[str] = []
        while queues:
            tenant = min(queues, key=lambda name: (clocks[name], queues[name][-1].arrival))
            request = queues[tenant].pop()
            clocks[tenant] += (request.num_tokens - request.num_cached_tokens) / self.settings.weight_of(tenant)
            ids.append(request.request_id)
            if not queues[tenant]:
                del queues[tenant]
        return ids

    def victims(self, running: Sequence[RequestView]) -> list[str]:
        """Ids in the order in which they should make room: of the tenant furthest ahead, what loses the least work first."""
        return [
            request.request_id
            for request in sorted(
                running, key=lambda request: (-self.clocks.get(request.tenant, self._floor), request.num_computed_tokens)
            )
        ]

    def _raise_floor(self) -> None:
        present = [self.clocks[tenant] for tenant in +self._num_live]
        if present:
            self._floor = max(self._floor, min(present))
