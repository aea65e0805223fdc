"""The loader of map-style rows: states with prefetching workers, marks, random numbers, failures."""

import copy
import json
import os
import pickle
import random
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint

import fmsdata
from fmsdata.core.state import State
from fmsdata.errors import ConfigError, DataError, StageError, StallError, StateError, WorkerError
from fmsdata.loader.rows import RowLoader
from tests.epochs.helpers import Ranks, Rows, joined, samples


def loader(rows: Any, *, batch: int = 4, world_size: int = 1, rank: int = 0, **options: Any) -> Any:
    names = ("seed", "shuffle", "drop_last", "global_batch", "fingerprint")
    of_sampler = {name: options.pop(name) for name in names if name in options}
    of_sampler = {"global_batch": batch * world_size, **of_sampler}
    sampler = fmsdata.EpochSampler(rows, rank=rank, world_size=world_size, **of_sampler)
    return fmsdata.StatefulDataLoader(rows, sampler=sampler, batch_size=batch, **options)


def ids(batch: Any) -> list[int]:
    found: list[int] = batch["epoch_id"].tolist()
    return found


class Augmented(Rows):
    """Rows that draw from all global generators, some of them only."""

    def __getitem__(self, row: int) -> dict[str, Any]:
        found = super().__getitem__(row)
        drawn = [torch.rand(1).item(), random.random(), float(np.random.randn())] if row % 3 else [0.0] * 3  # noqa: NPY002
        return {**found, "drawn": torch.tensor(drawn)}


def test_one_name_for_streams_and_rows() -> None:
    made = loader(Rows(20))
    assert isinstance(made, fmsdata.StatefulDataLoader)
    assert isinstance(made, RowLoader)
    assert (made.rank, made.world_size, made.batch_size, made.seed) == (0, 1, 4, 0)
    assert made.dataset is made.data


def test_a_loop_is_an_epoch_and_next_goes_on() -> None:
    rows = loader(Rows(20))
    first, second = list(rows), list(rows)
    assert len(first) == len(second) == len(rows) == 5
    assert [batch["index"].tolist() for batch in first] != [batch["index"].tolist() for batch in second]
    again = loader(Rows(20))
    assert [ids(next(again)) for _ in range(12)][:10] == [ids(batch) for batch in first + second]
    assert again.sampler.epoch == 2
    begun = [ids(batch) for batch in islice(again, 1)]  # a loop that is left is continued by the next one
    assert begun + [ids(batch) for batch in again] == [[2 * 2**40 + 4 * i + j for j in range(4)] for i in range(2, 5)]


@pytest.mark.parametrize("workers", [0, 2])
def test_states_are_exact_after_every_step_with_any_workers(workers: int) -> None:
    """Two epochs; each state is loaded into a loader that runs, and which is in the middle of a loop."""
    rows = Augmented(22)
    reference = loader(rows, drop_last=False)
    expected: list[tuple[Any, State]] = []
    for _ in range(3):
        expected += [(batch, reference.state_dict()) for batch in reference]
    tested = loader(rows, drop_last=False, num_workers=workers, batch=2, global_batch=4)
    for at in (0, 3, 5, 6, 11):
        state = expected[at][1]
        tested.load_state_dict(json.loads(json.dumps(state)))
        found = [next(tested) for _ in range(6)]
        for (batch, _), first, second in zip(expected[at + 1 :], found[::2], found[1::2], strict=False):
            for name in ("index", "epoch_id", "is_padding", "drawn"):
                assert torch.equal(batch[name], torch.cat([first[name], second[name]]))
            assert batch["text"] == first["text"] + second["text"]
        second_resume = loader(rows, drop_last=False)
        second_resume.load_state_dict(tested.state_dict())
        following = next(second_resume)
        assert ids(following) == ids(expected[at + 4][0])
        assert torch.equal(following["drawn"], expected[at + 4][0]["drawn"])
    tested.close()


def test_an_iteration_that_was_open_continues_from_a_loaded_state() -> None:
    rows = loader(Rows(40), num_workers=1)
    batches = iter(rows)
    head = [ids(next(batches)) for _ in range(2)]
    state = rows.state_dict()
    tail = [ids(batch) for batch in batches]
    batches = iter(rows)
    next(batches)
    rows.load_state_dict(state)
    assert [ids(batch) for batch in batches] == tail
    assert len(head + tail) == 10
    unused = iter(rows)
    rows.load_state_dict(state)
    assert [ids(batch) for batch in unused] == tail
    rows.close()


def test_the_generators_of_the_trainer_are_as_they_were() -> None:
    rows = loader(Augmented(20))
    before = random.getstate(), torch.get_rng_state().tolist(), str(np.random.get_state(legacy=False))  # noqa: NPY002
    list(rows)
    assert before == (random.getstate(), torch.get_rng_state().tolist(), str(np.random.get_state(legacy=False)))  # noqa: NPY002


def test_random_numbers_do_not_depend_on_world_size_or_batches() -> None:
    def drawn(**options: Any) -> dict[int, list[float]]:
        found: dict[int, list[float]] = {}
        world_size = options.get("world_size", 1)
        for rank in range(world_size):
            for batch in loader(Augmented(24), rank=rank, **options):
                found |= dict(zip(batch["index"].tolist(), batch["drawn"].tolist(), strict=True))
        return found

    assert drawn(batch=4) == drawn(batch=2, world_size=2) == drawn(batch=1, global_batch=12, world_size=4)
    assert drawn(batch=4) != drawn(batch=4, seed=1)


class Drawing(Rows):
    """Rows that draw from some of the global generators: a number that depends on what they were seeded with."""

    def __init__(self, rows: int, *draw: str) -> None:
        super().__init__(rows)
        self._draw = draw

    def __getitem__(self, row: int) -> dict[str, Any]:
        draws: dict[str, Any] = {
            "torch": lambda: torch.rand(1).item(),
            "numpy": np.random.rand,
            "python": random.random,
        }
        return {"drawn": torch.tensor([draws[name]() for name in self._draw], dtype=torch.float64)}


@pytest.mark.parametrize("draw", [("torch",), ("numpy",), ("python", "torch")])
def test_random_numbers_of_each_generator_depend_on_seed_epoch_and_row_alone(draw: tuple[str, ...]) -> None:
    """Keys of rows that are planned together are made together, in the trainer's process."""
    found = []
    for batch, workers in ((10, 0), (35, 0), (42, 2)):
        rows = loader(Drawing(4200, *draw), batch=batch, num_workers=workers)
        drawn: list[tuple[int, Any]] = []
        for _ in range(2):
            for step in rows:
                random.random(), torch.rand(1), np.random.rand()  # noqa: NPY002
                drawn += zip(step["epoch_id"].tolist(), map(tuple, step["drawn"].tolist()), strict=True)
        rows.close()
        found.append(drawn)
    assert found[0] == found[1] == found[2]
    assert len({numbers for _, numbers in found[0]}) > 8000  # seeds of NumPy and torch have 32 bits


def test_a_worker_gets_the_rows_of_its_batch_alone() -> None:
    request = next(fmsdata.EpochSampler(range(100_000), global_batch=8, rank=0, world_size=1).plan(8)).request
    assert request.chunk is not None
    sent = pickle.dumps(request)
    assert len(sent) < 2000
    assert pickle.loads(sent).chunk is None
    assert str(pickle.loads(sent)) == str(request)


def test_random_numbers_of_a_collate_function_are_keyed_too() -> None:
    def collate(rows: list[Any]) -> Any:
        return {"epoch_id": torch.tensor([row["epoch_id"] for row in rows]), "noise": torch.rand(2)}

    torch.manual_seed(5)
    found = [batch["noise"].tolist() for batch in loader(Rows(20), collate_fn=collate)]
    torch.manual_seed(6)
    workers = loader(Rows(20), collate_fn=collate, num_workers=2)
    assert [batch["noise"].tolist() for batch in workers] == found
    workers.close()
    assert len({tuple(noise) for noise in found}) == 5


def test_marks_in_batches() -> None:
    rows = loader(Rows(3), batch=8, drop_last=False)
    (batch,) = rows
    assert batch["is_padding"].tolist() == [False] * 3 + [True] * 5
    assert batch["row"].tolist() == batch["index"].tolist()
    assert sorted(batch["index"].tolist()[:3]) == [0, 1, 2]
    (plain,) = loader(Rows(3), batch=8, drop_last=False, row_ids=False)
    assert set(plain) == {"row", "text", "pair", "is_padding"}
    assert set(next(loader(Rows(8), row_ids=False))) == {"row", "text", "pair"}
    pairs = loader([(torch.tensor([i]), i) for i in range(3)], batch=8, drop_last=False)
    with pytest.raises(ConfigError, match="no batch was handed out yet"):
        _ = pairs.last_rows
    first, second = next(pairs)
    assert first.shape == (8, 1)
    assert second.tolist() == pairs.last_rows.index.tolist()
    assert pairs.last_rows.is_padding.tolist() == [False] * 3 + [True] * 5
    own = loader(Rows(8), collate_fn=lambda rows: [(row["index"], row["is_padding"], row["epoch_id"]) for row in rows])
    assert [mark[1:] for mark in next(own)] == [(False, i) for i in range(4)]


def test_fields_of_the_rows_are_not_overwritten() -> None:
    rows = [{"index": 7} for _ in range(8)]
    own: dict[str, Any] = {"collate_fn": lambda rows: rows}
    for options in ({}, own):
        with pytest.raises(ConfigError, match=r"rows have a field 'index' of their own.*row_ids=False"):
            next(loader(rows, **options))
    assert next(loader(rows, row_ids=False))["index"].tolist() == [7] * 4
    with pytest.raises(ConfigError, match="rows have a field 'is_padding' of their own"):
        next(loader([{"is_padding": 7}] * 8, drop_last=False, row_ids=False))


def test_batches_of_every_kind_come_from_workers_as_they_are() -> None:
    class Own:
        def __init__(self, rows: list[Any]) -> None:
            self.tensor = torch.stack([row["pair"] for row in rows])

    def collate(rows: list[Any]) -> Any:
        shared = torch.arange(3)
        return {
            "own": Own(rows),  # of a class that only this test has
            "array": np.array([row["index"] for row in rows]),
            "empty": torch.empty(0, 4),
            "half": torch.ones(3, dtype=torch.bfloat16),
            "bits": torch.tensor([True, False]),
            "strided": torch.arange(12).view(3, 4).t(),
            "scalar": torch.tensor(2.5),
            "gradient": torch.ones(2, requires_grad=True),
            "sparse": torch.eye(3).to_sparse(),
            "same": (shared, shared),
            "nothing": None,
            "texts": ["ü", b"x"],
        }

    here, there = (loader(Rows(8), collate_fn=collate, num_workers=workers) for workers in (0, 1))
    for own, batch in zip(here, there, strict=True):
        assert torch.equal(own["own"].tensor, batch["own"].tensor)
        assert type(batch["own"]) is Own
        assert (own["array"] == batch["array"]).all()
        for name in ("empty", "half", "bits", "strided", "scalar", "gradient"):
            assert torch.equal(own[name], batch[name])
            assert own[name].dtype == batch[name].dtype
        assert batch["gradient"].requires_grad
        assert torch.equal(batch["sparse"].to_dense(), torch.eye(3))
        assert batch["same"][0] is batch["same"][1]
        assert (batch["nothing"], batch["texts"]) == (None, ["ü", b"x"])
    there.close()


def test_batches_are_not_overwritten_by_later_ones() -> None:
    rows = loader(Rows(40), num_workers=2, prefetch_factor=1)
    batches = list(rows)
    assert sorted(row for batch in batches for row in batch["pair"][:, 0].tolist()) == list(range(40))
    rows.close()


def test_datasets_of_hugging_face() -> None:
    data = datasets.Dataset.from_dict({"x": list(range(30)), "text": [f"t{i}" for i in range(30)]})
    for rows in (data, data.with_format("torch"), data.select(range(0, 30, 2))):
        found = loader(rows, num_workers=1 if rows is data else 0, drop_last=False)
        batches = list(found)
        kept = [
            x for batch in batches for x, fill in zip(batch["x"].tolist(), batch["is_padding"], strict=True) if not fill
        ]
        assert sorted(kept) == sorted(rows["x"] if rows is not data.with_format("torch") else range(30))
        state = found.state_dict()
        loader(rows, drop_last=False).load_state_dict(state)
        found.close()
    with pytest.raises(StateError, match="other content"):
        loader(data.map(lambda row: {"x": row["x"] + 1})).load_state_dict(loader(data).state_dict())


@pytest.mark.parametrize("workers", [0, 1])
def test_a_dataset_of_hugging_face_gives_the_same_batches_as_its_rows(workers: int) -> None:
    """Tensors are taken as the dataset returns them for a batch, and joined from rows if a column is something else."""
    columns = {"x": list(range(30)), "tokens": [[i, i + 1] for i in range(30)], "weight": [i / 7 for i in range(30)]}
    nested = {"nested": [{"a": i, "b": [i]} for i in range(30)], "text": [f"t{i}" for i in range(30)]}
    for data in (columns, {**columns, **nested}, nested):
        rows = datasets.Dataset.from_dict(data).select(range(0, 30, 2)).with_format("torch")
        tested = loader(rows, num_workers=workers, drop_last=False)
        for batch in tested:
            ids = batch["index"].tolist()
            expected = torch.utils.data.default_collate([rows[row] for row in ids])
            marks = ("index", "epoch_id", "is_padding")
            assert list(batch) == [*expected, *marks]
            torch.testing.assert_close(
                {name: batch[name] for name in columns if name in batch},
                {name: expected[name] for name in columns if name in expected},
                rtol=0,
                atol=0,
            )
            if "text" in data:
                assert batch["text"] == expected["text"]
                assert batch["nested"]["b"].tolist() == expected["nested"]["b"].tolist()
        tested.close()


def test_columns_of_hugging_face_that_can_not_be_joined_are_the_error_of_their_rows() -> None:
    data = datasets.Dataset.from_dict({"tokens": [[0] * (1 + i % 3) for i in range(30)]}).with_format("torch")
    with pytest.raises(RuntimeError, match="stack expects each tensor to be equal size") as raised:
        next(loader(data))
    assert "rows that differ in shape or kind need a collate_fn" in raised.value.__notes__[0]


def test_the_format_of_a_dataset_of_hugging_face_may_change() -> None:
    data = datasets.Dataset.from_dict({"x": list(range(30))}).with_format("torch")
    rows = loader(data)
    first = next(rows)
    data.set_transform(lambda found: {"x": [-x for x in found["x"]]})
    second = next(rows)
    assert (first["x"] == first["index"]).all()
    assert (second["x"] == -second["index"]).all()


def test_random_transforms_of_batched_rows_are_keyed_by_the_row() -> None:
    data = datasets.Dataset.from_dict({"row": list(range(24))})
    data.set_transform(lambda rows: {**rows, "noise": [float(torch.rand(1)) for _ in rows["row"]]})

    def noise(**options: Any) -> dict[int, float]:
        found: dict[int, float] = {}
        for batch in loader(data, **options):
            found |= dict(zip(batch["index"].tolist(), batch["noise"].tolist(), strict=True))
        return found

    assert noise(batch=4) == noise(batch=12)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_row_that_fails_is_named_and_the_position_stays(workers: int) -> None:
    class Failing(Rows):
        def __getitem__(self, row: int) -> dict[str, Any]:
            if row == 5 and not os.path.exists(FLAG):
                raise ValueError("bad row")
            return super().__getitem__(row)

    FLAG = f"/proc/{os.getpid()}/nothing"
    rows = loader(Failing(12), shuffle=False, num_workers=workers)
    batches = iter(rows)
    next(batches)
    state = rows.state_dict()
    with pytest.raises(ValueError, match="bad row") as caught:
        next(batches)
    assert "while reading row 5 of Failing" in "\n".join(caught.value.__notes__)
    assert rows.state_dict() == state
    with pytest.raises(ValueError, match="bad row"):
        next(rows)
    rows.sampler.set_skip(2)
    assert next(rows)["row"].tolist() == [8, 9, 10, 11]
    rows.close()


def test_rows_that_are_wrong_say_so() -> None:
    with pytest.raises(DataError, match=r"row 2 of list is None; .*sampler.exclude"):
        next(loader([1, 2, None, 4], shuffle=False))
    kept = next(loader([1, 2, None, 4], shuffle=False, collate_fn=lambda rows: [row for row in rows if row]))
    assert kept == [1, 2, 4]
    with pytest.raises(RuntimeError) as caught:
        next(loader([torch.ones(2), torch.ones(3), torch.ones(2), torch.ones(2)], shuffle=False))
    assert "need a collate_fn" in caught.value.__notes__[0]
    with pytest.raises(DataError, match="raised StopIteration"):
        next(loader(Ending(8)))

    class Short(Rows):
        def __getitems__(self, rows: list[int]) -> list[Any]:
            return [self[row] for row in rows[1:]]

    with pytest.raises(DataError, match="returned 3 rows for 4 ids"):
        next(loader(Short(8)))


class Ending(Rows):
    def __getitem__(self, row: int) -> dict[str, Any]:
        empty: Iterator[Any] = iter(())
        return dict(next(empty))


def test_a_killed_worker_is_reported_and_the_run_goes_on() -> None:
    rows = loader(Rows(40), num_workers=2)
    expected = [ids(batch) for batch in loader(Rows(40))]
    found = [ids(next(rows))]
    os.kill(rows.worker_pids[0], signal.SIGKILL)
    with pytest.raises(WorkerError, match=r"was killed by SIGKILL.*position has not changed"):
        while True:
            found.append(ids(next(rows)))
    assert found + [ids(batch) for batch in rows] == expected
    rows.close()


def test_what_can_not_be_sent_says_so() -> None:
    rows = loader(Rows(8), num_workers=1, collate_fn=lambda rows: (row for row in rows))
    with pytest.raises(StageError, match="a batch can't be sent from a worker process"):
        next(rows)
    rows.close()
    locked: Any = Rows(8)
    locked.lock = threading.Lock()
    with pytest.raises(ConfigError, match="can't be sent to worker processes"):
        next(loader(locked, num_workers=1))


def test_a_worker_that_is_silent_is_an_error_after_the_timeout() -> None:
    class Slow(Rows):
        def __getitem__(self, row: int) -> dict[str, Any]:
            time.sleep(60)
            return super().__getitem__(row)

    rows = loader(Slow(8), num_workers=1, stall_warning=30, stall_timeout=0.5)
    with pytest.raises(StallError, match=r"reading epoch 0, rows .*stack"):
        next(rows)
    assert rows.worker_pids == []


def test_exclusions_in_the_loop_reach_the_next_epoch_however_much_is_prefetched() -> None:
    """Also those of the last batch of an epoch."""
    rows = loader(Rows(20), num_workers=2, prefetch_factor=4, drop_last=False)
    gone: list[int] = []
    for _ in range(4):
        seen: list[int] = []
        for batch in rows:
            real = [
                row for row, fill in zip(batch["index"].tolist(), batch["is_padding"].tolist(), strict=True) if not fill
            ]
            seen += real
            rows.sampler.exclude(real[-1:])
            out = real[-1:]
            gone += out
        assert sorted(seen + [row for row in gone if row not in seen]) == list(range(20))
        assert len(seen) == len(set(seen))
    assert len(rows.sampler.excluded) == len(set(gone)) > 10
    rows.close()


def test_immediate_exclusion_discards_what_workers_prefetched() -> None:
    rows = loader(Rows(40), num_workers=2, prefetch_factor=4, drop_last=False)
    seen = next(rows)["index"].tolist()
    out = sorted(set(range(40)) - set(seen))[:20]
    rows.sampler.exclude(out, mode="immediate")
    rest = [row for batch in rows for row in batch["index"].tolist()]
    assert sorted(seen + rest) == sorted(set(range(40)) - set(out))
    rows.close()


def test_two_loaders_of_a_sampler_share_its_position() -> None:
    data = Rows(40)
    sampler = fmsdata.EpochSampler(data, global_batch=4, rank=0, world_size=1)
    one, two = (fmsdata.StatefulDataLoader(data, sampler=sampler, batch_size=4, num_workers=w) for w in (0, 1))
    found = [ids(next(made)) for made in (one, two, two, one, two)]
    assert found == [[4 * i + j for j in range(4)] for i in range(5)]
    two.close()


@pytest.mark.parametrize(("steps", "behind"), [(5, 1), (5, 2), (7, 2), (8, 3), (9, 1)])
def test_batches_in_flight_keep_a_small_state_each(steps: int, behind: int) -> None:
    """An RL trainer is some batches behind its loader. It saves the state of the last batch it trained on.

    Some of those behind are in the next epoch, or have been when it was saved.
    """
    data = Rows(32)
    shape: dict[str, Any] = {"global_batch": 4, "seed": 3, "drop_last": False}

    def train(ranks: Ranks, steps: int, in_flight: int) -> tuple[list[Any], State]:
        queue: list[tuple[list[Any], list[State]]] = []
        trained: list[Any] = []
        state = ranks.states()[0]
        for _ in range(steps):
            while len(queue) <= in_flight:
                queue.append((ranks.step(), ranks.states()))
            batch, states = queue.pop(0)
            trained.append(batch)
            ranks.exclude([sample.row for sample in batch if sample.row % 7 == 0])  # those that it has mastered
            state = ranks.loaders[0].state_dict(at=states[0])  # type: ignore[call-arg]
        return trained, state

    first, state = train(Ranks(data, world_size=2, **shape), steps, behind)
    assert len(json.dumps(state)) < 2048
    rest, _ = train(Ranks(data, world_size=1, states=state, **shape), 16 - steps, 0)
    for epoch in (0, 1):
        handed_out = [sample for sample in joined(first + rest) if sample.epoch_id >> 40 == epoch]
        rows = [sample.row for sample in handed_out if not sample.padding]
        assert len(rows) == len(set(rows))
        assert set(rows) >= {row for row in range(32) if row % 7}
    if steps <= 8:  # what was trained on was all of the first epoch, as without batches in flight
        assert first + rest == train(Ranks(data, world_size=1, **shape), 16, 0)[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"global_batch": 6}, "batch_size is 4 on each of 1 rank, 4 rows in all, but global_batch is 6"),
        ({"num_workers": -1}, "num_workers is -1"),
        ({"prefetch_factor": 2}, "no workers to read ahead"),
        ({"prefetch_factor": 999, "num_workers": 1}, "prefetch_factor is 999; it must be at most"),
        ({"stall_timeout": 3}, "stall_timeout needs num_workers"),
        ({"collate_fn": 3}, "collate_fn is 3"),
        ({"row_ids": 3}, "row_ids is 3"),
        ({"multiprocessing_context": "x"}, "multiprocessing_context is 'x'"),
        ({"steps": 3}, "steps is for a loader of a stream"),
        ({"checkpoint": 3}, r"save loader.state_dict\(\)"),
        ({"outputs": ["epochs"]}, "outputs is for a loader of a stream"),
        ({"worker_init_fn": print}, "what a row draws depends on seed, epoch and row alone"),
        ({"timeout": 3}, "use stall_timeout"),
        ({"batch_sampler": 3}, "global_batch to the EpochSampler"),
        ({"prefetch": 3}, "use prefetch_factor"),
        ({"num_worker": 3}, "has no parameter 'num_worker'; did you mean 'num_workers'"),
    ],
)
def test_wrong_arguments_say_the_way_out(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        loader(Rows(24), **options)


@pytest.mark.parametrize("key", ["the key", 3])
def test_a_missing_key_is_the_same_error_from_a_worker(key: object) -> None:
    shown = []
    for workers in (0, 1):
        with pytest.raises(KeyError) as caught:
            next(loader(MissingKey(key), num_workers=workers, fingerprint=False))
        shown.append(str(caught.value))
    assert shown == [repr(key), repr(key)]


class MissingKey:
    """Rows that ask for a key that nothing has."""

    def __init__(self, key: object) -> None:
        self._key = key

    def __len__(self) -> int:
        return 8

    def __getitem__(self, row: int) -> Any:
        found: dict[object, Any] = {}
        return found[self._key]


def test_what_does_not_belong_together_is_refused() -> None:
    data = Rows(20)
    sampler = fmsdata.EpochSampler(data, global_batch=4, rank=0, world_size=1)
    with pytest.raises(ConfigError, match="give it to the EpochSampler"):
        fmsdata.StatefulDataLoader(data, sampler=sampler, batch_size=4, rank=0, world_size=1)
    with pytest.raises(ConfigError, match="give shuffle to the EpochSampler"):
        fmsdata.StatefulDataLoader(data, sampler=sampler, batch_size=4, shuffle=True)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"^batch_size is missing: .* such as batch_size=4"):
        fmsdata.StatefulDataLoader(data, sampler=sampler)
    with pytest.raises(ConfigError, match="drop_last is False, but it is True in the sampler"):
        fmsdata.StatefulDataLoader(data, sampler=sampler, batch_size=4, drop_last=False)
    with pytest.raises(ConfigError, match="reads 19 rows, but its sampler was made for 20"):
        fmsdata.StatefulDataLoader(Rows(19), sampler=sampler, batch_size=4)
    with pytest.raises(ConfigError, match="it must be an EpochSampler"):
        fmsdata.StatefulDataLoader(data, sampler=[1, 2], batch_size=4)  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError, match=r"or rows with sampler=EpochSampler\(rows, ...\), not an object of class Rows alone"
    ):
        fmsdata.StatefulDataLoader(data, batch_size=4)
    made = fmsdata.StatefulDataLoader(data, sampler=sampler, batch_size=4, drop_last=True)
    for call in (made.save, made.load, made.stats):
        with pytest.raises(ConfigError):
            call()
    with pytest.raises(ConfigError, match="can't be sent or copied"):
        copy.deepcopy(made)
    with pytest.raises(StateError, match="not the state of an EpochSampler"):
        made.load_state_dict({"version": 2, "step": 0, "history": [], "pipeline": "", "lanes": {}})


def test_train_state_holds_a_loader_of_rows() -> None:
    rows = loader(Rows(20))
    next(rows)
    state = fmsdata.train_state.build(rows, step=1, tokens_seen=9)
    other = loader(Rows(20))
    assert fmsdata.train_state.restore(state, other).step == 1
    assert ids(next(other)) == ids(next(rows))


def test_a_train_state_can_be_that_of_the_last_trained_batch() -> None:
    rows = loader(Rows(20))
    next(rows)
    trained = rows.state_dict()
    in_flight = next(rows)
    rows.sampler.exclude([3])
    state = fmsdata.train_state.build(rows, step=1, tokens_seen=9, at=trained)
    other = loader(Rows(20))
    fmsdata.train_state.restore(state, other)
    assert ids(next(other)) == ids(in_flight)
    assert other.sampler.excluded == [3]


def test_train_states_of_ranks_are_saved_and_loaded_at_another_world_size(tmp_path: Path) -> None:
    for rank in range(2):
        rows = loader(Rows(20), world_size=2, rank=rank, batch=2)
        next(rows)
        fmsdata.train_state.save(tmp_path, fmsdata.train_state.build(rows, step=1, tokens_seen=9))
    found = loader(Rows(20), batch=4)
    fmsdata.train_state.restore(fmsdata.train_state.load(tmp_path, found), found)
    assert ids(next(found)) == [4, 5, 6, 7]


def test_workers_end_with_the_loop_unless_they_are_persistent() -> None:
    rows = loader(Rows(20), num_workers=1, persistent_workers=False)
    assert len(list(rows)) == 5
    assert rows.worker_pids == []
    kept = loader(Rows(20), num_workers=1)
    list(kept)
    pids = kept.worker_pids
    list(kept)
    assert kept.worker_pids == pids != []
    kept.close()
    assert kept.worker_pids == []


def test_rows_that_open_something_when_they_are_read_can_be_sent_to_workers_after_a_resume() -> None:
    class Opening(Rows):
        handle: Any = None

        def __getitem__(self, row: int) -> dict[str, Any]:
            self.handle = self.handle or threading.Lock()  # as an open file, it can't be pickled
            return super().__getitem__(row)

    rows = loader(Opening(20), num_workers=1)
    rows.load_state_dict(rows.state_dict())
    assert sorted(row for batch in rows for row in batch["row"].tolist()) == list(range(20))
    rows.close()


@pytest.mark.parametrize("workers", [0, 1])
def test_an_interrupt_leaves_the_position(workers: int) -> None:
    class Slow(Rows):
        def __getitem__(self, row: int) -> dict[str, Any]:
            time.sleep(0.05)
            return super().__getitem__(row)

    rows = loader(Slow(40), num_workers=workers)
    found = [ids(next(rows))]
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        while True:
            found.append(ids(next(rows)))
    found += [ids(next(rows)) for _ in range(2)]
    assert found == [[4 * i + j for j in range(4)] for i in range(len(found))]
    rows.close()


def test_torch_distributed_checkpoint_stores_the_state(tmp_path: Path) -> None:
    dcp: Any = torch.distributed.checkpoint
    rows = loader(Rows(40))
    rows.sampler.exclude(range(0, 20, 2))
    next(rows)
    with warnings.catch_warnings(action="ignore"):
        dcp.save({"loader": rows}, checkpoint_id=tmp_path, no_dist=True)
        other = loader(Rows(40), batch=2, global_batch=4)
        dcp.load({"loader": other}, checkpoint_id=tmp_path, no_dist=True)
    assert other.state_dict() == rows.state_dict()
    assert ids(next(other)) == [4, 5]


def test_steps_within_a_global_batch_continue_in_it() -> None:
    """Gradients are accumulated over two steps of two ranks; the state is between the two."""
    shape: dict[str, Any] = {"global_batch": 8, "world_size": 2}
    ranks = Ranks(Rows(40), steps=2, **shape)
    whole = joined(Ranks(Rows(40), **shape).epoch())
    found = ranks.step() + ranks.step() + ranks.step()
    assert found == whole[:12]
    assert ranks.samplers[0].step == 1
    assert joined(Ranks(Rows(40), steps=4, states=ranks.states(), **shape).epoch()) == whole[12:]
    # a step that is larger than what is left of the global batch begins a new one
    assert joined(Ranks(Rows(40), states=ranks.states(), **shape).epoch()) == whole[12:36]


def test_pinned_batches_need_an_accelerator() -> None:
    if torch.accelerator.is_available():
        assert next(loader(Rows(8), pin_memory=True))["pair"].is_pinned()
    else:
        with pytest.warns(fmsdata.FmsdataWarning, match="pin_memory has no effect"):
            loader(Rows(8), pin_memory=True)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_can_be_started_in_other_ways(method: str) -> None:
    rows = loader(Rows(8), num_workers=1, multiprocessing_context=method)
    assert [sample.epoch_id for sample in samples(next(rows))] == [0, 1, 2, 3]
    rows.close()


def test_rows_of_workers_are_on_the_cpu_whatever_the_default_device_is() -> None:
    made = loader(Rows(20), num_workers=1)
    expected = next(iter(loader(Rows(20))))
    with torch.device("meta"):
        batch = next(made)
    for name, value in expected.items():
        assert torch.equal(batch[name], value) if isinstance(value, torch.Tensor) else batch[name] == value
    made.close()


@pytest.mark.parametrize("workers", [0, 1])
def test_what_is_written_into_a_batch_is_in_that_batch_alone(workers: int) -> None:
    made = loader(Rows(20), num_workers=workers, multiprocessing_context="fork")
    batch = next(made)
    index = batch["index"].tolist()
    for name in ("index", "epoch_id", "is_padding"):
        batch[name].fill_(1)
    assert (made.last_rows.index.tolist(), made.last_rows.is_padding.any()) == (index, False)
    made.close()


def test_a_batch_that_can_not_be_pinned_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [batch["index"].tolist() for batch in loader(Rows(20))]
    made = loader(Rows(20))
    made._pin = True
    for _ in range(2):
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="no pinned memory"):
            patch.setattr(torch.Tensor, "pin_memory", refuse_to_pin)
            next(made)
    made._pin = False
    assert [batch["index"].tolist() for batch in made] == expected


def refuse_to_pin(_: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("no pinned memory")
