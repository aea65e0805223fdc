"""One canonical stream of training samples, the same on any number of GPUs.

Public names are imported when they are first used: `import fmsdata` alone loads nothing heavy.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fmsdata import errors, keys, prepare, testing, trace, train_state
    from fmsdata.config.build import build_loader
    from fmsdata.core.chunk import Item
    from fmsdata.core.iterator import StageIterator
    from fmsdata.core.lane import Lane
    from fmsdata.core.spans import Span
    from fmsdata.core.stage import Stage
    from fmsdata.corpus.shard_writer import write_shard
    from fmsdata.epochs.mixture import RowMixture
    from fmsdata.epochs.sampler import EpochSampler
    from fmsdata.errors import (
        CheckpointError,
        ConfigError,
        CountsError,
        DataError,
        FmsdataError,
        FmsdataWarning,
        StageError,
        StallError,
        StateError,
        StorageError,
        WorkerError,
    )
    from fmsdata.loader.loader import StatefulDataLoader
    from fmsdata.run.checkpoints import Checkpoints
    from fmsdata.run.rescalable import Rescalable
    from fmsdata.run.stats import Stats
    from fmsdata.run.trace import Trace
    from fmsdata.stages.delimit import Delimit
    from fmsdata.stages.filter import Filter
    from fmsdata.stages.map import Map
    from fmsdata.stages.mixture import Mixture, Phase
    from fmsdata.stages.pack import Pack
    from fmsdata.stages.shard_reader import ShardReader
    from fmsdata.stages.shuffle import Shuffle
    from fmsdata.storage.settings import CacheSettings, Storage
    from fmsdata.tasks import CausalLM, Collate, FillInTheMiddle, MaskedLM, OwnTask, task_from

__version__ = "0.1.0"

_HOMES = {
    "config.build": ["build_loader"],
    "core.chunk": ["Item"],
    "core.lane": ["Lane"],
    "core.iterator": ["StageIterator"],
    "core.spans": ["Span"],
    "core.stage": ["Stage"],
    "corpus.shard_writer": ["write_shard"],
    "epochs.mixture": ["RowMixture"],
    "epochs.sampler": ["EpochSampler"],
    "errors": [
        "CheckpointError",
        "ConfigError",
        "CountsError",
        "DataError",
        "FmsdataError",
        "FmsdataWarning",
        "StageError",
        "StallError",
        "StateError",
        "StorageError",
        "WorkerError",
    ],
    "loader.loader": ["StatefulDataLoader"],
    "run.checkpoints": ["Checkpoints"],
    "run.rescalable": ["Rescalable"],
    "run.stats": ["Stats"],
    "run.trace": ["Trace"],
    "stages.delimit": ["Delimit"],
    "stages.filter": ["Filter"],
    "stages.map": ["Map"],
    "stages.mixture": ["Mixture", "Phase"],
    "stages.pack": ["Pack"],
    "stages.shard_reader": ["ShardReader"],
    "stages.shuffle": ["Shuffle"],
    "storage.settings": ["CacheSettings", "Storage"],
    "tasks": ["CausalLM", "Collate", "FillInTheMiddle", "MaskedLM", "OwnTask", "task_from"],
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
_MODULES = ("errors", "keys", "prepare", "testing", "trace", "train_state")

__all__ = [
    "CacheSettings",
    "CausalLM",
    "CheckpointError",
    "Checkpoints",
    "Collate",
    "ConfigError",
    "CountsError",
    "DataError",
    "Delimit",
    "EpochSampler",
    "FillInTheMiddle",
    "Filter",
    "FmsdataError",
    "FmsdataWarning",
    "Item",
    "Lane",
    "Map",
    "MaskedLM",
    "Mixture",
    "OwnTask",
    "Pack",
    "Phase",
    "Rescalable",
    "RowMixture",
    "ShardReader",
    "Shuffle",
    "Span",
    "Stage",
    "StageError",
    "StageIterator",
    "StallError",
    "StateError",
    "StatefulDataLoader",
    "Stats",
    "Storage",
    "StorageError",
    "Trace",
    "WorkerError",
    "build_loader",
    "errors",
    "keys",
    "prepare",
    "task_from",
    "testing",
    "trace",
    "train_state",
    "write_shard",
]


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        value = getattr(import_module(f"fmsdata.{_HOME_OF[name]}"), name)
    elif name in _MODULES:
        value = import_module(f"fmsdata.{name}")
    else:
        raise AttributeError(f"module 'fmsdata' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
