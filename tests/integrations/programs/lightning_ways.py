"""What people do with Lightning besides the script of the docs: exact, or an error that shows the line to write."""

import json
import logging
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader

import fmsdata
from fmsdata.integrations.lightning import DataModule
from tests.integrations.runner import report

warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}


class Model(lightning.LightningModule):  # type: ignore[misc]
    """Writes what it trains on to a file of each rank."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        self.layers = torch.nn.Sequential(torch.nn.Embedding(1000, 4), torch.nn.Linear(4, 1000))

    def configure_model(self) -> None:
        """Spread the layers over processes, if the strategy has a mesh of them."""
        if self.device_mesh is not None:
            plan = {"0": RowwiseParallel(input_layouts=Replicate()), "1": ColwiseParallel(output_layouts=Replicate())}
            parallelize_module(self.layers, self.device_mesh["tensor_parallel"], plan)

    def training_step(self, batch: Any) -> Any:
        with open(f"{self._name}-{self.global_rank}.jsonl", "a") as file:
            file.write(json.dumps(batch["input_ids"][:, 0].tolist()) + "\n")
        return self.layers(batch["input_ids"]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def rows(name: str, ranks: int) -> list[list[list[int]]]:
    return [
        [json.loads(line) for line in Path(f"{name}-{rank}.jsonl").read_text().splitlines()] for rank in range(ranks)
    ]


def error(action: Callable[[], Any]) -> str:
    try:
        action()
    except Exception as failure:
        return f"{type(failure).__name__}: {failure}"
    return "no error"


def trainer(**options: Any) -> Any:
    return lightning.Trainer(**{**QUIET, "devices": 1, "enable_checkpointing": False, **options})


def epochs() -> None:
    """Three epochs of 4 steps each, with a checkpoint at the end of each."""
    saving = ModelCheckpoint("checkpoints", save_last=True)
    data = DataModule("run.yaml", overrides={"loader.steps": 4})
    fit = trainer(max_epochs=3, enable_checkpointing=True, callbacks=[saving])
    fit.fit(Model("epochs"), datamodule=data, ckpt_path="last")
    report(fit.current_epoch)


def launcher() -> None:
    """Processes that Lightning starts itself, after everything is built; and then this process alone."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    data = DataModule("run.yaml")
    saving = ModelCheckpoint("checkpoints", every_n_train_steps=2, save_last=True)
    two = {"devices": 2, "strategy": "ddp_fork", "enable_checkpointing": True, "callbacks": [saving]}
    trainer(max_steps=4, **two).fit(Model("two"), datamodule=data)
    trainer(max_steps=10).fit(Model("one"), datamodule=data, ckpt_path="checkpoints/last.ckpt")
    report([rows("two", 2), rows("one", 1)])


def rows_loader(**ranks: Any) -> fmsdata.StatefulDataLoader:
    numbered = [{"input_ids": torch.full((4,), number)} for number in range(12)]
    sampler = fmsdata.EpochSampler(numbered, global_batch=2, seed=5, **ranks)
    return fmsdata.StatefulDataLoader(numbered, sampler=sampler, batch_size=2)


def map_style() -> None:
    """Rows of a dataset in epochs of 6 steps: stopped in the first, and in the second."""
    saving = ModelCheckpoint("checkpoints", every_n_train_steps=1, save_last=True)
    expected = rows_loader(rank=0, world_size=1)
    for steps in (4, 9, 12):
        fit = trainer(max_steps=steps, max_epochs=2, enable_checkpointing=True, callbacks=[saving])
        fit.fit(Model("rows"), datamodule=DataModule(rows_loader), ckpt_path="last")
    report([rows("rows", 1)[0], [next(expected)["input_ids"][:, 0].tolist() for _ in range(12)]])


def tensor_parallel() -> None:
    """Two processes that are one data-parallel rank, with checkpoints that each of them writes a part of."""
    for steps in (2, 4):
        saving = ModelCheckpoint("checkpoints", every_n_train_steps=2, save_last=True)
        both = ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2)
        fit = trainer(max_steps=steps, devices=2, strategy=both, enable_checkpointing=True, callbacks=[saving])
        fit.fit(Model("parallel"), datamodule=DataModule("run.yaml"), ckpt_path="last")


def refused() -> None:
    """What would be silently wrong."""
    loader: Any = fmsdata.build_loader("run.yaml", rank=0, world_size=1)
    own_folder = {"checkpoint": {"path": "own"}}
    foreign = {"input_ids": torch.zeros(2, 7, dtype=torch.long)}
    plain = trainer(max_steps=1)
    rows: Any = [foreign]
    plain.fit(Model("plain"), DataLoader(rows, batch_size=None))
    plain.save_checkpoint("foreign.ckpt")

    def fit(data: Any, ckpt_path: str | None = None, **options: Any) -> Callable[[], None]:
        return lambda: trainer(**options).fit(Model("refused"), datamodule=data, ckpt_path=ckpt_path)

    found = {
        "loader": error(lambda: trainer(max_steps=2).fit(Model("refused"), loader)),
        "loader in a module": error(fit(DataModule(loader), max_steps=2)),
        "no length": error(fit(DataModule("run.yaml"), max_epochs=2)),
        "limit": error(fit(DataModule("run.yaml"), max_epochs=2, limit_train_batches=3)),
        "overfit": error(fit(DataModule("run.yaml"), max_steps=2, overfit_batches=2)),
        "evaluation of a stream": error(fit(DataModule("run.yaml", "run.yaml"), max_steps=2)),
        "own folder": error(fit(DataModule("run.yaml", overrides=own_folder), max_steps=2)),
        "foreign": error(fit(DataModule("run.yaml"), "foreign.ckpt", max_steps=2)),
        "other rank": error(
            fit(DataModule(lambda **_: fmsdata.build_loader("run.yaml", rank=1, world_size=2)), max_steps=2)
        ),
        "no loader": error(fit(DataModule(lambda **_: None), max_steps=2)),  # type: ignore[arg-type]
        "function": error(fit(DataModule(lambda **ranks: fmsdata.build_loader("run.yaml", **ranks)), max_steps=2)),
    }
    report(found)


if __name__ == "__main__":
    {
        "epochs": epochs,
        "map-style": map_style,
        "tensor parallel": tensor_parallel,
        "launcher": launcher,
        "refused": refused,
    }[sys.argv[1]]()
