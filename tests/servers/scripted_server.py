"""A web server on loopback with scripted answers: for answers that no real store gives."""

import asyncio
import ssl
import threading
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Self

from aiohttp import web

from tests.servers.object_store import storage_options

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class ScriptedServer:
    """Calls a handler for each request, in a thread of its own."""

    def __init__(self, handler: Handler, secure: ssl.SSLContext | None = None) -> None:
        self.requests: list[web.BaseRequest] = []
        self._handler, self._secure = handler, secure
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="scripted-server", daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._open(), self._loop).result(10)

    @property
    def options(self) -> dict[str, Any]:
        return storage_options(self.endpoint)

    async def _open(self) -> None:
        self._server = web.Server(self._handle, access_log=None)
        self._listening = await self._loop.create_server(self._server, "127.0.0.1", 0, ssl=self._secure)
        scheme = "https" if self._secure else "http"
        self.endpoint = f"{scheme}://127.0.0.1:{self._listening.sockets[0].getsockname()[1]}"

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        self.requests.append(request)
        return await self._handler(request)

    async def _close(self) -> None:
        self._listening.close()
        self._server.pre_shutdown()
        await self._server.shutdown(0.1)
        await asyncio.sleep(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


def s3_error(status: int, code: str, **headers: str) -> web.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    text = f"<Error><Code>{code}</Code><Message>scripted</Message></Error>"
    return web.Response(status=status, text=text, content_type="application/xml", headers=named)


def range_of(request: web.BaseRequest) -> tuple[int, int]:
    """The range that a request asks for: the first byte, and the one after the last."""
    start, _, last = request.headers["Range"].removeprefix("bytes=").partition("-")
    return int(start), int(last) + 1 if last else 1 << 60


def partial(data: bytes, request: web.BaseRequest, tag: str = "one") -> web.Response:
    """A right answer."""
    start, stop = range_of(request)
    stop = min(stop, len(data))
    headers = {"Content-Range": f"bytes {start}-{stop - 1}/{len(data)}", "ETag": f'"{tag}"'}
    return web.Response(status=206, body=data[start:stop], headers=headers)
