"""ShardReader: the documents of one source, in the order that the plan gives this lane."""

import os
from bisect import bisect_right
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fmsdata.chunk import BEGINS, BUFFER, COLUMNS, DOCUMENT, LENGTH, POSITION, START, Buffer, Chunk
from fmsdata.counts import read_counts
from fmsdata.errors import ConfigError, CountsError, DataError
from fmsdata.keys import Ints, key_of, keyed_order
from fmsdata.plan import LaneOrder, cut_blocks
from fmsdata.readers import ArrowShard, Block, open_shard
from fmsdata.stage import Lane, Size, Stage, StageIterator, State
from fmsdata.storage import local_path

BLOCK_TOKENS = 1 << 18
CHUNK_DOCUMENTS, CHUNK_TOKENS = 1024, 1 << 20  # blocks are read together, until there are this many of either


class ShardReader(Stage):
    """The documents of a folder of shards, endlessly: each exactly once per epoch, in another order each epoch.

    `strip` removes these tokens at either end of a document, as many as stand there; documents shorter than `min_length` after that are skipped,
    and so are empty ones.

    >>> reader = ShardReader("corpus/web", strip=[0], min_length=8)     # doctest: +SKIP
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        name: str | None = None,
        column: str | None = None,
        strip: Collection[int] = (),
        min_length: int = 1,
        block_tokens: int = BLOCK_TOKENS,
    ) -> None:
        if block_tokens < 1:
            raise ConfigError(f"block_tokens is {block_tokens}; it must be at least 1")
        self.path = local_path(path)
        self.name = name or self.path.absolute().name
        self.column = column
        self.strip = tuple(sorted(set(strip)))
        self.min_length = min_length
        self.block_tokens = block_tokens
        self.counts = read_counts(self.path, column)
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
            "strip": list(self.strip),
            "min_length": self.min_length,
            "block_tokens": self.block_tokens,
        }

    def size(self) -> Size:
        return Size(int(self.counts.documents.sum()), int(self.counts.tokens.sum()))

    def open_shard(self, shard: int, source: str) -> ArrowShard:
        """Open a shard and hold it against its counts."""
        name = self.counts.shards[shard]
        opened = open_shard(self.path / name, self.column)
        for what, said, found in (
            ("documents", int(self.counts.documents[shard]), opened.documents),
            ("tokens", int(self.counts.tokens[shard]), opened.known_tokens),
        ):
            if found is not None and found != said:
                raise CountsError(
                    f"source {source!r}: counts say {said} {what} in {name} but the file holds {found}; "
                    f"run `fmsdata index` to rebuild the counts"
                )
        return opened


class _LaneBlock(NamedTuple):
    """A block as a lane reads it: its documents that are long enough, and the number of documents visited before each."""

    size: int
    chunk: Chunk
    visited: Ints


NOTHING = Chunk([], np.empty((0, COLUMNS), np.int64), np.zeros(1, np.int64))


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
        self._place: int = state["block"] if state else 0  # the block to read next
        self._visited: int = state["document"] if state else 0  # documents of it that were visited before
        self._wanted = 1  # documents to read at once; grows, so that a rare source starts fast and a frequent one runs fast
        self._blocks: list[
            tuple[int, Ints]
        ] = []  # of the chunk: the place of each, and the documents visited before each document
        self._first: list[int] = [0]  # the first document of each

    def read(self) -> Chunk:
        chunks: list[Chunk] = []
        self._blocks, self._first = [], [0]
        documents = tokens = empty = 0
        while not chunks or (documents < self._wanted and tokens < CHUNK_TOKENS):
            block = self._read_block(*self._order[self._place], self._visited)
            documents += block.size
            if len(block.visited):
                chunks.append(block.chunk)
                self._blocks.append((self._place, block.visited))
                self._first.append(self._first[-1] + len(block.visited))
                tokens += int(block.chunk.spans[:, LENGTH].sum())
            elif not chunks:
                empty += 1
                if empty > self._plan.blocks:
                    self._require_a_document()
                    empty = 0
            self._place, self._visited = self._place + 1, 0
        self._wanted = min(2 * self._wanted, CHUNK_DOCUMENTS)
        return Chunk.join(chunks)

    def state(self, taken: int) -> State:
        if taken == self._first[-1]:
            return {"block": self._place, "document": self._visited}
        block = bisect_right(self._first, taken) - 1
        place, visited = self._blocks[block]
        return {"block": place, "document": int(visited[taken - self._first[block]])}

    def _read_block(self, epoch: int, number: int, visited: int = 0) -> "_LaneBlock":
        reader, lane = self._reader, self._lane
        shard, first, stop = self._plan.block(number)
        opened = lane.shards.get((reader, shard), lambda: reader.open_shard(shard, self._source))
        block = opened.read(first, stop)
        start, length = block.start, block.length
        if reader.strip:
            start, length = _strip(block, np.array(reader.strip))
        enough = length >= max(1, reader.min_length)
        if not enough.any():
            return _LaneBlock(stop - first, NOTHING, np.empty(0, np.int64))
        key = key_of(lane.seed, self._source, epoch, number)
        order = keyed_order(stop - first, key)
        kept = np.flatnonzero(enough.take(order))
        kept = kept[np.searchsorted(kept, visited) :]
        order = order.take(kept)
        spans = np.empty((len(order), COLUMNS), np.int64)
        spans[:, BUFFER] = block.array.take(order)
        spans[:, START] = start.take(order)
        spans[:, LENGTH] = length.take(order)
        spans[:, DOCUMENT] = order + first
        spans[:, POSITION] = (start - block.start).take(order)
        spans[:, BEGINS] = 1
        name = reader.counts.shards[shard]
        buffers = [Buffer(array, self._source, name, epoch, key) for array in block.arrays]
        return _LaneBlock(stop - first, Chunk(buffers, spans, np.arange(len(order) + 1)), kept)

    def _require_a_document(self) -> None:
        """Raise if no document of the whole source can ever come, instead of looking for one for ever."""
        if not any(len(self._read_block(0, number).visited) for number in range(self._plan.blocks)):
            raise DataError(
                f"source {self._source!r}: none of its {self._reader.size().documents} documents has at least "
                f"{max(1, self._reader.min_length)} tokens (min_length) after stripping; lower min_length or remove the source"
            )


def _strip(block: Block, tokens: npt.NDArray[np.int64]) -> tuple[Ints, Ints]:
    """Starts and lengths of the documents without these tokens at either end."""
    start, stop = block.start.copy(), block.start + block.length
    for array, values in enumerate(block.arrays):
        mine = np.flatnonzero(block.array == array)
        _strip_ends(values, mine, start, stop, tokens)
    return start, stop - start


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
