"""The two sockets of the KV event publisher, and the batches that can be replayed. Imports zmq.

A PUB socket sends each batch as three frames: topic, sequence number (8 bytes, big endian), payload. A ROUTER socket answers
replay requests: to ``[b"", first sequence number wanted]`` it sends ``[b"", sequence number, payload]`` for each batch that it
still has from there on, then ``[b"", -1 as 8 bytes, b""]``. This is vLLM's protocol.

Threads: the PUB socket belongs to whoever calls :meth:`publish`, the ROUTER socket to a thread of this object. A batch enters the
buffer before it is sent: whoever subscribes first and asks for a replay then misses nothing and tells doubles by their number.
"""

import logging
import threading
from collections import deque

import zmq

from minivllm_plugin.errors import ConfigError

__all__ = ["EventSockets", "check_endpoints"]

logger = logging.getLogger(__name__)

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
LINGER_MILLISECONDS = 500  # that closing waits for subscribers to take what was sent


class EventSockets:
    """Bound and answering from the constructor on; publishing happens on one thread.

    Args:
        endpoint, replay_endpoint: where to bind; None for the latter offers no replay.
        topic: first frame.
        buffer_steps: batches kept for replay; the oldest goes first.
        high_water_mark: messages that a slow subscriber may lag behind before it misses some; 0 is no limit.

    Attributes:
        endpoint, replay_endpoint: as bound, with the real port.

    Raises:
        ConfigError: an endpoint cannot be bound.
    """

    def __init__(self, endpoint: str, replay_endpoint: str | None, topic: str, buffer_steps: int, high_water_mark: int) -> None:
        self._topic = topic.encode()
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer_steps)
        self._lock = threading.Lock()  # guards the buffer, which two threads use
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._publisher = self._context.socket(zmq.PUB)
        self._publisher.setsockopt(zmq.LINGER, LINGER_MILLISECONDS)
        self._publisher.setsockopt(zmq.SNDHWM, high_water_mark)
        self._router: zmq.Socket[bytes] | None = None
        self._thread: threading.Thread | None = None
        self.endpoint = ""
        self.replay_endpoint: str | None = None
        try:
            self.endpoint = _bind(self._publisher, endpoint)
            if replay_endpoint is not None:
                self._router = self._context.socket(zmq.ROUTER)
                self._router.setsockopt(zmq.LINGER, LINGER_MILLISECONDS)
                self._router.setsockopt(zmq.SNDHWM, 0)  # else a long replay loses its middle without a word
                self.replay_endpoint = _bind(self._router, replay_endpoint)
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        if self._router is not None:
            self._thread = threading.Thread(target=self._answer, name="minivllm-kv-events-replay", daemon=True)
            self._thread.start()

    def publish(self, sequence_number: int, payload: bytes) -> None:
        """Keep one batch and send it to whoever listens; never blocks."""
        with self._lock:
            self._buffer.append((sequence_number, payload))
        self._publisher.send_multipart((self._topic, sequence_number.to_bytes(8, "big"), payload))

    def close_publisher(self) -> None:
        """On the publishing thread, after its last batch."""
        self._publisher.close()

    def close(self) -> None:
        """Stop answering and free the ports; call after :meth:`close_publisher`. Waits half a second at most for subscribers."""
        if not self._publisher.closed:  # its thread hangs; ending the context now would hang, too
            logger.warning("the KV event publisher at %s did not end in time; its port stays taken", self.endpoint)
            return
        self._context.term()  # wakes the replay thread, which closes its socket

    def _answer(self) -> None:
        router = self._router
        assert router is not None
        try:
            while True:
                self._replay(router, router.recv_multipart())
        except zmq.ContextTerminated:
            pass
        finally:
            router.close()

    def _replay(self, router: "zmq.Socket[bytes]", request: list[bytes]) -> None:
        if len(request) != 3 or len(request[2]) != 8:
            logger.warning("a replay request must be an empty frame and 8 bytes, got frames of %s bytes", [*map(len, request)])
            return
        client, start = request[0], int.from_bytes(request[2], "big")
        with self._lock:
            batches = [entry for entry in self._buffer if entry[0] >= start]
        for number, payload in batches:
            router.send_multipart((client, b"", number.to_bytes(8, "big"), payload))
        router.send_multipart((client, b"", END_OF_REPLAY, b""))


def check_endpoints(*endpoints: str) -> None:
    """
    Raises:
        ConfigError: one cannot be bound now.
    """
    with zmq.Context() as context:
        for endpoint in endpoints:
            with context.socket(zmq.PUB) as probe:
                _bind(probe, endpoint)


def _bind(socket: "zmq.Socket[bytes]", endpoint: str) -> str:
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(
            f"KV events cannot be published at {endpoint!r}: {error}; take another endpoint; 'tcp://127.0.0.1:0' has a free port"
        ) from error
    return socket.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()  # type: ignore[union-attr]  # bytes for this option
