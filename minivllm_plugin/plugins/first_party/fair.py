"""``fair``: a virtual token counter per tenant. Decides the waiting order from what each tenant was served so far.

Owns the counters. Told of requests and steps as an observer, asked as a policy; both on the engine thread, unless the
observers were slow and moved to a thread of their own, hence the lock. Knows tenants by name only.
"""

import heapq
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from minivllm_plugin.config import check_integer
from minivllm_plugin.errors import ConfigError
from minivllm_plugin.events import RequestOutcome, StepPlan, StepReport
from minivllm_plugin.hookspecs import hookimpl
from minivllm_plugin.plugins.first_party.arguments import check_number
from minivllm_plugin.plugins.first_party.ordering import WHOLE_QUEUE, free_places
from minivllm_plugin.views import EngineState, RequestView

__all__ = ["FairShare"]


@dataclass(slots=True)
class _Account:
    """One tenant: its counter, and how many of its requests wait and live."""

    counter: float
    num_waiting: int = 0
    num_live: int = 0


@dataclass(slots=True)
class _Live:
    """One request that was queued and has not ended. ``cost``: what its prompt will be charged."""

    tenant: str
    cost: float
    is_waiting: bool = True


class FairShare:
    """The tenant with the smallest counter goes next; within a tenant, who came first.

    A counter grows by ``input_weight`` for each uncached prompt token when a request is first admitted, and by ``output_weight``
    for each token that it gains. So tenants that keep requests waiting are served equally, whatever each of them sends; a tenant
    alone gets everything. One that comes back after a pause is lifted to the smallest counter among those who wait: it
    cannot save up. What is computed again after a preemption is not charged.

    Source: VTC of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024), with its weights; cached tokens are
    free here, since nothing is computed for them. A tenant is ``metadata["tenant"]``, else ``metadata["user"]``; requests without
    either are one tenant. A tenant's counter is forgotten once it is idle and would be lifted anyway.

    Args:
        input_weight, output_weight: what a prompt token and a generated token count. At least 0, not both 0.
        shares: tenant -> how much it may have of what another gets, greater than 0; 1 for those that are not named.
        max_idle_tenants: of those without requests, at most so many counters are kept, the largest. At least 0.

    Cost: one pass over the waiting requests (at most 1,024) in a step that may admit somebody; one addition a token.

    Raises:
        ConfigError: an argument outside its range.
    """

    minivllm_name = "fair"
    minivllm_waiting_window = WHOLE_QUEUE

    def __init__(
        self,
        *,
        input_weight: float = 1.0,
        output_weight: float = 2.0,
        shares: Mapping[str, float] | None = None,
        max_idle_tenants: int = 1024,
    ) -> None:
        self.input_weight = check_number("input_weight", input_weight)
        self.output_weight = check_number("output_weight", output_weight)
        if not self.input_weight and not self.output_weight:
            raise ConfigError("input_weight=0 and output_weight=0 would charge nobody; one of them must be greater than 0")
        self.shares = {tenant: _share(tenant, share) for tenant, share in (shares or {}).items()}
        self.max_idle_tenants = check_integer("max_idle_tenants", max_idle_tenants, at_least=0)
        self._lock = threading.Lock()
        self._accounts: dict[str, _Account] = {}
        self._live: dict[str, _Live] = {}
        self._num_waiting = 0
        self._floor = 0.0  # what a counter is lifted to when its tenant begins to wait
        self._prune_at = 2 * self.max_idle_tenants + 64

    @property
    def counters(self) -> dict[str, float]:
        """Tenant -> counter, of those that are remembered."""
        with self._lock:
            return {tenant: account.counter for tenant, account in self._accounts.items()}

    # --- policy ----------------------------------------------------------------------------------------------------

    @hookimpl
    def minivllm_order_waiting(self, waiting: Sequence[RequestView], state: EngineState) -> list[str]:
        queues: dict[str, list[RequestView]] = {}
        for request in sorted(waiting, key=lambda request: request.arrival, reverse=True):
            queues.setdefault(request.tenant, []).append(request)
        order: list[str] = []
        with self._lock:
            heap = [(self._counter(tenant), queue[-1].arrival, tenant) for tenant, queue in queues.items()]
            heapq.heapify(heap)
            while heap and len(order) < free_places(state):
                counter, _, tenant = heap[0]
                queue = queues[tenant]
                request = queue.pop()
                order.append(request.request_id)
                cost = 0.0 if request.num_preemptions else self._cost(request)
                live = self._live.get(request.request_id)
                if live is not None:
                    live.cost = cost  # the cache may hold more of it, or less, than when it was queued
                if queue:  # as if it were charged on the spot, or one tenant would have all the places of this step
                    heapq.heapreplace(heap, (counter + cost, queue[-1].arrival, tenant))
                else:
                    heapq.heappop(heap)
        return order

    # --- observer --------------------------------------------------------------------------------------------------

    @hookimpl
    def minivllm_request_queued(self, request: RequestView) -> None:
        tenant = request.tenant
        with self._lock:
            account = self._accounts.get(tenant)
            if account is None:
                account = self._accounts[tenant] = _Account(0.0)
            if not account.num_waiting:
                self._raise_floor()
                account.counter = max(account.counter, self._floor)
            account.num_waiting += 1
            account.num_live += 1
            self._num_waiting += 1
            self._live[request.request_id] = _Live(tenant, self._cost(request))
            if len(self._accounts) >= self._prune_at:
                self._prune()

    @hookimpl
    def minivllm_step_started(self, plan: StepPlan) -> None:
        with self._lock:
            self._note_waiting(plan.preempted, True)
            for request_id in plan.admitted:
                live = self._live.get(request_id)
                if live is not None:
                    self._accounts[live.tenant].counter += live.cost
            self._note_waiting((*plan.admitted, *plan.resumed), False)

    @hookimpl
    def minivllm_step_finished(self, report: StepReport) -> None:
        with self._lock:
            for request_id in report.request_ids:
                live = self._live.get(request_id)
                if live is not None:
                    self._accounts[live.tenant].counter += self.output_weight / self.shares.get(live.tenant, 1.0)

    @hookimpl
    def minivllm_request_finished(self, request: RequestView, outcome: RequestOutcome) -> None:
        if outcome.reason == "rejected":  # it was never queued; its id may be that of one which was
            return
        with self._lock:
            live = self._live.pop(request.request_id, None)
            if live is None:
                return
            account = self._accounts[live.tenant]
            account.num_live -= 1
            if live.is_waiting:
                self._leave_queue(account)

    @hookimpl
    def minivllm_engine_stopped(self) -> None:
        """What lived in that engine never ends any more; the counters stay for the next one."""
        with self._lock:
            self._live.clear()
            self._num_waiting = 0
            for account in self._accounts.values():
                account.num_waiting = account.num_live = 0

    # --- with the lock held ----------------------------------------------------------------------------------------

    def _counter(self, tenant: str) -> float:
        account = self._accounts.get(tenant)
        return self._floor if account is None else account.counter

    def _cost(self, request: RequestView) -> float:
        uncached = request.num_prompt_tokens - min(request.num_cached_tokens, request.num_prompt_tokens)
        return self.input_weight * uncached / self.shares.get(request.tenant, 1.0)

    def _note_waiting(self, request_ids: Iterable[str], is_waiting: bool) -> None:
        for request_id in request_ids:
            live = self._live.get(request_id)
            if live is None or live.is_waiting == is_waiting:
                continue
            live.is_waiting = is_waiting
            account = self._accounts[live.tenant]
            if is_waiting:
                account.num_waiting += 1
                self._num_waiting += 1
            else:
                self._leave_queue(account)

    def _leave_queue(self, account: _Account) -> None:
        account.num_waiting -= 1
        self._num_waiting -= 1
        if not self._num_waiting:
            self._floor = max(self._floor, account.counter)  # nobody is left to be lifted to but the last who waited

    def _raise_floor(self) -> None:
        counters = [account.counter for account in self._accounts.values() if account.num_waiting]
        if counters:
            self._floor = max(self._floor, min(counters))

    def _prune(self) -> None:
        """Forget idle tenants: all that would be lifted anyway, then the smallest counters, until few enough are left."""
        self._raise_floor()
        idle = [(account.counter, tenant) for tenant, account in self._accounts.items() if not account.num_live]
        kept = heapq.nlargest(self.max_idle_tenants, (entry for entry in idle if entry[0] > self._floor))
        for tenant in {tenant for _, tenant in idle} - {tenant for _, tenant in kept}:
            del self._accounts[tenant]
        self._prune_at = 2 * max(len(self._accounts), self.max_idle_tenants) + 64


def _share(tenant: str, share: object) -> float:
    value = check_number(f"the share of {tenant!r}", share)
    if not value:
        raise ConfigError(f"the share of {tenant!r} must be greater than 0, got {share!r}; refuse its requests instead")
    return value
