"""The policy in a real engine without a model. The runner checks every slot of the cache, so fairness cannot cost correctness."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
from minivllm_fair_share import FairShare, Settings

from minivllm_plugin.testing import HashedTokens

Stage = Callable[..., Any]


def flood(stage: Any) -> None:
    """Tenant a sends six requests, then b sends two; one runs at a time."""
    for index in range(6):
        stage.send(f"a{index}", "a", [index + 1] * 8, 4)
    for index in range(2):
        stage.send(f"b{index}", "b", [index + 50] * 8, 4)


def test_a_flood_of_one_tenant_does_not_hold_up_another(stage: Stage) -> None:
    one = stage(policies=(FairShare(Settings()),), max_num_sequences=1)
    flood(one)
    one.run()
    assert one.order == ["a0", "b0", "a1", "b1", "a2", "a3", "a4", "a5"]


def test_weights_come_from_the_plugins_own_file(stage: Stage, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "shares.toml"
    path.write_text("[weights]\na = 100.0\n")
    monkeypatch.setenv("MINIVLLM_FAIR_SHARE", str(path))
    one = stage(policies=(FairShare(),), max_num_sequences=1)
    flood(one)
    one.run()
    assert one.order.index("b1") == 7  # a may have a hundred times as much


def test_installed_but_not_named_it_steers_nothing(stage: Stage) -> None:
    one = stage(FairShare(Settings()), max_num_sequences=1)
    flood(one)
    one.run()
    assert one.order == [*(f"a{index}" for index in range(6)), "b0", "b1"]


@pytest.mark.parametrize(("is_named", "victims"), [(True, {"a1"}), (False, {"b0"})])
def test_the_tenant_with_two_requests_makes_room_and_tokens_stay_the_same(
    stage: Stage, caplog: pytest.LogCaptureFixture, is_named: bool, victims: set[str]
) -> None:
    caplog.set_level(logging.INFO, "minivllm_fair_share")
    plugin = FairShare(Settings())
    one = stage(plugin, policies=(plugin,) if is_named else (), num_blocks=14, block_size=4)
    prompts = {"a0": [1] * 12, "a1": [2] * 12, "b0": [3] * 8}
    for name, prompt in prompts.items():
        one.send(name, name[0], prompt, 16)
    tokens = one.run()
    expected = HashedTokens(1000)
    assert tokens == {name: expected.continue_prompt(prompt, 16) for name, prompt in prompts.items()}
    assert {line.split()[0] for line in caplog.messages if " preempted: " in line} == victims
    (report,) = one.llm.plugins()
    assert report.is_policy is is_named
    assert report.errors == ()


@pytest.mark.parametrize("text", ["weights = 3", "[weights]\na = 0", "default_weight = 'x'", "colour = 1", "not toml"])
def test_a_bad_file_is_refused(text: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "shares.toml"
    path.write_text(text)
    monkeypatch.setenv("MINIVLLM_FAIR_SHARE", str(path))
    with pytest.raises(ValueError, match=r"weight|expected|TOML|Expected|key"):
        FairShare()
