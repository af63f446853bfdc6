"""CudaGraphApi over a stand-in for torch: what it leaves behind when a capture goes wrong, and that captures take turns."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from minivllm_plugin.runner.graphs import CudaGraphApi

USUAL, OWN = "the usual stream", "the stream of captures"


class Torch:
    """The current stream, and a capture that cannot be ended where something in it was not allowed: torch stays on its stream."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current = USUAL
        self.under_way = 0
        self.most = 0
        self.modes: list[str] = []
        for name, function in {
            "Stream": lambda device: OWN,
            "CUDAGraph": object,
            "current_stream": lambda device: self.current,
            "set_stream": self.set_stream,
            "graph": self.graph,
        }.items():
            monkeypatch.setattr(torch.cuda, name, function)

    def set_stream(self, stream: str) -> None:
        self.current = stream

    @contextmanager
    def graph(self, graph: object, *, pool: Any, stream: str, capture_error_mode: str) -> Iterator[None]:
        before, self.current = self.current, stream
        self.modes.append(capture_error_mode)
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError("operation failed due to a previous error during capture") from error
        finally:
            self.under_way -= 1
        self.current = before


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Torch:
    return Torch(monkeypatch)


def test_a_capture_that_fails_leaves_the_stream_as_it_was(fake: Torch) -> None:
    api = CudaGraphApi(torch.device("cuda"))
    with api.capture("pool"):
        assert fake.current == OWN
    assert fake.current == USUAL
    with pytest.raises(RuntimeError, match="due to a previous error"), api.capture("pool"):
        raise RuntimeError("operation not permitted when stream is capturing")
    assert fake.current == USUAL
    with api.capture("pool"):  # nobody holds the turn
        pass
    assert fake.modes == ["thread_local"] * 3


def test_two_engines_do_not_capture_at_once(fake: Torch) -> None:
    begun = threading.Event()

    def other() -> None:
        begun.set()
        with CudaGraphApi(torch.device("cuda")).capture("pool"):
            pass

    thread = threading.Thread(target=other, name="other-engine")
    with CudaGraphApi(torch.device("cuda")).capture("pool"):
        thread.start()
        assert begun.wait(10)
        thread.join(0.1)
        assert thread.is_alive()  # it waits for its turn
        assert fake.most == 1
    thread.join(10)
    assert not thread.is_alive()
    assert (fake.most, len(fake.modes)) == (1, 2)
