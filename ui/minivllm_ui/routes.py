"""Our own routes beside Gradio's: the engine's state for the panel and for ``minivllm top``, and what changes the engine.

    GET  /engine/state?since=&mine=   the present, as frames.py lays it out; 204 when it is what the asker has
    GET  /engine/state?at=            a moment of the last five minutes, seconds since the epoch
    GET  /engine/state?format=json    the header alone, for people
    GET  /engine/past                 samples for the chart, and the last events
    GET  /engine/block/{id}           one block
    POST /engine/control              {"guests": 3}, {"num_blocks": 48, "policy": "fcfs"} or {"revive": true}

No route tells what anybody asked or was answered.
"""

import asyncio
from typing import Any

from fastapi import APIRouter, HTTPException, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from minivllm_plugin.errors import MinivllmError
from minivllm_ui.engine_host import EngineHost
from minivllm_ui.frames import decode
from minivllm_ui.guests import MOST_GUESTS, Guests
from minivllm_ui.recorder import Recorder

__all__ = ["engine_routes"]

MOST_BLOCKS = 100_000
NO_STORE = {"Cache-Control": "no-store"}


class _Order(BaseModel):
    """What ``POST /engine/control`` takes."""

    model_config = ConfigDict(extra="forbid", strict=True)

    guests: int | None = Field(None, ge=0, le=MOST_GUESTS)
    num_blocks: int | None = Field(None, ge=1, le=MOST_BLOCKS)
    policy: str | None = None
    revive: bool = False


def engine_routes(host: EngineHost, recorder: Recorder, guests: Guests) -> APIRouter:
    """The routes; include them before Gradio is mounted at ``/``."""
    router = APIRouter(prefix="/engine")

    @router.get("/state")
    async def state(since: str = "", mine: str = "", at: float | None = None, format: str = "") -> Response:  # noqa: A002
        frame = recorder.frame_at(at) if at is not None else recorder.frame(since, mine)
        if frame is None:
            return Response(status_code=204, headers=NO_STORE)
        if format == "json":
            return _json(decode(frame).header)
        return Response(frame, media_type="application/octet-stream", headers=NO_STORE)

    @router.get("/past")
    async def past() -> Response:
        return _json(recorder.past())

    @router.get("/block/{block_id}")
    async def block(block_id: int) -> Response:
        found = recorder.block(block_id)
        if found is None:
            raise HTTPException(404, f"there is no block {block_id}")
        return _json(found)

    @router.post("/control")
    async def control(order: _Order, request: Request) -> Response:
        if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            raise HTTPException(415, "send JSON")  # a form of another site could not
        try:
            if order.guests is not None:
                guests.set(order.guests)
            if order.num_blocks is not None or order.policy is not None:
                policy = order.policy or host.policy
                host.check_policy(policy)
                await asyncio.to_thread(host.restart, order.num_blocks or host.num_blocks, policy)
            if order.revive:
                await asyncio.to_thread(host.revive)
        except MinivllmError as error:
            raise HTTPException(400, str(error)) from error
        return _json({"guests": guests.count, "num_blocks": host.num_blocks, "policy": host.policy})

    return router


def _json(content: Any) -> Response:
    from fastapi.responses import JSONResponse

    return JSONResponse(content, headers=NO_STORE)
