"""Connections whose clients stall, while they send the head of a request or instead of reading an answer, are closed.

In: uvicorn's protocol for HTTP/1.1. Out: the same with an end to waiting. Bodies that do not come are told so elsewhere (`body`).
"""
from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol


def patient(seconds: float) -> type[H11Protocol]:
    """A protocol that waits for so long."""

    class Patient(H11Protocol):
        head: asyncio.TimerHandle | None = None         # runs while no request is complete but for its body
        reading: asyncio.TimerHandle | None = None      # runs while the client does not take what is sent

        def stop(self, *names: str) -> None:
            for name in names:
                if (timer := getattr(self, name)) is not None:
                    timer.cancel()
                    setattr(self, name, None)

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.head = self.loop.call_later(seconds, transport.abort)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            idle = self.cycle is None or self.cycle.response_complete
            if idle and self.head is None:
                self.head = self.loop.call_later(seconds, self.transport.abort)
            elif not idle:
                self.stop("head")

        def pause_writing(self) -> None:
            super().pause_writing()
            self.reading = self.reading or self.loop.call_later(seconds, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            self.stop("reading")

        def connection_lost(self, exc: Exception | None) -> None:
            self.stop("head", "reading")
            super().connection_lost(exc)
    return Patient
