"""Random numbers of rows that depend on the row alone, from generators that belong to the trainer.

Transforms draw from the global generators of Python, NumPy and torch. Here these are seeded for each
row, and set back to what the trainer left. Most rows draw nothing, and seeding costs more than
reading a small row. So rows are read without it, until they are seen to draw: then they are read
again, seeded, as all rows after them.
"""

import ctypes
import random
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch

T = TypeVar("T")
_GLOBAL: Any = np.random  # not all of it is declared
MERSENNE_BYTES = 4 * 625  # the state of the generator: 624 words, and the position in them


class KeyedRandom:
    """Calls functions that may draw from the global generators.

    >>> rows = KeyedRandom()
    >>> first, second = (rows.call(random.random, lambda: (seed(7), random.random())[1]) for _ in range(2))
    >>> first == second
    True
    """

    def __init__(self) -> None:
        self._generators = _Generators()
        self._draws = False

    def call(self, plain: Callable[[], T], seeded: Callable[[], T]) -> T:
        """What a call returns. `seeded` does the same as `plain`, and seeds before it draws."""
        before = self._generators.states()
        if not self._draws:
            try:
                result = plain()
            except BaseException:
                self._generators.restore(before)
                raise
            if not self._generators.changed(before):
                return result
            self._draws = True
        try:
            return seeded()
        finally:
            self._generators.restore(before)


def seed(key: int) -> None:
    """Seed the global generators of this process."""
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)  # noqa: NPY002
    torch.default_generator.manual_seed(key & 0x7FFFFFFFFFFFFFFF)


class _Generators:
    """The states of the global generators.

    NumPy needs long to copy its state, so the last copy is kept: a look at the memory of the
    generator shows whether it still holds. One that keeps half of a pair of normal numbers is
    copied each time, as that half is elsewhere.
    """

    def __init__(self) -> None:
        self._memory = b""
        self._copy: Any = None

    def states(self) -> tuple[Any, ...]:
        return random.getstate(), self._numpy(), torch.default_generator.get_state()

    def changed(self, before: tuple[Any, ...]) -> bool:
        python, numpy, of_torch = before
        return (
            _python_differs(random.getstate(), python)
            or self._numpy() is not numpy
            or not torch.equal(torch.default_generator.get_state(), of_torch)
        )

    def restore(self, states: tuple[Any, ...]) -> None:
        python, numpy, of_torch = states
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
        torch.default_generator.set_state(of_torch)
        self._memory, self._copy = _numpy_memory(), numpy

    def _numpy(self) -> Any:
        """The state of NumPy's generator: the same object as long as nothing was drawn."""
        memory = _numpy_memory()
        if self._copy is None or memory != self._memory or not memory or self._copy["has_gauss"]:
            now: Any = np.random.get_state(legacy=False)  # noqa: NPY002
            if self._copy is None or not _same(now, self._copy):
                self._copy = now
            self._memory = memory
        return self._copy


def _python_differs(now: Any, before: Any) -> bool:
    """Drawing moves the position, which is the last word, or replaces all words."""
    return bool(now[1][-1] != before[1][-1] or now[1][0] != before[1][0] or now[2] != before[2])


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(_same(a[name], b[name]) for name in a)
    return bool(np.array_equal(a, b))


def _numpy_memory() -> bytes:
    """The memory of NumPy's global generator; empty if it is not the usual one."""
    generator = _GLOBAL.get_bit_generator()
    if not isinstance(generator, np.random.MT19937):
        return b""
    return ctypes.string_at(generator.ctypes.state_address, MERSENNE_BYTES)
