"""Ranks of a run that uses Accelerate and the Trainer of transformers. Arguments are those of `ranks.py`."""

import faulthandler
import json
import os
import socket
import sys
import warnings
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import accelerate
import torch
import torch.multiprocessing
import transformers
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader

import fmsdata
from tests.programs.ranks import data_of, error, rows

processes: Any = torch.multiprocessing  # its functions are not declared as public

BATCHES = 6


def prepared(accelerator: Any, data: fmsdata.Rescalable, workers: int = 0, **options: Any) -> Any:
    """A loader of torch, prepared as options of Accelerate say."""
    accelerator.dataloader_config = DataLoaderConfiguration(**options)
    loader: Any = DataLoader(data, batch_size=2, num_workers=workers)
    return accelerator.prepare(loader)


def read(loader: Any) -> list[list[int]]:
    """The rows of a few batches. Accelerate reads one batch ahead."""
    return rows(loader, 2 * BATCHES)


def accelerated(config: str, folder: Path) -> Any:
    """Loaders that Accelerate prepared, in each of its ways, and what it does with ours."""
    accelerator = accelerate.Accelerator(cpu=True)

    def whole() -> fmsdata.Rescalable:
        return data_of(config, rank=0, world_size=1)

    found: dict[str, Any] = {}
    with closing(fmsdata.build_loader(config)) as ours:
        assert accelerator.prepare(ours) is ours
        ours.keeper = "accelerate"  # no warning
        found["ours"] = rows(ours, 2 * BATCHES)
        accelerator.register_for_checkpointing(ours)
        one_rank = error(lambda: accelerator.save_state(str(folder / "one")))
        accelerator._custom_objects.clear()
    ways: dict[str, dict[str, Any]] = {"dispatched": {}, "sliced": {"dispatch_batches": False}}
    for name, options in ways.items():
        for workers in (0, 1):
            found[f"{name}, {workers}"] = read(prepared(accelerator, whole(), workers, **options))
        data = data_of(config)
        for workers in (0, 1):
            loader = prepared(accelerator, data, workers, **options)
            found[f"{name}, {workers}, own lanes"] = error(partial(read, loader))
        read(prepared(accelerator, data_ahead := whole(), **options))
        found[f"{name}, state ahead"] = error(data_ahead.state_dict)
        resuming = partial(resumed, accelerator, whole, found, f"{name}, stateful", options)
        found[f"{name}, stateful, error"] = error(resuming)
    with mock.patch("importlib.metadata.version", return_value="1.12.0"):
        loader = prepared(accelerator, whole(), use_stateful_dataloader=True, **ways["sliced"])
        found["sliced by an old version"] = error(partial(read, loader))
        found["sliced by an old version, no state"] = read(prepared(accelerator, whole(), **ways["sliced"]))
    found["one rank"] = one_rank
    return found


def resumed(accelerator: Any, whole: Any, found: dict[str, Any], name: str, options: Any) -> None:
    """The rows of a loader of torchdata inside Accelerate, and those after a resume from its state."""
    loader = prepared(accelerator, whole(), use_stateful_dataloader=True, **options)
    first = read(loader)
    state = loader.state_dict()
    again = prepared(accelerator, whole(), use_stateful_dataloader=True, **options)
    again.load_state_dict(state)
    found[name] = [*first, *read(again)]


class RecordingTrainer(transformers.Trainer):  # type: ignore[misc]
    """A trainer that knows the rows it trained on, and evaluates a loader of its own if it has one."""

    def __init__(self, folder: Path, own_loader: Any = None, **options: Any) -> None:
        shape = transformers.LlamaConfig(
            vocab_size=256, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
        )
        arguments = transformers.TrainingArguments(
            output_dir=str(folder),
            max_steps=4,
            per_device_train_batch_size=2,
            per_device_eval_batch_size=2,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            remove_unused_columns=False,
            dataloader_num_workers=options.pop("workers", 0),
        )
        model = transformers.LlamaForCausalLM(shape)
        super().__init__(model, arguments, data_collator=fmsdata.Collate(), **options)
        self.rows: list[list[int]] = []
        self.own_loader = own_loader

    def training_step(self, model: Any, inputs: Any, *others: Any) -> Any:
        self.rows += inputs["input_ids"].tolist()
        return super().training_step(model, inputs, *others)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        return self.own_loader or super().get_eval_dataloader(eval_dataset)


def trained(config: str, folder: Path) -> Any:
    """What the Trainer trains on, and what it evaluates."""

    def read(data: Any) -> Any:
        trainer = RecordingTrainer(folder, train_dataset=data)
        trainer.train()
        return trainer.rows

    found: dict[str, Any] = {"whole": read(data_of(config, rank=0, world_size=1))}
    found["refused"] = error(lambda: found.update({"found": read(data_of(config))}))
    stream = data_of(config, rank=0, world_size=1)
    for workers, name in enumerate(("0 workers", "1 worker")):
        trainer = RecordingTrainer(folder, eval_dataset=stream, workers=workers)
        found[f"evaluated, {name}"] = error(trainer.evaluate)
    with closing(fmsdata.build_loader(config)) as loader:
        trainer = RecordingTrainer(folder, loader, eval_dataset=stream)
        found["evaluated, our loader"] = error(trainer.evaluate)
    with closing(fmsdata.build_loader(config, {"loader.steps": 3})) as loader:
        trainer = RecordingTrainer(folder, loader, eval_dataset=stream)
        found["evaluated, with an end"] = [trainer.evaluate()["eval_loss"] > 0, loader.state_dict()["step"]]
    return found


SCENARIOS = {"accelerated": accelerated, "trained": trained}


def run(rank: int, world_size: int, port: int, scenario: str, config: str, folder: str) -> None:
    """One rank, as torchrun starts it."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true"}
    if world_size > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    faulthandler.dump_traceback_later(240, exit=True)  # what hangs is named
    torch.set_num_threads(1)
    warnings.simplefilter("error", fmsdata.errors.FmsdataWarning)
    result = SCENARIOS[scenario](config, Path(folder))
    Path(folder, f"{scenario}-{rank}.json").write_text(json.dumps(result))
    if world_size > 1:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def main() -> None:
    scenario, count, config, folder = sys.argv[1:]
    arguments = (int(count), free_port(), scenario, config, folder)
    processes.start_processes(run, arguments, int(count), start_method="fork")


if __name__ == "__main__":
    main()
