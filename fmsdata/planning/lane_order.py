"""The order in which a lane reads the blocks of a source.

A source is an endless sequence of blocks. Index `i` is block `P(i mod n)` of epoch `i div n`, where
`P` is a keyed bijection for that epoch, and lane `l` of `L` takes `i = l, l + L, l + 2L, ...`. So
every (epoch, block) belongs to exactly one lane, at exactly one place.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from fmsdata.core.blocks import Address
from fmsdata.core.keys import Ints, key_of
from fmsdata.core.permutation import Permutation
from fmsdata.planning.blocks import BlockPlan

FEW = 20  # blocks that are planned faster one by one than as an array
AHEAD = 256  # blocks that are planned at once, where a lane reads that many in a row


class PlannedBlock(NamedTuple):
    """A block at its place in the order of a lane."""

    epoch: int
    number: int  # of the block in its source
    address: Address


@dataclass(frozen=True)
class PlannedBlocks:
    """Blocks at consecutive places of the order of a lane."""

    epoch: int
    numbers: Ints
    addresses: Ints  # rows of shard, first document, and the document after the last

    def __len__(self) -> int:
        return len(self.numbers)

    def address(self, index: int) -> Address:
        return Address(*self.addresses[index].tolist())

    def after(self, count: int) -> "PlannedBlocks":
        return replace(self, numbers=self.numbers[count:], addresses=self.addresses[count:])

    def before(self, count: int) -> "PlannedBlocks":
        return replace(self, numbers=self.numbers[:count], addresses=self.addresses[:count])


class LaneOrder:
    """The blocks of one source in the order in which one lane reads them.

    With `epochs`, the order ends after that many; the last need not be whole.
    """

    def __init__(
        self,
        plan: BlockPlan,
        *,
        lane: int,
        lanes: int,
        seed: int,
        source: str,
        epochs: float | None = None,
        dense: bool = False,
    ) -> None:
        self.plan, self.source, self.seed = plan, source, seed
        self._blocks, self._lane, self._lanes = plan.blocks, lane, lanes
        self._dense = dense  # many of the lanes are planned in this process, and share the work
        self._planned = PlannedBlocks(-1, np.empty(0, np.int64), np.empty((0, 3), np.int64))
        self._first = 0  # place of the planned blocks
        self.places = math.inf  # how many blocks this lane reads in all
        self.has_last = False  # whether the last block of all epochs is this lane's
        if epochs is not None:
            total = max(1, math.floor(epochs * self._blocks))
            self.places = max(0, -(-(total - lane) // lanes))
            self.has_last = (total - 1) % lanes == lane

    def block(self, place: int) -> PlannedBlock | None:
        """The block at this place of the lane; None behind the last."""
        blocks = self.blocks(place)
        return None if blocks is None else PlannedBlock(blocks.epoch, int(blocks.numbers[0]), blocks.address(0))

    def blocks(self, place: int) -> PlannedBlocks | None:
        """Some blocks of one epoch, from this place on, at least one; None behind the last."""
        if place >= self.places:
            return None
        skip = place - self._first
        if not 0 <= skip < len(self._planned):
            self._plan_from(place)
            skip = 0
        return self._planned.after(skip) if skip else self._planned

    def _plan_from(self, place: int) -> None:
        """Plan the block at a place; and if it follows the last one, or that costs little, many behind it."""
        epoch, position = divmod(self._lane + place * self._lanes, self._blocks)
        if epoch != self._planned.epoch:
            self._permutation = Permutation(self._blocks, key_of(self.seed, self.source, epoch))
        follows = epoch == self._planned.epoch and place == self._first + len(self._planned)
        count = int(min(AHEAD, -(-(self._blocks - position) // self._lanes), self.places - place))
        if self._dense:
            numbers = self._permutation.shared_array(np.arange(position, position + count * self._lanes, self._lanes))
        elif follows and count >= FEW:
            numbers = self._permutation.array(np.arange(position, position + count * self._lanes, self._lanes))
        else:
            numbers = np.array([self._permutation(position)])
        self._first, self._planned = place, PlannedBlocks(epoch, numbers, self.plan.addresses(numbers))


def place_of(block: int, epoch: int, *, blocks: int, lanes: int, seed: int, source: str) -> tuple[int, int]:
    """The lane that reads a block in an epoch, and at which place: the reverse of `LaneOrder`."""
    position = Permutation(blocks, key_of(seed, source, epoch)).inverse(block)
    place, lane = divmod(epoch * blocks + position, lanes)
    return lane, place
