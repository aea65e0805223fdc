"""Look-ahead: which blocks of a source a lane reads next, and when it will need them.

Time is counted in tokens that the lane reads. A block is due when the lane has read as many tokens
as come before it, at the source's share of the mix. Lanes fill their windows one lane after the
other, which decides the order between lanes.
"""

import math
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple

from fmsdata.core.blocks import Address, Block
from fmsdata.core.lane import Lane
from fmsdata.core.tokens import Tokens
from fmsdata.planning.lane_order import LaneOrder
from fmsdata.prefetch.range_queue import Priority, Urgency
from fmsdata.prefetch.remote_source import RemoteSource

LOOKAHEAD = 1 / 64  # of an epoch


class Upcoming(NamedTuple):
    """A block that a lane will read."""

    address: Address
    tokens: float  # estimated


@dataclass(eq=False)
class PendingBlock:
    """A block that was fetched ahead of the lane, or is being fetched."""

    tokens: float
    bytes: int
    urgency: Urgency
    future: "Future[Block[Tokens]]"
    needed: bool = True  # neither read nor given up yet


class LookAhead:
    """The blocks of one source that one lane is going to read."""

    def __init__(self, source: RemoteSource, order: LaneOrder, lane: Lane, place: int) -> None:
        self.source = source
        self.pending: dict[int, PendingBlock] = {}  # by place
        self.version = 0  # grows whenever `due` may have changed
        self.due = math.inf  # when the first block behind the pending ones is needed
        self._order, self._lane = order, lane
        self._epoch_tokens = source.tokens / lane.count  # that the lane reads in an epoch of the source
        self._next = place  # the first place that is not fetched
        self._time, self._share = lane.clock.time, 0.0
        self._pending_tokens = 0.0
        self._update_due()

    @property
    def priority(self) -> Priority:
        """The smallest is fetched first."""
        return self.due // max(1, self._lane.window_tokens), self._lane.index, self.due

    @property
    def most_tokens(self) -> float:
        """How many tokens may be fetched ahead in any case."""
        return self._epoch_tokens * LOOKAHEAD

    @property
    def share_in_window(self) -> float:
        """The share of the lane's epoch of this source that its window holds."""
        return self._lane.window_tokens * self._lane.pace.of_lane / self._epoch_tokens

    def take(self, place: int) -> PendingBlock | None:
        """What was fetched for a place, if anything."""
        pending = self.pending.pop(place, None)
        if pending is not None:
            self._pending_tokens -= pending.tokens
        return pending

    def pass_block(self, place: int, address: Address) -> None:
        """Record that the lane has reached this block."""
        clock, tokens = self._lane.clock, self._order.plan.tokens(address)
        self._next = max(self._next, place + 1)
        self._update_share()
        clock.time = max(clock.time, self._time)
        self._time += tokens / self._share if self._share else 0.0
        self._update_due()

    def upcoming(self) -> Upcoming | None:
        """The block to fetch next, unless it is too early for that."""
        if self.due == math.inf:
            return None
        planned = self._order.block(self._next)
        if planned is None:
            return None
        tokens = self._order.plan.tokens(planned.address)
        if self.pending and self._pending_tokens > self.most_tokens:
            # A window is filled to the end of a block, more or less, and not to its last line.
            window = self._lane.window_tokens
            behind = self.due - self._lane.clock.time - window
            if behind > min(tokens / self._share, window / 2):
                return None
        return Upcoming(planned.address, tokens)

    def add(self, pending: PendingBlock) -> None:
        """The upcoming block is being fetched."""
        self.pending[self._next] = pending
        self._pending_tokens += pending.tokens
        self._next += 1
        self._update_due()

    def drop_last(self) -> None:
        """The last pending block has to be fetched later."""
        self._next, pending = self.pending.popitem()
        self._pending_tokens -= pending.tokens
        self._update_due()

    def _update_share(self) -> None:
        share = self._lane.pace.of_lane
        if share != self._share:  # a source that was not read for a time does not have to catch up
            self._time, self._share = max(self._time, self._lane.clock.time), share

    def _update_due(self) -> None:
        self._update_share()
        if not self.pending:
            self._pending_tokens = 0.0  # sums of floats drift
        self.due = self._time + self._pending_tokens / self._share if self._share else math.inf
        self.version += 1
