"""A batch is a dict that a person can read, and that torch and the trainers treat as a dict."""

import copy
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import accelerate.utils
import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils.data import default_collate

import fmsdata
from fmsdata.loader.fields import Fields
from tests.helpers import maker, write_corpus


@pytest.fixture
def batch(tmp_path: Path) -> dict[str, Any]:
    return next(maker(write_corpus(tmp_path), loader__batch_size=2, loader__outputs=["provenance"])(0, 1))


def test_a_batch_shows_a_line_for_each_field(batch: dict[str, Any]) -> None:
    first = [int(token) for token in batch["input_ids"][0, :6]]
    title, ids, _, last = repr(batch).splitlines()
    assert title == "batch of 2 rows"
    assert ids == f"├── input_ids: int64 (2, 16) {', '.join(map(str, first))} ..."
    assert last == "└── provenance: list of 2"
    html: Any = batch
    assert html._repr_html_().startswith("<pre><b>batch of 2 rows</b>")


def test_a_batch_of_rows_is_shown_too_unless_a_collate_fn_made_it() -> None:
    rows = [{"x": torch.tensor([row, 1.5]), "name": str(row)} for row in range(4)]

    def first(**options: Any) -> Any:
        sampler = fmsdata.EpochSampler(rows, global_batch=2, shuffle=False)
        return next(fmsdata.StatefulDataLoader(rows, sampler=sampler, batch_size=2, **options))

    assert repr(first()).splitlines()[:3] == [
        "batch of 2 rows",
        "├── x: float32 (2, 2) 0.0, 1.5, 1.0, 1.5",
        "├── name: list of 2",
    ]
    assert type(first(collate_fn=lambda _: {"x": 1})) is dict


def test_odd_fields_are_shown_too() -> None:
    fields = Fields({"one": ["a"], 2: object(), "none": torch.zeros(0, 3), "far": torch.zeros(2, device="meta")})
    assert repr(fields).splitlines() == [
        "batch of 0 rows",
        "├── one: list of 1 'a'",
        "├── 2: object an object of class object",
        "├── none: float32 (0, 3)",
        "└── far: float32 (2,) on meta",
    ]


def test_torch_finds_the_tensors_of_a_batch(batch: dict[str, Any]) -> None:
    doubled = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor * 2, batch)
    assert type(doubled) is type(batch) is Fields
    assert torch.equal(doubled["input_ids"], batch["input_ids"] * 2)
    paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(batch)[0]]
    assert paths[:2] == ["['input_ids']", "['labels']"]
    assert torch.equal(default_collate([batch["input_ids"]]), batch["input_ids"][None])
    del batch["provenance"]
    assert type(default_collate([batch, batch])) is Fields


def test_a_batch_goes_through_compiled_code(batch: dict[str, Any]) -> None:
    def step(batch: dict[str, Any]) -> Any:
        rest = {**batch}
        return (lambda input_ids, labels, **_: input_ids + labels)(**batch), rest, batch["input_ids"].sum()

    total, rest, _ = torch.compile(step, backend="eager", fullgraph=True)(batch)
    assert torch.equal(total, batch["input_ids"] + batch["labels"])
    assert list(rest) == list(batch)


def test_accelerate_moves_a_batch(batch: dict[str, Any]) -> None:
    assert type(accelerate.utils.send_to_device(batch, "cpu")) is Fields
    assert accelerate.utils.find_batch_size(batch) == 2


def test_a_saved_batch_is_read_by_torch_alone(batch: dict[str, Any], tmp_path: Path) -> None:
    del batch["provenance"]
    torch.save(batch, tmp_path / "batch.pt")
    script = "import sys, torch; print(list(torch.load(sys.argv[1]))); assert 'fmsdata' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", script, tmp_path / "batch.pt"], capture_output=True, text=True)
    assert done.stdout.strip() == "['input_ids', 'labels']", done.stderr


def test_copies_of_a_batch_are_dicts(batch: dict[str, Any]) -> None:
    assert type(copy.copy(batch)) is Fields
    assert {**batch} == batch == dict(batch.items())
    for copied in (pickle.loads(pickle.dumps(batch)), copy.deepcopy(batch)):
        assert isinstance(copied, dict)
        assert list(copied) == list(batch)
