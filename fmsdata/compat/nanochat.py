"""A drop-in replacement for the pretraining loader of nanochat: users change one import.

Files, tokenizer and training loop are the same: every row begins with BOS, and documents are placed
where they fit best. What does not fit is not cropped: a row that is not full ends with padding that
the loss ignores, and a document that is longer than a row is continued in another one. Order and
state are those of this project: exact, and the same at any world size.
"""

import json
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from fmsdata.compat.nanochat_tokenizer import bos_of, opened_tokenizer
from fmsdata.core.checks import whole
from fmsdata.core.state import Restoring, State, number
from fmsdata.errors import ConfigError, StateError
from fmsdata.loader.loader import StatefulDataLoader
from fmsdata.planning.schedule import Schedule, Segment
from fmsdata.run.rescalable import Rescalable
from fmsdata.stages.mixture import Mixture
from fmsdata.stages.pack import Pack
from fmsdata.stages.shard_reader import ShardReader
from fmsdata.stages.tokenize import Tokenize
from fmsdata.tasks.batch import Batch, widen

Paths: TypeAlias = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

BASE = "NANOCHAT_BASE_DIR"
FOLDERS = ("base_data_climbmix", "base_data")  # below the base folder, the newest first
SPLITS = ("train", "val")
COLUMN = "text"
LANES = 32
WINDOW, FIRST = 128, 32  # rows of a lane that are packed together, and the number at the start
IGNORED = -1  # the target that the loss of nanochat ignores
GATHER_EVERY = 16  # batches between two exchanges of positions; a resume reads these again
NOWHERE = -1  # for logs: documents come in random order, so there is no file that a run is at


class BatchTuple(tuple[Any, ...]):
    """`(inputs, targets)` or `(inputs, targets, state)`, which also has them by name."""

    NAMES = ("input_ids", "targets", "state")

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(self.NAMES.index(key) if key in self.NAMES else key)


def tokenizing_distributed_data_loader_bos_bestfit(*args: Any, **kwargs: Any) -> "Batches":
    """The batches of one rank, endlessly: `(inputs, targets)`, int64, `(B, T)`.

    Takes the arguments of `tokenizing_distributed_data_loader_with_state_bos_bestfit`.

    >>> loader = tokenizing_distributed_data_loader_bos_bestfit(     # doctest: +SKIP
    ...     tokenizer, 32, 2048, split="val")
    >>> for inputs, targets in loader:                               # doctest: +SKIP
    ...     loss = model(inputs, targets)
    """
    return _loader(Batches, *args, **kwargs)


def tokenizing_distributed_data_loader_with_state_bos_bestfit(*args: Any, **kwargs: Any) -> "BatchesWithState":
    """The batches of one rank, each with the state to resume after it: `(inputs, targets, state)`.

    By the names of the code of nanochat: `tokenizer`, `B`, `T`, `split`, `device`,
    `resume_state_dict`. By those of its documentation: `tokenizer`, `batch_size`, `sequence_len`,
    `data_shards`, `world_size`, `rank`, `state`. Without `data_shards` the files are those that
    nanochat has downloaded. `split` is "train", all files but the last, or "val", the last one.

    `lanes` is fixed for a run and at least the world size. `bos` is the token that begins every
    row, if the tokenizer does not name it. `pending` is the number of batches that the trainer has
    taken but not trained on when it saves. `num_workers` processes read.

    >>> loader = tokenizing_distributed_data_loader_with_state_bos_bestfit(     # doctest: +SKIP
    ...     tokenizer, 32, 2048, split="train", device="cuda", resume_state_dict=None, pending=1)
    >>> inputs, targets, state = next(loader)                                   # doctest: +SKIP
    """
    return _loader(BatchesWithState, *args, **kwargs)


class Batches:
    """An iterator over batches. `close()` ends its thread and its processes."""

    def __init__(self, data: Rescalable, options: State, states: list[State], pending: int) -> None:
        self.loader = StatefulDataLoader(data, task=NextToken(), outputs=["epochs"], **options)
        if states:
            self.loader.load_state_dict([_loader_state(state, data.lanes) for state in states])
        if pending:
            raise ConfigError(f"pending is {pending}, but these batches come without a state; leave it out")

    def __repr__(self) -> str:
        return f"{type(self).__name__} of {self.loader!r}"

    def __iter__(self) -> Iterator[BatchTuple]:
        return self

    def __next__(self) -> BatchTuple:
        return BatchTuple(self._take()[:2])

    def _take(self) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Inputs, targets, and the epoch, from 1, of the newest document in them."""
        fields = next(self.loader)
        epoch = 1 + max(max(epochs) for epochs in fields["epochs"])
        return fields["input_ids"], fields["targets"], epoch

    def close(self) -> None:
        """End the thread and the processes that read ahead."""
        self.loader.close()


class BatchesWithState(Batches):
    """An iterator over batches with states.

    A state is plain data, and a few kilobytes. In a run of torch.distributed it covers all ranks,
    so that it is enough to save that of one: the ranks exchange their positions every few batches,
    and the state counts the batches since. Otherwise it is that of this rank.
    """

    def __init__(self, data: Rescalable, options: State, states: list[State], pending: int) -> None:
        group = None if options.get("rank") is not None else _group_of_all_ranks()
        super().__init__(data, {**options, "process_group": group}, states, 0)
        self._gathers = group is not None
        self._since = 0  # batches since the positions were exchanged
        self._saved = self.loader.state_dict(gather=self._gathers)
        self._states = deque([self._state(1)], maxlen=pending + 1)

    def __next__(self) -> BatchTuple:
        inputs, targets, epoch = self._take()
        self._since += 1
        if not self._gathers or self._since == GATHER_EVERY:
            self._saved, self._since = self.loader.state_dict(gather=self._gathers), 0
        self._states.append(self._state(epoch))
        return BatchTuple((inputs, targets, self._states[0]))

    def _state(self, epoch: int) -> State:
        return {
            "epoch": epoch,
            "pq_idx": NOWHERE,
            "rg_idx": NOWHERE,
            "batches": self._since,
            "loader": self._saved,
        }


class NextToken:
    """The task of the model: each token is predicted from those before it, and padding is not."""

    extra_tokens = 1
    needs_lines = False

    def __repr__(self) -> str:
        return "NextToken()"

    def __call__(self, batch: Batch) -> dict[str, torch.Tensor]:
        targets = widen(batch.tokens[:, 1:])
        for row, padding in enumerate(batch.padding):
            if padding:
                targets[row, -padding:] = IGNORED
        return {"input_ids": widen(batch.tokens[:, :-1]), "targets": targets}


Kind = TypeVar("Kind", bound=Batches)


def _loader(
    kind: type[Kind],
    tokenizer: Any = None,
    B: int | None = None,
    T: int | None = None,
    split: str | None = None,
    tokenizer_threads: int = 4,  # noqa: ARG001
    tokenizer_batch_size: int = 128,  # noqa: ARG001
    device: Any = None,
    resume_state_dict: Any = None,
    buffer_size: int = 1000,  # noqa: ARG001
    *,
    data_shards: Paths | None = None,
    batch_size: int | None = None,
    sequence_len: int | None = None,
    world_size: int | None = None,
    rank: int | None = None,
    state: Any = None,
    bos: int | None = None,
    lanes: int = LANES,
    seed: int = 42,
    num_workers: int = 0,
    pending: int = 0,
) -> Kind:
    rows = whole("B", _one_of("B", B, "batch_size", batch_size), least=1)
    length = whole("T", _one_of("T", T, "sequence_len", sequence_len), least=1)
    if resume_state_dict is not None and state is not None:
        raise ConfigError("resume_state_dict and state are both given; they are two names of one thing: give one")
    resumed = state if resume_state_dict is None else resume_state_dict
    if tokenizer is None:
        raise ConfigError("tokenizer is missing; give the object that nanochat's get_tokenizer() returns")
    reader = ShardReader(_files(data_shards, split), name=split or "documents", column=COLUMN)
    documents = Mixture({reader.name: Tokenize(reader, opened_tokenizer(tokenizer))}, {reader.name: 1})
    begin = bos_of(tokenizer) if bos is None else bos
    lines = Pack(documents, seq_len=length + 1, mode="bestfit", bol=begin, pad=begin, window=WINDOW, first_window=FIRST)
    return kind(
        Rescalable(lines, lanes=lanes, seed=seed),
        {
            "batch_size": rows,
            "device": _default_device() if device is None else device,
            "rank": rank,
            "world_size": world_size,
            "num_workers": num_workers,
        },
        [] if resumed is None else list(resumed) if isinstance(resumed, list | tuple) else [resumed],
        whole("pending", pending),
    )


def _one_of(name: str, value: Any, other: str, other_value: Any) -> Any:
    """The value of an argument that has two names."""
    if (value is None) == (other_value is None):
        both = "are both given; they are two names of one thing: give one" if value is not None else "are missing"
        raise ConfigError(f"{name} and {other} {both}")
    return other_value if value is None else value


def _default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _files(shards: Paths | None, split: str | None) -> Paths:
    """The files of a split, or all of them."""
    if split is None and shards is not None:
        return shards
    if split not in SPLITS:
        raise ConfigError(f"split is {split!r}; it must be 'train' or 'val', or left out if data_shards is given")
    shards = _downloaded() if shards is None else shards
    if isinstance(shards, str | os.PathLike):
        folder = Path(shards)
        if not folder.is_dir():
            raise ConfigError(f"data_shards is {str(folder)!r}, not a folder; with split, give a folder or a list")
        files: list[Any] = sorted(folder.glob("*.parquet"))
    else:
        files = list(shards)
    if len(files) < 2:
        raise ConfigError(
            f"split is {split!r}, and there are {len(files)} files ({', '.join(map(str, files)) or shards}); "
            "the last file is for validation, and the others are for training: at least 2 are needed"
        )
    return files[:-1] if split == "train" else files[-1:]


def _downloaded() -> Path:
    """The folder that nanochat downloads to."""
    base = Path(os.environ.get(BASE) or Path.home() / ".cache" / "nanochat")
    for name in FOLDERS:
        if (base / name).is_dir():
            return base / name
    raise ConfigError(
        f"{base / FOLDERS[0]}: there is no such folder; download the data with nanochat, "
        f"set {BASE}, or name the files with data_shards"
    )


def _group_of_all_ranks() -> ProcessGroup | None:
    """A group that exchanges positions without the GPU; None without torch.distributed.

    All ranks must call this.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    group: ProcessGroup = dist.new_group(backend="gloo")
    return group


def _loader_state(state: Any, lanes: int) -> State:
    """The state of the loader in a state that came with a batch."""
    if not isinstance(state, Mapping) or "loader" not in state:
        own = isinstance(state, Mapping) and "pq_idx" in state
        raise StateError(
            "this is a state of nanochat's own loader, which is only approximate and can't be read here; "
            "leave it out to start the data from the beginning"
            if own
            else f"the state is a {type(state).__name__} without 'loader'; give a state that came with a batch"
        )
    with Restoring("the state"):
        batches, saved = number(dict(state), "batches"), state["loader"]
        return _later(saved, batches, lanes) if batches else dict(saved)


def _later(saved: State, batches: int, lanes: int) -> State:
    """A state this many batches later: the schedule says how many lines of each lane they hold."""
    step = number(saved, "step") + batches
    lines = Schedule([Segment(*segment) for segment in saved["history"]], lanes).lines(step).tolist()
    texts = {}
    for name, text in saved["lanes"].items():
        lane = json.loads(text)
        more = lines[int(name)] - number(lane, "lines")
        texts[name] = json.dumps({**lane, "step": step, "lines": lane["lines"] + more, "skip": lane["skip"] + more})
    return {**saved, "step": step, "lanes": texts}
