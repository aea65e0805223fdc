"""Parts of a file: none overlap, none are lost, and the limit holds."""

from hypothesis import given
from hypothesis import strategies as st

from fmsdata.storage.extents import Extents

LIMIT = 1000


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 400)), max_size=80))
def test_parts_never_overlap_and_stay_within_the_limit(steps: list[tuple[bool, int]]) -> None:
    extents = Extents(LIMIT)
    taken: list[tuple[int, int]] = []
    for take, number in steps:
        if take:
            start = extents.take(number)
            if start is not None:
                taken.append((start, number))
        elif taken:
            extents.free(*taken.pop(number % len(taken)))
        taken.sort()
        ends = [start + size for start, size in taken]
        assert all(end <= start for end, (start, _) in zip(ends, taken[1:], strict=False))
        assert extents.used == sum(size for _, size in taken)
        assert extents.end == max(ends, default=0) <= LIMIT


@given(st.permutations(range(10)))
def test_what_is_free_can_be_taken_whole(order: list[int]) -> None:
    """In whatever order its parts became free."""
    extents = Extents(LIMIT)
    starts = [extents.take(100) for _ in range(10)]
    assert None not in starts
    assert extents.take(1) is None
    for number in order:
        extents.free(100 * number, 100)
    assert extents.end == 0
    assert extents.take(LIMIT) == 0


def test_the_smallest_part_that_is_large_enough_is_used() -> None:
    extents = Extents(LIMIT)
    for size in (300, 10, 100, 10, 200, 10):
        extents.take(size)
    for start, size in ((0, 300), (310, 100), (420, 200)):
        extents.free(start, size)
    assert [extents.take(size) for size in (150, 90, 300)] == [420, 310, 0]


def test_a_file_may_be_kept_shorter_than_its_limit() -> None:
    extents = Extents(LIMIT)
    assert extents.take(100, most=99) is None
    assert extents.take(100, most=100) == 0
