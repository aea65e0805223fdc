"""How far lanes drift: the estimate from counts is what the plan of a real corpus gives."""

import numpy as np
import pytest

from fmsdata.planning.blocks import cut_blocks
from fmsdata.planning.counts import Counts
from fmsdata.planning.drift import drift, lanes_within, well_divisible
from fmsdata.planning.lane_order import LaneOrder

BLOCK = 1 << 18


def corpus(documents: int, shards: int, spread: float) -> tuple[Counts, list[np.ndarray]]:  # type: ignore[type-arg]
    rng = np.random.default_rng(0)
    lengths = [1 + rng.lognormal(6, spread, documents // shards).astype(int) for _ in range(shards)]
    names = tuple(f"{shard:03}" for shard in range(shards))
    return Counts(names, np.array([len(one) for one in lengths]), np.array([one.sum() for one in lengths])), lengths


def measured(counts: Counts, lengths: list[np.ndarray], lanes: int) -> float:  # type: ignore[type-arg]
    """What is of the next epoch when each lane has read its part of an epoch's tokens."""
    plan = cut_blocks(counts, lanes, BLOCK)
    early = 0.0
    for lane in range(lanes):
        order = LaneOrder(plan, lane=lane, lanes=lanes, seed=1, source="web")
        place = tokens = 0
        while (block := order.block(place)) is not None and block.epoch == 0:
            shard, first, stop = block.address
            tokens += int(lengths[shard][first:stop].sum())
            place += 1
        early += max(0.0, int(counts.tokens.sum()) / lanes - tokens)
    return early / int(counts.tokens.sum())


@pytest.mark.parametrize(
    ("documents", "lanes"), [(20_000, 1024), (20_000, 192), (20_000, 96), (2_000, 192), (300, 192), (300, 512)]
)
def test_the_drift_is_that_of_a_real_plan(documents: int, lanes: int) -> None:
    counts, lengths = corpus(documents, 10, spread=1.1)
    assert drift(counts, lanes, BLOCK) == pytest.approx(measured(counts, lengths, lanes), rel=0.3)


def test_a_thousand_lanes_on_twenty_thousand_documents_drift_by_an_eighth_of_an_epoch() -> None:
    counts, _ = corpus(20_000, 10, spread=1.1)
    assert drift(counts, 1024, BLOCK) == pytest.approx(0.13, abs=0.01)


def test_one_lane_does_not_drift_and_documents_of_one_length_hardly() -> None:
    counts, _ = corpus(1000, 10, spread=1.1)
    assert drift(counts, 1, BLOCK) == 0
    same = Counts(("a", "b"), np.array([10_000, 10_000]), np.array([4_000_000, 4_000_000]))
    assert drift(same, 1024, BLOCK) < 0.02
    assert drift(same, 100, BLOCK) < 0.01


def test_with_fewer_blocks_than_lanes_the_rest_of_the_lanes_is_in_another_epoch() -> None:
    same = Counts(("a",), np.array([50]), np.array([5000]))
    assert drift(same, 100, BLOCK) == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize("world_size", [1, 3, 8, 64])
def test_the_proposed_lanes_keep_the_drift_within_the_bound(world_size: int) -> None:
    counts, lengths = corpus(20_000, 10, spread=1.1)
    lanes = lanes_within(counts, BLOCK, bound=0.05, below=1024, world_size=world_size)
    assert lanes is not None
    assert lanes % world_size == 0
    assert 60 < lanes < 192
    assert drift(counts, lanes, BLOCK) <= 0.05
    assert measured(counts, lengths, lanes) < 0.06


def test_where_no_number_of_lanes_is_enough_there_is_none() -> None:
    counts, _ = corpus(300, 10, spread=1.1)
    assert lanes_within(counts, BLOCK, bound=0.05, below=192, world_size=16) is None
    assert lanes_within(counts, BLOCK, bound=0.05, below=1) is None


def test_well_divisible_numbers_are_those_with_the_most_divisors() -> None:
    def divisors(number: int) -> int:
        return sum(number % other == 0 for other in range(1, number + 1))

    numbers = well_divisible(400)
    assert numbers == [n for n in range(1, 401) if divisors(n) == max(map(divisors, range(1, n + 1)))]
    assert well_divisible(0) == []
