"""``fair``: equal service for tenants that keep asking, no credit for absence, bounded memory."""

import pytest
from policy_bench import Bench, mixed, state, view

from minivllm_plugin.errors import ConfigError
from minivllm_plugin.events import RequestOutcome, StepPlan, StepReport
from minivllm_plugin.plugins.first_party.fair import FairShare
from minivllm_plugin.simulation import generate_trace, simulate

OUTCOME = RequestOutcome("length", None, 10, 1, 0, 0, 0.0, None, None, None)


def plan(admitted: tuple[str, ...] = (), resumed: tuple[str, ...] = (), preempted: tuple[str, ...] = ()) -> StepPlan:
    return StepPlan((), (), (), admitted, resumed, preempted, 64, state())


def report(*request_ids: str) -> StepReport:
    return StepReport(request_ids, (1,) * len(request_ids), (), 0, 0.0, 0.0, 0.0, 0.0, state())


def queue(policy: FairShare, request_id: str, tenant: str, arrival: int = 0, **fields: object) -> None:
    policy.minivllm_request_queued(view(request_id, arrival, tenant=tenant, **fields))


def test_prompt_tokens_are_charged_at_admission_and_tokens_as_they_come() -> None:
    policy = FairShare(input_weight=1.0, output_weight=2.0)
    queue(policy, "a", "A", num_prompt_tokens=30, num_cached_tokens=16)
    assert policy.counters == {"A": 0.0}
    policy.minivllm_step_started(plan(admitted=("a",)))
    assert policy.counters == {"A": 14.0}  # cached ones are free
    policy.minivllm_step_finished(report("a"))
    policy.minivllm_step_finished(report("a", "unknown"))
    assert policy.counters == {"A": 18.0}


def test_what_a_preemption_costs_is_not_charged() -> None:
    policy = FairShare()
    queue(policy, "a", "A")
    policy.minivllm_step_started(plan(admitted=("a",)))
    policy.minivllm_step_started(plan(preempted=("a",)))
    policy.minivllm_step_started(plan(resumed=("a",)))
    assert policy.counters == {"A": 10.0}


def test_what_the_cache_holds_is_looked_up_again_when_it_is_ordered() -> None:
    policy = FairShare()
    queue(policy, "a", "A", num_prompt_tokens=30)
    waiting = [view("a", tenant="A", num_prompt_tokens=30, num_cached_tokens=24)]
    policy.minivllm_order_waiting(waiting, state())
    policy.minivllm_step_started(plan(admitted=("a",)))
    assert policy.counters == {"A": 6.0}


def test_a_preempted_one_costs_its_tenant_no_place() -> None:
    """Both stand at 10. A's own comes back free of charge, so its next one is due before B's second."""
    policy = FairShare(output_weight=0.0)
    for request_id, tenant in (("a0", "A"), ("b0", "B")):
        queue(policy, request_id, tenant)
    policy.minivllm_step_started(plan(admitted=("a0", "b0")))
    waiting = [
        view("a0", 0, tenant="A", num_preemptions=1),
        view("b1", 2, tenant="B"),
        view("a1", 1, tenant="A"),
        view("b2", 3, tenant="B"),
    ]
    assert policy.minivllm_order_waiting(waiting, state()) == ["a0", "a1", "b1", "b2"]


def test_a_tenant_whose_preempted_request_waits_is_not_lifted() -> None:
    """Its request never left for good, so the tenant has not been away; lifting would charge it for the preemption."""
    policy = FairShare()
    queue(policy, "a0", "A")
    queue(policy, "b0", "B", 1, num_prompt_tokens=500)
    policy.minivllm_step_started(plan(admitted=("a0", "b0")))
    queue(policy, "b1", "B", 2)
    policy.minivllm_step_started(plan(preempted=("a0",)))
    queue(policy, "a1", "A", 3)
    assert policy.counters["A"] == 10.0


def test_the_smallest_counter_goes_next_and_a_step_is_shared() -> None:
    """Prompts of 10: A has 25 already, so B gets three before A's first; then they take turns."""
    policy = FairShare(output_weight=0.0)
    queue(policy, "a0", "A", 0, num_prompt_tokens=25)
    queue(policy, "b0", "B", 1)  # waits from the start, so it is never lifted
    policy.minivllm_step_started(plan(admitted=("a0",)))
    names = [f"a{number}" for number in range(1, 5)] + [f"b{number}" for number in range(5)]
    waiting = [view(name, place, tenant=name[0].upper()) for place, name in enumerate(names)]
    assert policy.minivllm_order_waiting(waiting, state()) == ["b0", "b1", "b2", "a1", "b3", "a2", "b4", "a3", "a4"]
    assert policy.minivllm_order_waiting(waiting, state(num_running=62)) == ["b0", "b1"]  # two places are free


def test_within_a_tenant_who_came_first_goes_first() -> None:
    waiting = [view("new", 2, tenant="A"), view("preempted", 0, tenant="A", num_preemptions=1)]
    assert FairShare().minivllm_order_waiting(waiting, state()) == ["preempted", "new"]


def test_one_that_comes_back_cannot_have_saved_up() -> None:
    policy = FairShare()
    queue(policy, "idle", "A")
    policy.minivllm_request_finished(view("idle", tenant="A"), OUTCOME)  # aborted before it ran: nothing is charged
    queue(policy, "b0", "B", num_prompt_tokens=500)
    policy.minivllm_step_started(plan(admitted=("b0",)))
    queue(policy, "b1", "B", 1)
    queue(policy, "back", "A", 2)
    assert policy.counters == {"A": 500.0, "B": 500.0}  # lifted to the smallest among those who wait


def test_after_an_empty_queue_newcomers_start_where_the_last_left() -> None:
    policy = FairShare()
    queue(policy, "b0", "B", num_prompt_tokens=500)
    policy.minivllm_step_started(plan(admitted=("b0",)))
    queue(policy, "new", "A", 1)
    assert policy.counters == {"A": 500.0, "B": 500.0}


def test_a_share_of_two_is_charged_half() -> None:
    policy = FairShare(shares={"gold": 2.0})
    for tenant in ("gold", "plain"):
        queue(policy, tenant, tenant)
    policy.minivllm_step_started(plan(admitted=("gold", "plain")))
    policy.minivllm_step_finished(report("gold", "plain"))
    assert policy.counters == {"gold": 6.0, "plain": 12.0}


def test_idle_tenants_are_forgotten() -> None:
    policy = FairShare(max_idle_tenants=8)
    for number in range(1000):
        request_id, tenant = f"r{number}", f"T{number}"
        queue(policy, request_id, tenant, number)
        policy.minivllm_step_started(plan(admitted=(request_id,)))
        policy.minivllm_request_finished(view(request_id, number, tenant=tenant), OUTCOME)
        assert len(policy.counters) <= 2 * 8 + 64
    assert policy.counters["T999"] == 10_000.0  # each was lifted to where the one before it stood


def test_a_tenant_in_debt_is_remembered() -> None:
    """Its counter is above all others, so forgetting it would be a present."""
    policy = FairShare(max_idle_tenants=8)
    queue(policy, "waits", "Z")
    queue(policy, "big", "A", 1, num_prompt_tokens=10_000)
    policy.minivllm_step_started(plan(admitted=("big",)))
    policy.minivllm_request_finished(view("big", 1, tenant="A"), OUTCOME)
    for number in range(300):
        queue(policy, f"r{number}", f"T{number}", number + 2)
        policy.minivllm_request_finished(view(f"r{number}", number + 2, tenant=f"T{number}"), OUTCOME)
    assert policy.counters["A"] == 10_000.0
    assert len(policy.counters) <= 2 * 8 + 64


def test_of_many_in_debt_the_largest_are_remembered() -> None:
    policy = FairShare(max_idle_tenants=4)
    queue(policy, "waits", "Z")
    for number in range(100):
        queue(policy, f"r{number}", f"T{number:03}", number + 1, num_prompt_tokens=1000 + number)
        policy.minivllm_step_started(plan(admitted=(f"r{number}",)))
        policy.minivllm_request_finished(view(f"r{number}", number + 1, tenant=f"T{number:03}"), OUTCOME)
    pruned_at = 2 * 4 + 64  # accounts, Z's and the newest one's among them
    kept = [f"T{number:03}" for number in range(pruned_at - 2 - 4, 100)]
    assert sorted(policy.counters) == [*kept, "Z"]


def test_a_rejected_request_with_the_id_of_a_live_one_changes_nothing() -> None:
    policy = FairShare()
    queue(policy, "a", "A")
    policy.minivllm_request_finished(view("a", tenant="A"), OUTCOME._replace(reason="rejected"))
    policy.minivllm_step_started(plan(admitted=("a",)))
    assert policy.counters == {"A": 10.0}


def test_a_new_engine_starts_without_the_requests_of_the_old_one() -> None:
    policy = FairShare()
    queue(policy, "a", "A")
    policy.minivllm_engine_stopped()
    policy.minivllm_step_finished(report("a"))
    queue(policy, "b", "B", num_prompt_tokens=40)
    policy.minivllm_step_started(plan(admitted=("b",)))
    assert policy.counters == {"A": 0.0, "B": 40.0}


@pytest.mark.parametrize("num_waiting", [30, 300])
def test_ten_requests_against_one_are_served_alike(num_waiting: int) -> None:
    """Both tenants are there from the start; B has a tenth of the requests and stands behind all of A's."""
    bench = Bench(["fair"], mixed(256, max_num_sequences=4, enable_prefix_caching=False))
    for number in range(num_waiting):
        bench.add([number], 4, tenant="A")
    for number in range(num_waiting // 10):
        bench.add([number, 1], 3, tenant="B")
    while any(seq.metadata["tenant"] == "B" for seq in bench.scheduler.waiting):
        bench.step()
        service = {
            tenant: sum(
                seq.num_prompt_tokens + 2 * seq.num_completion_tokens
                for seq in bench.sequences
                if seq.metadata["tenant"] == tenant and seq.num_completion_tokens
            )
            for tenant in "AB"
        }
        # The paper's bound with non-preemptive admission: twice the most that the batch can owe, 4 x (2 + 2 x 4) here.
        assert abs(service["A"] - service["B"]) <= 2 * 40


def test_two_tenants_in_the_simulator_while_both_are_backlogged() -> None:
    trace = generate_trace(
        1100, rate=60, tenants={"A": 10, "B": 1}, prompt_tokens="uniform:100:500", output_tokens="uniform:50:150", seed=2
    )
    first_come = simulate(trace, max_num_sequences=8)
    fair = simulate(trace, ["fair"], max_num_sequences=8)
    assert fair.num_finished == first_come.num_finished == 1100
    served = {tenant.tenant: tenant.served_tokens for tenant in fair.tenants}
    assert served["B"] == pytest.approx(served["A"], rel=0.15)
    assert first_come.service_fairness < 0.7
    assert fair.service_fairness > 0.99
    assert fair.output_throughput > 0.98 * first_come.output_throughput  # nobody idles for the sake of fairness


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_weight": -1}, "input_weight must be a number, at least 0, got -1"),
        ({"output_weight": "two"}, "output_weight must be a number"),
        ({"input_weight": 0, "output_weight": 0}, "would charge nobody"),
        ({"shares": {"A": 0}}, "the share of 'A' must be greater than 0"),
        ({"shares": {"A": -2}}, "the share of 'A' must be a number, at least 0"),
        ({"max_idle_tenants": -1}, "max_idle_tenants must be an integer of at least 0, got -1"),
    ],
)
def test_arguments_are_checked(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FairShare(**arguments)  # type: ignore[arg-type]  # wrong on purpose
