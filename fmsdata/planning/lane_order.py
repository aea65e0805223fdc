"""The order in which a lane reads the blocks of a source.

A source is an endless sequence of blocks. Index `i` is block `P(i mod n)` of epoch `i div n`, where
`P` is a keyed bijection for that epoch, and lane `l` of `L` takes `i = l, l + L, l + 2L, ...`. So every
(epoch, block) belongs to exactly one lane, at exactly one place.
"""

import math
from typing import NamedTuple

from fmsdata.core.blocks import Address
from fmsdata.core.keys import key_of
from fmsdata.core.permutation import Permutation
from fmsdata.planning.blocks import BlockPlan


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
        block = self._permutation(position)
        return PlannedBlock(epoch, block, self.plan.address(block))

    def tokens(self, address: Address) -> float:
        """About how many tokens a block has."""
        return self.plan.tokens(address)


def place_of(block: int, epoch: int, *, blocks: int, lanes: int, seed: int, source: str) -> tuple[int, int]:
    """The lane that reads a block in an epoch, and the place in its order: the reverse of `LaneOrder`."""
    position = Permutation(blocks, key_of(seed, source, epoch)).inverse(block)
    place, lane = divmod(epoch * blocks + position, lanes)
    return lane, place
