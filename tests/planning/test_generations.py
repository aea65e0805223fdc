"""Appended shards in the order of blocks: old epochs keep their plan, new ones have all shards, none comes twice."""

from collections import Counter, defaultdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fmsdata.planning.blocks import BlockPlan, cut_blocks
from fmsdata.planning.counts import Counts
from fmsdata.planning.generations import (
    GrownPlan,
    Switch,
    Timeline,
    describe_timeline,
    earlier_epochs,
    extended,
    plan_blocks,
    saved_timeline,
    tokens_in,
)
from fmsdata.planning.lane_order import LaneOrder, place_of

BLOCK = 40


def counts_of(shards: list[tuple[int, int, int]], appended: int | None = None) -> Counts:
    """Shards of documents, tokens per document, and generations."""
    documents, means, generations = (np.array(column, np.int64) for column in zip(*shards, strict=True))
    names = tuple(f"part-{i:02}.arrow" for i in range(len(shards)))
    last = int(generations.max()) if appended is None else appended
    return Counts(names, documents, documents * means, generations=generations, appended=last)


def only(counts: Counts, generation: int) -> tuple[Counts, list[int]]:
    """The source as it was, without the shards of later generations, and the places that its shards have now."""
    assert counts.generations is not None
    rows = [row for row, found in enumerate(counts.generations.tolist()) if found <= generation]
    return Counts(tuple(counts.shards[i] for i in rows), counts.documents[rows], counts.tokens[rows]), rows


@st.composite
def sources(draw: st.DrawFn) -> Counts:
    shards = draw(
        st.lists(st.tuples(st.integers(0, 30), st.integers(0, 20), st.integers(0, 3)), min_size=1, max_size=8)
    )
    return counts_of([*shards, (draw(st.integers(1, 30)), 5, 0)])


@st.composite
def timelines(draw: st.DrawFn, counts: Counts) -> Timeline:
    timeline: Timeline = (Switch(0, 0),)
    for generation in range(1, counts.newest + 1):
        if draw(st.booleans()):
            timeline = extended(timeline, draw(st.integers(1, 5)), generation)
    return timeline


def read(plan: BlockPlan, lanes: int, epochs: int, *, dense: bool = False) -> dict[int, Counter[tuple[int, int, int]]]:
    """What the lanes read in each epoch: blocks as shard, first document, and the document after the last."""
    found: dict[int, Counter[tuple[int, int, int]]] = defaultdict(Counter)
    for lane in range(lanes):
        order = LaneOrder(plan, lane=lane, lanes=lanes, seed=3, source="web", epochs=epochs, dense=dense)
        place = 0
        while (blocks := order.blocks(place)) is not None:
            for epoch, address in zip(blocks.epochs.tolist(), blocks.addresses.tolist(), strict=True):
                found[epoch][tuple(address)] += 1
            place += len(blocks)
        assert place == order.places
    return found


def blocks_of(plan: BlockPlan) -> Counter[tuple[int, int, int]]:
    return Counter(map(tuple, plan.addresses(np.arange(plan.blocks)).tolist()))


@settings(deadline=None)
@given(data=st.data(), counts=sources(), lanes=st.integers(1, 40), dense=st.booleans())
def test_each_epoch_has_each_block_of_its_generation_once(
    data: st.DataObject, counts: Counts, lanes: int, dense: bool
) -> None:
    timeline = data.draw(timelines(counts))
    found = read(plan_blocks(counts, timeline, lanes, BLOCK), lanes, 8, dense=dense)
    assert sorted(found) == list(range(8))
    for epoch, blocks in found.items():
        generation = max(switch for switch in timeline if switch.epoch <= epoch).generation
        assert blocks == blocks_of(cut_blocks(counts.until(generation), lanes, BLOCK))
        documents: Counter[int] = Counter()
        for (shard, first, stop), times in blocks.items():
            documents[shard] += times * (stop - first)
        assert counts.generations is not None
        assert [documents[shard] for shard in range(len(counts.shards))] == np.where(
            counts.generations <= generation, counts.documents, 0
        ).tolist()


@settings(deadline=None)
@given(data=st.data(), counts=sources(), lanes=st.integers(1, 40))
def test_epochs_before_a_switch_are_those_of_the_source_that_never_grew(
    data: st.DataObject, counts: Counts, lanes: int
) -> None:
    """Places, numbers of blocks and documents: a state from before means the same."""
    old, rows = only(counts, 0)
    grown = plan_blocks(counts, extended((Switch(0, 0),), switch := data.draw(st.integers(1, 4)), 3), lanes, BLOCK)
    plan = cut_blocks(old, lanes, BLOCK)
    for lane in {0, lanes // 2, lanes - 1}:
        before = LaneOrder(plan, lane=lane, lanes=lanes, seed=3, source="web")
        now = LaneOrder(grown, lane=lane, lanes=lanes, seed=3, source="web")
        for place in range(-(-(switch * plan.blocks - lane) // lanes)):
            a, b = before.block(place), now.block(place)
            assert a is not None
            assert b is not None
            assert (a.epoch, a.number, rows[a.address.shard], *a.address[1:]) == (b.epoch, b.number, *b.address)
            keys = plan.keys(3, "web", a.epoch, a.address.shard), grown.keys(3, "web", b.epoch, b.address.shard)
            assert keys[0](a.address.first) == keys[1](b.address.first)


@settings(deadline=None)
@given(counts=sources(), lanes=st.integers(1, 40))
def test_a_run_that_begins_after_the_growth_reads_as_from_a_listing(counts: Counts, lanes: int) -> None:
    listed = Counts(counts.shards, counts.documents, counts.tokens)
    assert counts.digest == listed.digest
    plans = plan_blocks(counts, (), lanes, BLOCK), cut_blocks(listed, lanes, BLOCK)
    assert plans[0].first_block.tolist() == plans[1].first_block.tolist()
    assert counts.until(0).digest == only(counts, 0)[0].digest
    assert counts.until(0).number == len(only(counts, 0)[0].shards)


@settings(deadline=None)
@given(data=st.data(), counts=sources(), lanes=st.integers(1, 40))
def test_the_place_of_a_block_is_where_its_lane_reads_it(data: st.DataObject, counts: Counts, lanes: int) -> None:
    plan = plan_blocks(counts, data.draw(timelines(counts)), lanes, BLOCK)
    for epoch in range(6):
        number = data.draw(st.integers(0, plan.of_epoch(epoch).blocks - 1))
        lane, place = place_of(number, epoch, plan=plan, lanes=lanes, seed=3, source="web")
        planned = LaneOrder(plan, lane=lane, lanes=lanes, seed=3, source="web").block(place)
        assert planned is not None
        assert (planned.epoch, planned.number) == (epoch, number)
        index = plan.index(epoch, 0)
        assert plan.at(index)[:2] == (epoch, 0)


@settings(deadline=None)
@given(data=st.data(), counts=sources(), lanes=st.integers(1, 40), epochs=st.floats(0.1, 8))
def test_ends_are_where_the_blocks_of_so_many_epochs_end(
    data: st.DataObject, counts: Counts, lanes: int, epochs: float
) -> None:
    plan = plan_blocks(counts, data.draw(timelines(counts)), lanes, BLOCK)
    orders = [LaneOrder(plan, lane=lane, lanes=lanes, seed=3, source="web", epochs=epochs) for lane in range(lanes)]
    total = sum(order.places for order in orders)
    assert sum(order.has_last for order in orders) == 1
    assert total == max(1, plan.blocks_in(epochs))
    whole = int(epochs)
    inside = plan.of_epoch(whole).blocks
    assert abs(plan.index(whole, 0) + (epochs - whole) * inside - total) <= 1


@settings(deadline=None)
@given(data=st.data(), counts=sources())
def test_a_shard_is_cut_where_any_epoch_cuts_it(data: st.DataObject, counts: Counts) -> None:
    plan = plan_blocks(counts, data.draw(timelines(counts)), 3, BLOCK)
    bounds = [set(plan.bounds(shard)) for shard in range(len(counts.shards))]
    for epoch in range(7):
        for shard, first, stop in blocks_of(plan.of_epoch(epoch)):
            assert {first, stop} <= bounds[shard]


@settings(deadline=None)
@given(data=st.data(), counts=sources())
def test_tokens_of_epochs_add_up(data: st.DataObject, counts: Counts) -> None:
    timeline = data.draw(timelines(counts))
    each = [
        int(counts.until(max(switch for switch in timeline if switch.epoch <= epoch).generation).tokens.sum())
        for epoch in range(9)
    ]
    for epochs in range(9):
        assert tokens_in(counts, timeline, epochs) == sum(each[:epochs])
        assert tokens_in(counts, timeline, epochs + 0.5) == pytest.approx(sum(each[:epochs]) + each[epochs] / 2)
    assert [tokens for count, tokens in earlier_epochs(counts, timeline) for _ in range(count)] == each[
        : timeline[-1][0]
    ]


@settings(deadline=None)
@given(data=st.data(), counts=sources())
def test_a_timeline_is_found_again_by_its_description(data: st.DataObject, counts: Counts) -> None:
    generations = sorted(set(counts.generations.tolist() if counts.generations is not None else []))
    timeline: Timeline = (Switch(0, 0),)
    for generation in generations[1:]:
        if data.draw(st.booleans()):
            timeline = extended(timeline, data.draw(st.integers(1, 5)), generation)
    now = counts.until(timeline[-1].generation)
    saved = {"shards": now.number, "digest": now.digest, **describe_timeline(counts, timeline)}
    assert saved_timeline(counts, saved) == (() if timeline == (Switch(0, counts.newest),) else timeline)


SAVED: dict[str, Any] = {"shards": 2, "digest": "?"}


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"generations": 3},
        {"generations": []},
        {"generations": [[0, 1]]},
        {"generations": [[1, 2, "d0"]]},
        {"generations": [[0, 2, "d0"], [0, 3, "d1"]]},
        {"generations": [[0, 2, "d0"], [-4, 3, "d1"]]},
        {"generations": [[0, "2", "d0"]]},
        {"generations": [[0, 2, None]]},
        {"shards": None},
    ],
)
def test_descriptions_that_are_of_other_shards_or_damaged_have_no_timeline(changed: dict[str, Any]) -> None:
    counts = counts_of([(3, 4, 0), (5, 6, 0), (7, 8, 1)])
    digests = {"d0": counts.until(0).digest, "d1": counts.digest}
    saved = {**SAVED, **changed}
    if isinstance(entries := saved.get("generations"), list):
        saved["generations"] = [[digests.get(value, value) for value in entry] for entry in entries]
    assert saved_timeline(counts, saved) == ()


def test_shards_that_were_not_appended_are_not_taken_up() -> None:
    shards = [(3, 4, 0), (5, 6, 0), (7, 8, 1), (2, 2, 2)]
    before = counts_of(shards).until(0)
    saved = {"shards": 2, "digest": before.digest}
    assert saved_timeline(counts_of(shards), saved) == (Switch(0, 0),)
    assert saved_timeline(counts_of(shards, appended=1), saved) == ()
    assert saved_timeline(counts_of(shards), None) == ()


def test_a_switch_that_was_not_reached_is_replaced() -> None:
    timeline = extended(extended((Switch(0, 0),), 5, 1), 5, 2)
    assert timeline == ((0, 0), (5, 2))
    assert extended(timeline, 3, 3) == ((0, 0), (3, 3))
    assert isinstance(plan_blocks(counts_of([(3, 4, 0), (5, 6, 1)]), ((Switch(0, 0), Switch(2, 1))), 2, 9), GrownPlan)
