"""Planning: every document in one block, every block of every epoch at one place of one lane."""

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fmsdata.core.blocks import Address
from fmsdata.core.permutation import SLAB, Permutation
from fmsdata.planning.blocks import BLOCKS_PER_LANE, BlockPlan, cut_blocks
from fmsdata.planning.counts import Counts
from fmsdata.planning.lane_order import LaneOrder, place_of

SHARDS = st.lists(st.tuples(st.integers(0, 500), st.integers(0, 5000)), min_size=1, max_size=12)


def make_counts(documents: list[int], mean: list[int] | int = 100) -> Counts:
    """Shards with these numbers of documents, of these mean lengths."""
    tokens = np.array(documents, np.int64) * np.array(mean, np.int64)
    return Counts(tuple(f"part-{i:04}.arrow" for i in range(len(documents))), np.array(documents, np.int64), tokens)


def all_blocks(plan: BlockPlan) -> list[tuple[int, int, int]]:
    return [plan.address(number) for number in range(plan.blocks)]


def one_shard(blocks: int) -> BlockPlan:
    """A source with one shard of that many blocks, each a document."""
    return BlockPlan(np.array([blocks]), np.array([0, blocks]), np.array([1.0]))


def order_over(blocks: int, *, lane: int, lanes: int, seed: int, source: str) -> LaneOrder:
    """The order of such a source."""
    return LaneOrder(one_shard(blocks), lane=lane, lanes=lanes, seed=seed, source=source)


def at(order: LaneOrder, place: int) -> tuple[int, int]:
    """The epoch and the number of the block at a place."""
    planned = order.block(place)
    assert planned is not None
    assert planned.address == (0, planned.number, planned.number + 1)
    return planned.epoch, planned.number


def order_of(
    blocks: int, places: int, *, seed: int = 1, source: str = "web", lane: int = 0, lanes: int = 1
) -> list[int]:
    order = order_over(blocks, lane=lane, lanes=lanes, seed=seed, source=source)
    return [at(order, place)[1] for place in range(places)]


def test_the_tokens_of_a_block_are_those_that_were_counted() -> None:
    """Of a shard whose documents are sorted by length, and of one of which only the mean is known."""
    parts = {1: (np.array([10, 30]), np.array([10_000, 300]))}
    counts = replace(make_counts([40, 40], [100, 257]), tokens=np.array([4000, 10_300]), blocks=parts.get)
    plan = cut_blocks(counts, 1, 1000)
    assert plan.tokens(Address(0, 0, 10)) == 1000
    assert plan.tokens(Address(1, 0, 10)) == 10_000
    assert plan.tokens(Address(1, 5, 12)) == pytest.approx(5 * 1000 + 2 * 10)
    assert plan.tokens(Address(1, 10, 40)) == 300
    assert all_blocks(plan) == all_blocks(cut_blocks(replace(counts, blocks=None), 1, 1000)), "blocks depend on it"


@settings(deadline=None)
@given(shards=SHARDS, lanes=st.integers(1, 300), block_tokens=st.integers(1, 10**6))
def test_every_document_is_in_exactly_one_block(shards: list[tuple[int, int]], lanes: int, block_tokens: int) -> None:
    counts = make_counts([documents for documents, _ in shards], [mean for _, mean in shards])
    covered = [np.zeros(documents, np.int64) for documents, _ in shards]
    for shard, first, stop in all_blocks(cut_blocks(counts, lanes, block_tokens)):
        assert 0 <= first < stop <= shards[shard][0]
        covered[shard][first:stop] += 1
    assert all((one == 1).all() for one in covered)


@settings(deadline=None)
@given(shards=SHARDS, block_tokens=st.integers(1, 10**9), data=st.data())
def test_each_lane_gets_enough_blocks_where_there_are_enough_documents(
    shards: list[tuple[int, int]], block_tokens: int, data: st.DataObject
) -> None:
    documents = [BLOCKS_PER_LANE, *(documents for documents, _ in shards)]
    lanes = data.draw(st.integers(1, sum(documents) // BLOCKS_PER_LANE))
    counts = make_counts(documents, [1, *(mean for _, mean in shards)])
    assert cut_blocks(counts, lanes, block_tokens).blocks >= BLOCKS_PER_LANE * lanes


@settings(deadline=None)
@given(shards=SHARDS, block_tokens=st.integers(1, 10**9), more=st.integers(0, 50))
def test_each_document_is_a_block_where_there_are_too_few(
    shards: list[tuple[int, int]], block_tokens: int, more: int
) -> None:
    documents = [1, *(documents for documents, _ in shards)]
    lanes = -(-sum(documents) // BLOCKS_PER_LANE) + more
    assert cut_blocks(make_counts(documents), lanes, block_tokens).blocks == sum(documents)


def test_blocks_hold_about_the_tokens_asked_for() -> None:
    plan = cut_blocks(make_counts([10_000, 10_000, 7], [10, 1000, 10]), lanes=1, block_tokens=5000)
    sizes = [[stop - first for one, first, stop in all_blocks(plan) if one == shard] for shard in range(3)]
    assert set(sizes[0]) == {500}
    assert set(sizes[1]) == {5}
    assert sizes[2] == [7]


@settings(deadline=None)
@given(documents=st.integers(1, 5000), mean=st.integers(0, 100), lanes=st.integers(1, 8), tokens=st.integers(1, 10**5))
def test_blocks_of_a_shard_are_of_the_same_size_give_or_take_a_document(
    documents: int, mean: int, lanes: int, tokens: int
) -> None:
    plan = cut_blocks(make_counts([documents], mean), lanes, tokens)
    sizes = {stop - first for _, first, stop in all_blocks(plan)}
    assert max(sizes) - min(sizes) <= 1


def test_blocks_lie_in_the_order_of_the_shards() -> None:
    blocks = all_blocks(cut_blocks(make_counts([40, 0, 3, 100]), lanes=1, block_tokens=500))
    assert blocks == sorted(blocks)


def test_shards_without_documents_have_no_blocks() -> None:
    plan = cut_blocks(make_counts([0, 5, 0, 0, 2, 0]), lanes=1, block_tokens=1)
    assert Counter(shard for shard, _, _ in all_blocks(plan)) == {1: 5, 4: 2}


def test_documents_without_tokens_are_planned_too() -> None:
    assert cut_blocks(make_counts([64, 64], [0, 0]), lanes=1, block_tokens=1 << 18).blocks == 32


def test_a_very_long_document_is_a_block_of_its_own() -> None:
    assert cut_blocks(make_counts([1000], 10**9), lanes=1, block_tokens=1000).blocks == 1000


@settings(deadline=None)
@given(shards=SHARDS, lanes=st.integers(1, 100), block_tokens=st.integers(1, 10**6))
def test_the_plan_depends_on_counts_alone(shards: list[tuple[int, int]], lanes: int, block_tokens: int) -> None:
    documents, means = [documents for documents, _ in shards], [mean for _, mean in shards]
    one, other = (cut_blocks(make_counts(documents, means), lanes, block_tokens) for _ in range(2))
    assert all_blocks(one) == all_blocks(other)


@settings(deadline=None)
@given(blocks=st.integers(1, 200), lanes=st.integers(1, 60), seed=st.integers(0, 2**31), epochs=st.integers(1, 3))
def test_every_block_of_every_epoch_is_at_one_place_of_one_lane(
    blocks: int, lanes: int, seed: int, epochs: int
) -> None:
    seen: Counter[tuple[int, int]] = Counter()
    for lane in range(lanes):
        order = order_over(blocks, lane=lane, lanes=lanes, seed=seed, source="web")
        places = -(-(epochs * blocks - lane) // lanes)
        seen.update(at(order, place) for place in range(places))
        assert at(order, max(places, 0))[0] >= epochs
    assert seen == Counter((epoch, block) for epoch in range(epochs) for block in range(blocks))


def test_five_blocks_on_a_thousand_lanes_come_once_per_epoch() -> None:
    lanes = [order_over(5, lane=lane, lanes=1000, seed=1, source="web") for lane in range(1000)]
    seen = Counter(at(lane, place) for lane in lanes for place in range(3))
    assert seen == Counter((epoch, block) for epoch in range(600) for block in range(5))


def test_a_single_block_comes_in_every_epoch() -> None:
    order = order_over(1, lane=2, lanes=7, seed=1, source="web")
    assert [at(order, place) for place in range(3)] == [(2, 0), (9, 0), (16, 0)]


def test_places_can_be_asked_for_in_any_order() -> None:
    ahead, anyhow = (order_over(17, lane=1, lanes=3, seed=1, source="web") for _ in range(2))
    expected = [at(ahead, place) for place in range(100)]
    shuffled = np.random.default_rng(0).permutation(100).tolist()
    assert {place: at(anyhow, place) for place in shuffled} == dict(enumerate(expected))


def test_the_epoch_never_falls_along_a_lane() -> None:
    order = order_over(17, lane=1, lanes=3, seed=1, source="web")
    epochs = [at(order, place)[0] for place in range(100)]
    assert epochs == sorted(epochs)


def test_order_differs_by_epoch() -> None:
    places = order_of(100, 500)
    assert len({tuple(places[i : i + 100]) for i in range(0, 500, 100)}) == 5


def test_order_differs_by_source_name() -> None:
    names = ("web", "wiki", "web2", "a/web", "")
    assert len({tuple(order_of(100, 100, source=name)) for name in names}) == len(names)


def test_order_differs_by_seed() -> None:
    assert len({tuple(order_of(100, 100, seed=seed)) for seed in range(50)}) == 50


@pytest.mark.parametrize("lanes", [1, 2, 6, 12])
def test_the_sequence_of_blocks_is_the_same_for_any_number_of_lanes(lanes: int) -> None:
    dealt = [order_of(50, 120 // lanes, lane=lane, lanes=lanes) for lane in range(lanes)]
    assert [dealt[i % lanes][i // lanes] for i in range(120)] == order_of(50, 120)


def test_far_epochs_of_a_huge_source_are_planned_at_once() -> None:
    order = order_over(10**9, lane=0, lanes=1, seed=1, source="web")
    places = [at(order, 10**12 + i) for i in range(100)]
    assert {epoch for epoch, _ in places} == {1000}
    assert len({block for _, block in places}) == 100


@settings(deadline=None)
@given(shards=SHARDS, lanes=st.integers(1, 300), block_tokens=st.integers(1, 10**6))
def test_the_block_of_a_document_is_the_one_that_holds_it(
    shards: list[tuple[int, int]], lanes: int, block_tokens: int
) -> None:
    counts = make_counts([documents for documents, _ in shards], [mean for _, mean in shards])
    plan = cut_blocks(counts, lanes, block_tokens)
    for number, (shard, first, stop) in enumerate(all_blocks(plan)):
        assert {plan.block_of(shard, document) for document in (first, (first + stop) // 2, stop - 1)} == {number}


@pytest.mark.parametrize(("blocks", "lanes"), [(1, 1), (5, 24), (24, 24), (25, 24), (1000, 24), (1000, 7)])
def test_the_place_of_a_block_is_where_its_lane_reads_it(blocks: int, lanes: int) -> None:
    orders = [order_over(blocks, lane=lane, lanes=lanes, seed=5, source="web") for lane in range(lanes)]
    for epoch in range(3):
        for block in {0, blocks // 2, blocks - 1}:
            lane, place = place_of(block, epoch, plan=one_shard(blocks), lanes=lanes, seed=5, source="web")
            assert at(orders[lane], place) == (epoch, block)


@settings(deadline=None)
@given(shards=SHARDS, lanes=st.integers(1, 300), block_tokens=st.integers(1, 10**6))
def test_blocks_are_located_together_as_they_are_one_by_one(
    shards: list[tuple[int, int]], lanes: int, block_tokens: int
) -> None:
    plan = cut_blocks(
        make_counts([documents for documents, _ in shards], [mean for _, mean in shards]), lanes, block_tokens
    )
    assert plan.addresses(np.arange(plan.blocks)).tolist() == [list(address) for address in all_blocks(plan)]


@settings(deadline=None)
@given(blocks=st.integers(1, 20_000), lanes=st.integers(1, 400), start=st.integers(0, 500), data=st.data())
def test_blocks_are_planned_together_as_they_are_one_by_one(
    blocks: int, lanes: int, start: int, data: st.DataObject
) -> None:
    """Whether a process reads few lanes or many, and from any place on."""
    lane = data.draw(st.integers(0, lanes - 1))
    expected = []
    for place in range(start, start + 100):
        alone = order_over(blocks, lane=lane, lanes=lanes, seed=3, source="web")
        expected.append(at(alone, place))
    for dense in (False, True):
        plan = one_shard(blocks)
        order = LaneOrder(plan, lane=lane, lanes=lanes, seed=3, source="web", dense=dense)
        found: list[tuple[int, int]] = []
        while len(found) < 100:
            planned = order.blocks(start + len(found))
            assert planned is not None
            assert planned.addresses[:, 1].tolist() == planned.numbers.tolist()
            found += zip(planned.epochs.tolist(), planned.numbers.tolist(), strict=True)
        assert found[:100] == expected


def test_the_last_place_of_a_lane_ends_the_blocks_that_are_planned_together() -> None:
    plan = one_shard(100)
    order = LaneOrder(plan, lane=1, lanes=4, seed=3, source="web", epochs=0.5, dense=True)
    planned = order.blocks(0)
    assert planned is not None
    assert len(planned) == order.places == 13
    assert order.blocks(13) is None


@pytest.mark.parametrize(("sources", "lanes", "blocks"), [(50, 48, 900), (50, 192, 400_000), (13, 1024, 400_000)])
def test_lanes_share_their_planning_however_many_sources_there_are(
    sources: int, lanes: int, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed, once = 0, Permutation._once

    def counting(permutation: Permutation, numbers: Any) -> Any:
        nonlocal computed
        computed += len(numbers)
        return once(permutation, numbers)

    monkeypatch.setattr(Permutation, "_once", counting)
    plan = BlockPlan(np.array([blocks]), np.array([0, blocks]), np.array([1000.0]))
    places = 0
    for lane in range(16):
        for source in range(sources):
            order = LaneOrder(plan, lane=lane, lanes=lanes, seed=9, source=f"source {source}", dense=True)
            planned = order.blocks(0)
            assert planned is not None
            places = max(places, len(planned) * lanes)
    # What the first lane needs serves all of them; beside it, at most a slab and what is walked again.
    assert computed < 1.1 * sources * (places + 2 * SLAB)
