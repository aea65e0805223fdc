"""ShardReader: the documents of one source, in the order that the plan gives this lane."""

import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fmsdata.arguments import whole
from fmsdata.chunk import BEGINS, BUFFER, COLUMNS, DOCUMENT, LENGTH, POSITION, START, TAIL, Buffer, Chunk
from fmsdata.connection import Connection
from fmsdata.counts import read_counts
from fmsdata.courses import Course, Step, Turn
from fmsdata.errors import ConfigError, CountsError, DataError, StateError
from fmsdata.fetch import RemoteFile
from fmsdata.files import Files
from fmsdata.keys import Ints, key_of, mix, mix_array, offsets
from fmsdata.location import Location
from fmsdata.plan import LaneOrder, Plan, cut_blocks
from fmsdata.readers import ArrowShard, Block, StoredTokens, Tokens, open_shard
from fmsdata.remote_source import Address, RemoteSource
from fmsdata.stage import Exhausted, Lane, Size, Stage, StageIterator, State, number
from fmsdata.storage import Mapped
from fmsdata.storage_settings import Storage

BLOCK_TOKENS = 1 << 18
CHUNK_DOCUMENTS, CHUNK_TOKENS = 1024, 1 << 20  # blocks are read together, until there are this many of either

NOTHING = np.empty(0, np.int64)
BLOCK_BITS, KEY_BITS = np.uint64(16), np.uint64(48)  # documents are sorted by block, then by key


class ShardReader(Stage):
    """The documents of a folder of shards, endlessly: each exactly once per epoch, in another order each epoch.

    `strip` removes these tokens at either end of a document, as many as stand there; documents shorter than
    `min_length` after that are skipped, and so are empty ones. After `max_epochs` epochs, of which the last need not
    be whole, it ends. `folder` is what a saved state remembers of where it is, for when it is removed from the mix.

    The folder may be on any filesystem that fsspec knows: `storage_options` are for that filesystem, such as
    credentials, and `storage` tells how it is read. Neither changes what comes.

    >>> reader = ShardReader("corpus/web", strip=[0], min_length=8)             # doctest: +SKIP
    >>> reader = ShardReader("s3://bucket/corpus/web", storage_options={"anon": True})     # doctest: +SKIP
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | Location,
        *,
        name: str | None = None,
        column: str | None = None,
        strip: Collection[int] = (),
        min_length: int = 1,
        block_tokens: int = BLOCK_TOKENS,
        max_epochs: float | None = None,
        folder: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
        storage: Storage | None = None,
    ) -> None:
        location = Location(path, storage_options, storage)
        self.path = location.alone()  # a reader outlives what was listed to plan it
        self.name = name or self.path.name
        self.column = column
        if isinstance(strip, str | bytes) or not isinstance(strip, Collection):
            raise ConfigError(f"strip is {strip!r}; it must be a list of tokens")
        self.strip = tuple(sorted({whole("a token to strip", token) for token in strip}))
        self.min_length = whole("min_length", min_length)
        self.block_tokens = whole("block_tokens", block_tokens, least=1)
        self.max_epochs = _checked_epochs(max_epochs)
        self.folder = folder
        self.counts = read_counts(location, column)
        self.entries = self.counts.entries
        if not self.counts.documents.sum():
            raise DataError(f"{self.path}: its {len(self.counts.shards)} shards hold no documents")

    def open(self, lane: Lane, state: State | None = None) -> StageIterator:
        return _ReaderIterator(self, lane, state)

    def children(self) -> Mapping[str, Stage]:
        return {}

    def parameters(self) -> State:
        size = self.size()
        return {
            "shards": len(self.counts.shards),
            "documents": size.documents,
            "tokens": size.tokens,
            "digest": self.counts.digest,
            "column": self.column,
            "strip": list(self.strip),
            "min_length": self.min_length,
            "block_tokens": self.block_tokens,
            "max_epochs": self.max_epochs,
            "folder": self.folder,
        }

    def describe(self, source: str = "") -> State:
        return {**super().describe(source), "source": source or self.name}

    def size(self) -> Size:
        return Size(int(self.counts.documents.sum()), int(self.counts.tokens.sum()))

    def ends(self) -> bool:
        return self.max_epochs is not None

    def open_shard(self, shard: int, source: str, mapped: Mapped) -> ArrowShard:
        """Open a shard and hold it against its counts."""
        name = self.counts.shards[shard]
        if self.path.local is None:
            raise RuntimeError(f"{self.path} is not local, and is read by ranges")
        opened = open_shard(self.path.local / name, self.column, mapped)
        self.check_counts(source, shard, opened.documents, opened.known_tokens)
        return opened

    def remote_source(self, files: Files, source: str, plan: Plan) -> RemoteSource:
        """The shards, if they are remote, as those who share these files read them."""
        key = self, plan
        if key not in files.sources:
            connection = Connection.to(self.path.url, self.path.options, self.path.storage)
            shards = [
                RemoteFile(connection.path(f"{self.path.url}/{one.name}"), one.size, one.version, f"source {source!r}")
                for one in self.entries
            ]
            shelf, check = files.shelf(self.path.storage), partial(self.check_counts, source)
            files.sources[key] = RemoteSource(
                connection, shelf.queue(connection), shelf.layouts, shards, self.column, plan, check, files.share
            )
        return files.sources[key]

    def check_counts(self, source: str, shard: int, documents: int, tokens: int | None) -> None:
        """Raise if a shard does not hold what its counts say."""
        for what, said, found in (
            ("documents", int(self.counts.documents[shard]), documents),
            ("tokens", int(self.counts.tokens[shard]), tokens),
        ):
            if found is not None and found != said:
                way_out = f"run `fmsdata index` to rebuild the counts (they are in {self.counts.csv_root}/meta)"
                raise CountsError(
                    f"source {source!r}: counts say {said} {what} in {self.counts.shards[shard]} but the file holds "
                    f"{found}; " + (way_out if self.counts.csv_root else "it changed since this reader counted it")
                )


class _LaneBlock(NamedTuple):
    """The documents of a block, as they lie in the shard."""

    first: int  # the number of its first document
    buffers: list[Buffer]
    array: Ints
    start: Ints
    length: Ints
    stripped: Ints  # tokens left out at the start of each document
    key: int


class _ReaderIterator(StageIterator):
    """The state is which block of this lane comes next, and which document in it."""

    def __init__(self, reader: ShardReader, lane: Lane, state: State | None) -> None:
        self._reader = reader
        self._lane = lane
        self._source = lane.source or reader.name
        self._plan = cut_blocks(reader.counts, lane.count, reader.block_tokens)
        self._order = LaneOrder(
            self._plan.blocks, lane=lane.index, lanes=lane.count, seed=lane.seed, source=self._source
        )
        self._last = self._order.places(reader.max_epochs)  # how many blocks there are for this lane
        self._place = number(state, "block")  # the block to read next
        self._visited = number(state, "document")  # documents of it that were visited before
        self._blocks = (_Mapped if reader.path.local else _Fetched)(reader, lane, self._source, self._plan)
        if self._last > self._place:
            self._blocks.start(self._place, self._step)
        # Documents to read at once. Grows, so that a rare source starts fast and a frequent one runs fast.
        self._wanted = 1
        # The state before each document of the chunk, and behind the last.
        self._at = np.array([[self._place, self._visited]])

    def read(self) -> Chunk:
        empty = 0
        while True:
            blocks: list[_LaneBlock] = []
            documents = tokens = 0
            while not blocks or (documents < self._wanted and tokens < self._blocks.tokens_at_once):
                if self._place + len(blocks) >= self._last:
                    break
                place = self._place + len(blocks)
                block = self._read_block(*self._order[place], place)
                blocks.append(block)
                documents += len(block.length)
                tokens += int(block.length.sum())
            if not blocks:
                self._at = np.array([[self._place, self._visited]])
                raise Exhausted(last=self._order.has_last(self._reader.max_epochs))
            if self._visited > len(blocks[0].length):
                raise StateError(f"{self._visited} documents are visited of a block of {len(blocks[0].length)}")
            chunk = self._in_order(blocks)
            self._place, self._visited = self._place + len(blocks), 0
            self._wanted = min(2 * self._wanted, CHUNK_DOCUMENTS)
            if len(chunk):
                return chunk
            empty += len(blocks)
            if empty > self._plan.blocks:
                self._require_a_document()
                empty = 0

    def state(self, taken: int) -> State:
        block, document = self._at[taken].tolist()
        return {"block": block, "document": document}

    def _step(self, place: int) -> Step | None:
        """What is at a place of this lane."""
        if place >= self._last:
            return None
        address = Address(*self._plan.block(self._order[place][1]))
        counts = self._reader.counts
        part = (address.stop - address.first) / int(counts.documents[address.shard])
        return Step(address, part * int(counts.tokens[address.shard]))

    def _read_block(self, epoch: int, block: int, place: int | None = None) -> _LaneBlock:
        """A block: the one at this place, or one that is looked at out of order."""
        reader = self._reader
        shard, first, stop = address = Address(*self._plan.block(block))
        name = reader.counts.shards[shard]
        self._lane.reading(f"source {self._source!r}, {name}, documents {first} to {stop - 1}, lane {self._lane.index}")
        (arrays, array, start, length), kept = self._blocks.read(address, place)
        stripped = NOTHING
        if reader.strip:
            stripped, length = _strip(arrays, array, start, length, np.array(reader.strip))
        key = key_of(self._lane.seed, self._source, epoch, block)
        buffers = [Buffer(tokens, self._source, name, epoch, key) for tokens in kept]
        return _LaneBlock(first, buffers, array, start, length, stripped, key)

    def _in_order(self, blocks: list[_LaneBlock]) -> Chunk:
        """The documents of these blocks that are long enough, block by block, each block in the order of its key."""
        sizes = np.array([len(block.length) for block in blocks])
        first = offsets(sizes)
        which = np.repeat(np.arange(len(blocks)), sizes)
        place = np.arange(first[-1]) - first.take(which)
        keys = np.array([mix(block.key) for block in blocks], np.uint64).take(which)
        order = np.argsort(
            mix_array(place.astype(np.uint64) ^ keys) >> BLOCK_BITS | which.astype(np.uint64) << KEY_BITS,
            kind="stable",
        )
        length = np.concatenate([block.length for block in blocks]).take(order)
        enough = length >= max(1, self._reader.min_length)
        enough[: self._visited] = False
        kept = np.flatnonzero(enough)
        order = order.take(kept)
        spans = np.empty((len(kept), COLUMNS), np.int64)
        buffer = which
        if any(len(block.buffers) > 1 for block in blocks):
            before = offsets(np.array([len(block.buffers) for block in blocks])).take(which)
            buffer = np.concatenate([block.array for block in blocks]) + before
        spans[:, BUFFER] = buffer.take(order)
        spans[:, START] = np.concatenate([block.start for block in blocks]).take(order)
        spans[:, LENGTH] = length.take(kept)
        spans[:, DOCUMENT] = (place + np.array([block.first for block in blocks]).take(which)).take(order)
        spans[:, POSITION] = 0
        if self._reader.strip:
            spans[:, POSITION] = np.concatenate([block.stripped for block in blocks]).take(order)
            spans[:, START] += spans[:, POSITION]
        spans[:, BEGINS] = 1
        spans[:, TAIL] = 0
        # `which` and `place` also are, for each place in the order, its block and how many documents come before.
        self._at = np.empty((len(kept) + 1, 2), np.int64)
        self._at[:-1, 0] = which.take(kept) + self._place
        self._at[:-1, 1] = place.take(kept)
        self._at[-1] = self._place + len(blocks), 0
        return Chunk([buffer for block in blocks for buffer in block.buffers], spans, np.arange(len(kept) + 1))

    def _require_a_document(self) -> None:
        """Raise if no document of the whole source can ever come, instead of looking for one for ever."""
        least = max(1, self._reader.min_length)
        if not any((self._read_block(0, block).length >= least).any() for block in range(self._plan.blocks)):
            raise DataError(
                f"source {self._source!r}: none of its {self._reader.size().documents} documents has at least {least} "
                "tokens (min_length) after stripping; lower min_length or remove the source"
            )


class _Mapped:
    """The blocks of local shards."""

    tokens_at_once = CHUNK_TOKENS

    def __init__(self, reader: ShardReader, lane: Lane, source: str, plan: Plan) -> None:  # noqa: ARG002
        self._reader, self._files, self._source = reader, lane.files, source

    def start(self, place: int, step: Callable[[int], Step | None]) -> None:
        pass

    def read(self, address: Address, place: int | None) -> tuple[Block, Sequence[StoredTokens]]:  # noqa: ARG002
        reader, shard = self._reader, address.shard
        opened = self._files.shards.get(
            (reader, shard), lambda: reader.open_shard(shard, self._source, self._files.mapped)
        )
        block = opened.read(address.first, address.stop)
        return block, block.arrays


class _Fetched:
    """The blocks of remote shards."""

    def __init__(self, reader: ShardReader, lane: Lane, source: str, plan: Plan) -> None:
        self._lane, self._tokens = lane, reader.size().tokens
        self._shelf = lane.files.shelf(reader.path.storage)
        self._find = partial(reader.remote_source, lane.files, source, plan)
        self._course: Course | None = None

    @property
    def tokens_at_once(self) -> float:
        return 0 if self._course is None else min(CHUNK_TOKENS, self._shelf.tokens_at_once(self._course))

    def start(self, place: int, step: Callable[[int], Step | None]) -> None:
        lane = self._lane
        turn = Turn(lane.index, lane.burst, self._tokens / lane.count)
        self._course = self._shelf.course(self._find, step, place, lane.clock, lane.pace, turn)

    def read(self, address: Address, place: int | None) -> tuple[Block, Sequence[StoredTokens]]:
        if self._course is not None and place is not None:
            return self._shelf.read(self._course, place)
        block = self._shelf.read_once(self._find(), address)
        return block, block.arrays


def _checked_epochs(epochs: float | None) -> float | None:
    if epochs is None:
        return None
    if isinstance(epochs, bool) or not isinstance(epochs, int | float) or not 0 < epochs < math.inf:
        raise ConfigError(f"max_epochs is {epochs!r}; it must be a number above zero, or None for no end")
    return epochs


def _strip(
    arrays: list[Tokens], array: Ints, first: Ints, length: Ints, unwanted: npt.NDArray[np.int64]
) -> tuple[Ints, Ints]:
    """How many tokens to leave out at the start of each document, and how many remain after that at the end too."""
    start, stop = first.copy(), first + length
    for i, values in enumerate(arrays):
        _strip_ends(values, np.flatnonzero(array == i), start, stop, unwanted)
    return start - first, stop - start


def _strip_ends(values: npt.NDArray[Any], documents: Ints, start: Ints, stop: Ints, tokens: Ints) -> None:
    for ends, step in ((start, 1), (stop, -1)):
        active = documents
        for _ in range(8):
            active = active[start[active] < stop[active]]
            active = active[np.isin(values[ends[active] - (step < 0)], tokens)]
            if not len(active):
                break
            ends[active] += step
        for i in active.tolist():  # a long run: look at the whole document at once
            kept = np.flatnonzero(~np.isin(values[start[i] : stop[i]], tokens))
            begin = start[i]
            start[i], stop[i] = (begin + kept[0], begin + kept[-1] + 1) if len(kept) else (begin, begin)
