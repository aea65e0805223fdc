"""Finite passes: each document exactly `epochs` times, and the same last step on every rank."""

import itertools
import json
import multiprocessing
import os
import signal
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fmsdata
from fmsdata import testing
from fmsdata.core.lane import Lane
from fmsdata.errors import ConfigError, DataError, FmsdataWarning, StateError
from fmsdata.planning.schedule import Schedule, Segment, Turns, after_samples
from fmsdata.trace import Trace
from tests.helpers import closed, documents, maker, opened, write_source

MODES: list[dict[str, Any]] = [
    {},
    {"pack__bol": 2, "pack__eol": 3, "documents__bos": 4},
    {"pack__mode": "pad", "pack__pad": 1},
    {"pack__mode": "pad", "pack__pad": 1, "pack__bol": 2, "pack__eol": 3},
    {"pack__mode": "bestfit", "pack__pad": 1, "pack__bol": 2},
    {"documents__strip": [10, 11, 12], "documents__min_length": 20},
]


def stored(root: Path, **options: Any) -> testing.Stored:
    return testing.stored_documents({name: root / name for name in ("web", "wiki")}, **options)


def take_pass(make: testing.MakeLoader, account: testing.Account, chain: list[tuple[int, int]]) -> list[int]:
    """Read a pass: some steps at each world size of the chain, and at the last one to the end. Returns the last step
    of each rank."""
    states: list[Any] | None = None
    for number, (world_size, steps) in enumerate(chain):
        loaders = [make(rank, world_size) for rank in range(world_size)]
        for rank, loader in enumerate(loaders):
            if states is not None:
                loader.load_state_dict(states)
            last = number == len(chain) - 1
            if not loader.ended:
                for batch in itertools.islice(loader, None if last else steps):
                    account.add(batch, f"rank {rank} of {world_size}")
        states = [json.loads(json.dumps(loader.state_dict())) for loader in loaders]
    assert all(loader.ended for loader in loaders)
    return [state["step"] for state in states or []]


@pytest.mark.parametrize("overrides", MODES, ids=str)
def test_all_ranks_end_at_the_same_step_with_the_same_samples(
    shared_corpus: Path, small_windows: None, overrides: dict[str, Any]
) -> None:
    make = maker(shared_corpus, epochs=1, loader__batch_size=4, **overrides)
    testing.check_equal_ends(make, world_sizes=[2, 7])


shapes = st.fixed_dictionaries(
    {
        "web": st.lists(st.integers(1, 60), min_size=1, max_size=40),
        "wiki": st.lists(st.integers(1, 60), min_size=1, max_size=6),
        "mode": st.sampled_from(MODES[:-1]),
        "lanes": st.integers(1, 14),
        "window": st.sampled_from([1, 3, 50]),
        "batch_size": st.sampled_from([1, 2, 7, 100]),
        "epochs": st.integers(1, 3),
        "chain": st.lists(st.tuples(st.integers(1, 14), st.integers(0, 4)), min_size=1, max_size=4),
        "seed": st.integers(0, 99),
    }
)


@settings(max_examples=30, deadline=None)
@given(shapes)
def test_each_document_comes_exactly_so_many_times_over_any_stops(shape: dict[str, Any]) -> None:
    rng = np.random.default_rng(shape["seed"])
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for name in ("web", "wiki"):
            write_source(root / name, [rng.integers(10, 250, length) for length in shape[name]], shards=1)
        make = maker(
            root,
            **shape["mode"],
            lanes=shape["lanes"],
            seed=shape["seed"],
            epochs=shape["epochs"],
            shuffle__window=shape["window"],
            loader__batch_size=shape["batch_size"],
            loader__prefetch=0,
        )
        account = testing.Account(stored(root), shape["epochs"])
        chain = [(1 + (world_size - 1) % shape["lanes"], steps) for world_size, steps in shape["chain"]]
        steps = take_pass(make, account, chain)
    assert len(set(steps)) == 1, "the ranks end at different steps"
    assert account.is_complete(), account.missing()
    assert max(account.latest.values()) == shape["epochs"] - 1, "a document came too often"


@pytest.mark.parametrize("overrides", MODES, ids=str)
def test_restoring_after_any_step_of_a_pass_gives_the_rest_and_the_same_end(
    shared_corpus: Path, small_windows: None, overrides: dict[str, Any]
) -> None:
    make = maker(shared_corpus, epochs=1, lanes=4, loader__batch_size=5, loader__prefetch=0, **overrides)
    for rank in range(2):
        loader = make(rank, 2)
        states, seen = [loader.state_dict()], []
        for batch in loader:
            seen.append(testing.row_fields(batch))
            states.append(json.loads(json.dumps(loader.state_dict())))
        assert len(loader) == len(seen)
        for step, state in enumerate(states):
            restored = make(rank, 2)
            restored.load_state_dict(state)
            assert restored.state_dict() == state
            assert len(restored) == len(seen)
            rest = [] if restored.ended else [testing.row_fields(batch) for batch in restored]
            assert str(rest) == str(seen[step:])


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=9),
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 4), st.integers(0, 3)), min_size=1, max_size=4),
)
def test_the_schedule_of_a_pass_is_what_the_ranks_take(limits: list[int], segments: list[tuple[int, int, int]]) -> None:
    lanes = len(limits)
    step, history = 0, list[Segment]()
    taken = dict.fromkeys(range(lanes), 0)
    for world_size, batch_size, steps in segments:
        world_size = 1 + (world_size - 1) % lanes
        history = [*[segment for segment in history if segment.step < step], Segment(step, world_size, batch_size)]
        schedule = Schedule(history, lanes, np.array(limits))
        assert schedule.lines(step).tolist() == list(taken.values())
        turns = [
            Turns({lane: taken[lane] for lane in range(rank, lanes, world_size)}, lanes, np.array(limits))
            for rank in range(world_size)
        ]
        end = step
        remaining = [turn.take(10**4) for turn in turns]
        end += max(-(-len(samples) // batch_size) for samples in remaining)
        assert schedule.end(history[-1]) == end
        for number in range(steps):
            batches = [samples[number * batch_size : (number + 1) * batch_size] for samples in remaining]
            assert schedule.samples(step + number) == batches
            for rank, batch in enumerate(batches):
                for row, sample in enumerate(batch):
                    assert schedule.when(sample) == (step + number, rank, row)
                    taken[sample % lanes] += 1
        step += steps


@given(st.lists(st.integers(0, 20), min_size=1, max_size=9), st.integers(0, 60))
def test_samples_are_taken_from_the_lanes_with_the_fewest_lines(limits: list[int], samples: int) -> None:
    turns = Turns(dict.fromkeys(range(len(limits)), 0), len(limits), np.array(limits))
    expected = Counter(sample % len(limits) for sample in turns.take(samples))
    lines = after_samples(np.zeros(len(limits), np.int64), np.array(limits), samples)
    assert lines.tolist() == [expected[lane] for lane in range(len(limits))]


def test_the_first_part_of_a_pass_is_the_stream_of_an_endless_run(shared_corpus: Path) -> None:
    finite, endless = maker(shared_corpus, epochs=9, lanes=3)(0, 1), maker(shared_corpus, lanes=3)(0, 1)
    assert min(finite.pass_lines) > 80
    for batch, other in itertools.islice(zip(finite, endless, strict=False), 3 * 80):
        assert batch["provenance"] == other["provenance"]


@pytest.mark.parametrize("workers", [3])
def test_workers_read_the_same_pass(shared_corpus: Path, workers: int) -> None:
    make, with_workers = (
        maker(shared_corpus, epochs=1, loader__batch_size=4, loader__num_workers=n) for n in (0, workers)
    )
    alone, together = make(1, 5), with_workers(1, 5)
    assert str(list(alone)) == str(list(together))
    assert together.ended
    assert not together.worker_pids, "the workers end with the pass"


def test_five_documents_on_192_lanes_and_any_number_of_ranks(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for name in ("web", "wiki"):
        write_source(tmp_path / name, documents(rng, 5, shortest=1), shards=1)
    for world_size in (1, 7, 192):
        make = maker(tmp_path, epochs=1, lanes=192, loader__batch_size=2, loader__prefetch=0)
        account = testing.Account(stored(tmp_path), 1)
        steps = take_pass(make, account, [(world_size, 0)])
        assert len(set(steps)) == 1
        assert account.is_complete()


def test_one_document_and_a_batch_larger_than_everything(tmp_path: Path) -> None:
    write_source(tmp_path / "web", [[11, 12, 13]], shards=1)
    make = maker(tmp_path, epochs=2, sources={"web": {}}, loader__batch_size=1000)
    for rank in range(2):
        (batch,) = make(rank, 2)
        assert batch["input_ids"].shape == (1000, 16)
    spans = [span for rank in range(2) for batch in make(rank, 2) for row in batch["provenance"] for span in row]
    assert spans == [("web", "part-0.arrow", 0, 0, 3)] * 2


def test_a_set_in_which_no_document_is_long_enough_is_an_error(tmp_path: Path) -> None:
    write_source(tmp_path / "web", [[11, 12, 13]] * 4, shards=1)
    loader = maker(tmp_path, epochs=1, sources={"web": {}}, documents__min_length=9)(0, 1)
    with pytest.raises(DataError, match="nothing to read in a finite pass"):
        len(loader)
    with pytest.raises(DataError, match="nothing to read in a finite pass"):
        next(iter(loader))


def test_weights_decide_the_order_and_every_source_is_read_to_its_end(shared_corpus: Path) -> None:
    weights = {"web": {"weight": 1}, "wiki": {"weight": 1000}}
    loader = maker(shared_corpus, epochs=1, lanes=1, sources=weights, shuffle__window=1)(0, 1)
    rows = [{span.source for span in row} for batch in loader for row in batch["provenance"]]
    assert rows[2] == {"wiki"}
    assert rows[-1] == {"web"}
    account = testing.Account(stored(shared_corpus), 1)
    take_pass(maker(shared_corpus, epochs=1, sources=weights), account, [(2, 0)])
    assert account.is_complete()


def test_a_source_with_weight_0_is_not_read_and_max_epochs_holds(shared_corpus: Path) -> None:
    sources: dict[str, Any] = {"web": {"weight": 0}, "wiki": {"weight": 1}}
    batches = list(maker(shared_corpus, epochs=1, sources=sources)(0, 1))
    assert {span.source for batch in batches for row in batch["provenance"] for span in row} == {"wiki"}
    sources = {"web": {"weight": 1, "max_epochs": 1}, "wiki": {"weight": 1}}
    batches = list(maker(shared_corpus, epochs=3, sources=sources)(0, 1))
    seen = Counter(
        (span.source, epoch)
        for batch in batches
        for row, epochs in zip(batch["provenance"], batch["epochs"], strict=True)
        for span, epoch in zip(row, epochs, strict=True)
    )
    assert {key for key in seen if key[0] == "web"} == {("web", 0)}
    assert {key for key in seen if key[0] == "wiki"} == {("wiki", 0), ("wiki", 1), ("wiki", 2)}


def test_crop_ends_with_a_padded_line_only_if_nothing_else_fills_it(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    for name, count in (("web", 40), ("wiki", 1)):
        write_source(tmp_path / name, documents(rng, count, shortest=1), shards=1)
    options = {"pack__mode": "bestfit", "pack__crop": True, "pack__bol": 2, "lanes": 6}
    testing.check_equal_ends(maker(tmp_path, epochs=1, **options), world_sizes=[2, 5])


def test_the_last_line_of_split_is_padded_and_its_padding_has_no_labels(tmp_path: Path) -> None:
    write_source(tmp_path / "web", [[11, 12, 13], [14, 15]], shards=1)
    config = {"sources": {"web": {}}, "lanes": 1, "pack__seq_len": 4, "documents__eos": 5, "epochs": 1}
    for pad, expected in ((None, 0), (9, 9)):
        batches = list(maker(tmp_path, **config, pack__pad=pad)(0, 1))
        last = batches[-1]
        assert not last["is_padding"].any()
        assert last["input_ids"][0, -2:].tolist() == [expected] * 2
        assert last["labels"][0, -2:].tolist() == [-100] * 2


def test_after_the_end_there_is_nothing_more_and_a_warning_says_so(shared_corpus: Path) -> None:
    make = maker(shared_corpus, epochs=1, loader__batch_size=40)
    loader = make(0, 1)
    before, steps, after = loader.ended, len(list(loader)), loader.ended
    assert (before, after) == (False, True)
    with pytest.raises(StopIteration):
        next(loader)
    with pytest.warns(FmsdataWarning, match=f"the pass has ended at step {steps}"):
        assert list(loader) == []
    resumed = make(0, 1)
    resumed.load_state_dict(loader.state_dict())
    assert resumed.ended
    assert len(resumed) == steps
    with pytest.raises(StopIteration):
        next(resumed)


def test_steps_end_iterations_within_the_pass(shared_corpus: Path) -> None:
    loader = maker(shared_corpus, epochs=1, loader__batch_size=10, loader__steps=5)(0, 1)
    assert len(loader) == 5
    lengths = []
    while not loader.ended:
        lengths.append(len(list(loader)))
    assert lengths[:-1] == [5] * (len(lengths) - 1)
    assert sum(lengths) == -(-sum(loader.pass_lines) // 10)
    assert maker(shared_corpus, epochs=1, loader__batch_size=10, loader__steps=500)(0, 1).__len__() == sum(lengths)


def test_next_reads_the_pass_too(shared_corpus: Path) -> None:
    loader, other = (maker(shared_corpus, epochs=1, loader__batch_size=30)(0, 1) for _ in range(2))
    batches = []
    with pytest.raises(StopIteration):
        while True:
            batches.append(next(loader))
    assert str(batches) == str(list(other))


def test_a_checkpoint_at_the_end_resumes_to_the_end(shared_corpus: Path, tmp_path: Path) -> None:
    make = maker(
        shared_corpus, epochs=1, loader__batch_size=9, checkpoint={"path": str(tmp_path / "saved"), "every": 4}
    )
    loader = make(0, 1)
    steps = len(list(loader))
    loader.close()
    again = make(0, 1)
    assert again.ended
    assert again.state_dict()["step"] == steps
    again.load(step=8)
    assert len(list(again)) == steps - 8
    again.close()


def test_what_a_finite_pass_cannot_have_is_refused(shared_corpus: Path) -> None:
    phases = [{"until_tokens": 100, "weights": {"web": 1, "wiki": 1}}]
    with pytest.raises(ConfigError, match="phases"):
        maker(shared_corpus, epochs=1, phases=phases)
    with pytest.raises(ConfigError, match="epochs"):
        maker(shared_corpus, epochs=0)
    reader = fmsdata.ShardReader(shared_corpus / "web")
    with pytest.raises(ConfigError, match="needs a Pack"):
        fmsdata.Rescalable(reader, lanes=2, epochs=1)
    lines = fmsdata.Pack(reader, seq_len=9)
    with pytest.raises(ConfigError, match="StatefulDataLoader"):
        iter(fmsdata.Rescalable(lines, lanes=2, epochs=1))
    with pytest.raises(TypeError, match="no end"):
        len(maker(shared_corpus)(0, 1))


def test_a_pass_is_not_edited_on_resume(shared_corpus: Path) -> None:
    loader = maker(shared_corpus, epochs=1)(0, 1)
    next(loader)
    for overrides, expected in (
        ({"epochs": 2}, "saved with epochs 1 and this run has epochs 2"),
        ({}, "saved with epochs 1 and this run has epochs None"),
        ({"epochs": 1, "sources.web.weight": 5}, "can't be edited"),
        ({"epochs": 1, "sources.web.max_epochs": 1}, "can't be edited"),
    ):
        other = maker(shared_corpus, **{name.replace(".", "__"): value for name, value in overrides.items()})(0, 1)
        with pytest.raises(StateError, match=expected):
            other.load_state_dict(loader.state_dict())


def test_a_state_with_other_lines_than_its_steps_is_refused(shared_corpus: Path) -> None:
    make = maker(shared_corpus, epochs=1)
    loader = make(0, 1)
    next(loader)
    state = opened(loader.state_dict())
    state["history"] = [[0, 1, 3]]
    other = make(0, 1)
    other.load_state_dict(closed(state))
    with pytest.raises(StateError, match="according to the steps of the pass"):
        next(other)


def test_shards_with_other_lengths_than_planned_are_an_error(tmp_path: Path) -> None:
    """The counts are the same, so nothing else would notice."""
    for name in ("web", "wiki"):
        write_source(tmp_path / name, [np.full(1 + i % 30, 11) for i in range(60)], shards=1)
    make = maker(tmp_path, epochs=1, lanes=2, loader__batch_size=50)
    planned = make(0, 1).pass_lines
    for name in ("web", "wiki"):
        write_source(tmp_path / name, [np.full(1 + (i + 7) % 30, 11) for i in range(60)], shards=1)
    other = maker(tmp_path, epochs=1, lanes=2, loader__batch_size=50)(0, 1)
    assert other.pass_lines != planned
    other.data.plan().result().lines[:] = planned
    with pytest.raises(DataError, match="not what was planned"):
        list(other)


def test_the_plan_is_kept_and_used_again(shared_corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("fmsdata.run.finite.KEPT_SECONDS", -1.0)
    lines = maker(shared_corpus, epochs=1)(0, 1).pass_lines
    (kept,) = (tmp_path / "cache" / "fmsdata").glob("pass-*.json")
    assert json.loads(kept.read_text())["lines"] == lines
    monkeypatch.setattr("fmsdata.run.finite.plan_pass", None)  # would fail
    assert maker(shared_corpus, epochs=1)(0, 1).pass_lines == lines
    with pytest.raises(TypeError):
        _ = maker(shared_corpus, epochs=2)(0, 1).pass_lines
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for damaged in ("", "{", "[]", '{"lines": [1]}', '{"lines": null}', json.dumps({"lines": [-1] * 24})):
        kept.write_text(damaged)
        assert maker(shared_corpus, epochs=1)(0, 1).pass_lines == lines
    saved = maker(shared_corpus, epochs=1, checkpoint={"path": str(tmp_path / "saved")})
    monkeypatch.setattr("fmsdata.run.finite.KEPT_SECONDS", -1.0)
    loader = saved(0, 1)
    assert loader.pass_lines == lines
    assert list((tmp_path / "saved").glob("pass-*.json"))
    loader.close()


def test_stats_of_a_pass(shared_corpus: Path) -> None:
    loader = maker(shared_corpus, epochs=2, loader__batch_size=10)(0, 1)
    list(loader)
    stats = loader.stats()
    assert stats.samples == sum(loader.pass_lines)
    assert stats.tokens == 2 * sum(len(tokens) for tokens in stored(shared_corpus).values())
    assert {name: source.epochs for name, source in stats.sources.items()} == {"web": 2.0, "wiki": 2.0}
    for source in stats.sources.values():
        assert source.share == pytest.approx(source.planned)


def test_a_stage_of_the_users_own_ends_too(shared_corpus: Path) -> None:
    class Doubled(fmsdata.Stage):
        def transform(self, item: Any, key: int) -> list[Any]:  # noqa: ARG002
            return [item, item.replace(item.tokens[::-1])]

    reader = fmsdata.ShardReader(shared_corpus / "web")
    long = fmsdata.Filter(Doubled(reader), lambda document: len(document) > 9)
    data = fmsdata.Rescalable(fmsdata.Shuffle(fmsdata.Pack(long, seq_len=17), window=5), lanes=6, epochs=1)

    def make(rank: int, world_size: int) -> fmsdata.StatefulDataLoader:
        return fmsdata.StatefulDataLoader(data, batch_size=2, rank=rank, world_size=world_size)

    testing.check_equal_ends(make, world_sizes=[2, 4])
    lengths = [len(item) for item in reader.open(Lane(epochs=1)).read()]
    assert lengths, "a reader of a lane with epochs ends by itself"


@pytest.mark.parametrize(
    "task",
    [
        {"name": "masked_lm", "mask": 5, "vocab_size": 300},
        {"name": "fill_in_the_middle", "prefix": 5, "suffix": 6, "middle": 7, "rate": 1.0},
        {"name": "causal_lm", "shift": False, "cross_documents": False},
    ],
    ids=lambda task: str(task["name"]),
)
def test_every_task_marks_what_fills_up(shared_corpus: Path, task: dict[str, Any]) -> None:
    outputs = [name for name in fmsdata.core.options.OUTPUT_NAMES if not name.startswith("label")]
    make = maker(shared_corpus, epochs=1, task=task, loader__batch_size=13, loader__outputs=outputs)
    testing.check_equal_ends(make, world_sizes=[24])


def _read_until_killed(root: Path, folder: Path, world_size: int, steps: int) -> None:
    """Hand out some steps of a pass on all ranks, log them, and die in the middle of the next."""
    make = maker(root, epochs=1, lanes=6, loader__batch_size=2, checkpoint={"path": str(folder / "saved"), "every": 1})
    loaders = [make(rank, world_size) for rank in range(world_size)]
    with (folder / "log.jsonl").open("w") as log:
        for step in range(steps + 1):
            for rank, loader in enumerate(loaders):
                batch = next(loader)  # saves the step before
                log.write(json.dumps([step, batch["provenance"], batch["epochs"]]) + "\n")
                log.flush()
                if step == steps and rank == world_size // 2:
                    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.filterwarnings("ignore:.*can't be used:fmsdata.errors.FmsdataWarning")
@pytest.mark.parametrize("steps", range(6))
def test_a_pass_that_is_killed_resumes_at_another_world_size(shared_corpus: Path, tmp_path: Path, steps: int) -> None:
    process = multiprocessing.get_context("fork").Process(
        target=_read_until_killed, args=(shared_corpus, tmp_path, 3, steps)
    )
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    saved = {"path": str(tmp_path / "saved"), "every": None}
    make = maker(shared_corpus, epochs=1, lanes=6, loader__batch_size=2, checkpoint=saved)
    loaders = [make(rank, 4) for rank in range(4)]
    (resumed,) = {loader.state_dict()["step"] for loader in loaders}
    assert resumed in (steps, max(0, steps - 1)), "only the newest step may be incomplete"
    seen: Counter[Any] = Counter()
    for line in (tmp_path / "log.jsonl").read_text().splitlines():
        step, rows, _ = json.loads(line)
        if step < resumed:
            seen.update(tuple(span) for row in rows for span in row)
    ends = set()
    for loader in loaders:
        for batch in loader:
            seen.update(tuple(span) for row in batch["provenance"] for span in row)
        ends.add(loader.state_dict()["step"])
        loader.close()
    alone = maker(shared_corpus, epochs=1, lanes=6)(0, 1)
    assert seen == Counter(tuple(span) for batch in alone for row in batch["provenance"] for span in row)
    assert len(ends) == 1


def test_the_steps_of_a_pass_can_be_traced(shared_corpus: Path, tmp_path: Path) -> None:
    make = maker(
        shared_corpus, epochs=1, lanes=6, loader__batch_size=4, checkpoint={"path": str(tmp_path / "saved"), "every": 5}
    )
    loaders = [make(rank, 2) for rank in range(2)]
    steps = [[batch["provenance"] for batch in loader] for loader in loaders]
    for loader in loaders:
        loader.close()
    run = Trace(loaders[0].data, checkpoints=fmsdata.Checkpoints(str(tmp_path / "saved"), read_only=True))
    last = len(steps[0]) - 1
    for step in (0, last - 1, last):
        seen = run.step(step)
        for rank in range(2):
            expected = [[row, *span] for row, spans in enumerate(steps[rank][step]) for span in spans]
            assert [
                [span.row, span.source, span.shard, span.document, span.start, span.stop]
                for span in seen
                if span.rank == rank
            ] == expected
    with pytest.raises(ConfigError, match=f"the pass ends after {last + 1} steps"):
        run.step(last + 1)
    (found,) = run.documents(["web/part-0.arrow#3"])
    assert sum(span.stop - span.start for span in found.seen) == found.stop - found.start


def test_a_pass_is_on_the_cpu_whatever_the_default_device_is(shared_corpus: Path) -> None:
    loader = maker(shared_corpus, epochs=1, loader__batch_size=5, loader__prefetch=0)(0, 1)
    with torch.device("meta"):
        devices = {value.device.type for batch in loader for value in batch.values() if isinstance(value, torch.Tensor)}
    assert devices == {"cpu"}
