"""Evaluation during training: the exact loss of a whole set, the same on any number of ranks.

    fmsdata demo --folder demo-data
    torchrun --standalone --nproc-per-node 3 examples/evaluate.py --config configs/train-demo.yaml

The evaluation loader reads its set from the top each time, and ends at the same step on every rank, so
that the collectives of a model that is spread over ranks never wait for a rank that has finished. The
loss is a sum over all tokens with a label, divided by their number, each added up over all ranks: rows
that fill up the last batches have no labels, so they do not count.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from torch import nn
from torch.nn import functional
from train import GPT, IGNORED, distributed

import fmsdata


@torch.no_grad()
def evaluate(model: nn.Module, loader: fmsdata.StatefulDataLoader) -> tuple[float, int]:
    """The mean loss over the tokens of the whole set that have a label, and their number."""
    sums = torch.zeros(2, dtype=torch.float64)
    for batch in loader:
        logits, labels = model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten()
        losses = functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none")
        sums += torch.stack([losses.double().sum(), (labels != IGNORED).sum()])
    dist.all_reduce(sums)
    return float(sums[0] / sums[1]), int(sums[1])


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]) -> None:
    """One step, with the mean loss of the batch of this rank."""
    logits = model(batch["input_ids"]).flatten(0, 1)
    torch.autograd.backward(functional.cross_entropy(logits, batch["labels"].flatten(), ignore_index=IGNORED))
    optimizer.step()
    optimizer.zero_grad()


def main() -> None:
    options = argparse.ArgumentParser(description="Train a small GPT, and evaluate it now and then.")
    options.add_argument("--config", required=True, help="a YAML file with the sections data, model and train")
    options.add_argument("--data", help="folder of the corpus; overrides the configuration")
    options.add_argument("--steps", type=int, default=20, help="steps to train")
    options.add_argument("--every", type=int, default=10, help="steps between evaluations")
    options.add_argument("--samples", type=int, help="evaluate on this many samples; by default on the whole set")
    arguments = options.parse_args()
    config = yaml.safe_load(Path(arguments.config).read_text())
    overrides: dict[str, Any] = {"path": arguments.data} if arguments.data else {}

    dist.init_process_group("gloo")
    batch_size = max(1, config["train"]["global_batch"] // dist.get_world_size())
    loader = fmsdata.build_loader(config["data"], {**overrides, "loader.batch_size": batch_size})
    # The set is one of the sources here. Yours would be a folder of documents that are not trained on.
    held_out = {"sources": {"docstrings": {}}, "evaluation": {"samples": arguments.samples}, "loader.batch_size": 8}
    evaluation = fmsdata.build_loader(config["data"], {**overrides, **held_out})
    torch.manual_seed(config["data"]["seed"])
    model = distributed(GPT(**config["model"], seq_len=config["data"]["pack"]["seq_len"]), "ddp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["train"]["lr"])
    for step in range(arguments.steps + 1):
        if step % arguments.every == 0:
            loss, tokens = evaluate(model, evaluation)
            if dist.get_rank() == 0:
                print(f"step {step}: loss {loss:.12f} over {tokens} tokens, {len(evaluation)} batches", flush=True)
        if step < arguments.steps:
            train(model, optimizer, next(loader))
    loader.close()
    evaluation.close()
    time.sleep(
        1
    )  # a gloo thread that still drops a tensor would wait forever for the interpreter, and it for the thread
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
