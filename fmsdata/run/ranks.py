"""TODO."""

import os

import torch.distributed

from fmsdata.core.checks import whole
from fmsdata.errors import ConfigError


def rank_and_world_size(rank: int | None = None, world_size: int | None = None) -> tuple[int, int]:
    """The arguments, else torch.distributed, else the environment, else 0 of 1.

    >>> rank_and_world_size(3, 8)
    (3, 8)
    """
    if (rank is None) != (world_size is None):
        raise ConfigError(f"rank is {rank} and world_size is {world_size}: give both or neither")
    if rank is not None and world_size is not None:
        return whole("rank", rank, least=None), whole("world_size", world_size, least=None)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    if ("RANK" in os.environ) != ("WORLD_SIZE" in os.environ):
        only = "RANK" if "RANK" in os.environ else "WORLD_SIZE"
        raise ConfigError(f"{only}={os.environ[only]} in the environment, but not its twin: set both, or neither")
    told = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    try:
        return int(told[0]), int(told[1])
    except ValueError:
        raise ConfigError(
            f"RANK={told[0]!r}, WORLD_SIZE={told[1]!r} in the environment: both must be numbers"
        ) from None
