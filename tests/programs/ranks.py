"""Several ranks on this machine, each a real process: forked after the imports, connected by gloo.

`ranks.py SCENARIO RANKS CONFIG FOLDER` runs a scenario on each rank, and writes what it returns to
`FOLDER/SCENARIO-RANK.json`. Scenarios beside "spawned" are run by `fork`, which is fast.
"""

import json
import os
import socket
import sys
import warnings
from collections.abc import Callable
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint
import torch.multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader

import fmsdata
from fmsdata.config.build import build_data
from fmsdata.config.read import read_config
from fmsdata.run.gather import gather_state

dcp: Any = torch.distributed.checkpoint  # its functions are not declared as public
processes: Any = torch.multiprocessing

Result = Any


def rows(batches: Any, count: int) -> list[list[int]]:
    """The first rows of a loader, as lists of tokens."""
    found: list[list[int]] = []
    for batch in batches:
        found += (batch["input_ids"] if isinstance(batch, dict) else batch).tolist()
        if len(found) >= count:
            return found
    return found


def error(call: Callable[[], Any]) -> str:
    """The error of fmsdata that a call ends with."""
    try:
        call()
    except fmsdata.errors.FmsdataError as failure:
        return f"{type(failure).__name__}: {failure}"
    return "no error"


def data_of(config: str, **ranks: Any) -> fmsdata.Rescalable:
    built = build_data(read_config(config))
    return fmsdata.Rescalable(built.lines, lanes=built.lanes, seed=built.seed, **ranks)


# The scenarios. Each runs on every rank.


def meshes(config: str, folder: Path) -> Result:
    """Every layout of 4 ranks that matters; checkpoints, torch's and ours, with ranks that share data."""
    found: dict[str, Any] = {}
    for names in (("dp_replicate", "dp_shard"), ("dp", "cp"), ("pp", "dp"), ("dp", "tp")):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        data_names = tuple(name for name in names if name.startswith("dp"))
        path = folder / "-".join(names)
        section = {"path": str(path / "ours"), "every": 2, "keep": 1}
        with fmsdata_loader(config, {"checkpoint": section}, mesh=mesh) as loader:
            dist.barrier()  # all have looked for a checkpoint
            here = {"rank": loader.rank, "world_size": loader.world_size, "rows": rows(loader, 12)}
            here["gathered"] = loader.state_dict(gather=True)
            dcp.save({"loader": loader}, checkpoint_id=path / "dcp")
            loader.save()
        sub_mesh = data_of(config, mesh=mesh[data_names])
        here["plain"] = [item.tokens.tolist()[:-1] for item in islice(sub_mesh, 4)]
        here["plain gathered"] = sub_mesh.state_dict(gather=True)
        if len(data_names) == 1:
            by_group = data_of(config, process_group=mesh.get_group(data_names[0]))
            here["by group"] = [item.tokens.tolist()[:-1] for item in islice(by_group, 4)]
        dist.barrier()  # all have saved
        with fmsdata_loader(config, {"checkpoint": section}, mesh=mesh[data_names]) as again:
            here["resumed"] = [again.state_dict()["step"], *rows(again, 4)]
        found["-".join(names)] = here
    unnamed = init_device_mesh("cpu", (2, 2))
    odd = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    wrong = {
        "global rank": lambda: rows(fmsdata.build_loader(config), 1),
        "global rank, plain": lambda: next(iter(data_of(config))),
        "unnamed": lambda: data_of(config, mesh=unnamed),
        "unclear": lambda: data_of(config, mesh=odd),
        "no data": lambda: data_of(config, mesh=mesh["tp"]),
        "both": lambda: data_of(config, mesh=mesh, rank=0, world_size=1),
    }
    return {**found, "errors": {name: error(call) for name, call in wrong.items()}}


def gathering(config: str, folder: Path) -> Result:
    """Gathered states, and what is wrong with some."""
    rank = dist.get_rank()
    data = data_of(config)
    torchs = DataLoader(data, batch_size=2)
    taken = rows(torchs, 6)
    gathered = data.state_dict(gather=True)
    loader = fmsdata.build_loader(config)
    loader.load_state_dict(gathered)
    after = rows(loader, 4)
    rows(loader, 2 * (1 + rank))  # ranks at different steps
    differing = error(lambda: loader.state_dict(gather=True))

    def failing() -> Any:
        if rank == 1:
            raise fmsdata.errors.StageError("a stage of rank 1 failed")
        return data.state_dict()

    one_fails = error(lambda: gather_state(failing, data.ranks(), data.lanes))
    incomplete = error(lambda: data_of(config, rank=rank, world_size=3).state_dict(gather=True))
    loader.close()
    return {
        "taken": taken,
        "gathered": gathered,
        "after": after,
        "errors": {"differing": differing, "one fails": one_fails, "incomplete": incomplete},
    }


def early(config: str, folder: Path, connect: Callable[[], None]) -> Result:
    """Loaders and datasets that were built before init_process_group, here or before the fork."""
    loader, used, data = fmsdata.build_loader(config), fmsdata.build_loader(config), data_of(config)
    rows(used, 2)
    samples = iter(data)
    given = fmsdata.build_loader(config, rank=0, world_size=1)
    connect()
    errors = {
        "loader": error(lambda: rows(loader, 2)),
        "again": error(lambda: rows(loader, 2)),
        "in use": error(lambda: rows(used, 2)),
        "gathered": error(lambda: loader.state_dict(gather=True)),
        "inherited": error(lambda: rows(INHERITED[0], 2)),
        "iterator": error(lambda: next(samples)),
    }
    found = {"given": rows(given, 2), "plain": [item.tokens.tolist()[:-1] for item in islice(data, 4)]}
    for one in (loader, used, given):
        one.close()
    return {**found, "errors": errors}


def spawned(rank: int, world_size: int, port: int, data: fmsdata.Rescalable, folder: str) -> None:
    """A rank that got its dataset by pickle, without RANK in the environment, with workers of its own."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    found = {}
    for method in ("fork", "spawn"):
        loader: Any = DataLoader(data, batch_size=2, num_workers=1, multiprocessing_context=method)
        found[method] = rows(loader, 8)
    Path(folder, f"spawned-{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def fmsdata_loader(config: str, overrides: Any, **ranks: Any) -> Any:
    """A loader that is closed at the end of the block."""
    return closing(fmsdata.build_loader(config, overrides, **ranks))


SCENARIOS: dict[str, Callable[..., Result]] = {"meshes": meshes, "gathering": gathering, "early": early}
INHERITED: list[fmsdata.StatefulDataLoader] = []  # loaders that were built before the fork


def run(rank: int, world_size: int, port: int, scenario: str, config: str, folder: str) -> None:
    """One rank."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    warnings.simplefilter("error", fmsdata.errors.FmsdataWarning)

    def connect() -> None:
        dist.init_process_group("gloo", rank=rank, world_size=world_size)

    if scenario == "early":
        result = early(config, Path(folder), connect)
    else:
        connect()
        result = SCENARIOS[scenario](config, Path(folder))
    Path(folder, f"{scenario}-{rank}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def main() -> None:
    scenario, count, config, folder = sys.argv[1:]
    world_size, port = int(count), free_port()
    if scenario == "spawned":
        data = data_of(config)
        samples = iter(data)
        for _ in range(24):
            next(samples)
        data.load_state_dict(data.state_dict())
        processes.spawn(spawned, (world_size, port, data, folder), world_size)
        return
    INHERITED.append(fmsdata.build_loader(config))
    processes.start_processes(run, (world_size, port, scenario, config, folder), world_size, start_method="fork")


if __name__ == "__main__":
    main()
