"""One pass over some rows: a keyed order of them, without those that are excluded.

A *place* is a number in the order of all rows, excluded or not. Excluding a row leaves a gap at its
place, so the order of the other rows does not change. Without exclusions a pass needs no memory,
however many rows there are.
"""

import numpy as np

from fmsdata.core.keys import Ints, keyed_order
from fmsdata.core.permutation import Permutation

SMALL = 1024  # rows of which a table is faster than the bijection


class Pass:
    """The rows `0` to `rows - 1` in the order of a key, or in their own order (None).

    >>> Pass(4, key=None, excluded=np.array([1])).rows(np.arange(3)).tolist()
    [0, 2, 3]
    """

    def __init__(self, rows: int, key: int | None, excluded: Ints) -> None:
        self._all = rows
        self._table = keyed_order(rows, key) if key is not None and 0 < rows <= SMALL else None
        self._permutation = Permutation(rows, key) if key is not None and rows > SMALL else None
        self._gaps = np.sort(self._places_of(excluded))
        # The number of gaps before a row is that of gaps with at most as many rows before them.
        self._rows_before_gaps = self._gaps - np.arange(len(self._gaps))
        self.size = rows - len(excluded)

    def rows(self, numbers: Ints) -> Ints:
        """The rows with these numbers among those that are not excluded."""
        places = self.places(numbers)
        if self._table is not None:
            return self._table[places]
        return places if self._permutation is None else self._permutation.array(places)

    def places(self, numbers: Ints) -> Ints:
        """Their places in the order of all rows. The number `size` is at the end."""
        if not len(self._gaps):
            return numbers
        return numbers + np.searchsorted(self._rows_before_gaps, numbers, side="right")

    def before(self, place: int) -> int:
        """How many rows that are not excluded are before a place."""
        return place - int(np.searchsorted(self._gaps, place))

    def _places_of(self, rows: Ints) -> Ints:
        if self._table is not None:
            return np.argsort(self._table)[rows]
        return rows if self._permutation is None else self._permutation.inverse_array(rows)
