"""Answers that come while they are made: server-sent events, and the client that leaves before the end.

In: asynchronous iterators of frames. Out: ASGI responses. Must not know: what the frames say.
"""
from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .problem import dumps, problem_of

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class ClientLeft(Exception):
    """Nobody waits for this answer any more."""


def frame(data: Any, event: str | None = None) -> bytes:
    """One event; `data` becomes JSON."""
    return (f"event: {event}\n".encode() if event else b"") + b"data: " + dumps(data) + b"\n\n"


class EventStream(Response):
    """Frames as they come; after `ping` seconds of silence a comment, so that nothing in between gives up (-1: never).

    An error becomes the last frame, with `event` as its kind. At the end, or when the client leaves, `close` is called.
    """

    def __init__(self, frames: AsyncGenerator[bytes, None], close: Callable[[], None], ping: float, event: str | None = None):
        super().__init__(media_type="text/event-stream", headers=HEADERS)
        del self.headers["content-length"]
        self._frames, self._close, self._ping, self._event = frames, close, ping if ping > 0 else None, event

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        left = asyncio.ensure_future(_left(receive))
        writing = asyncio.ensure_future(self._write(send))
        try:
            await asyncio.wait([left, writing], return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._close()
            left.cancel()
            writing.cancel()
            with contextlib.suppress(asyncio.CancelledError, OSError):
                await writing

    async def _write(self, send: Send) -> None:
        try:
            while (body := await self._next(send)) is not None:
                await send({"type": "http.response.body", "body": body, "more_body": True})
        except Exception as e:
            error = problem_of(e).body()
            body = frame({"type": "error", **error} if self._event else error, self._event)
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _next(self, send: Send) -> bytes | None:
        task = asyncio.ensure_future(anext(self._frames, None))
        try:
            while not (await asyncio.wait([task], timeout=self._ping))[0]:
                await send({"type": "http.response.body", "body": b":\n\n", "more_body": True})
            return task.result()
        finally:
            task.cancel()


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """The result, or `ClientLeft`, with the work cancelled."""
    task, left = asyncio.ensure_future(work), asyncio.ensure_future(_left(request.receive))
    try:
        await asyncio.wait([task, left], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientLeft
        return task.result()
    finally:
        left.cancel()
        task.cancel()
        if not task.done():
            with contextlib.suppress(asyncio.CancelledError):
                await task
