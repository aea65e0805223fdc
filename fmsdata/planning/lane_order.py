"""The order in which a lane reads the blocks of a source.

A source is an endless sequence of blocks. Index `i` is block `P(i mod n)` of epoch `i div n`, where
`P` is a keyed bijection for that epoch, and lane `l` of `L` takes `i = l, l + L, l + 2L, ...`. So
every (epoch, block) belongs to exactly one lane, at exactly one place.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from fmsdata.core.blocks import Address
from fmsdata.core.keys import Ints, key_of
from fmsdata.core.permutation import Permutation, Places
from fmsdata.planning.blocks import BlockPlan

FEW = 20  # blocks that are planned faster one by one than as an array
MOST_EPOCHS = 16  # of a small source, whose blocks are planned at once
AHEAD = 512  # blocks that are planned at once, where a lane reads that many in a row
AHEAD_OF_ALL = 1 << 17  # the same of all lanes, which share what is planned: 32 slabs of a permutation


class PlannedBlock(NamedTuple):
    """A block at its place in the order of a lane."""

    epoch: int
    number: int  # of the block in its source
    address: Address


@dataclass(frozen=True)
class PlannedBlocks:
    """Blocks at consecutive places of the order of a lane, also of several epochs."""

    epochs: Ints
    numbers: Ints
    addresses: Ints  # rows of shard, first document, and the document after the last

    def __len__(self) -> int:
        return len(self.numbers)

    def first(self) -> PlannedBlock:
        return PlannedBlock(int(self.epochs[0]), int(self.numbers[0]), Address(*self.addresses[0].tolist()))

    def part(self, start: int, stop: int | None = None) -> "PlannedBlocks":
        return PlannedBlocks(self.epochs[start:stop], self.numbers[start:stop], self.addresses[start:stop])


NONE = PlannedBlocks(np.empty(0, np.int64), np.empty(0, np.int64), np.empty((0, 3), np.int64))


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
        self.lane, self.lanes = lane, lanes
        self._dense = dense  # many of the lanes are planned in this process, and share the work
        self._planned = NONE
        self._first = 0  # place of the planned blocks
        self.places = math.inf  # how many blocks this lane reads in all
        self.has_last = False  # whether the last block of all epochs is this lane's
        if epochs is not None:
            total = max(1, plan.blocks_in(epochs))
            self.places = max(0, -(-(total - lane) // lanes))
            self.has_last = (total - 1) % lanes == lane

    def block(self, place: int) -> PlannedBlock | None:
        """The block at this place of the lane; None behind the last."""
        blocks = self.blocks(place)
        return None if blocks is None else blocks.first()

    def blocks(self, place: int) -> PlannedBlocks | None:
        """Some blocks from this place on, at least one; None behind the last."""
        if place >= self.places:
            return None
        skip = place - self._first
        if not 0 <= skip < len(self._planned):
            self._plan_from(place)
            skip = 0
        return self._planned.part(skip) if skip else self._planned

    def _plan_from(self, place: int) -> None:
        """Plan the block at a place; and if it follows the last one, or that costs little, many behind it."""
        many = self._dense or (len(self._planned) > 0 and place == self._first + len(self._planned))
        ahead = min(AHEAD, max(FEW, AHEAD_OF_ALL // self.lanes)) if many else 1
        left = int(min(ahead, self.places - place))
        self._first = place
        epochs: list[int] = []
        counts: list[int] = []
        numbers: list[Places] = []
        plan = self.plan.at(self.lane + place * self.lanes).plan
        while left and len(epochs) < MOST_EPOCHS:
            epoch, position, now = self.plan.at(self.lane + place * self.lanes)
            if now is not plan:  # the source has grown
                break
            counts.append(min(left, -(-(plan.blocks - position) // self.lanes)))
            epochs.append(epoch)
            numbers += self._numbers(plan.blocks, epoch, position, counts[-1])
            place, left = place + counts[-1], left - counts[-1]
        planned = np.concatenate(numbers, dtype=np.int64, casting="unsafe")
        self._planned = PlannedBlocks(np.repeat(epochs, counts), planned, plan.addresses(planned))

    def _numbers(self, blocks: int, epoch: int, position: int, count: int) -> list[Places]:
        """The numbers of this many blocks of the lane in an epoch of so many, from a position on."""
        permutation = _permutation(blocks, self.seed, self.source, epoch)
        if self._dense:
            return permutation.parts(position, self.lanes, count)
        positions = np.arange(position, position + count * self.lanes, self.lanes)
        return [permutation.array(positions) if count >= FEW else np.array([*map(permutation, positions.tolist())])]


@lru_cache(maxsize=256)
def _permutation(blocks: int, seed: int, source: str, epoch: int) -> Permutation:
    """The order of the blocks of a source in an epoch, which is the same for all lanes."""
    return Permutation(blocks, key_of(seed, source, epoch))


def place_of(block: int, epoch: int, *, plan: BlockPlan, lanes: int, seed: int, source: str) -> tuple[int, int]:
    """The lane that reads a block in an epoch, and at which place: the reverse of `LaneOrder`."""
    position = Permutation(plan.of_epoch(epoch).blocks, key_of(seed, source, epoch)).inverse(block)
    place, lane = divmod(plan.index(epoch, position), lanes)
    return lane, place
