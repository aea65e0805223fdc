"""Loaders that are built for a trainer, when it knows its ranks.

Some trainers start their ranks after the script has named its data, or decide themselves which ranks
share data. They are given the description of a loader: a configuration, or a function that builds it.
"""

import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from fmsdata.config.build import build_loader
from fmsdata.core.wording import listed, shown
from fmsdata.errors import ConfigError
from fmsdata.loader.loader import StatefulDataLoader
from fmsdata.run.ranks import Ranks

Source: TypeAlias = str | os.PathLike[str] | Mapping[str, Any] | Callable[..., StatefulDataLoader]


def build(source: Source, trainer: str, overrides: Mapping[str, Any] | None = None, **ranks: Any) -> StatefulDataLoader:
    """The loader of this data-parallel rank: from a YAML file, a dict, or a function of the arguments for the rank.

    Those are what a loader takes: `rank` and `world_size`, or `process_group`.
    """
    if isinstance(source, StatefulDataLoader):
        raise ConfigError(
            f"this loader was built before {trainer} knew its ranks; give the configuration instead, or a function:\n"
            "    def build(**ranks):\n"
            "        return fmsdata.StatefulDataLoader(data, batch_size=..., **ranks)"
        )
    if callable(source):
        try:
            inspect.signature(source).bind(**ranks)
        except TypeError as error:
            names = listed([f"{name}=" for name in ranks], " and ")
            raise ConfigError(
                f"{shown(source)} can't be called as {trainer} needs it ({error}); let it take {names} "
                "and pass them on to the loader"
            ) from None
        loader = source(**ranks)
        if not isinstance(loader, StatefulDataLoader):
            raise ConfigError(f"{shown(source)} returned {shown(loader)}; it must return a StatefulDataLoader")
    else:
        loader = build_loader(source, overrides, **ranks)
    expected = Ranks.given_by(**ranks)
    if expected is not None and (loader.rank, loader.world_size) != (expected.rank, expected.world_size):
        raise ConfigError(
            f"the loader is rank {loader.rank} of {loader.world_size}, but {trainer} says rank {expected.rank} of "
            f"{expected.world_size}; pass the arguments that the function gets on to the loader"
        )
    if loader.checkpoint is not None:
        raise ConfigError(
            f"the loader resumes from its own folder {loader.checkpoint}, and {trainer} saves and restores it "
            "with the model: it would be at another step than the model. Remove the section `checkpoint`"
        )
    loader.keeper = trainer
    return loader


def check_shifted(loader: StatefulDataLoader, trainer: str) -> None:
    """Raise if labels are not shifted, for a trainer that compares them with the output as they are."""
    if not getattr(loader.task, "shift", True):
        raise ConfigError(
            f"{trainer} does not shift labels, so a model would learn to repeat each token; "
            "remove `shift: false` from the task"
        )
