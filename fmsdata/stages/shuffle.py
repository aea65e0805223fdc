"""Shuffle: a keyed permutation of each window of items.

The order of a window depends only on its number, so the state is where the window starts and how many
of its items were taken.
"""

from fmsdata.core.checks import whole
from fmsdata.core.chunk import Chunk
from fmsdata.core.iterator import Cursor, StageIterator
from fmsdata.core.keys import key_of, keyed_order
from fmsdata.core.lane import Lane
from fmsdata.core.stage import Stage, endless
from fmsdata.core.state import State, number, part
from fmsdata.errors import StateError


class Shuffle(Stage):
    """The items in windows of `window` items, each window in its own random order.

    >>> lines = Shuffle(lines, window=256)     # doctest: +SKIP
    """

    def __init__(self, below: Stage, *, window: int) -> None:
        super().__init__(endless(below, "Shuffle"))
        self.window = whole("shuffle window", window, least=1)  # 1 keeps the order

    def open(self, lane: Lane, state: State | None = None) -> StageIterator:
        return _ShuffleIterator(self, lane, state)

    def window_tokens(self) -> int:
        return self.window * super().window_tokens()


class _ShuffleIterator(StageIterator):
    """The state is the state below at the start of the window, its number, and the items taken."""

    def __init__(self, stage: Shuffle, lane: Lane, state: State | None) -> None:
        self._size = stage.window
        self._key = key_of(lane.seed, "shuffle", lane.source, lane.index, stage.twins_below())
        self._below = Cursor(stage.below.open(lane, part(state, "below")))
        self._number = number(state, "window")
        self._skip = number(state, "taken")  # items of the window that were already taken
        if self._skip >= self._size:
            raise StateError(f"'taken' is {self._skip}, but the window has only {self._size} items")
        self._anchor = self._below.state()
        self._read = False

    def read(self) -> Chunk:
        if self._read:
            self._number, self._skip = self._number + 1, 0
            self._anchor = self._below.state()
        self._read = True
        window = self._below.take(self._size)
        order = keyed_order(self._size, key_of(self._key, self._number))
        return window.take(order[self._skip :])

    def state(self, taken: int) -> State:
        taken += self._skip
        if taken == self._size:
            return {"window": self._number + 1, "taken": 0, "below": self._below.state()}
        return {"window": self._number, "taken": taken, "below": self._anchor}
