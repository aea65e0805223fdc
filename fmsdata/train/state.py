"""Train state: all that a run needs to go on, apart from the model and the optimizer. One file per rank.

Step, tokens and scheduler are global, the same on every rank. Generators and the loader's lanes are a rank's own.
So a run that goes on with another number of ranks gets all that is global, each rank that was there gets its own
generators back, and a new one gets generators that are seeded from the run's seed, the step and its rank.

The loader is the first argument and always part of it, so it can't be forgotten.
"""

import copy
import io
import os
import pickle
import random
import re
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from fmsdata.core.checks import whole
from fmsdata.core.keys import key_of
from fmsdata.core.state import State
from fmsdata.errors import CheckpointError, ConfigError, StateError
from fmsdata.loader.loader import StatefulDataLoader
from fmsdata.storage.location import Folder

VERSION = 1
KEYS = ("version", "rank", "world_size", "step", "tokens_seen", "generators", "scheduler", "loader", "extra")
FILE = re.compile(r"train-(0|[1-9][0-9]*)-of-([1-9][0-9]*)\.pt")
# What torch.load(weights_only=True) gives back as it was.
VALUES = {bool, int, float, complex, str, bytes, bytearray, type(None)}


VALUES |= {torch.Tensor, torch.nn.Parameter, torch.Size, torch.dtype, torch.device}


CONTAINERS = {list, tuple, set, dict, OrderedDict, Counter}


class Scheduler(Protocol):
    """What a learning-rate scheduler has, of torch or of your own."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


class Restored(NamedTuple):
    """What the trainer goes on with."""

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
) -> State:
    """This rank's train state, as plain data and tensors that share nothing with the run.

    `extra` takes whatever else the trainer wants to find again. What could not be loaded is refused here.

    >>> state = build(loader, step=500, tokens_seen=10**9, extra={"run_id": "a1b2"})     # doctest: +SKIP
    """
    _check_loader(loader)
    if scheduler is not None and not hasattr(scheduler, "state_dict"):
        raise ConfigError(f"the scheduler is {scheduler!r}; it must have a state_dict(), as those of torch have")
    state = {
        "version": VERSION,
        "rank": loader.rank,
        "world_size": loader.world_size,
        "step": whole("step", step),
        "tokens_seen": whole("tokens_seen", tokens_seen),
        "generators": _generators(),
        "scheduler": None if scheduler is None else scheduler.state_dict(),
        "loader": loader.state_dict(),
        "extra": _checked_extra(extra),
    }
    return dict(_loaded(_dumped(state)))


def save(folder: str | os.PathLike[str], state: State, *, storage_options: Mapping[str, Any] | None = None) -> str:
    """Write one rank's train state into a folder on any fsspec filesystem, whole or not at all, and tell where."""
    _check_state(state)
    name = f"train-{state['rank']}-of-{state['world_size']}.pt"
    files = Folder(folder, storage_options or {}, CheckpointError)
    files.write(name, _dumped(state))
    return f"{files}/{name}"


def load(
    folder: str | os.PathLike[str],
    loader: StatefulDataLoader | None = None,
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> list[State]:
    """The train states in a folder: all ranks', or only those that this loader's rank needs.

    A rank needs rank 0's, its own, and those of the ranks that had its lanes.
    """
    files = Folder(folder, storage_options or {}, CheckpointError)
    found = [(int(match[1]), int(match[2])) for name in files.files("") if (match := FILE.fullmatch(name))]
    worlds = sorted({world_size for _, world_size in found})
    if not worlds:
        raise CheckpointError(f"{folder} holds no train state (train-<rank>-of-<ranks>.pt): give a folder of `save`")
    if len(worlds) > 1:
        raise CheckpointError(
            f"{folder} holds the train states of runs on {' and '.join(map(str, worlds))} ranks: "
            "remove those that do not belong to this checkpoint"
        )
    (world_size,) = worlds
    if odd := sorted(set(range(world_size)) ^ {rank for rank, _ in found}):
        raise CheckpointError(
            f"{folder}: train-{odd[0]}-of-{world_size}.pt {'is missing' if odd[0] < world_size else 'has no place'}: "
            "the checkpoint is not whole; bring the file back, or go on from another checkpoint"
        )
    needed = range(world_size) if loader is None else _needed(loader, world_size)
    return [_read(files, rank, world_size) for rank in needed]


def restore(
    states: State | Sequence[State], loader: StatefulDataLoader, *, scheduler: Scheduler | None = None
) -> Restored:
    """Put the run back where it was: loader, scheduler and generators. All of it, or nothing.

    Takes this rank's own state, or the list that `load` gives, of any number of ranks. `extra` is rank 0's.

    A generator that was not saved (on a new rank, or of a new device) is seeded with
    `fmsdata.keys.key_of(seed, "train state", step, rank, name)`, where `name` is python, numpy, torch, cuda:0, ...
    """
    _check_loader(loader)
    by_rank = _belonging_together(states)
    first = by_rank[min(by_rank)]
    if (first["scheduler"] is None) != (scheduler is None):
        raise StateError(
            "the train state has a scheduler and none was given: pass restore(..., scheduler=...), "
            "or set state['scheduler'] = None in all states to go on without it"
            if scheduler is None
            else "a scheduler was given and the train state has none: leave it out, and set it to the step yourself"
        )
    if loader.rank < first["world_size"] and loader.rank not in by_rank:
        raise StateError(
            f"rank {loader.rank} of {first['world_size']} was saved, but its state is not among those given "
            f"(ranks {', '.join(map(str, sorted(by_rank)))}): its generators would be lost; use load(folder, loader)"
        )
    own = by_rank.get(loader.rank, {}).get("generators", {})
    ready = _ready_generators(own, loader.data.seed, first["step"], loader.rank)
    loader_states = [state["loader"] for state in by_rank.values()]
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
            f"the loader is {loader!r}; a train state holds the position in the data: give the StatefulDataLoader"
        )


def _checked_extra(extra: Any) -> dict[str, Any]:
    if not isinstance(extra, Mapping | None) or not all(isinstance(name, str) for name in extra or {}):
        raise ConfigError(f"extra is {extra!r}; it must be a dict with names as keys")
    for name in extra or {}:
        if name in KEYS:
            raise ConfigError(f"extra.{name}: {name!r} is a key of the train state itself; use another name")
    return dict(extra or {})


def _dumped(state: State) -> bytes:
    """The state as a file, or an error that names what can't be loaded from it."""
    leaves = list(_leaves(state, (), ()))
    for key, value in leaves:
        if isinstance(value, torch.Tensor) and value.is_meta:
            raise ConfigError(f"{key} is a tensor on the meta device, which has no data; save a real one")
        if type(value) not in VALUES:
            raise ConfigError(
                f"{key} is a {_kind(value)}, which torch.load(weights_only=True) would refuse; "
                "save numbers, strings, lists, dicts or tensors (.item() or .tolist() of what numpy made)"
            )
    data = _written(state)
    try:
        _loaded(data)
    except Exception as whole_cause:
        for key, value in leaves:
            try:
                _loaded(_written(value))
            except Exception as cause:
                raise ConfigError(f"{key} can't be loaded again with torch.load(weights_only=True)") from cause
        raise ConfigError("the train state can't be loaded again with torch.load(weights_only=True)") from whole_cause
    return data


def _leaves(value: Any, path: tuple[str, ...], above: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
    """All that is not a container, with dotted keys. The keys of dicts too, for they are saved as well."""
    if type(value) not in CONTAINERS:
        yield ".".join(path), value
        return
    if id(value) in above:
        raise ConfigError(f"{'.'.join(path)} holds itself, so it can't be checked; save a copy without the circle")
    for name, one in value.items() if isinstance(value, dict) else enumerate(value):
        inner = (*path, str(name))
        if isinstance(value, dict):
            yield from _leaves(name, inner, ())
        yield from _leaves(one, inner, (*above, id(value)))


def _written(value: Any) -> bytes:
    """The value as torch.save writes it, with the checksums by which `_loaded` finds damage."""
    buffer, checksums = io.BytesIO(), torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)
    try:
        torch.save(value, buffer)
    finally:
        torch.serialization.set_crc32_options(checksums)
    return buffer.getvalue()


def _loaded(data: bytes) -> Any:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        if damaged := archive.testzip():
            raise ValueError(f"the checksum of {damaged} is wrong")
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def _read(files: Folder, rank: int, world_size: int) -> State:
    name = f"train-{rank}-of-{world_size}.pt"
    data = files.read(name)
    try:
        state = dict(_loaded(data))
        _check_state(state)
        if (state["rank"], state["world_size"]) != (rank, world_size):
            raise ValueError(f"it is of rank {state['rank']} of {state['world_size']}, and was renamed")
    except StateError as cause:
        raise CheckpointError(f"{files}/{name}: {cause}") from None
    except pickle.UnpicklingError as cause:
        raise CheckpointError(f"{files}/{name} holds more than plain data and tensors, so it is not loaded") from cause
    except Exception as cause:  # torch and zip have errors of all kinds for a file that is not whole
        raise CheckpointError(
            f"{files}/{name} is torn or damaged: {_line(cause)}; go on from another checkpoint"
        ) from cause
    return state


def _needed(loader: StatefulDataLoader, world_size: int) -> list[int]:
    _check_loader(loader)
    lanes = loader.data.lanes_of(loader.rank, loader.world_size)
    own = {loader.rank} if loader.rank < world_size else set()
    return sorted({0} | own | {lane % world_size for lane in lanes})


def _check_state(state: Any) -> None:
    if not isinstance(state, Mapping) or type(state.get("version")) is not int:
        raise StateError("this is not a train state: it has no version; give what `build` or `load` made")
    if state["version"] != VERSION:
        raise StateError(
            f"the train state has version {state['version']} and this fmsdata reads version {VERSION}; "
            + ("use a newer fmsdata" if state["version"] > VERSION else "use the fmsdata that wrote it")
        )
    if odd := sorted(map(str, set(KEYS) ^ set(state))):
        raise StateError(
            f"the train state {'lacks' if odd[0] in KEYS else 'has an unknown'} key {odd[0]!r}: it was edited; "
            "what is your own goes into extra"
        )


def _belonging_together(states: State | Sequence[State]) -> dict[int, State]:
    """The states by rank, of one moment of one run."""
    if not states or not isinstance(states, Mapping | list | tuple):
        raise StateError(f"a train state is a dict, or a list of ranks' dicts, not {states!r}")
    many: list[State] = [dict(states)] if isinstance(states, Mapping) else list(states)
    for state in many:
        _check_state(state)
    by_rank = {state["rank"]: state for state in many}
    if len(by_rank) < len(many):
        raise StateError("a rank's train state is given twice; give each rank's once")
    for name in ("world_size", "step", "tokens_seen", "scheduler"):
        for state in many:
            if not _same(state[name], many[0][name]):
                told = "" if name == "scheduler" else f" ({many[0][name]} and {state[name]})"
                raise StateError(
                    f"{name} of rank {many[0]['rank']} and of rank {state['rank']} differ{told}: "
                    "it is the same on all ranks of one run at one step; give the states of one checkpoint"
                )
    return by_rank


def _same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other) or repr(one) == repr(other)  # a nan is not equal to itself


def _torch_generators() -> dict[str, torch.Generator]:
    """The generators of torch on this machine, by device."""
    generators = {"torch": torch.default_generator}
    if torch.cuda.is_available():
        torch.cuda.init()  # type: ignore[no-untyped-call]
        generators |= {f"cuda:{device}": one for device, one in enumerate(torch.cuda.default_generators)}
    return generators


def _generators() -> dict[str, Any]:
    """The state of every global generator, as plain data and tensors."""
    drawn: Any = np.random.get_state(legacy=False)  # noqa: NPY002  # the global one, which others draw from
    if drawn["bit_generator"] != "MT19937":
        raise ConfigError(
            f"generators.numpy is a {drawn['bit_generator']}; numpy's global generator can be saved as MT19937 only"
        )
    drawn["state"]["key"] = drawn["state"]["key"].tolist()
    generators = {"python": random.getstate(), "numpy": drawn}
    return generators | {name: one.get_state() for name, one in _torch_generators().items()}


def _ready_generators(saved: Mapping[str, Any], seed: int, step: int, rank: int) -> list[Callable[[], object]]:
    """Calls that set every generator that is here, to what was saved of it or else by the rule for new ones.

    All is tried on generators apart first, so that a damaged state leaves the global ones as they are.
    """

    def key(name: str) -> int:
        return key_of(seed, "train state", step, rank, name)

    try:
        python, numpy = random.Random(key("python")), np.random.RandomState(np.random.MT19937(key("numpy")))
        if saved:
            python.setstate(saved["python"])
            inner = saved["numpy"]["state"]
            words = np.array(inner["key"], np.uint32)
            numpy.set_state({**saved["numpy"], "state": {**inner, "key": words}})
        ready: list[Callable[[], object]] = [
            partial(random.setstate, python.getstate()),
            partial(np.random.set_state, numpy.get_state(legacy=False)),
        ]
        for name, generator in _torch_generators().items():
            apart = torch.Generator(generator.device).manual_seed(key(name))
            if name in saved:
                apart.set_state(saved[name])
            ready.append(partial(generator.set_state, apart.get_state()))
    except (KeyError, TypeError, ValueError, IndexError, RuntimeError) as cause:
        raise StateError(f"the generators of rank {rank} can't be restored: {cause!r}") from cause
    return ready


def _kind(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def _line(cause: Exception) -> str:
    return (str(cause) or type(cause).__name__).splitlines()[0]
