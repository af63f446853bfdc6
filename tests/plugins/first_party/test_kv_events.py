"""The ``kv-events`` plugin, over real sockets: a vLLM subscriber can read it, and has the index when it folds what it read."""

import itertools
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from waiting import wait_until

from minivllm_plugin import LLM, SamplingParams
from minivllm_plugin.errors import ConfigError, EngineDeadError, PluginError
from minivllm_plugin.plugins.first_party.kv_events import KVEventPublisher
from minivllm_plugin.plugins.first_party.kv_events_sockets import EventSockets
from minivllm_plugin.testing import scripted_llm

PATIENCE = 20_000  # milliseconds

# What a vLLM subscriber declares (https://docs.vllm.ai/en/latest/examples/features/kv_events/): today's maps …


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class BlockStored(msgspec.Struct, omit_defaults=True, tag=True):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(msgspec.Struct, omit_defaults=True, tag=True):
    block_hashes: list[int | bytes]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, tag=True):
    pass


class MapBatch(EventBatch):
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


# … and the arrays of before.


class OldStored(msgspec.Struct, array_like=True, omit_defaults=True, tag="BlockStored"):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None


class OldRemoved(msgspec.Struct, array_like=True, omit_defaults=True, tag="BlockRemoved"):
    block_hashes: list[int]
    medium: str | None


class OldCleared(msgspec.Struct, array_like=True, omit_defaults=True, tag="AllBlocksCleared"):
    pass


class ArrayBatch(EventBatch):
    events: list[OldStored | OldRemoved | OldCleared]


class Subscriber:
    """Reads, notices gaps by the sequence number, asks for what it missed, and folds everything into an index."""

    def __init__(self, publisher: KVEventPublisher, batch_type: type = MapBatch, topic: str = "") -> None:
        self.decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(batch_type)
        self.context = zmq.Context()
        self.live = self.context.socket(zmq.SUB)
        self.live.connect(publisher.endpoint)
        self.live.subscribe(topic)
        self.topic = topic
        self.replays = self.context.socket(zmq.DEALER)
        if publisher.replay_endpoint is not None:
            self.replays.connect(publisher.replay_endpoint)
        self.index: dict[Any, tuple[Any, tuple[int, ...]]] = {}  # hash -> parent, tokens
        self.numbers: list[int] = []
        self.batches: list[Any] = []

    def close(self) -> None:
        self.context.destroy(linger=0)

    @property
    def expected(self) -> int:
        return self.numbers[-1] + 1 if self.numbers else 0

    def replay(self) -> list[int]:
        """Ask for everything from the next number on; which numbers came."""
        self.replays.send_multipart([b"", self.expected.to_bytes(8, "big")])
        came: list[int] = []
        while True:
            assert self.replays.poll(PATIENCE), "no answer to a replay request"
            empty, number, payload = self.replays.recv_multipart()
            assert empty == b""
            if int.from_bytes(number, "big", signed=True) == -1:
                assert payload == b""
                return came
            came.append(int.from_bytes(number, "big"))
            self.take(came[-1], payload)

    def read(self, patience: int = PATIENCE) -> bool:
        """One live message; False when none came."""
        if not self.live.poll(patience):
            return False
        topic, number_bytes, payload = self.live.recv_multipart()
        assert topic == self.topic.encode()
        assert len(number_bytes) == 8
        number = int.from_bytes(number_bytes, "big")
        if number > self.expected:
            self.replay()
        self.take(number, payload)
        return True

    def take(self, number: int, payload: bytes) -> None:
        if number < self.expected:  # came by replay already
            return
        self.numbers.append(number)
        batch = self.decoder.decode(payload)
        self.batches.append(batch)
        for event in batch.events:
            kind = type(event).__name__
            if kind.endswith("Stored"):
                assert len(event.token_ids) == event.block_size * len(event.block_hashes)
                assert event.parent_block_hash is None or event.parent_block_hash in self.index
                self.index[event.block_hashes[0]] = event.parent_block_hash, tuple(event.token_ids)
            elif kind.endswith("Removed"):
                for key in event.block_hashes:
                    del self.index[key]
            else:
                self.index.clear()


@contextmanager
def subscribed(publisher: KVEventPublisher, *arguments: Any) -> Iterator[Subscriber]:
    subscriber = Subscriber(publisher, *arguments)
    try:
        yield subscriber
    finally:
        subscriber.close()


def live(publisher: KVEventPublisher, **options: Any) -> LLM:
    return scripted_llm(options={"plugins": [publisher], "plugin_errors": "raise"}, **options)[0]


def run(llm: LLM, prompts: list[list[int]], max_tokens: int = 6, **options: Any) -> None:
    streams = [llm.submit(prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True), **options) for prompt in prompts]
    for stream in streams:
        stream.result()


def index_of(llm: LLM) -> dict[int, tuple[int, ...]]:
    """What the engine's own prefix index holds: key -> tokens of the block. Read while the engine is idle."""
    scheduler = llm._plugins._scheduler
    assert scheduler is not None
    pool = scheduler.block_manager
    return {key: pool.blocks[block_id].token_ids for key, block_id in pool.hash_to_block_id.items()}


def tokens_by_key(subscriber: Subscriber) -> dict[Any, tuple[int, ...]]:
    return {key: tokens for key, (_, tokens) in subscriber.index.items()}


def prompts(number: int) -> list[list[int]]:
    return [[seed % 7, *range(seed, seed + 11)] for seed in range(number)]


@pytest.mark.parametrize(("event_format", "batch_type"), [("map", MapBatch), ("array", ArrayBatch)])
def test_a_subscriber_that_folds_has_the_index(event_format: Any, batch_type: type) -> None:
    publisher = KVEventPublisher(event_format=event_format)
    with live(publisher, num_blocks=12) as llm, subscribed(publisher, batch_type) as subscriber:
        run(llm, prompts(10))  # more than the pool holds: blocks are evicted
        run(llm, prompts(10))
        wait_until(lambda: caught_up(subscriber, llm))
        assert any("Removed" in type(event).__name__ for batch in subscriber.batches for event in batch.events)
        assert subscriber.numbers == list(range(len(subscriber.numbers)))


def caught_up(subscriber: Subscriber, llm: LLM) -> bool:
    subscriber.replay()
    while subscriber.read(0):
        pass
    return tokens_by_key(subscriber) == index_of(llm) != {}


def test_chains_can_be_walked_from_the_outside() -> None:
    publisher = KVEventPublisher()
    with live(publisher) as llm, subscribed(publisher) as subscriber:
        run(llm, [[1, 2, 3, 4, 5, 6, 7, 8, 9]], 1)
        wait_until(lambda: caught_up(subscriber, llm))
        roots = [key for key, (parent, _) in subscriber.index.items() if parent is None]
        assert [subscriber.index[key][1] for key in roots] == [(1, 2, 3, 4)]
        (child,) = [tokens for parent, tokens in subscriber.index.values() if parent == roots[0]]
        assert child == (5, 6, 7, 8)


def test_one_who_was_there_reads_everything_live() -> None:
    publisher = KVEventPublisher(topic="kv-events", data_parallel_rank=3)
    with live(publisher) as llm, subscribed(publisher, MapBatch, "kv-events") as subscriber:
        listen_live(subscriber, llm)
        before = len(subscriber.numbers)
        run(llm, [[1] * 9, [2] * 9], 1)
        while tokens_by_key(subscriber) != index_of(llm):
            assert subscriber.read()
        assert len(subscriber.numbers) > before
        assert {batch.data_parallel_rank for batch in subscriber.batches} == {3}
        assert {event.medium for batch in subscriber.batches for event in batch.events} == {"GPU"}


def listen_live(subscriber: Subscriber, llm: LLM) -> None:
    """Make the engine store blocks until one is read live: a subscription takes a moment to arrive."""
    seeds = itertools.count(100)

    def hears() -> bool:
        run(llm, [[next(seeds)] * 5], 1)
        return subscriber.read(50)

    wait_until(hears)


def test_one_who_comes_late_replays() -> None:
    publisher = KVEventPublisher()
    with live(publisher) as llm:
        run(llm, prompts(6))
        with subscribed(publisher) as subscriber:
            wait_until(lambda: caught_up(subscriber, llm))
            assert subscriber.numbers[0] == 0
            assert subscriber.replay() == []  # nothing new: the end marker alone


def test_a_req_socket_gets_its_first_batch_too() -> None:
    publisher = KVEventPublisher()
    with live(publisher) as llm, zmq.Context() as context, context.socket(zmq.REQ) as request:
        run(llm, prompts(3))
        request.connect(str(publisher.replay_endpoint))
        request.send((0).to_bytes(8, "big"))
        assert request.poll(PATIENCE)
        number, payload = request.recv_multipart()
        assert int.from_bytes(number, "big") == 0
        assert msgspec.msgpack.decode(payload, type=MapBatch).events


def test_a_malformed_request_is_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    publisher = KVEventPublisher()
    with live(publisher) as llm, subscribed(publisher) as subscriber:
        run(llm, prompts(2))
        subscriber.replays.send_multipart([b"", b"what?"])
        subscriber.replays.send_multipart([b"now"])
        wait_until(lambda: caught_up(subscriber, llm))
    assert "8 bytes" in caplog.text


def test_only_the_latest_batches_are_kept() -> None:
    publisher = KVEventPublisher(buffer_steps=2)
    with live(publisher) as llm, subscribed(publisher) as subscriber:
        run(llm, [[1] * 9], 6)
        run(llm, [[2] * 9], 6)
        run(llm, [[3] * 9], 6)
        subscriber.decoder = msgspec.msgpack.Decoder(EventBatch)  # without the beginning it cannot be folded
        came: list[int] = []

        def two_came() -> bool:
            subscriber.numbers.clear()
            subscriber.replays.send_multipart([b"", bytes(8)])
            came.clear()
            while True:
                assert subscriber.replays.poll(PATIENCE)
                _, number, payload = subscriber.replays.recv_multipart()
                if not payload:
                    return len(came) == 2 and came[0] > 0
                came.append(int.from_bytes(number, "big"))

        wait_until(two_came)
        assert came[1] == came[0] + 1


def test_a_long_replay_is_complete() -> None:
    """ZeroMQ's own limit of 1000 messages a peer would cut the middle out, without a word."""
    number = 6_000
    sockets = EventSockets("tcp://127.0.0.1:0", "tcp://127.0.0.1:0", "", number, 10)
    try:
        for index in range(number + 5):
            sockets.publish(index, b"x" * 2000)
        with zmq.Context() as context, context.socket(zmq.DEALER) as request:
            request.connect(str(sockets.replay_endpoint))
            request.send_multipart([b"", bytes(8)])
            came = []
            while True:
                assert request.poll(PATIENCE)
                _, index_bytes, payload = request.recv_multipart()
                if not payload:
                    break
                came.append(int.from_bytes(index_bytes, "big"))
        assert came == list(range(5, number + 5))
    finally:
        sockets.close_publisher()
        sockets.close()


def test_what_the_queue_drops_is_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    publisher = KVEventPublisher(queue_size=1)
    gate, busy = threading.Event(), threading.Event()
    publish = publisher._publish

    def slow(*arguments: Any) -> None:
        busy.set()
        assert gate.wait(20)
        publish(*arguments)

    monkeypatch.setattr(publisher, "_publish", slow)
    with live(publisher) as llm, subscribed(publisher) as subscriber:
        run(llm, [[1] * 9], 1)
        assert busy.wait(20)  # number 0 is being sent
        for seed in (2, 3, 4):
            run(llm, [[seed] * 9], 1)
        dropped = publisher.num_dropped
        assert dropped > 0
        gate.set()
        subscriber.decoder = msgspec.msgpack.Decoder(EventBatch)
        subscriber.take = lambda number, payload: subscriber.numbers.append(number)  # type: ignore[method-assign]
        wait_until(lambda: bool(subscriber.replay()) and len(subscriber.numbers) > 1)
        assert subscriber.numbers == [0, dropped + 1]


def test_salts_and_resets_are_told() -> None:
    publisher = KVEventPublisher()
    with live(publisher) as llm, subscribed(publisher) as subscriber:
        run(llm, [[1] * 9], 1, cache_salt="acme")
        wait_until(lambda: caught_up(subscriber, llm))
        stored = [event for batch in subscriber.batches for event in batch.events]
        assert [event.extra_keys for event in stored] == [[("acme",)]] * len(stored)
    from minivllm_plugin.events import AllBlocksCleared as Cleared
    from minivllm_plugin.plugins.first_party.kv_events_wire import BatchEncoder

    payload = BatchEncoder("map", "GPU", 0).encode(1.5, [Cleared()])
    assert msgspec.msgpack.decode(payload) == [1.5, [{"type": "AllBlocksCleared"}], 0]
    assert msgspec.msgpack.decode(BatchEncoder("array", "GPU", 0).encode(1.5, [Cleared()])) == [1.5, [["AllBlocksCleared"]], 0]
    assert isinstance(msgspec.msgpack.decode(payload, type=MapBatch).events[0], AllBlocksCleared)


def test_ports_are_free_again_when_the_engine_has_stopped() -> None:
    publisher = KVEventPublisher()
    with live(publisher):
        endpoint, replay_endpoint = publisher.endpoint, publisher.replay_endpoint
    with pytest.raises(PluginError, match="while an engine runs"):
        _ = publisher.endpoint
    again = KVEventPublisher(endpoint, replay_endpoint=replay_endpoint)
    with live(again):
        assert again.endpoint == endpoint
    names = {thread.name for thread in threading.enumerate()}
    assert not any("KVEventPublisher" in name or "kv-events" in name for name in names)


def test_what_happened_before_the_engine_died_arrives() -> None:
    publisher = KVEventPublisher()
    llm, runner = scripted_llm(options={"plugins": [publisher]})
    with llm, subscribed(publisher) as subscriber:
        listen_live(subscriber, llm)
        runner.fail_on_call = runner.num_calls + 3
        with pytest.raises(EngineDeadError):
            llm.submit([1, 2, 3, 4, 5], SamplingParams(max_tokens=9, ignore_eos=True)).result()
        llm.close()
        while (1, 2, 3, 4) not in tokens_by_key(subscriber).values():
            assert subscriber.read()


def test_a_taken_endpoint_stops_the_start_with_a_remedy() -> None:
    with zmq.Context() as context, context.socket(zmq.PUB) as other:
        port = other.bind_to_random_port("tcp://127.0.0.1")
        for arguments in ({"endpoint": f"tcp://127.0.0.1:{port}"}, {"replay_endpoint": f"tcp://127.0.0.1:{port}"}):
            with pytest.raises(ConfigError, match=rf"'kv-events'.*{port}.*another endpoint"):
                live(KVEventPublisher(**arguments))  # type: ignore[arg-type]


def test_no_replay_when_none_is_wanted() -> None:
    publisher = KVEventPublisher(replay_endpoint=None)
    with live(publisher) as llm:
        run(llm, prompts(2))
        assert publisher.replay_endpoint is None


@pytest.mark.parametrize(
    "arguments",
    [
        {"endpoint": "5557"},
        {"endpoint": None},
        {"replay_endpoint": 5557},
        {"topic": b"kv"},
        {"buffer_steps": 0},
        {"high_water_mark": 0},
        {"queue_size": 0},
        {"event_format": "json"},
        {"medium": None},
        {"data_parallel_rank": -1},
    ],
)
def test_impossible_arguments(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(arguments))):
        KVEventPublisher(**arguments)


@pytest.mark.parametrize("module", ["zmq", "msgspec"])
def test_a_missing_package_is_named(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(PluginError, match=r"minivllm-plugin\[kv-events\]"):
        KVEventPublisher()


@pytest.mark.model
def test_the_real_model(smollm2_gguf: Path) -> None:
    publisher = KVEventPublisher()
    with LLM(str(smollm2_gguf), plugins=[publisher], plugin_errors="raise") as llm, subscribed(publisher) as subscriber:
        output = llm.generate("One, two, three, four, five, six. " * 4, SamplingParams(max_tokens=8), use_tqdm=False)[0]
        wait_until(lambda: caught_up(subscriber, llm))
        tokens = output.prompt_token_ids + output.outputs[0].token_ids
        assert tuple(tokens[:16]) in tokens_by_key(subscriber).values()
