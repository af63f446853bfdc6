"""Synthetic users: so that one person can see batching, sharing and preemption. Event loop thread.

Each is a conversation of a few turns over LiteLLM, as a tab would hold it; some share a system prompt. They leave by themselves
when nobody has looked at the page for a while.
"""

import asyncio
import itertools
import logging
import random
import time

from minivllm_ui.answering import Answering, Sampling
from minivllm_ui.conversation import Message, Turn
from minivllm_ui.engine_host import EngineHost
from minivllm_ui.recorder import Recorder

__all__ = ["MOST_GUESTS", "Guests"]

logger = logging.getLogger(__name__)

MOST_GUESTS = 32
UNWATCHED = 60.0  # seconds after the last look at the page
TURNS = 3
PERSONAS = (
    "You are the friendly guide of a science museum. Explain things simply, in a few sentences, and always give one example "
    "from everyday life. Never talk about politics. If you do not know something, say so and suggest where to look it up.",
    "You are a travel writer. Describe places vividly, mention food, weather and one surprising fact, and keep every answer "
    "short enough to fit on a postcard. Never recommend a place that is dangerous, and mention how to get there by train.",
)
QUESTIONS = (
    "Why is the sky blue?",
    "Tell me about the moon.",
    "What should I see in Lisbon?",
    "How do bees find their way home?",
    "What is a good first trip by train?",
    "Why do leaves change their colour?",
    "And what else should I know?",
    "Can you give me another example?",
)


class Guests:
    """As many synthetic users as were last asked for."""

    def __init__(self, host: EngineHost, recorder: Recorder) -> None:
        self._host = host
        self._recorder = recorder
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._numbers = itertools.count(1)

    @property
    def count(self) -> int:
        return len(self._tasks)

    def set(self, count: int) -> None:
        """Have ``count`` of them, 0 to 32; the newest leave first. Call on the event loop."""
        count = max(0, min(MOST_GUESTS, count))
        while len(self._tasks) > count:
            _, task = self._tasks.popitem()
            task.cancel()
        while len(self._tasks) < count:
            number = next(self._numbers)
            self._tasks[number] = asyncio.create_task(self._stay(number), name=f"minivllm-ui-guest-{number}")

    async def _stay(self, number: int) -> None:
        chance = random.Random(number)  # the same guests on every start
        requests = itertools.count(1)
        await asyncio.sleep(chance.uniform(0, 1.5))
        try:
            while time.monotonic() - self._recorder.last_asked < UNWATCHED:
                await self._talk(number, chance, requests)
        except Exception:
            logger.exception("guest %d leaves", number)
        finally:
            self._tasks.pop(number, None)

    async def _talk(self, number: int, chance: random.Random, requests: "itertools.count[int]") -> None:
        messages: list[Message] = [{"role": "system", "content": chance.choice(PERSONAS)}]
        for _ in range(chance.randint(1, TURNS)):
            turn = Turn(chance.choice(QUESTIONS))
            messages.append({"role": "user", "content": turn.question})
            sampling = Sampling(max_tokens=chance.randint(40, 160), temperature=0.8)
            answering = Answering(self._host, self._recorder, f"guest-{number}-{next(requests)}", messages, turn, sampling)
            async for _ in answering.updates():
                pass
            if turn.status != "done":  # refused, or the engine is being restarted
                await asyncio.sleep(1.0)
                return
            messages.append({"role": "assistant", "content": turn.answer})
            await asyncio.sleep(chance.uniform(0.2, 1.2))
