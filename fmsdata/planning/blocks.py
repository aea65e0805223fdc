"""Blocks: how the shards of a source are cut, from counts alone.

Every process that plans a run computes the same blocks, without I/O or communication.
"""

from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from fmsdata.core.blocks import Address
from fmsdata.core.keys import offsets
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
        return first + ((document + 1) * (behind - first) - 1) // self.documents[shard]


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
