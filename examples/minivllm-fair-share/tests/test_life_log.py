"""Every stage of a request is a line, and so is every change of a block."""

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from minivllm_fair_share import FairShare, Settings

from minivllm_plugin.errors import RequestAbortedError

Stage = Callable[..., Any]


def stages(caplog: pytest.LogCaptureFixture) -> dict[str, list[str]]:
    """Request -> the words of its life, in order."""
    found: dict[str, list[str]] = {}
    for record in caplog.records:
        if record.name == "minivllm_fair_share" and record.levelno == logging.INFO:
            name, word = record.getMessage().split()[:2]
            found.setdefault(name, []).append(word.rstrip(":"))
    return found


def test_a_request_is_followed_from_the_queue_to_its_end(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "minivllm_fair_share")
    one = stage(FairShare(Settings()))
    one.send("r", "acme", [5, 6, 7], 3)
    one.run()
    assert stages(caplog) == {"r": ["queued", "scheduled", "finished"]}
    assert "r queued: tenant 'acme', 3 prompt tokens" in caplog.text
    assert "r finished: length, 3 tokens, 0 preemptions" in caplog.text


def test_preempted_and_resumed(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "minivllm_fair_share")
    one = stage(FairShare(Settings()), num_blocks=10, block_size=4)
    for name in ("r", "s"):
        one.send(name, "acme", [ord(name)] * 12, 20)
    one.run()
    words = Counter(word for life in stages(caplog).values() for word in life)
    assert words["preempted"] == words["resumed"] > 0
    assert all(life[:2] == ["queued", "scheduled"] and life[-1] == "finished" for life in stages(caplog).values())


def test_aborted(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "minivllm_fair_share")
    one = stage(FairShare(Settings()), max_num_sequences=1)
    one.send("r", "acme", [5, 6, 7], 3)
    one.send("late", "acme", [8, 9], 3)
    one.llm.abort("late")
    late = one.streams.pop("late")
    one.run()
    with pytest.raises(RequestAbortedError):
        late.result()
    assert stages(caplog)["late"][-1] == "aborted"


def test_blocks_are_logged_for_those_who_want_to_know(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "minivllm_fair_share")
    one = stage(FairShare(Settings()), block_size=4)
    one.send("r", "acme", [5] * 8, 2)
    one.run()
    for event in ("BlocksAllocated: request_id='r'", "BlockStored: block_hashes=", "BlocksFreed: request_id='r'"):
        assert event in caplog.text
    assert "token_ids" not in caplog.text  # a log is no place for what people wrote
