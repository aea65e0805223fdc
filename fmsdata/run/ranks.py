"""The data-parallel rank and world size: from arguments, torch.distributed or the environment."""

import os

import torch.distributed

from fmsdata.core.checks import whole
from fmsdata.errors import ConfigError


def rank_and_world_size(rank: int | None = None, world_size: int | None = None) -> tuple[int, int]:
    """The rank and the world size.

    From the arguments, else torch.distributed, else the environment, else 0 of 1.

    >>> rank_and_world_size(3, 8)
    (3, 8)
    """
    if (rank is None) != (world_size is None):
        raise ConfigError(f"rank is {rank} and world_size is {world_size}; give both or neither")
    if rank is not None and world_size is not None:
        return whole("rank", rank, least=None), whole("world_size", world_size, least=None)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    if ("RANK" in os.environ) != ("WORLD_SIZE" in os.environ):
        only, other = ("RANK", "WORLD_SIZE") if "RANK" in os.environ else ("WORLD_SIZE", "RANK")
        raise ConfigError(f"{only}={os.environ[only]} is in the environment, but {other} is not; set both or neither")
    rank_text, size_text = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    try:
        return int(rank_text), int(size_text)
    except ValueError:
        raise ConfigError(
            f"RANK={rank_text!r} and WORLD_SIZE={size_text!r} in the environment; both must be whole numbers"
        ) from None
