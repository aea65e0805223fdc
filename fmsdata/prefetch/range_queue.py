"""Ranges of remote files, fetched in the order of urgency: a few at a time, neighbours together.

All of it runs in the loop of a connection, and so needs no locks.
"""

import asyncio
import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, NamedTuple, TypeAlias, TypeVar

from fmsdata.core.ranges import Range
from fmsdata.formats.base import Reading
from fmsdata.storage.connection import Connection
from fmsdata.storage.disk_cache import DiskCache
from fmsdata.storage.io_thread import together
from fmsdata.storage.settings import Storage
from fmsdata.storage.stats import StorageStats

Read = TypeVar("Read")
MERGED_BYTES = 4 << 20  # that one request may have: more would keep others waiting
GAP = 32  # what lies between two ranges is read along if it is at most this part of them
Priority: TypeAlias = tuple[float, int, float]  # the least first
NOW: Priority = (-math.inf, 0, 0.0)


class RemoteFile(NamedTuple):
    """A file as it was listed."""

    path: str  # as its filesystem knows it
    size: int
    version: str | None
    what: str  # whose it is, for errors


@dataclass(eq=False)
class Urgency:
    """When something is needed. It may turn out to be needed sooner, see `RangeQueue.hurry`."""

    due: Priority
    requests: "set[_Request]" = field(default_factory=set)  # that are made for it
    behind: "Urgency | None" = None  # something else that it waits for


@dataclass(eq=False)
class _Request:
    file: RemoteFile
    start: int
    stop: int
    answer: "asyncio.Future[bytes]" = field(repr=False)
    waiting: bool = True  # for a connection
    users: int = 0  # who want it


class RangeQueue:
    """Reads ranges of files: at most `connections` requests at a time, the most urgent first.

    Ranges of one file that are next to each other are read by one request. What is in the cache is taken from there.
    """

    def __init__(self, connection: Connection, connections: int, cache: DiskCache | None) -> None:
        self._connection, self._free, self._cache = connection, connections, cache
        self._heap: list[tuple[Priority, int, _Request]] = []
        self._numbers = count()  # what is equally urgent is read in the order in which it was asked for
        self._asked: dict[tuple[str, int, int], _Request] = {}  # who wants the same waits for the same request
        self._waiting: dict[str, list[tuple[int, int, _Request]]] = {}  # of each file, by place
        self._running: set[asyncio.Task[None]] = set()
        self._closed = False
        self._cached_bytes = 0
        self._looking, self._keeping = asyncio.Semaphore(4), asyncio.Lock()  # in the cache: it's one disk
        self._before = replace(connection.traffic)

    async def read(self, file: RemoteFile, wanted: Range, urgency: Urgency) -> bytes:
        if self._closed:
            raise asyncio.CancelledError
        if wanted.start >= wanted.stop:
            return b""
        cache, key = self._cache if file.version is not None else None, ""
        if cache is not None:
            key = f"{self._connection.url(file.path)}|{file.version}|{wanted.start}-{wanted.stop}"
            async with self._looking:
                found = await asyncio.to_thread(cache.get, key, wanted.stop - wanted.start)
            if found is not None:
                self._cached_bytes += len(found)
                return found
        same = file.path, *wanted
        request = self._asked.get(same)
        if request is None:
            request = self._asked[same] = _Request(file, *wanted, asyncio.get_running_loop().create_future())
            insort(self._waiting.setdefault(file.path, []), (wanted.start, next(self._numbers), request))
        request.users += 1
        urgency.requests.add(request)
        if request.waiting:
            self._push(request, urgency)
            self._dispatch()
        try:
            data = await asyncio.shield(request.answer)
        finally:
            urgency.requests.discard(request)
            request.users -= 1
            if not request.users:
                del self._asked[same]
                if request.waiting:
                    self._remove(request)
        if cache is not None:
            async with self._keeping:
                await asyncio.to_thread(cache.put, key, data)
        return data

    def hurry(self, urgency: Urgency) -> None:
        """Read this before all that is not needed yet."""
        urgency.due = NOW
        for request in urgency.requests:
            if request.waiting:
                self._push(request, urgency)
        if urgency.behind is not None:
            self.hurry(urgency.behind)

    def close(self) -> None:
        """Whatever was asked for is not wanted any more, nor what will be."""
        self._closed = True
        self._heap.clear()
        for request in self._asked.values():  # also those that a task which never began should have read
            request.answer.cancel()
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
        while self._free and self._heap:
            _, _, request = heapq.heappop(self._heap)
            if not request.waiting:
                continue
            together = self._with_neighbours(request)
            for one in together:
                self._remove(one)
            self._free -= 1
            task = asyncio.get_running_loop().create_task(self._fetch(together))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    def _with_neighbours(self, request: _Request) -> list[_Request]:
        """The request, and those before and behind it that can be read along."""
        waiting = self._waiting[request.file.path]
        first = last = self._place(request)
        start, stop, useful = request.start, request.stop, request.stop - request.start
        while True:
            for other, step in ((last + 1, 1), (first - 1, -1)):
                if not 0 <= other < len(waiting):
                    continue
                one = waiting[other][2]
                begin, end = min(start, one.start), max(stop, one.stop)
                more = useful + one.stop - one.start
                if end - begin <= MERGED_BYTES and (end - begin - more) * GAP <= more:
                    start, stop, useful = begin, end, more
                    first, last = (first, other) if step > 0 else (other, last)
                    break
            else:
                return [one for _, _, one in waiting[first : last + 1]]

    def _remove(self, request: _Request) -> None:
        request.waiting = False
        waiting = self._waiting[request.file.path]
        del waiting[self._place(request)]
        if not waiting:
            del self._waiting[request.file.path]

    def _place(self, request: _Request) -> int:
        """Where among the waiting ones of its file a request is."""
        waiting = self._waiting[request.file.path]
        place = bisect_left(waiting, request.start, key=lambda one: one[0])
        while waiting[place][2] is not request:
            place += 1
        return place

    async def _fetch(self, requests: Sequence[_Request]) -> None:
        file = requests[0].file
        start, stop = min(one.start for one in requests), max(one.stop for one in requests)
        try:
            data = (await self._connection.read(file.path, start, stop, file.version, file.what)).data
            for one in requests:
                if not one.answer.done():
                    # A copy: a view would keep all of the data as long as any part of it.
                    one.answer.set_result(data if len(requests) == 1 else data[one.start - start : one.stop - start])
        except asyncio.CancelledError:  # the loop ends
            self._heap.clear()
            for one in requests:
                one.answer.cancel()
            raise
        except BaseException as error:
            for one in requests:
                if not one.answer.done():
                    one.answer.set_exception(error)
                    one.answer.exception()  # it is no matter if nobody wants to know any more
        finally:
            self._free += 1
            self._dispatch()


class RangeQueues:
    """The queue of each connection."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._cache = None if storage.cache is None else DiskCache(storage.cache.path, storage.cache.limit)
        self._queues: dict[Connection, RangeQueue] = {}

    def get(self, connection: Connection) -> RangeQueue:
        if connection not in self._queues:
            self._queues[connection] = RangeQueue(connection, self._storage.connections, self._cache)
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


async def drive(reading: Reading[Read], read: Callable[[Range], Coroutine[Any, Any, bytes]]) -> Read:
    """Answer what a reader asks for."""
    try:
        wanted = next(reading)
        while True:
            wanted = reading.send(await together(read(one) for one in wanted))
    except StopIteration as end:
        value: Read = end.value
        return value
