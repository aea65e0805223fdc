"""The table of parallel layouts is true: every rank of every layout reads as the page says."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import fmsdata
from fmsdata.run.ranks import Ranks

PAGE = (Path(__file__).parents[2] / "docs" / "parallel-layouts.md").read_text()
TABLE = re.findall(r"^\| ([^|`]+) \| ((?:`\w+` \d+(?:, )?)+) \| (\d+) \| (.*) \|$", PAGE, re.MULTILINE)
PROCESSES = 8


@contextmanager
def process(rank: int) -> Iterator[None]:
    """This process as one of several, which talk to nobody."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=PROCESSES)
    try:
        yield
    finally:
        dist.destroy_process_group()


def ranks_of(way: str, mesh: DeviceMesh) -> list[Ranks]:
    """The ranks that a loader has in this process, for each way to pass them that the page names."""
    found: list[Ranks | None] = []
    if "nothing" in way:
        found.append(Ranks.found())
    if "mesh=mesh" in way:
        found.append(Ranks.given_by(mesh=mesh))
    if "world_size=1" in way:
        found.append(Ranks.given_by(0, 1))
    return [ranks for ranks in found if ranks is not None]


@pytest.mark.parametrize(("layout", "dimensions", "size", "way"), TABLE, ids=[row[0] for row in TABLE])
def test_every_rank_reads_as_the_table_says(layout: str, dimensions: str, size: str, way: str) -> None:
    names, sizes = zip(*re.findall(r"`(\w+)` (\d+)", dimensions), strict=True)
    shape = tuple(map(int, sizes))
    assert prod(shape) == PROCESSES
    data = [place for place, name in enumerate(names) if name.startswith("dp") or name == "ep"]
    readers: dict[int, tuple[int, ...]] = {}
    for process_rank in range(PROCESSES):
        with process(process_rank):
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
            coordinate = mesh.get_coordinate()
            assert coordinate is not None
            found = ranks_of(way, mesh)
            assert found
            for ranks in found:
                assert ranks.world_size == int(size)
                same = readers.setdefault(ranks.rank, tuple(coordinate[place] for place in data))
                assert same == tuple(coordinate[place] for place in data), "ranks that share data, and only they"
    assert readers.keys() == set(range(int(size)))


def test_the_table_has_all_layouts() -> None:
    assert len(TABLE) == 9


@pytest.mark.parametrize("names", [("dp", "ep"), ("pp", "dp_shard_cp"), ("tp", "cp")])
def test_meshes_that_the_page_calls_unclear_are_refused(names: tuple[str, str]) -> None:
    with process(3):
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=names)
        with pytest.raises(fmsdata.ConfigError, match=r"not clear|no data-parallel dimension"):
            Ranks.given_by(mesh=mesh)
