"""What the dataloader of torchtitan returns, and what it refuses."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

import fmsdata
from fmsdata.integrations.torchtitan import DataLoader
from tests.integrations.runner import report

SIZES = {"dp_world_size": 3, "dp_rank": 1, "seq_len": 12, "local_batch_size": 4}


def error(action: Callable[[], Any]) -> str:
    try:
        action()
    except Exception as failure:
        return f"{type(failure).__name__}: {failure}"
    return "no error"


def edited(name: str, **changes: Any) -> str:
    content = yaml.safe_load(Path("run.yaml").read_text())
    Path(name).write_text(yaml.safe_dump({**content, **changes}))
    return name


def build(path: str | None, infinite: bool = True) -> Any:
    """As the Trainer builds it, and the Validator, which says whether the data must have an end."""
    return replace(DataLoader.Config(dataset_path=path), infinite=infinite).build(**SIZES, tokenizer=None)


inputs, labels = next(iter(build("run.yaml")))
overrides = {"pack.seq_len": 12, "loader.batch_size": 4, "loader.outputs": ["position_ids"]}
ours = next(fmsdata.build_loader("run.yaml", overrides, rank=1, world_size=3))
found: dict[str, Any] = {
    "batch": [inputs["input"].tolist(), inputs["positions"].tolist(), labels.tolist()],
    "ours": [ours[name].tolist() for name in ("input_ids", "position_ids", "labels")],
    "no file": error(lambda: build(None)),
    "shift": error(lambda: build(edited("shift.yaml", task={"name": "causal_lm", "shift": False}))),
    "endless": error(lambda: build("run.yaml", infinite=False)),
    "finite": error(lambda: build("evaluation.yaml", infinite=False)),
    "own folder": error(lambda: build(edited("own.yaml", checkpoint={"path": "own"}))),
}
report(found)
