"""A proxy in front of an object store that misbehaves by script, as clouds do.

A rule sees each request and decides what happens to it. The proxy has its own thread and event loop, keeps
the Host header so that signatures verify, and records all requests and responses.
"""

import asyncio
import multiprocessing
import socket
import struct
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from random import Random
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self, TypeAlias

import aiohttp
from aiohttp import web
from yarl import URL

from tests.servers.object_store import storage_options

TRANSIENT = (
    (429, "TooManyRequests"),
    (500, "InternalError"),
    (502, "BadGateway"),
    (503, "SlowDown"),
    (504, "GatewayTimeout"),
)
PIECE = 1 << 16  # bytes sent at a time where the rate matters
HOP = {"connection", "keep-alive", "transfer-encoding", "expect"}  # headers between two neighbours only


@dataclass(frozen=True)
class Request:
    """What a rule decides on."""

    method: str
    path: str  # bucket and key, as they were sent, without the query
    query: str  # without what signs it
    range: str | None  # e.g. "bytes=0-99"
    number: int  # of all requests, from 0
    attempt: int  # of the same method, path, query and range, from 0
    headers: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)


@dataclass(frozen=True, kw_only=True)
class Action:
    """What happens to a request. By default it is forwarded, and answered as fast as the store does."""

    latency: float = 0.0  # seconds before the answer
    rate: float | None = None  # bytes per second of a body, sent or received
    status: int | None = None  # answered by the proxy itself, with this error code
    code: str = ""
    end: Literal["refuse", "lose", "reset", "truncate", "stall", "shorten"] | None = None
    after: int = 0  # bytes of the body before that end


PASS = Action()


def answer(status: int, code: str) -> Action:
    """The store is not asked: an error as S3 writes it, e.g. `answer(503, "SlowDown")`."""
    return Action(status=status, code=code)


def delay(seconds: float) -> Action:
    return Action(latency=seconds)


def throttle(rate: float, latency: float = 0.0) -> Action:
    """Limit each connection to `rate` bytes per second."""
    return Action(rate=rate, latency=latency)


def refuse() -> Action:
    """The connection is reset before the store has seen the request."""
    return Action(end="refuse")


def lose() -> Action:
    """The store executes the request, and the connection is reset before the answer."""
    return Action(end="lose")


def reset(after: int = 0) -> Action:
    """The connection is reset after `after` bytes of the body."""
    return Action(end="reset", after=after)


def truncate(after: int = 0) -> Action:
    """The connection is closed after `after` bytes of the body; the header promised more."""
    return Action(end="truncate", after=after)


def shorten(after: int = 0) -> Action:
    """A complete answer of only `after` bytes, with a Content-Length that says so."""
    return Action(end="shorten", after=after)


def stall(after: int = 0) -> Action:
    """`after` bytes of the body, and then nothing, until the client disconnects."""
    return Action(end="stall", after=after)


Rule: TypeAlias = Callable[[Request], Action]  # these can also be sent to another process


def never(_: Request) -> Action:
    """The rule without faults."""
    return PASS


@dataclass(frozen=True)
class always:
    """The same action for every request."""

    action: Action

    def __call__(self, _: Request) -> Action:
        return self.action


@dataclass(frozen=True)
class first:
    """One action for the first attempts of every request, and another for those after them."""

    times: int
    action: Action
    then: Action = PASS

    def __call__(self, request: Request) -> Action:
        return self.action if request.attempt < self.times else self.then


@dataclass(frozen=True)
class faulty:
    """Transient faults of all kinds in this share of the requests, chosen by the seed and the request."""

    rate: float
    seed: int
    otherwise: Action = PASS

    def __call__(self, request: Request) -> Action:
        random = Random(f"{self.seed} {replace(request, number=0)}")
        if random.random() >= self.rate:
            return self.otherwise
        after = random.choice([0, 1, 100, 5000])
        ends = [refuse(), lose(), reset(after), truncate(after), shorten(after)]
        return random.choice([answer(status, code) for status, code in TRANSIENT] + ends)


@dataclass
class Record:
    """A request, and how it was answered."""

    request: Request
    action: Action
    status: int = 0  # 0: no answer
    received: int = 0  # bytes of the request's body
    sent: int = 0  # bytes of the answer's body


@dataclass
class Peak:
    """A current number and its maximum."""

    now: int = 0
    most: int = 0

    def __enter__(self) -> None:
        self.now += 1
        self.most = max(self.most, self.now)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.now -= 1


class Stopped:
    """A context manager that stops at the end of its block."""

    def stop(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


@dataclass
class FaultProxy(Stopped):
    """The proxy of one server, on a port of its own.

    >>> with FaultProxy(store.endpoint) as proxy:                                             # doctest: +SKIP
    ...     proxy.rule = first(2, answer(503, "SlowDown"))
    ...     fsspec.filesystem("s3", **proxy.options).cat("s3://bucket/key")
    ...     assert [record.status for record in proxy.records] == [503, 503, 200]
    """

    target: str
    rule: Rule = never
    records: list[Record] = field(default_factory=list)
    requests: Peak = field(default_factory=Peak)  # in flight
    connections: Peak = field(default_factory=Peak)  # open
    endpoint: str = ""
    _attempts: Counter[tuple[str | None, ...]] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault-proxy", daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._open(), self._loop).result(10)

    @property
    def options(self) -> dict[str, Any]:
        return storage_options(self.endpoint)

    def clear(self) -> None:
        """Forget all requests so far: records, peaks and attempts. The rule stays."""
        self.records.clear()
        self._attempts.clear()
        self.requests.most, self.connections.most = self.requests.now, self.connections.now

    def asked(self, method: str = "GET", ending: str = "") -> list[Record]:
        """The requests with this method for paths with this ending."""
        return [
            record
            for record in self.records
            if record.request.method == method and record.request.path.endswith(ending)
        ]

    @property
    def sent(self) -> int:
        """Bytes of all bodies."""
        return sum(record.sent for record in self.records)

    def stop(self) -> None:
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(10)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(10)
            self._loop.close()

    async def _open(self) -> None:
        self._stopping = asyncio.Event()
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            auto_decompress=False,
            read_bufsize=1 << 20,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=5),
        )
        self._server = _Counted(self._handle, self.connections)
        self._listening = await self._loop.create_server(self._server, "127.0.0.1", 0)
        self.endpoint = f"http://127.0.0.1:{self._listening.sockets[0].getsockname()[1]}"

    async def _close(self) -> None:
        self._stopping.set()
        for listening in self._listening.sockets:
            with suppress(OSError):
                listening.shutdown(socket.SHUT_RDWR)  # also where a forked process still has it open
        self._listening.close()
        self._server.pre_shutdown()
        await self._server.shutdown(0.1)
        await self._session.close()
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        path, _, query = request.raw_path.partition("?")
        query = "&".join(part for part in query.split("&") if not part.startswith("X-Amz-"))
        asked = (request.method, path, query, request.headers.get("Range"))
        seen = Request(*asked, number=len(self.records), attempt=self._attempts[asked], headers=request.headers)
        self._attempts[asked] += 1
        record = Record(seen, self.rule(seen))
        self.records.append(record)
        with self.requests:
            if record.action.latency:
                await asyncio.sleep(record.action.latency)
            if record.action.end == "refuse":
                return _hang_up(request, abruptly=True)
            if record.action.status:
                return await _answer(request, record)
            return await self._pass(request, record)

    async def _pass(self, request: web.BaseRequest, record: Record) -> web.StreamResponse:
        if request.headers.get("Expect", "").lower() == "100-continue" and request.transport:
            request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        asked = self._session.request(
            request.method,
            URL(self.target + request.raw_path, encoded=True),
            headers={name: value for name, value in request.headers.items() if name.lower() not in HOP},
            data=self._receive(request, record) if request.can_read_body else None,
            allow_redirects=False,
            skip_auto_headers=["User-Agent", "Accept", "Accept-Encoding", "Content-Type"],
        )
        try:
            async with asked as answer:
                if record.action.end == "lose":
                    await answer.read()
                    return _hang_up(request, abruptly=True)
                return await self._relay(request, answer, record)
        except aiohttp.ClientConnectionError:  # one of the two sides disconnected
            return _hang_up(request, abruptly=True)

    async def _relay(
        self, request: web.BaseRequest, answer: aiohttp.ClientResponse, record: Record
    ) -> web.StreamResponse:
        action, size = record.action, int(answer.headers.get("Content-Length", 0))
        ends = action.end is not None and request.method != "HEAD"
        allowed = min(size, action.after) if ends else size
        response = web.StreamResponse(status=answer.status, reason=answer.reason)
        for name, value in answer.headers.items():
            if name.lower() not in HOP:
                response.headers.add(name, value)
        if ends and action.end == "shorten":
            response.content_length = allowed
        record.status = answer.status
        await response.prepare(request)
        if request.method == "HEAD":
            return response
        await self._send(response, answer, record, allowed if ends else None)
        if not ends or action.end == "shorten":
            await response.write_eof()
            return response
        if action.end == "stall":
            await self._wait_for_end(request)
        return _hang_up(request, abruptly=action.end != "truncate")

    async def _send(
        self, response: web.StreamResponse, answer: aiohttp.ClientResponse, record: Record, allowed: int | None
    ) -> None:
        began, rate = self._loop.time(), record.action.rate
        async for piece in _pieces(answer.content, rate):
            part = piece if allowed is None else piece[: allowed - record.sent]
            record.sent += len(part)  # before sending: a reader of the last byte must find it recorded
            await self._pace(record.sent, rate, began)
            await response.write(part)
            if allowed is not None and record.sent >= allowed:
                return

    async def _receive(self, request: web.BaseRequest, record: Record) -> AsyncIterator[bytes]:
        began, rate = self._loop.time(), record.action.rate
        async for piece in _pieces(request.content, rate):
            record.received += len(piece)
            await self._pace(record.received, rate, began)
            yield piece

    async def _pace(self, done: int, rate: float | None, began: float) -> None:
        if rate:
            await asyncio.sleep(max(0.0, done / rate - (self._loop.time() - began)))

    async def _wait_for_end(self, request: web.BaseRequest) -> None:
        while request.transport and not request.transport.is_closing() and not self._stopping.is_set():
            await asyncio.sleep(0.02)


def _pieces(content: aiohttp.StreamReader, rate: float | None) -> AsyncIterator[bytes]:
    return content.iter_chunked(PIECE) if rate else content.iter_any()


class _Counted(web.Server):
    """Counts the connections that are open."""

    def __init__(self, handler: Any, peak: Peak) -> None:
        super().__init__(handler, access_log=None)
        self._peak = peak

    def connection_made(self, handler: Any, transport: asyncio.Transport) -> None:
        self._peak.__enter__()
        super().connection_made(handler, transport)

    def connection_lost(self, handler: Any, exc: BaseException | None = None) -> None:
        self._peak.__exit__(None, None, None)
        super().connection_lost(handler, exc)


class Totals(NamedTuple):
    requests: int
    sent: int  # bytes of all bodies
    most_requests: int  # in flight
    most_connections: int


class ProxyProcess(Stopped):
    """The proxy in its own process, for measurements: it does not share the measured interpreter.

    >>> with ProxyProcess(store.endpoint, always(throttle(50e6, latency=0.03))) as proxy:     # doctest: +SKIP
    ...     read_all(**proxy.options)
    ...     proxy.totals().sent
    """

    def __init__(self, target: str, rule: Rule = never) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(target, rule, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self.endpoint: str = self._receive()

    @property
    def options(self) -> dict[str, Any]:
        return storage_options(self.endpoint)

    def use(self, rule: Rule) -> None:
        self._pipe.send(rule)
        self._receive()

    def totals(self) -> Totals:
        """Since the start, or since the last call."""
        self._pipe.send(None)
        totals: Totals = self._receive()
        return totals

    def stop(self) -> None:
        self._pipe.close()
        self._process.join(5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(5)
        self._process.close()

    def _receive(self) -> Any:
        if not self._pipe.poll(20):
            raise RuntimeError("the proxy's process does not answer")
        return self._pipe.recv()


def _serve(target: str, rule: Rule, pipe: Connection) -> None:
    with FaultProxy(target, rule) as proxy, suppress(EOFError):
        pipe.send(proxy.endpoint)
        while True:  # until the other end is closed, or its process is gone
            rule_or_none = pipe.recv()
            if rule_or_none is not None:
                proxy.rule = rule_or_none
            totals = Totals(len(proxy.records), proxy.sent, proxy.requests.most, proxy.connections.most)
            proxy.clear()  # before the answer: later requests count
            pipe.send(totals)


async def _answer(request: web.BaseRequest, record: Record) -> web.StreamResponse:
    action = record.action
    text = (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        f"<Error><Code>{action.code}</Code><Message>answered by the fault proxy</Message>"
        f"<Resource>{record.request.path}</Resource><RequestId>{record.request.number}</RequestId></Error>"
    )
    record.status = action.status or 0
    body = text.encode() if request.method != "HEAD" else b""
    record.sent = len(body)
    response = web.Response(status=record.status, body=body, content_type="application/xml")
    if "Expect" in request.headers:  # the client waits for permission to send its body, and does not get it
        response.force_close()
    else:
        async for _ in request.content.iter_any():
            pass
    return response


def _hang_up(request: web.BaseRequest, *, abruptly: bool) -> web.StreamResponse:
    """End the connection: with a reset, or as if the answer were complete."""
    transport = request.transport
    if transport is not None:
        if abruptly:
            sock = transport.get_extra_info("socket")
            with suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            transport.abort()
        else:
            transport.close()
    return web.Response(status=500)
