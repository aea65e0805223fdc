"""The laws of fine-tuning rows: no row lost or repeated, labels on responses only, the same lines at any world size."""

import json
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

import fmsdata
from fmsdata.epochs.lines import Packing
from fmsdata.errors import ConfigError, StateError
from tests.epochs.fine_tuners import EOS, PAD, FineTuners, Step, check_epoch, data

WORLDS = (1, 2, 4)
MODES = ("split", "pad", "bestfit")
LENGTHS = st.lists(st.tuples(st.integers(0, 12), st.integers(1, 14)), min_size=1, max_size=40)


def made(lengths: Any, **options: Any) -> fmsdata.FineTuningRows:
    return fmsdata.FineTuningRows(data(lengths), "bytes", **{"seq_len": 16, "eos": EOS, "pad": PAD, **options})


@st.composite
def rows(draw: st.DrawFn) -> fmsdata.FineTuningRows:
    mode = draw(st.sampled_from(MODES))
    policy = None if mode == "split" else draw(st.sampled_from(["truncate", "drop"]))
    lengths = [*draw(LENGTHS), (1, 1)]  # one row that fits any line
    return made(lengths, seq_len=draw(st.integers(3, 20)), mode=mode, oversized=policy, shift=draw(st.booleans()))


@st.composite
def batching(draw: st.DrawFn, shape: fmsdata.FineTuningRows) -> dict[str, Any]:
    options: dict[str, Any] = {"seed": draw(st.integers(0, 3)), "shuffle": draw(st.booleans()), "drop_last": False}
    if draw(st.booleans()):
        return {**options, "global_batch": draw(st.sampled_from([4, 8]))}
    return {**options, "max_tokens": shape.seq_len + draw(st.integers(0, 40)), "global_batch": 4}


def kept(shape: fmsdata.FineTuningRows) -> set[int]:
    """The rows that an epoch must hold."""
    found = set()
    for row, texts in enumerate(shape.dataset):
        prompt, length = len(texts["prompt"]), len(texts["prompt"]) + len(texts["response"]) + 1
        if shape.mode != "split":
            if length > shape.seq_len and shape.oversized == "drop":
                continue
            length = min(length, shape.seq_len)
        if max(prompt, 1) < length:
            found.add(row)
    return found


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_each_row_comes_once_in_an_epoch_with_labels_on_its_response(drawn: st.DataObject) -> None:
    shape = drawn.draw(rows())
    ranks = FineTuners(shape, world_size=2, **drawn.draw(batching(shape)))
    for _ in range(2):
        check_epoch(shape, ranks.epoch(), kept(shape))
    assert shape.dropped + shape.untrained + len(kept(shape)) == len(shape)


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_global_batches_are_the_same_at_any_world_size(drawn: st.DataObject) -> None:
    shape = drawn.draw(rows())
    options = drawn.draw(batching(shape))
    found = []
    for world_size in WORLDS:
        ranks = FineTuners(shape, world_size=world_size, **options)
        parts = 4 // world_size if "max_tokens" in options else 1  # steps of a global batch
        found.append([global_batches(ranks.epoch(), parts) for _ in range(2)])
    assert found[0] == found[1] == found[2]


def global_batches(steps: list[Step], parts: int) -> list[Any]:
    """The lines of each global batch, by their places in the epoch."""
    return [
        sorted(line for step in steps[at : at + parts] for line in step.lines) for at in range(0, len(steps), parts)
    ]


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_global_tokens_are_the_labels_of_all_ranks_and_steps(drawn: st.DataObject) -> None:
    shape = drawn.draw(rows())
    options = drawn.draw(batching(shape))
    world_size, parts = drawn.draw(st.sampled_from([(1, 1), (1, 2), (2, 1), (2, 2), (4, 1)]))
    if "max_tokens" in options:
        parts = 4 // world_size  # each batch is a step
    ranks = FineTuners(shape, world_size=world_size, steps=parts, **options)
    steps = ranks.epoch()
    assert len(steps) % parts == 0
    for at in range(0, len(steps), parts):
        whole = steps[at : at + parts]
        labels = sum(step.labels for step in whole)
        assert [step.global_tokens for step in whole] == [[labels] * world_size] * parts


@given(
    st.data(),
    st.lists(st.tuples(st.sampled_from(WORLDS), st.integers(0, 7)), max_size=4),
    st.dictionaries(st.integers(0, 10), st.sets(st.integers(0, 39), max_size=6), max_size=3),
)
@settings(max_examples=50, deadline=None)
def test_any_chain_of_stops_and_world_sizes_gives_the_same_lines(
    drawn: st.DataObject, stops: list[tuple[int, int]], events: dict[int, set[int]]
) -> None:
    shape = drawn.draw(rows())
    options = {"global_batch": 4, "seed": 1, "drop_last": False}
    last = max(kept(shape))

    def steps(ranks: FineTuners, begin: int, count: int) -> list[Step]:
        found = []
        for step in range(begin, begin + count):
            ranks.exclude(sorted(row for row in events.get(step, ()) if row < last))
            found.append(ranks.step())
        return found

    phases = [*stops, (4, 5)]
    expected = steps(FineTuners(shape, world_size=1, **options), 0, sum(count for _, count in phases))
    found: list[Step] = []
    states: Any = None
    for world_size, count in phases:
        ranks = FineTuners(shape, world_size=world_size, states=states, **options)
        found += steps(ranks, len(found), count)
        states = json.loads(json.dumps(ranks.states()))
    assert [step.lines for step in found] == [step.lines for step in expected]
    assert [step.labels for step in found] == [step.global_tokens[0] for step in found]


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_batches_of_max_tokens_hold_no_more_and_are_one_sequence(drawn: st.DataObject) -> None:
    shape = drawn.draw(rows())
    most = shape.seq_len + drawn.draw(st.integers(0, 30))
    alone = list(loaders(shape, 1, max_tokens=most, drop_last=False)[0])
    for batch in alone:
        assert batch["input_ids"].numel() <= most
        assert int(batch["global_tokens"]) == int((batch["labels"] != -100).sum())
        assert batch["position_ids"].max() < max(shape.seq_len, 2)
    for world_size in (2, 3):
        ranks = [list(loader) for loader in loaders(shape, world_size, max_tokens=most, drop_last=False)]
        assert {len(batches) for batches in ranks} == {-(-len(alone) // world_size)}
        dealt = [ranks[at % world_size][at // world_size] for at in range(len(ranks[0]) * world_size)]
        for own, expected in zip(dealt, alone, strict=False):
            assert own["input_ids"].tolist() == expected["input_ids"].tolist()
            assert own["labels"].tolist() == expected["labels"].tolist()
        for batch in dealt[len(alone) :]:
            assert batch["is_padding"].all()
            assert batch["labels"].eq(-100).all()
            assert not len(batch["index"])
        for step in range(len(ranks[0])):
            labels = sum(int((batches[step]["labels"] != -100).sum()) for batches in ranks)
            assert {int(batches[step]["global_tokens"]) for batches in ranks} == {labels}
        whole = [list(loader) for loader in loaders(shape, world_size, max_tokens=most)] if len(alone) >= 3 else []
        assert {len(batches) for batches in whole} <= {len(alone) // world_size}


def loaders(shape: fmsdata.FineTuningRows, world_size: int, **options: Any) -> list[fmsdata.StatefulDataLoader]:
    samplers = [fmsdata.EpochSampler(shape, rank=rank, world_size=world_size, **options) for rank in range(world_size)]
    return [fmsdata.StatefulDataLoader(shape, sampler=sampler) for sampler in samplers]


def test_a_run_with_max_tokens_resumes_at_another_world_size() -> None:
    shape = made([(n % 7, 1 + n % 9) for n in range(60)])
    alone = [batch["index"].tolist() for _ in range(2) for batch in loaders(shape, 1, max_tokens=40)[0]]
    two = loaders(shape, 2, max_tokens=40)
    found = [batch["index"].tolist() for _ in range(3) for batch in [next(loader) for loader in two]]
    state = json.loads(json.dumps(two[0].state_dict()))
    three = loaders(shape, 3, max_tokens=40)
    for loader in three:
        loader.load_state_dict(state)
    found += [batch["index"].tolist() for _ in range(2) for batch in [next(loader) for loader in three]]
    assert found == alone[: len(found)]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_resume_inside_of_a_global_batch_counts_all_of_it(world_size: int) -> None:
    shape = made([(n % 7, 1 + n % 9) for n in range(80)])
    before = FineTuners(shape, world_size=world_size, global_batch=8, steps=4, drop_last=False)
    first = [before.step() for _ in range(5)]
    after = FineTuners(shape, world_size=world_size, global_batch=8, steps=4, states=before.states(), drop_last=False)
    steps = first + [after.step() for _ in range(3)]
    for whole in (steps[:4], steps[4:]):
        labels = sum(step.labels for step in whole)
        assert [step.global_tokens for step in whole] == [[labels] * world_size] * 4
    cut = FineTuners(shape, world_size=world_size, global_batch=8, steps=1, states=before.states(), drop_last=False)
    following = cut.step()  # the next global batch begins where the state is
    assert following.global_tokens == [following.labels] * world_size
    assert following.lines[: 8 - 2] == [line for step in steps[5:] for line in step.lines]


def test_windows_of_best_fit_lose_no_row_and_keep_rows_near_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fmsdata.epochs.lines.WINDOW", 8)
    shape = made([(n % 7, 1 + n % 9) for n in range(61)])
    ranks = FineTuners(shape, world_size=2, global_batch=2, shuffle=False, drop_last=False)
    steps = ranks.epoch()
    check_epoch(shape, steps, set(range(61)))
    rows = [row for step in steps for row in step.rows]
    assert [row // 8 for row in rows] == sorted(row // 8 for row in rows)
    assert rows != sorted(rows)


def test_lines_of_rows_in_order_keep_the_order() -> None:
    for mode in ("pad", "split"):
        ranks = FineTuners(made([(2, 9)] * 20, mode=mode), world_size=1, global_batch=2, shuffle=False, drop_last=False)
        rows = [row for step in ranks.epoch() for row in step.rows]
        assert rows == sorted(rows)


@pytest.mark.parametrize(
    ("edited", "message"),
    [
        ({"start": 2}, "lines change within the epoch, from 2 on"),
        ({"order": '{"place": 3}'}, "the order of the rows begins at 3"),
        ({"weights": '{"next": null, "changes": [[9, {"a": 1.0}]]}'}, "lines change within the epoch"),
    ],
)
def test_an_edited_state_is_an_error(edited: dict[str, Any], message: str) -> None:
    shape = made([(2, 3)] * 30)
    ranks = FineTuners(shape, world_size=1, global_batch=2)
    ranks.step()
    with pytest.raises(StateError, match=message):
        ranks.loaders[0].load_state_dict({**ranks.states()[0], **edited})


def test_a_tokenizer_that_gives_other_tokens_under_the_same_name_is_noticed(tmp_path: Path) -> None:
    class Words:
        fingerprint = "words"

        def __init__(self, more: int) -> None:
            self._more = more

        def encode(self, text: str) -> list[int]:
            return [*text.encode(), *[1] * self._more]

    def sampler(more: int) -> fmsdata.EpochSampler:
        rows = fmsdata.FineTuningRows(data([(2, 3)] * 9), Words(more), seq_len=16, eos=0, cache=tmp_path / str(more))
        return fmsdata.EpochSampler(rows, global_batch=2, rank=0, world_size=1)

    before = sampler(0)
    before.set_skip(1)
    with pytest.raises(StateError, match=r"tokens='54 in 9 rows, .*tokens='72 in 9 rows"):
        sampler(1).load_state_dict(before.state_dict())


def test_excluded_rows_are_missing_from_the_next_epoch_on() -> None:
    shape = made([(2, 3)] * 30)
    ranks = FineTuners(shape, world_size=2, global_batch=2, drop_last=False)
    first = ranks.step()
    gone = set(first.rows)
    ranks.exclude(first.rows)
    rest = ranks.epoch()
    check_epoch(shape, [first, *rest], set(range(30)))
    check_epoch(shape, ranks.epoch(), set(range(30)) - gone)
    assert ranks.samplers[0].excluded == sorted(gone)


@pytest.mark.parametrize("options", [{"global_batch": 4}, {"max_tokens": 40, "global_batch": 2}])
def test_drop_last_leaves_lines_out_and_lengths_are_known(options: dict[str, Any]) -> None:
    shape = made([(3, 4)] * 45)
    ranks = FineTuners(shape, world_size=2, **options)
    for _ in range(2):
        expected = len(ranks.loaders[0])
        steps = ranks.epoch()
        assert len(steps) == expected
        assert not any(line.padding for step in steps for line in step.lines)
    filled = FineTuners(shape, world_size=2, drop_last=False, **options)
    assert len(filled.loaders[0]) == len(filled.epoch()) == expected + 1


def test_rows_of_an_epoch_are_in_no_order_of_length() -> None:
    """Lines of many short rows come as early as those of one long row."""
    lengths = [(0, 3)] * 200 + [(0, 13)] * 200
    shape = made(lengths)
    ranks = FineTuners(shape, world_size=1, global_batch=1)
    sizes = [len(line.pieces) for step in ranks.epoch() for line in step.lines]
    half = len(sizes) // 2
    early, late = sum(size > 1 for size in sizes[:half]), sum(size > 1 for size in sizes[half:])
    assert early + late > 40
    assert abs(early - late) < 0.35 * (early + late)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"seq_len": 15}, r"saved with seq_len=16, and now it is seq_len=15.*reshuffle"),
        ({"mode": "pad"}, r"mode='bestfit'.*mode='pad'"),
        ({"oversized": "drop"}, r"oversized='truncate'.*oversized='drop'"),
        ({"eos": 5}, r"eos=0.*eos=5"),
        ({"bos": 1, "mode": "pad"}, r"bos=None, mode='bestfit'.*bos=1, mode='pad'"),
    ],
)
def test_a_state_of_other_lines_is_refused_in_the_middle_of_an_epoch(changed: dict[str, Any], message: str) -> None:
    lengths = [(2, 3)] * 30

    def loader(**options: Any) -> Any:
        shape = made(lengths, **options)
        sampler = fmsdata.EpochSampler(shape, global_batch=2, rank=0, world_size=1)
        return fmsdata.StatefulDataLoader(shape, sampler=sampler, batch_size=2)

    before = loader()
    loader(**changed).load_state_dict(before.state_dict())
    next(before)
    with pytest.raises(StateError, match=message):
        loader(**changed).load_state_dict(before.state_dict())
    before.sampler.reshuffle()
    after = loader(**changed)
    after.load_state_dict(before.state_dict())
    assert after.sampler.epoch == 1
    other = made([(2, 4)] * 30)
    sampler = fmsdata.EpochSampler(other, global_batch=2, rank=0, world_size=1)
    with pytest.raises(StateError, match="other content"):
        sampler.load_state_dict(before.state_dict())


def test_what_only_shows_in_labels_and_padding_may_change() -> None:
    def sampler(**options: Any) -> fmsdata.EpochSampler:
        return fmsdata.EpochSampler(made([(2, 3)] * 30, **options), global_batch=2, rank=0, world_size=1)

    before = sampler()
    before.set_skip(2)
    sampler(shift=False, pad=3).load_state_dict(before.state_dict())
    tokens = fmsdata.EpochSampler(before.rows, max_tokens=20, rank=0, world_size=1)
    with pytest.raises(StateError, match="max_tokens=None, and now it is max_tokens=20"):
        tokens.load_state_dict(before.state_dict())
    plain = fmsdata.EpochSampler(data([(2, 3)] * 30), global_batch=2, rank=0, world_size=1, fingerprint=False)
    with pytest.raises(StateError, match="seq_len=16"):
        plain.load_state_dict(before.state_dict())


def test_an_epoch_is_planned_once_and_only_when_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = []
    pack = Packing.pack

    def counted(*of: Any) -> Any:
        planned.append(1)
        return pack(*of)

    monkeypatch.setattr(Packing, "pack", counted)
    shape = made([(2, 3)] * 30)
    sampler = fmsdata.EpochSampler(shape, global_batch=2, rank=0, world_size=1)
    loader = fmsdata.StatefulDataLoader(shape, sampler=sampler, batch_size=2)
    sampler.exclude([3])
    assert not planned
    state = loader.state_dict()
    assert len(json.dumps(state)) < 2048
    list(loader)
    loader.load_state_dict(state)
    list(loader)
    assert len(planned) == 1
    assert len(loader) == 7  # 29 rows, two to a line
    list(loader)
    assert len(planned) == 2


def test_mixtures_keep_their_shares_and_say_where_rows_come_from() -> None:
    mix = fmsdata.RowMixture(
        {"code": data([(2, 3)] * 40), "math": data([(1, 5)] * 200)}, weights={"code": 0.5, "math": 0.5}
    )
    shape = fmsdata.FineTuningRows(mix, "bytes", seq_len=32, eos=EOS)
    sampler = fmsdata.EpochSampler(shape, global_batch=4, rank=0, world_size=1)
    loader = fmsdata.StatefulDataLoader(shape, sampler=sampler, batch_size=4)
    sources = [source for batch in loader for source in batch["dataset_idx"].tolist()]
    assert len(sources) > 200
    assert abs(sources.count(0) - len(sources) / 2) < 12
    batch = next(loader)
    for row, source in zip(batch["index"].tolist(), batch["dataset_idx"].tolist(), strict=True):
        assert mix.names[source] == mix.locate(row)[0]
    sampler.set_weights({"code": 0, "math": 1})
    sampler.reshuffle()
    assert {source for batch in loader for source in batch["dataset_idx"].tolist()} == {1}
    with pytest.raises(ConfigError, match="from the next epoch on"):
        sampler.set_weights({"code": 1, "math": 1}, step=1000)
    again = fmsdata.EpochSampler(shape, global_batch=4, rank=0, world_size=1)
    again.load_state_dict(sampler.state_dict())


def test_weights_that_leave_too_few_lines_are_refused() -> None:
    mix = fmsdata.RowMixture({"long": data([(2, 12)] * 40), "short": data([(1, 2)])})
    shape = fmsdata.FineTuningRows(mix, "bytes", seq_len=16, eos=EOS)
    sampler = fmsdata.EpochSampler(shape, global_batch=8, rank=0, world_size=1)
    with pytest.raises(ConfigError, match="the rows that are left fill 1 line: with"):
        sampler.set_weights({"long": 0, "short": 1})
    sampler.set_weights({"long": 1, "short": 1})
    sampler.reshuffle()
    assert len(list(fmsdata.StatefulDataLoader(shape, sampler=sampler, batch_size=8))) > 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "global_batch is missing"),
        ({"max_tokens": 15}, r"max_tokens is 15, but a row may have 16 tokens \(seq_len\)"),
        ({"global_batch": 400}, "the rows that are left fill 15 lines: with drop_last=True"),
        ({"max_tokens": 30, "global_batch": 400}, "the rows that are left fill 6 lines of max_tokens=30: with"),
    ],
)
def test_wrong_arguments_of_the_sampler_say_the_way_out(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fmsdata.EpochSampler(made([(2, 3)] * 30), rank=0, world_size=1, **options)


def test_what_needs_lines_is_refused_without_them_and_the_reverse() -> None:
    shape = made([(2, 3)] * 30)
    with pytest.raises(ConfigError, match="max_tokens is for FineTuningRows, and the rows are a list"):
        fmsdata.EpochSampler(shape.dataset, max_tokens=20, rank=0, world_size=1)
    sampler = fmsdata.EpochSampler(shape, global_batch=2, rank=0, world_size=1)
    with pytest.raises(ConfigError, match="packed lines, which have no id"):
        list(sampler)
    with pytest.raises(ConfigError, match=r"mode='immediate'.*from the next epoch on"):
        sampler.exclude([1], mode="immediate")
    with pytest.raises(ConfigError, match="all rows are excluded"):
        sampler.exclude(range(30))
    with pytest.raises(ConfigError, match="leave out collate_fn"):
        fmsdata.StatefulDataLoader(shape, sampler=sampler, batch_size=2, collate_fn=list)
    with pytest.raises(ConfigError, match="different FineTuningRows"):
        fmsdata.StatefulDataLoader(made([(2, 3)] * 30), sampler=sampler, batch_size=2)
    with pytest.raises(
        ConfigError, match="output 'provenance' is for streams; batches of FineTuningRows can hold document_ids"
    ):
        fmsdata.StatefulDataLoader(shape, sampler=sampler, batch_size=2, outputs=["provenance"])
    with pytest.raises(ConfigError, match="outputs is 'cu_seqlens'; it must be a list"):
        fmsdata.StatefulDataLoader(shape, sampler=sampler, batch_size=2, outputs="cu_seqlens")
    with pytest.raises(ConfigError, match="batch_size is missing"):
        fmsdata.StatefulDataLoader(shape, sampler=sampler)
    counted = fmsdata.EpochSampler(shape, max_tokens=20, rank=0, world_size=1)
    with pytest.raises(ConfigError, match="batch_size is 2, but the sampler makes batches of max_tokens=20"):
        fmsdata.StatefulDataLoader(shape, sampler=counted, batch_size=2)


def test_excluding_all_rows_that_can_be_trained_is_an_error() -> None:
    shape = made([(20, 3), (2, 3)], mode="pad")
    sampler = fmsdata.EpochSampler(shape, global_batch=1, rank=0, world_size=1, drop_last=False)
    with pytest.raises(ConfigError, match="no row is left that has something to train on"):
        sampler.exclude([1])
    assert sampler.excluded == []
