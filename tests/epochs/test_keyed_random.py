"""Functions that draw from the global generators get numbers of a key, and leave the generators alone."""

import random
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from fmsdata.epochs.keyed_random import KeyedRandom

DRAWS: dict[str, Callable[[], Any]] = {
    "python": random.random,
    "python normal": lambda: random.gauss(0, 1),
    "numpy": lambda: float(np.random.rand()),  # noqa: NPY002
    "numpy normal": lambda: float(np.random.randn()),  # noqa: NPY002
    "torch": lambda: float(torch.rand(1)),
    "torch normal": lambda: float(torch.randn(1)),
    "nothing": lambda: 0.0,
}


def states() -> list[Any]:
    numpy: Any = np.random.get_state(legacy=False)  # noqa: NPY002
    return [random.getstate(), str(numpy), numpy["state"]["key"].tolist(), torch.get_rng_state().tolist()]


@pytest.mark.parametrize(("draw", "trainer"), list(product(DRAWS, DRAWS)))
def test_numbers_depend_on_the_key_and_the_trainer_sees_nothing(draw: str, trainer: str) -> None:
    def drawn(calls: KeyedRandom, key: int) -> Any:
        def function(seed: Callable[[int], None]) -> Any:
            seed(key)
            return DRAWS[draw]()

        return calls.call(function)

    first, second = KeyedRandom(), KeyedRandom()
    expected = [drawn(first, key) for key in (1, 2, 3)]
    assert len(set(expected)) == (1 if draw == "nothing" else 3)
    for key in (3, 1, 2):
        DRAWS[trainer]()  # what the trainer draws in between changes nothing
        before = states()
        assert drawn(second, key) == expected[key - 1]
        assert states() == before


def test_generators_are_restored_after_an_error() -> None:
    def fails(seed: Callable[[int], None]) -> None:
        random.random(), torch.rand(1), np.random.rand()  # noqa: NPY002
        raise ValueError("row 7")

    before = states()
    with pytest.raises(ValueError, match="row 7"):
        KeyedRandom().call(fails)
    assert states() == before


def test_a_function_that_draws_nothing_is_called_once() -> None:
    calls: list[int] = []
    keyed = KeyedRandom()
    for _ in range(3):
        keyed.call(lambda _: calls.append(1))
    assert len(calls) == 3
    assert not keyed.draws


def test_another_generator_of_numpy_works_too() -> None:
    numpy: Any = np.random
    usual = numpy.get_bit_generator()
    numpy.set_bit_generator(np.random.PCG64(3))
    try:
        before = str(np.random.get_state(legacy=False))  # noqa: NPY002

        def draw(seed: Callable[[int], None]) -> float:
            seed(1)
            return float(np.random.rand())  # noqa: NPY002

        assert KeyedRandom().call(draw) == KeyedRandom().call(draw)
        assert str(np.random.get_state(legacy=False)) == before  # noqa: NPY002
    finally:
        numpy.set_bit_generator(usual)


@pytest.mark.parametrize("rows_first", [True, False])
def test_draws_that_begin_late_are_keyed_and_those_of_the_trainer_stay(rows_first: bool) -> None:
    """After many calls in which nothing was drawn: by rows first, or by the trainer."""
    random.seed(5)
    keyed, expected = KeyedRandom(), random.Random(5)

    def rows(seed: Callable[[int], None], key: int, draws: bool) -> float:
        seed(key)
        return random.random() if draws else 0.0

    for key in range(50):
        keyed.call(rows, key, False)
    order = ["rows", "trainer"] if rows_first else ["trainer", "rows"]
    for _ in range(3):
        for who in order:
            if who == "rows":
                assert keyed.call(rows, 7, True) == random.Random(7).random()
                assert keyed.call(rows, 8, False) == 0.0
            else:
                assert random.random() == expected.random()
                assert keyed.call(rows, 9, False) == 0.0


def test_an_error_after_many_calls_leaves_the_generators_as_they_were() -> None:
    keyed = KeyedRandom()
    for _ in range(50):
        keyed.call(lambda seed: seed(1))
    before = random.getstate()

    def fails(seed: Callable[[int], None]) -> None:
        seed(1)
        random.random()
        raise ValueError("no row")

    with pytest.raises(ValueError, match="no row"):
        keyed.call(fails)
    assert random.getstate() == before


@pytest.mark.parametrize("calls", [3, 100])
@pytest.mark.parametrize("fails", [False, True])
def test_what_the_trainer_drew_between_quiet_calls_is_not_drawn_again(calls: int, fails: bool) -> None:
    """However long nobody has drawn before, and whether the next call fails or is the first that draws."""
    keyed = KeyedRandom()
    for _ in range(calls):
        keyed.call(lambda seed: seed(1))
    drawn = torch.rand(3), np.random.rand(), random.random()  # noqa: NPY002
    before = torch.get_rng_state(), numpy_state(), random.getstate()

    def reads(seed: Callable[[int], None]) -> float:
        seed(1)
        if fails:
            raise ValueError("no row")
        return random.random()

    with pytest.raises(ValueError, match="no row") if fails else nullcontext():
        assert keyed.call(reads) == random.Random(1).random()
    assert drawn
    assert torch.equal(torch.get_rng_state(), before[0])
    assert numpy_state() == before[1]
    assert random.getstate() == before[2]


def numpy_state() -> list[int]:
    state: Any = np.random.get_state(legacy=False)  # noqa: NPY002
    found: list[int] = [*state["state"]["key"].tolist(), state["state"]["pos"]]
    return found
