"""What is fetched ahead: of all lanes and sources, the block that is needed first comes next.

Nothing is fetched further ahead than a window, or a small part of an epoch, so that little is
wasted when a run ends.
"""

import heapq
import math
import weakref
from collections import deque
from collections.abc import Coroutine
from concurrent.futures import Future
from itertools import count
from typing import Any

from fmsdata.core.blocks import Block
from fmsdata.core.tokens import Tokens
from fmsdata.prefetch.budget import Budget
from fmsdata.prefetch.look_ahead import LookAhead, PendingBlock
from fmsdata.prefetch.range_queue import Priority, Urgency
from fmsdata.prefetch.remote_source import RemoteSource
from fmsdata.prefetch.whole_sources import WholeSources

UNFINISHED, PER_CONNECTION = 64, 4  # fetches under way: starting thousands delays the one that is waited for
TIDY = 1000  # outdated entries of a list before they are removed


class FetchAhead:
    """The look-aheads of a process, and the blocks that are pending for them."""

    def __init__(self, budget: Budget, connections: int, whole_sources: WholeSources) -> None:
        self.look_aheads = 0
        self._budget = budget
        self._most_unfinished = max(UNFINISHED, PER_CONNECTION * connections)
        self._whole_sources = whole_sources
        self._numbers = count()
        # By when they need something. An entry is outdated when the version of its look-ahead is
        # another.
        self._heap: list[tuple[Priority, int, int, weakref.ref[LookAhead]]] = []
        # The most urgent first, more or less. Weak, so that the list keeps nothing in memory.
        self._requested: deque[tuple[weakref.ref[PendingBlock], weakref.ref[LookAhead]]] = deque()
        self._most_requested = TIDY
        self._unfinished = 0  # fetches
        # Any thread may find that a fetch has ended, or that a look-ahead is gone: noted here, and
        # settled later.
        self._finished: deque[None] = deque()
        self._gone: deque[dict[int, PendingBlock]] = deque()

    def add(self, look_ahead: LookAhead) -> None:
        """Fetch for a look-ahead, as long as it lives."""
        weakref.finalize(look_ahead, self._gone.append, look_ahead.pending).atexit = False
        self.look_aheads += 1
        self.push(look_ahead)

    def push(self, look_ahead: LookAhead) -> None:
        """Consider a look-ahead again, after its due time changed."""
        if look_ahead.due < math.inf:
            entry = look_ahead.priority, next(self._numbers), look_ahead.version, weakref.ref(look_ahead)
            heapq.heappush(self._heap, entry)

    def release(self, pending: PendingBlock) -> None:
        """A block was taken."""
        pending.needed = False
        self._budget.ahead -= pending.bytes

    def fill(self, coming: int = 0) -> None:
        """Fetch what is needed next, as long as there is room.

        `coming` bytes are already on their way.
        """
        self._tidy()
        work: list[tuple[Coroutine[Any, Any, Block[Tokens]], Future[Block[Tokens]]]] = []
        source: RemoteSource | None = None
        while self._finished:
            self._finished.popleft()
            self._unfinished -= 1
        most = self._most_unfinished - self._unfinished
        try:
            while self._heap and len(work) < most:
                priority, _, version, reference = self._heap[0]
                look_ahead = reference()
                upcoming = look_ahead.upcoming() if look_ahead is not None and look_ahead.version == version else None
                if look_ahead is None or upcoming is None or self._whole_sources.keeps(look_ahead):
                    heapq.heappop(self._heap)
                    continue
                source = look_ahead.source
                size = source.size(upcoming.address)
                if self._budget.used + coming + size > self._budget.total:
                    break
                heapq.heappop(self._heap)
                self._budget.ahead += size
                pending = PendingBlock(upcoming.tokens, size, Urgency(priority), Future())
                pending.future.add_done_callback(lambda _: self._finished.append(None))
                work.append((source.read_block(upcoming.address, pending.urgency), pending.future))
                look_ahead.add(pending)
                self._requested.append((weakref.ref(pending), reference))
                self.push(look_ahead)
        finally:  # also if this thread is interrupted
            if work and source is not None:
                self._unfinished += len(work)
                source.start_all(work)

    def drop_farthest(self) -> bool:
        """Give up the pending block that is needed last; False if there is none."""
        while self._requested:
            block, reference = self._requested.pop()
            pending, look_ahead = block(), reference()
            if pending is not None and pending.needed and look_ahead is not None:
                pending.future.cancel()
                self.release(pending)
                look_ahead.drop_last()
                self.push(look_ahead)
                return True
        return False

    def sweep(self) -> None:
        """Settle the accounts of look-aheads that are gone."""
        while self._gone:
            self.look_aheads -= 1
            for pending in self._gone.popleft().values():
                pending.future.cancel()
                self.release(pending)

    def _tidy(self) -> None:
        """Remove outdated entries now and then: some never reach the end of their list."""
        if len(self._heap) > 3 * self.look_aheads + TIDY:
            entries = [(entry, entry[3]()) for entry in self._heap]
            self._heap = [entry for entry, found in entries if found is not None and found.version == entry[2]]
            heapq.heapify(self._heap)
        if len(self._requested) > self._most_requested:
            pairs = [(pair, pair[0]()) for pair in self._requested]
            self._requested = deque(pair for pair, pending in pairs if pending is not None and pending.needed)
            self._most_requested = 2 * len(self._requested) + TIDY
