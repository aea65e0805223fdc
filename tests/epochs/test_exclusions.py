"""Sets of excluded rows, their texts, and the order of rows without them."""

from collections.abc import Iterable
from itertools import count, repeat

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from fmsdata.core.permutation import Permutation
from fmsdata.epochs.exclusions import FEW, Exclusions, checked_ids
from fmsdata.epochs.passes import SMALL, Pass
from fmsdata.errors import ConfigError, StateError

ROWS = 300
SETS = st.sets(st.integers(0, ROWS - 1), max_size=ROWS)


def exclusions(ids: set[int]) -> Exclusions:
    return Exclusions.none().with_ids(np.array(sorted(ids), np.int64))


@settings(deadline=None, max_examples=40)
@given(SETS, SETS)
def test_sets_are_sets(a: set[int], b: set[int]) -> None:
    both = exclusions(a).with_ids(np.array(list(b), np.int64))
    assert both.ids.tolist() == sorted(a | b)
    assert both.without_ids(np.array(list(b), np.int64)).ids.tolist() == sorted(a - b)


@settings(deadline=None, max_examples=40)
@given(SETS)
def test_a_text_is_read_back(ids: set[int]) -> None:
    text = exclusions(ids).text
    assert Exclusions.parse(text, ROWS).ids.tolist() == sorted(ids)
    assert text.startswith("[") == (len(ids) <= FEW)
    if ids:
        with pytest.raises(StateError, match="excluded rows"):
            Exclusions.parse(text, max(ids) // 8 * 8)


@pytest.mark.parametrize(
    "text", [None, 3, [], "", "[", "[3, 1]", "[1, 1]", "[-1]", "[300]", "[1.5]", '["1"]', "[[[", "AAAA", "%", "[1e400]"]
)
def test_a_damaged_text_is_an_error(text: object) -> None:
    with pytest.raises(StateError, match="damaged"):
        Exclusions.parse(text, ROWS)


def test_a_text_that_unpacks_to_more_than_the_rows_is_refused() -> None:
    bomb = Exclusions(np.arange(0, 80_000_000, 1000)).text
    with pytest.raises(StateError, match="damaged"):
        Exclusions.parse(bomb, ROWS)


@pytest.mark.parametrize("ids", [count(), repeat(3)])
def test_ids_without_an_end_are_refused(ids: Iterable[int]) -> None:
    with pytest.raises(ConfigError, match="more than 20 ids for 10 rows; give a list"):
        checked_ids(ids, 10)
    assert checked_ids((row for row in (3, 3, 1)), 10).tolist() == [1, 3]


@settings(deadline=None, max_examples=40)
@given(st.sampled_from([1, 7, SMALL, SMALL + 1, 3000]), st.sets(st.integers(0, 2999), max_size=50), st.integers(0, 99))
def test_a_pass_is_the_order_of_all_rows_without_the_excluded(rows: int, ids: set[int], key: int) -> None:
    excluded = np.array(sorted(row for row in ids if row < rows), np.int64)
    for which in (key, None):
        all_rows = Pass(rows, which, np.empty(0, np.int64)).rows(np.arange(rows)).tolist()
        assert sorted(all_rows) == list(range(rows))
        order = Pass(rows, which, excluded)
        left = [row for row in all_rows if row not in set(excluded.tolist())]
        assert order.size == len(left)
        assert order.rows(np.arange(order.size)).tolist() == left
        places = order.places(np.arange(order.size)).tolist()
        assert [all_rows[place] for place in places] == left
        assert [order.before(place) for place in places] == list(range(len(left)))
        assert order.before(rows) == order.size


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 5000), st.integers(0, 2**63))
def test_the_inverse_of_an_array_is_the_inverse_of_each(n: int, key: int) -> None:
    permutation = Permutation(n, key)
    some = np.arange(0, n, max(1, n // 50))
    assert permutation.inverse_array(permutation.array(some)).tolist() == some.tolist()
    assert permutation.inverse_array(some).tolist() == [permutation.inverse(place) for place in some.tolist()]
