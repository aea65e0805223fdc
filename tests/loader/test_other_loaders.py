"""The same dataset works in torch's plain DataLoader and in torchdata's, with state."""

import copy
import json
import pickle
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import fmsdata
from tests.helpers import maker


def expected(corpus: Path, batches: int, batch_size: int = 3) -> list[Any]:
    loader = maker(corpus, loader__batch_size=batch_size, lanes=6)(0, 1)
    return [(batch["input_ids"].tolist(), batch["labels"].tolist()) for batch in islice(loader, batches)]


def data(corpus: Path) -> fmsdata.Rescalable:
    return maker(corpus, lanes=6)(0, 1).data


def fields(batches: Any, count: int) -> list[Any]:
    return [(batch["input_ids"].tolist(), batch["labels"].tolist()) for batch in islice(batches, count)]


def test_torchs_plain_loader_gives_the_same_batches(corpus: Path) -> None:
    assert fields(DataLoader(data(corpus), batch_size=3), 50) == expected(corpus, 50)


def test_a_state_of_the_dataset_goes_on_in_torchs_plain_loader(corpus: Path) -> None:
    whole = expected(corpus, 60)
    dataset = data(corpus)
    fresh = json.loads(json.dumps(dataset.state_dict()))
    assert fields(DataLoader(dataset, batch_size=3), 20) == whole[:20]
    state = json.loads(json.dumps(dataset.state_dict()))
    again = data(corpus)
    for _ in range(2):
        again.load_state_dict(state)
        assert json.loads(json.dumps(again.state_dict())) == state
        assert fields(DataLoader(again, batch_size=3), 40) == whole[20:]
    again.load_state_dict(fresh)
    assert fields(DataLoader(again, batch_size=3), 5) == whole[:5]


def test_a_state_moves_between_the_dataset_and_our_loader(corpus: Path) -> None:
    whole = expected(corpus, 30)
    dataset = data(corpus)
    fields(DataLoader(dataset, batch_size=3), 10)
    loader = maker(corpus, loader__batch_size=3, lanes=6)(0, 1)
    loader.load_state_dict(dataset.state_dict())
    assert fields(loader, 10) == whole[10:20]
    dataset.load_state_dict(loader.state_dict())
    assert fields(DataLoader(dataset, batch_size=3), 10) == whole[20:]


def test_workers_of_torchs_loader_share_the_lanes_and_repeat_nothing(corpus: Path) -> None:
    alone = {str(row) for batch, _ in expected(corpus, 40, batch_size=6) for row in batch}
    loader: Any = DataLoader(data(corpus), batch_size=2, num_workers=3)
    rows = [str(row) for batch, _ in fields(loader, 120) for row in batch]
    assert sorted(rows) == sorted(str(row) for batch, _ in expected(corpus, 40, batch_size=6) for row in batch), (
        "each worker reads its own lanes"
    )
    assert set(rows) == alone


METHODS = [("fork", 0), ("fork", 1), ("fork", 2), ("forkserver", 2), ("spawn", 1)]


@pytest.mark.parametrize(("method", "workers"), METHODS)
def test_workers_of_torchs_loader_begin_at_the_loaded_state_and_read_each_sample_once(
    corpus: Path, method: str, workers: int
) -> None:
    """Whatever the trainer did with the dataset before: opened lanes are not inherited, the state is sent."""
    dataset = data(corpus)
    fields(DataLoader(dataset, batch_size=3), 4)
    state = dataset.state_dict()
    dataset.load_state_dict(state)
    assert dataset.state_dict() == state
    context: Any = {"multiprocessing_context": method} if workers else {}
    for _ in range(2 if method == "fork" else 1):  # each iteration begins there
        loader: Any = DataLoader(dataset, batch_size=3, num_workers=workers, **context)
        rows = [row for batch, _ in fields(loader, 8) for row in batch]
        assert sorted(rows) == sorted(row for batch, _ in expected(corpus, 12)[4:] for row in batch)
    if workers:
        with pytest.raises(fmsdata.ConfigError, match="read by worker processes, ahead of the trainer"):
            dataset.state_dict()
        dataset.load_state_dict(state)
        assert dataset.state_dict() == state
    fields(DataLoader(dataset, batch_size=3), 4)
    assert dataset.state_dict()["step"] == 24, "an iteration in this process counts again"


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_state_that_is_loaded_after_the_workers_started_is_refused(corpus: Path, method: str) -> None:
    """Workers that stay would begin at the state before it."""
    dataset = data(corpus)
    state = dataset.state_dict()
    dataset.load_state_dict(state)
    loader: Any = DataLoader(
        dataset, batch_size=3, num_workers=1, persistent_workers=True, multiprocessing_context=method
    )
    for _ in range(2):
        assert fields(loader, 2) == expected(corpus, 2)
    dataset.load_state_dict(state)
    with pytest.raises(fmsdata.ConfigError, match="after its worker processes had been started"):
        fields(loader, 2)
    again: Any = DataLoader(dataset, batch_size=3, num_workers=1, multiprocessing_context="fork")
    assert fields(again, 2) == expected(corpus, 2), "new workers know it"


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize(("method", "workers"), [("fork", 0), ("fork", 1), ("fork", 2), ("spawn", 1)])
def test_torchdatas_loader_keeps_and_restores_the_state(corpus: Path, method: str, workers: int) -> None:
    """Twice in a row, and with a dataset that the trainer used before."""

    def make() -> Any:
        dataset = data(corpus)
        dataset.load_state_dict(dataset.state_dict())
        context = {"multiprocessing_context": method} if workers else {}
        return StatefulDataLoader(dataset, batch_size=3, num_workers=workers, **context)

    whole = expected(corpus, 24)
    first = make()
    found = fields(first, 8)
    state = json.loads(json.dumps(first.state_dict()))
    for _ in range(2):
        loader = make()
        loader.load_state_dict(state)
        found += fields(loader, 8)
        state = loader.state_dict()
    if workers < 2:  # the order depends on the number of workers
        assert found == whole
    assert sorted(row for batch, _ in found for row in batch) == sorted(row for batch, _ in whole for row in batch)


def test_a_copy_of_a_dataset_begins_at_the_loaded_state(corpus: Path) -> None:
    dataset = data(corpus)
    fields(DataLoader(dataset, batch_size=3), 4)
    dataset.load_state_dict(dataset.state_dict())
    for twin in (copy.deepcopy(dataset), pickle.loads(pickle.dumps(dataset))):
        assert fields(DataLoader(twin, batch_size=3), 4) == expected(corpus, 8)[4:]
    state = dataset.state_dict()
    dataset.load_state_dict(state)
    state["lanes"].clear()
    assert fields(DataLoader(dataset, batch_size=3), 4) == expected(corpus, 8)[4:], "the state is a copy, too"


class Prepared(IterableDataset[Any]):
    """A dataset of one's own, with a number of processes that has nothing to do with ranks."""

    def __init__(self, data: fmsdata.Rescalable) -> None:
        self.data, self.num_processes = data, 8

    def __iter__(self) -> Iterator[Any]:
        self.data.set_epoch(0)
        return iter(self.data)


def test_other_datasets_around_ours_are_no_wrappers_that_split(corpus: Path) -> None:
    lines = data(corpus).lines
    part = fmsdata.Rescalable(lines, lanes=6, seed=3, rank=1, world_size=2)
    loader: Any = DataLoader(Prepared(part), batch_size=3)
    rows = [row for batch, _ in fields(loader, 5) for row in batch]
    assert rows == [row for batch, _ in expected(corpus, 10) for row in batch][1::2]
    assert part.state_dict()["step"] == 15


def test_items_are_collated_with_a_task_and_outputs_of_ones_own(corpus: Path) -> None:
    items = list(islice(data(corpus), 4))
    fields = fmsdata.Collate(task=fmsdata.CausalLM(prompt_len=2), outputs=["provenance", "document_ids"])(items)
    assert (fields["labels"][:, :2] == -100).all()
    assert fields["provenance"][0] == items[0].spans
    assert isinstance(fields["document_ids"], torch.Tensor)
