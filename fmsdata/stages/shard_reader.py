"""ShardReader: the documents of one source, in the order that is planned for each lane.

The plan gives a lane its blocks, and a key of the block gives the order of the documents in it. So
the state is two numbers: the next block of the lane, and the next document in it.
"""

import copy
import math
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import numpy as np

from fmsdata.core.blocks import BlockName
from fmsdata.core.checks import whole
from fmsdata.core.chunk import Chunk
from fmsdata.core.iterator import Exhausted, StageIterator
from fmsdata.core.keys import Ints, key_of, mix, mix_array, offsets
from fmsdata.core.lane import Lane
from fmsdata.core.outline import facts_of
from fmsdata.core.spans import BEGINS, BUFFER, COLUMNS, DOCUMENT, LENGTH, POSITION, START, TAIL, Buffer
from fmsdata.core.stage import Size, Stage
from fmsdata.core.state import State, number
from fmsdata.core.wording import counted, shown
from fmsdata.corpus.counts import open_source
from fmsdata.corpus.selection import SourcePath, locate
from fmsdata.errors import ConfigError, DataError, StateError
from fmsdata.planning.blocks import cut_blocks
from fmsdata.planning.lane_order import LaneOrder, PlannedBlock
from fmsdata.prefetch.open_files import OpenFiles
from fmsdata.stages.strip import checked_strip, strip_ends
from fmsdata.storage.settings import Storage

BLOCK_TOKENS = 1 << 18
TOKEN_BYTES = 4  # of text, for each token of a block
CHUNK_DOCUMENTS, CHUNK_TOKENS = 1024, 1 << 20  # read blocks together up to this many
NONE_STRIPPED = np.empty(0, np.int64)
BLOCK_BITS, KEY_BITS = np.uint64(16), np.uint64(48)  # documents are sorted by block, then by key


class ShardReader(Stage):
    """The documents of a folder of shards, endlessly: each once per epoch, in a new order each epoch.

    All tokens in `strip` are removed from both ends of a document. Documents that are then empty or
    shorter than `min_length` are skipped. With `max_epochs`, which may be a fraction, the documents
    end after that many epochs. `folder` is saved with the state, to find the source again after it
    was removed from the mix.

    Instead of a folder, `path` may be a pattern, or a list of files; or `files` selects some of the
    folder, by names or patterns relative to it. Their order does not matter.

    The documents of Parquet, JSON lines and text files are text, unless a Parquet file has a list column of
    tokens; they go through a stage that makes tokens of them. `column` is the column, or the field of JSON.

    The folder may be on any filesystem that fsspec supports. `storage_options` go to that filesystem,
    such as credentials, and `storage` says how to read from it. Neither changes the documents.

    >>> reader = ShardReader("corpus/web", strip=[0], min_length=8)             # doctest: +SKIP
    >>> reader = ShardReader(["a.parquet", "b.parquet"])                        # doctest: +SKIP
    >>> reader = ShardReader("s3://bucket/corpus/web", storage_options={"anon": True})     # doctest: +SKIP
    """

    def __init__(
        self,
        path: SourcePath,
        *,
        name: str | None = None,
        files: str | Collection[str] | None = None,
        column: str | None = None,
        strip: Collection[int] = (),
        min_length: int = 1,
        block_tokens: int = BLOCK_TOKENS,
        max_epochs: float | None = None,
        folder: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
        storage: Storage | None = None,
    ) -> None:
        location, self.files = locate(path, files, storage_options, storage)
        self.path = location.alone()  # without the listing, which the reader outlives
        self.name = name or self.path.name
        self.column = column
        self.strip = checked_strip(strip)
        self.min_length = whole("min_length", min_length)
        self.block_tokens = whole("block_tokens", block_tokens, least=1)
        self.max_epochs = _checked_epochs(max_epochs)
        self.folder = folder
        self._files = open_source(location, column, self.files)
        self.counts = self._files.counts
        if not self.counts.documents.sum():
            raise DataError(f"{self.path}: {counted(len(self.counts.shards), 'shard')} without documents")

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
            **({} if self.files is None else {"files": list(self.files)}),
        }

    def _facts(self) -> str:
        return facts_of(
            {
                "shards": len(self.counts.shards),
                "strip": list(self.strip) or None,
                "min_length": self.min_length if self.min_length > 1 else None,
                "max_epochs": self.max_epochs,
            }
        )

    def describe(self, source: str = "") -> State:
        return {**super().describe(source), "source": source or self.name}

    def size(self) -> Size:
        return Size(int(self.counts.documents.sum()), int(self.counts.tokens.sum()))

    @property
    def remote_bytes(self) -> int:
        """The size of all shards together, if they are not on a local disk; else 0."""
        return sum(entry.size for entry in self._files.entries)

    def with_max_epochs(self, max_epochs: float | None) -> "ShardReader":
        """The same source with a different end."""
        reader = copy.copy(self)
        reader.max_epochs = max_epochs
        return reader

    def without_short(self, strip: Collection[int], min_length: int) -> "ShardReader":
        """The same source with these tokens stripped, and without documents that are then too short."""
        reader = copy.copy(self)
        reader.strip, reader.min_length = checked_strip(strip), whole("min_length", min_length)
        return reader

    def holds_text(self) -> bool:
        return self.counts.text

    def ends(self) -> bool:
        return self.max_epochs is not None

    def total_tokens(self) -> float:
        return math.inf if self.max_epochs is None else self.size().tokens * float(self.max_epochs)

    def source_name(self) -> str:
        return self.name

    @property
    def block_size(self) -> int:
        """The size of blocks in what the counts count: tokens, or bytes of text."""
        return self.block_tokens * (TOKEN_BYTES if self.counts.text else 1)

    def block_order(self, lane: Lane) -> LaneOrder:
        """The blocks of this source in the order in which a lane reads them."""
        return LaneOrder(
            cut_blocks(self.counts, lane.count, self.block_size),
            lane=lane.index,
            lanes=lane.count,
            seed=lane.seed,
            source=lane.source or self.name,
            epochs=self._epochs_of(lane),
        )

    def _epochs_of(self, lane: Lane) -> float | None:
        """After how many epochs the source ends in a lane: `max_epochs`, or earlier if the pass is finite."""
        ends = [epochs for epochs in (self.max_epochs, lane.epochs) if epochs is not None]
        return min(ends, default=None)


class _LaneBlock(NamedTuple):
    """The documents of a block, in the order of the shard."""

    first: int  # the number of the first document
    buffers: list[Buffer]
    array: Ints
    start: Ints
    length: Ints
    stripped: Ints  # tokens skipped at the start of each document
    key: int


class _ReaderIterator(StageIterator):
    """The state is the next block of this lane, and the next document in it."""

    def __init__(self, reader: ShardReader, lane: Lane, state: State | None) -> None:
        self._reader, self._lane = reader, lane
        self._host = lane.host or OpenFiles()
        self._order = reader.block_order(lane)
        self._source = self._order.source
        self._place = number(state, "block")  # of the next block in the order of the lane
        self._visited = number(state, "document")  # documents of that block that are done
        self._blocks = self._host.open_blocks(reader._files, self._order, lane)
        if self._place < self._order.places:
            self._blocks.start(self._place)
        # Documents to read at once. It grows: a rare source starts fast, a frequent one runs fast.
        self._target = 1
        # The state before each document of the chunk, and after the last.
        self._at = np.array([[self._place, self._visited]])

    def read(self) -> Chunk:
        empty = 0
        while True:
            blocks: list[_LaneBlock] = []
            documents = tokens = 0
            while not blocks or (
                documents < self._target and tokens < CHUNK_TOKENS and tokens < self._blocks.tokens_at_once
            ):
                place = self._place + len(blocks)
                planned = self._order.block(place)
                if planned is None:
                    break
                block = self._read_block(planned, place)
                blocks.append(block)
                documents += len(block.length)
                tokens += int(block.length.sum())
            self._blocks.check()
            if not blocks:
                self._at = np.array([[self._place, self._visited]])
                raise Exhausted(last=self._order.has_last)
            if self._visited > len(blocks[0].length):
                raise StateError(
                    f"'document' is {self._visited}, but the block has only "
                    f"{counted(len(blocks[0].length), 'document')}"
                )
            chunk = self._in_order(blocks)
            self._place, self._visited = self._place + len(blocks), 0
            self._target = min(2 * self._target, CHUNK_DOCUMENTS)
            if len(chunk):
                return chunk
            empty += len(blocks)
            if empty > self._order.plan.blocks:
                self._require_a_document()
                empty = 0

    def state(self, taken: int) -> State:
        block, document = self._at[taken].tolist()
        return {"block": block, "document": document}

    def _read_block(self, planned: PlannedBlock, place: int | None = None) -> _LaneBlock:
        """A block, read at a place of the lane's order, or (None) looked up out of order."""
        reader = self._reader
        shard, first, stop = address = planned.address
        name = reader.counts.shards[shard]
        self._host.reading(BlockName(self._source, name, first, stop, self._lane.index))
        block = self._blocks.look_up(address) if place is None else self._blocks.read(place, address)
        stripped, length = NONE_STRIPPED, block.length
        if reader.strip:
            stripped, length = strip_ends(block.arrays, block.array, block.start, length, np.array(reader.strip))
        key = key_of(self._lane.seed, self._source, planned.epoch, planned.number)
        buffers = [Buffer(tokens, self._source, name, planned.epoch, key) for tokens in block.arrays]
        return _LaneBlock(first, buffers, block.array, block.start, length, stripped, key)

    def _in_order(self, blocks: list[_LaneBlock]) -> Chunk:
        """The documents that are long enough: block by block, each in the order of its key."""
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
        # At each place of the order, `which` is also its block, and `place` the documents before it.
        self._at = np.empty((len(kept) + 1, 2), np.int64)
        self._at[:-1, 0] = which.take(kept) + self._place
        self._at[:-1, 1] = place.take(kept)
        self._at[-1] = self._place + len(blocks), 0
        return Chunk([buffer for block in blocks for buffer in block.buffers], spans, np.arange(len(kept) + 1))

    def _require_a_document(self) -> None:
        """Raise if no document of the whole source is long enough, instead of searching forever."""
        least = max(1, self._reader.min_length)
        plan = self._order.plan
        blocks = (self._read_block(PlannedBlock(0, block, plan.address(block))) for block in range(plan.blocks))
        if not any((block.length >= least).any() for block in blocks):
            raise DataError(
                f"source {self._source!r}: none of its {counted(self._reader.size().documents, 'document')} has "
                "at least "
                f"{counted(least, 'token')} (min_length) after stripping; lower min_length or remove the source"
            )


def _checked_epochs(epochs: float | None) -> float | None:
    if epochs is None:
        return None
    if isinstance(epochs, bool) or not isinstance(epochs, int | float) or not 0 < epochs < math.inf:
        raise ConfigError(f"max_epochs is {shown(epochs)}; it must be a number above zero, or None for no end")
    return epochs
