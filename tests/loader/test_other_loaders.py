"""The same dataset works in torch's plain DataLoader and in torchdata's, with state."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
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


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("workers", [0, 2])
def test_torchdatas_loader_keeps_and_restores_the_state(corpus: Path, workers: int) -> None:
    def make() -> Any:
        return StatefulDataLoader(data(corpus), batch_size=3, num_workers=workers)

    whole = fields(make(), 40)
    if not workers:
        assert whole == expected(corpus, 40)
    loader = make()
    batches = iter(loader)
    assert fields(batches, 15) == whole[:15]
    state = loader.state_dict()
    again = make()
    again.load_state_dict(state)
    assert fields(again, 25) == whole[15:]


def test_items_are_collated_with_a_task_and_outputs_of_ones_own(corpus: Path) -> None:
    items = list(islice(data(corpus), 4))
    fields = fmsdata.Collate(task=fmsdata.CausalLM(prompt_len=2), outputs=["provenance", "document_ids"])(items)
    assert (fields["labels"][:, :2] == -100).all()
    assert fields["provenance"][0] == items[0].spans
    assert isinstance(fields["document_ids"], torch.Tensor)
