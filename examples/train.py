"""A small GPT in plain PyTorch, with DDP or FSDP2, that can be killed at any moment and resumes by itself.

    fmsdata demo --folder demo-data
    torchrun --standalone --nproc-per-node 2 examples/train.py --config configs/train-demo.yaml --out runs/demo

The same command resumes from the newest checkpoint, on any number of ranks. The global batch stays
the same, so every step sees the same samples, and the loss is the same up to rounding.

A checkpoint has the model and the optimizer (torch.distributed.checkpoint) and everything else
(fmsdata.train_state). The folder of the run is in run_folder.py.
"""

import argparse
import hashlib
import json
import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from run_folder import RunFolder, end, end_at_once, end_with_torchrun
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

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        qkv = self.qkv(self.before_attention(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x.add(self.mlp(self.before_mlp(x)))


class GPT(nn.Module):
    def __init__(self, *, vocab: int, width: int, heads: int, depth: int, seq_len: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(seq_len, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)

    def forward(self, ids: Tensor, documents: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        """With the documents of the tokens, and their positions in them, no token sees another document."""
        places = torch.arange(ids.shape[1]) if positions is None else positions
        mask = None if documents is None else (documents[:, None, :, None] == documents[:, None, None, :]).tril()
        x = self.tokens(ids) + self.positions(places)
        for block in self.blocks:
            x = block(x, mask)
        logits: Tensor = self.head(self.norm(x))
        return logits


def build_model(parallel: str, seed: int, **sizes: int) -> nn.Module:
    torch.manual_seed(seed)  # the same weights on every rank ...
    model = GPT(**sizes)
    torch.manual_seed(seed + 1 + dist.get_rank())  # ... and randomness of its own from here on
    if parallel == "ddp":
        return DistributedDataParallel(model)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model


def losses_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The loss of each token. It is 0 for those without a label."""
    inputs = (batch[name] for name in ("input_ids", "document_ids", "position_ids") if name in batch)
    logits, labels = model(*inputs).flatten(0, 1), batch["labels"].flatten()
    return functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none")


@torch.no_grad()
def evaluate(model: nn.Module, loader: fmsdata.StatefulDataLoader) -> float:
    """The mean loss over all tokens of the set that have a label, the same on any number of ranks.

    Losses and tokens are added up over all ranks before they are divided. Rows that fill up the last
    batches have no labels, so they do not count.
    """
    sums = torch.zeros(2, dtype=torch.float64)
    model.eval()
    for batch in loader:  # from the top each time, with the same number of batches on every rank
        sums += torch.stack([losses_of(model, batch).double().sum(), (batch["labels"] != IGNORED).sum()])
    model.train()
    dist.all_reduce(sums)
    return float(sums[0] / sums[1])


class Run:
    """A training run in a folder: model, optimizer, loaders and checkpoints."""

    def __init__(self, folder: RunFolder, model: nn.Module, train: dict[str, Any], loader: Any, held_out: Any) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.folder, self.model, self.loader, self.held_out = folder, model, loader, held_out
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=train["lr"])
        warmup = train["warmup"]
        self.scheduler = LambdaLR(self.optimizer, lambda n: min((n + 1) / warmup, math.sqrt(warmup / (n + 1))))
        self.step = self.tokens_seen = 0  # steps done, and tokens learned from in them, by all ranks together

    def resume(self) -> None:
        """Resume from the newest checkpoint, if there is one."""
        folder = self.folder.newest()
        if folder is not None:
            model, optimizer = get_state_dict(self.model, self.optimizer)
            state_dict_loader.load({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
            set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)
            states = train_state.load(folder, self.loader)
            self.step, self.tokens_seen, _ = train_state.restore(states, self.loader, scheduler=self.scheduler)
        if self.rank == 0:
            ranks = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"
            print(f"from {folder.name if folder else 'the beginning'} on {ranks}", flush=True)

    def save(self) -> None:
        """Write a checkpoint of this step."""
        state = train_state.build(self.loader, step=self.step, tokens_seen=self.tokens_seen, scheduler=self.scheduler)
        model, optimizer = get_state_dict(self.model, self.optimizer)
        with self.folder.checkpoint(self.step) as folder:
            state_dict_saver.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
            train_state.save(folder, state)

    def learn(self, batch: dict[str, Tensor]) -> float:
        """Train one step. Returns the mean loss of the global batch, over the tokens that have labels."""
        loss = losses_of(self.model, batch).sum()
        sums = torch.stack([loss.detach().double(), (batch["labels"] != IGNORED).sum()])
        dist.all_reduce(sums)
        torch.autograd.backward(loss * self.world_size / sums[1])  # gradients are averaged over the ranks
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.step += 1
        self.tokens_seen += int(sums[1])
        return float(sums[0] / sums[1])

    def evaluate(self) -> float:
        """The loss of the held-out set."""
        loss = evaluate(self.model, self.held_out)
        if self.rank == 0:
            print(f"step {self.step}: evaluation loss {loss:.4f}", flush=True)
        return loss

    def report(self, loss: float) -> None:
        """Print how the run is doing since the last report, over all ranks."""
        ranks: list[Any] = [None] * self.world_size
        dist.all_gather_object(ranks, self.loader.stats())
        stats = fmsdata.Stats.total(ranks)
        if self.rank == 0:
            sources = stats.sources.items()
            mix = ", ".join(f"{name} {source.share:.1%} (planned {source.planned:.1%})" for name, source in sources)
            speed, waited = stats.recent.tokens_per_second, stats.recent.waited_share
            line = f"step {self.step}: loss {loss:.4f}, {speed:,.0f} tokens/s, waited {waited:.1%} of the time for data"
            print(f"{line}; {mix}", flush=True)

    def digest(self, rows: Tensor) -> str:
        """The hash of the global batch in the order of the stream: row i of rank r is its sample i * W + r."""
        ranks = [torch.empty_like(rows) for _ in range(self.world_size)]
        dist.all_gather(ranks, rows)
        return hashlib.sha256(torch.stack(ranks, dim=1).numpy().tobytes()).hexdigest()


def build_loaders(config: dict[str, Any]) -> tuple[fmsdata.StatefulDataLoader, fmsdata.StatefulDataLoader]:
    """The loader of the training, with the same global batch on any number of ranks, and that of the held-out set."""
    global_batch, ranks = config["train"]["global_batch"], dist.get_world_size()
    if global_batch % ranks:
        end(f"global_batch {global_batch} cannot be divided by {ranks} ranks")
    loader = fmsdata.build_loader(config["data"], {"loader.batch_size": global_batch // ranks})
    return loader, fmsdata.build_loader(config["data"], config["evaluation"])


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
    report_every, evaluate_every = config["train"]["report_every"], config["train"]["evaluate_every"]

    end_with_torchrun()
    dist.init_process_group("gloo")
    folder = RunFolder(arguments.out, config["train"]["keep"])
    loader, held_out = build_loaders(config)
    sizes = {**config["model"], "seq_len": config["data"]["pack"]["seq_len"]}
    model = build_model(arguments.parallel, config["data"]["seed"], **sizes)
    run = Run(folder, model, config["train"], loader, held_out)
    run.resume()
    with (arguments.out / "log.jsonl").open("a", buffering=1) as log:  # line buffered
        for step, batch in zip(range(run.step, steps), loader, strict=False):
            loss = run.learn(batch)
            entry = {"step": step, "loss": loss, "sha256": run.digest(batch["input_ids"])}
            if run.step % report_every == 0:
                run.report(loss)
            if run.step % evaluate_every == 0:
                entry["evaluation"] = run.evaluate()
                loader.stats()  # the next report is of the time since this call
            if run.rank == 0:
                log.write(json.dumps({**entry, "world_size": run.world_size}) + "\n")
            if run.step % every == 0 or run.step == steps:
                run.save()
    loader.close()
    held_out.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    end_at_once()
