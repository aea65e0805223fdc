"""One canonical stream of training samples, the same on any number of GPUs."""

from fmsdata import train_state
from fmsdata.checkpoint import Checkpoints
from fmsdata.chunk import Item, Span
from fmsdata.config import build_loader
from fmsdata.delimit import Delimit
from fmsdata.errors import (
    CheckpointError,
    ConfigError,
    CountsError,
    DataError,
    FmsdataError,
    FmsdataWarning,
    StageError,
    StateError,
    StorageError,
    WorkerError,
)
from fmsdata.lanes import Rescalable
from fmsdata.loader import StatefulDataLoader
from fmsdata.map import Filter, Map
from fmsdata.mixture import Mixture, Phase
from fmsdata.pack import Pack
from fmsdata.reader import ShardReader
from fmsdata.shuffle import Shuffle
from fmsdata.stage import Lane, Stage, StageIterator
from fmsdata.stats import Stats
from fmsdata.storage_settings import CacheSettings, Storage
from fmsdata.tasks import CausalLM, Collate, FillInTheMiddle, MaskedLM, OwnTask, task_from

__version__ = "0.1.0"

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
    "ShardReader",
    "Shuffle",
    "Span",
    "Stage",
    "StageError",
    "StageIterator",
    "StateError",
    "StatefulDataLoader",
    "Stats",
    "Storage",
    "StorageError",
    "WorkerError",
    "build_loader",
    "task_from",
    "train_state",
]
