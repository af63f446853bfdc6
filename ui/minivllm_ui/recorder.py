"""Turns what the observer heard into frames. Owns the live state and the lock around it; callable from any thread.

Costs nothing on the engine thread. Folding happens when a page asks, at most five times a second, and twice a second by a thread
of its own, ``minivllm-ui-recorder``, so that the past is there when somebody opens the page.
"""

import logging
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from minivllm_plugin.events import RequestOutcome
from minivllm_ui.frames import encode, encode_ids
from minivllm_ui.history import History, Sample
from minivllm_ui.live_state import LiveState
from minivllm_ui.observer import EngineObserver
from minivllm_ui.pool_map import NUM_SLOTS, BlockDetails
from minivllm_ui.request_table import LiveRequest

__all__ = ["Recorder"]

logger = logging.getLogger(__name__)

FRESH = 0.19  # seconds for which a frame is good enough: five a second
TICK = 0.5  # seconds between frames that are kept for the slider
MOST_SEQUENCES = 48  # shown; the header's counts are of all
EVENTS_IN_FRAME = 16

Numbers = Mapping[str, Any]


class Recorder:
    """The engine as pictures.

    Args:
        observer: whose records it takes; nobody else may.
        about: facts that change rarely (model, policy, synthetic users), asked for each frame.
    """

    def __init__(self, observer: EngineObserver, about: Callable[[], Numbers]) -> None:
        self.last_asked = time.monotonic()
        self._observer = observer
        self._about = about
        self._state = LiveState()
        self._history = History()
        self._lock = threading.Lock()
        self._boot = uuid.uuid4().hex[:6]  # so that a page that outlives the server does not take a new frame for its own
        self._number = 0
        self._frame = b""
        self._shown: Numbers = {}
        self._folded_at = 0.0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="minivllm-ui-recorder", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._stopping.set()
        self._thread.join()

    # --- pictures --------------------------------------------------------------------------------------------------

    def frame(self, since: str = "", mine: str = "") -> bytes | None:
        """The present, or None if that is what the asker has.

        Args:
            since: ``version`` of the asker's frame.
            mine: its conversation, ``chat-3``; blocks that it left behind are named at the end.
        """
        self.last_asked = time.monotonic()
        with self._lock:
            self._refresh(FRESH)
            if since == self._version:
                return None
            return self._frame + encode_ids(self._state.reusable_blocks_of(mine) if mine else ())

    def frame_at(self, moment: float) -> bytes | None:
        """A picture of the past, five minutes back at most."""
        with self._lock:
            return self._history.at(moment)

    def past(self) -> dict[str, object]:
        """What the chart and the event strip show before the first frame arrives."""
        with self._lock:
            self._refresh(FRESH)
            return {"samples": self._history.samples(), "events": self._state.story.last(100)}

    def block(self, block_id: int) -> BlockDetails | None:
        """One block now; None if there is none of this number."""
        with self._lock:
            self._refresh(FRESH)
            pool = self._state.pool
            return pool.details(block_id) if 0 <= block_id < pool.num_blocks else None

    # --- one request, for the chat ------------------------------------------------------------------------------------

    def progress(self, request_id: str) -> tuple[LiveRequest | None, int]:
        """A live request and how many wait before it; for reading only, and soon out of date."""
        with self._lock:
            self._refresh(FRESH / 2)
            return self._state.requests.live.get(request_id), self._state.requests.num_ahead(request_id)

    def outcome(self, request_id: str) -> tuple[RequestOutcome | None, int]:
        """How a request ended, if it has, and tokens a block."""
        with self._lock:
            self._refresh(0.0)
            return self._state.requests.outcomes.get(request_id), self._state.pool.block_size

    @property
    def now(self) -> float:
        """The engine's clock."""
        return self._state.now

    @property
    def status(self) -> tuple[str, str | None]:
        """Of the engine, and what it died of."""
        with self._lock:
            self._refresh(FRESH)
            return self._state.status, self._state.error

    # --- helpers ---------------------------------------------------------------------------------------------------

    @property
    def _version(self) -> str:
        return f"{self._boot}-{self._number}"

    def _run(self) -> None:
        kept = -1
        while not self._stopping.wait(TICK):
            try:
                with self._lock:
                    self._refresh(0.0)
                    if self._number != kept:
                        kept = self._number
                        self._history.add(self._sample(), self._frame)
            except Exception:  # the page may show a wrong picture; it must not take the records' memory without end
                logger.exception("the recorder of the engine page failed; its picture may be wrong until the engine restarts")

    def _refresh(self, max_age: float) -> None:
        """Fold what has come, and make a new frame if anything differs. Needs the lock."""
        if time.monotonic() - self._folded_at < max_age:
            return
        self._folded_at = time.monotonic()
        records = self._observer.take()
        for record in records:
            self._state.fold(record)
        shown = {
            "status": self._state.status,
            "error": self._state.error,
            **self._about(),  # which may say that the engine is being restarted
            "tokens_per_second": self._state.requests.tokens_per_second(self._state.now),
        }
        if records or shown != self._shown:
            self._shown = shown
            self._number += 1
            self._frame = self._make_frame()

    def _make_frame(self) -> bytes:
        state = self._state
        requests, pool = state.requests, state.pool
        sequences = requests.in_order()[:MOST_SEQUENCES]
        tables = [pool.tables.get(one.request_id, []) for one in sequences]
        free, cached, shared, held = pool.counts
        first_token = requests.median_first_token_seconds
        header = {
            **self._shown,
            "version": self._version,
            "time": round(time.time(), 2),
            "generation": state.generation,
            "num_blocks": pool.num_blocks,
            "block_size": pool.block_size,
            "free": free,
            "cached": cached,
            "shared": shared,
            "held": held,
            "running": requests.num_in("prefill", "decode"),
            "waiting": requests.num_in("waiting"),
            "preempted": requests.num_in("preempted"),
            "preemptions": requests.num_preemptions,
            "evicted": pool.num_evicted,
            "finished": requests.num_finished,
            "hit_rate": None if requests.hit_rate is None else round(requests.hit_rate, 4),
            "ttft_ms": None if first_token is None else round(1000 * first_token),
            "step": state.engine_state.step if state.engine_state is not None else 0,
            "sequences": [_shown(one, len(table)) for one, table in zip(sequences, tables, strict=True)],
            "events": state.story.last(EVENTS_IN_FRAME),
        }
        return encode(header, bytes(pool.state), bytes(pool.num_holders), tables)

    def _sample(self) -> Sample:
        state = self._state
        _, cached, shared, held = state.pool.counts
        return Sample(
            round(time.time(), 2),
            held,
            shared,
            cached,
            state.pool.num_blocks,
            state.requests.num_preemptions,
            self._shown["tokens_per_second"],
        )


def _shown(one: LiveRequest, num_blocks: int) -> dict[str, object]:
    return {
        "id": one.request_id,
        "label": one.label,
        "slot": one.slot % NUM_SLOTS,
        "state": one.state,
        "prompt": one.num_prompt,
        "computed": one.num_computed,
        "cached": one.num_cached,
        "generated": one.num_generated,
        "preemptions": one.num_preemptions,
        "blocks": num_blocks,
    }
