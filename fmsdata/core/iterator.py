"""Iterators of stages: they hold the state.

An iterator works for one lane. It has two methods: `read` returns the next chunk of items, and
`state(taken)` returns the state after that many items of the chunk, as plain data from which
`Stage.open` starts a new iterator. Where chunks begin and end has no meaning; only the order of
items has.
"""

from abc import ABC, abstractmethod

from fmsdata.core.chunk import Chunk
from fmsdata.core.state import State


class Exhausted(Exception):
    """A stage has no more items for a lane: a source with `max_epochs`, or anything in a finite pass.

    `last` is True in the lane that read the last block of the source.
    """

    def __init__(self, *, last: bool = False) -> None:
        super().__init__()
        self.last = last


class StageIterator(ABC):
    """A stage at work for one lane, at some position of its endless sequence of items."""

    @abstractmethod
    def read(self) -> Chunk:
        """The next items, at least one.

        Raises `Exhausted` when there are no more; `state(0)` is then the state at the end.
        """

    @abstractmethod
    def state(self, taken: int) -> State:
        """The state after the first `taken` items of the last chunk (0 before the first chunk)."""

    def advance(self, items: int) -> None:  # noqa: B027
        """Do a part of the work for the next chunk, about that for this many items.

        Called while the items of the last chunk are taken, so that the next one comes without a
        pause. It changes no state, and raises nothing: errors wait for `read`.
        """

    def read_on(self, kept: int) -> Chunk | None:  # noqa: ARG002
        """The last chunk again, from item `kept` on, together with the next one. None if that is not possible."""
        return None

    def __repr__(self) -> str:
        return f"{type(self).__name__.lstrip('_')} of a lane"

    def next_items(self) -> int | None:
        """How many items the next chunk will have, if that is known."""
        return None


class Cursor:
    """Takes any number of items from an iterator, and returns the state in between."""

    def __init__(self, iterator: StageIterator) -> None:
        self._iterator = iterator
        self._chunk: Chunk | None = None
        self._taken = 0

    def take(self, count: int) -> Chunk:
        """The next items: as many as requested, or fewer at the end. Raises `Exhausted` if there are none."""
        parts: list[Chunk] = []
        while count:
            if self._chunk is None or self._taken == len(self._chunk):
                self._taken, self._chunk = 0, None
                try:
                    self._chunk = self._iterator.read()
                except Exhausted:
                    if not parts:
                        raise
                    break
            stop = min(self._taken + count, len(self._chunk))
            parts.append(self._chunk.slice(self._taken, stop))
            count -= stop - self._taken
            self._taken = stop
        return Chunk.join(parts)

    def state(self) -> State:
        return self._iterator.state(self._taken)
