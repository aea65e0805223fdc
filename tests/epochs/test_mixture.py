"""Mixtures of rows: shares at every moment, passes over small sources, weights that change."""

import json
import random
from collections import Counter
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

import fmsdata
from fmsdata.errors import ConfigError, StateError
from tests.epochs.helpers import Ranks, Rows, Sample, joined


class Mixed(fmsdata.RowMixture):
    """A mixture whose rows say which they are in the mixture."""

    def __getitem__(self, index: int) -> Any:
        name, row = self.locate(index)
        found = super().__getitem__(index)
        assert found["text"] == f"{name} {row}"
        assert self.names[found["dataset_idx"]] == name
        return {**found, "row": index, "pair": np.array([index, 0])}

    def __getitems__(self, indices: Any) -> list[Any]:
        return [self[index] for index in indices]


def mixture(sizes: dict[str, int], **options: Any) -> Mixed:
    return Mixed({name: Rows(size, name) for name, size in sizes.items()}, **options)


SIZES = st.dictionaries(st.sampled_from("abcd"), st.integers(1, 40), min_size=1, max_size=4)


@given(SIZES, st.sampled_from([1, 2, 4]))
@settings(max_examples=25, deadline=None)
def test_without_weights_an_epoch_is_each_row_once(sizes: dict[str, int], world_size: int) -> None:
    ranks = Ranks(mixture(sizes), global_batch=4, world_size=world_size, drop_last=False)
    ranks.exclude([0] if sum(sizes.values()) > 1 else [])
    for epoch in range(3):
        rows = [sample.row for sample in joined(ranks.epoch()) if not sample.padding]
        gone = 1 if epoch and sum(sizes.values()) > 1 else 0
        assert sorted(rows) == list(range(gone, sum(sizes.values())))


@given(SIZES, st.data())
@settings(max_examples=40, deadline=None)
def test_shares_hold_at_every_moment_and_passes_are_whole(sizes: dict[str, int], data: st.DataObject) -> None:
    """Each source is fewer rows off its share than there are sources.

    None of its rows comes again before all others came.
    """
    weights = {name: data.draw(st.sampled_from([0.05, 0.5, 1, 3])) for name in sizes}
    mix = mixture(sizes, weights=weights, epoch_size=42)
    ranks = Ranks(mix, global_batch=4, world_size=2, seed=3)
    total, counts = sum(weights.values()), Counter[str]()
    passes: dict[str, list[int]] = {name: [] for name in sizes}
    for number in range(40):
        for sample in ranks.step():
            name, row = mix.locate(sample.row)
            counts[name] += 1
            passes[name].append(row)
        for name, weight in weights.items():
            share = weight / total
            assert abs(counts[name] - share * (number + 1) * 4) <= 1 - share + share * (len(sizes) - 1) + 1e-9
    for name, rows in passes.items():
        for at in range(0, len(rows) // sizes[name] * sizes[name], sizes[name]):
            assert sorted(rows[at : at + sizes[name]]) == list(range(sizes[name]))


@given(SIZES, st.lists(st.tuples(st.sampled_from([1, 2, 4]), st.integers(0, 7)), max_size=4), st.data())
@settings(max_examples=40, deadline=None)
def test_any_chain_of_stops_gives_the_same_batches(
    sizes: dict[str, int], stops: list[tuple[int, int]], data: st.DataObject
) -> None:
    """Weights change at a step and at the next epoch, and rows are excluded, on the way."""
    weights = st.fixed_dictionaries({name: st.sampled_from([0.1, 1.0, 2.5]) for name in sizes})
    mix = mixture(sizes, weights=data.draw(weights))
    at_step, at_epoch, rows = data.draw(weights), data.draw(weights), sum(sizes.values())
    excluded = sorted(data.draw(st.sets(st.integers(0, rows - 1), max_size=rows - 1)))
    shape: dict[str, Any] = {"global_batch": 4, "drop_last": False, "seed": 1}
    phases = [*stops, (1, 8)]

    def steps(ranks: Ranks, begin: int, count: int) -> list[list[Sample]]:
        found = []
        for step in range(begin, begin + count):
            for sampler in ranks.samplers:
                if step == 1:
                    sampler.set_weights(at_step, step=5)
                if step == 3:
                    sampler.exclude(excluded)
                if step == 7:
                    sampler.set_weights(at_epoch)
            found.append(ranks.step())
        return found

    expected = steps(Ranks(mix, world_size=1, **shape), 0, sum(count for _, count in phases))
    found: list[list[Sample]] = []
    states: Any = None
    for world_size, count in phases:
        ranks = Ranks(mix, world_size=world_size, states=states, **shape)
        found += steps(ranks, len(found), count)
        states = json.loads(json.dumps(ranks.states()))
    assert found == expected


def test_weights_change_at_the_step_and_at_the_next_epoch() -> None:
    mix = mixture({"a": 40, "b": 40}, weights={"a": 1, "b": 0})
    ranks = Ranks(mix, global_batch=4, world_size=2)
    for sampler in ranks.samplers:
        sampler.set_weights({"a": 0, "b": 1}, step=7)

    def names(count: int) -> list[str]:
        return ["".join(sorted({mix.locate(sample.row)[0] for sample in ranks.step()})) for _ in range(count)]

    assert names(12) == ["a"] * 7 + ["b"] * 5
    for sampler in ranks.samplers:
        sampler.set_weights({"a": 1, "b": 1})
    assert len(ranks.loaders[0]) == 10
    assert names(10) == ["b"] * 8 + ["ab"] * 2
    with pytest.raises(ConfigError, match="step is 3, but the run is at step 22 already"):
        ranks.samplers[0].set_weights({"a": 1, "b": 1}, step=3)


def test_only_names_matter_and_other_sources_change_nothing_within_a_source() -> None:
    def rows_of(name: str, sizes: dict[str, int]) -> list[int]:
        mix = mixture(sizes, weights=dict.fromkeys(sizes, 1.0))
        found = (mix.locate(s.row) for s in joined(Ranks(mix, global_batch=4, world_size=1, seed=9).epoch()))
        return [row for source, row in found if source == name][:10]

    expected = rows_of("b", {"a": 20, "b": 30})
    assert rows_of("b", {"b": 30, "a": 20}) == rows_of("b", {"b": 30, "z": 50}) == expected


def test_temperature_flattens() -> None:
    def shares(**options: Any) -> float:
        mix = mixture({"big": 90, "small": 10}, **options)
        rows = [sample.row for sample in joined(Ranks(mix, global_batch=4, world_size=1).epoch())]
        return sum(mix.locate(row)[0] == "small" for row in rows) / len(rows)

    assert shares() == pytest.approx(0.1)
    assert shares(temperature=2) == pytest.approx(0.25, abs=0.02)
    assert shares(temperature=1000) == pytest.approx(0.5, abs=0.02)


def test_a_source_whose_rows_are_all_excluded_leaves_its_share_to_the_others() -> None:
    mix = mixture({"a": 8, "b": 8, "c": 8}, weights={"a": 1, "b": 1, "c": 0})
    ranks = Ranks(mix, global_batch=4, world_size=2)
    ranks.exclude(range(8))
    ranks.epoch()
    assert {mix.locate(sample.row)[0] for sample in joined(ranks.epoch())} == {"b"}
    with pytest.raises(ConfigError, match="no source with a weight has rows left"):
        ranks.exclude(range(8, 16))


def test_an_epoch_has_the_size_it_is_given() -> None:
    mix = mixture({"a": 3, "b": 50}, weights={"a": 1, "b": 1}, epoch_size=24)
    ranks = Ranks(mix, global_batch=8, world_size=4)
    assert len(ranks.loaders[0]) == len(ranks.epoch()) == 3


def test_rare_sources_come_also_if_rows_are_excluded_at_each_step() -> None:
    mix = mixture({"a": 400, "rare": 40}, weights={"a": 0.95, "rare": 0.05})
    ranks = Ranks(mix, global_batch=4, world_size=1)
    rare = 0
    for _ in range(80):
        rows = [sample.row for sample in ranks.step()]
        rare += sum(mix.locate(row)[0] == "rare" for row in rows)
        ranks.samplers[0].exclude(rows[:1], mode="immediate")
    assert 12 <= rare <= 20


def test_rows_are_read_together_and_say_where_they_are_from() -> None:
    class Batched(Rows):
        def __getitems__(self, rows: list[int]) -> list[Any]:
            return [{**self[row], "together": len(rows)} for row in rows]

    mix = fmsdata.RowMixture({"b": Batched(5, "b"), "a": Rows(4, "a"), "c": ["x", "y"]})
    rows = mix.__getitems__([6, 0, 4, 10])
    assert [row["text"] for row in rows[:3]] == ["b 2", "a 0", "b 0"]
    assert [row["dataset_idx"] for row in rows[:3]] == [1, 0, 1]
    assert rows[0]["together"] == rows[2]["together"] == 2
    assert rows[3] == mix[10] == "y"
    assert repr(mix) == "RowMixture(a: 4 rows, b: 5 rows, c: 2 rows)"
    for index in (11, -1):
        with pytest.raises(IndexError, match="a mixture of 11 rows"):
            mix[index]


@pytest.mark.parametrize(
    ("sources", "options", "message"),
    [
        ({}, {}, "with at least one"),
        ([1, 2], {}, "must be a dict of datasets"),
        ({1: [1]}, {}, "name of a source is 1"),
        ({"a": []}, {}, "source 'a' has no rows"),
        ({"a": 3}, {}, "source 'a' is a int"),
        ({"a": [1]}, {"weights": {"b": 1}}, "unknown source 'b'"),
        ({"a": [1]}, {"weights": {"a": 0}}, "every source has weight 0"),
        ({"a": [1]}, {"weights": {"a": 1}, "temperature": 2}, "give one of the two"),
        ({"a": [1]}, {"temperature": 0}, "temperature is 0"),
        ({"a": [1]}, {"epoch_size": 0}, "epoch_size is 0"),
    ],
)
def test_wrong_mixtures_say_the_way_out(sources: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fmsdata.RowMixture(sources, **options)


def test_weights_are_for_mixtures() -> None:
    sampler = fmsdata.EpochSampler(range(9), global_batch=3, rank=0, world_size=1)
    with pytest.raises(ConfigError, match="weights are for a RowMixture, and the rows are a range"):
        sampler.set_weights({"a": 1})


def test_edited_weights_hold_from_the_next_epoch_on_and_other_sources_are_refused() -> None:
    before = mixture({"a": 40, "b": 40}, weights={"a": 1, "b": 0})
    ranks = Ranks(before, global_batch=4, world_size=1)
    ranks.step()
    edited = mixture({"a": 40, "b": 40}, weights={"a": 0, "b": 1})
    resumed = Ranks(edited, global_batch=4, world_size=1, states=ranks.states())
    assert {edited.locate(sample.row)[0] for sample in joined(resumed.epoch())} == {"a"}
    assert {edited.locate(sample.row)[0] for sample in joined(resumed.epoch())} == {"b"}
    with pytest.raises(StateError, match="saved with the sources a, b and this mixture has a, c"):
        Ranks(mixture({"a": 40, "c": 40}), global_batch=4, world_size=1, states=ranks.states())
    with pytest.raises(StateError, match="source 'b' had 40 rows when the state was saved, and has 30 now"):
        Ranks(mixture({"a": 40, "b": 30}), global_batch=4, world_size=1, states=ranks.states())


def test_calling_set_epoch_before_each_loop_changes_nothing() -> None:
    def orders(*, named: bool) -> list[list[int]]:
        mix = mixture({"a": 50, "b": 9}, weights={"a": 0.7, "b": 0.3})
        sampler = fmsdata.EpochSampler(mix, global_batch=8, rank=0, world_size=1)
        epochs = []
        for epoch in range(5):
            if named:
                sampler.set_epoch(epoch)
            epochs.append(list(sampler))
        return epochs

    assert orders(named=True) == orders(named=False)


def test_weights_that_are_due_are_skipped_with_the_batches() -> None:
    mix = mixture({"a": 50, "b": 50}, weights={"a": 0.7, "b": 0.3})
    sampler = fmsdata.EpochSampler(mix, global_batch=4, rank=0, world_size=1)
    sampler.set_weights({"a": 0.1, "b": 0.9}, step=10)
    sampler.set_skip(20)
    other = fmsdata.EpochSampler(mix, global_batch=4, rank=0, world_size=1)
    other.load_state_dict(sampler.state_dict())
    assert list(other) == list(sampler)


def test_immediate_exclusion_needs_an_epoch_of_a_fixed_size() -> None:
    sampler = fmsdata.EpochSampler(mixture({"a": 20, "b": 12}), global_batch=4, rank=0, world_size=1)
    with pytest.raises(ConfigError, match="without weights"):
        sampler.exclude([1], mode="immediate")


def test_a_row_that_comes_again_in_an_epoch_draws_other_numbers() -> None:
    class Drawing(Rows):
        def __getitem__(self, row: int) -> dict[str, Any]:
            return {"row": row, "drawn": random.random()}

    mix = fmsdata.RowMixture({"big": Rows(50, "big"), "small": Drawing(2, "small")}, weights={"big": 0.5, "small": 0.5})
    sampler = fmsdata.EpochSampler(mix, global_batch=4, rank=0, world_size=1)
    loader: Any = fmsdata.StatefulDataLoader(mix, sampler=sampler, batch_size=4, collate_fn=list)
    drawn = [row["drawn"] for batch in loader for row in batch if "drawn" in row]
    assert len(drawn) > 20
    assert len(set(drawn)) == len(drawn)


@given(st.integers(0, 9), st.integers(0, 6), st.lists(st.tuples(st.integers(0, 9), st.integers(-1, 6)), max_size=3))
@settings(max_examples=60, deadline=None)
def test_a_state_of_an_earlier_batch_keeps_weights_that_were_set_later(
    at: int, behind: int, calls: list[tuple[int, int]]
) -> None:
    """As if the run had stopped at that batch, and the weights had been set then.

    A call is made at some batch, and names a step that is this number of steps later, or the next epoch (-1).
    """
    mix = mixture({"a": 20, "b": 9}, weights={"a": 1.0, "b": 1.0}, epoch_size=20)  # 5 global batches in an epoch

    def run() -> Ranks:
        return Ranks(mix, global_batch=4, world_size=1, seed=3)

    def set_weights(ranks: Ranks, call: int, step: int) -> None:
        for sampler in ranks.samplers:
            later = {} if step < 0 else {"step": step}
            sampler.set_weights({"a": 1.0, "b": 2.0 + call}, **later)

    ranks, state, missed = run(), {}, []
    for step in range(at + behind + 1):
        if step == at:
            (state,) = ranks.states()
        for number, (when, later) in enumerate(calls):
            if when == step:
                set_weights(ranks, number, step + later if later >= 0 else -1)
                missed += [(number, step + later if later >= 0 else -1)] if step >= at else []
        ranks.step()
    (kept,) = (sampler.state_dict(at=state) for sampler in ranks.samplers)
    resumed, expected = run(), run()
    for other, saved in ((resumed, kept), (expected, state)):
        other.loaders[0].load_state_dict(saved)
    for number, step in missed:
        set_weights(expected, number, step)
    assert [resumed.step() for _ in range(15)] == [expected.step() for _ in range(15)]
