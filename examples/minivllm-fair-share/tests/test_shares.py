"""The arithmetic, without any engine: views are plain records that a test can write down."""

import pytest
from minivllm_fair_share import Settings, Shares

from minivllm_plugin.plugins import RequestView


def view(request_id: str, tenant: str, arrival: int, tokens: int = 10, computed: int = 0) -> RequestView:
    return RequestView(request_id, arrival, 0.0, 0, tokens, 0, computed, 0, None, 0, 0, -1, {"tenant": tenant})


def test_tenants_take_turns_whoever_came_first() -> None:
    shares = Shares(Settings())
    waiting = [view(f"a{i}", "a", i) for i in range(3)] + [view(f"b{i}", "b", 3 + i) for i in range(2)]
    assert shares.order(waiting) == ["a0", "b0", "a1", "b1", "a2"]


def test_a_weight_of_two_gets_twice_as_much() -> None:
    shares = Shares(Settings({"a": 2.0}))
    waiting = [view(f"a{i}", "a", i) for i in range(4)] + [view(f"b{i}", "b", 4 + i) for i in range(2)]
    assert shares.order(waiting) == ["a0", "b0", "a1", "a2", "b1", "a3"]


def test_what_was_computed_counts() -> None:
    shares = Shares(Settings())
    for request_id, tenant in (("x", "a"), ("y", "b")):
        shares.join(request_id, tenant)
    shares.charge("x", 100)
    assert shares.order([view("a0", "a", 0), view("b0", "b", 1)]) == ["b0", "a0"]


def test_nobody_saves_up_while_away() -> None:
    shares = Shares(Settings())
    shares.join("x", "a")
    shares.charge("x", 1000)
    shares.join("y", "b")
    assert shares.clocks["b"] == shares.clocks["a"] == 1000


def test_a_debt_is_not_forgotten_by_a_pause() -> None:
    shares = Shares(Settings())
    shares.join("x", "a")
    shares.join("y", "b")
    shares.charge("x", 500)
    shares.leave("x")
    shares.join("z", "a")
    assert (shares.clocks["a"], shares.clocks["b"]) == (500, 0)


def test_idle_tenants_that_owe_nothing_are_forgotten() -> None:
    shares = Shares(Settings())
    for index in range(100):
        shares.join(str(index), f"tenant {index}")
        shares.charge(str(index), 1)
        shares.leave(str(index))
    assert len(shares.clocks) <= 1


def test_the_tenant_furthest_ahead_makes_room_with_what_loses_least() -> None:
    shares = Shares(Settings())
    for request_id, tenant in (("x", "a"), ("y", "b")):
        shares.join(request_id, tenant)
    shares.charge("x", 100)
    running = [view("b0", "b", 0, computed=1), view("a0", "a", 1, computed=50), view("a1", "a", 2, computed=5)]
    assert shares.victims(running) == ["a1", "a0", "b0"]


@pytest.mark.parametrize("weight", [0, -1, "3", True, float("nan"), float("inf")])
def test_impossible_weights_are_refused(weight: object) -> None:
    with pytest.raises(ValueError, match="weight of 'a'"):
        Settings({"a": weight})  # type: ignore[dict-item]
