"""ShardReader: the documents of one source, in the order that the plan gives this lane."""

import os
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from fmsdata.chunk import Buffer, Chunk
from fmsdata.counts import read_counts
from fmsdata.errors import ConfigError, CountsError, DataError
from fmsdata.keys import Ints, key_of, keyed_order
from fmsdata.plan import LaneOrder, cut_blocks
from fmsdata.readers import ArrowShard, Block, open_shard
from fmsdata.stage import Lane, Size, Stage, StageIterator, State
from fmsdata.storage import local_path

BLOCK_TOKENS = 1 << 18
CHUNK_DOCUMENTS = 64  # small blocks are read together, until there are this many documents


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
        self._at = np.array([[self._place, self._visited]])  # the state before each document of the chunk, and behind it

    def read(self) -> Chunk:
        chunks: list[Chunk] = []
        places: list[Ints] = []
        documents = tokens = empty = 0
        while documents < CHUNK_DOCUMENTS and tokens < self._reader.block_tokens:
            chunk, visited = self._read_block(self._place, self._visited)
            if len(chunk):
                chunks.append(chunk)
                places.append(np.stack([np.full(len(chunk), self._place), visited], axis=1))
                documents += len(chunk)
                tokens += int(chunk.lengths().sum())
            else:
                empty += 1
                if empty > self._plan.blocks and not chunks:
                    self._require_a_document()
                    empty = 0
            self._place, self._visited = self._place + 1, 0
        self._at = np.concatenate([*places, [[self._place, 0]]])
        return Chunk.join(chunks)

    def state(self, taken: int) -> State:
        block, document = self._at[taken].tolist()
        return {"block": block, "document": document}

    def _read_block(self, place: int, visited: int = 0) -> tuple[Chunk, Ints]:
        """The documents of a block that are long enough, and for each the number of documents visited before it."""
        epoch, number = self._order[place]
        return self._read_numbered(epoch, number, visited)

    def _read_numbered(self, epoch: int, number: int, visited: int = 0) -> tuple[Chunk, Ints]:
        reader, lane = self._reader, self._lane
        shard, first, stop = self._plan.block(number)
        opened = lane.shards.get((reader, shard), lambda: reader.open_shard(shard, self._source))
        block = opened.read(first, stop)
        key = key_of(lane.seed, self._source, epoch, number)
        start, length = block.start, block.length
        if reader.strip:
            start, length = _strip(block, np.array(reader.strip))
        order = keyed_order(stop - first, key)
        kept = np.flatnonzero(length[order] >= max(1, reader.min_length))
        kept = kept[np.searchsorted(kept, visited) :]
        order = order[kept]
        spans = np.empty((len(order), 6), np.int64)
        spans[:, 0] = block.array[order]
        spans[:, 1] = start[order]
        spans[:, 2] = length[order]
        spans[:, 3] = order + first
        spans[:, 4] = start[order] - block.start[order]
        spans[:, 5] = 1
        name = reader.counts.shards[shard]
        buffers = [Buffer(array, self._source, name, epoch, key) for array in block.arrays]
        return Chunk(buffers, spans, np.arange(len(order) + 1)), kept

    def _require_a_document(self) -> None:
        """Raise if no document of the whole source can ever come, instead of looking for one for ever."""
        if not any(len(self._read_numbered(0, number)[0]) for number in range(self._plan.blocks)):
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
