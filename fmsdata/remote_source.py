"""The shards of a source that are not on a local disk: where their blocks are, and how they are had."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple, TypeVar

import pyarrow as pa

from fmsdata.connection import Connection
from fmsdata.fetch import NOW, RangeQueue, RemoteFile, Urgency, drive
from fmsdata.io_thread import together
from fmsdata.plan import Plan
from fmsdata.readers import ArrowShard, Layout, Reading, read_layout
from fmsdata.readers.ranges import FetchedBlock, Range

Value = TypeVar("Value")
PLACE = 8  # bytes at most that tell where a document is
DENSE = 128  # layouts with places of all documents are read if they are at most this part of what is read with them
MOST_PLACES = 16 << 20  # bytes of a source that are kept
PART = 1 << 20  # bytes of a shard that are asked for at once, if all of it is


class Address(NamedTuple):
    """A block: some documents of a shard."""

    shard: int
    first: int
    stop: int


class RemoteSource:
    """The shards of one source: where they are, how they are cut into blocks, and their layouts."""

    def __init__(
        self,
        connection: Connection,
        queue: RangeQueue,
        layouts: "Layouts",
        files: Sequence[RemoteFile],
        column: str | None,
        plan: Plan,
        check: Callable[[int, int, int | None], None],
        share: float,
    ) -> None:
        """`check` raises if a shard has other documents than so many, or, where they are known, other tokens.

        `share` of the blocks are read by this process.
        """
        places = PLACE * sum(plan.documents)
        self._dense = places <= min(MOST_PLACES, sum(file.size for file in files) * share / DENSE)
        self._connection, self.queue, self._layouts = connection, queue, layouts
        self._files, self._column, self._plan, self._check = files, column, plan, check

    @property
    def stored(self) -> int:
        """Bytes of all shards."""
        return sum(file.size for file in self._files)

    @property
    def blocks(self) -> int:
        return self._plan.blocks

    @property
    def shards(self) -> int:
        return len(self._files)

    def size(self, address: Address) -> int:
        """About how many bytes a block has."""
        documents = self._plan.documents[address.shard]
        return -(-self._files[address.shard].size * (address.stop - address.first) // documents)

    def fetch(self, address: Address, urgency: Urgency) -> "Future[FetchedBlock]":
        return self._connection.start(self.block(address, urgency))

    def begin(self, work: "Sequence[tuple[Coroutine[Any, Any, Value], Future[Value]]]") -> None:
        """Fetch many blocks, of any sources, in the loop that all of them are read in."""
        self._connection.start_all(work)

    def fetch_shard(self, shard: int, urgency: Urgency) -> "Future[pa.Buffer]":
        """All of a shard."""
        return self._connection.start(self._whole(shard, urgency))

    def open_shard(self, shard: int, data: pa.Buffer) -> ArrowShard:
        """A shard that was fetched, held against its counts."""
        opened = ArrowShard(data, self._connection.url(self._files[shard].path), self._column)
        self._check(shard, opened.documents, opened.known_tokens)
        return opened

    def hurry(self, urgency: Urgency) -> None:
        self._connection.soon(self.queue.hurry, urgency)

    def fetch_range(self, shard: int, start: int, stop: int) -> "Future[bytes]":
        return self._connection.start(self.queue.read(self._files[shard], Range(start, stop), Urgency(NOW)))

    async def _whole(self, shard: int, urgency: Urgency) -> pa.Buffer:
        await self._check_version(shard)
        file = self._files[shard]
        data = bytearray(file.size)

        async def read(wanted: Range) -> None:
            data[wanted.start : wanted.stop] = await self.queue.read(file, wanted, urgency)

        await together(read(Range(start, min(start + PART, file.size))) for start in range(0, file.size, PART))
        return pa.py_buffer(memoryview(data).toreadonly())

    async def block(self, address: Address, urgency: Urgency) -> FetchedBlock:
        layout = await self._layouts.get(self, address.shard, urgency)
        return await self._drive(layout.block(address.first, address.stop), address.shard, urgency)

    async def read_layout(self, shard: int, urgency: Urgency) -> Layout:
        await self._check_version(shard)
        file = self._files[shard]
        bounds = self._plan.bounds(shard)
        reading = read_layout(self._connection.url(file.path), file.size, self._column, bounds, dense=self._dense)
        layout = await self._drive(reading, shard, urgency)
        self._check(shard, layout.documents, layout.known_tokens)
        return layout

    async def _check_version(self, shard: int) -> None:
        """Where reads do not tell of which version they are."""
        file = self._files[shard]
        if file.version is not None and not self._connection.sees_versions:
            await self._connection.check(file.path, file.version, file.what)

    async def _drive(self, reading: Reading[Value], shard: int, urgency: Urgency) -> Value:
        file = self._files[shard]
        return await drive(reading, lambda wanted: self.queue.read(file, wanted, urgency))


class Layouts:
    """Layouts of shards, those used last: each is read once, whoever asks for it meanwhile. Lives in the loop."""

    def __init__(self, limit: int) -> None:
        self._limit, self._bytes = limit, 0
        self._kept: OrderedDict[tuple[RemoteSource, int], tuple[asyncio.Task[Layout], Urgency]] = OrderedDict()

    async def get(self, source: RemoteSource, shard: int, urgency: Urgency) -> Layout:
        key = source, shard
        if key in self._kept:
            self._kept.move_to_end(key)
        else:
            own = Urgency(urgency.due)
            task = asyncio.get_running_loop().create_task(source.read_layout(shard, own))
            self._kept[key] = task, own
            task.add_done_callback(partial(self._settle, key))
        task, own = self._kept[key]
        urgency.behind = own
        if urgency.due < own.due:
            source.queue.hurry(own)
        return await asyncio.shield(task)

    def close(self) -> None:
        """Nobody waits for what is not there yet."""
        for task, _ in list(self._kept.values()):
            task.cancel()

    def _settle(self, key: "tuple[RemoteSource, int]", task: "asyncio.Task[Layout]") -> None:
        if task.cancelled() or task.exception() is not None:  # who asks next tries again
            del self._kept[key]
            return
        self._bytes += task.result().nbytes
        for old, (one, _) in list(self._kept.items()):
            if self._bytes <= self._limit:
                break
            if one.done() and one is not task:
                del self._kept[old]
                self._bytes -= one.result().nbytes
