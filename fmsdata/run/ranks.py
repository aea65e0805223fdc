"""Which part of the stream a process reads: its data-parallel rank, of how many.

Ranks that share data (tensor, context and pipeline parallel) are the same data-parallel rank. What
was given counts. What was found is compared with torch.distributed before data is handed out: a
loader that was built before `init_process_group` would otherwise read as rank 0 of 1 everywhere.
"""

import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from fmsdata.core.checks import whole
from fmsdata.core.wording import shown
from fmsdata.errors import ConfigError

# Words in the names of mesh dimensions. Ranks along "dp_shard" read different data, ranks along
# "tp" the same. "dp_cp" is both, and "ep" may be either: such names are refused.
DATA = {"dp", "ddp", "fsdp", "hsdp", "data", "replicate", "shard", "batch"}
SHARED = {"tp", "cp", "pp", "sp", "mp", "tensor", "context", "pipeline", "pipe", "sequence", "model", "ulysses", "ring"}

DISTRIBUTED = dist.is_available()  # asked once: it is a property of this torch, and ranks are checked at every batch

SUB_MESH = 'pass the data-parallel sub-mesh, as in mesh["dp"] or mesh["dp_replicate", "dp_shard"]'


@dataclass(frozen=True)
class Ranks:
    """A data-parallel rank, of how many, and how this is known.

    >>> Ranks.given_by(3, 8)
    Ranks(rank=3, world_size=8, origin='rank= and world_size=', given=True, groups=(), saves=True)
    """

    rank: int
    world_size: int
    origin: str
    given: bool
    groups: tuple[ProcessGroup, ...] = ()  # gathering over one after the other reaches all ranks; (): the default group
    saves: bool = True  # of the processes that are this rank, one saves; if it is not known which, all do
    process: int = field(default_factory=os.getpid, repr=False, compare=False)  # where this was found

    @classmethod
    def given_by(
        cls,
        rank: int | None = None,
        world_size: int | None = None,
        mesh: DeviceMesh | None = None,
        process_group: ProcessGroup | None = None,
    ) -> "Ranks | None":
        """The rank that the arguments of a loader or a dataset name; None if they name none."""
        if (rank is None) != (world_size is None):
            raise ConfigError(f"rank is {rank} and world_size is {world_size}; give both or neither")
        arguments = {"rank= and world_size=": rank, "mesh=": mesh, "process_group=": process_group}
        given = [name for name, value in arguments.items() if value is not None]
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)} are given; the rank must come from one of them")
        if rank is not None and world_size is not None:
            return cls(whole("rank", rank, least=None), whole("world_size", world_size, least=None), given[0], True)
        if mesh is not None:
            return _of_mesh(mesh)
        return None if process_group is None else _of_group(process_group)

    @classmethod
    def found(cls) -> "Ranks":
        """The rank of this process: from torch.distributed, else the environment, else 0 of 1."""
        now = _distributed()
        return _of_environment() if now is None else cls(*now, "torch.distributed", False)

    @property
    def may_be_shared(self) -> bool:
        """Whether other processes may be the same data-parallel rank."""
        now = _distributed() if self.given else None
        return now is not None and now[1] > self.world_size

    def check(self, reader: str) -> None:
        """Raise if the rank was found, and torch.distributed now names another one."""
        now = None if self.given else _distributed()
        if now is not None and now != (self.rank, self.world_size):
            raise ConfigError(
                f"this {reader} was opened as rank {self.rank} of {self.world_size} (from {self.origin}), but "
                f"torch.distributed says rank {now[0]} of {now[1]}; build it after init_process_group, "
                "or pass rank= and world_size=, mesh= or process_group="
            )

    def check_sharing(self, reader: str) -> None:
        """Raise if the rank was found, as the global one, and some ranks share their data."""
        if not self.given and (shared := next(_sharing_groups(), None)):
            raise ConfigError(
                f"this {reader} reads as rank {self.rank} of {self.world_size}, the global rank, but the process "
                f"group {shared!r} says that some ranks share their data; pass mesh= (the device mesh), "
                "or the data-parallel rank= and world_size="
            )

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world_size} (from {self.origin})"


def _distributed() -> tuple[int, int] | None:
    """The global rank and world size, if torch.distributed is initialized."""
    return (dist.get_rank(), dist.get_world_size()) if DISTRIBUTED and dist.is_initialized() else None


def _of_environment() -> Ranks:
    if ("RANK" in os.environ) != ("WORLD_SIZE" in os.environ):
        only, other = ("RANK", "WORLD_SIZE") if "RANK" in os.environ else ("WORLD_SIZE", "RANK")
        raise ConfigError(f"{only}={os.environ[only]} is in the environment, but {other} is not; set both or neither")
    if "RANK" not in os.environ:
        return Ranks(0, 1, "the default, without torch.distributed or RANK", False)
    rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
    try:
        return Ranks(int(rank), int(size), "RANK and WORLD_SIZE", False)
    except ValueError:
        raise ConfigError(
            f"RANK={rank!r} and WORLD_SIZE={size!r} in the environment; both must be whole numbers"
        ) from None


def _of_group(group: ProcessGroup) -> Ranks:
    if not isinstance(group, ProcessGroup):
        raise ConfigError(
            f"process_group is {shown(group)}; it must be a ProcessGroup of torch.distributed that this rank is in"
        )
    rank = dist.get_rank(group)
    if rank < 0:
        raise ConfigError(
            f"process_group is {shown(group)}, and rank {dist.get_rank()} is not in it; pass the group it is in"
        )
    return Ranks(rank, dist.get_world_size(group), "process_group=", True, (group,))


def _of_mesh(mesh: DeviceMesh) -> Ranks:
    if not isinstance(mesh, DeviceMesh):
        raise ConfigError(f"mesh is {shown(mesh)}; it must be a DeviceMesh of torch.distributed")
    dimensions = _data_dimensions(mesh)
    place = mesh.get_coordinate()
    if place is None:
        raise ConfigError(f"{_named(mesh)}: rank {dist.get_rank()} is not in it; pass the mesh that it is in")
    rank = 0
    for dimension in dimensions:
        rank = rank * mesh.size(dimension) + place[dimension]
    world_size = math.prod(mesh.size(dimension) for dimension in dimensions)
    groups = tuple(mesh.get_group(dimension) for dimension in dimensions)
    everywhere = slice(None)
    readers = mesh.mesh[tuple(everywhere if dimension in dimensions else at for dimension, at in enumerate(place))]
    root = mesh._get_root_mesh() if hasattr(mesh, "_get_root_mesh") else mesh  # of a sub-mesh
    return Ranks(rank, world_size, "mesh=", True, groups, saves=int(root.mesh.flatten()[0]) in readers.flatten())


def _data_dimensions(mesh: DeviceMesh) -> list[int]:
    """The dimensions along which ranks read different data."""
    names = mesh.mesh_dim_names
    if names is None:
        if mesh.ndim == 1:
            return [0]
        raise ConfigError(f"{_named(mesh)}: its {mesh.ndim} dimensions have no names; name them, or {SUB_MESH}")
    kinds = [_is_data(name) for name in names]
    if mesh.ndim == 1 and kinds == [None] and not _words(names[0]) & SHARED:
        return [0]
    if None in kinds:
        unclear = names[kinds.index(None)]
        raise ConfigError(f"{_named(mesh)}: it is not clear whether ranks along {unclear!r} share data; {SUB_MESH}")
    if not any(kinds):
        raise ConfigError(
            f"{_named(mesh)}: it has no data-parallel dimension; {SUB_MESH}, "
            "or rank=0, world_size=1 if all ranks read the same data"
        )
    return [dimension for dimension, is_data in enumerate(kinds) if is_data]


def _is_data(name: str) -> bool | None:
    """Whether ranks along a dimension of this name read different data; None if unclear."""
    words = _words(name)
    return None if bool(words & DATA) == bool(words & SHARED) else bool(words & DATA)


def _words(name: str) -> set[str]:
    return set(re.split(r"[^a-z]+", name.lower()))


def _named(mesh: DeviceMesh) -> str:
    names = mesh.mesh_dim_names or ("?",) * mesh.ndim
    return f"mesh is {' x '.join(f'{name} {size}' for name, size in zip(names, mesh.shape, strict=True))}"


def _sharing_groups() -> Iterator[str]:
    """The process groups of tensor, context or pipeline parallelism that this process is in.

    Meshes, and Megatron, describe what their groups are for. torch has no public list of groups.
    """
    groups: Any = getattr(getattr(dist.distributed_c10d, "_world", None), "pg_names", {}) if _distributed() else {}
    for group in list(groups):
        purpose = getattr(group, "group_desc", "").removeprefix("mesh_")
        if _is_data(purpose) is False and group.size() > 1:
            yield purpose
