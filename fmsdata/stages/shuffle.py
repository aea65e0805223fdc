"""Shuffle: a keyed permutation of each window of items.

The order of a window depends only on its number, so the state is where the window starts and how many
of its items were taken.
"""

import copy
from contextlib import suppress
from typing import Literal

import numpy as np

from fmsdata.core.checks import whole
from fmsdata.core.chunk import Chunk
from fmsdata.core.iterator import Cursor, Exhausted, StageIterator
from fmsdata.core.keys import Ints, key_of, keyed_order, keyed_orders, keys_of
from fmsdata.core.lane import Lane
from fmsdata.core.stage import Stage, endless, tokens_only
from fmsdata.core.state import State, number, part
from fmsdata.core.wording import shown
from fmsdata.errors import ConfigError, StateError
from fmsdata.stages.windows import TOKENIZED, saved_windows, window_sizes

AT_ONCE = 256  # items that are read at once, if windows are smaller
DISTANCE = 10_000  # items between two neighbours
WINDOW_PER_DISTANCE = 3  # in a random order of n items, two of them are n / 3 apart on average
EPOCH_PER_WINDOW = 8  # a window holds at most this part of a lane's epoch
FIRST_TOKENIZED = 1 << 18  # tokens in the first windows over text, of all lanes


class Shuffle(Stage):
    """The items in windows of `window` items, each window in its own random order.

    With `window="auto"`, the default, two neighbouring items of a lane are 10,000 items of the lane
    apart on average, or `distance`: a window of three times as many. It holds at most an eighth of
    what a lane reads in one epoch of all sources. A run keeps the number that it started with.

    Over text that is tokenized while it is read, the automatic windows of all lanes together hold at
    most 32 million tokens, and the first windows are small, so that a run starts fast: they begin with
    `first_window` items, and each is larger than the one before by a quarter until it has `window`.

    >>> lines = Shuffle(lines)                      # doctest: +SKIP
    >>> lines = Shuffle(lines, distance=2000)       # doctest: +SKIP
    >>> lines = Shuffle(lines, window=256)          # doctest: +SKIP
    """

    def __init__(
        self,
        below: Stage,
        *,
        window: int | Literal["auto"] = "auto",
        distance: int | None = None,
        first_window: int | None = None,
    ) -> None:
        super().__init__(tokens_only(endless(below, "Shuffle"), "Shuffle"))
        self._distance: int | None = None  # None: the window is a number of the user's
        self._settled = False  # whether the number of lanes was known when the window was chosen
        self.first_window = None if first_window is None else whole("first_window", first_window, least=1)
        if isinstance(window, str):
            if window != "auto":
                raise ConfigError(f"shuffle window is {shown(window)}; it must be a number of lines, or 'auto'")
            self._distance = whole("shuffle distance", DISTANCE if distance is None else distance, least=1)
            self._own_first = first_window is not None
            self.window, self.first_window = self._chosen_windows(lanes=1)
        elif distance is not None:
            raise ConfigError(
                f"shuffle has a window of {shown(window)} lines and a distance of {distance!r}; give one of the two: "
                f"a distance of n is a window of {WINDOW_PER_DISTANCE} * n"
            )
        else:
            self.window = whole("shuffle window", window, least=1)  # 1 keeps the order

    def parameters(self) -> State:
        described = super().parameters()
        if self.first_window is None:  # as it was before there was such a parameter
            del described["first_window"]
        return described

    def _chosen_windows(self, lanes: int) -> tuple[int, int | None]:
        """The size of a window, and of the first."""
        window = WINDOW_PER_DISTANCE * (self._distance or DISTANCE)
        items = self.below.epoch_items()
        window = max(1, min(window, items // (lanes * EPOCH_PER_WINDOW))) if items else window
        if not self.below.tokenizes():
            return window, self.first_window
        tokens = lanes * max(1, -(-self.below.window_tokens() // self.below.window_items()))  # of an item, in all lanes
        window = max(1, min(window, TOKENIZED // tokens))
        return window, self.first_window if self._own_first else max(1, min(window, FIRST_TOKENIZED // tokens))

    @property
    def is_automatic(self) -> bool:
        """Whether the window was chosen, and is no number of the user's."""
        return self._distance is not None

    def sizes(self) -> list[int]:
        """The sizes of the first windows. All that follow have the size of the last of them."""
        return window_sizes(self.window, self.first_window)

    def settled(self, lanes: int, saved: State | None = None) -> Stage:
        stage = super().settled(lanes, saved)
        if self._distance is None or not isinstance(stage, Shuffle):
            return stage
        windows = saved_windows(saved, Shuffle.__name__) or stage._chosen_windows(lanes)
        if stage._settled and windows == (stage.window, stage.first_window):
            return stage
        stage = copy.copy(stage)
        (stage.window, stage.first_window), stage._settled = windows, True
        return stage

    def open(self, lane: Lane, state: State | None = None) -> StageIterator:
        if self._distance is not None and not self._settled:  # read without Rescalable, or below a stage that hides it
            return self.settled(lane.count).open(lane, state)
        return _ShuffleIterator(self, lane, state)

    def only_plans(self) -> bool:
        return self.below.only_plans()

    @property
    def most_at_once(self) -> int:
        """How many items are read at once at most: a window, or several small ones."""
        return self.window + AT_ONCE

    def window_tokens(self) -> int:
        return -(-self.window // self.below.window_items()) * super().window_tokens()


class _ShuffleIterator(StageIterator):
    """The state is the state below at the start of a window, its number, and the items taken since.

    What is only planned is read ahead, little by little. Several small windows are read at once: an
    array operation costs about the same for one window and for ten. Lanes begin with different numbers of
    windows, so that they don't all read at the same moment.
    """

    def __init__(self, stage: Shuffle, lane: Lane, state: State | None) -> None:
        self._sizes = stage.sizes()
        self._only_plans = stage.below.only_plans() and len(self._sizes) == 1
        self._spread, self._frugal = lane.spread, lane.frugal
        self._key = key_of(lane.seed, "shuffle", lane.source, lane.index, stage.twins_below())
        self._below = Cursor(stage.below.open(lane, part(state, "below")))
        self._number = number(state, "window")  # of the first window that was read last
        self._windows = 1  # that were read last
        self._taken = number(state, "taken")  # items of these windows that were taken before the chunk
        self._size = self._size_of(self._number)  # items of these windows
        if self._taken >= self._size + (AT_ONCE if self._only_plans else 0):
            raise StateError(f"'taken' is {self._taken}, but the window has only {self._size} items")
        while self._taken >= self._size:
            self._below.take(self._size)
            self._number, self._taken = self._number + 1, self._taken - self._size
        self._anchor = self._below.state()
        self._after: State | None = None  # the state below at the end of these windows, once it was asked for
        self._chunk_size = 0
        self._is_second = True  # whether the windows that are read next are the second that are read
        self._ahead: list[Chunk] = []  # of the next windows
        self._taken_ahead = 0
        self._failed: Exception | None = None

    def advance(self, items: int) -> None:
        items = min(items, self._next_windows() * self._sizes[-1] - self._taken_ahead)
        if not self._only_plans or not self._chunk_size or items <= 0 or self._failed is not None:
            return
        self._state_after()
        try:
            self._ahead.append(self._below.take(items))
            self._taken_ahead += len(self._ahead[-1])
        except Exhausted:
            pass
        except Exception as error:
            self._failed = error

    def read(self) -> Chunk:
        self._taken, self._chunk_size = self._taken + self._chunk_size, 0
        if self._taken == self._size:
            self._anchor, self._after = self._state_after(), None
            self._number, self._taken = self._number + self._windows, 0
            self._windows, self._is_second = self._next_windows(), False
            self._size = self._windows * self._size_of(self._number)
        if self._failed is not None:
            raise self._failed
        items = self._take()
        self._size = len(items)
        if self._taken >= self._size:
            raise StateError(f"'taken' is {self._taken}, but the window has only {self._size} items")
        chunk = items.take(self._order()[self._taken :])
        self._chunk_size = len(chunk)
        return chunk

    def _next_windows(self) -> int:
        """How many windows are read next."""
        most = max(1, AT_ONCE // self._sizes[-1]) if self._only_plans and not self._frugal else 1
        return 1 + int(self._spread * most) if self._is_second else most

    def _take(self) -> Chunk:
        """The items of the next windows."""
        ahead, left = self._ahead, self._size - self._taken_ahead
        self._ahead, self._taken_ahead = [], 0
        if not ahead:
            return self._below.take(self._size)
        if left:
            with suppress(Exhausted):
                ahead.append(self._below.take(left))
        return Chunk.join(ahead)

    def _order(self) -> Ints:
        """The order of the items of these windows."""
        size = self._size_of(self._number)
        whole, rest = divmod(self._size, size)
        self._windows = whole + (rest > 0)
        if self._windows == 1:
            return keyed_order(self._size, key_of(self._key, self._number))
        numbers = np.arange(self._number, self._number + self._windows)
        keys = keys_of((self._key,), numbers)
        order = keyed_orders(size, keys[:whole]) + np.arange(0, whole * size, size)[:, None]
        if not rest:
            return order.reshape(-1)
        return np.append(order, keyed_order(rest, int(keys[-1])) + whole * size)

    def next_items(self) -> int:
        return self._size_of(self._number + self._windows)

    def _size_of(self, number: int) -> int:
        return self._sizes[min(number, len(self._sizes) - 1)]

    def state(self, taken: int) -> State:
        taken += self._taken
        if taken == self._size:
            return {"window": self._number + self._windows, "taken": 0, "below": self._state_after()}
        return {"window": self._number, "taken": taken, "below": self._anchor}

    def _state_after(self) -> State:
        if self._after is None:
            self._after = self._below.state()
        return self._after
