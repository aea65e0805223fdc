"""A rank that fine-tunes a tiny model, under torchrun: `fine_tuning.py FOLDER`.

The loss is that of the whole global batch. It writes what it learned, how many labels it saw, and how
often its process tokenized.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import fmsdata
from tests.epochs.fine_tuners import EOS, data

GLOBAL_BATCH, ACCUMULATE, STEPS = 8, 2, 4


class Slow:
    """A tokenizer that counts its calls."""

    fingerprint = "slow"
    calls = 0

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        Slow.calls += 1
        return [list(text.encode()) for text in texts]


def train(folder: Path) -> dict[str, Any]:
    world_size = dist.get_world_size()
    lengths = [(n % 5, 1 + n * n % 23) for n in range(150)]
    rows = fmsdata.FineTuningRows(data(lengths), Slow(), seq_len=24, eos=EOS, mode="bestfit", cache=folder / "cache")
    sampler = fmsdata.EpochSampler(rows, global_batch=GLOBAL_BATCH, seed=3)
    batch_size = GLOBAL_BATCH // world_size // ACCUMULATE
    loader = fmsdata.StatefulDataLoader(rows, sampler=sampler, batch_size=batch_size)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(256, 8), torch.nn.Tanh(), torch.nn.Linear(8, 256)).double()
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    counts = []
    for _ in range(STEPS):
        labels = torch.zeros((), dtype=torch.int64)
        for _ in range(ACCUMULATE):
            batch = next(loader)
            logits = parallel(batch["input_ids"])
            loss = functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
            (loss * world_size / batch["global_tokens"]).backward()
            labels += (batch["labels"] != -100).sum()
        dist.all_reduce(labels)
        assert int(labels) == int(batch["global_tokens"])
        counts.append(int(labels))
        optimizer.step()
        optimizer.zero_grad()
    return {"counts": counts, "model": model.state_dict(), "calls": Slow.calls}


if __name__ == "__main__":
    dist.init_process_group("gloo")
    found = train(Path(sys.argv[1]))
    torch.save(found, Path(sys.argv[1]) / f"{dist.get_world_size()}-{dist.get_rank()}.pt")
    dist.destroy_process_group()
    os._exit(0)
