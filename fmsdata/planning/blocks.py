"""Blocks: how the shards of a source are cut, from counts alone.

Every process that plans a run computes the same blocks, without I/O or communication.
"""

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from fmsdata.core.blocks import Address
from fmsdata.core.keys import Ints, key_of, offsets
from fmsdata.planning.counts import Counts

BLOCKS_PER_LANE = 32


@dataclass(frozen=True, eq=False)
class BlockPlan:
    """A source cut into blocks: runs of consecutive documents of one shard."""

    documents: list[int]  # of each shard
    first_block: list[int]  # of each shard, and behind the last
    mean_length: list[float]  # tokens per document, of each shard

    @property
    def blocks(self) -> int:
        return self.first_block[-1]

    def address(self, block: int) -> Address:
        """Where a block is."""
        shard = bisect_right(self.first_block, block) - 1
        part, parts = block - self.first_block[shard], self.first_block[shard + 1] - self.first_block[shard]
        documents = self.documents[shard]
        return Address(shard, part * documents // parts, (part + 1) * documents // parts)

    def addresses(self, blocks: Ints) -> Ints:
        """The same for several blocks: rows of shard, first document, and the document after the last."""
        first_block, documents = self._arrays
        shard = np.searchsorted(first_block, blocks, side="right") - 1
        begin = first_block.take(shard)
        part, parts, count = blocks - begin, first_block.take(shard + 1) - begin, documents.take(shard)
        out = np.empty((len(blocks), 3), np.int64)
        out[:, 0], out[:, 1], out[:, 2] = shard, part * count // parts, (part + 1) * count // parts
        return out

    @cached_property
    def _arrays(self) -> tuple[Ints, Ints]:
        return np.array(self.first_block), np.array(self.documents)

    @cached_property
    def mean_lengths(self) -> npt.NDArray[np.float64]:
        """`mean_length` as an array."""
        return np.array(self.mean_length)

    def keys(self, seed: int, source: str, epoch: int, shard: int) -> "BlockKeys":
        """The keys of the documents of a shard: those of their blocks."""
        first, behind = self.first_block[shard : shard + 2]
        return BlockKeys(seed, source, epoch, first, behind, self.documents[shard])

    def tokens(self, address: Address) -> float:
        """About how many tokens a block has."""
        return (address.stop - address.first) * self.mean_length[address.shard]

    def bounds(self, shard: int) -> list[int]:
        """Where the blocks of a shard begin, and the last ends."""
        first, behind = self.first_block[shard : shard + 2]
        return [self.address(block).first for block in range(first, behind)] + [self.documents[shard]]

    def block_of(self, shard: int, document: int) -> int:
        """The block that a document is in."""
        first, behind = self.first_block[shard : shard + 2]
        return _block_of(document, first, behind, self.documents[shard])


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
    return BlockPlan(counts.documents.tolist(), offsets(blocks).tolist(), mean.tolist())
