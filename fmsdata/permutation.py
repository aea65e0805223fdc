"""A keyed bijection of [0, n) in O(1) memory, for any n.

A Feistel network over two digits: a number below `a * b` is `(x, y)` with `x < a` and `y < b`, and each round adds a
mixed, keyed function of one digit to the other. `a * b` is at least n and barely above it, so a result that falls outside is
simply sent through again (cycle walking), which keeps it a bijection of [0, n).
"""

from math import isqrt

import numpy as np

from fmsdata.keys import Ints, KeyLike, Keys, mix

ROUNDS = 8


class Permutation:
    """A keyed bijection of `[0, n)`.

    >>> p = Permutation(10, key=7)
    >>> sorted(p(i) for i in range(10))
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """

    def __init__(self, n: int, key: int) -> None:
        self.n = n
        self._a = isqrt(n - 1) + 1 if n > 1 else 1
        self._b = -(-n // self._a)
        self._keys = [mix(key ^ round) for round in range(ROUNDS)]

    def __call__(self, i: int) -> int:
        """The place of one number."""
        i = self._once(i)
        while i >= self.n:
            i = self._once(i)
        return i

    def array(self, i: Ints) -> Ints:
        """The places of many numbers at once; the same values as calling with each."""
        out: Keys = self._once(i.astype(np.uint64))
        while (outside := out >= self.n).any():
            out[outside] = self._once(out[outside])
        return out.astype(np.int64)

    def _once(self, i: KeyLike) -> KeyLike:
        y = i // self._a
        x = i - y * self._a
        for round, key in enumerate(self._keys):
            if round % 2:
                x = (x + (mix(y ^ key) >> 16)) % self._a
            else:
                y = (y + (mix(x ^ key) >> 16)) % self._b
        return y * self._a + x
