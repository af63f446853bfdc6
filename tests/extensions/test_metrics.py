"""Metrics of plugins: collected in order, each on its own, an error said once."""

import logging
from typing import Any

import pytest

from minivllm_plugin.errors import ConfigError
from minivllm_plugin.extensions.metrics import Metric, MetricRegistry
from minivllm_plugin.views import EngineState

STATE = EngineState(7, 1.5, 3, 2, 64, 10, 4, 16, 8, 512, 5)


def test_values_come_from_the_state_in_the_order_of_registration() -> None:
    registry = MetricRegistry()
    registry.gauge("acme_used_blocks", "Blocks in use.", lambda state: state.num_used_blocks)
    registry.counter("acme:steps", "Steps.", lambda state: state.step)
    assert registry.collect(STATE) == [
        Metric("acme_used_blocks", "gauge", "Blocks in use.", 54.0),
        Metric("acme:steps", "counter", "Steps.", 7.0),
    ]


@pytest.mark.parametrize("fault", [lambda state: 1 / 0, lambda state: "many", lambda state: None], ids=["raises", "text", "None"])
def test_one_that_fails_is_left_out_and_logged_once(fault: Any, caplog: pytest.LogCaptureFixture) -> None:
    registry = MetricRegistry()
    with registry.owned_by("acme"):
        registry.gauge("bad", "Never there.", fault)
    registry.gauge("good", "Always there.", lambda state: 1)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert [metric.name for metric in registry.collect(STATE)] == ["good"]
    [record] = caplog.records
    assert "metric 'bad' of plugin 'acme'" in record.message


def test_one_that_recovers_is_there_again() -> None:
    values = iter([1.0, "broken", 3.0])
    registry = MetricRegistry()
    registry.gauge("flaky", "Sometimes.", lambda state: next(values))  # type: ignore[arg-type,return-value]
    assert [[metric.value for metric in registry.collect(STATE)] for _ in range(3)] == [[1.0], [], [3.0]]


@pytest.mark.parametrize("name", ["", "a b", "9lives", "käse", "a-b", "a\n"])
def test_names_are_those_that_prometheus_takes(name: str) -> None:
    with pytest.raises(ConfigError, match="metric"):
        MetricRegistry().gauge(name, "Nothing.", lambda state: 0)


def test_a_metric_needs_a_function_and_a_name_of_its_own() -> None:
    registry = MetricRegistry()
    with pytest.raises(ConfigError, match="must come with a function"):
        registry.gauge("a", "Nothing.", 3)  # type: ignore[arg-type]
    registry.gauge("a", "Nothing.", lambda state: 0)
    with pytest.raises(ConfigError, match="already there"):
        registry.counter("a", "Nothing.", lambda state: 0)
