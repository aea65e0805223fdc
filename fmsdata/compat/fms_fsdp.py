"""A drop-in replacement for the data loader of fms-fsdp: users change one import.

Corpus, config fields and batches are the same. Order, state and checkpoints are those of this
project: exact at any world size and number of workers. `logical_shards` is the number of lanes.
"""

import json
import os
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from fmsdata.compat.fms_fsdp_files import FILE_TYPES, Datasets
from fmsdata.core.checks import token, whole
from fmsdata.core.state import State
from fmsdata.core.wording import shown
from fmsdata.errors import CheckpointError, ConfigError, DataError, FmsdataWarning
from fmsdata.loader.loader import StatefulDataLoader
from fmsdata.run.checkpoints import Checkpoints
from fmsdata.run.rescalable import Rescalable
from fmsdata.stages.delimit import Delimit
from fmsdata.stages.mixture import Mixture
from fmsdata.stages.pack import Pack
from fmsdata.stages.shuffle import Shuffle
from fmsdata.storage.location import Location
from fmsdata.tasks.base import IGNORED
from fmsdata.tasks.batch import Batch

Function: TypeAlias = Callable[[Any], Any]
SHORTEST = 3  # tokens of a document with its delimiters; shorter documents are skipped
SHUFFLED = 10_000  # lines that are shuffled together, over all lanes ...
WINDOW = 256  # ... but at least this many per lane
LOADER = "fmsdata-loader"  # the folder of the loader's checkpoints, beside the trainer's `checkpoints`
LARGEST = np.iinfo(np.int32).max
MODEL = re.compile(r"step_(0|[1-9][0-9]*)_ckp")
PICKLED = re.compile(r"loader_state_[0-9]+\.pth")


def causal_lm(data_seq: Any, prompt_len: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Input and label of a line: the label is one token ahead, its first `prompt_len` tokens -100.

    >>> causal_lm([5, 6, 7, 8])
    (tensor([5, 6, 7], dtype=torch.int32), tensor([-100,    7,    8], dtype=torch.int32))
    """
    line = torch.as_tensor(data_seq).int()
    label = line[1:].clone()
    label[:prompt_len] = IGNORED
    return line[:-1], label


def parse_data_args(datas: Any, weights: Any) -> tuple[list[str], list[float]]:
    """Datasets and weights as lists, from lists, comma-separated strings, or single values.

    >>> parse_data_args("web, lang=en/dataset=wiki", "7725,500")
    (['web', 'lang=en/dataset=wiki'], [7725.0, 500.0])
    """
    names = [str(name) for name in _listed("datasets", datas)]
    try:
        return names, [float(weight) for weight in _listed("weights", weights)]
    except (TypeError, ValueError):
        raise ConfigError(f"weights is {shown(weights)}; it must be numbers, as in '7725,500' or [7725, 500]") from None


def get_data_loader(cfg: Any, rank: int, world_size: int, postprocess: Sequence[Function] = (causal_lm,)) -> Any:
    """The batches of one rank, endlessly: `(input, label)`, int32, `(batch_size, seq_length)`.

    `cfg` is any object with the fields of fms-fsdp's train_config. The functions of `postprocess`
    are applied, in order, to each line: a tensor of `seq_length` tokens, plus one if `causal_lm` is
    among them. With `use_dummy_dataset`, this is the dummy loader.

    >>> loader = get_data_loader(cfg, rank, world_size)     # doctest: +SKIP
    >>> for input, label in loader:                         # doctest: +SKIP
    ...     loss = cross_entropy(model(input), label)
    """
    settings = _Settings.of(cfg)
    if settings.use_dummy_dataset:
        return get_dummy_loader(cfg, rank, world_size)
    task = PostProcess(postprocess)
    data = _data(settings, whole("seq_length", settings.seq_length, least=1) + task.extra_tokens)
    if data.lanes < whole("world_size", world_size):
        raise ConfigError(
            f"logical_shards is {data.lanes}, less than the world size {world_size}: some ranks would have nothing to "
            "read; use fewer ranks, or start the run with more logical_shards"
        )
    save_path = _path("ckpt_save_path", settings.ckpt_save_path)
    every = whole("checkpoint_interval", settings.checkpoint_interval, least=1)
    loader = Loader(
        data,
        batch_size=settings.batch_size,
        num_workers=settings.num_workers,
        rank=rank,
        world_size=world_size,
        task=task,
        checkpoint=Checkpoints(f"{save_path}/{LOADER}", every=every, keep=None),
    )
    load_path = _path("ckpt_load_path", settings.ckpt_load_path) if settings.resuming_dataset else save_path
    _resume(loader, load_path, save_path)
    return loader


def get_dummy_loader(cfg: Any, rank: int, world_size: int) -> "DataLoader[Any]":  # noqa: ARG001
    """Numbers that count up to `vocab_size` again and again: the same on every rank."""
    settings = _Settings.of(cfg)
    counter = _Counter(
        whole("seq_length", settings.seq_length, least=1),
        whole("vocab_size", settings.vocab_size, least=1),
    )
    return DataLoader(counter, batch_size=whole("batch_size", settings.batch_size, least=1))


class Loader(StatefulDataLoader):
    """A StatefulDataLoader with fms-fsdp's batches, and the methods that its Checkpointer calls."""

    def _next_batch(self) -> Any:
        return super()._next_batch()["batch"]

    @property
    def dataset(self) -> "Loader":
        """What the trainer's Checkpointer saves: the loader itself."""
        return self

    def save_to_path(self, path: str) -> None:  # noqa: ARG002
        """Save now, not in the given folder, which is the model's, but in the loader's own."""
        self.save()

    def load_from_path(self, path: str) -> None:
        """Nothing to do: the loader resumed from its newest checkpoint when it was created."""


@dataclass(frozen=True)
class PostProcess:
    """A task that applies functions to each line, one after the other."""

    functions: Sequence[Function]
    needs_lines: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.functions, Sequence) or not all(map(callable, self.functions)):
            raise ConfigError(
                f"postprocess is {shown(self.functions)}; it must be a list of functions, as in [causal_lm]"
            )

    @property
    def extra_tokens(self) -> int:
        return int(causal_lm in self.functions)

    def __call__(self, batch: Batch) -> dict[str, Any]:
        if np.iinfo(batch.tokens.dtype).max > LARGEST and batch.tokens.max() > LARGEST:
            raise DataError(f"the data has a token {batch.tokens.max()}, too large for the int32 of these batches")
        lines = torch.from_numpy(batch.tokens.astype(np.int32))
        if list(self.functions) == [causal_lm]:  # all lines at once: it works on the first dimension
            return {"batch": tuple(part.T.contiguous() for part in causal_lm(lines.T))}
        batched = default_collate([self._apply(line) for line in lines])
        return {"batch": tuple(batched) if isinstance(batched, list) else batched}

    def _apply(self, line: Any) -> Any:
        for function in self.functions:
            line = function(line)
        return line


@dataclass(frozen=True, kw_only=True)
class _Settings:
    """The fields of the config that are used here, with the defaults of fms-fsdp."""

    data_path: Any = None
    datasets: Any = None
    weights: Any = None
    ckpt_save_path: Any = None
    ckpt_load_path: Any = None
    resuming_dataset: bool = False
    use_dummy_dataset: bool = False
    checkpoint_interval: int = 10_000
    file_type: str = "arrow"
    col_name: Any = "tokens"
    tokenizer_path: Any = None
    seq_length: int = 4096
    vocab_size: int = 32_000
    bos_token: int | None = None
    eos_token: int | None = 0
    bol_token: int | None = None
    eol_token: int | None = None
    strip_tokens: Any = ""
    logical_shards: int = 1024
    num_workers: int = 1
    batch_size: int = 2
    seed: int = 2023

    @classmethod
    def of(cls, cfg: Any) -> "_Settings":
        return cls(**{field.name: getattr(cfg, field.name) for field in fields(cls) if hasattr(cfg, field.name)})


class _Counter(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    def __init__(self, length: int, vocabulary: int) -> None:
        self._length, self._vocabulary = length, vocabulary
        self._next = 0

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while True:
            line = torch.arange(self._next, self._next + self._length).remainder(self._vocabulary).int()
            self._next += self._length
            yield line, line


def _data(settings: _Settings, line_length: int) -> Rescalable:
    """The stages that the config describes."""
    bos, eos, bol, eol = (
        token(name, getattr(settings, name)) for name in ("bos_token", "eos_token", "bol_token", "eol_token")
    )
    lanes = whole("logical_shards", settings.logical_shards, least=1)
    strip = _strip_tokens(settings.strip_tokens) + [special for special in (bos, eos, bol, eol) if special is not None]
    min_length = max(1, SHORTEST - (bos is not None) - (eos is not None))
    data = Datasets(
        file_type=settings.file_type,
        columns=_columns(settings),
        tokenizer=settings.tokenizer_path,
        strip=strip,
        min_length=min_length,
    )
    root, weights = _sources(settings)
    mixture = Mixture({name: data.open(root, name) for name in weights}, weights, find=partial(data.open, root.alone()))
    lines = Pack(Delimit(mixture, bos=bos, eos=eos), seq_len=line_length, bol=bol, eol=eol)
    return Rescalable(Shuffle(lines, window=max(WINDOW, -(-SHUFFLED // lanes))), lanes=lanes, seed=settings.seed)


def _sources(settings: _Settings) -> tuple[Location, dict[str, float]]:
    """The folder that holds the datasets, and the weight of each dataset."""
    names, weights = parse_data_args(settings.datasets, settings.weights)
    if len(names) != len(weights):
        raise ConfigError(f"datasets has {len(names)} names and weights has {len(weights)} numbers; give one for each")
    folders = [name.strip("/") for name in names]
    for number, name in enumerate(folders):
        if not name or name in folders[:number]:
            raise ConfigError(
                f"datasets is {settings.datasets!r}; " + (f"{name!r} is there twice" if name else "a name is empty")
            )
    root = Location(_path("data_path", settings.data_path)).listed(*folders)
    for name in folders:
        folder = root / name
        if not folder.is_dir():
            raise ConfigError(f"dataset {name!r}: there is no folder {folder}; datasets are folders below data_path")
    return root, dict(zip(folders, weights, strict=True))


def _columns(settings: _Settings) -> list[str]:
    """The columns that may hold the documents, in the order in which they are looked for."""
    if settings.file_type not in FILE_TYPES:
        known = " or ".join(map(repr, FILE_TYPES))
        raise ConfigError(f"file_type is {settings.file_type!r}; it must be {known}")
    names = _listed("col_name", settings.col_name)
    if not names or not all(isinstance(name, str) and name for name in names):
        raise ConfigError(
            f"col_name is {settings.col_name!r}; it must be the name of a column, or several, as in 'text,tokens'"
        )
    return names


def _strip_tokens(value: Any) -> list[int]:
    try:
        items = [item for item in _listed("strip_tokens", value) if item != ""]
        return [whole("a token of strip_tokens", int(item) if isinstance(item, str) else item) for item in items]
    except ValueError:
        raise ConfigError(f"strip_tokens is {shown(value)}; it must be whole numbers, as in '0,1' or [0, 1]") from None


def _listed(name: str, value: Any) -> list[Any]:
    if isinstance(value, str):
        return [item.strip() for item in value.split(",")]
    if isinstance(value, list | tuple):
        return list(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return [value]
    raise ConfigError(f"{name} is {shown(value)}; the config must have a list there, or a string with commas")


def _path(name: str, value: Any) -> str:
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise ConfigError(f"{name} is {shown(value)}; the config must have the path of a folder there")
    return str(os.fspath(value)).rstrip("/") or "/"


def _resume(loader: Loader, load_path: str, save_path: str) -> None:
    """Resume from another run if this one has not saved yet; number steps as the trainer will."""
    step, trained = loader.state_dict()["step"], _model_step(save_path)
    if step:
        if trained not in (0, step):
            _warn(
                loader,
                f"the loader resumes from step {step} in {save_path}/{LOADER}, but the newest model in "
                f"{save_path}/checkpoints is of step {trained}; if the trainer resumes from that model, move the newer "
                "of the two away, so that no data is skipped or repeated",
            )
        return
    _refuse_pickled(save_path)
    if load_path != save_path:
        folder = Checkpoints(f"{load_path}/{LOADER}")
        states = folder.load(loader.data.lanes_of(loader.rank, loader.world_size))
        if states is None:
            _refuse_pickled(load_path)
            raise CheckpointError(
                f"resuming_dataset is set, but {load_path}/{LOADER} has no checkpoint to resume from; "
                "check ckpt_load_path, or set resuming_dataset=False to start from the beginning"
            )
        if loader.data.needs_all_lanes(states[0]):
            states = folder.read(states[0]["step"], range(loader.data.lanes))
        loader.load_state_dict(states)
    elif trained:
        _warn(
            loader,
            f"the data starts from the beginning, although {save_path}/checkpoints has a model of step {trained}: "
            f"there is no checkpoint of the loader in {save_path}/{LOADER}",
        )
    loader.load_state_dict(_renumbered(loader.state_dict(), trained))


def _warn(loader: Loader, text: str) -> None:
    """Warn on one rank only: the warning is the same on all."""
    if loader.rank == 0:
        warnings.warn(text, FmsdataWarning, stacklevel=4)


def _renumbered(state: State, step: int) -> State:
    """The same position in the stream, as another step of the trainer."""
    lanes = {lane: json.dumps({**json.loads(text), "step": step}) for lane, text in state["lanes"].items()}
    return {**state, "step": step, "history": [[step, *state["history"][-1][1:]]], "lanes": lanes}


def _model_step(path: str) -> int:
    """The step of the newest model that the trainer has saved completely; 0 if there is none."""
    saved, steps = _trainer_folders(path)
    return next((step for step in steps if "metadata.pth" in (saved / f"step_{step}_ckp").sizes()), 0)


def _refuse_pickled(path: str) -> None:
    saved, steps = _trainer_folders(path)
    for name in (saved / f"step_{steps[0]}_ckp").sizes() if steps else ():
        if PICKLED.fullmatch(name):
            raise CheckpointError(
                f"{saved}/step_{steps[0]}_ckp/{name} is a state of fms-fsdp's own loader, which can't be read here; "
                "to start the data from the beginning, move the loader_state_*.pth files of that folder away"
            )


def _trainer_folders(path: str) -> tuple[Location, list[int]]:
    """The trainer's folder of checkpoints below a path, and the steps in it, newest first."""
    saved = Location(f"{path}/checkpoints", error=CheckpointError)
    return saved, sorted((int(m[1]) for name in saved.folders() if (m := MODEL.fullmatch(name))), reverse=True)
