"""How engines of several processes end: a rank is lost, rank 0 is killed, nobody closes; and no process is left behind."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rank_processes import has_ended, is_gone, rank_processes
from tiny_checkpoints import tiny_checkpoint
from waiting import wait_until

from minivllm_plugin import LLM, SamplingParams, registry
from minivllm_plugin.errors import EngineDeadError, RankFailedError

ROOT = Path(__file__).parents[1]
OPTIONS: dict[str, Any] = {"dtype": "float32", "num_blocks": 400, "tensor_parallel_size": 2}
SHORT = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_checkpoint(tmp_path_factory.mktemp("model"), "Llama")[0])


@pytest.fixture(autouse=True)
def _own_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of this test and the programs that it starts: others may run engines at the same time."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)


@pytest.fixture
def name(model: str) -> Iterator[str]:
    yield model
    registry.close(model)


def rendezvous_directories() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob("minivllm-ranks-*"))


def rank_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("minivllm-rank")]


def test_a_killed_rank_fails_all_and_the_next_call_starts_afresh(name: str) -> None:
    first = registry.get_llm(name, **OPTIONS)
    expected = first.generate([[5, 9, 11]], SHORT, use_tqdm=False)[0].outputs[0].token_ids
    [pid] = rank_processes()
    os.kill(pid, signal.SIGKILL)  # between two requests: nobody is in a step who could notice
    wait_until(lambda: not first.is_healthy)
    wait_until(lambda: is_gone(pid))
    with pytest.raises(EngineDeadError, match="rank 1 of 2"):
        first.stream([5, 9, 11], SHORT)

    second = registry.get_llm(name, **OPTIONS)
    assert second is not first
    assert second.generate([[5, 9, 11]], SHORT, use_tqdm=False)[0].outputs[0].token_ids == expected
    [pid] = rank_processes()
    streams = [second.stream([5, 9, 11 + number], LONG) for number in range(3)]
    for stream in streams:
        next(stream)  # in the middle of steps now
    os.kill(pid, signal.SIGKILL)
    for stream in streams:
        with pytest.raises(EngineDeadError, match="died") as caught:
            list(stream)
        cause = caught.value.__cause__
        assert isinstance(cause, RankFailedError)
        assert "rank 1 of 2" in str(cause)
        assert "was ended by signal 9" in str(cause)
    assert not second.is_healthy
    second.close()
    assert is_gone(pid)
    assert rank_threads() == []
    assert rendezvous_directories() == set()


def test_the_last_words_of_a_rank_are_told(model: str) -> None:
    """A rank that native code ends says where it was."""
    with LLM(model, **OPTIONS) as llm:
        [pid] = rank_processes()
        os.kill(pid, signal.SIGABRT)
        wait_until(lambda: not llm.is_healthy)
        with pytest.raises(EngineDeadError) as caught:
            llm.generate([[5]], SHORT, use_tqdm=False)
    message = str(caught.value.__cause__)
    assert "was ended by signal 6" in message
    assert "Fatal Python error: Aborted" in message


def start_program(model: str, *arguments: str) -> tuple["subprocess.Popen[str]", set[int]]:
    """The program, once it has generated, and its ranks."""
    program = subprocess.Popen(
        [sys.executable, str(ROOT / "support" / "hold_ranks.py"), model, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert program.stdout is not None
    assert len(program.stdout.readline().split()) == 3
    return program, rank_processes(program.pid)


def stop(program: "subprocess.Popen[str]") -> None:
    for pipe in (program.stdin, program.stdout):
        if pipe is not None:
            pipe.close()
    program.wait(60)


def test_ranks_end_with_a_killed_rank_0(model: str) -> None:
    program, ranks = start_program(model)
    assert len(ranks) == 1
    assert len(rendezvous_directories()) == 1
    program.kill()
    stop(program)
    wait_until(lambda: all(has_ended(pid) for pid in ranks))
    wait_until(lambda: rendezvous_directories() == set())


def test_ranks_end_with_a_program_that_closes_nothing(model: str) -> None:
    program, ranks = start_program(model, "leave")
    stop(program)
    assert program.returncode == 0
    assert all(has_ended(pid) for pid in ranks)
    assert rendezvous_directories() == set()
