"""The laws of epochs: no row lost, none repeated, the same global batches at any world size."""

import copy
import json
import time
from collections import Counter
from itertools import pairwise
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch.utils.data
from hypothesis import given, settings

import fmsdata
from fmsdata.errors import ConfigError, FmsdataWarning, StateError
from tests.epochs.helpers import Ranks, Rows, Sample, joined

WORLDS = (1, 2, 4)


@st.composite
def shapes(draw: st.DrawFn) -> dict[str, Any]:
    batch = draw(st.sampled_from([4, 8]))
    drop_last = draw(st.booleans())
    rows = draw(st.integers(batch if drop_last else 1, 60))
    return {
        "rows": Rows(rows),
        "global_batch": batch,
        "drop_last": drop_last,
        "shuffle": draw(st.booleans()),
        "seed": draw(st.integers(0, 3)),
    }


@given(shapes())
@settings(max_examples=25, deadline=None)
def test_global_batches_are_the_same_at_any_world_size(shape: dict[str, Any]) -> None:
    found = []
    for world_size in WORLDS:
        ranks = Ranks(world_size=world_size, **shape)
        found.append([ranks.epoch() for _ in range(3)])
    assert found[0] == found[1] == found[2]


@given(shapes())
@settings(max_examples=25, deadline=None)
def test_each_row_comes_once_in_an_epoch_and_what_fills_up_is_marked(shape: dict[str, Any]) -> None:
    ranks = Ranks(world_size=2, **shape)
    rows, batch = len(shape["rows"]), shape["global_batch"]
    for epoch in range(2):
        assert len(ranks.loaders[0]) == (rows // batch if shape["drop_last"] else -(-rows // batch))
        steps = ranks.epoch()
        assert len(steps) == len(ranks.loaders[0])
        found = joined(steps)
        once = Counter(sample.row for sample in found if not sample.padding)
        assert set(once.values()) == {1}
        assert len(once) == (rows // batch * batch if shape["drop_last"] else rows)
        assert [sample.padding for sample in found] == [False] * len(once) + [True] * (len(found) - len(once))
        assert [sample.epoch_id for sample in found] == [epoch * 2**40 + i for i in range(len(found))]


@given(
    shapes(),
    st.lists(st.tuples(st.sampled_from(WORLDS), st.integers(0, 9)), max_size=5),
    st.dictionaries(st.integers(0, 12), st.sets(st.integers(0, 59), max_size=6), max_size=4),
)
@settings(max_examples=60, deadline=None)
def test_any_chain_of_stops_and_world_sizes_gives_the_same_batches(
    shape: dict[str, Any], stops: list[tuple[int, int]], events: dict[int, set[int]]
) -> None:
    """Rows are excluded before some of the steps. Stops fall on any step, also the last of an epoch."""
    phases = [*stops, (4, 6)]
    left = len(shape["rows"]) - (shape["global_batch"] if shape["drop_last"] else 1)

    def steps(ranks: Ranks, begin: int, count: int) -> list[list[Sample]]:
        found = []
        for step in range(begin, begin + count):
            ranks.exclude(sorted(row for row in events.get(step, ()) if row < left))
            found.append(ranks.step())
        return found

    total = sum(count for _, count in phases)
    expected = steps(Ranks(world_size=1, **shape), 0, total)
    found: list[list[Sample]] = []
    states: Any = None
    for world_size, count in phases:
        ranks = Ranks(world_size=world_size, states=states, **shape)
        found += steps(ranks, len(found), count)
        states = json.loads(json.dumps(ranks.states()))
    assert found == expected
    for epoch in {sample.epoch_id >> 40 for sample in joined(found)}:
        rows = [sample.row for sample in joined(found) if sample.epoch_id >> 40 == epoch and not sample.padding]
        assert len(set(rows)) == len(rows)


@given(shapes(), st.sets(st.integers(0, 58), max_size=20))
@settings(max_examples=25, deadline=None)
def test_excluding_rows_leaves_the_epoch_in_progress_and_the_order_of_the_others(
    shape: dict[str, Any], ids: set[int]
) -> None:
    shape = {**shape, "drop_last": False}
    ids = {row for row in ids if row < len(shape["rows"]) - 1}
    untouched, excluding = Ranks(world_size=2, **shape), Ranks(world_size=2, **shape)
    first = [excluding.step()]
    excluding.exclude(sorted(ids))
    if not excluding.samplers[0].finished:
        first += excluding.epoch()
    assert first == untouched.epoch()
    expected = [row for row in real(untouched.epoch()) if row not in ids]
    assert real(excluding.epoch()) == expected
    for sampler in excluding.samplers:
        sampler.include(sorted(ids))
    assert real(excluding.epoch()) == real(untouched.epoch())


def real(batches: list[list[Sample]]) -> list[int]:
    return [sample.row for sample in joined(batches) if not sample.padding]


@given(st.integers(2, 40), st.lists(st.tuples(st.integers(0, 9), st.sets(st.integers(0, 39), max_size=8)), max_size=4))
@settings(max_examples=40, deadline=None)
def test_immediate_exclusion_drops_at_once_and_resumes_exactly(rows: int, events: list[tuple[int, set[int]]]) -> None:
    def run(restoring: bool) -> list[list[Sample]]:
        shape: dict[str, Any] = {"global_batch": 4, "world_size": 1, "steps": 2, "drop_last": False, "seed": 5}
        ranks, found = Ranks(Rows(rows), **shape), []
        for steps, ids in events:
            found += [ranks.step() for _ in range(steps)]
            ids = {row for row in ids if row < rows - 1}
            ranks.samplers[0].exclude(ids, mode="immediate")
            out = set(ranks.samplers[0].excluded)
            if restoring:
                ranks = Ranks(Rows(rows), states=json.loads(json.dumps(ranks.states())), **shape)
            if not ranks.samplers[0].finished:
                epoch, rest = ranks.samplers[0].epoch, ranks.epoch()
                found += rest
                assert not out & set(real(rest))
                seen = [sample.row for sample in joined(found) if sample.epoch_id >> 40 == epoch and not sample.padding]
                assert len(set(seen)) == len(seen)
                assert set(seen) | out >= set(range(rows))
        return [*found, *ranks.epoch()]

    assert run(False) == run(True)


@pytest.mark.parametrize(("rows", "batch", "world_size"), [(3, 8, 1), (3, 8, 4), (10, 4, 4), (1, 4, 4), (10, 8, 2)])
def test_uneven_rows_are_filled_up_on_every_rank(rows: int, batch: int, world_size: int) -> None:
    ranks = Ranks(Rows(rows), global_batch=batch, world_size=world_size, drop_last=False)
    for _ in range(2):
        steps = ranks.epoch()
        assert [len(step) for step in steps] == [batch] * -(-rows // batch)
        assert sorted(real(steps)) == list(range(rows))


def test_each_epoch_drops_other_rows_and_none_for_long() -> None:
    ranks = Ranks(Rows(11), global_batch=8, world_size=2)
    dropped = [frozenset(range(11)) - set(real(ranks.epoch())) for _ in range(30)]
    assert all(len(rows) == 3 for rows in dropped)
    assert len(set(dropped)) > 20
    assert frozenset().union(*dropped) == set(range(11))


def test_orders_of_epochs_and_seeds_are_unrelated() -> None:
    """Seed 1 in epoch 0 is not seed 0 in epoch 1, and places are spread evenly."""

    def orders(seed: int) -> list[list[int]]:
        sampler = fmsdata.EpochSampler(range(500), global_batch=500, rank=0, world_size=1, seed=seed)
        return [list(sampler) for _ in range(3)]

    found = [tuple(order) for seed in range(4) for order in orders(seed)]
    assert len(set(found)) == len(found)
    for a, b in pairwise(found):
        assert abs(np.corrcoef(a, b)[0, 1]) < 0.2


def test_ten_million_rows_start_in_milliseconds_with_a_small_state() -> None:
    started = time.thread_time()
    sampler = fmsdata.EpochSampler(range(10_000_000), global_batch=512, rank=3, world_size=8, seed=42)
    next(sampler.plan(64))
    assert time.thread_time() - started < 0.1
    assert len(json.dumps(sampler.state_dict())) < 2048


def test_a_million_exclusions_are_compact() -> None:
    sampler = fmsdata.EpochSampler(range(10_000_000), global_batch=512, rank=0, world_size=1)
    ids = np.flatnonzero(np.random.default_rng(0).random(10_000_000) < 0.1)
    sampler.exclude(ids)
    state = sampler.state_dict()
    assert len(json.dumps(state)) < len(ids)  # a byte for each
    other = fmsdata.EpochSampler(range(10_000_000), global_batch=512, rank=0, world_size=1)
    other.load_state_dict(state)
    assert other.excluded == ids.tolist()
    other.begin_epoch()
    other.reshuffle()
    assert not np.isin(next(other.plan(512)).request.rows, ids).any()
    several = [sampler.state_dict() for _ in range(10)]
    assert all(one["next_excluded"] is several[0]["next_excluded"] for one in several)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"global_batch": 2, "world_size": 4},
            "some ranks would have no rows; use a multiple of the world size, such as 4",
        ),
        ({"global_batch": 6, "world_size": 4}, "does not divide; use a multiple of the world size, such as 8"),
        (
            {"global_batch": 16, "world_size": 2},
            "there are 10 rows: with drop_last=True an epoch would have no batches",
        ),
        ({"global_batch": 0}, "global_batch is 0; it must be at least 1"),
        ({"global_batch": 4, "rank": 2, "world_size": 2}, "rank is 2 of world size 2"),
        ({"global_batch": 4, "seed": "x"}, "seed is 'x'"),
        ({"global_batch": 4, "shuffle": 1}, "shuffle is 1; it must be true or false"),
        ({"global_batch": 4, "fingerprint": 3}, "fingerprint is 3"),
    ],
)
def test_wrong_arguments_say_the_way_out(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fmsdata.EpochSampler(range(10), **{"rank": 0, "world_size": 1, **options})


@pytest.mark.parametrize("rows", [[], {}, "text", 7, {"a": 1}, (row for row in range(3))])
def test_what_is_no_dataset_is_refused(rows: Any) -> None:
    with pytest.raises(ConfigError, match=r"rows is a|no rows"):
        fmsdata.EpochSampler(rows, global_batch=1, rank=0, world_size=1)


@pytest.mark.parametrize(
    "ids", [[10], [-1], np.array([3, 12]), [2**70], ["3"], [1.5], "3", 3, [True], None, [[1], [2, 3]]]
)
def test_ids_that_are_no_rows_are_refused_and_nothing_changes(ids: Any) -> None:
    sampler = fmsdata.EpochSampler(range(10), global_batch=2, rank=0, world_size=1)
    with pytest.raises(ConfigError):
        sampler.exclude(ids)
    assert sampler.excluded == []


def test_ids_may_be_of_any_kind() -> None:
    sampler = fmsdata.EpochSampler(range(10), global_batch=2, rank=0, world_size=1)
    kinds: list[Any] = [[1, 1, 2], np.array([3], np.uint8), torch.tensor([4, 5]), {6}, iter([7]), [], [torch.tensor(8)]]
    for ids in kinds:
        sampler.exclude(ids)
    assert sampler.excluded == [1, 2, 3, 4, 5, 6, 7, 8]


def test_excluding_too_many_rows_is_an_error_that_changes_nothing() -> None:
    sampler = fmsdata.EpochSampler(range(10), global_batch=4, rank=0, world_size=1)
    with pytest.raises(ConfigError, match="2 of 10 rows are not excluded"):
        sampler.exclude(range(8))
    filling = fmsdata.EpochSampler(range(10), global_batch=4, rank=0, world_size=1, drop_last=False)
    with pytest.raises(ConfigError, match="all rows are excluded"):
        filling.exclude(range(10))
    assert sampler.excluded == filling.excluded == []
    assert len(list(sampler)) == 8


def test_immediate_exclusion_is_for_one_rank() -> None:
    sampler = fmsdata.EpochSampler(range(10), global_batch=4, rank=0, world_size=2)
    with pytest.raises(ConfigError, match="mode='immediate' on rank 0 of 2"):
        sampler.exclude([1], mode="immediate")
    with pytest.raises(ConfigError, match="mode is 'now'"):
        sampler.exclude([1], mode="now")  # type: ignore[arg-type]


def test_set_epoch_leaves_an_epoch_in_progress_alone() -> None:
    """A trainer that resumes calls it with the epoch it is in."""
    ranks = Ranks(Rows(20), global_batch=4, world_size=2)
    all_of_it = Ranks(Rows(20), global_batch=4, world_size=2).epoch()
    first = [ranks.step(), ranks.step()]
    for sampler in ranks.samplers:
        sampler.set_epoch(0)
    assert first + ranks.epoch() == all_of_it
    ranks.samplers[0].set_epoch(0)
    with pytest.warns(FmsdataWarning, match=r"all of epoch 0 was handed out.*reshuffle\(epoch=0\)"):
        assert list(ranks.loaders[0]) == []
    for sampler in ranks.samplers:
        sampler.reshuffle(epoch=0)
    assert ranks.epoch() == all_of_it


def test_epochs_and_batches_can_be_named() -> None:
    ranks, other = (Ranks(Rows(20), global_batch=4, world_size=2) for _ in range(2))
    epochs = [ranks.epoch() for _ in range(4)]
    for sampler in other.samplers:
        sampler.set_epoch(2)
        sampler.set_skip(3)
    assert other.epoch() == epochs[2][3:]
    assert other.epoch() == epochs[3]
    for sampler in other.samplers:
        sampler.reshuffle()
        assert sampler.epoch == 4
        sampler.reshuffle(1)
    assert other.epoch() == epochs[1]
    with pytest.raises(ConfigError, match="after the end of the epoch, which has 5 batches"):
        other.samplers[0].set_skip(6)


def test_a_state_at_the_end_of_an_epoch_continues_with_the_next() -> None:
    ranks = Ranks(Rows(20), global_batch=4, world_size=2)
    ranks.epoch()
    states = ranks.states()
    expected = ranks.epoch()
    resumed = Ranks(Rows(20), global_batch=4, world_size=1, states=states)
    assert resumed.epoch() == expected
    assert resumed.samplers[0].epoch == 1
    assert resumed.samplers[0].step == 10


@pytest.mark.parametrize("changed", [{"global_batch": 2}, {"global_batch": 6}, {"drop_last": False}])
def test_rows_that_an_epoch_dropped_do_not_come_after_its_end(changed: dict[str, Any]) -> None:
    """With other batches they would make an epoch of their own, which a trainer that counts loops would count."""
    shape: dict[str, Any] = {"global_batch": 8, "drop_last": True}
    ranks = Ranks(Rows(22), world_size=2, **shape)
    ranks.epoch()
    resumed = Ranks(Rows(22), world_size=1, states=ranks.states(), **{**shape, **changed})
    again = Ranks(Rows(22), world_size=2, states=resumed.states(), **{**shape, **changed})
    fresh = Ranks(Rows(22), world_size=1, **{**shape, **changed})
    fresh.epoch()
    assert resumed.epoch() == again.epoch() == fresh.epoch()
    before = [{name: value for name, value in state.items() if name != "ended"} for state in ranks.states()]
    Ranks(Rows(22), world_size=1, states=before, **shape).epoch()  # saved before states said so


def test_ranks_that_disagree_are_noticed_on_load() -> None:
    ranks = Ranks(Rows(20), global_batch=4, world_size=2)
    ranks.samplers[1].exclude([3])
    with pytest.raises(StateError, match="differ in the excluded rows of the next epoch"):
        Ranks(Rows(20), global_batch=4, world_size=2, states=ranks.states())
    ranks.samplers[0].exclude([3])
    Ranks(Rows(20), global_batch=4, world_size=2, states=ranks.states())
    next(ranks.loaders[0])
    with pytest.raises(StateError, match="the states differ in position: 4 in the first and 0 in number 1"):
        Ranks(Rows(20), global_batch=4, world_size=2, states=ranks.states())


@given(shapes(), st.integers(0, 9), st.sampled_from([2, 12, 20]), st.sampled_from([1, 2]))
@settings(max_examples=25, deadline=None)
def test_another_global_batch_on_resume_loses_and_repeats_nothing(
    shape: dict[str, Any], steps: int, batch: int, world_size: int
) -> None:
    shape = {**shape, "drop_last": False}
    whole = real(Ranks(world_size=1, **shape).epoch())
    ranks = Ranks(world_size=2, **shape)
    found = [ranks.step() for _ in range(min(steps, len(ranks.loaders[0])))]
    states = ranks.states()
    resumed = Ranks(world_size=world_size, states=states, **{**shape, "global_batch": batch})
    if not resumed.samplers[0].finished:
        found += resumed.epoch()
    assert real(found) == whole


def test_a_sampler_can_be_used_by_the_loader_of_torch() -> None:
    rows = Rows(10)
    parts = []
    for rank in range(2):
        sampler = fmsdata.EpochSampler(rows, global_batch=4, rank=rank, world_size=2, drop_last=False)
        loader: Any = torch.utils.data.DataLoader(rows, batch_size=2, sampler=sampler)  # type: ignore[arg-type]
        assert len(loader) == 3
        parts.append([row for batch in loader for row in batch["row"].tolist()])
        assert len(parts[-1]) == len(sampler) == 6
    assert set(parts[0] + parts[1]) == set(range(10))


def test_copies_of_a_sampler_are_independent() -> None:
    sampler = fmsdata.EpochSampler(list(range(20)), global_batch=4, rank=0, world_size=1)
    expected = [list(sampler), list(sampler)]
    sampler.reshuffle(0)
    for other in (copy.deepcopy(sampler), copy.copy(sampler)):
        assert [list(other), list(other)] == expected
        other.exclude([1])
    assert sampler.excluded == []
    assert [list(sampler), list(sampler)] == expected


def test_a_dataset_that_grows_is_an_error() -> None:
    rows = list(range(20))
    sampler = fmsdata.EpochSampler(rows, global_batch=4, rank=0, world_size=1)
    list(sampler)
    rows.append(20)
    with pytest.raises(ConfigError, match="had 20 rows when its sampler was created, and has 21 now"):
        list(sampler)


def test_the_rank_is_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = fmsdata.EpochSampler(range(20), global_batch=4)
    assert (sampler.rank, sampler.world_size) == (0, 1)
    monkeypatch.setattr("fmsdata.run.ranks._distributed", lambda: (1, 2))
    with pytest.raises(ConfigError, match="opened as rank 0 of 1"):
        list(sampler)


def test_a_resume_in_the_middle_of_a_global_batch_goes_to_the_next_epoch_if_no_whole_one_is_left() -> None:
    rows = [{"v": i} for i in range(5)]

    def make(batch_size: int) -> fmsdata.StatefulDataLoader:
        sampler = fmsdata.EpochSampler(rows, global_batch=4, rank=0, world_size=1, seed=3)
        return fmsdata.StatefulDataLoader(rows, sampler=sampler, batch_size=batch_size)

    before = make(2)
    next(before)
    state = before.state_dict()
    after = make(4)
    after.load_state_dict(state)
    assert set((next(after)["epoch_id"] >> 40).tolist()) == {1}
    looped = make(4)
    looped.load_state_dict(state)
    assert len(list(looped)) == 1


def test_a_state_from_before_an_immediate_exclusion_is_refused() -> None:
    sampler = fmsdata.EpochSampler(range(32), global_batch=4, rank=0, world_size=1)
    earlier = sampler.state_dict()
    sampler.exclude([1, 2], mode="immediate")
    with pytest.raises(StateError, match="excluded or included at once"):
        sampler.state_dict(at=earlier)


def test_a_state_from_before_an_immediate_exclusion_is_refused_in_later_epochs_too() -> None:
    """It would bring the rows back into what is left of its epoch."""
    sampler = fmsdata.EpochSampler(range(8), global_batch=2, rank=0, world_size=1, seed=3)
    rows = iter(sampler)
    next(rows), next(rows)
    before = sampler.state_dict()
    sampler.exclude([6, 7], mode="immediate")
    after = sampler.state_dict()
    list(rows)
    for _ in range(2):
        list(sampler)
        with pytest.raises(StateError, match="excluded or included at once"):
            sampler.state_dict(at=before)
        assert sampler.state_dict(at=after)["position"] == 2
    sampler.reshuffle(epoch=0)
    again = sampler.state_dict()
    sampler.exclude([5])
    assert sampler.state_dict(at=again)["next_excluded"] == "[5, 6, 7]"
