"""A small GPT in plain PyTorch, with DDP or FSDP2, that can be killed at any moment and resumes by itself.

    fmsdata demo --folder demo-data
    torchrun --standalone --nproc-per-node 2 examples/train.py --config configs/train-demo.yaml --out runs/demo

The same command resumes from the newest checkpoint, on any number of ranks. The global batch stays
the same, so every step sees the same samples, and the loss is the same up to rounding.

A checkpoint is a folder `step-<n>` with the model and the optimizer (torch.distributed.checkpoint)
and everything else (fmsdata.train_state). It is written under another name and renamed when every
rank is done, so a folder of that name is always complete.
"""

import argparse
import fcntl
import hashlib
import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

import fmsdata
from fmsdata import train_state

IGNORED = -100  # the label of positions without a training signal


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.before_attention(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x.add(self.mlp(self.before_mlp(x)))


class GPT(nn.Module):
    def __init__(self, *, vocab: int, width: int, heads: int, depth: int, seq_len: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(seq_len, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def distributed(model: GPT, parallel: str) -> nn.Module:
    if parallel == "ddp":
        return DistributedDataParallel(model)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model


class Run:
    """A training run in a folder: model, optimizer, loader and checkpoints."""

    def __init__(self, out: Path, config: dict[str, Any], parallel: str) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.out, self.train = out, config["train"]
        batch_size, left_over = divmod(self.train["global_batch"], self.world_size)
        if left_over:
            raise SystemExit(f"global_batch {self.train['global_batch']} cannot be divided by {self.world_size} ranks")
        self.loader = fmsdata.build_loader(config["data"], {"loader.batch_size": batch_size})
        torch.manual_seed(config["data"]["seed"])  # the same weights on every rank ...
        self.model = distributed(GPT(**config["model"], seq_len=config["data"]["pack"]["seq_len"]), parallel)
        torch.manual_seed(config["data"]["seed"] + 1 + self.rank)  # ... and randomness of its own from here on
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.train["lr"])
        warmup = self.train["warmup"]
        self.scheduler = LambdaLR(self.optimizer, lambda n: min((n + 1) / warmup, math.sqrt(warmup / (n + 1))))
        self.step = self.tokens_seen = 0  # steps done, and tokens learned from in them, by all ranks together

    def resume(self) -> None:
        """Resume from the newest checkpoint, if there is one."""
        newest: list[Path | None] = [None]
        if self.rank == 0:
            self.out.mkdir(parents=True, exist_ok=True)
            self._lock_out_others()
            for leftover in self.out.glob("unfinished-*"):
                shutil.rmtree(leftover)
            newest = [next(iter(self._checkpoints()), None)]
        dist.broadcast_object_list(newest)
        folder = newest[0]
        if folder is not None:
            model, optimizer = get_state_dict(self.model, self.optimizer)
            state_dict_loader.load({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
            set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)
            states = train_state.load(folder, self.loader)
            self.step, self.tokens_seen, _ = train_state.restore(states, self.loader, scheduler=self.scheduler)
        if self.rank == 0:
            print(f"from {folder.name if folder else 'the beginning'} on {self.world_size} ranks", flush=True)

    def save(self) -> None:
        """Write a checkpoint. It counts as one only after the rename at the end."""
        state = train_state.build(self.loader, step=self.step, tokens_seen=self.tokens_seen, scheduler=self.scheduler)
        unfinished = self.out / f"unfinished-{self.step}"
        model, optimizer = get_state_dict(self.model, self.optimizer)
        state_dict_saver.save({"model": model, "optimizer": optimizer}, checkpoint_id=unfinished)
        train_state.save(unfinished, state)
        dist.barrier()  # every rank has written its part
        if self.rank == 0:
            unfinished.rename(self.out / f"step-{self.step}")
            for old in self._checkpoints()[self.train["keep"] :]:
                shutil.rmtree(old.rename(old.with_name(f"unfinished-{old.name}")))

    def _checkpoints(self) -> list[Path]:
        """The complete checkpoints, newest first."""
        return sorted(self.out.glob("step-*"), key=lambda folder: int(folder.name[5:]), reverse=True)

    def _lock_out_others(self) -> None:
        """Lock the folder until this process ends, so that leftover ranks of an earlier run cannot write here."""
        lock = os.open(self.out / "lock", os.O_CREAT | os.O_RDWR)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SystemExit(f"another run writes to {self.out}; stop it first, or choose another --out") from None

    def learn(self, batch: dict[str, Tensor]) -> float:
        """Train one step. Returns the mean loss of the global batch, over the tokens that have labels."""
        logits, labels = self.model(batch["input_ids"]), batch["labels"]
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
        sums = torch.stack([loss.detach().double(), (labels != IGNORED).sum()])
        dist.all_reduce(sums)
        torch.autograd.backward(loss * self.world_size / sums[1])  # gradients are averaged over the ranks
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.step += 1
        self.tokens_seen += int(sums[1])
        return float(sums[0] / sums[1])

    def digest(self, rows: Tensor) -> str:
        """The hash of the global batch in the order of the stream: row i of rank r is its sample i * W + r."""
        ranks = [torch.empty_like(rows) for _ in range(self.world_size)]
        dist.all_gather(ranks, rows)
        return hashlib.sha256(torch.stack(ranks, dim=1).numpy().tobytes()).hexdigest()


def main() -> None:
    options = argparse.ArgumentParser(description="Train a small GPT; resume from the newest checkpoint in --out.")
    options.add_argument("--config", required=True, help="a YAML file with the sections data, model and train")
    options.add_argument("--out", type=Path, required=True, help="folder for checkpoints and log.jsonl")
    options.add_argument("--data", help="folder of the corpus; overrides the configuration")
    options.add_argument("--steps", type=int, help="total number of steps; overrides the configuration")
    options.add_argument("--every", type=int, help="steps between checkpoints; overrides the configuration")
    options.add_argument("--parallel", choices=["ddp", "fsdp"], default="ddp")
    arguments = options.parse_args()
    if not Path(arguments.config).is_file():
        raise SystemExit(f"{arguments.config}: no such file; configs/train-demo.yaml is an example")
    config = yaml.safe_load(Path(arguments.config).read_text())
    config["data"]["path"] = arguments.data or config["data"]["path"]
    steps, every = arguments.steps or config["train"]["steps"], arguments.every or config["train"]["every"]

    dist.init_process_group("gloo")
    run = Run(arguments.out, config, arguments.parallel)
    run.resume()
    with (arguments.out / "log.jsonl").open("a", buffering=1) as log:  # line buffered
        for step, batch in zip(range(run.step, steps), run.loader, strict=False):
            entry = {"step": step, "loss": run.learn(batch), "sha256": run.digest(batch["input_ids"])}
            if run.rank == 0:
                log.write(json.dumps({**entry, "world_size": run.world_size}) + "\n")
            if run.step % every == 0 or run.step == steps:
                run.save()
    run.loader.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
