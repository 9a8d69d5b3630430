"""Clients that send slowly, or without an end: a question has some seconds to arrive, and some bytes at most."""

from __future__ import annotations

import asyncio

from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

#: Seconds that the headers of a request may take to arrive, and its body.
SECONDS = 20.0


class Impatient(H11Protocol):
    """A connection that is closed where the line and the headers of a request take too long: servers have no limit of
    their own for it, and so many such connections would be all that the system lets a process have."""

    seconds = SECONDS

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_request()

    def data_received(self, data: bytes) -> None:
        if self.timeout_keep_alive_task is not None:  # the first bytes after an answer
            self._expect_request()
        super().data_received(data)

    def _expect_request(self) -> None:
        before = self.cycle

        def close() -> None:
            if self.cycle is before and not self.transport.is_closing():
                self.transport.close()

        self.loop.call_later(self.seconds, close)


class WholeQuestions:
    """Reads the bodies of requests whole before they are answered, but for those below ``apart``, which are files."""

    def __init__(self, app: ASGIApp, most_bytes: int, apart: str, seconds: float = SECONDS) -> None:
        self._app, self._most, self._apart, self._seconds = app, most_bytes, apart, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(self._apart):
            await self._app(scope, receive, send)
            return
        try:
            body = await asyncio.wait_for(self._body(receive), self._seconds)
        except asyncio.TimeoutError:
            body, refusal = None, (408, f"the question did not arrive within {self._seconds:.0f} s")
        else:
            refusal = (413, f"questions of up to {self._most >> 10} KiB are taken")
        if body is None:
            await JSONResponse({"error": refusal[1]}, refusal[0], {"Connection": "close"})(scope, receive, send)
            return
        told: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def whole() -> Message:
            return told.pop() if told else await receive()

        await self._app(scope, whole, send)

    async def _body(self, receive: Receive) -> bytes | None:
        """The body; None where it is longer than it may be."""
        found = bytearray()
        while len(found) <= self._most:
            message = await receive()
            found += message.get("body", b"")
            if not message.get("more_body", False):
                return bytes(found)
        return None
