"""Blocks of remote shards within a budget of bytes: fetched before they are needed, given up when there are too many.

Each lane reads each of its sources along a course: the blocks that the plan tells, one after the other. So it is known
what will be needed, and roughly when: after the lane has read as many tokens as the blocks before last, at the
source's share of the mix. Lanes fill their windows one lane after the other. That decides what is fetched next, over
all lanes and sources alike, as long as there is room; but not farther ahead than a window, or a small part of
an epoch, so that little is fetched in vain when a run ends.

What the pipeline has got counts too, as long as it is in use. If that alone becomes more than its part of the
budget, the tokens that were longest not looked at are given up, and read again, as a range, if a line needs them.
So memory stays within the budget for any number of lanes and sources; only the number of requests grows.

A shelf is used by one thread at a time, and fetches in the loop of its connections.
"""

import heapq
import math
import time
import warnings
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import CancelledError, Future
from itertools import count
from typing import Any, TypeVar

import numpy as np

from fmsdata.cache import DiskCache
from fmsdata.connection import Connection
from fmsdata.courses import Ahead, Clock, Course, Pace, Step, Turn
from fmsdata.errors import FmsdataWarning, StorageError
from fmsdata.fetch import NOW, Priority, RangeQueue, Urgency
from fmsdata.held import Held
from fmsdata.keys import Ints
from fmsdata.readers import Block, StoredTokens, Tokens
from fmsdata.readers.ranges import FetchedBlock, Piece
from fmsdata.remote_source import Address, Layouts, RemoteSource
from fmsdata.storage_settings import Storage
from fmsdata.storage_stats import StorageStats

Value = TypeVar("Value")
LAYOUT_BYTES = 64 << 20  # of layouts that are remembered
HELD = 1 / 2  # of the budget, for sources that are held whole
IN_USE = 3 / 4  # of the budget, for what the pipeline has got: the rest is for what comes next
UNFINISHED, FOR_EACH = 64, 4  # fetches, and for each connection: to begin thousands delays what is waited for
TIDY = 1000  # entries of a list that may be over
LOOK_SECONDS = 0.2  # how often who waits looks whether it is still wanted


class LentTokens:
    """The tokens of a remote block, which may be given up meanwhile, and are then read again."""

    def __init__(self, shelf: "Shelf", source: RemoteSource, address: Address, which: int, piece: Piece) -> None:
        self._shelf, self._source, self._address, self._which = shelf, source, address, which
        self._offset = piece.offset
        self._array: Tokens | None = piece.tokens
        self.dtype = piece.tokens.dtype
        self.number = shelf.lend(self, piece.tokens.nbytes)

    def __getitem__(self, where: slice) -> Tokens:
        array = self._array
        if array is not None:
            self._shelf.touch(self.number)
            return array[where]
        if self._offset is None:
            return self._bring_back()[where]
        begin, end = (self._offset + place * self.dtype.itemsize for place in (where.start, where.stop))
        return np.frombuffer(self._shelf.range_again(self._source, self._address.shard, begin, end), self.dtype)

    def take(self, places: Ints) -> Tokens:
        array = self._array
        return (self._bring_back() if array is None else array).take(places)

    def give_up(self) -> None:
        self._array = None

    def _bring_back(self) -> Tokens:
        block = self._shelf.block_again(self._source, self._address)
        self._array = array = block.pieces[self._which].tokens
        self.number = self._shelf.lend(self, array.nbytes)
        return array


class Shelf:
    """See above. One for the lanes that a process reads together."""

    def __init__(self, storage: Storage, *, all_lanes: bool) -> None:
        """`all_lanes`: all lanes of the run are read with it, and so all of its sources."""
        self._storage = storage
        self._held = Held(storage.prefetch_bytes * HELD if all_lanes else 0)
        self._cache = None if storage.cache is None else DiskCache(storage.cache.path, storage.cache.limit)
        self.layouts = Layouts(LAYOUT_BYTES)
        self._queues: dict[Connection, RangeQueue] = {}
        self._courses: list[tuple[Priority, int, int, weakref.ref[Course]]] = []  # a heap, by when they need something
        self._numbers = count()
        self._count = 0  # of courses
        self._ahead = 0  # bytes
        self._unfinished = 0  # fetches
        self._finished: deque[None] = deque()  # an entry for each that has ended since; any thread may find that
        # The most urgent first, more or less. What was read is not kept for being in it.
        self._requested: deque[tuple[weakref.ref[Ahead], weakref.ref[Course]]] = deque()
        self._most_requested = TIDY
        self._lent: OrderedDict[int, tuple[weakref.ref[LentTokens], int]] = OrderedDict()  # by when they were used
        self._lent_bytes = 0
        self._gone: deque[int | dict[int, Ahead]] = deque()  # what nobody uses any more; any thread may find that
        self._again_bytes, self._waited = 0, 0.0
        self._warned = self._closed = False

    @property
    def _budget(self) -> int:
        """For all that is not held for good."""
        return self._storage.prefetch_bytes - self._held.bytes

    @property
    def _most_lent(self) -> float:
        return self._budget * IN_USE if self._budget else math.inf

    def queue(self, connection: Connection) -> RangeQueue:
        if connection not in self._queues:
            self._queues[connection] = RangeQueue(connection, self._storage.connections, self._cache)
        return self._queues[connection]

    def course(
        self,
        find: Callable[[], RemoteSource],
        step: Callable[[int], Step | None],
        place: int,
        clock: Clock,
        pace: Pace,
        turn: Turn,
    ) -> Course:
        """Begin to read a source from a place on."""
        course = Course(find, step, clock, pace, turn)
        course.start(place)
        weakref.finalize(course, self._gone.append, course.ahead).atexit = False
        self._count += 1
        self._push(course)
        return course

    def tokens_at_once(self, course: Course) -> float:
        """How many tokens a course may ask for in one go, so that all of them together stay within the budget."""
        if self._held.holds(course):
            return math.inf
        return min(self._most_lent / 8 / max(1, self._count), course.lookahead) if self._budget else 0

    def read(self, course: Course, place: int) -> tuple[Block, Sequence[StoredTokens]]:
        """The next block of a course."""
        self._sweep()
        ahead = course.take(place)
        step = course.passed(place)
        if self._held.holds(course):
            self._fill(0)
            shard = self._held.shard(course.source, step.address.shard, self._wait)
            if shard is not None:
                block = shard.read(step.address.first, step.address.stop)
                return block, block.arrays
        self._push(course)
        if ahead is None:
            ahead = self._fetch(course.source, step, NOW)
        else:
            self._ahead -= ahead.bytes
            ahead.wanted = False
            if ahead.future.done() and (ahead.future.cancelled() or ahead.future.exception() is not None):
                ahead = self._fetch(course.source, step, NOW)  # it may have been long ago
        if not ahead.future.done():
            course.source.hurry(ahead.urgency)
        self._fill(ahead.bytes)
        fetched = self._wait(ahead.future)
        lent = [LentTokens(self, course.source, step.address, i, piece) for i, piece in enumerate(fetched.pieces)]
        return _plain(fetched), lent

    def read_once(self, source: RemoteSource, address: Address) -> Block:
        """A block that is on no course."""
        return _plain(self._wait(source.fetch(address, Urgency(NOW))))

    def _fetch(self, source: RemoteSource, step: Step, due: Priority) -> Ahead:
        urgency = Urgency(due)
        return Ahead(step, source.size(step.address), urgency, source.fetch(step.address, urgency))

    def _push(self, course: Course) -> None:
        if course.due < math.inf:
            entry = course.priority, next(self._numbers), course.version, weakref.ref(course)
            heapq.heappush(self._courses, entry)

    def _fill(self, coming: int) -> None:
        """Fetch what is needed next, as long as there is room, beside so many bytes that are just coming."""
        self._tidy()
        work: list[tuple[Coroutine[Any, Any, FetchedBlock], Future[FetchedBlock]]] = []
        source: RemoteSource | None = None
        while self._finished:
            self._finished.popleft()
            self._unfinished -= 1
        most = max(UNFINISHED, FOR_EACH * self._storage.connections) - self._unfinished
        while self._courses and len(work) < most:
            priority, _, version, reference = self._courses[0]
            course = reference()
            step = course.upcoming() if course is not None and course.version == version else None
            if course is None or step is None or self._held.holds(course):
                heapq.heappop(self._courses)
                continue
            size = course.source.size(step.address)
            if self._ahead + self._lent_bytes + coming + size > self._budget:
                break
            heapq.heappop(self._courses)
            self._ahead += size
            ahead = Ahead(step, size, Urgency(priority), Future())
            ahead.future.add_done_callback(lambda _: self._finished.append(None))
            work.append((course.source.block(step.address, ahead.urgency), ahead.future))
            course.fetched(ahead)
            self._requested.append((weakref.ref(ahead), reference))
            self._push(course)
            source = course.source
        if source is not None:
            self._unfinished += len(work)
            source.begin(work)

    def _tidy(self) -> None:
        """Forget what is over, now and then: not all of it comes to an end of its list by itself."""
        if len(self._courses) > 3 * self._count + TIDY:
            courses = [(entry, entry[3]()) for entry in self._courses]
            self._courses = [entry for entry, course in courses if course is not None and course.version == entry[2]]
            heapq.heapify(self._courses)
        if len(self._requested) > self._most_requested:
            self._requested = deque(one for one in self._requested if (ahead := one[0]()) is not None and ahead.wanted)
            self._most_requested = 2 * len(self._requested) + TIDY

    def _give_up_farthest(self) -> bool:
        """Give up what was fetched ahead and is needed last, if there is anything."""
        while self._requested:
            asked, reference = self._requested.pop()
            ahead, course = asked(), reference()
            if ahead is not None and ahead.wanted and course is not None:
                ahead.wanted = False
                ahead.future.cancel()
                self._ahead -= ahead.bytes
                course.give_up_last()
                self._push(course)
                return True
        return False

    def _wait(self, future: "Future[Value]") -> Value:
        began = time.perf_counter()
        try:
            while True:
                if self._closed:
                    raise StorageError("the loader was closed while it waited for remote shards")
                try:
                    return future.result(LOOK_SECONDS)
                except TimeoutError:
                    if future.done():
                        raise
                except CancelledError:
                    if not self._closed:
                        raise
        except BaseException:
            future.cancel()
            raise
        finally:
            self._waited += time.perf_counter() - began

    def lend(self, tokens: LentTokens, size: int) -> int:
        """Count tokens that the pipeline gets, until it drops them. If it has too many now, the oldest are given up."""
        number = next(self._numbers)
        self._lent[number] = weakref.ref(tokens, lambda _: self._gone.append(number)), size
        self._lent_bytes += size
        if self._budget and self._lent_bytes + self._ahead > self._budget:
            self._sweep()
            while self._lent_bytes + self._ahead > self._budget and self._give_up_farthest():
                pass
        while self._lent_bytes > self._most_lent and len(self._lent) > 1:
            _, (reference, size) = self._lent.popitem(last=False)
            self._lent_bytes -= size
            oldest = reference()
            if oldest is not None:
                oldest.give_up()
        return number

    def touch(self, number: int) -> None:
        self._lent.move_to_end(number)

    def range_again(self, source: RemoteSource, shard: int, start: int, stop: int) -> bytes:
        self._tell_again(stop - start)
        return self._wait(source.fetch_range(shard, start, stop))

    def block_again(self, source: RemoteSource, address: Address) -> FetchedBlock:
        self._tell_again(source.size(address))
        return self._wait(source.fetch(address, Urgency(NOW)))

    def _tell_again(self, size: int) -> None:
        self._again_bytes += size
        if not self._warned and self._again_bytes > 16 << 20:
            self._warned = True
            warnings.warn(
                f"storage.prefetch_bytes is {self._storage.prefetch_bytes:,}, too little for the {self._count:,} "
                "courses (lanes x sources) of this process: documents are read again one by one, which is slow; "
                "raise it, use more processes, or smaller shuffle windows",
                FmsdataWarning,
                stacklevel=2,
            )

    def _sweep(self) -> None:
        """Settle the accounts of what was dropped."""
        while self._gone:
            gone = self._gone.popleft()
            if isinstance(gone, int):
                _, size = self._lent.pop(gone, (None, 0))
                self._lent_bytes -= size
            else:
                self._count -= 1
                for one in gone.values():
                    one.future.cancel()
                    one.wanted = False
                    self._ahead -= one.bytes

    def traffic(self) -> StorageStats:
        """What was fetched so far."""
        total = StorageStats(
            again_bytes=self._again_bytes,
            waited=self._waited,
            held_bytes=self._ahead + self._lent_bytes + self._held.bytes,
        )
        for queue in self._queues.values():
            total += queue.traffic()
        return total

    def close(self) -> None:
        """Fetch nothing more. Who waits gets an error, and what is under way is dropped."""
        self._closed = True
        for connection, queue in self._queues.items():
            connection.soon(self.layouts.close)
            connection.soon(queue.close)


def _plain(block: FetchedBlock) -> Block:
    return Block([piece.tokens for piece in block.pieces], block.array, block.start, block.length)
