"""Small remote sources that are kept in memory whole.

A source has at least 32 blocks for each lane, so the blocks of a small source are small, and
fetching them one by one takes thousands of requests for a few megabytes. A process that reads all
lanes needs all of a source in every epoch. If the source is small, and a good part of it is in the
lanes' windows at any time, it is fetched once, as it is stored, and then read like local files.
"""

from concurrent.futures import Future

import pyarrow as pa

from fmsdata.formats.base import Shard
from fmsdata.prefetch.budget import Budget
from fmsdata.prefetch.look_ahead import LookAhead
from fmsdata.prefetch.range_queue import Urgency
from fmsdata.prefetch.remote_source import RemoteSource
from fmsdata.prefetch.waiter import Waiter

WHOLE = 1 / 2  # of the budget for blocks
SMALL_BLOCK = 1 << 18  # bytes: larger blocks are worth a request each
IN_WINDOWS = 1 / 16  # of a source


class WholeSources:
    """Which sources are kept whole, and their shards."""

    def __init__(self, budget: Budget, waiter: Waiter, *, enabled: bool) -> None:
        self._budget, self._waiter = budget, waiter
        self._limit = budget.total * WHOLE if enabled else 0
        self._shards: dict[RemoteSource, list[_WholeShard] | None] = {}  # None: it is not kept

    def keeps(self, look_ahead: LookAhead) -> bool:
        """Whether the source of a look-ahead is kept.

        Fetching starts with the first call that returns True.
        """
        source = look_ahead.source
        if source not in self._shards:
            size = source.stored
            fits = self._budget.whole + size <= self._limit and size < SMALL_BLOCK * source.blocks and not source.text
            if fits and look_ahead.share_in_window >= IN_WINDOWS:
                self._budget.whole += size
                shards = range(source.shards)
                self._shards[source] = [
                    _WholeShard(source, shard, Urgency(look_ahead.priority), self._waiter) for shard in shards
                ]
            else:
                self._shards[source] = None
        return self._shards[source] is not None

    def shard(self, source: RemoteSource, shard: int) -> Shard | None:
        """A shard of a source that is kept.

        None if it can't be: decoded, it would take more than was counted.
        """
        shards = self._shards[source]
        opened = None if shards is None else shards[shard].open()
        if opened is not None and not opened.plain:
            self._shards[source] = opened = None
            self._budget.whole -= source.stored
        return opened


class _WholeShard:
    def __init__(self, source: RemoteSource, shard: int, urgency: Urgency, waiter: Waiter) -> None:
        self._source, self._shard, self._urgency, self._waiter = source, shard, urgency, waiter
        self._future: Future[pa.Buffer] = source.fetch_shard(shard, urgency)
        self._opened: Shard | None = None

    def open(self) -> Shard:
        if self._opened is None:
            if not self._future.done():
                self._source.hurry(self._urgency)
            elif self._future.cancelled() or self._future.exception() is not None:  # it may have failed long ago
                self._future = self._source.fetch_shard(self._shard, self._urgency)
            self._opened = self._source.open_shard(self._shard, self._waiter.wait(self._future))
        return self._opened
