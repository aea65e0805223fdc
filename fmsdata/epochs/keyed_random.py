"""Random numbers of rows that depend on the row alone, from generators that belong to the trainer.

Transforms draw from the global generators of Python, NumPy and torch. Here these are seeded for each
row, and set back to what the trainer left. Most rows draw nothing, and seeding costs more than
reading a small row. So a generator is not seeded until rows are seen to draw from it: then these
are read again, seeded, as all rows after them.

The generators are looked at before and after each batch, to know whether the trainer or the rows
draw.
"""

import ctypes
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from fmsdata.core.keys import MASK, Keys

T = TypeVar("T")
_TORCH = torch.default_generator
_NUMPY: Any = np.random  # not all of it is declared
NUMPY, TORCH = 1, 2  # their places among the generators
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
            _Generator(_look_at_python, random.getstate, random.setstate),
            _Generator(_look_at_numpy, _numpy_state, np.random.set_state),
            _Generator(_look_at_torch, _TORCH.get_state, _TORCH.set_state),
        )
        self._drawn: list[int] = []  # those that functions have drawn from
        self._seeder = Seeder([])
        self._watched = list(range(len(self._all)))  # the others
        self._states = [generator.state() for generator in self._all]  # when they were last looked at
        self._glance = _Glance()
        self._seen: Any = None  # at a glance, when they were in these states

    @property
    def draws(self) -> bool:
        """Whether anything was drawn so far."""
        return bool(self._drawn)

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """What a function returns. Its first argument is a function to seed with: it calls it before it may draw."""
        self._look()
        return self._watch(function, *arguments)

    def _look(self) -> list[Any]:
        """The states of all generators: the same list as long as nothing was drawn."""
        seen = self._glance.look(self._states[NUMPY])
        if seen is None or seen != self._seen:
            states = [generator.state() for generator in self._all]
            if any(now is not then for now, then in zip(states, self._states, strict=True)):
                self._states = states
            self._seen = self._glance.look(self._states[NUMPY])
        return self._states

    def _watch(self, function: Callable[..., T], *arguments: Any) -> T:
        """What the function returns, with the generators that it draws from seeded, and restored after it."""
        before = self._states
        try:
            result = function(self._seeder, *arguments)
            while new := self._newly_drawn(before):
                for at in (*new, *self._drawn):
                    self._all[at].restore(before[at])
                self._states, self._seen = before, None
                self._drawn = [*self._drawn, *new]
                self._seeder = Seeder([SEEDS[at] for at in self._drawn])
                self._watched = [at for at in self._watched if at not in new]
                result = function(self._seeder, *arguments)
        except BaseException:
            self._restore(before)
            raise
        for at in self._drawn:
            self._all[at].restore(before[at])
        return result

    def _newly_drawn(self, before: list[Any]) -> list[int]:
        """The generators that were drawn from for the first time."""
        if not self._drawn and self._look() is before:
            return []
        if self._drawn == [TORCH] and self._glance.others_are(self._seen):
            return []
        return [at for at in self._watched if self._all[at].state() is not before[at]]

    def _restore(self, states: list[Any]) -> None:
        for generator, state in zip(self._all, states, strict=True):
            generator.restore(state)
        self._states, self._seen = states, None


class Seeder:
    """Seeds some generators.

    >>> first, second = random.Random(), random.Random()
    >>> Seeder([(first.seed, MASK), (second.seed, MASK)])(7)
    >>> first.random() == second.random()
    True
    """

    def __init__(self, seeds: Sequence[tuple[Callable[[int], Any], int]]) -> None:
        self._seeds = seeds  # and the bits of a key that each of them takes

    def __call__(self, key: int) -> None:
        for seed, bits in self._seeds:
            seed(key & bits)

    def each(self, keys: Keys) -> Iterator[Any]:
        """Seeds with one key after the other, whenever the next item is taken."""
        if len(self._seeds) != 1:
            return map(self, keys.tolist())
        ((seed, bits),) = self._seeds
        return map(seed, (keys & np.uint64(bits)).tolist())


SEEDS = (
    (random.seed, MASK),
    (_NUMPY.seed, 0xFFFFFFFF),
    (_TORCH.manual_seed, 0x7FFFFFFFFFFFFFFF),
)


class _Generator:
    """One of them. Copying a state takes long, so the last copy is kept as long as it holds.

    `look` returns what differs when the state does, or None if that can't be seen quickly.
    """

    def __init__(
        self,
        look: Callable[[Any], Any],
        copy: Callable[[], Any],
        put: Callable[[Any], Any],
    ) -> None:
        self._look, self._copy, self._put = look, copy, put
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

    def restore(self, state: Any) -> None:
        self._put(state)
        if state is not self._state:  # otherwise what was seen is seen again
            self._state, self._seen = state, self._look(state)


class _Glance:
    """All generators at once, faster than one by one: None if one of them can't be seen quickly."""

    def __init__(self) -> None:
        self._numpy: Any = None  # the generator whose memory this is
        self._word, self._position = ctypes.c_uint64(), ctypes.c_int32()

    def look(self, numpy_state: Any) -> tuple[Any, ...] | None:
        """What differs when a state does, if this is the last known state of NumPy's generator."""
        numpy = _NUMPY.get_bit_generator()
        if numpy is not self._numpy:
            if type(numpy) is not np.random.MT19937:
                return None
            address = numpy.ctypes.state_address
            self._word = ctypes.c_uint64.from_address(address)
            self._position = ctypes.c_int32.from_address(address + MERSENNE_BYTES - 4)
            self._numpy = numpy
        if numpy_state["has_gauss"] or not _IN_MEMORY:
            return None
        state = _TORCH.get_state()
        words = _TORCH_STATE.from_address(state.data_ptr()).raw
        return words, numpy, *self._others()

    def others_are(self, seen: tuple[Any, ...] | None) -> bool:
        """Whether all generators but torch's are as they were seen."""
        return seen is not None and seen[1:] == (_NUMPY.get_bit_generator(), *self._others())

    def _others(self) -> tuple[Any, ...]:
        return _PYTHON_MEMORY.value, _PYTHON.gauss_next, self._word.value, self._position.value  # type: ignore[attr-defined]


_TORCH_STATE = ctypes.c_char * _TORCH.get_state().nbytes


def _memory_of(generator: random.Random) -> ctypes.c_uint64:
    """The position and the first word of a generator of Python, where its object holds them."""
    return ctypes.c_uint64.from_address(id(generator) + object.__basicsize__)


def _state_is_in_memory() -> bool:
    """Whether that changes with every draw, with a full turn of the position too, and comes back with the state."""
    if sys.implementation.name != "cpython" or type(random.Random()).__basicsize__ < object.__basicsize__ + 8:
        return False
    generator = random.Random(1)
    memory = _memory_of(generator)
    state, seen = generator.getstate(), [memory.value]
    for words in (1, 623, 624):
        generator.getrandbits(32 * words)
        seen.append(memory.value)
    generator.setstate(state)
    return len(set(seen)) == len(seen) and seen[0] == memory.value


_PYTHON: random.Random = random.random.__self__  # type: ignore[attr-defined]  # the generator behind the module's functions
_IN_MEMORY = _state_is_in_memory()
_PYTHON_MEMORY = _memory_of(_PYTHON) if _IN_MEMORY else ctypes.c_uint64()


def _look_at_python(_: Any) -> Any:
    """Each draw moves the position, and a full turn of the position renews all words.

    `getstate` makes objects of 625 numbers, which takes a tenth of the time of a small batch.
    """
    if _IN_MEMORY:
        return _PYTHON_MEMORY.value, _PYTHON.gauss_next  # type: ignore[attr-defined]
    _, (word, *_, position), half = random.getstate()
    return word, position, half


def _look_at_numpy(state: Any) -> Any:
    """None if it keeps half of a pair of normal numbers, which is elsewhere."""
    generator = _NUMPY.get_bit_generator()
    if state["has_gauss"] or not isinstance(generator, np.random.MT19937):
        return None
    return ctypes.string_at(generator.ctypes.state_address, MERSENNE_BYTES)


def _look_at_torch(_: Any) -> Any:
    state = _TORCH.get_state()
    return _TORCH_STATE.from_address(state.data_ptr()).raw


def _numpy_state() -> Any:
    return np.random.get_state(legacy=False)  # noqa: NPY002


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(_same(a[name], b[name]) for name in a)
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    return bool(a == b) if isinstance(a, tuple) else bool(np.array_equal(a, b))
