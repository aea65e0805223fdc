"""One canonical stream of training samples, the same on any number of GPUs.

Public names are imported when they are first used: `import fmsdata` alone loads nothing heavy. Each
name is listed twice, for type checkers and for `__getattr__`. A test compares the two lists.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fmsdata.core.collecting import no_collection

if TYPE_CHECKING:
    from fmsdata import errors as errors
    from fmsdata import keys as keys
    from fmsdata import prepare as prepare
    from fmsdata import testing as testing
    from fmsdata import trace as trace
    from fmsdata import train_state as train_state
    from fmsdata.config.build import build_loader as build_loader
    from fmsdata.core.chunk import Item as Item
    from fmsdata.core.iterator import StageIterator as StageIterator
    from fmsdata.core.lane import Lane as Lane
    from fmsdata.core.spans import Span as Span
    from fmsdata.core.stage import Stage as Stage
    from fmsdata.corpus.shard_writer import write_shard as write_shard
    from fmsdata.display.show import show as show
    from fmsdata.epochs.fine_tuning import FineTuningRows as FineTuningRows
    from fmsdata.epochs.mixture import RowMixture as RowMixture
    from fmsdata.epochs.sampler import EpochSampler as EpochSampler
    from fmsdata.errors import CheckpointError as CheckpointError
    from fmsdata.errors import ConfigError as ConfigError
    from fmsdata.errors import CountsError as CountsError
    from fmsdata.errors import DataError as DataError
    from fmsdata.errors import FmsdataError as FmsdataError
    from fmsdata.errors import FmsdataWarning as FmsdataWarning
    from fmsdata.errors import StageError as StageError
    from fmsdata.errors import StallError as StallError
    from fmsdata.errors import StateError as StateError
    from fmsdata.errors import StorageError as StorageError
    from fmsdata.errors import WorkerError as WorkerError
    from fmsdata.loader.loader import StatefulDataLoader as StatefulDataLoader
    from fmsdata.run.checkpoints import Checkpoints as Checkpoints
    from fmsdata.run.rescalable import Rescalable as Rescalable
    from fmsdata.run.stats import Stats as Stats
    from fmsdata.run.trace import Trace as Trace
    from fmsdata.stages.delimit import Delimit as Delimit
    from fmsdata.stages.filter import Filter as Filter
    from fmsdata.stages.map import Map as Map
    from fmsdata.stages.mixture import Mixture as Mixture
    from fmsdata.stages.mixture import Phase as Phase
    from fmsdata.stages.pack import Pack as Pack
    from fmsdata.stages.shard_reader import ShardReader as ShardReader
    from fmsdata.stages.shuffle import Shuffle as Shuffle
    from fmsdata.stages.tokenize import Tokenize as Tokenize
    from fmsdata.storage.settings import CacheSettings as CacheSettings
    from fmsdata.storage.settings import SpoolSettings as SpoolSettings
    from fmsdata.storage.settings import Storage as Storage
    from fmsdata.tasks import CausalLM as CausalLM
    from fmsdata.tasks import Collate as Collate
    from fmsdata.tasks import FillInTheMiddle as FillInTheMiddle
    from fmsdata.tasks import MaskedLM as MaskedLM
    from fmsdata.tasks import OwnTask as OwnTask
    from fmsdata.tasks import task_from as task_from

__version__ = "0.1.0"

_MODULES = ("errors", "keys", "prepare", "testing", "trace", "train_state")
_HOMES = {  # where public names come from
    "config.build": "build_loader",
    "display.show": "show",
    "core.chunk": "Item",
    "core.iterator": "StageIterator",
    "core.lane": "Lane",
    "core.spans": "Span",
    "core.stage": "Stage",
    "corpus.shard_writer": "write_shard",
    "epochs.fine_tuning": "FineTuningRows",
    "epochs.mixture": "RowMixture",
    "epochs.sampler": "EpochSampler",
    "errors": "CheckpointError ConfigError CountsError DataError FmsdataError FmsdataWarning "
    "StageError StallError StateError StorageError WorkerError",
    "loader.loader": "StatefulDataLoader",
    "run.checkpoints": "Checkpoints",
    "run.rescalable": "Rescalable",
    "run.stats": "Stats",
    "run.trace": "Trace",
    "stages.delimit": "Delimit",
    "stages.filter": "Filter",
    "stages.map": "Map",
    "stages.mixture": "Mixture Phase",
    "stages.pack": "Pack",
    "stages.shard_reader": "ShardReader",
    "stages.shuffle": "Shuffle",
    "stages.tokenize": "Tokenize",
    "storage.settings": "CacheSettings SpoolSettings Storage",
    "tasks": "CausalLM Collate FillInTheMiddle MaskedLM OwnTask task_from",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}
__all__ = sorted([*_HOME_OF, *_MODULES])


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF and name not in _MODULES:
        raise AttributeError(f"module 'fmsdata' has no attribute {name!r}")
    with no_collection():  # what an import makes stays: collections took a third of the time
        module = import_module(f"fmsdata.{_HOME_OF.get(name, name)}")
    value = getattr(module, name) if name in _HOME_OF else module
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
