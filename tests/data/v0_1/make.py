"""Writes the files beside it: states of version 0.1, and what a run that resumes from them must read.

Ran once, with fmsdata 0.1.0 before its modules were moved into folders. Not part of the tests.
"""

import hashlib
import json
import random
import shutil
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fmsdata
from fmsdata.prepare import Layout, write_shard

HERE = Path(__file__).parent
EDITS = {"sources.web.weight": 1, "sources.code": None, "pack.seq_len": 24}
STEPS = 9


def digests(loader: fmsdata.StatefulDataLoader, count: int) -> list[str]:
    batches = islice(loader, count)
    return [
        hashlib.sha256(batch["input_ids"].numpy().tobytes() + batch["labels"].numpy().tobytes()).hexdigest()[:16]
        for batch in batches
    ]


def build(rank: int, world_size: int, **overrides: object) -> fmsdata.StatefulDataLoader:
    told = {"path": str(HERE / "corpus"), "checkpoint": None, **overrides}
    return fmsdata.build_loader(HERE / "run.yaml", told, rank=rank, world_size=world_size)


def main() -> None:
    generator = np.random.default_rng(7)
    for source, shards in (("web", 3), ("wiki", 2), ("code", 1)):
        for shard in range(shards):
            lengths = np.clip(generator.lognormal(3.0, 0.8, 40).astype(int), 1, 200)
            documents = [generator.integers(3, 60_000, length) for length in lengths]
            layout: Layout = "batch" if source == "wiki" else "list"
            write_shard(HERE / f"corpus/{source}/part-{shard}.arrow", documents, dtype=np.uint16, layout=layout)
    expected: dict[str, Any] = {}

    loaders = [build(rank, 2) for rank in range(2)]
    for loader in loaders:
        digests(loader, STEPS)
    (HERE / "states.json").write_text(json.dumps([loader.state_dict() for loader in loaders]))
    expected["states"] = {str(world): [] for world in (1, 2, 3)}
    for world in (1, 2, 3):
        for rank in range(world):
            loader = build(rank, world)
            loader.load_state_dict(json.loads((HERE / "states.json").read_text()))
            expected["states"][str(world)].append(digests(loader, 20))

    edited = [build(rank, 2, **EDITS) for rank in range(2)]
    for loader in edited:
        loader.load_state_dict(json.loads((HERE / "states.json").read_text()))
    (HERE / "edited.json").write_text(json.dumps([loader.state_dict() for loader in edited]))
    expected["edited"] = [digests(loader, 20) for loader in edited]

    shutil.rmtree(HERE / "checkpoints", ignore_errors=True)
    saving = [build(rank, 3, checkpoint={"path": str(HERE / "checkpoints"), "every": 5}) for rank in range(3)]
    streams = [iter(loader) for loader in saving]
    for _ in range(11):
        for stream in streams:
            next(stream)
    loader = build(0, 1, checkpoint={"path": str(HERE / "checkpoints"), "every": None})
    expected["checkpoints"] = {"step": loader.state_dict()["step"], "batches": digests(loader, 20)}

    shutil.rmtree(HERE / "train", ignore_errors=True)
    trained = [build(rank, 2) for rank in range(2)]
    for rank, loader in enumerate(trained):
        random.seed(rank)
        np.random.seed(rank)  # noqa: NPY002
        torch.manual_seed(rank)
        digests(loader, STEPS)
        model = torch.nn.Linear(2, 2)
        scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model.parameters(), 0.1), 3)
        state = fmsdata.train_state.build(
            loader, step=STEPS, tokens_seen=12345, scheduler=scheduler, extra={"run_id": "a1b2"}
        )
        fmsdata.train_state.save(HERE / "train", state)
    expected["train"] = []
    for rank in range(2):
        loader = build(rank, 2)
        model = torch.nn.Linear(2, 2)
        scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model.parameters(), 0.1), 3)
        states = fmsdata.train_state.load(HERE / "train", loader)
        restored = fmsdata.train_state.restore(states, loader, scheduler=scheduler)
        drawn = [random.random(), float(np.random.random()), float(torch.rand(()))]  # noqa: NPY002
        expected["train"].append({"restored": list(restored), "drawn": drawn, "batches": digests(loader, 20)})
    (HERE / "expected.json").write_text(json.dumps(expected, indent=1))


if __name__ == "__main__":
    main()
