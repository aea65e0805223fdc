"""Train state: everything that a run needs to resume, apart from the model and the optimizer.

Each rank has one file. Step, tokens and scheduler are global, the same on every rank. Generators
and the loader's lanes belong to a rank. A run that resumes on a different number of ranks restores
everything that is global. Each rank that existed before restores its own generators, and a new rank
seeds them from the run's seed, the step and its rank.

The loader is the first argument and always part of the state, so it can't be forgotten.
"""

import copy
import os
import pickle
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from fmsdata.core.checks import whole
from fmsdata.core.state import EDITED, State, is_count, require_version
from fmsdata.core.wording import shown
from fmsdata.errors import CheckpointError, ConfigError, StateError
from fmsdata.loader.loader import StatefulDataLoader
from fmsdata.loader.rows import RowLoader
from fmsdata.storage.location import Location
from fmsdata.train.generators import generator_states, prepare_generators
from fmsdata.train.serialization import dump, parse

VERSION = 1
KEYS = ("version", "rank", "world_size", "step", "tokens_seen", "generators", "scheduler", "loader", "extra")
FILE = re.compile(r"train-(0|[1-9][0-9]*)-of-([1-9][0-9]*)\.pt")


class Scheduler(Protocol):
    """A learning-rate scheduler, of torch or of your own."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


class Restored(NamedTuple):
    """What the trainer resumes with."""

    step: int
    tokens_seen: int
    extra: dict[str, Any]


def build(
    loader: StatefulDataLoader,
    *,
    step: int,
    tokens_seen: int,
    scheduler: Scheduler | None = None,
    extra: Mapping[str, Any] | None = None,
    at: State | None = None,
) -> State:
    """This rank's train state, as plain data and tensors that share nothing with the run.

    `extra` takes whatever else the trainer needs after a resume. Values that could not be loaded
    again are refused here. `at` is an earlier state of a loader of rows, that of the last batch that
    was trained, if batches are in flight: see `EpochSampler.state_dict`.

    >>> state = build(loader, step=500, tokens_seen=10**9)     # doctest: +SKIP
    """
    _check_loader(loader)
    if scheduler is not None and not hasattr(scheduler, "state_dict"):
        raise ConfigError(
            f"the scheduler is {shown(scheduler)}; it must have a state_dict(), like the schedulers of torch"
        )
    state = {
        "version": VERSION,
        "rank": loader.rank,
        "world_size": loader.world_size,
        "step": whole("step", step),
        "tokens_seen": whole("tokens_seen", tokens_seen),
        "generators": generator_states(),
        "scheduler": None if scheduler is None else scheduler.state_dict(),
        "loader": loader.state_dict() if at is None else _state_at(loader, at),
        "extra": _checked_extra(extra),
    }
    return dict(parse(dump(state)))


def save(folder: str | os.PathLike[str], state: State, *, storage_options: Mapping[str, Any] | None = None) -> str:
    """Write one rank's train state into a folder on any fsspec filesystem, and return its path.

    The file is written whole or not at all.
    """
    _check_state(state)
    name = f"train-{state['rank']}-of-{state['world_size']}.pt"
    files = Location(folder, storage_options, error=CheckpointError)
    (files / name).write_bytes(dump(state))
    return f"{files}/{name}"


def load(
    folder: str | os.PathLike[str],
    loader: StatefulDataLoader | None = None,
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> list[State]:
    """The train states in a folder: of all ranks, or only those that this loader's rank needs.

    A rank needs the state of rank 0, its own, and those of the ranks that had its lanes.
    """
    files = Location(folder, storage_options, error=CheckpointError)
    found = [(int(match[1]), int(match[2])) for name in files.sizes() if (match := FILE.fullmatch(name))]
    worlds = sorted({world_size for _, world_size in found})
    if not worlds:
        raise CheckpointError(f"{folder} holds no train state (train-<rank>-of-<ranks>.pt): pass a folder of `save`")
    if len(worlds) > 1:
        raise CheckpointError(
            f"{folder} holds the train states of runs on {' and '.join(map(str, worlds))} ranks: "
            "remove the files that do not belong to this checkpoint"
        )
    (world_size,) = worlds
    ranks = {rank for rank, _ in found}
    missing = next((rank for rank in range(world_size) if rank not in ranks), None)
    odd = max(ranks) if missing is None else missing
    if missing is not None or odd >= world_size:
        problem = "is missing" if odd < world_size else "does not belong there"
        raise CheckpointError(
            f"{folder}: train-{odd}-of-{world_size}.pt {problem}: "
            "the checkpoint is not complete; restore the file, or resume from another checkpoint"
        )
    needed = range(world_size) if loader is None else _needed(loader, world_size)
    states = [_read(files, rank, world_size) for rank in needed]
    if loader is None or isinstance(loader, RowLoader) or not loader.data.needs_all_lanes(states[0]["loader"]):
        return states
    return [_read(files, rank, world_size) for rank in range(world_size)]


def restore(
    states: State | Sequence[State], loader: StatefulDataLoader, *, scheduler: Scheduler | None = None
) -> Restored:
    """Restore the loader, the scheduler and the generators: all of them, or none.

    Takes this rank's own state, or the list that `load` returns, of any number of ranks. `extra` is
    rank 0's.

    A generator that was not saved (on a new rank, or of a new device) is seeded with
    `fmsdata.keys.key_of(seed, "train state", step, rank, name)`, where `name` is python, numpy,
    torch, cuda:0, ...
    """
    _check_loader(loader)
    by_rank = _belonging_together(states)
    first = by_rank[min(by_rank)]
    if (first["scheduler"] is None) != (scheduler is None):
        raise StateError(
            "the train state has a scheduler and none was given: pass restore(..., scheduler=...), "
            "or set state['scheduler'] = None in all states to resume without it"
            if scheduler is None
            else "a scheduler was given and the train state has none: leave it out, and set it to the step yourself"
        )
    if loader.rank < first["world_size"] and loader.rank not in by_rank:
        raise StateError(
            f"rank {loader.rank} of {first['world_size']} was saved, but its state is not among those given "
            f"(ranks {', '.join(map(str, sorted(by_rank)))}): its generators would be lost; use load(folder, loader)"
        )
    own = by_rank.get(loader.rank, {}).get("generators", {})
    ready = prepare_generators(own, loader.seed, first["step"], loader.rank)
    loader_states = states["loader"] if isinstance(states, Mapping) else [each["loader"] for each in by_rank.values()]
    if scheduler is None:
        loader.load_state_dict(loader_states)
    else:
        before = copy.deepcopy(scheduler.state_dict())
        try:
            scheduler.load_state_dict(copy.deepcopy(first["scheduler"]))
            loader.load_state_dict(loader_states)
        except BaseException:
            scheduler.load_state_dict(before)
            raise
    for set_generator in ready:
        set_generator()
    return Restored(first["step"], first["tokens_seen"], copy.deepcopy(first["extra"]))


def _check_loader(loader: Any) -> None:
    if not isinstance(loader, StatefulDataLoader):
        raise ConfigError(
            f"the loader is {shown(loader)}; a train state holds the position in the data: pass the StatefulDataLoader"
        )


def _checked_extra(extra: Any) -> dict[str, Any]:
    if not isinstance(extra, Mapping | None) or not all(isinstance(name, str) for name in extra or {}):
        raise ConfigError(f"extra is {shown(extra)}; it must be a dict with strings as keys")
    for name in extra or {}:
        if name in KEYS:
            raise ConfigError(f"extra.{name}: {name!r} is a key of the train state itself; use a different name")
    return dict(extra or {})


def _read(files: Location, rank: int, world_size: int) -> State:
    name = f"train-{rank}-of-{world_size}.pt"
    data = (files / name).read_bytes()
    try:
        state = dict(parse(data))
        _check_state(state)
        if (state["rank"], state["world_size"]) != (rank, world_size):
            raise ValueError(f"it is the state of rank {state['rank']} of {state['world_size']}; the file was renamed")
    except StateError as cause:
        raise CheckpointError(f"{files}/{name}: {cause}") from None
    except pickle.UnpicklingError as cause:
        raise CheckpointError(f"{files}/{name} holds more than plain data and tensors, so it is not loaded") from cause
    except Exception as cause:  # torch and zipfile raise many kinds of errors here
        raise CheckpointError(
            f"{files}/{name} is truncated or damaged: {_line(cause)}; resume from another checkpoint"
        ) from cause
    return state


def _state_at(loader: StatefulDataLoader, at: State) -> State:
    if not isinstance(loader, RowLoader):
        raise ConfigError("at is for a loader of rows; for a stream, call build before the next batch is requested")
    return loader.state_dict(at=at)


def _needed(loader: StatefulDataLoader, world_size: int) -> list[int]:
    _check_loader(loader)
    lanes = () if isinstance(loader, RowLoader) else loader.data.lanes_of(loader.rank, loader.world_size)
    own = {loader.rank} if loader.rank < world_size else set()
    return sorted({0} | own | {lane % world_size for lane in lanes})


def _check_state(state: Any) -> None:
    if not isinstance(state, Mapping) or type(state.get("version")) is not int:
        raise StateError("this is not a train state: it has no version; pass what `build` or `load` returned")
    require_version(state, VERSION, "the train state")
    if odd := sorted(map(str, set(KEYS) ^ set(state))):
        raise StateError(
            f"the train state {'lacks' if odd[0] in KEYS else 'has an unknown'} key {odd[0]!r}: it was edited; "
            "put your own values into extra"
        )
    for name in ("rank", "world_size", "step", "tokens_seen"):
        if not is_count(state[name]):
            raise StateError(f"{name} of the train state is {shown(state[name])}, expected a count: {EDITED}")
    for name in ("generators", "loader", "extra"):
        if not isinstance(state[name], Mapping):
            raise StateError(f"{name} of the train state is {shown(state[name])}, expected a dict: {EDITED}")
    if state["rank"] >= state["world_size"]:
        raise StateError(f"the train state is of rank {state['rank']} of {state['world_size']}: {EDITED}")


def _belonging_together(states: State | Sequence[State]) -> dict[int, State]:
    """The states by rank, all of the same step of the same run."""
    if not states or not isinstance(states, Mapping | list | tuple):
        raise StateError(f"a train state is a dict, or a list of dicts of several ranks, not {shown(states)}")
    many: list[State] = [dict(states)] if isinstance(states, Mapping) else list(states)
    for state in many:
        _check_state(state)
    by_rank = {state["rank"]: state for state in many}
    if len(by_rank) < len(many):
        raise StateError("the train state of a rank is given twice; pass each rank's state once")
    for name in ("world_size", "step", "tokens_seen", "scheduler"):
        for state in many:
            if not _same(state[name], many[0][name]):
                values = "" if name == "scheduler" else f" ({many[0][name]} and {state[name]})"
                raise StateError(
                    f"{name} of rank {many[0]['rank']} and of rank {state['rank']} differ{values}: "
                    "it must be the same on all ranks; pass the states of one checkpoint"
                )
    return by_rank


def _same(value: Any, other: Any) -> bool:
    if type(value) is not type(other):
        return False
    if isinstance(value, torch.Tensor):
        return torch.equal(value, other)
    if isinstance(value, dict):
        return value.keys() == other.keys() and all(_same(value[name], other[name]) for name in value)
    if isinstance(value, list | tuple):
        return len(value) == len(other) and all(map(_same, value, other))
    return bool(value == other) or repr(value) == repr(other)  # a nan is not equal to itself


def _line(cause: Exception) -> str:
    return (str(cause) or type(cause).__name__).splitlines()[0]
