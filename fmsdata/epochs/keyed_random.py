"""Random numbers of rows that depend on the row alone, from generators that belong to the trainer.

Transforms draw from the global generators of Python, NumPy and torch. Here these are seeded for each
row, and set back to what the trainer left. Most rows draw nothing, and seeding costs more than
reading a small row. So a generator is not seeded until rows are seen to draw from it: then these
are read again, seeded, as all rows after them.

If neither rows nor the trainer draw during the first batches, the generators are looked at only
once for each batch, after it.
"""

import ctypes
import math
import random
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch

T = TypeVar("T")
_TORCH = torch.default_generator
_NUMPY: Any = np.random  # not all of it is declared
LOOKS = 8
MERSENNE_BYTES = 4 * 625  # the state of NumPy's generator: 624 words, and the position in them


class KeyedRandom:
    """Calls functions that may draw from the global generators.

    >>> rows = KeyedRandom()
    >>> first, second = (rows.call(lambda seed: (seed(7), random.random())[1]) for _ in range(2))
    >>> first == second
    True
    """

    def __init__(self) -> None:
        self._all = (
            _Generator(_look_at_python, random.getstate, random.setstate, random.seed),
            _Generator(_look_at_numpy, _numpy_state, np.random.set_state, _seed_numpy),
            _Generator(_look_at_torch, _TORCH.get_state, _TORCH.set_state, _seed_torch),
        )
        self._drawn: list[int] = []  # those that functions have drawn from
        self._watched = list(range(len(self._all)))  # the others
        self._after = [generator.state() for generator in self._all]  # the last call
        self._looks: float = LOOKS  # calls before which the generators are looked at, too

    @property
    def draws(self) -> bool:
        """Whether anything was drawn so far."""
        return bool(self._drawn)

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """What a function returns. Its first argument is a function to seed with: it calls it before it may draw."""
        if self._looks or self._drawn:
            before = [generator.state() for generator in self._all]
            trainer_draws = any(now is not then for now, then in zip(before, self._after, strict=True))
            self._looks = math.inf if trainer_draws else max(0, self._looks - 1)
            return self._watch(before, function, *arguments)
        try:
            result = function(self._seed, *arguments)
        except BaseException:
            if self._have_moved():
                self._restore(self._after)
            raise
        if not self._have_moved():
            return result
        found = [generator.state() for generator in self._all]
        self._restore(self._after)
        result = self._watch(self._after, function, *arguments)
        if not self._drawn:  # it was the trainer
            self._restore(found)
            self._after, self._looks = found, math.inf
        return result

    def _have_moved(self) -> bool:
        """Whether anything was drawn since the last call."""
        python, numpy, of_torch = self._all
        return python.has_moved() or numpy.has_moved() or of_torch.has_moved()

    def _watch(self, before: list[Any], function: Callable[..., T], *arguments: Any) -> T:
        """The same, if these are the states of the generators."""
        self._after = before
        try:
            result = function(self._seed, *arguments)
            while new := [at for at in self._watched if self._all[at].state() is not before[at]]:
                for at in (*new, *self._drawn):
                    self._all[at].restore(before[at])
                self._drawn = [*self._drawn, *new]
                self._watched = [at for at in self._watched if at not in new]
                result = function(self._seed, *arguments)
        except BaseException:
            self._restore(before)
            raise
        for at in self._drawn:
            self._all[at].restore(before[at])
        return result

    def _restore(self, states: list[Any]) -> None:
        for generator, state in zip(self._all, states, strict=True):
            generator.restore(state)

    def _seed(self, key: int) -> None:
        for at in self._drawn:
            self._all[at].seed(key)


class _Generator:
    """One of them. Copying a state takes long, so the last copy is kept as long as it holds.

    `look` returns what differs when the state does, or None if that can't be seen quickly.
    """

    def __init__(
        self,
        look: Callable[[Any], Any],
        copy: Callable[[], Any],
        put: Callable[[Any], Any],
        seed: Callable[[int], Any],
    ) -> None:
        self._look, self._copy, self._put, self.seed = look, copy, put, seed
        self._state = copy()
        self._seen = look(self._state)

    def state(self) -> Any:
        seen = self._look(self._state)
        if seen is None or seen != self._seen:
            now = self._copy()
            if not _same(now, self._state):
                self._state = now
            self._seen = self._look(self._state)
        return self._state

    def has_moved(self) -> bool:
        """Whether it differs from the last copy."""
        before = self._state
        seen = self._look(before)
        return (seen is None or seen != self._seen) and self.state() is not before

    def restore(self, state: Any) -> None:
        self._put(state)
        self._state, self._seen = state, self._look(state)


def _memory_of(generator: random.Random) -> bytes:
    """The position and the first word of a generator of Python, as its object holds them."""
    return ctypes.string_at(id(generator) + object.__basicsize__, 8)


def _state_is_in_memory() -> bool:
    """Whether that changes with every draw, with a full turn of the position too, and comes back with the state."""
    if sys.implementation.name != "cpython" or type(random.Random()).__basicsize__ < object.__basicsize__ + 8:
        return False
    generator = random.Random(1)
    state, seen = generator.getstate(), [_memory_of(generator)]
    for words in (1, 623, 624):
        generator.getrandbits(32 * words)
        seen.append(_memory_of(generator))
    generator.setstate(state)
    return len(set(seen)) == len(seen) and seen[0] == _memory_of(generator)


_PYTHON: random.Random = random.random.__self__  # type: ignore[attr-defined]  # the generator behind the module's functions
_IN_MEMORY = _state_is_in_memory()


def _look_at_python(_: Any) -> Any:
    """Each draw moves the position, and a full turn of the position renews all words.

    `getstate` makes objects of 625 numbers, which takes a tenth of the time of a small batch.
    """
    if _IN_MEMORY:
        return _memory_of(_PYTHON), _PYTHON.gauss_next  # type: ignore[attr-defined]
    _, (word, *_, position), half = random.getstate()
    return word, position, half


def _look_at_numpy(state: Any) -> Any:
    """None if it keeps half of a pair of normal numbers, which is elsewhere."""
    generator = _NUMPY.get_bit_generator()
    if state["has_gauss"] or not isinstance(generator, np.random.MT19937):
        return None
    return ctypes.string_at(generator.ctypes.state_address, MERSENNE_BYTES)


def _look_at_torch(_: Any) -> Any:
    return _TORCH.get_state().numpy().tobytes()


def _seed_torch(key: int) -> None:
    _TORCH.manual_seed(key & 0x7FFFFFFFFFFFFFFF)


def _seed_numpy(key: int) -> None:
    np.random.seed(key & 0xFFFFFFFF)  # noqa: NPY002


def _numpy_state() -> Any:
    return np.random.get_state(legacy=False)  # noqa: NPY002


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(_same(a[name], b[name]) for name in a)
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    return bool(a == b) if isinstance(a, tuple) else bool(np.array_equal(a, b))
