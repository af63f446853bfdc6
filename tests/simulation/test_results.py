"""What is made of the records: percentiles, shares, JSON and the page."""

import json
import math
import re
from collections.abc import Callable
from html.parser import HTMLParser

import pytest

from minivllm_plugin.errors import ConfigError
from minivllm_plugin.simulation import CostModel, Trace, TraceRequest, compare, generate_trace, simulate
from minivllm_plugin.simulation.drawing import Line, bars, lines
from minivllm_plugin.simulation.metrics import Distribution, jain_index
from minivllm_plugin.simulation.page import render_page
from minivllm_plugin.simulation.records import MAX_POINTS, Timeline

Requests = Callable[..., Trace]


def test_percentiles_are_linear_between_ranks() -> None:
    found = Distribution.of([4.0, None, 1.0, 2.0, 3.0])
    assert (found.count, found.mean, found.p50, found.maximum) == (4, 2.5, 2.5, 4.0)
    assert found.p90 == pytest.approx(3.7)
    assert found.p99 == pytest.approx(3.97)
    assert math.isnan(Distribution.of([None]).p50)


@pytest.mark.parametrize(("values", "index"), [([3, 3, 3], 1.0), ([1, 0, 0, 0], 0.25), ([2, 1], 0.9), ([], 1.0), ([0, 0], 1.0)])
def test_jain_index(values: list[float], index: float) -> None:
    assert jain_index(values) == pytest.approx(index)


def test_shares_are_what_was_served_by_the_last_arrival(cost: CostModel) -> None:
    # One at a time: a0 (4 + 2 tokens) ends at 4.25, a1 begins. The last arrival comes at 5.0, within a1's prefill (it ends at
    # 7.25), whose step has begun and counts; b's request was not even scheduled.
    trace = Trace((TraceRequest(0.0, 4, 2, tenant="a"), TraceRequest(0.0, 4, 2, tenant="a"), TraceRequest(5.0, 4, 2, tenant="b")))
    result = simulate(trace, cost_model=cost, max_num_sequences=1)
    assert result.served_at_last_arrival == {"a": 6 + 5}
    shares = {tenant.tenant: tenant.share for tenant in result.tenants}
    assert shares == {"a": 11 / 12, "b": 0.0}
    assert result.share_gap == 11 / 12
    assert result.fairness == pytest.approx(0.5)
    assert [tenant.demand_tokens for tenant in result.tenants] == [12, 6]


def test_usage_is_weighted_by_time(requests: Requests, cost: CostModel) -> None:
    # Blocks of 4, pool of 4: one block in the prefill (3 s), two in each of two decodes (1.25 s).
    result = simulate(requests((0.0, 4, 3)), cost_model=cost, num_blocks=4, block_size=4)
    assert result.mean_usage == pytest.approx((1 * 3 + 2 * 2.5) / 5.5 / 4)
    assert result.replicas[0].peak_usage == 0.5
    assert [tuple(point) for point in result.replicas[0].timeline] == [(0.0, 1, 1, 0), (3.0, 2, 1, 0), (4.25, 2, 1, 0)]


def test_the_timeline_stays_small_and_even() -> None:
    timeline = Timeline()
    for step in range(10 * MAX_POINTS):
        timeline.add(float(step), 1.0, step % 7, 1, 0, 1)
    assert MAX_POINTS // 2 <= len(timeline.points) <= MAX_POINTS
    gaps = {later.time - earlier.time for earlier, later in zip(timeline.points, timeline.points[1:], strict=False)}
    assert gaps == {16.0}
    assert timeline.num_steps == timeline.busy_seconds == 10 * MAX_POINTS


def test_a_dictionary_that_json_can_hold(requests: Requests, cost: CostModel) -> None:
    result = simulate(requests((0.0, 4, 1), (0.0, 999, 1)), cost_model=cost, num_blocks=4, block_size=4, record_tokens=True)
    made = json.loads(json.dumps(result.to_dict(requests=True), allow_nan=False))
    assert made["tpot"]["p50"] is None  # nobody had a second token
    assert made["ttft"] == {"count": 1, "mean": 3.0, "p50": 3.0, "p90": 3.0, "p99": 3.0, "maximum": 3.0}
    assert [one["token_times"] for one in made["requests"]] == [[3.0], []]
    assert (made["num_requests"], made["num_finished"], made["num_rejected"]) == (2, 1, 1)
    assert made["settings"]["cost_model"]["per_step"] == 1.0
    assert made["replicas"][0]["timeline"] == [[0.0, 1, 1, 0]]
    assert "requests" not in result.to_dict()
    assert "timeline" not in result.to_dict(timeline=False)["replicas"][0]


def test_a_result_is_frozen(requests: Requests) -> None:
    result = simulate(requests((0.0, 4, 1)))
    with pytest.raises(AttributeError):
        result.makespan = 1.0  # type: ignore[misc]


def test_nothing_finished_is_no_division_by_zero(requests: Requests) -> None:
    result = simulate(requests((1.0, 999, 1)), num_blocks=1, block_size=4)
    assert (result.num_finished, result.makespan, result.num_steps) == (0, 0.0, 0)
    assert math.isnan(result.output_throughput)
    json.dumps(result.to_dict(), allow_nan=False)
    assert "no data" in render_page([result])


class Tags(HTMLParser):
    """Collects tags and whatever could be fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.open: list[str] = []
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        if tag not in ("meta",):
            self.open.append(tag)
        self.fetched += [f"{tag} {name}" for name, _ in attrs if name in ("src", "href", "srcset", "data", "action")]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_and_fetches_nothing(cost: CostModel) -> None:
    trace = generate_trace(60, rate=0.5, tenants=2)
    results = compare(trace, {"plain": {}, "<small & slow>": {"num_blocks": 60, "max_num_sequences": 2}}, cost)
    page = render_page(results)
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    assert tags.fetched == []
    assert tags.names.count("svg") == 10
    assert tags.names.count("table") == 2
    assert not re.search(r"https?://|@import|url\(|<script", page)
    assert "&lt;small &amp; slow&gt;" in page
    assert "<small" not in page
    assert "prefers-color-scheme: dark" in page
    for match in re.findall(r'points="([^"]*)"', page):
        for pair in match.split():
            x, y = map(float, pair.split(","))
            assert 0 <= x <= 520
            assert 0 <= y <= 260


@pytest.mark.parametrize("count", [0, 9])
def test_a_page_holds_what_can_be_told_apart(requests: Requests, count: int) -> None:
    result = simulate(requests((0.0, 4, 1)))
    with pytest.raises(ConfigError, match="1 to 8"):
        render_page([result] * count)


def test_charts_of_odd_values() -> None:
    flat = Line(0, "flat", [(1.0, 0.0), (1.0, 0.0)])
    assert "<polyline" in lines("flat", [flat], x_label="x", x_format=str, y_format=str)
    assert "<polyline" in lines(
        "one decade", [Line(0, "a", [(0.0, 1.0), (2.0, 3.0)])], x_label="x", x_format=str, y_format=str, log_x=True
    )
    assert "nan" not in bars("unknown", [("a", math.nan), ("b", 0.0)], lambda value: "-" if math.isnan(value) else str(value))
