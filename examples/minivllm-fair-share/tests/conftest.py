"""A live engine without a model, in which nothing happens until the test has queued everything."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from minivllm_plugin import LLM, SamplingParams
from minivllm_plugin.testing import LedgerRunner, scripted_llm


class Stage:
    """An engine that a plugin is attached to, and the requests that a test sends."""

    def __init__(self, *plugins: object, policies: tuple[object, ...] = (), **options: Any) -> None:
        settings = {"plugins": list(plugins), "policies": list(policies), "plugin_errors": "raise", **options}
        self.gate = threading.Event()
        geometry = {name: settings.pop(name) for name in ("num_blocks", "block_size") if name in settings}
        self.llm: LLM
        self.runner: LedgerRunner
        self.llm, self.runner = scripted_llm(options=settings, gate=self.gate, **geometry)
        self.streams: dict[str, Any] = {}

    def send(self, request_id: str, tenant: str, prompt: list[int], max_tokens: int, **params: Any) -> None:
        """Queue a request; the first one of a stage starts a step that waits for :meth:`run`."""
        self.streams[request_id] = self.llm.submit(
            prompt,
            SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0, **params),
            request_id=request_id,
            metadata={"tenant": tenant},
        )
        if len(self.streams) == 1:
            assert self.runner.entered.wait(10)

    def run(self) -> dict[str, list[int]]:
        """Let everything run to its end; the tokens of every request."""
        self.gate.set()
        return {name: list(stream.result().outputs[0].token_ids) for name, stream in self.streams.items()}

    @property
    def order(self) -> list[str]:
        """Requests in the order in which they were first computed."""
        return list(dict.fromkeys(name for batch in self.runner.batches for name in batch.request_ids))


@pytest.fixture
def stage() -> Iterator[Callable[..., Stage]]:
    """Make a :class:`Stage`; it is closed at the end of the test."""
    made: list[Stage] = []

    def make(*plugins: object, **options: Any) -> Stage:
        made.append(Stage(*plugins, **options))
        return made[-1]

    yield make
    for one in made:
        one.gate.set()
        one.llm.close()
