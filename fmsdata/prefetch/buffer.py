"""The prefetch buffer: blocks of remote shards, fetched ahead within a budget of bytes.

The order of each lane says which blocks will be needed, and roughly when. `FetchAhead` fetches them
in that order, `Loans` accounts for the memory that the pipeline holds, and `WholeSources` keeps
small sources. So memory stays within the budget for any number of lanes and sources: what is in use
and does not fit is on the node's disk.

A buffer is used by one thread at a time, and fetches in the event loop of its connections.
"""

import math
from concurrent.futures import Future

from fmsdata.core.blocks import Address, Block
from fmsdata.core.lane import Lane
from fmsdata.core.tokens import StoredTokens, Tokens
from fmsdata.planning.lane_order import LaneOrder
from fmsdata.prefetch.budget import RESERVED, Budget
from fmsdata.prefetch.decoded import DecodedBatches
from fmsdata.prefetch.fetch_ahead import FetchAhead
from fmsdata.prefetch.loans import Loans
from fmsdata.prefetch.look_ahead import LookAhead
from fmsdata.prefetch.range_queue import NOW, RangeQueues, Urgency
from fmsdata.prefetch.remote_source import LayoutCache, RemoteSource
from fmsdata.prefetch.waiter import Waiter
from fmsdata.prefetch.whole_sources import WholeSources
from fmsdata.storage.settings import Storage
from fmsdata.storage.spool import Spool
from fmsdata.storage.stats import StorageStats

DECODED = 2  # what is decoded of remote text may take this fraction of the budget in addition: 1 / DECODED


class PrefetchBuffer:
    """One for all lanes that a process reads together.

    `all_lanes`: these are all lanes of the run.
    """

    def __init__(self, storage: Storage, *, all_lanes: bool) -> None:
        self.layouts = LayoutCache()
        self.decoded = DecodedBatches(storage.prefetch_bytes // DECODED)  # used in the event loop alone
        self.queues = RangeQueues(storage)
        self._waiter = Waiter()
        reserved = 0 if storage.spool is None else int(storage.prefetch_bytes * RESERVED)
        self._budget = Budget(storage.prefetch_bytes, reserved)
        self._whole_sources = WholeSources(self._budget, self._waiter, enabled=all_lanes)
        self._ahead = FetchAhead(self._budget, storage.connections, self._whole_sources)
        self._spool = None if storage.spool is None else Spool(storage.spool)
        self._loans = Loans(self._budget, self._ahead, self._waiter, self._spool)

    def look_ahead(self, source: RemoteSource, order: LaneOrder, lane: Lane, place: int) -> LookAhead:
        """Start to fetch for a lane that reads a source from a place on."""
        look_ahead = LookAhead(source, order, lane, place)
        self._ahead.add(look_ahead)
        return look_ahead

    def tokens_at_once(self, look_ahead: LookAhead) -> float:
        """How many tokens a lane may request at once, so that all lanes stay within the budget."""
        if self._whole_sources.keeps(look_ahead):
            return math.inf
        if not self._budget.total:
            return 0
        return min(self._budget.most_lent / 8 / max(1, self._ahead.look_aheads), look_ahead.most_tokens)

    def read(self, look_ahead: LookAhead, place: int, address: Address) -> Block[StoredTokens]:
        """The block at a place of a lane's order."""
        self._loans.sweep()
        self._ahead.sweep()
        source = look_ahead.source
        pending = look_ahead.take(place)
        look_ahead.pass_block(place, address)
        if self._whole_sources.keeps(look_ahead):
            self._ahead.fill()
            shard = self._whole_sources.shard(source, address.shard)
            if shard is not None:
                return shard.read(address.first, address.stop)
        self._ahead.push(look_ahead)
        if pending is not None:
            self._ahead.release(pending)
        if pending is None or _failed(pending.future):  # it may have failed long ago
            urgency = Urgency(NOW)
            future = source.fetch(address, urgency)
        else:
            urgency, future = pending.urgency, pending.future
        if not future.done():
            source.hurry(urgency)
        self._ahead.fill(source.size(address))
        return self._loans.lend(source, address, self._waiter.wait(future))

    def look_up(self, source: RemoteSource, address: Address) -> Block[Tokens]:
        """A block out of order."""
        return self._waiter.wait(source.fetch(address, Urgency(NOW)))

    def stats(self) -> StorageStats:
        """What was fetched so far."""
        own = StorageStats(
            again_bytes=self._loans.fetched_again,
            waited=self._waiter.seconds,
            held_bytes=self._budget.used + self._budget.whole,
            spooled_bytes=0 if self._spool is None else self._spool.bytes,
        )
        return own + self.queues.stats()

    def close(self) -> None:
        """Fetch nothing more.

        A waiting thread gets an error, and requests under way are cancelled.
        """
        self._waiter.close()
        for connection in self.queues.connections:
            connection.soon(self.layouts.close)
        self.queues.close()


def _failed(future: "Future[Block[Tokens]]") -> bool:
    return future.done() and (future.cancelled() or future.exception() is not None)
