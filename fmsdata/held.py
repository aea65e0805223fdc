"""Remote sources that are kept in memory whole.

A source has at least 32 blocks for each lane, so those of a small source are small, and to fetch them one by one takes
thousands of requests for a few megabytes. Where one process reads all lanes, it needs all of a source in every epoch.
If that is small, and soon needed because a good part of it is in the lanes' windows at any time, it's fetched once,
as it lies in its files, and then read like local files.
"""

from collections.abc import Callable
from concurrent.futures import Future

import pyarrow as pa

from fmsdata.courses import Course
from fmsdata.fetch import Urgency
from fmsdata.readers import ArrowShard
from fmsdata.remote_source import RemoteSource

SMALL_BLOCK = 1 << 18  # bytes: larger blocks are worth a request each
IN_WINDOWS = 1 / 16  # of a source


class Held:
    """Which sources are held, and their shards."""

    def __init__(self, limit: float) -> None:
        self.bytes = 0
        self._limit = limit
        self._shards: dict[RemoteSource, list[_Shard] | None] = {}  # None: it is not held

    def holds(self, course: Course) -> bool:
        """Whether the source of a course is held. If it is new and can be, that begins now."""
        source = course.source
        if source not in self._shards:
            fits = self.bytes + source.stored <= self._limit and source.stored < SMALL_BLOCK * source.blocks
            if fits and course.in_window >= IN_WINDOWS:
                self.bytes += source.stored
                self._shards[source] = [_Shard(source, shard, course) for shard in range(source.shards)]
            else:
                self._shards[source] = None
        return self._shards[source] is not None

    def shard(
        self, source: RemoteSource, shard: int, wait: "Callable[[Future[pa.Buffer]], pa.Buffer]"
    ) -> ArrowShard | None:
        """A shard of a source that is held. None if it can't be: what is decoded would take more than was counted."""
        shards = self._shards[source]
        opened = None if shards is None else shards[shard].opened(wait)
        if opened is not None and not opened.plain:
            self._shards[source] = opened = None
            self.bytes -= source.stored
        return opened


class _Shard:
    def __init__(self, source: RemoteSource, shard: int, course: Course) -> None:
        self._source, self._shard = source, shard
        self._urgency = Urgency(course.priority)
        self._future = source.fetch_shard(shard, self._urgency)
        self._opened: ArrowShard | None = None

    def opened(self, wait: "Callable[[Future[pa.Buffer]], pa.Buffer]") -> ArrowShard:
        if self._opened is None:
            if not self._future.done():
                self._source.hurry(self._urgency)
            elif self._future.cancelled() or self._future.exception() is not None:  # it may have been long ago
                self._future = self._source.fetch_shard(self._shard, self._urgency)
            self._opened = self._source.open_shard(self._shard, wait(self._future))
        return self._opened
