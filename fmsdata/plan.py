"""Which documents a lane reads, and when: arithmetic on counts, without reading or talking to anyone.

A source is an endless sequence of blocks. Index `i` is block `P(i mod n)` of epoch `i div n`, where `P` is a
keyed bijection for that epoch, and lane `l` of `L` takes `i = l, l + L, l + 2L, ...`. So every (epoch, block)
belongs to exactly one lane, at exactly one place.
"""

import math
from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from fmsdata.counts import Counts
from fmsdata.keys import key_of, offsets
from fmsdata.permutation import Permutation

BLOCKS_PER_LANE = 32


@dataclass(frozen=True, eq=False)
class Plan:
    """A source cut into blocks: runs of consecutive documents of one shard."""

    documents: list[int]
    first_block: list[int]  # of each shard, and behind the last

    @property
    def blocks(self) -> int:
        return self.first_block[-1]

    def block(self, number: int) -> tuple[int, int, int]:
        """The shard of a block, its first document, and the one behind its last."""
        shard = bisect_right(self.first_block, number) - 1
        part, parts = number - self.first_block[shard], self.first_block[shard + 1] - self.first_block[shard]
        documents = self.documents[shard]
        return shard, part * documents // parts, (part + 1) * documents // parts

    def bounds(self, shard: int) -> list[int]:
        """Where the blocks of a shard begin, and the last ends."""
        first, behind = self.first_block[shard : shard + 2]
        return [self.block(number)[1] for number in range(first, behind)] + [self.documents[shard]]

    def block_of(self, shard: int, document: int) -> int:
        """The block that a document is in."""
        first, behind = self.first_block[shard : shard + 2]
        return first + ((document + 1) * (behind - first) - 1) // self.documents[shard]


@lru_cache(maxsize=256)
def cut_blocks(counts: Counts, lanes: int, block_tokens: int) -> Plan:
    """Cut every shard into blocks of about `block_tokens`, small enough that each lane gets its share of them.

    >>> counts = Counts(("a", "b"), np.array([100, 50]), np.array([10_000, 10_000]))
    >>> cut_blocks(counts, lanes=1, block_tokens=1000).blocks
    38
    """
    per_lane = max(1, int(counts.documents.sum()) // (BLOCKS_PER_LANE * lanes))
    mean = np.maximum(1.0, counts.tokens / np.maximum(1, counts.documents))
    size = np.clip(np.rint(block_tokens / mean).astype(np.int64), 1, per_lane)
    blocks = -(-counts.documents // size)
    return Plan(counts.documents.tolist(), offsets(blocks).tolist())


class LaneOrder:
    """The blocks of one source in the order in which one lane reads them."""

    def __init__(self, blocks: int, *, lane: int, lanes: int, seed: int, source: str) -> None:
        self._blocks, self._lane, self._lanes = blocks, lane, lanes
        self._seed, self._source = seed, source
        self._epoch = -1

    def places(self, epochs: float | None) -> float:
        """How many places of this lane are in the first epochs; the last may be a part of one."""
        return math.inf if epochs is None else max(0, -(-(self._blocks_in(epochs) - self._lane) // self._lanes))

    def has_last(self, epochs: float | None) -> bool:
        """Whether the last block of these epochs is this lane's."""
        return epochs is not None and (self._blocks_in(epochs) - 1) % self._lanes == self._lane

    def _blocks_in(self, epochs: float) -> int:
        return max(1, math.floor(epochs * self._blocks))

    def __getitem__(self, place: int) -> tuple[int, int]:
        """The epoch and the number of the block at this place of the lane."""
        epoch, position = divmod(self._lane + place * self._lanes, self._blocks)
        if epoch != self._epoch:
            self._epoch = epoch
            self._permutation = Permutation(self._blocks, key_of(self._seed, self._source, epoch))
        return epoch, self._permutation(position)


def place_of(block: int, epoch: int, *, blocks: int, lanes: int, seed: int, source: str) -> tuple[int, int]:
    """The lane that reads a block of a source in an epoch, and at which place of its order: `LaneOrder` in reverse."""
    position = Permutation(blocks, key_of(seed, source, epoch)).inverse(block)
    place, lane = divmod(epoch * blocks + position, lanes)
    return lane, place
