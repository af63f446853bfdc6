"""The page over the real SmolLM2-135M: the demo as a person meets it. Every turn goes through LiteLLM."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

from minivllm_ui.app import PageServer, PageSettings
from minivllm_ui.frames import decode

pytestmark = pytest.mark.model

Visit = Callable[..., Any]
LONG = "Write a very long story about the sea, with many chapters."


@pytest.fixture(scope="module")
def server(smollm2_gguf: Path) -> Iterator[PageServer]:
    server = PageServer(PageSettings(model="smollm2-135m", port=0, options={"num_blocks": 256, "num_threads": 1}))
    server.start()
    yield server
    server.close()


def _header(server: PageServer) -> dict[str, Any]:
    data = server.recorder.frame()
    assert data is not None
    return dict(decode(data).header)


def _is_idle(server: PageServer) -> bool:
    header = _header(server)
    return header["held"] == header["shared"] == header["running"] == header["waiting"] == 0


def _cached_percent(tab: Any) -> int:
    found = re.search(r"(\d+) % of prompt cached", tab.stats())
    assert found is not None, tab.stats()
    return int(found[1])


def test_turns_hit_the_cache_and_visitors_share(server: PageServer, visit: Visit, pictures: Path) -> None:
    one, two = visit(server.url), visit(server.url)
    for tab in (one, two):
        tab.page.get_by_role("button", name="System prompt and sampling").click()
        tab.page.get_by_label("number input for Most tokens of an answer").fill("40")
        tab.page.get_by_label("number input for Most tokens of an answer").press("Tab")
    one.ask("Name a colour.")
    one.ask("Name another colour.")
    assert _cached_percent(one) > 50
    two.ask("Name a colour.")
    assert _cached_percent(two) > 50  # the first visitor's blocks, still there
    two.page.screenshot(path=pictures / "real-model.png")
    wait_until(lambda: _is_idle(server))


def test_sharing_stop_and_leaving(server: PageServer, visit: Visit) -> None:
    one, two = visit(server.url), visit(server.url)
    for tab in (one, two):
        tab.page.get_by_role("button", name="System prompt and sampling").click()
        temperature = tab.page.get_by_label("number input for Temperature (0 is greedy)")
        temperature.fill("0")  # then this question has a long answer
        temperature.press("Tab")
        tab.send(LONG)
        wait_until(lambda: any(sequence["generated"] for sequence in _header(server)["sequences"]))
    wait_until(lambda: _header(server)["running"] == 2 and _header(server)["shared"] > 0)
    one.page.get_by_role("button", name="Stop", exact=True).click()
    one.answered()
    two.page.close()
    wait_until(lambda: _is_idle(server))
    assert "stopped" in one.stats()


def test_a_small_pool_pushes_out_and_everybody_finishes(server: PageServer, visit: Visit, pictures: Path) -> None:
    tab = visit(server.url)
    tab.page.get_by_role("button", name="Small pool (48)").click()
    tab.page.get_by_role("button", name="Normal pool (256)").wait_for()
    finished = _header(server)["finished"]
    for _ in range(4):
        tab.page.get_by_role("button", name="More guests").click()
    wait_until(lambda: _header(server)["preemptions"] > 0)
    tab.page.screenshot(path=pictures / "small-pool.png")
    wait_until(lambda: _header(server)["finished"] > finished + 4)
    for _ in range(6):
        tab.page.get_by_role("button", name="One guest fewer").click()
    wait_until(lambda: _header(server)["guests"] == 0)
    wait_until(lambda: _is_idle(server))
