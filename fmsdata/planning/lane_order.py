"""The order in which a lane reads the blocks of a source.

A source is an endless sequence of blocks. Index `i` is block `P(i mod n)` of epoch `i div n`, where
`P` is a keyed bijection for that epoch, and lane `l` of `L` takes `i = l, l + L, l + 2L, ...`. So
every (epoch, block) belongs to exactly one lane, at exactly one place.
"""

import math
from typing import NamedTuple

import numpy as np

from fmsdata.core.blocks import Address
from fmsdata.core.keys import key_of
from fmsdata.core.permutation import Permutation
from fmsdata.planning.blocks import BlockPlan

FEW = 20  # blocks that are planned faster one by one than as an array
AHEAD = 256  # blocks that are planned at once, where a lane reads that many in a row


class PlannedBlock(NamedTuple):
    """A block at its place in the order of a lane."""

    epoch: int
    number: int  # of the block in its source
    address: Address


class LaneOrder:
    """The blocks of one source in the order in which one lane reads them.

    With `epochs`, the order ends after that many; the last need not be whole.
    """

    def __init__(
        self, plan: BlockPlan, *, lane: int, lanes: int, seed: int, source: str, epochs: float | None = None
    ) -> None:
        self.plan, self.source = plan, source
        self._blocks, self._lane, self._lanes, self._seed = plan.blocks, lane, lanes, seed
        self._epoch = -1
        self._planned: list[int] = []  # numbers of blocks of the epoch, from this place on:
        self._first = 0
        self.places = math.inf  # how many blocks this lane reads in all
        self.has_last = False  # whether the last block of all epochs is this lane's
        if epochs is not None:
            total = max(1, math.floor(epochs * self._blocks))
            self.places = max(0, -(-(total - lane) // lanes))
            self.has_last = (total - 1) % lanes == lane

    def block(self, place: int) -> PlannedBlock | None:
        """The block at this place of the lane; None behind the last."""
        if place >= self.places:
            return None
        epoch, position = divmod(self._lane + place * self._lanes, self._blocks)
        if epoch != self._epoch:
            self._epoch = epoch
            self._permutation = Permutation(self._blocks, key_of(self._seed, self.source, epoch))
            self._planned = []
        if not 0 <= place - self._first < len(self._planned):
            self._plan_from(place, position)
        block = self._planned[place - self._first]
        return PlannedBlock(epoch, block, self.plan.address(block))

    def _plan_from(self, place: int, position: int) -> None:
        """Plan the block at a place; and if it follows the last one, many behind it."""
        follows = self._planned and place == self._first + len(self._planned)
        count = min(AHEAD, -(-(self._blocks - position) // self._lanes)) if follows else 1
        positions = range(position, position + count * self._lanes, self._lanes)
        if count < FEW:
            self._planned = [self._permutation(each) for each in positions[:1]]
        else:
            self._planned = self._permutation.array(np.array(positions, np.int64)).tolist()
        self._first = place


def place_of(block: int, epoch: int, *, blocks: int, lanes: int, seed: int, source: str) -> tuple[int, int]:
    """The lane that reads a block in an epoch, and at which place: the reverse of `LaneOrder`."""
    position = Permutation(blocks, key_of(seed, source, epoch)).inverse(block)
    place, lane = divmod(epoch * blocks + position, lanes)
    return lane, place
