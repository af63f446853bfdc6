"""``kv-events``: tells the outside which prefixes this engine holds, as vLLM's KV events over ZeroMQ, for routers and cache maps.

Owns the numbering of batches and, while the engine runs, the sockets. On the engine thread it picks the events and numbers them;
encoding and sending happen on a thread of its own. Needs pyzmq and msgspec (extra ``kv-events``).

Batches carry the token ids of the prompts, as vLLM's do: offer the endpoint only to those who may see them.
"""

import itertools
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from minivllm_plugin.config import check_integer
from minivllm_plugin.errors import ConfigError, PluginError
from minivllm_plugin.events import AllBlocksCleared, BlockEvent, BlockRemoved, BlockStored
from minivllm_plugin.hookspecs import hookimpl
from minivllm_plugin.plugins.facade import ConfigDraft, EngineHandle
from minivllm_plugin.plugins.first_party.single_engine import SingleEngine, require
from minivllm_plugin.plugins.queued import QueuedObserver

if TYPE_CHECKING:
    from minivllm_plugin.plugins.first_party.kv_events_sockets import EventSockets
    from minivllm_plugin.plugins.first_party.kv_events_wire import EventFormat, PublishedEvent

__all__ = ["KVEventPublisher"]

PUBLISHED = (BlockStored, BlockRemoved, AllBlocksCleared)
FREE_LOCAL_PORT = "tcp://127.0.0.1:0"


class KVEventPublisher(SingleEngine, QueuedObserver):
    """Publishes what enters and leaves the prefix index. A subscriber that folds the batches in order has the index.

    A batch that could not be sent or kept leaves a gap in the sequence numbers, and so does one that a slow subscriber missed.
    What a replay cannot fill any more is lost: then the subscriber should forget what it knows of this engine.

    Args:
        endpoint: where to publish; port 0 takes a free one, :attr:`endpoint` then says which.
        replay_endpoint: where past batches can be asked for; None offers none.
        topic: of the messages.
        buffer_steps: batches kept for replay.
        high_water_mark: messages that a slow subscriber may lag behind before it misses some.
        queue_size: batches that may wait to be sent; one more drops the oldest.
        event_format: ``"map"`` is what vLLM sends today, ``"array"`` what subscribers written before mid-2026 expect.
        medium: what vLLM calls the place that blocks are used in; subscribers may know ``"GPU"`` only.
        data_parallel_rank: which replica this engine is.

    Raises:
        ConfigError: an argument is impossible; from the engine's constructor if an endpoint cannot be bound.
        PluginError: pyzmq or msgspec is not installed.
    """

    minivllm_name = "kv-events"

    def __init__(
        self,
        endpoint: str = FREE_LOCAL_PORT,
        *,
        replay_endpoint: str | None = FREE_LOCAL_PORT,
        topic: str = "",
        buffer_steps: int = 10_000,
        high_water_mark: int = 100_000,
        queue_size: int = 1024,
        event_format: "EventFormat" = "map",
        medium: str = "GPU",
        data_parallel_rank: int = 0,
    ) -> None:
        super().__init__(maxsize=check_integer("queue_size", queue_size, at_least=1))
        self._wanted = _checked_endpoint("endpoint", endpoint)
        self._wanted_replay = None if replay_endpoint is None else _checked_endpoint("replay_endpoint", replay_endpoint)
        self._topic = _checked_text("topic", topic)
        self._buffer_steps = check_integer("buffer_steps", buffer_steps, at_least=1)
        self._high_water_mark = check_integer("high_water_mark", high_water_mark, at_least=1)
        if event_format not in ("map", "array"):
            raise ConfigError(f"event_format must be 'map' or 'array', got {event_format!r:.100}")
        for module, package in (("zmq", "pyzmq"), ("msgspec", "msgspec")):
            require(module, package=package, extra="kv-events")
        from minivllm_plugin.plugins.first_party.kv_events_wire import BatchEncoder

        rank = check_integer("data_parallel_rank", data_parallel_rank, at_least=0)
        self._encoder = BatchEncoder(event_format, _checked_text("medium", medium), rank)
        self._numbers = itertools.count()
        self._sockets: EventSockets | None = None

    @property
    def endpoint(self) -> str:
        """Where batches are published, with the real port.

        Raises:
            PluginError: the engine does not run.
        """
        return self._running().endpoint

    @property
    def replay_endpoint(self) -> str | None:
        """Where past batches can be asked for; None if nowhere.

        Raises:
            PluginError: the engine does not run.
        """
        return self._running().replay_endpoint

    # --- hooks -----------------------------------------------------------------------------------------------------

    @hookimpl
    def minivllm_configure(self, config: ConfigDraft) -> None:
        from minivllm_plugin.plugins.first_party.kv_events_sockets import check_endpoints

        super().minivllm_configure(config)
        check_endpoints(*(endpoint for endpoint in (self._wanted, self._wanted_replay) if endpoint is not None))

    @hookimpl
    def minivllm_engine_started(self, engine: EngineHandle) -> None:
        from minivllm_plugin.plugins.first_party.kv_events_sockets import EventSockets

        super().minivllm_engine_started(engine)
        self._sockets = EventSockets(self._wanted, self._wanted_replay, self._topic, self._buffer_steps, self._high_water_mark)

    @hookimpl
    def minivllm_blocks_changed(self, events: Sequence[BlockEvent]) -> None:
        sockets = self._sockets
        published = [event for event in events if isinstance(event, PUBLISHED)]
        if published and sockets is not None:
            # Numbered before it is queued, so that a batch that is dropped there is missed.
            self.defer(self._publish, sockets, next(self._numbers), time.time(), published)

    @hookimpl
    def minivllm_engine_stopped(self, engine: EngineHandle, error: BaseException | None) -> None:
        if engine is not self._handle or self._sockets is None:
            return
        sockets, self._sockets = self._sockets, None
        self.defer(sockets.close_publisher)
        self.close()
        sockets.close()

    def _publish(self, sockets: "EventSockets", number: int, ts: float, events: "list[PublishedEvent]") -> None:
        sockets.publish(number, self._encoder.encode(ts, events))

    def _running(self) -> "EventSockets":
        if self._sockets is None:
            raise PluginError("KV events are published while an engine runs; pass this object to LLM(plugins=[…]) first")
        return self._sockets


def _checked_endpoint(name: str, value: object) -> str:
    text = _checked_text(name, value)
    if "://" not in text:
        raise ConfigError(f"{name} must be a ZeroMQ endpoint to bind, such as 'tcp://127.0.0.1:5557', got {value!r:.100}")
    return text


def _checked_text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{name} must be a string, got {value!r:.100}")
    return value
