"""Fine-tuning on prompts and responses: epochs, packed rows, labels on the responses, exact losses.

    torchrun --standalone --nproc-per-node 2 examples/finetune.py --out runs/sums

It trains the small GPT of train.py to add numbers, and evaluates it at the end of each epoch. Like
train.py it can be killed, and resumes on any number of ranks.

Rows differ in length, so ranks have different numbers of labels. `global_tokens` is the number on all
ranks together: a sum of losses divided by it is the mean over the global batch, however rows are
dealt out to ranks.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from run_folder import RunFolder, end_at_once, end_with_torchrun
from torch import Tensor
from train import Run, build_model, losses_of

import fmsdata

ROWS = [{"prompt": f"{a} + {b} = ", "response": f"{a + b}"} for a in range(0, 400, 13) for b in range(0, 4000, 333)]
SIZES = {"vocab": 256, "width": 64, "heads": 4, "depth": 2, "seq_len": 48}
SEED, GLOBAL_BATCH = 42, 12  # lines of packed rows in a step, on all ranks together
TRAIN = {"lr": 3e-3, "warmup": 10}


def build_loader(data: Any, cache: Path, *, train: bool) -> tuple[fmsdata.StatefulDataLoader, fmsdata.EpochSampler]:
    """Rows that end with token 0. Every row comes in each epoch; lines that fill up the last batch have no labels."""
    rows = fmsdata.FineTuningRows(data, "bytes", seq_len=SIZES["seq_len"], eos=0, cache=cache)
    sampler = fmsdata.EpochSampler(rows, global_batch=GLOBAL_BATCH, seed=SEED, shuffle=train, drop_last=False)
    batch_size = GLOBAL_BATCH // dist.get_world_size()
    return fmsdata.StatefulDataLoader(rows, sampler=sampler, batch_size=batch_size), sampler


class FineTuning(Run):
    def learn(self, batch: dict[str, Tensor]) -> float:
        """Train one step. Returns the mean loss of the labels of the global batch."""
        loss, labels = losses_of(self.model, batch).sum(), int(batch["global_tokens"])
        torch.autograd.backward(loss * self.world_size / labels)  # gradients are averaged over the ranks
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        total = loss.detach().double()
        dist.all_reduce(total)
        self.step += 1
        self.tokens_seen += labels
        return float(total / labels)


def main() -> None:
    options = argparse.ArgumentParser(description="Fine-tune a small GPT; resume from the newest checkpoint in --out.")
    options.add_argument("--out", type=Path, required=True, help="folder for checkpoints and log.jsonl")
    options.add_argument("--epochs", type=int, default=3)
    options.add_argument("--every", type=int, default=10, help="steps between checkpoints")
    options.add_argument("--parallel", choices=["ddp", "fsdp"], default="ddp")
    arguments = options.parse_args()

    end_with_torchrun()
    dist.init_process_group("gloo")
    folder, cache = RunFolder(arguments.out), arguments.out / "tokens"
    loader, sampler = build_loader([row for n, row in enumerate(ROWS) if n % 10], cache, train=True)
    held_out, _ = build_loader(ROWS[::10], cache, train=False)
    run = FineTuning(folder, build_model(arguments.parallel, SEED, **SIZES), TRAIN, loader, held_out)
    run.resume()
    with (arguments.out / "log.jsonl").open("a", buffering=1) as log:  # line buffered
        while sampler.epoch + sampler.finished < arguments.epochs:
            for batch in loader:  # an epoch, or what is left of it
                entry: dict[str, Any] = {"step": run.step, "epoch": sampler.epoch, "loss": run.learn(batch)}
                entry["sha256"] = run.digest(batch["input_ids"])
                if sampler.finished:
                    entry["evaluation"] = run.evaluate()
                if run.rank == 0:
                    log.write(json.dumps({**entry, "world_size": run.world_size}) + "\n")
                if sampler.finished or run.step % arguments.every == 0:
                    run.save()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    end_at_once()
