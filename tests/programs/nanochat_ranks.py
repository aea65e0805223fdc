"""Ranks of a training loop like that of nanochat, each a real process, where only rank 0 saves.

`nanochat_ranks.py RANKS FOLDER [STATE]` takes some batches on each rank over the data in `FOLDER/data`,
and writes them and the state of the last to `FOLDER/RANKS-RANK.json`.
"""

import json
import multiprocessing
import sys
from contextlib import closing
from pathlib import Path

import torch.distributed as dist

from fmsdata.compat.nanochat import tokenizing_distributed_data_loader_with_state_bos_bestfit

BATCHES = 21  # more than one exchange of positions, and some batches after it


def train(rank: int, world_size: int, folder: Path, state: str | None) -> None:
    store = f"file://{folder}/store-{world_size}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    loader = tokenizing_distributed_data_loader_with_state_bos_bestfit(
        "bytes",
        B=2,
        T=48,
        split="train",
        data_shards=folder / "data",
        resume_state_dict=None if state is None else json.loads(Path(state).read_text()),
        bos=256,
        lanes=6,
        device="cpu",
    )
    with closing(loader):
        rows, saved = [], {}
        for _ in range(BATCHES):
            inputs, _, saved = next(loader)
            rows.append(inputs.tolist())
    (folder / f"{world_size}-{rank}.json").write_text(json.dumps({"rows": rows, "state": saved}))
    dist.destroy_process_group()


if __name__ == "__main__":
    world_size, folder = int(sys.argv[1]), Path(sys.argv[2])
    state = sys.argv[3] if len(sys.argv) > 3 else None
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=train, args=(rank, world_size, folder, state)) for rank in range(world_size)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    sys.exit(max(abs(process.exitcode or 0) for process in ranks))
