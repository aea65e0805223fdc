"""Loaders that are built for a trainer, when it knows its ranks.

Some trainers start their ranks after the script has named its data, or decide themselves which ranks
share data. They are given the description of a loader: a configuration, or a function that builds it.
"""

import os
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from fmsdata.config.build import build_loader
from fmsdata.errors import ConfigError
from fmsdata.loader.loader import StatefulDataLoader

Source: TypeAlias = str | os.PathLike[str] | Mapping[str, Any] | Callable[..., StatefulDataLoader]


def build(
    source: Source, trainer: str, overrides: Mapping[str, Any] | None = None, *, rank: int, world_size: int
) -> StatefulDataLoader:
    """The loader of this data-parallel rank: from a YAML file, a dict, or a function of `rank` and `world_size`."""
    if isinstance(source, StatefulDataLoader):
        raise ConfigError(
            f"this loader was built before {trainer} knew its ranks; give the configuration instead, or a function:\n"
            "    def build(rank, world_size):\n"
            "        return fmsdata.StatefulDataLoader(data, batch_size=..., rank=rank, world_size=world_size)"
        )
    if callable(source):
        loader = source(rank=rank, world_size=world_size)
        if not isinstance(loader, StatefulDataLoader):
            raise ConfigError(f"{source!r} returned {loader!r}; it must return a StatefulDataLoader")
    else:
        loader = build_loader(source, overrides, rank=rank, world_size=world_size)
    if (loader.rank, loader.world_size) != (rank, world_size):
        raise ConfigError(
            f"the loader is rank {loader.rank} of {loader.world_size}, but {trainer} says rank {rank} of {world_size}; "
            "pass the rank= and world_size= that the function gets on to the loader"
        )
    if loader.checkpoint is not None:
        raise ConfigError(
            f"the loader resumes from its own folder {loader.checkpoint}, and {trainer} saves and restores it "
            "with the model: it would be at another step than the model. Remove the section `checkpoint`"
        )
    return loader


def check_shifted(loader: StatefulDataLoader, trainer: str) -> None:
    """Raise if labels are not shifted, for a trainer that compares them with the output as they are."""
    if not getattr(loader.task, "shift", True):
        raise ConfigError(
            f"{trainer} does not shift labels, so a model would learn to repeat each token; "
            "remove `shift: false` from the task"
        )
