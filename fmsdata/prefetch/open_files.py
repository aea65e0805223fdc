"""Open files: what the lanes that are read together share, mapped shards and fetched blocks.

`OpenFiles` is the host of its lanes. It decides how the blocks of a source are read: from mapped
files if they are local, else through the prefetch buffer.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from fmsdata.core.blocks import Address, Block, BlockName, InShards, LaneBlocks, Located, read_each
from fmsdata.core.keys import Ints
from fmsdata.core.lane import Lane
from fmsdata.core.memory import MappedTokens
from fmsdata.core.tokens import StoredTokens
from fmsdata.errors import DataError
from fmsdata.formats import open_shard
from fmsdata.formats.arrow.shard import Batches, Lengths
from fmsdata.formats.base import Decoded, Shard
from fmsdata.planning.lane_order import LaneOrder
from fmsdata.prefetch.buffer import PrefetchBuffer
from fmsdata.prefetch.decoded import DecodedBatches
from fmsdata.prefetch.look_ahead import LookAhead
from fmsdata.prefetch.remote_source import RemoteSource
from fmsdata.prefetch.shard_files import ShardFiles
from fmsdata.storage.local import Recent
from fmsdata.storage.mapped import SMALL, MappedFile, MappedFiles, Versions, most_mappings
from fmsdata.storage.settings import Storage
from fmsdata.storage.stats import StorageStats

LEAST_OPEN, MOST_OPEN = 256, 4096  # shards: opening one again takes longer than reading a block of it
MAPPINGS_SHARE = 1 / 16  # of all that a process may have
OPEN_BYTES = 128 << 20  # of memory for more than the least
SHARD_BYTES, DOCUMENT_BYTES = 1 << 12, 24  # that an open shard takes, roughly, besides small files


def _ignore(block: BlockName) -> None:
    """The default: nothing is done with it."""


def _memory(opened: tuple[MappedFile, Shard]) -> int:
    file, shard = opened
    return SHARD_BYTES + DOCUMENT_BYTES * shard.documents + (file.size if file.size <= SMALL else 0)


class OpenFiles:
    """The most recently used local shards, mapped, and blocks of remote shards.

    `share` of the run's lanes are read together. Nothing is opened before it is read. `versions`
    are those of the run: a file must look as it did when any part of the run first opened it.
    """

    def __init__(
        self, share: float = 0.0, on_read: Callable[[BlockName], None] = _ignore, versions: Versions | None = None
    ) -> None:
        most = max(LEAST_OPEN, min(MOST_OPEN, int(most_mappings() * MAPPINGS_SHARE)))
        self.shards: Recent[tuple[MappedFile, Shard]] = Recent(most, LEAST_OPEN, OPEN_BYTES, _memory)
        self.mapped = MappedFiles(versions)
        self._shared: Recent[Any] = Recent(most)
        self.reading_now: BlockName | None = None  # the last block that a lane began to read
        self._on_read = on_read
        self.share = share
        self._local: dict[object, MappedBlocks] = {}
        self._buffers: dict[Storage, PrefetchBuffer] = {}
        self._remote: dict[object, RemoteSource] = {}
        self._decoded: dict[int, DecodedBatches] = {}  # by their budget

    def shared(self, key: object, make: Callable[[], Any]) -> Any:
        """What lanes have in common under a key, made by the first of them."""
        return self._shared.get(key, make)

    def reading(self, block: BlockName) -> None:
        """Called with each block before it is read."""
        self.reading_now = block
        self._on_read(block)

    def open_blocks(self, files: ShardFiles, order: LaneOrder, lane: Lane) -> LaneBlocks:
        """The blocks of a source, for a lane that reads them in this order."""
        if files.location.local is not None:
            local = self._local.get((files, order.source))
            if local is None:
                local = self._local[files, order.source] = MappedBlocks(self, files, order.source)
            return local
        buffer = self._buffer(files.location.storage)
        key = files, order.plan
        if key not in self._remote:
            self._remote[key] = RemoteSource(
                files=files,
                plan=order.plan,
                source=order.source,
                share=self.share,
                queues=buffer.queues,
                layouts=buffer.layouts,
                decoded=buffer.decoded,
            )
        return RemoteBlocks(buffer, self._remote[key], order, lane)

    def decoded(self, storage: Storage) -> DecodedBatches:
        """What was decoded of compressed shards on a local disk."""
        if storage.prefetch_bytes not in self._decoded:
            self._decoded[storage.prefetch_bytes] = DecodedBatches(storage.prefetch_bytes)
        return self._decoded[storage.prefetch_bytes]

    def stats(self) -> StorageStats:
        """What was fetched so far."""
        return sum((buffer.stats() for buffer in self._buffers.values()), StorageStats())

    def close(self) -> None:
        """Fetch nothing more."""
        for buffer in self._buffers.values():
            buffer.close()

    def _buffer(self, storage: Storage) -> PrefetchBuffer:
        if storage not in self._buffers:
            self._buffers[storage] = PrefetchBuffer(storage, all_lanes=self.share == 1)
        return self._buffers[storage]


class MappedBlocks:
    """The blocks of shards on a local disk, which are mapped into memory."""

    tokens_at_once = math.inf

    def __init__(self, opened: OpenFiles, files: ShardFiles, source: str) -> None:
        self._opened, self._files, self._source = opened, files, source
        self._unchecked: set[MappedFile] = set()  # files that blocks were read from

    def start(self, place: int) -> None:
        pass

    def read(self, place: int, address: Address) -> Block[StoredTokens]:  # noqa: ARG002
        block = self._read(address)
        if isinstance(block.arrays[0], MappedTokens):
            return block
        return self._opened.decoded(self._files.location.storage).lend(block, partial(self._read_checked, address))

    def read_all(self, place: int, addresses: Ints, announce: Callable[[Address], None]) -> Located | InShards:
        shards = np.sort(addresses[:, 0])
        shards = shards[np.append(True, shards[1:] != shards[:-1])]
        found = InShards([], shards.tolist(), [], [], shards.searchsorted(addresses[:, 0]), addresses[:, 1].copy())
        for which, number in enumerate(found.shards):
            opening = partial(self._announce_and_open, number, addresses, announce)
            file, shard = self._opened.shards.get((self._files, number), opening)
            if not isinstance(shard, Batches) or not shard.plain or not isinstance(shard.whole, MappedTokens):
                return read_each(self, place, addresses, announce)
            table = shard.table
            if table is None:
                here = (found.shard == which).nonzero()[0]
                located = self._locate(file, shard, addresses.take(here, axis=0), announce)
                if located is None:
                    return read_each(self, place, addresses, announce)
                table, found.row[here] = located[:2], located[2]
            found.arrays.append(shard.whole)
            found.starts.append(table[0])
            found.lengths.append(table[1])
        return found

    def check(self) -> None:
        for file in self._unchecked:
            file.check()
        self._unchecked.clear()

    def look_up(self, address: Address) -> Block[StoredTokens]:
        block = self.read(0, address)
        self.check()
        return block

    def _read_checked(self, address: Address) -> Block[StoredTokens]:
        block = self._read(address)
        self.check()
        return block

    def _read(self, address: Address) -> Block[StoredTokens]:
        file, shard = self._get(address.shard)
        try:
            return shard.read(address.first, address.stop)
        except DataError:  # perhaps it has changed
            file.check()
            raise

    def _locate(
        self, file: MappedFile, shard: Batches, blocks: Ints, announce: Callable[[Address], None]
    ) -> tuple[Ints, Lengths, Ints] | None:
        """`Batches.locate`, which reads from the file."""
        announce(Address(*blocks[0].tolist()))
        self._unchecked.add(file)
        try:
            return shard.locate(blocks[:, 1], blocks[:, 2])
        except DataError:  # perhaps it has changed
            file.check()
            raise

    def _get(self, shard: int) -> tuple[MappedFile, Shard]:
        file, opened = self._opened.shards.get((self._files, shard), lambda: self._open(shard))
        self._unchecked.add(file)
        return file, opened

    def _announce_and_open(
        self, shard: int, blocks: Ints, announce: Callable[[Address], None]
    ) -> tuple[MappedFile, Shard]:
        announce(Address(*blocks[(blocks[:, 0] == shard).argmax()].tolist()))
        return self._open(shard)

    def _open(self, shard: int) -> tuple[MappedFile, Shard]:
        files = self._files
        path = files.path(shard)
        file = self._opened.mapped.get(path)
        with file:
            files.require_size(shard, file.size, self._source)
            if shard in files.copies:
                copy = files.copies[shard]
                opened = open_shard(self._opened.mapped.get(copy), str(copy))
            else:
                opened = open_shard(file, str(path), files.column, index=files.lines.get(shard))
            files.require(shard, opened, self._source)
        opened.keep = partial(self._keep, shard)
        return file, opened

    def _keep(self, shard: int, part: int, decode: Callable[[], Decoded]) -> Decoded:
        return self._opened.decoded(self._files.location.storage).get((self._files, shard, part), decode)


class RemoteBlocks:
    """The blocks of remote shards, which are fetched ahead."""

    def __init__(self, buffer: PrefetchBuffer, source: RemoteSource, order: LaneOrder, lane: Lane) -> None:
        self._buffer, self._source, self._order, self._lane = buffer, source, order, lane
        self._look_ahead: LookAhead | None = None

    @property
    def tokens_at_once(self) -> float:
        return 0 if self._look_ahead is None else self._buffer.tokens_at_once(self._look_ahead)

    def start(self, place: int) -> None:
        self._look_ahead = self._buffer.look_ahead(self._source, self._order, self._lane, place)

    def read(self, place: int, address: Address) -> Block[StoredTokens]:
        if self._look_ahead is None:
            return self.look_up(address)
        return self._buffer.read(self._look_ahead, place, address)

    def read_all(self, place: int, addresses: Ints, announce: Callable[[Address], None]) -> Located:
        return read_each(self, place, addresses, announce)

    def check(self) -> None:
        """Reads name the version that they want: other bytes are never returned."""

    def look_up(self, address: Address) -> Block[StoredTokens]:
        return self._buffer.look_up(self._source, address)
