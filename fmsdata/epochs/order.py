"""The order of the rows in an epoch.

An order is immutable and answers for any part of the epoch alone, so a rank computes only the rows
that it reads. What was handed out is always a beginning of the order. So an order can be changed in
the middle of an epoch: `changed` returns the order of what is left.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from fmsdata.core.keys import Ints, key_of
from fmsdata.core.state import State, number
from fmsdata.epochs.exclusions import Exclusions
from fmsdata.epochs.passes import Pass
from fmsdata.errors import ConfigError, StateError

if TYPE_CHECKING:
    from fmsdata.epochs.lines import LinePlan

ALL_EXCLUDED = "all rows are excluded; include some of them again, or end the training here"


class Order(Protocol):
    """The rows of an epoch, or of what is left of it."""

    excluded: Exclusions

    @property
    def size(self) -> int:
        """The number of rows. The numbers after them are rows to fill up with."""

    @property
    def weights(self) -> Mapping[str, float] | None:
        """The weights of the sources; None if the rows are not a mixture."""

    @property
    def plan(self) -> "LinePlan | None":
        """The lines that rows are packed into; None if rows are read as they are."""

    def rows(self, numbers: Ints) -> Ints:
        """The rows with these numbers in the order."""

    def changed(
        self, taken: int, *, excluded: Exclusions | None = None, weights: Mapping[str, float] | None = None
    ) -> "Order":
        """What is left after some rows were taken, with other exclusions or weights."""

    def next_epoch(self, taken: int, excluded: Exclusions, weights: Mapping[str, float] | None) -> "Order":
        """The order of the next epoch, if this many rows of this one were taken."""

    def state(self) -> State:
        """What `OrderRecipe.restored` needs, apart from the exclusions."""


class OrderRecipe(Protocol):
    """Makes the orders of a dataset."""

    def first(self, epoch: int, excluded: Exclusions, weights: Mapping[str, float] | None) -> Order:
        """The order of an epoch of a run that starts, or of one with the exclusions and weights of now."""

    def size(self, excluded: Exclusions, weights: Mapping[str, float] | None) -> int:
        """The rows of an epoch with these exclusions and weights. Raises if there are none."""

    def restored(self, epoch: int, excluded: Exclusions, state: State) -> Order:
        """The order of a saved state."""


class RowOrder:
    """Every row of a dataset once, from a place in the pass of the epoch on."""

    plan = None
    weights: Mapping[str, float] | None = None

    def __init__(self, recipe: "RowOrders", epoch: int, excluded: Exclusions, place: int = 0) -> None:
        self._recipe, self._epoch, self.excluded = recipe, epoch, excluded
        self._pass = Pass(recipe.rows, recipe.key(epoch), excluded.ids)
        self._place, self._first = place, self._pass.before(place)
        self.size = self._pass.size - self._first

    def rows(self, numbers: Ints) -> Ints:
        numbers, size = numbers + self._first, self._pass.size
        if len(numbers) and numbers.max() >= size:  # it is slow, and needed only to fill up
            numbers %= size
        return self._pass.rows(numbers)

    def changed(
        self, taken: int, *, excluded: Exclusions | None = None, weights: Mapping[str, float] | None = None
    ) -> Order:
        del weights
        number = min(self._first + taken, self._pass.size)
        place = self._recipe.rows if number == self._pass.size else int(self._pass.places(np.array([number]))[0])
        return RowOrder(self._recipe, self._epoch, self.excluded if excluded is None else excluded, place)

    def next_epoch(self, taken: int, excluded: Exclusions, weights: Mapping[str, float] | None) -> Order:
        del taken, weights
        return RowOrder(self._recipe, self._epoch + 1, excluded)

    def state(self) -> State:
        return {"place": self._place}


class RowOrders:
    """The orders of a plain dataset. The key of an epoch is a hash of the seed and the epoch."""

    def __init__(self, rows: int, seed: int, shuffle: bool) -> None:
        self.rows, self._seed, self._shuffle = rows, seed, shuffle

    def key(self, epoch: int) -> int | None:
        return key_of(self._seed, "rows", epoch) if self._shuffle else None

    def first(self, epoch: int, excluded: Exclusions, weights: Any = None) -> Order:
        del weights
        return RowOrder(self, epoch, excluded)

    def size(self, excluded: Exclusions, weights: Any = None) -> int:
        del weights
        if len(excluded) == self.rows:
            raise ConfigError(ALL_EXCLUDED)
        return self.rows - len(excluded)

    def restored(self, epoch: int, excluded: Exclusions, state: State) -> Order:
        place = number(state, "place")
        if place > self.rows:
            raise StateError(f"the state is at place {place} of {self.rows} rows: it is damaged or was edited")
        return RowOrder(self, epoch, excluded, place)
