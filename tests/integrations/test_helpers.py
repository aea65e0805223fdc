"""The checks of the integration tests notice what they are for."""

import pytest

from tests.integrations.helpers import Result, check_chain

STREAM = list(range(100, 140))
TWO_RANKS = [[[100, 102], [104, 106], [108, 110]], [[101, 103], [105, 107], [109, 111]]]  # batches of 2


def result(*trained: list[list[int]]) -> Result:
    return Result([0], [], [], list(trained), [])


def test_a_run_that_resumes_at_its_checkpoint_is_exact() -> None:
    check_chain(STREAM, (result(*TWO_RANKS), 2), (result([[108, 109], [110, 111]]), None))


@pytest.mark.parametrize(
    "resumed",
    [
        [[[100, 101], [102, 103]]],  # from the start
        [[[110, 111], [112, 113]]],  # a batch was lost
        [[[106, 107], [108, 109]]],  # a batch was repeated
        [[[108, 109]], [[110, 111]]],  # the samples of the other rank
    ],
)
def test_a_run_that_resumes_elsewhere_is_noticed(resumed: list[list[list[int]]]) -> None:
    with pytest.raises(AssertionError):
        check_chain(STREAM, (result(*TWO_RANKS), 2), (result(*resumed), None))


def test_a_checkpoint_that_is_further_than_the_run_is_noticed() -> None:
    with pytest.raises(AssertionError):
        check_chain(STREAM, (result(*TWO_RANKS), 4))
