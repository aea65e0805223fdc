"""A keyed bijection of [0, n) in O(1) memory, for any n.

A Feistel network over two digits: a number below `a * b` is `(x, y)` with `x < a` and `y < b`, and
each round adds a mixed, keyed function of one digit to the other. `a * b` is at least n and barely
above it. A result outside [0, n) is sent through the network again (cycle walking), which keeps it
a bijection.
"""

from functools import lru_cache
from math import isqrt
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from fmsdata.core.keys import Ints, Keys, mix, mix_array

ROUNDS = 8  # of two additions each; with four, small sizes are uneven
SLAB = 4096  # numbers whose places are computed together
SLABS = 2048  # that are kept: 64 MB at most, and 32 MB below 2**32 numbers
MOST_DIGITS = 4096  # values of a digit of which the rounds are kept as tables: 512 KB at most
WORTH_TABLES = 4  # times as many numbers as a digit has values are computed before tables are made

Places: TypeAlias = npt.NDArray[np.uint64 | np.uint32 | np.int64]


class Permutation:
    """A keyed bijection of `[0, n)`.

    >>> p = Permutation(10, key=7)
    >>> sorted(p(i) for i in range(10))
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """

    def __init__(self, n: int, key: int) -> None:
        self.n, self._key = n, key
        self._a = isqrt(n - 1) + 1 if n > 1 else 1
        self._b = -(-n // self._a)
        self._keys = [(mix(key ^ 2 * round), mix(key ^ 2 * round + 1)) for round in range(ROUNDS)]
        self._computed = 0  # numbers, by `array`
        self._tables: list[tuple[Ints, Ints]] | None = None  # what each round adds, by digit

    def __call__(self, i: int) -> int:
        """The place of a number."""
        while True:
            y, x = divmod(i, self._a)
            for first, second in self._keys:
                y = (y + (mix(x ^ first) >> 16)) % self._b
                x = (x + (mix(y ^ second) >> 16)) % self._a
            i = y * self._a + x
            if i < self.n:
                return i

    def inverse(self, place: int) -> int:
        """The number at a place.

        >>> p = Permutation(10, key=7)
        >>> [p.inverse(p(i)) for i in range(10)]
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
        """
        while True:
            y, x = divmod(place, self._a)
            for first, second in reversed(self._keys):
                x = (x - (mix(y ^ second) >> 16)) % self._a
                y = (y - (mix(x ^ first) >> 16)) % self._b
            place = y * self._a + x
            if place < self.n:
                return place

    def array(self, i: Ints) -> Ints:
        """The places of an array of numbers."""
        self._computed += len(i)
        if self._a > MOST_DIGITS or self._computed < WORTH_TABLES * self._a:
            out: Keys = self._once(i.astype(np.uint64))
            while (outside := out >= self.n).any():
                out[outside] = self._once(out[outside])
            return out.astype(np.int64)
        if self._tables is None:
            self._tables = self._rounds()
        places = self._once_by_tables(i, self._tables)
        while len(beyond := np.flatnonzero(places >= self.n)):
            places[beyond] = self._once_by_tables(places[beyond], self._tables)
        return places

    def every(self, first: int, step: int, count: int) -> Ints:
        """The places of `first`, `first + step`, ..., fast if others near these are asked for as well.

        Results are computed for `SLAB` numbers at once, and the last of them are kept.

        >>> p = Permutation(10_000, key=7)
        >>> bool((p.every(5, 3, 3000) == p.array(np.arange(5, 9005, 3))).all())
        True
        """
        return np.concatenate(self.parts(first, step, count), dtype=np.int64, casting="unsafe")

    def parts(self, first: int, step: int, count: int) -> list[Places]:
        """The same in several arrays."""
        parts: list[Places] = []
        while count > 0:
            slab, begin = divmod(first, SLAB)
            parts.append(_slab(self.n, self._key, slab)[begin::step][:count])
            first, count = first + len(parts[-1]) * step, count - len(parts[-1])
        return parts

    def inverse_array(self, places: Ints) -> Ints:
        """The numbers at an array of places.

        >>> p = Permutation(10, key=7)
        >>> p.inverse_array(p.array(np.arange(10))).tolist()
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
        """
        out: Keys = self._once_back(places.astype(np.uint64))
        while (outside := out >= self.n).any():
            out[outside] = self._once_back(out[outside])
        return out.astype(np.int64)

    def _once_back(self, place: Keys) -> Keys:
        a, b = np.uint64(self._a), np.uint64(self._b)
        y, x = np.divmod(place, a)
        for first, second in reversed(self._keys):
            x = (x + a - (mix_array(y ^ np.uint64(second)) >> np.uint64(16)) % a) % a
            y = (y + b - (mix_array(x ^ np.uint64(first)) >> np.uint64(16)) % b) % b
        return y * a + x

    def _once(self, i: Keys) -> Keys:
        a, b = np.uint64(self._a), np.uint64(self._b)
        y = i // a
        x = i - y * a
        for first, second in self._keys:
            y += mix_array(x ^ np.uint64(first)) >> np.uint64(16)
            y -= y // b * b  # much faster than %, which has no vector instructions
            x += mix_array(y ^ np.uint64(second)) >> np.uint64(16)
            x -= x // a * a
        return y * a + x

    def _rounds(self) -> list[tuple[Ints, Ints]]:
        """What each round adds to `y` for a value of `x`, and to `x` for a value of `y`."""
        a, b = np.uint64(self._a), np.uint64(self._b)
        digits = np.arange(max(self._a, self._b), dtype=np.uint64)

        def added(key: int, modulus: np.uint64) -> Ints:
            return ((mix_array(digits ^ np.uint64(key)) >> np.uint64(16)) % modulus).astype(np.int64)

        return [(added(first, b), added(second, a)) for first, second in self._keys]

    def _once_by_tables(self, i: Ints, tables: list[tuple[Ints, Ints]]) -> Ints:
        """`_once`, in less than half the time."""
        y = i // self._a
        x = i - y * self._a
        less = np.empty_like(x)
        # As an unsigned number, a negative one is the larger of the two: so the minimum is the remainder.
        unsigned_y, unsigned_x, unsigned_less = (digit.view(np.uint64) for digit in (y, x, less))
        for to_y, to_x in tables:
            y += to_y[x]
            np.subtract(y, self._b, out=less)
            np.minimum(unsigned_y, unsigned_less, out=unsigned_y)
            x += to_x[y]
            np.subtract(x, self._a, out=less)
            np.minimum(unsigned_x, unsigned_less, out=unsigned_x)
        y *= self._a
        y += x
        return y


@lru_cache(maxsize=SLABS)
def _slab(n: int, key: int, slab: int) -> Places:
    places = Permutation(n, key).array(np.arange(slab * SLAB, min(n, (slab + 1) * SLAB)))
    return places.astype(np.uint32 if n <= 1 << 32 else np.uint64)
