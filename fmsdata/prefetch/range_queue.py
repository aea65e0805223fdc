"""Ranges of remote files, fetched in order of urgency, neighbouring ranges in one request.

The connection limits the number of requests in flight. The queue first waits for a slot of the
connection, and only then decides what to read: what is most urgent at that moment. All of it runs
in the event loop of the connection, so it needs no locks.
"""

import asyncio
import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, NamedTuple, TypeAlias, TypeVar

from fmsdata.core.pages import page_copy
from fmsdata.core.ranges import Range
from fmsdata.formats.base import Data, Reading
from fmsdata.storage.connection import Connection
from fmsdata.storage.disk_cache import DiskCache
from fmsdata.storage.io_thread import together
from fmsdata.storage.settings import Storage
from fmsdata.storage.stats import StorageStats

Read = TypeVar("Read")
MERGED_BYTES = 4 << 20  # at most in one merged request: a larger one would delay the others
PADDING = 64  # bytes between two ranges that nobody needs: a longer gap holds what another block needs
Priority: TypeAlias = tuple[float, int, float]  # the smallest first
NOW: Priority = (-math.inf, 0, 0.0)


class RemoteFile(NamedTuple):
    """A file as it was listed."""

    path: str  # in the form that its filesystem expects
    size: int
    version: str | None
    owner: str  # for errors, such as "source 'web'"


@dataclass(eq=False)
class Urgency:
    """When something is needed. It may turn out to be needed sooner, see `RangeQueue.hurry`."""

    due: Priority
    requests: "set[_Request]" = field(default_factory=set)  # made for it
    behind: "Urgency | None" = None  # something else that it waits for


@dataclass(eq=False)
class _Request:
    file: RemoteFile
    start: int
    stop: int
    result: "asyncio.Future[Data]" = field(repr=False)
    waiting: bool = True  # not being fetched yet
    users: int = 0  # readers that wait for it


class RangeQueue:
    """Reads ranges of files, the most urgent first, as many at a time as the connection allows.

    Ranges of one file that are next to each other are read by one request. A range that is
    requested twice is read once. Ranges in the cache are taken from there.
    """

    def __init__(self, connection: Connection, cache: DiskCache | None) -> None:
        self._connection, self._cache = connection, cache
        self._heap: list[tuple[Priority, int, _Request]] = []
        self._numbers = count()  # equally urgent ranges are read in the order of their requests
        self._requested: dict[tuple[str, int, int], _Request] = {}  # readers of the same range share a request
        self._waiting: dict[str, list[tuple[int, int, _Request]]] = {}  # by file, sorted by position
        self._running: set[asyncio.Task[None]] = set()
        self._acquiring = False  # a task is waiting for a slot
        self._closed = False
        self._cached_bytes = 0
        self._cache_reads, self._cache_writes = asyncio.Semaphore(4), asyncio.Lock()  # the cache is one disk
        self._before = replace(connection.traffic)

    async def read(self, file: RemoteFile, requested: Range, urgency: Urgency) -> Data:
        if requested.start >= requested.stop:
            return b""
        cache, key = self._cache if file.version is not None else None, ""
        if cache is not None:
            key = f"{self._connection.url(file.path)}|{file.version}|{requested.start}-{requested.stop}"
            async with self._cache_reads:
                found = await asyncio.to_thread(cache.get, key, requested.stop - requested.start)
            if found is not None:
                self._cached_bytes += len(found)
                return found
        request = self._request(file, requested, urgency)
        try:
            data = await asyncio.shield(request.result)
        finally:
            self._release(request, urgency)
        if cache is not None:
            async with self._cache_writes:
                await asyncio.to_thread(cache.put, key, data)
        return data

    async def drive(self, reading: Reading[Read], file: RemoteFile, urgency: Urgency) -> Read:
        """Read the ranges of a file that a sans-I/O reader requests, until it returns its result.

        What it reads and remembers for other readers is not read again by those that began meanwhile:
        a request ends when the reader has seen its result.
        """
        if self._cache is not None:
            return await drive(reading, lambda part: self.read(file, part, urgency))
        try:
            ranges = next(reading)
            while True:
                requests: list[_Request | None] = []
                try:
                    requests += (
                        self._request(file, each, urgency) if each.start < each.stop else None for each in ranges
                    )
                    ranges = reading.send(
                        [b"" if request is None else await asyncio.shield(request.result) for request in requests]
                    )
                finally:
                    for request in requests:
                        if request is not None:
                            self._release(request, urgency)
        except StopIteration as end:
            value: Read = end.value
            return value

    def _request(self, file: RemoteFile, requested: Range, urgency: Urgency) -> _Request:
        """Request a range, or join the readers that wait for it. Must be released."""
        if self._closed:
            raise asyncio.CancelledError
        same = file.path, *requested
        request = self._requested.get(same)
        if request is None:
            request = _Request(file, *requested, asyncio.get_running_loop().create_future())
            self._requested[same] = request
            insort(self._waiting.setdefault(file.path, []), (requested.start, next(self._numbers), request))
        request.users += 1
        urgency.requests.add(request)
        if request.waiting:
            self._push(request, urgency)
            self._dispatch()
        return request

    def _release(self, request: _Request, urgency: Urgency) -> None:
        """A reader needs a range no more."""
        urgency.requests.discard(request)
        request.users -= 1
        if not request.users:
            del self._requested[request.file.path, request.start, request.stop]
            if request.waiting:
                self._remove(request)

    def hurry(self, urgency: Urgency) -> None:
        """Read this before everything that is not needed yet."""
        urgency.due = NOW
        for request in urgency.requests:
            if request.waiting:
                self._push(request, urgency)
        if urgency.behind is not None:
            self.hurry(urgency.behind)

    def close(self) -> None:
        """Cancel all requests, and refuse new ones."""
        self._closed = True
        self._heap.clear()
        for request in self._requested.values():  # also those whose task has not begun
            request.result.cancel()
        for task in self._running:
            task.cancel()

    def traffic(self) -> StorageStats:
        """What was read so far."""
        now, before = self._connection.traffic, self._before
        return StorageStats(
            requests=now.requests - before.requests,
            bytes=now.bytes - before.bytes,
            retries=now.retries - before.retries,
            cached_bytes=self._cached_bytes,
        )

    def _push(self, request: _Request, urgency: Urgency) -> None:
        heapq.heappush(self._heap, (urgency.due, next(self._numbers), request))

    def _dispatch(self) -> None:
        """Wait for a slot, if there is anything to read and no task waits for one already."""
        while self._heap and not self._heap[0][2].waiting:
            heapq.heappop(self._heap)
        if self._heap and not self._acquiring and not self._closed:
            self._acquiring = True
            task = asyncio.get_running_loop().create_task(self._fetch_next())
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _fetch_next(self) -> None:
        """Read the most urgent range as soon as there is a slot."""
        async with self._connection.slot():
            self._acquiring = False
            requests = self._pop()
            self._dispatch()  # the next task waits for a slot while this one reads
            if requests:
                await self._fetch(requests)

    def _pop(self) -> list[_Request]:
        """Take the most urgent request, with its neighbours, out of the queue; empty if there is
        none.
        """
        while self._heap:
            request = heapq.heappop(self._heap)[2]
            if request.waiting:
                requests = self._with_neighbours(request)
                for taken in requests:
                    self._remove(taken)
                return requests
        return []

    def _with_neighbours(self, request: _Request) -> list[_Request]:
        """The request, and those before and after it that can be read with it."""
        waiting = self._waiting[request.file.path]
        first = last = self._position(request)
        start, stop = request.start, request.stop
        while True:
            for position, step in ((last + 1, 1), (first - 1, -1)):
                if not 0 <= position < len(waiting):
                    continue
                other = waiting[position][2]
                begin, end = min(start, other.start), max(stop, other.stop)
                gap = max(other.start - stop, start - other.stop)
                if end - begin <= MERGED_BYTES and gap <= PADDING:
                    start, stop = begin, end
                    first, last = (first, position) if step > 0 else (position, last)
                    break
            else:
                return [neighbour for _, _, neighbour in waiting[first : last + 1]]

    def _remove(self, request: _Request) -> None:
        request.waiting = False
        waiting = self._waiting[request.file.path]
        del waiting[self._position(request)]
        if not waiting:
            del self._waiting[request.file.path]

    def _position(self, request: _Request) -> int:
        """The position of a request among the waiting ones of its file."""
        waiting = self._waiting[request.file.path]
        position = bisect_left(waiting, request.start, key=lambda item: item[0])
        while waiting[position][2] is not request:
            position += 1
        return position

    async def _fetch(self, requests: Sequence[_Request]) -> None:
        file = requests[0].file
        start, stop = min(request.start for request in requests), max(request.stop for request in requests)
        try:
            fetched = await self._connection.read(file.path, start, stop, file.version, file.owner, has_slot=True)
            data = fetched.data
            for request in requests:
                if not request.result.done():
                    # A copy: a view would keep all of the data in memory as long as any part of it.
                    part = memoryview(data)[request.start - start : request.stop - start]
                    request.result.set_result(data if len(requests) == 1 else page_copy(part))
        except asyncio.CancelledError:  # the queue is closed, or the loop ends
            self._heap.clear()
            for request in requests:
                request.result.cancel()
            raise
        except BaseException as error:
            for request in requests:
                if not request.result.done():
                    request.result.set_exception(error)
                    request.result.exception()  # so that asyncio does not complain if nobody waits any more


class RangeQueues:
    """The queue of each connection."""

    def __init__(self, storage: Storage) -> None:
        self._cache = None if storage.cache is None else DiskCache(storage.cache.path, storage.cache.limit)
        self._queues: dict[Connection, RangeQueue] = {}

    def get(self, connection: Connection) -> RangeQueue:
        if connection not in self._queues:
            self._queues[connection] = RangeQueue(connection, self._cache)
        return self._queues[connection]

    @property
    def connections(self) -> list[Connection]:
        return list(self._queues)

    def stats(self) -> StorageStats:
        """What was read so far."""
        return sum((queue.traffic() for queue in self._queues.values()), StorageStats())

    def close(self) -> None:
        """Read nothing more."""
        for connection, queue in self._queues.items():
            connection.soon(queue.close)


async def drive(reading: Reading[Read], read: Callable[[Range], Coroutine[Any, Any, Data]]) -> Read:
    """Read the ranges that a sans-I/O reader requests, until it returns its result."""
    try:
        ranges = next(reading)
        while True:
            ranges = reading.send(await together(read(requested) for requested in ranges))
    except StopIteration as end:
        value: Read = end.value
        return value
