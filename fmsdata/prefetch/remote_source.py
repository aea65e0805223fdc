"""The remote shards of a source: where their blocks are, and how they are fetched."""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa

from fmsdata.core.blocks import Address, Block
from fmsdata.core.pages import page_memory
from fmsdata.core.ranges import Range
from fmsdata.core.tokens import Tokens
from fmsdata.formats import open_shard, read_layout
from fmsdata.formats.base import Blocks, Data, Decoded, Keep, Layout, Reading, Shard
from fmsdata.formats.fetched import PartlyKnown
from fmsdata.planning.blocks import BlockPlan
from fmsdata.prefetch.decoded import DecodedBatches
from fmsdata.prefetch.range_queue import NOW, RangeQueue, RangeQueues, RemoteFile, Urgency
from fmsdata.prefetch.shard_files import ShardFiles
from fmsdata.storage.connection import Connection
from fmsdata.storage.io_thread import together
from fmsdata.storage.mapped import MappedFile

Value = TypeVar("Value")
LAYOUT_BYTES = 64 << 20  # of layouts that are kept
KNOWN_BYTES = 8 << 20  # of the ends of their files
OFFSET_BYTES = 8  # at most, for the place of one document
DENSE = 128  # layouts with the places of all documents are read if they are at most this part of what is read with them
MOST_OFFSETS = 16 << 20  # bytes of a source that are kept
COPY_BYTES = 1 << 20  # of a layout, roughly
PART = 1 << 20  # bytes of a request, when a shard is fetched whole


class RemoteSource:
    """The shards of one source: how they are cut into blocks, and their layouts.

    `share` of the blocks are read by this process. Nothing is opened before something is fetched:
    the process that opens lanes need not be the one that reads them.
    """

    def __init__(
        self,
        *,
        files: ShardFiles,
        plan: BlockPlan,
        source: str,
        share: float,
        queues: RangeQueues,
        layouts: "LayoutCache",
        decoded: DecodedBatches,
    ) -> None:
        self._files, self._plan, self._source = files, plan, source
        self._queues, self._layouts, self._decoded = queues, layouts, decoded
        self.stored = files.stored  # bytes
        self.tokens = files.tokens  # of an epoch
        self.text = files.counts.text
        offsets = OFFSET_BYTES * int(plan.documents.sum())
        self._dense = offsets <= min(MOST_OFFSETS, self.stored * share / DENSE)

    @property
    def blocks(self) -> int:
        return self._plan.blocks

    @property
    def shards(self) -> int:
        return len(self._files.entries)

    def size(self, address: Address) -> int:
        """About how many bytes a block has."""
        if self.text:  # it may be compressed
            return int(self._plan.tokens(address))
        documents = int(self._plan.documents[address.shard])
        return -(-self._files.entries[address.shard].size * (address.stop - address.first) // documents)

    def fetch(self, address: Address, urgency: Urgency) -> "Future[Block[Tokens]]":
        """Fetch a block."""
        return self._connection.start(self.read_block(address, urgency))

    def fetch_shard(self, shard: int, urgency: Urgency) -> "Future[pa.Buffer]":
        """Fetch all bytes of a shard."""
        return self._connection.start(self._read_shard(shard, urgency))

    def fetch_range(self, shard: int, start: int, stop: int) -> "Future[Data]":
        """Fetch some bytes of a shard."""
        return self._connection.start(self.queue.read(self._remote(shard), Range(start, stop), Urgency(NOW)))

    def start_all(self, work: "Sequence[tuple[Coroutine[Any, Any, Value], Future[Value]]]") -> None:
        """Start coroutines of any sources, in the event loop that all of them share."""
        self._connection.start_all(work)

    def hurry(self, urgency: Urgency) -> None:
        """Something is needed now."""
        self._connection.soon(self.queue.hurry, urgency)

    def open_shard(self, shard: int, data: pa.Buffer) -> Shard:
        """A shard that was fetched whole, checked against its counts."""
        url = self._connection.url(self._remote(shard).path)
        opened = open_shard(data, url, self._files.column, remote=True, index=self._files.lines.get(shard))
        self._require(shard, opened)
        return opened

    async def read_block(self, address: Address, urgency: Urgency) -> Block[Tokens]:
        layout = await self._layouts.get(self, address.shard, urgency)
        block = await self._drive(layout.block(address.first, address.stop), address.shard, urgency)
        if self.text:
            self._decoded.count_copied(sum(array.nbytes for array in block.arrays))
        return block

    async def read_layout(self, shard: int, urgency: Urgency) -> Layout:
        await self._check_version(shard)
        file = self._remote(shard)
        if shard in self._files.copies:
            layout: Layout = CopyLayout(self._files.copies[shard], partial(self._keep, shard))
        else:
            reading = read_layout(
                self._connection.url(file.path),
                file.size,
                self._files.column,
                self._plan.bounds(shard),
                dense=self._dense,
                index=self._files.lines.get(shard),
                keep=partial(self._keep, shard),
            )
            layout = await self._drive(reading, shard, urgency)
        self._require(shard, layout)
        return layout

    @cached_property
    def _connection(self) -> Connection:
        return self._files.location.connection

    @cached_property
    def queue(self) -> RangeQueue:
        return self._queues.get(self._connection)

    def _remote(self, shard: int) -> RemoteFile:
        entry = self._files.entries[shard]
        path = self._connection.path(f"{self._files.location.url}/{entry.name}")
        return RemoteFile(path, entry.size, entry.version, f"source {self._source!r}")

    def _require(self, shard: int, opened: Shard | Layout) -> None:
        self._files.require(shard, opened, self._source)

    async def _read_shard(self, shard: int, urgency: Urgency) -> pa.Buffer:
        await self._check_version(shard)
        file = self._remote(shard)
        data = page_memory(file.size)

        async def read(part: Range) -> None:
            data[part.start : part.stop] = await self.queue.read(file, part, urgency)

        await together(read(Range(start, min(start + PART, file.size))) for start in range(0, file.size, PART))
        return pa.py_buffer(data.toreadonly())

    def _keep(self, shard: int, part: int, decode: Callable[[], Decoded]) -> Decoded:
        """Keep what was decoded. Called in the event loop."""
        return self._decoded.get((self, shard, part), decode)

    async def _check_version(self, shard: int) -> None:
        """Raise if a file was replaced since it was listed, if reads do not report versions."""
        file = self._remote(shard)
        unseen = shard in self._files.copies or not self._connection.sees_versions
        if file.version is not None and unseen:
            await self._connection.check(file.path, file.version, file.owner)

    async def _drive(self, reading: Reading[Value], shard: int, urgency: Urgency) -> Value:
        return await self.queue.drive(reading, self._remote(shard), urgency)


class CopyLayout:
    """A remote file that is read from its copy on a local disk."""

    def __init__(self, path: Path, keep: Keep) -> None:
        self._shard = open_shard(MappedFile(path), str(path))
        self._shard.keep = keep
        self.text, self.documents, self.known_tokens = self._shard.text, self._shard.documents, self._shard.known_tokens
        self.nbytes = COPY_BYTES
        self.blocks: Blocks | None = None

    def block(self, first: int, stop: int) -> Reading[Block[Any]]:
        yield from ()
        return self._shard.read(first, stop)

    def tokens(self) -> Reading[int]:
        yield from ()
        return self._shard.tokens()


class LayoutCache:
    """Layouts of shards, the least recently used first.

    Concurrent requests for a layout share a single read.

    Lives in the event loop.
    """

    def __init__(self) -> None:
        self._bytes = 0
        self._kept: OrderedDict[tuple[RemoteSource, int], tuple[asyncio.Task[Layout], Urgency]] = OrderedDict()
        self._known_bytes = 0
        self._known: deque[PartlyKnown] = deque()

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
        """Cancel what is being read."""
        for task, _ in list(self._kept.values()):
            task.cancel()

    def _settle(self, key: "tuple[RemoteSource, int]", task: "asyncio.Task[Layout]") -> None:
        if task.cancelled() or task.exception() is not None:  # the next request tries again
            del self._kept[key]
            return
        layout = task.result()
        self._bytes += layout.nbytes
        if isinstance(layout, PartlyKnown):
            self._known.append(layout)
            self._known_bytes += layout.known
            while self._known_bytes > KNOWN_BYTES:
                oldest = self._known.popleft()
                self._known_bytes -= oldest.known
                oldest.forget()
        for old, (kept, _) in list(self._kept.items()):
            if self._bytes <= LAYOUT_BYTES:
                break
            if kept.done() and kept is not task:
                del self._kept[old]
                self._bytes -= kept.result().nbytes
