"""The keyed bijection: a permutation for every n, and one without visible structure.

Statistical tests use fixed keys, so that they cannot fail by chance. Their bounds are given in standard deviations
of what a truly random permutation would show.
"""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fmsdata.core.keys import Ints, key_of, keyed_order
from fmsdata.core.permutation import WORTH_TABLES, Permutation

KEYS = st.integers(0, 2**64 - 1)
SIGMAS = 6.0


def sample(n: int, count: int, seed: int = 0) -> Ints:
    """Some numbers below n, or all of them if there are not more."""
    return np.arange(n) if n <= count else np.random.default_rng(seed).integers(0, n, count)


def deviation(hits: float, trials: int, probability: float) -> float:
    """How many standard deviations the number of hits lies off its expectation."""
    return abs(hits - trials * probability) / math.sqrt(trials * probability * (1 - probability))


def test_every_small_n_is_permuted_and_one_call_gives_what_the_array_gives() -> None:
    for n in range(1, 301):
        permutation = Permutation(n, key_of("small", n))
        many = permutation.array(np.arange(n)).tolist()
        assert sorted(many) == list(range(n))
        assert many == [permutation(i) for i in range(n)]


@pytest.mark.parametrize("n", [1023, 1024, 1025, 9973, 2**16, 99_999, 500 * 500, 500 * 500 + 1, 2**20 - 1])
def test_every_larger_n_is_permuted(n: int) -> None:
    permutation = Permutation(n, key_of("large", n))
    places = permutation.array(np.arange(n))
    assert (np.bincount(places, minlength=n) == 1).all()
    some = np.linspace(0, n - 1, 200).astype(np.int64)
    assert places[some].tolist() == [permutation(i) for i in some.tolist()]


@settings(deadline=None)
@given(n=st.integers(1, 10**9), key=KEYS, data=st.data())
def test_distinct_numbers_have_distinct_places_within_range(n: int, key: int, data: st.DataObject) -> None:
    inputs = data.draw(st.lists(st.integers(0, n - 1), unique=True, min_size=1, max_size=50))
    permutation = Permutation(n, key)
    places = [permutation(i) for i in inputs]
    assert all(0 <= place < n for place in places)
    assert len(set(places)) == len(places)
    assert permutation.array(np.array(inputs)).tolist() == places


@settings(deadline=None)
@given(n=st.integers(1, 100_000), key=KEYS)
def test_places_are_the_same_when_many_were_asked_for(n: int, key: int) -> None:
    """The rounds are in tables then."""
    some = sample(n, 500)
    before, permutation = Permutation(n, key).array(some), Permutation(n, key)
    for _ in range(3 + WORTH_TABLES * math.isqrt(n) // len(some)):
        assert permutation.array(some).tolist() == before.tolist()
    assert before.tolist() == [permutation(i) for i in some.tolist()]
    assert permutation.array(some[:0]).tolist() == []


@settings(deadline=None)
@given(key=KEYS, base=st.integers(2, 30_000), off=st.integers(-2, 2))
def test_numbers_next_to_a_square_are_permuted_like_others(key: int, base: int, off: int) -> None:
    n = base * base + off
    permutation = Permutation(n, key)
    inputs = np.unique(np.concatenate([np.arange(min(n, 20)), np.arange(max(0, n - 20), n)]))
    places = permutation.array(inputs).tolist()
    assert len(set(places)) == len(places)
    assert all(0 <= place < n for place in places)
    assert places == [permutation(i) for i in inputs.tolist()]


def test_the_inverse_leads_back_for_every_small_n() -> None:
    for n in range(1, 301):
        permutation = Permutation(n, key_of("back", n))
        assert [permutation.inverse(permutation(i)) for i in range(n)] == list(range(n))
        assert sorted(map(permutation.inverse, range(n))) == list(range(n))


@settings(deadline=None)
@given(n=st.integers(1, 10**12), key=KEYS, data=st.data())
def test_the_inverse_leads_back_and_forth(n: int, key: int, data: st.DataObject) -> None:
    permutation = Permutation(n, key)
    i = data.draw(st.integers(0, n - 1))
    assert permutation.inverse(permutation(i)) == i
    assert permutation(permutation.inverse(i)) == i


def test_an_empty_array_has_no_places() -> None:
    assert Permutation(10, 1).array(np.empty(0, np.int64)).tolist() == []


@pytest.mark.parametrize("bits", [10, 20, 29])
def test_each_input_bit_flips_each_output_bit_half_of_the_time(bits: int) -> None:
    """40,000 samples each: 6 standard deviations are 0.015. (Pairs of only 1,024 numbers come twice: double it.)"""
    n, keys, inputs = 2**bits, 40, 1000
    flips = np.zeros((bits, bits))
    for key in range(keys):
        permutation = Permutation(n, key_of("diffusion", bits, key))
        numbers = np.random.default_rng(key).integers(0, n, inputs)
        places = permutation.array(numbers)
        for bit in range(bits):
            changed = places ^ permutation.array(numbers ^ (1 << bit))
            flips[bit] += (changed[:, None] >> np.arange(bits) & 1).sum(axis=0)
    bound = SIGMAS * 0.5 / math.sqrt(keys * inputs) * (2 if bits == 10 else 1)
    assert abs(flips / (keys * inputs) - 0.5).max() < bound


@pytest.mark.parametrize("n", [10, 1000, 10**9])
def test_parity_of_the_place_does_not_follow_parity_of_the_number(n: int) -> None:
    """For one key of a small n the count is hypergeometric and not binomial, which is narrower; so the bound holds."""
    same = trials = 0
    for key in range(400):
        numbers = sample(n, 1000, key)
        places = Permutation(n, key_of("parity", n, key)).array(numbers)
        same += int((numbers % 2 == places % 2).sum())
        trials += len(numbers)
    assert deviation(same, trials, 0.5) < SIGMAS


@pytest.mark.parametrize("divisor", [2, 3, 5, 7])
@pytest.mark.parametrize("n", [1050, 210**4])
def test_remainder_of_the_place_does_not_follow_the_remainder_of_the_number(n: int, divisor: int) -> None:
    table = np.zeros((divisor, divisor))
    for key in range(50):
        numbers = sample(n, 1050, key)
        places = Permutation(n, key_of("remainder", n, key)).array(numbers)
        np.add.at(table, (numbers % divisor, places % divisor), 1)
    expected = table.sum() / divisor**2
    assert abs(table - expected).max() < SIGMAS * math.sqrt(expected)


@pytest.mark.parametrize("n", [100, 1000, 2**20, 10**9])
def test_neighbours_do_not_stay_neighbours(n: int) -> None:
    """P(i+1) = P(i) + 1 has probability 1/n; P(i+1) > P(i) has one half. Pairs overlap, which narrows the second."""
    following = ascending = trials = 0
    for key in range(100):
        numbers = sample(n - 1, 1000, key)
        permutation = Permutation(n, key_of("runs", n, key))
        step = permutation.array(numbers + 1) - permutation.array(numbers)
        following += int((step == 1).sum())
        ascending += int((step > 0).sum())
        trials += len(numbers)
    assert following <= trials / n + SIGMAS * math.sqrt(trials / n) + 1
    assert deviation(ascending, trials, 0.5) < SIGMAS


def test_steps_between_neighbours_are_as_varied_as_chance_makes_them() -> None:
    """An affine map has one step, modulo n. Of 10,000 random ones below 10**9 hardly two are the same."""
    n = 10**9
    places = Permutation(n, key_of("steps")).array(np.arange(10_001))
    assert len(np.unique(np.diff(places) % n)) > 9990


@pytest.mark.parametrize(("n", "keys"), [(2, 2000), (3, 3000), (4, 4800), (5, 7200)])
def test_every_order_of_few_numbers_is_about_equally_likely(n: int, keys: int) -> None:
    """All n! of them occur, each between half and twice as often as the mean, give or take 4 standard deviations."""
    seen = Counter(tuple(map(Permutation(n, key_of("few", key)), range(n))) for key in range(keys))
    mean = keys / math.factorial(n)
    assert len(seen) == math.factorial(n)
    assert min(seen.values()) > mean / 2 - 4 * math.sqrt(mean / 2)
    assert max(seen.values()) < mean * 2 + 4 * math.sqrt(mean * 2)


@pytest.mark.parametrize("n", [7, 50, 1000])
def test_every_number_goes_to_every_place_about_equally_often(n: int) -> None:
    keys = 3000
    first = Counter(Permutation(n, key_of("place", key))(0) for key in range(keys))
    last = Counter(Permutation(n, key_of("place", key))(n - 1) for key in range(keys))
    for seen in (first, last):
        chi_square = sum((seen[place] - keys / n) ** 2 for place in range(n)) / (keys / n)
        assert abs(chi_square - (n - 1)) < SIGMAS * math.sqrt(2 * (n - 1))


@pytest.mark.parametrize("key", [0, 1, 2**63, 2**64 - 2])
def test_neighbouring_keys_permute_unlike_each_other(key: int) -> None:
    one, other = (Permutation(10_000, key + i).array(np.arange(10_000)) for i in range(2))
    assert (one == other).sum() < 12  # expected: 1, Poisson


def test_different_keys_give_different_permutations() -> None:
    orders = {tuple(Permutation(20, key_of("different", key)).array(np.arange(20)).tolist()) for key in range(500)}
    assert len(orders) == 500


@settings(deadline=None)
@given(n=st.integers(0, 2000), key=KEYS)
def test_keyed_order_holds_every_number_once(n: int, key: int) -> None:
    order = keyed_order(n, key)
    assert order.dtype == np.int64
    assert np.array_equal(np.sort(order), np.arange(n))
    assert np.array_equal(order, keyed_order(n, key))


def test_keyed_order_differs_by_key() -> None:
    assert len({tuple(keyed_order(20, key).tolist()) for key in range(500)}) == 500


@pytest.mark.parametrize("n", [2, 3, 4])
def test_keyed_order_makes_every_order_about_equally_likely(n: int) -> None:
    keys = 200 * math.factorial(n)
    seen = Counter(tuple(keyed_order(n, key_of("order", key)).tolist()) for key in range(keys))
    assert len(seen) == math.factorial(n)
    assert max(deviation(count, keys, 1 / math.factorial(n)) for count in seen.values()) < SIGMAS


def test_keyed_order_has_no_runs() -> None:
    step = np.concatenate([np.diff(keyed_order(1000, key)) for key in range(100)])
    assert deviation(int((step > 0).sum()), len(step), 0.5) < SIGMAS
    assert (step == 1).sum() < 100 + SIGMAS * 10


def test_key_of_names_is_the_same_for_ever() -> None:
    """A change here changes the order of every run that was ever started."""
    assert key_of(42, "web", 0) == 17383739411873194012
    assert key_of("") == 1000303939227264211


def test_key_tells_numbers_from_names_and_where_one_part_ends() -> None:
    parts: list[tuple[int | str, ...]] = [
        (1,),
        ("1",),
        (1, 2),
        (12,),
        ("1", "2"),
        ("12",),
        (2, 1),
        ("a", "bc"),
        ("ab", "c"),
    ]
    assert len({key_of(*some) for some in parts}) == len(parts)


@settings(deadline=None)
@given(st.lists(st.tuples(st.text(max_size=3), st.integers()), unique=True, min_size=2, max_size=5))
def test_different_names_have_different_keys(names: list[tuple[str, int]]) -> None:
    assert len({key_of(*name) for name in names}) == len(names)


@settings(max_examples=50)
@given(n=st.integers(1, 20_000), first=st.integers(0, 19_999), step=st.integers(1, 5000))
def test_places_at_regular_steps_are_those_of_the_array(n: int, first: int, step: int) -> None:
    """Also where they are computed in several parts, and where a step is longer than a part."""
    first %= n
    permutation, numbers = Permutation(n, key=5), np.arange(first, n, step)
    assert permutation.every(first, step, len(numbers)).tolist() == permutation.array(numbers).tolist()
