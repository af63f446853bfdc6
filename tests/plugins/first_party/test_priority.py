"""``priority``: smaller numbers first, the largest makes room, and a starving request goes first in the end."""

from policy_bench import Bench, mixed, state, view

from minivllm_plugin.plugins.first_party.priority import PriorityPolicy

POLICY = PriorityPolicy()


def test_urgent_first_then_who_came_first() -> None:
    waiting = [
        view("late", 3, priority=1),
        view("early", 1, priority=1),
        view("urgent", 4, priority=0),
        view("never", 0, priority=9),
    ]
    assert POLICY.minivllm_order_waiting(waiting, state()) == ["urgent", "early", "late", "never"]


def test_the_victim_is_the_opposite_end() -> None:
    running = [view("urgent", 4, priority=0), view("early", 1, priority=1), view("late", 3, priority=1)]
    assert POLICY.minivllm_select_victims(running) == ["late", "early", "urgent"]


def test_an_urgent_request_overtakes_those_that_wait() -> None:
    bench = Bench(["priority"], mixed(32, max_num_sequences=1))
    for number in range(100):  # more than the 64 that a policy sees unless it asks for more
        bench.add([number], 1, request_id=f"{number}", priority=5)
    bench.add([500], 1, request_id="urgent", priority=0)
    assert bench.step() == ["urgent"]


def test_the_least_urgent_makes_room() -> None:
    finished = {}
    for policies in ([], ["priority"]):
        bench = Bench(policies, mixed(6, max_num_sequences=3, enable_prefix_caching=False))
        bench.add([1] * 7, 8, request_id="idle", priority=9)
        bench.step()
        bench.add([2] * 7, 8, request_id="urgent", priority=0)
        bench.run()
        finished[len(policies)] = {seq.request_id: seq.num_preemptions for seq in bench.sequences}
    assert finished == {0: {"idle": 0, "urgent": 1}, 1: {"idle": 1, "urgent": 0}}


def test_unlike_the_direct_code_nobody_starves() -> None:
    first_run = {}
    for policies, order in (([], "priority"), (["priority"], "fcfs")):
        bench = Bench(policies, mixed(32, max_num_sequences=1, policy=order))
        bench.add([1], 1, request_id="idle", priority=9)
        for number in range(100):
            bench.add([2], 1, request_id=f"{number}")
        for _ in range(101):
            bench.step()
        first_run[order] = next(seq.first_scheduled_step for seq in bench.sequences if seq.request_id == "idle")
    assert first_run == {"priority": 101, "fcfs": 65}
