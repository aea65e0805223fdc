"""States and folders of checkpoints."""

import copy
import hashlib
import json
import shutil
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

import fmsdata
from fmsdata.errors import FmsdataError
from fmsdata.run.replay import Replay
from tests.fuzz.mutations import Rng, damage_bytes, damage_data, damage_numbers, edge
from tests.helpers import closed, documents, maker, opened, write_source

Make = Callable[[int, int], fmsdata.StatefulDataLoader]
MIX = {"web": {"weight": 7}, "wiki": {"weight": 3}}
OTHER_MIX = {"web": {"weight": 1}, "wiki": {"weight": 9}}
ENDING = {"web": {"weight": 7}, "wiki": {"weight": 3, "max_epochs": 2}}
PHASES = [{"until_tokens": 3000, "weights": {"web": 1}}, {"until_tokens": 9000, "weights": {"web": 1, "wiki": 4}}]
SMALL: dict[str, Any] = {"lanes": 4, "loader__batch_size": 2, "loader__prefetch": 0}


class Twice(fmsdata.Stage):
    """Some documents come twice."""

    def transform(self, item: fmsdata.Item, key: int) -> list[fmsdata.Item]:  # noqa: ARG002
        return [item] if len(item.tokens) % 3 else [item, item]


def by_hand(folder: Path) -> Make:
    """A pipeline of other stages than YAML builds, with a mixture in a mixture."""
    web, wiki = (fmsdata.ShardReader(folder / name) for name in ("web", "wiki"))
    inner = fmsdata.Mixture({"a": wiki, "b": fmsdata.ShardReader(folder / "web", name="b")}, {"a": 1, "b": 1})
    mixed = fmsdata.Mixture({"web": Twice(web), "inner": inner}, {"web": 1, "inner": 2})
    lines = fmsdata.Pack(fmsdata.Filter(mixed, keep), seq_len=16)
    data = fmsdata.Rescalable(lines, lanes=4, seed=1)
    return lambda rank, size: fmsdata.StatefulDataLoader(data, batch_size=2, rank=rank, world_size=size, prefetch=0)


def keep(item: fmsdata.Item) -> bool:
    return len(item.tokens) != 5


class States:
    """Damaged states. A loader that takes one reads on from it, and can be saved and restored there."""

    def __init__(self, folder: Path) -> None:
        rng = np.random.default_rng(1)
        write_source(folder / "web", documents(rng, 60), layout="list")
        write_source(folder / "wiki", documents(rng, 23), layout="batch", shards=2)
        usual, edited = maker(folder, sources=MIX, **SMALL), maker(folder, sources=OTHER_MIX, **SMALL)
        ending = maker(folder, sources=ENDING, phases=PHASES, pack__mode="pad", pack__pad=1, **SMALL)
        self._cases: list[tuple[Make, Make, list[dict[str, Any]]]] = []  # saved by one, loaded by the other
        for make in (usual, edited, ending, by_hand(folder)):
            self._cases += [(make, make, _saved(make, steps)) for steps in (0, 1, 7, 60)]
        between = _saved(edited, 5, _saved(usual, 33))
        self._cases += [(edited, edited, between), (edited, usual, between), (usual, edited, _saved(usual, 9))]
        self._cases += [(ending, usual, _saved(ending, 9)), (usual, ending, between)]

    def attempt(self, rng: Rng) -> None:
        _, make, states = self._cases[rng.integers(len(self._cases))]
        damaged = [*states]
        which = int(rng.integers(len(states)))
        damaged[which] = damage_state(rng, states[which])
        loader = make(0, 1)
        before = loader.state_dict()
        try:
            loader.load_state_dict(damaged if rng.random() < 0.98 else damaged[0])
        except FmsdataError:
            assert loader.state_dict() == before, "a refused state changed the loader"
            raise
        _read_on(loader, make)


def _saved(make: Make, steps: int, states: list[dict[str, Any]] | None = None) -> list[dict[str, Any]]:
    """The states of two ranks after some steps."""
    saved = []
    for rank in range(2):
        loader = make(rank, 2)
        if states is not None:
            loader.load_state_dict(states)
        for _ in islice(loader, steps):
            pass
        saved.append(json.loads(json.dumps(loader.state_dict())))
    return saved


def damage_state(rng: Rng, state: dict[str, Any]) -> Any:
    """Damage to the state as it is, or to what is inside of its texts."""
    if rng.random() < 0.1:
        return damage_data(rng, state)
    inner = opened(copy.deepcopy(state))
    part = "lanes" if rng.random() < 0.8 else "pipeline"
    for lane in inner["lanes"].values():
        mixture = _mixture(lane["anchor"])
        if mixture and mixture["edited"]:
            mixture["edited"] = json.loads(mixture["edited"])
    inner[part] = damage_numbers(rng, inner[part]) if rng.random() < 0.6 else damage_data(rng, inner[part])
    if isinstance(inner["lanes"], dict):
        for lane in inner["lanes"].values():
            mixture = _mixture(lane.get("anchor") if isinstance(lane, dict) else None)
            if mixture and isinstance(mixture.get("edited"), dict):
                mixture["edited"] = json.dumps(mixture["edited"])
    try:
        return closed(inner)
    except (TypeError, ValueError, RecursionError):
        return inner


def _mixture(state: Any) -> dict[str, Any] | None:
    while isinstance(state, dict) and "edited" not in state:
        state = state.get("below")
    return state if isinstance(state, dict) else None


def _read_on(loader: fmsdata.StatefulDataLoader, make: Make) -> None:
    """Read, save, and restore: what follows must be the same."""
    stats = loader.stats()
    str(stats)
    for batch in islice(loader, 3):
        assert batch["input_ids"].shape[0] == 2
    saved = json.loads(json.dumps(loader.state_dict()))
    following = [batch["input_ids"].tolist() for batch in islice(loader, 3)]
    again = make(0, 1)
    again.load_state_dict(saved)
    assert [batch["input_ids"].tolist() for batch in islice(again, 3)] == following, "restored to another place"


class CheckpointFolders:
    """Folders of checkpoints in which files are cut, renamed, exchanged, or have another content."""

    def __init__(self, folder: Path) -> None:
        rng = np.random.default_rng(1)
        write_source(folder / "web", documents(rng, 60))
        write_source(folder / "wiki", documents(rng, 23), shards=2)
        self._whole, self._damaged = folder / "whole", folder / "damaged"
        self._make = maker(folder, **SMALL)
        self._data = self._make(0, 1).data
        for rank in range(2):
            made = self._loader(self._whole, rank, 2)
            for step in range(12):
                next(iter(made))
                if step % 4 == 3:
                    made.save()

    def _loader(self, folder: Path, rank: int, world_size: int) -> fmsdata.StatefulDataLoader:
        checkpoint = fmsdata.Checkpoints(str(folder), keep=None)
        return fmsdata.StatefulDataLoader(
            self._data, batch_size=2, rank=rank, world_size=world_size, prefetch=0, checkpoint=checkpoint
        )

    def attempt(self, rng: Rng) -> None:
        shutil.rmtree(self._damaged, ignore_errors=True)
        shutil.copytree(self._whole, self._damaged)
        for _ in range(int(rng.integers(1, 4))):
            self._damage(rng)
        if rng.random() < 0.3:
            checkpoints = fmsdata.Checkpoints(str(self._damaged), keep=None)
            options: dict[str, Any] = {"world_size": None, "batch_size": None, "from_start": False}
            replay = Replay(self._data, checkpoints=checkpoints, watch=lambda _, __: None, **options)
            for lane, state in replay.states(replay.start(replay.newest), [0, 3]).items():
                replay.open(lane, state).read()
            return
        loader = self._loader(self._damaged, 0, 1)
        _read_on(loader, self._make)
        loader.save()

    def _damage(self, rng: Rng) -> None:
        files = sorted(path for path in self._damaged.rglob("*") if path.is_file() and not path.is_symlink())
        folders = sorted(path for path in self._damaged.iterdir() if path.is_dir() and not path.is_symlink())
        if not files or not folders:
            return
        file, other = (files[i] for i in rng.integers(len(files), size=2))
        folder = folders[rng.integers(len(folders))]
        match int(rng.integers(12)):
            case 0:
                file.write_bytes(damage_bytes(rng, file.read_bytes(), other.read_bytes()))
            case 1:
                file.unlink()
            case 2:
                content = file.read_bytes()
                file.write_bytes(other.read_bytes())
                other.write_bytes(content)
            case 3:
                (file.parent / other.name).write_bytes(file.read_bytes())
            case 4:
                number = str(abs(edge(rng)) if rng.random() < 0.5 else int(rng.integers(5)))
                words = file.name.split(".")
                ranks = words[0].split("-")
                ranks[int(rng.choice([1, 3])) % len(ranks)] = number
                file.rename(file.parent / ".".join(["-".join(ranks), *words[1:]]))
            case 5:
                target = self._damaged / f"step-{abs(edge(rng)) if rng.random() < 0.5 else int(rng.integers(20))}"
                if not target.exists():
                    folder.rename(target)
            case 6:
                shutil.rmtree(folder)
            case 7:
                file.unlink()
                file.mkdir()
            case 8:
                (file.parent / "complete").write_bytes(rng.bytes(int(rng.integers(40))))
            case _ if file.name.endswith(".json"):
                self._edit(rng, file)

    def _edit(self, rng: Rng, file: Path) -> None:
        """Another content, with a checksum and a name that fit it."""
        try:
            state = json.loads(file.read_bytes().partition(b"\n")[2])
            body = json.dumps(damage_state(rng, state)).encode()
        except (TypeError, ValueError, RecursionError):
            return
        header: Any = {"format": "fmsdata loader", "sha256": hashlib.sha256(body).hexdigest()}
        if rng.random() < 0.1:
            header = damage_data(rng, [header], 1)
        text = json.dumps(header).encode() + b"\n" + body
        file.unlink()
        words = file.name.split(".")
        (file.parent / f"{words[0]}.{words[1]}.{len(text)}.json").write_bytes(text)
