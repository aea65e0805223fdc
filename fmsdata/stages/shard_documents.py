"""The documents of one source for one lane: blocks are read, and the documents of each are put in order.

The plan gives a lane its blocks, and a key of the block gives the order of the documents in it.
"""

from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from fmsdata.core import native
from fmsdata.core.blocks import Address, BlockName, InShards, Located
from fmsdata.core.chunk import Chunk
from fmsdata.core.iterator import Exhausted, StageIterator
from fmsdata.core.keys import Ints, Keys, keys_of, mix_array, offsets, prefix_of
from fmsdata.core.lane import Lane
from fmsdata.core.native import Kernel
from fmsdata.core.spans import BEGINS, BUFFER, COLUMNS, DOCUMENT, LENGTH, POSITION, START, Buffer
from fmsdata.core.state import State, number
from fmsdata.core.tokens import StoredTokens
from fmsdata.core.wording import counted
from fmsdata.errors import DataError, StateError
from fmsdata.planning.lane_order import PlannedBlocks
from fmsdata.prefetch.open_files import OpenFiles
from fmsdata.stages.strip import strip_ends

if TYPE_CHECKING:
    from fmsdata.stages.shard_reader import ShardReader

CHUNK_DOCUMENTS, CHUNK_TOKENS = 1024, 1 << 20  # read blocks together up to this many
START_TOKENS = 1 << 18  # of a mixture that is only planned, at first
SHARED_BUFFERS = 256  # that the lanes share, of each source
BLOCK_BITS, KEY_BITS = 16, 48  # documents are sorted by block, then by key


class ReaderIterator(StageIterator):
    """The state is the next block of this lane, and the next document in it."""

    def __init__(self, reader: "ShardReader", lane: Lane, state: State | None) -> None:
        self._reader, self._lane = reader, lane
        self._host = lane.host or OpenFiles()
        self._order = reader.block_order(lane)
        self._source = self._order.source
        self._place = number(state, "block")  # of the next block in the order of the lane
        self._visited = number(state, "document")  # documents of that block that are done
        self._blocks = self._host.open_blocks(reader.shard_files, self._order, lane)
        if self._place < self._order.places:
            self._blocks.start(self._place)
        self._target = 0  # documents to read at once; 0 before the first are read
        # The state before each document of the chunk, and after the last; None before the first chunk.
        self._at: Ints | None = None
        self._chunk: Chunk | None = None

    @cached_property
    def _buffers(self) -> dict[tuple[int, int], Buffer]:
        """Those of all lanes, by their epoch and array, which they keep."""
        buffers: dict[tuple[int, int], Buffer] = self._host.shared(
            (self._order.plan, self._order.seed, self._source), dict
        )
        return buffers

    def read(self) -> Chunk:
        empty = 0
        while True:
            blocks = self._next_blocks()
            if blocks is None:
                self._at = self._chunk = None
                raise Exhausted(last=self._order.has_last)
            chunk = self._chunk = self._read(blocks)
            if len(chunk):
                return chunk
            empty += len(blocks)
            if empty > self._order.plan.blocks:
                self._require_a_document()
                empty = 0

    def read_on(self, kept: int) -> Chunk | None:
        blocks, last, at = self._next_blocks(), self._chunk, self._at
        if blocks is None or last is None or at is None:
            return None
        chunk = self._chunk = Chunk.join([last.slice(kept, len(last)), self._read(blocks)])
        if self._at is not None:
            self._at = np.concatenate([at[kept:-1], self._at])
        return chunk

    def _read(self, blocks: PlannedBlocks) -> Chunk:
        documents = self._blocks.read_all(self._place, blocks.addresses, self._announce)
        self._blocks.check()
        chunk = self._in_order(blocks, documents)
        self._place, self._visited = self._place + len(blocks), 0
        return chunk

    def state(self, taken: int) -> State:
        block, document = (self._place, self._visited) if self._at is None else self._at[taken].tolist()
        return {"block": block, "document": document}

    def _next_blocks(self) -> PlannedBlocks | None:
        """As many blocks as have the documents to read at once."""
        blocks = self._order.blocks(self._place)
        if blocks is None or len(blocks) == 1:
            return blocks
        self._target = self._next_target()
        addresses, plan = blocks.addresses, self._order.plan
        sizes = addresses[:, 2] - addresses[:, 1]
        few = int(sizes.cumsum().searchsorted(self._target)) + 1
        if len(blocks) - few < few // 2:  # no small rest: to read it costs almost as much
            few = len(blocks)
        tokens = (sizes[:few] * plan.mean_lengths.take(addresses[:few, 0])).cumsum()
        most = min(CHUNK_TOKENS, self._blocks.tokens_at_once)
        return blocks.part(0, min(few, int(tokens.searchsorted(most)) + 1))

    def _next_target(self) -> int:
        """How many documents to read at once. It grows: a rare source starts fast, a frequent one runs fast."""
        lane = self._lane
        if self._target or not lane.only_plans:
            return min(max(1, 4 * self._target), CHUNK_DOCUMENTS)
        # To plan costs little: all sources together start with about as many tokens.
        documents = (1 + lane.spread) * START_TOKENS * lane.pace.of_lane / self._reader.counts.mean_length
        return int(min(max(1.0, documents), CHUNK_DOCUMENTS))

    def _announce(self, address: Address) -> None:
        shard, first, stop = address
        name = self._reader.counts.shards[shard]
        self._host.reading(BlockName(self._source, name, first, stop, self._lane.index))

    def _in_order(self, blocks: PlannedBlocks, documents: Located | InShards) -> Chunk:
        """The documents that are long enough: block by block, each in the order of its key."""
        reader, sizes = self._reader, blocks.addresses[:, 2] - blocks.addresses[:, 1]
        if self._visited > sizes[0]:
            raise StateError(f"'document' is {self._visited}, but the block has only {sizes[0]} documents")
        if isinstance(documents, InShards):
            kernel = native.kernel
            if kernel is not None and not reader.strip and sizes.max() <= 1 << BLOCK_BITS:
                return self._in_order_compiled(kernel, blocks, documents, int(sizes.sum()))
            documents = documents.located(blocks.addresses)
        start, length = documents.start, documents.length
        if reader.strip:
            stripped, length = strip_ends(documents.arrays, documents.array, start, length, np.array(reader.strip))
        epochs = _runs(blocks.epochs)
        keys = mix_array(self._keys(blocks, epochs, sizes))
        place = documents.number - blocks.addresses[:, 1].take(documents.block)
        mixed = mix_array(place.astype(np.uint64) ^ keys.take(documents.block))
        order = (mixed >> np.uint64(BLOCK_BITS) | documents.block.astype(np.uint64) << np.uint64(KEY_BITS)).argsort(
            kind="stable"
        )
        enough = length.take(order) >= max(1, reader.min_length)
        enough[: self._visited] = False
        kept = enough.nonzero()[0]
        order = order.take(kept)
        spans = np.zeros((len(kept), COLUMNS), np.int64)
        spans[:, BUFFER] = documents.array.take(order)
        if len(epochs) > 1:  # a buffer for each array and epoch
            number = np.arange(len(epochs)).repeat([stop - start for _, start, stop in epochs])
            spans[:, BUFFER] += number.take(documents.block.take(order)) * len(documents.arrays)
        spans[:, START] = start.take(order)
        spans[:, LENGTH] = length.take(order)
        spans[:, DOCUMENT] = documents.number.take(order)
        if reader.strip:
            spans[:, POSITION] = stripped.take(order)
            spans[:, START] += spans[:, POSITION]
        spans[:, BEGINS] = 1
        # In this order, the block of each document, and the documents of the block before it.
        block, first = np.arange(len(blocks)).repeat(sizes).take(kept), offsets(sizes)
        self._at = at = np.empty((len(kept) + 1, 2), np.int64)
        at[:-1, 0] = block + self._place
        at[:-1, 1] = kept - first.take(block)
        at[-1] = self._place + len(blocks), 0
        return Chunk(self._buffers_of(documents, epochs), spans, np.arange(len(kept) + 1))

    def _in_order_compiled(self, kernel: Kernel, blocks: PlannedBlocks, documents: InShards, total: int) -> Chunk:
        spans, at = np.empty((total, COLUMNS), np.int64), np.empty((total + 1, 2), np.int64)
        kept, used = kernel.in_order(
            prefix_of(self._order.seed, self._source),
            blocks.epochs,
            blocks.numbers,
            blocks.addresses,
            documents.shard,
            documents.row,
            documents.starts,
            documents.lengths,
            self._place,
            self._visited,
            max(1, self._reader.min_length),
            spans,
            at,
        )
        self._at = at[: kept + 1]
        buffers = [self._shared_buffer(documents, epoch, which) for epoch, which in used]
        return Chunk(buffers, spans[:kept], np.arange(kept + 1))

    def _keys(self, blocks: PlannedBlocks, epochs: list[tuple[int, int, int]], sizes: Ints) -> Keys:
        """The key of each block. One document has one order, so a block of one needs none."""
        keys = np.zeros(len(blocks), np.uint64)
        several = (sizes > 1).nonzero()[0]
        cuts = several.searchsorted([start for _, start, _ in epochs]).tolist()
        for (epoch, _, _), low, high in zip(epochs, cuts, [*cuts[1:], len(several)], strict=True):
            if low < high:
                which = several[low:high]
                keys[which] = keys_of((self._order.seed, self._source, epoch), blocks.numbers.take(which))
        return keys

    def _buffers_of(self, documents: Located, epochs: list[tuple[int, int, int]]) -> list[Buffer]:
        """A buffer for each epoch and array. Lanes share those of whole shards."""
        pairs = [(epoch, which) for epoch, _, _ in epochs for which in range(len(documents.arrays))]
        if documents.are_shared:
            return [self._shared_buffer(documents, epoch, which) for epoch, which in pairs]
        return [self._buffer(documents.arrays[which], epoch, documents.shards[which]) for epoch, which in pairs]

    def _shared_buffer(self, documents: Located | InShards, epoch: int, which: int) -> Buffer:
        tokens = documents.arrays[which]
        buffer = self._buffers.get((epoch, id(tokens)))
        if buffer is None:
            if len(self._buffers) >= SHARED_BUFFERS:
                self._buffers.clear()
            buffer = self._buffers[epoch, id(tokens)] = self._buffer(tokens, epoch, documents.shards[which])
        return buffer

    def _buffer(self, tokens: StoredTokens, epoch: int, shard: int) -> Buffer:
        keys = self._order.plan.keys(self._order.seed, self._source, epoch, shard)
        return Buffer(tokens, self._source, self._reader.counts.shards[shard], epoch, keys)

    def _require_a_document(self) -> None:
        """Raise if no document of the whole source is long enough, instead of searching forever."""
        least = max(1, self._reader.min_length)
        if not any((self._lengths(block) >= least).any() for block in range(self._order.plan.blocks)):
            raise DataError(
                f"source {self._source!r}: none of its {counted(self._reader.size().documents, 'document')} has "
                "at least "
                f"{counted(least, 'token')} (min_length) after stripping; lower min_length or remove the source"
            )

    def _lengths(self, block: int) -> Ints:
        """The lengths of the documents of any block, when they are stripped."""
        self._announce(address := self._order.plan.address(block))
        arrays, array, start, length, _ = self._blocks.look_up(address)
        strip = np.array(self._reader.strip)
        return strip_ends(arrays, array, start, length, strip)[1] if len(strip) else length


def _runs(values: Ints) -> list[tuple[int, int, int]]:
    """The runs of equal values: the value, and where it starts and stops."""
    starts = [0, *((values[1:] != values[:-1]).nonzero()[0] + 1).tolist(), len(values)]
    return [(int(values[start]), start, stop) for start, stop in pairwise(starts)]
