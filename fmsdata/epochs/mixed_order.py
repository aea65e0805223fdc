"""The order of the rows of a mixture.

Row `i` of a source with share `w` is due at `(i + u) / w`, where `u` in [0, 1) is drawn for each row.
The row that is due first comes next, so a source is always fewer rows off its share than there are
sources.
Any part of the order is found alone: the rows that are due near it are sorted.

A source is an endless sequence of passes. Its *cursor* is a place in that sequence, counted over
all passes; everything before it was read or is excluded.
"""

import math
from collections.abc import Mapping
from functools import cached_property

import numpy as np

from fmsdata.core.keys import Ints, key_of, mix, uniform
from fmsdata.core.state import EDITED, State, number, part
from fmsdata.epochs.exclusions import Exclusions
from fmsdata.epochs.mixture import RowMixture
from fmsdata.epochs.order import ALL_EXCLUDED, Order
from fmsdata.epochs.passes import Pass
from fmsdata.errors import ConfigError, StateError

BELOW_ONE = 1 - 2**-20  # so that a row is never due with the row after it


class MixedOrders:
    """The orders of a mixture."""

    def __init__(self, mixture: RowMixture, seed: int, shuffle: bool) -> None:
        self.mixture, self._seed, self._shuffle = mixture, seed, shuffle
        self.due_keys = [mix(key_of(seed, "row mixture", name)) for name in mixture.names]

    def key(self, source: int, which: int) -> int | None:
        """The key of a pass over a source."""
        return key_of(self._seed, "rows", self.mixture.names[source], which) if self._shuffle else None

    def excluded_of(self, excluded: Exclusions) -> list[Ints]:
        """The excluded rows of each source, by their numbers in it."""
        starts = self.mixture.starts
        bounds = np.searchsorted(excluded.ids, starts)
        return [excluded.ids[a:b] - start for a, b, start in zip(bounds, bounds[1:], starts, strict=False)]

    def shares(self, excluded: Exclusions, weights: Mapping[str, float] | None) -> dict[str, float]:
        """The share of each source, by weights or by size. A source without rows has none."""
        left = self._left(excluded)
        if weights is None:
            power = 1 / (self.mixture.temperature or 1.0)
            most = max(left.values())
            weights = {name: (rows / most) ** power if rows else 0.0 for name, rows in left.items()}
        return restricted({name: weights[name] if left[name] else 0.0 for name in left})

    def size(self, excluded: Exclusions, weights: Mapping[str, float] | None) -> int:
        """The rows of an epoch."""
        shares = self.shares(excluded, weights)
        left = self._left(excluded)
        return self.mixture.epoch_size or sum(left[name] for name in left if shares[name])

    def _left(self, excluded: Exclusions) -> dict[str, int]:
        sizes = zip(self.mixture.names, self.mixture.sizes, self.excluded_of(excluded), strict=True)
        left = {name: size - len(ids) for name, size, ids in sizes}
        if not any(left.values()):
            raise ConfigError(ALL_EXCLUDED)
        return left

    def first(self, epoch: int, excluded: Exclusions, weights: Mapping[str, float] | None) -> Order:
        order: Order = self._begun(excluded, weights, [0] * len(self.mixture.names))
        for _ in range(epoch):  # each epoch begins where the one before ended
            order = order.next_epoch(order.size, excluded, weights)
        return order

    def _begun(self, excluded: Exclusions, weights: Mapping[str, float] | None, cursors: list[int]) -> "MixedOrder":
        shares = self.shares(excluded, weights)
        return MixedOrder(self, excluded, weights, shares, cursors, size=self.size(excluded, weights))

    def restored(self, epoch: int, excluded: Exclusions, state: State) -> Order:
        del epoch
        names = self.mixture.names
        weights, shares, cursors = (part(state, name) if state.get(name) is not None else None for name in PARTS)
        if shares is None or cursors is None:
            raise StateError(f"the state has no shares of the mixture: {EDITED}")
        for values in (weights, shares):
            if values is not None:
                _check_saved(values, names)
        places = [number(cursors, name) for name in names]
        allowed = restricted({name: shares[name] if rows else 0.0 for name, rows in self._left(excluded).items()})
        if allowed != {name: shares[name] for name in names}:
            raise StateError(f"the shares of the mixture are {shares}: {EDITED}")
        done, size = number(state, "done"), number(state, "size")
        return MixedOrder(self, excluded, weights, allowed, places, size=size, done=done)


PARTS = ("weights", "shares", "cursors")


def _check_saved(values: State, names: tuple[str, ...]) -> None:
    if sorted(values) != list(names) or not all(isinstance(x, float) and 0 <= x <= 1 for x in values.values()):
        raise StateError(f"the weights of the mixture are {values}, expected a share for {', '.join(names)}: {EDITED}")


def restricted(weights: Mapping[str, float]) -> dict[str, float]:
    """The weights as shares of 1, unless they are that already."""
    total = math.fsum(weights.values())
    if not total:
        raise ConfigError(
            f"no source with a weight has rows left (of {', '.join(weights)}); include some rows again, "
            "or give another source a weight"
        )
    if abs(total - 1) < 1e-12:
        return dict(weights)
    return {name: weight / total for name, weight in weights.items()}


class MixedOrder:
    """The rows of a mixture from some cursors on."""

    plan = None

    def __init__(
        self,
        recipe: MixedOrders,
        excluded: Exclusions,
        weights: Mapping[str, float] | None,
        shares: Mapping[str, float],
        cursors: list[int],
        *,
        size: int,
        done: int = 0,
    ) -> None:
        self._recipe, self.excluded, self.weights, self.size = recipe, excluded, weights, size
        self._shares, self._cursors = dict(shares), cursors
        self._done = done  # rows of this sequence of due times that were taken already
        self._active = [source for source, share in enumerate(shares.values()) if share]
        self._share = np.array([share for share in shares.values() if share])
        self._sources = [
            _Source(recipe, source, ids, cursors[source]) for source, ids in enumerate(recipe.excluded_of(excluded))
        ]
        self._taken = np.zeros(len(self._active), np.int64)
        if done:
            self._taken = self._counts(done)

    def rows(self, numbers: Ints) -> Ints:
        begin, source, item = self._due(int(numbers.min()) + self._done, int(numbers.max()) + self._done + 1)
        at = numbers + (self._done - int(begin.sum()))
        source, item = source[at], item[at]
        found = np.empty(len(numbers), np.int64)
        for i in range(len(self._active)):
            mine = source == i
            if mine.any():
                found[mine] = self._sources[self._active[i]].rows(item[mine] - self._taken[i])
        return found

    def _due(self, first: int, last: int) -> tuple[Ints, Ints, Ints]:
        """The rows that are due around the numbers `first` to `last`, in order: their sources and numbers.

        Before these come rows of each source, as many as the first array says. Until time t, a
        source has had `floor(share * t)` rows or one more. So all that are due a number of sources
        earlier come before `first`, and all of the range are due at most a number of sources later.
        """
        count = len(self._active)
        begin = np.maximum(0, np.floor(self._share * (first - count)).astype(np.int64) - 1)
        end = np.ceil(self._share * (last + count)).astype(np.int64) + 2
        items = [np.arange(a, b) for a, b in zip(begin, end, strict=True)]
        due = [(item + self._offset(i, item)) / self._share[i] for i, item in enumerate(items)]
        order = np.argsort(np.concatenate(due), kind="stable")
        sources = np.repeat(np.arange(count), end - begin)
        return begin, sources[order], np.concatenate(items)[order]

    def _offset(self, active: int, items: Ints) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
        key = self._recipe.due_keys[self._active[active]]
        offset: np.ndarray[tuple[int], np.dtype[np.float64]] = uniform(items.astype(np.uint64) ^ np.uint64(key), 0)
        return offset * BELOW_ONE

    def _counts(self, first: int) -> Ints:
        """How many of the first rows of the sequence are of each active source."""
        begin, source, _ = self._due(first, first)
        return begin + np.bincount(source[: first - int(begin.sum())], minlength=len(self._active))

    def _cursors_after(self, taken: int) -> list[int]:
        cursors = list(self._cursors)
        counts = self._counts(self._done + taken) - self._taken
        for source, count in zip(self._active, counts.tolist(), strict=True):
            cursors[source] = self._sources[source].cursor(count)
        return cursors

    def changed(
        self, taken: int, *, excluded: Exclusions | None = None, weights: Mapping[str, float] | None = None
    ) -> Order:
        excluded = self.excluded if excluded is None else excluded
        cursors, size = self._cursors_after(taken), max(0, self.size - taken)
        if weights is not None:
            shares = self._recipe.shares(excluded, weights)
            return MixedOrder(self._recipe, excluded, weights, shares, cursors, size=size)
        allowed = self._recipe.shares(excluded, self._shares)  # as they are, unless a source has no rows left
        done = self._done + taken if allowed == self._shares else 0
        return MixedOrder(self._recipe, excluded, self.weights, allowed, cursors, size=size, done=done)

    def next_epoch(self, taken: int, excluded: Exclusions, weights: Mapping[str, float] | None) -> Order:
        cursors, size = self._cursors_after(taken), self._recipe.size(excluded, weights)
        shares = self._recipe.shares(excluded, weights)
        done = self._done + taken if shares == self._shares else 0
        return MixedOrder(self._recipe, excluded, weights, shares, cursors, size=size, done=done)

    def state(self) -> State:
        cursors = dict(zip(self._recipe.mixture.names, self._cursors, strict=True))
        weights = None if self.weights is None else dict(self.weights)
        return {
            "weights": weights, "shares": self._shares, "cursors": cursors, "done": self._done, "size": self.size
        }  # fmt: skip


class _Source:
    """The rows of one source from a cursor on, pass after pass."""

    def __init__(self, recipe: MixedOrders, source: int, excluded: Ints, cursor: int) -> None:
        self._recipe, self._source, self._excluded = recipe, source, excluded
        self._size, self._start = recipe.mixture.sizes[source], int(recipe.mixture.starts[source])
        self._left = self._size - len(excluded)
        self._passes: dict[int, Pass] = {}
        self._first_pass, self._place = divmod(cursor, self._size)

    def rows(self, numbers: Ints) -> Ints:
        numbers = numbers + self._before
        passes = self._first_pass + numbers // self._left
        found = np.empty(len(numbers), np.int64)
        for which in np.unique(passes).tolist():
            mine = passes == which
            found[mine] = self._pass(which).rows(numbers[mine] % self._left)
        return found + self._start

    def cursor(self, taken: int) -> int:
        """The cursor after some rows were taken."""
        passes, taken = divmod(taken + self._before, self._left)
        place = int(self._pass(self._first_pass + passes).places(np.array([taken]))[0])
        return (self._first_pass + passes) * self._size + place

    @cached_property
    def _before(self) -> int:
        """Rows of the first pass that were taken."""
        return self._pass(self._first_pass).before(self._place)

    def _pass(self, which: int) -> Pass:
        if which not in self._passes:
            while len(self._passes) > 1:
                del self._passes[min(self._passes)]
            self._passes[which] = Pass(self._size, self._recipe.key(self._source, which), self._excluded)
        return self._passes[which]
