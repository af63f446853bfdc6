"""Choices of configurations: measured once, remembered across processes, never measured during capture, never a failure."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from triton.runtime.errors import OutOfResources

from minivllm_kernels.triton import autotune
from minivllm_kernels.triton.autotune import FILE_NAME, Choices, choose, milliseconds


class Timer:
    """Milliseconds by candidate, and which were asked for."""

    def __init__(self, *times: float) -> None:
        self.times, self.asked = times, list[int]()

    def __call__(self, index: int) -> float:
        self.asked.append(index)
        return self.times[index]


CANDIDATES = ["64x64, 4 warps", "128x64, 8 warps", "128x128, 8 warps"]


def test_the_fastest_is_measured_once_and_remembered_on_disk(tmp_path: Path) -> None:
    path, timer = tmp_path / "deep" / FILE_NAME, Timer(3.0, 1.0, float("inf"))
    choices = Choices(path)
    assert [choices.pick("key", CANDIDATES, timer) for _ in range(3)] == [1, 1, 1]
    assert timer.asked == [0, 1, 2]
    assert Choices(path).pick("key", CANDIDATES, Timer()) == 1
    assert json.loads(path.read_text()) == {"key": CANDIDATES[1]}
    assert list(path.parent.iterdir()) == [path]


def test_two_processes_keep_each_others_choices(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    one, other = Choices(path), Choices(path)
    for choices in (one, other):
        choices.pick("shared", CANDIDATES[:1], Timer())
    one.pick("a", CANDIDATES, Timer(1, 2, 3))
    other.pick("b", CANDIDATES, Timer(3, 2, 1))
    assert json.loads(path.read_text()) == {"a": CANDIDATES[0], "b": CANDIDATES[2]}


def test_a_candidate_that_is_gone_is_measured_anew(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    path.write_text(json.dumps({"key": "256x256, 1 warp"}))
    assert Choices(path).pick("key", CANDIDATES, Timer(2, 3, 1)) == 2


def test_during_capture_the_first_is_taken_and_not_remembered(tmp_path: Path) -> None:
    choices, timer = Choices(tmp_path / FILE_NAME), Timer(2, 1, 3)
    assert choices.pick("key", CANDIDATES, timer, may_measure=False) == 0
    assert timer.asked == []
    assert choices.pick("key", CANDIDATES, timer) == 1
    assert choices.pick("key", CANDIDATES, timer, may_measure=False) == 1


def test_a_single_candidate_is_not_measured(tmp_path: Path) -> None:
    assert Choices(tmp_path / FILE_NAME).pick("key", CANDIDATES[:1], Timer()) == 0
    assert not (tmp_path / FILE_NAME).exists()


@pytest.mark.parametrize("content", ["", "{", "[1, 2]", '{"key": 3}', '"key"'])
def test_a_broken_file_counts_as_empty_and_is_replaced(content: str, tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    path.write_text(content)
    assert Choices(path).pick("key", CANDIDATES, Timer(2, 1, 3)) == 1
    assert json.loads(path.read_text()) == {"key": CANDIDATES[1]}


def test_where_nothing_can_be_written_the_choice_still_holds(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    choices, timer = Choices(tmp_path / "file" / FILE_NAME), Timer(2, 1, 3)
    assert [choices.pick("key", CANDIDATES, timer) for _ in range(2)] == [1, 1]
    assert timer.asked == [0, 1, 2]


def test_an_interpreted_kernel_takes_the_first() -> None:
    assert choose("op", "shape", CANDIDATES, Timer(), torch.device("cpu")) == 0


class Clock:
    """CUDA events of a device on which each launch takes as long as ``durations`` say."""

    def __init__(self, durations: list[float]) -> None:
        self.now, self.durations = 0.0, iter(durations)

    def launch(self) -> None:
        self.now += next(self.durations)

    def event(self, *, enable_timing: bool) -> "Mark":
        assert enable_timing
        return Mark(self)


class Mark:
    def __init__(self, clock: Clock) -> None:
        self.clock, self.at = clock, float("nan")

    def record(self) -> None:
        self.at = self.clock.now

    def synchronize(self) -> None:
        assert self.at == self.clock.now

    def elapsed_time(self, later: "Mark") -> float:
        return later.at - self.at


def test_a_time_is_the_median_after_two_launches_that_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock([500.0, 30.0, 4.0, 90.0, 5.0])
    monkeypatch.setattr(torch.cuda, "Event", clock.event)
    assert milliseconds(clock.launch, repeats=3) == 5.0


def test_what_does_not_fit_the_card_is_infinitely_slow() -> None:
    def launch() -> None:
        raise OutOfResources(300_000, 232_448, "shared memory")

    assert milliseconds(launch) == float("inf")


def test_the_key_names_card_triton_op_and_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A card that is only a name and a capture flag: what chooses must ask torch for nothing else."""
    capturing = [True]
    monkeypatch.setenv("MINIVLLM_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"card {device.index}")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])

    def pick(device: int, measure: Callable[[int], float]) -> int:
        return choose("attention", "bf16, head 128", CANDIDATES, measure, torch.device("cuda", device))

    assert pick(0, Timer()) == 0
    capturing[0] = False
    assert pick(0, Timer(2, 1, 3)) == 1
    assert pick(1, Timer(3, 2, 1)) == 2
    written = json.loads((tmp_path / "kernels" / FILE_NAME).read_text())
    version = autotune.triton.__version__
    assert written == {
        f"card 0 | triton {version} | attention | bf16, head 128": CANDIDATES[1],
        f"card 1 | triton {version} | attention | bf16, head 128": CANDIDATES[2],
    }
