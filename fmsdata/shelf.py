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

import asyncio
import heapq
import math
import time
import warnings
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import count
from typing import NamedTuple, TypeVar

import numpy as np

from fmsdata.cache import DiskCache
from fmsdata.connection import Connection
from fmsdata.errors import FmsdataWarning, StorageError
from fmsdata.fetch import NOW, Priority, RangeQueue, RemoteFile, Urgency, drive
from fmsdata.keys import Ints
from fmsdata.plan import Plan
from fmsdata.readers import Block, Layout, Reading, Tokens, read_layout
from fmsdata.readers.ranges import FetchedBlock, Piece, Range
from fmsdata.storage_settings import Storage
from fmsdata.storage_stats import StorageStats

Value = TypeVar("Value")
LAYOUT_BYTES = 64 << 20  # of layouts that are remembered
IN_USE = 3 / 4  # of the budget, for what the pipeline has got: the rest is for what comes next
LOOKAHEAD = 1 / 64  # of an epoch
AT_ONCE = 64  # fetches that are begun: to begin thousands takes longer than the one that is waited for
TIDY = 1000  # entries of a list that may be over
LOOK_SECONDS = 0.2  # how often who waits looks whether it is still wanted


class Address(NamedTuple):
    """A block: some documents of a shard."""

    shard: int
    first: int
    stop: int


class RemoteSource:
    """The shards of one source: where they are, how they are cut into blocks, and their layouts."""

    def __init__(
        self,
        shelf: "Shelf",
        connection: Connection,
        files: Sequence[RemoteFile],
        column: str | None,
        plan: Plan,
        check: Callable[[int, int, int | None], None],
    ) -> None:
        self._shelf, self._connection, self._files, self._column = shelf, connection, files, column
        self._plan = plan
        self._check = (
            check  # is told a shard, its documents, and its tokens if they are known; raises if they are wrong
        )
        self.queue = shelf.queue(connection)

    def size(self, address: Address) -> int:
        """About how many bytes a block has."""
        documents = self._plan.documents[address.shard]
        return -(-self._files[address.shard].size * (address.stop - address.first) // documents)

    def fetch(self, address: Address, urgency: Urgency) -> "Future[FetchedBlock]":
        return self._connection.start(self._fetch(address, urgency))

    def hurry(self, urgency: Urgency) -> None:
        self._connection.soon(self.queue.hurry, urgency)

    def fetch_range(self, shard: int, start: int, stop: int) -> "Future[bytes]":
        return self._connection.start(self.queue.read(self._files[shard], Range(start, stop), Urgency(NOW)))

    async def _fetch(self, address: Address, urgency: Urgency) -> FetchedBlock:
        layout = await self._shelf.layouts.get(self, address.shard, urgency)
        return await self.drive(layout.block(address.first, address.stop), address.shard, urgency)

    async def read_layout(self, shard: int, urgency: Urgency) -> Layout:
        file = self._files[shard]
        if file.version is not None and not self._connection.sees_versions:
            await self._connection.check(file.path, file.version, file.what)
        reading = read_layout(self._connection.url(file.path), file.size, self._column, self._plan.bounds(shard))
        layout = await self.drive(reading, shard, urgency)
        self._check(shard, layout.documents, layout.known_tokens)
        return layout

    async def drive(self, reading: Reading[Value], shard: int, urgency: Urgency) -> Value:
        file = self._files[shard]
        return await drive(reading, lambda wanted: self.queue.read(file, wanted, urgency))


class _Layouts:
    """Layouts of shards, those used last: each is read once, whoever asks for it meanwhile. Lives in the loop."""

    def __init__(self, limit: int) -> None:
        self._limit, self._bytes = limit, 0
        self._kept: OrderedDict[tuple[RemoteSource, int], tuple[asyncio.Task[Layout], Urgency]] = OrderedDict()

    async def get(self, source: RemoteSource, shard: int, urgency: Urgency) -> Layout:
        key = source, shard
        if key in self._kept:
            self._kept.move_to_end(key)
        else:
            own = Urgency(urgency.due)
            task = asyncio.get_running_loop().create_task(source.read_layout(shard, own))
            self._kept[key] = task, own
            task.add_done_callback(partial(self._settle, key))
        task, own = self._kept[key]
        urgency.behind = own
        if urgency.due < own.due:
            source.queue.hurry(own)
        return await asyncio.shield(task)

    def close(self) -> None:
        """Nobody waits for what is not there yet."""
        for task, _ in list(self._kept.values()):
            task.cancel()

    def _settle(self, key: "tuple[RemoteSource, int]", task: "asyncio.Task[Layout]") -> None:
        if task.cancelled() or task.exception() is not None:  # who asks next tries again
            del self._kept[key]
            return
        self._bytes += task.result().nbytes
        for old, (one, _) in list(self._kept.items()):
            if self._bytes <= self._limit:
                break
            if one.done() and one is not task:
                del self._kept[old]
                self._bytes -= one.result().nbytes


@dataclass(eq=False)
class Clock:
    """How many tokens a lane has read, more or less: when the last block that it began was due."""

    time: float = 0.0


@dataclass(eq=False)
class Pace:
    """Which part of what a lane reads is of one source. The mixtures above it know."""

    share: float = 1.0
    within: "Pace | None" = None

    @property
    def of_lane(self) -> float:
        return self.share * (1.0 if self.within is None else self.within.of_lane)


class Turn(NamedTuple):
    """Lanes read so many tokens at once, one lane after the other; and so many of a source in an epoch."""

    lane: int
    burst: int
    lap: float


class Step(NamedTuple):
    """A place of a course."""

    address: Address
    tokens: float  # about how many it has


@dataclass(eq=False)
class _Ahead:
    """A block that is fetched, or being fetched, for a course."""

    step: Step
    bytes: int
    urgency: Urgency
    future: "Future[FetchedBlock]"
    wanted: bool = True  # it was neither read nor given up


class Course:
    """The blocks that a lane reads of a source, one after the other."""

    def __init__(
        self,
        shelf: "Shelf",
        find: Callable[[], RemoteSource],
        step: Callable[[int], Step | None],
        clock: Clock,
        pace: Pace,
        turn: Turn,
    ) -> None:
        self._shelf, self._find, self._step, self._turn = shelf, find, step, turn
        self._clock, self._pace = clock, pace
        self.ahead: dict[int, _Ahead] = {}
        self.version = 0  # of what is told below
        self.due = math.inf  # when the next block, behind those that are fetched, is needed

    @cached_property
    def source(self) -> RemoteSource:
        """Not before it is read: whoever opens lanes need not be who reads them."""
        return self._find()

    @property
    def priority(self) -> Priority:
        """What comes first is fetched first."""
        return self.due // max(1, self._turn.burst), self._turn.lane, self.due

    def read(self, place: int) -> "tuple[Block, list[LentTokens]]":
        """The block at a place, and its tokens to keep. Places are read in order."""
        return self._shelf.read(self, place)

    def start(self, place: int) -> None:
        """Nothing was read yet, and this is the first place."""
        self._next, self._time, self._share = place, self._clock.time, 0.0
        self._tell_due()

    def passed(self, place: int) -> Step:
        """A place is read now."""
        step = self._step(place)
        if step is None:
            raise IndexError(f"place {place} is behind the last of its course")
        self._next = max(self._next, place + 1)
        self._look_at_share()
        self._clock.time = max(self._clock.time, self._time)
        self._time += step.tokens / self._share if self._share else 0.0
        self._tell_due()
        return step

    def _look_at_share(self) -> None:
        share = self._pace.of_lane
        if share != self._share:  # what was not wanted for a time is not behind for that
            self._time, self._share = max(self._time, self._clock.time), share

    def _tell_due(self) -> None:
        self._look_at_share()
        ahead = sum(one.step.tokens for one in self.ahead.values())
        self.due = self._time + ahead / self._share if self._share else math.inf
        self.version += 1

    def upcoming(self) -> Step | None:
        """The block to fetch next, if it is not too early for that."""
        tokens = sum(one.step.tokens for one in self.ahead.values())
        early = self.due > self._clock.time + self._turn.burst and tokens > self._turn.lap * LOOKAHEAD
        return None if self.due == math.inf or (early and self.ahead) else self._step(self._next)

    def give_up_last(self) -> None:
        """The last block that was fetched ahead has to be fetched later."""
        self._next, _ = self.ahead.popitem()
        self._tell_due()

    def fetched(self, ahead: _Ahead) -> None:
        """The upcoming block is being fetched."""
        self.ahead[self._next] = ahead
        self._next += 1
        self._tell_due()


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

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._budget = storage.prefetch_bytes
        self._most_lent = self._budget * IN_USE if self._budget else math.inf
        self._cache = None if storage.cache is None else DiskCache(storage.cache.path, storage.cache.limit)
        self.layouts = _Layouts(LAYOUT_BYTES)
        self._queues: dict[Connection, RangeQueue] = {}
        self._courses: list[tuple[Priority, int, int, weakref.ref[Course]]] = []  # a heap, by when they need something
        self._numbers = count()
        self._count = 0  # of courses
        self._ahead = 0  # bytes
        # The most urgent first, more or less. What was read is not kept for being in it.
        self._requested: deque[tuple[weakref.ref[_Ahead], weakref.ref[Course]]] = deque()
        self._most_requested = TIDY
        self._lent: OrderedDict[int, tuple[weakref.ref[LentTokens], int]] = OrderedDict()  # by when they were used
        self._lent_bytes = 0
        self._gone: deque[int | dict[int, _Ahead]] = deque()  # what nobody uses any more; any thread may find that
        self._again_bytes, self._waited = 0, 0.0
        self._warned = self._closed = False

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
        course = Course(self, find, step, clock, pace, turn)
        course.start(place)
        weakref.finalize(course, self._gone.append, course.ahead).atexit = False
        self._count += 1
        self._push(course)
        return course

    @property
    def tokens_at_once(self) -> int:
        """How many tokens each course may ask for in one go, so that all of them together stay within the budget."""
        return int(self._most_lent / 8 / max(1, self._count)) if self._budget else 0

    def read(self, course: Course, place: int) -> tuple[Block, list[LentTokens]]:
        """The next block of a course."""
        self._sweep()
        ahead = course.ahead.pop(place, None)
        step = course.passed(place)
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
        block = self._wait(ahead.future)
        lent = [LentTokens(self, course.source, step.address, i, piece) for i, piece in enumerate(block.pieces)]
        return _plain(block), lent

    def read_once(self, source: RemoteSource, address: Address) -> Block:
        """A block that is on no course."""
        return _plain(self._wait(source.fetch(address, Urgency(NOW))))

    def _fetch(self, source: RemoteSource, step: Step, due: Priority) -> _Ahead:
        urgency = Urgency(due)
        return _Ahead(step, source.size(step.address), urgency, source.fetch(step.address, urgency))

    def _push(self, course: Course) -> None:
        if course.due < math.inf:
            entry = course.priority, next(self._numbers), course.version, weakref.ref(course)
            heapq.heappush(self._courses, entry)

    def _fill(self, coming: int) -> None:
        """Fetch what is needed next, as long as there is room, beside so many bytes that are just coming."""
        self._tidy()
        started = 0
        while self._courses and started < AT_ONCE:
            priority, _, version, reference = self._courses[0]
            course = reference()
            step = course.upcoming() if course is not None and course.version == version else None
            if course is None or step is None:
                heapq.heappop(self._courses)
                continue
            size = course.source.size(step.address)
            if self._ahead + self._lent_bytes + coming + size > self._budget:
                return
            heapq.heappop(self._courses)
            self._ahead += size
            started += 1
            ahead = self._fetch(course.source, step, priority)
            course.fetched(ahead)
            self._requested.append((weakref.ref(ahead), reference))
            self._push(course)

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
                f"storage.prefetch_bytes is {self._budget:,}, too little for the {self._count:,} courses (lanes x "
                "sources) of this process: documents are read again one by one, which is slow; raise it, use more "
                "processes, or smaller shuffle windows",
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
            again_bytes=self._again_bytes, waited=self._waited, held_bytes=self._ahead + self._lent_bytes
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
