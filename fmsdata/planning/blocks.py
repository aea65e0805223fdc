"""Blocks: how the shards of a source are cut, from counts alone.

Every process that plans a run computes the same blocks, without I/O or communication.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fmsdata.core.blocks import Address
from fmsdata.core.keys import Ints, key_of, offsets
from fmsdata.planning.counts import Counts

BLOCKS_PER_LANE = 32


class Place(NamedTuple):
    """A place among all blocks of all epochs: the epoch, the position in its order, and the plan that it follows."""

    epoch: int
    position: int
    plan: "BlockPlan"


@dataclass(frozen=True, eq=False)
class BlockPlan:
    """A source cut into blocks: runs of consecutive documents of one shard.

    It holds arrays and no object per shard: a source may have a million of them.
    """

    documents: Ints  # of each shard
    first_block: Ints  # of each shard, and behind the last
    mean_lengths: npt.NDArray[np.float64]  # tokens per document, of each shard
    counted: Callable[[int], tuple[Ints, Ints] | None] | None = None  # `Counts.blocks`

    @cached_property
    def blocks(self) -> int:
        return int(self.first_block[-1])

    def at(self, index: int) -> Place:
        """The place of a block, counted from the first block of the first epoch."""
        return Place(*divmod(index, self.blocks), self)

    def index(self, epoch: int, position: int) -> int:
        """The reverse of `at`."""
        return epoch * self.blocks + position

    def of_epoch(self, epoch: int) -> "BlockPlan":  # noqa: ARG002
        """The plan that an epoch follows."""
        return self

    def blocks_in(self, epochs: float) -> int:
        """The number of blocks in the first epochs, of which the last need not be whole."""
        return math.floor(epochs * self.blocks)

    def address(self, block: int) -> Address:
        """Where a block is."""
        return Address(*self.addresses(np.array([block]))[0].tolist())

    def addresses(self, blocks: Ints) -> Ints:
        """The same for several blocks: rows of shard, first document, and the document after the last."""
        shard = np.searchsorted(self.first_block, blocks, side="right") - 1
        begin = self.first_block.take(shard)
        part, parts, count = blocks - begin, self.first_block.take(shard + 1) - begin, self.documents.take(shard)
        out = np.empty((len(blocks), 3), np.int64)
        out[:, 0], out[:, 1], out[:, 2] = shard, part * count // parts, (part + 1) * count // parts
        return out

    def keys(self, seed: int, source: str, epoch: int, shard: int) -> "BlockKeys":
        """The keys of the documents of a shard: those of their blocks."""
        return BlockKeys(seed, source, epoch, *self._shard(shard))

    def tokens(self, address: Address) -> float:
        """About how many tokens a block has."""
        shard, first, stop = address
        counted = None if self.counted is None else self.counted(shard)
        if counted is None or len(counted[0]) == 1:
            return (stop - first) * float(self.mean_lengths[shard])
        documents, tokens = map(offsets, counted)
        before, after = np.interp((first, stop), documents, tokens).tolist()
        return max(1.0, float(after - before))

    def bounds(self, shard: int) -> list[int]:
        """Where the blocks of a shard begin, and the last ends."""
        first, behind, documents = self._shard(shard)
        starts: list[int] = self.addresses(np.arange(first, behind))[:, 1].tolist()
        return [*starts, documents]

    def block_of(self, shard: int, document: int) -> int:
        """The block that a document is in."""
        return _block_of(document, *self._shard(shard))

    def _shard(self, shard: int) -> tuple[int, int, int]:
        """The first block of a shard, the block after its last, and its documents."""
        first, behind = self.first_block[shard : shard + 2].tolist()
        return first, behind, int(self.documents[shard])


def _block_of(document: int, first: int, behind: int, documents: int) -> int:
    return first + ((document + 1) * (behind - first) - 1) // documents


@dataclass(slots=True)
class BlockKeys:
    """The key of a document is that of its block, in an epoch."""

    seed: int
    source: str
    epoch: int
    first: int  # block of the shard
    behind: int
    documents: int  # of the shard

    def __call__(self, document: int) -> int:
        block = _block_of(document, self.first, self.behind, self.documents)
        return key_of(self.seed, self.source, self.epoch, block)


@lru_cache(maxsize=256)
def cut_blocks(counts: Counts, lanes: int, block_tokens: int) -> BlockPlan:
    """Cut every shard into blocks of about `block_tokens`.

    Blocks are small enough that each lane gets its share of them.

    >>> counts = Counts(("a", "b"), np.array([100, 50]), np.array([10_000, 10_000]))
    >>> cut_blocks(counts, lanes=1, block_tokens=1000).blocks
    38
    """
    per_lane = max(1, int(counts.documents.sum()) // (BLOCKS_PER_LANE * lanes))
    mean = counts.tokens / np.maximum(1, counts.documents)
    size = np.clip(np.rint(block_tokens / np.maximum(1.0, mean)).astype(np.int64), 1, per_lane)
    blocks = -(-counts.documents // size)
    return BlockPlan(counts.documents, offsets(blocks), mean, counts.blocks)
