"""The order of the lines of fine-tuning rows: the order of the rows, packed.

An epoch is planned when it is first needed, once, and the plans of two epochs are kept. The state is
that of the order of the rows: the lines follow from it.
"""

import json
from collections import OrderedDict
from collections.abc import Mapping
from functools import cached_property
from typing import NoReturn, Protocol

import numpy as np
import numpy.typing as npt

from fmsdata.core.keys import Ints, offsets
from fmsdata.core.state import EDITED, State
from fmsdata.epochs.exclusions import Exclusions
from fmsdata.epochs.lines import LinePlan, Packing
from fmsdata.epochs.order import Order, OrderRecipe
from fmsdata.errors import ConfigError, StateError

MOST_PLANS = 2
NO_TOKENS = "no row is left that has something to train on; include some rows again, or end the training here"
NEXT_EPOCH = "lines are packed for a whole epoch: fine-tuning rows can only change from the next epoch on"


class Lengths(Protocol):
    """What planning needs of the rows."""

    lengths: Ints  # the tokens of each row that are read
    kept: npt.NDArray[np.bool_]  # the rows that are read at all

    def trained(self, rows: Ints, start: Ints, stop: Ints) -> Ints:
        """How many labels the parts of rows from `start` to `stop - 1` have."""


class LineOrders:
    """The orders of the lines of a dataset."""

    def __init__(self, inner: OrderRecipe, rows: Lengths, packing: Packing, *, each_row_once: bool) -> None:
        self._inner, self._rows, self._packing, self._each_row_once = inner, rows, packing, each_row_once
        self._plans: OrderedDict[tuple[int, str, str], LinePlan] = OrderedDict()

    def first(self, epoch: int, excluded: Exclusions, weights: Mapping[str, float] | None) -> "LineOrder":
        return LineOrder(self, epoch, self._inner.first(epoch, excluded, weights))

    def size(self, excluded: Exclusions, weights: Mapping[str, float] | None) -> int:
        """At least this many lines, without planning an epoch."""
        count = self._inner.size(excluded, weights)
        rows, size = self._rows, self._packing.size
        if (
            weights is not None or not self._each_row_once
        ):  # how often each row comes is known when the epoch is planned
            return count * int(rows.lengths.min()) // size if rows.kept.all() else 0
        out = excluded.ids[rows.kept[excluded.ids]]
        left = int(np.count_nonzero(rows.kept)) - len(out)
        if not left:
            raise ConfigError(NO_TOKENS)
        if self._packing.mode == "pad" and not self._packing.stacked:
            return left
        return -(-(self._tokens - int(rows.lengths[out].sum())) // size)

    @cached_property
    def _tokens(self) -> int:
        return int(self._rows.lengths[self._rows.kept].sum())

    def restored(self, epoch: int, excluded: Exclusions, state: State) -> "LineOrder":
        if state.get("place"):
            raise StateError(f"the order of the rows begins at {state['place']}: {EDITED}")
        return LineOrder(self, epoch, self._inner.restored(epoch, excluded, state))

    def plan(self, epoch: int, order: Order) -> LinePlan:
        """The lines of an epoch with this order of rows."""
        key = epoch, json.dumps(order.state()), order.excluded.text
        if key not in self._plans:
            while len(self._plans) >= MOST_PLANS:
                self._plans.popitem(last=False)
            self._plans[key] = self._planned(order)
        return self._plans[key]

    def _planned(self, order: Order) -> LinePlan:
        rows = order.rows(np.arange(order.size))
        rows = rows[self._rows.kept[rows]]
        lines = self._packing.pack(rows, self._rows.lengths[rows])
        labels = self._rows.trained(lines.row, lines.start, lines.stop)
        return LinePlan(lines, offsets(lines.sums(labels)))


class LineOrder:
    """The lines of an epoch. It is planned when its size is asked for."""

    def __init__(self, recipe: LineOrders, epoch: int, inner: Order) -> None:
        self._recipe, self._epoch, self._inner = recipe, epoch, inner
        self.excluded = inner.excluded

    @property
    def weights(self) -> Mapping[str, float] | None:
        return self._inner.weights

    @cached_property
    def plan(self) -> LinePlan:
        return self._recipe.plan(self._epoch, self._inner)

    @property
    def size(self) -> int:
        return len(self.plan.lines)

    def rows(self, numbers: Ints) -> Ints:
        """The rows of these lines, one after the other."""
        return self.plan.lines.take(numbers).row

    def changed(
        self, taken: int, *, excluded: Exclusions | None = None, weights: Mapping[str, float] | None = None
    ) -> NoReturn:
        del taken, excluded, weights
        raise ConfigError(NEXT_EPOCH)

    def next_epoch(self, taken: int, excluded: Exclusions, weights: Mapping[str, float] | None) -> "LineOrder":
        """All rows of this epoch count as taken, also those of lines that were left out at its end."""
        del taken
        inner = self._inner.next_epoch(self._inner.size, excluded, weights)
        return LineOrder(self._recipe, self._epoch + 1, inner)

    def state(self) -> State:
        return self._inner.state()
