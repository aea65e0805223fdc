"""Train state: saved and restored in one call each, on any number of ranks, all or nothing."""

# ruff: noqa: NPY002  # numpy's global generator is what is saved here

import copy
import io
import random
import re
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from enum import Enum, IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler

import fmsdata
from fmsdata import train_state
from fmsdata.core.keys import key_of
from fmsdata.storage.location import Location
from fmsdata.testing import MakeLoader
from fmsdata.train.generators import generator_states, prepare_generators
from tests.helpers import maker

SEED = 3


@pytest.fixture(autouse=True)
def _the_global_generators_are_left_as_they_were() -> Iterator[None]:
    before = generator_states()
    yield
    for put_back in prepare_generators(before, 0, 0, 0):
        put_back()


@pytest.fixture
def make(corpus: Path) -> MakeLoader:
    return maker(corpus, loader__batch_size=2)


def a_scheduler() -> lr_scheduler.LambdaLR:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    optimizer.step()
    return scheduler


def drawn() -> list[float]:
    """What the next draws from the global generators are."""
    return [random.random(), random.gauss(0, 1), float(np.random.random()), float(np.random.normal()), *torch.rand(3)]


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def take(loader: fmsdata.StatefulDataLoader, steps: int) -> list[torch.Tensor]:
    return [next(loader)["input_ids"] for _ in range(steps)]


def built(make: MakeLoader, world_size: int, *, steps: int = 4, **more: Any) -> tuple[list[Any], list[list[float]]]:
    """The train states of a run on some ranks, and what each rank would have drawn next."""
    states, following = [], []
    for rank in range(world_size):
        loader = make(rank, world_size)
        take(loader, steps)
        seed_all(100 + rank)
        drawn()
        states.append(train_state.build(loader, step=steps, tokens_seen=steps * 1000, **more))
        following.append(drawn())
    return states, following


def test_a_run_goes_on_as_if_nothing_had_happened(make: MakeLoader, tmp_path: Path) -> None:
    loader, scheduler = make(0, 1), a_scheduler()
    take(loader, 5)
    scheduler.step()
    extra = {"phase": "warm", "run_id": "a1b2", "best": 2.5, "mean": torch.arange(3.0), "seen": [1, (2, None)]}
    state = train_state.build(loader, step=5, tokens_seen=160, scheduler=scheduler, extra=extra)
    train_state.save(tmp_path / "run", state)
    scheduler.step()
    expected = drawn(), take(loader, 3), scheduler.get_last_lr()

    seed_all(9)
    again, scheduler = make(0, 1), a_scheduler()
    restored = train_state.restore(train_state.load(tmp_path / "run"), again, scheduler=scheduler)
    assert restored.step == 5
    assert restored.tokens_seen == 160
    assert torch.equal(restored.extra.pop("mean"), extra.pop("mean"))  # type: ignore[arg-type]
    assert restored.extra == extra
    scheduler.optimizer.step()
    scheduler.step()
    got = drawn(), take(again, 3), scheduler.get_last_lr()
    assert got[0] == expected[0]
    assert all(map(torch.equal, got[1], expected[1]))
    assert got[2] == expected[2]


@pytest.mark.parametrize("saved_on", [1, 2, 3, 5])
@pytest.mark.parametrize("now_on", [1, 2, 4])
def test_on_another_number_of_ranks_what_is_global_comes_back_and_new_ranks_are_seeded_by_the_rule(
    make: MakeLoader, tmp_path: Path, saved_on: int, now_on: int
) -> None:
    states, following = built(make, saved_on, extra={"phase": 2})
    for state in states:
        train_state.save(tmp_path / "run", state)
    for rank in range(now_on):
        loader = make(rank, now_on)
        restored = train_state.restore(train_state.load(tmp_path / "run", loader), loader)
        assert restored == (4, 4000, {"phase": 2})
        now = drawn()
        if rank < saved_on:
            assert now == following[rank]
        else:
            keys = {name: key_of(SEED, "train state", 4, rank, name) for name in ("python", "numpy", "torch")}
            python, numpy = random.Random(keys["python"]), np.random.RandomState(np.random.MT19937(keys["numpy"]))
            torches = torch.Generator().manual_seed(keys["torch"])
            assert now[:2] == [python.random(), python.gauss(0, 1)]
            assert now[2:4] == [numpy.random_sample(), numpy.normal()]
            assert now[4:] == list(torch.rand(3, generator=torches))
        expected = make(rank, now_on)
        expected.load_state_dict([state["loader"] for state in states])
        assert loader.state_dict() == expected.state_dict()


def test_no_two_new_ranks_or_steps_draw_the_same(make: MakeLoader) -> None:
    seen = set()
    for steps in (1, 2):
        states, _ = built(make, 1, steps=steps)
        for rank in (1, 2, 3):
            train_state.restore(states, make(rank, 4))
            seen |= {("python", random.random()), ("numpy", np.random.random()), ("torch", torch.rand(1).item())}
    assert len(seen) == 18


def test_a_rank_reads_only_the_files_that_it_needs(
    make: MakeLoader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states, _ = built(make, 12, steps=1)
    for state in states:
        train_state.save(tmp_path / "run", state)
    read: list[str] = []
    read_bytes = Location.read_bytes

    def noted(file: Location) -> bytes:
        read.append(file.name)
        return read_bytes(file)

    monkeypatch.setattr(Location, "read_bytes", noted)
    for rank, world_size, needed in ((7, 24, {0, 7}), (20, 24, {0, 8}), (1, 6, {0, 1, 7}), (0, 1, set(range(12)))):
        read.clear()
        loader = make(rank, world_size)
        train_state.restore(train_state.load(tmp_path / "run", loader), loader)
        assert sorted(read) == sorted(f"train-{rank}-of-12.pt" for rank in needed)


def test_an_earlier_position_is_for_rows(make: MakeLoader) -> None:
    loader = make(0, 1)
    with pytest.raises(fmsdata.ConfigError, match="at is for a loader of rows"):
        train_state.build(loader, step=1, tokens_seen=1, at=loader.state_dict())


def test_the_loader_cannot_be_forgotten(make: MakeLoader) -> None:
    with pytest.raises(TypeError):
        train_state.build(step=1, tokens_seen=1)  # type: ignore[call-arg]
    nothing: Any
    for nothing in (None, object(), iter(make(0, 1)), make(0, 1).state_dict()):
        with pytest.raises(fmsdata.ConfigError, match="StatefulDataLoader"):
            train_state.build(nothing, step=1, tokens_seen=1)
        with pytest.raises(fmsdata.ConfigError, match="StatefulDataLoader"):
            train_state.restore(built(make, 1)[0], nothing)


class _Anything:
    pass


class _Phase(Enum):
    WARM = "warm"


class _Level(IntEnum):
    LOW = 1


class _Best(NamedTuple):
    step: int
    loss: float


@pytest.mark.parametrize(
    ("extra", "key"),
    [
        ({"fn": drawn}, "extra.fn is a function"),
        ({"a": {"b": [1, lambda: 1]}}, "extra.a.b.1 is a function"),
        ({"array": np.ones(2)}, r"extra.array is a numpy.ndarray.*; save torch.from_numpy\(array\)"),
        ({"loss": np.longdouble(1)}, r"extra.loss is a numpy.longdouble.*; save str\(value\), or float\(value\)"),
        ({"day": np.datetime64("2026-01-01")}, "extra.day is a numpy.datetime64"),
        ({"record": np.void(b"ab")}, "extra.record is a numpy.void"),
        ({"seen": defaultdict(int)}, r"extra.seen is a collections.defaultdict.*; save dict\(mapping\)"),
        ({"phase": _Phase.WARM}, r"extra.phase is a tests.train.test_train_state._Phase.*; save its .name"),
        ({"levels": [_Level.LOW]}, r"extra.levels.0 is a .*_Level.*; save its .name"),
        ({"best": _Best(1, 2.0)}, r"extra.best is a .*_Best.*; save tuple\(values\)"),
        ({"names": frozenset("a")}, r"extra.names is a frozenset.*; save set\(values\)"),
        ({"one": _Anything()}, r"extra.one is a tests.train.test_train_state._Anything"),
        ({"path": [Path("x")]}, r"extra.path.0 is a pathlib.*; save str\(path\)"),
        ({"keys": {Path("x"): 1}}, "extra.keys.x is a pathlib"),
        ({"model": torch.nn.Linear(1, 1)}, "extra.model is a torch.nn"),
        ({"large": 1 << 5000}, "extra.large can't be loaded again"),
        ({"step": 7}, "extra.step: 'step' is a key of the train state itself"),
        ({"loader": None}, "extra.loader: 'loader' is a key"),
        ({3: 4}, "extra is"),
        ("phase", "extra is"),
    ],
)
def test_what_cannot_be_loaded_is_refused_before_anything_is_written_and_named(
    make: MakeLoader, extra: Any, key: str
) -> None:
    with pytest.raises(fmsdata.ConfigError, match=key):
        train_state.build(make(0, 1), step=1, tokens_seen=1, extra=extra)


def test_what_was_put_into_a_state_afterwards_is_refused_too(make: MakeLoader, tmp_path: Path) -> None:
    state = built(make, 1)[0][0]
    for broken, error, words in (
        ({**state, "extra": {"fn": drawn}}, fmsdata.ConfigError, "extra.fn"),
        ({**state, "model": {}}, fmsdata.StateError, "unknown key 'model'"),
        ({name: state[name] for name in state if name != "loader"}, fmsdata.StateError, "lacks key 'loader'"),
    ):
        with pytest.raises(error, match=words):
            train_state.save(tmp_path / "run", broken)
    assert not (tmp_path / "run").exists()


def test_a_value_that_holds_itself_is_refused(make: MakeLoader) -> None:
    circle: dict[str, Any] = {}
    circle["again"] = [circle]
    with pytest.raises(fmsdata.ConfigError, match=r"extra.a.again.0 holds itself"):
        train_state.build(make(0, 1), step=1, tokens_seen=1, extra={"a": circle})
    shared = [1]
    train_state.build(make(0, 1), step=1, tokens_seen=1, extra={"a": shared, "b": [shared, shared]})


class _Cosine:
    """A schedule with numbers of its own: LambdaLR saves the attributes of such an object."""

    def __init__(self, period: Any, least: Any) -> None:
        self.period, self.least = period, least

    def __call__(self, step: int) -> Any:
        return np.maximum(self.least, np.cos(step / self.period))


@pytest.mark.parametrize(
    "kind",
    [
        lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
        lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: np.cos(step / 20)),
        lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: np.float32(0.9) ** np.float32(step)),  # type: ignore[arg-type,return-value]
        lambda optimizer: lr_scheduler.SequentialLR(
            optimizer,
            [lr_scheduler.LinearLR(optimizer), lr_scheduler.LambdaLR(optimizer, lambda step: np.cos(step / 20))],
            milestones=[2],
        ),
        lambda optimizer: lr_scheduler.LambdaLR(optimizer, _Cosine(np.int64(20), np.array(0.1))),
        lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 4]),
        lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=20),
        lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
        lambda optimizer: lr_scheduler.SequentialLR(
            optimizer,
            [lr_scheduler.LinearLR(optimizer), lr_scheduler.CosineAnnealingLR(optimizer, 9)],
            milestones=[2],
        ),
    ],
    ids=["lambda", "numpy", "float32", "sequence of numpy", "object", "steps", "one cycle", "restarts", "sequence"],
)
def test_every_kind_of_scheduler_goes_on(
    make: MakeLoader, kind: Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]
) -> None:
    def new() -> tuple[torch.optim.Optimizer, lr_scheduler.LRScheduler]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.5, momentum=0.9)
        scheduler = kind(optimizer)
        optimizer.step()
        return optimizer, scheduler

    def rates(scheduler: lr_scheduler.LRScheduler) -> list[Any]:
        rates = []
        for _ in range(5):
            scheduler.step()
            rates.append(scheduler.get_last_lr())
        return rates

    optimizer, scheduler = new()
    for _ in range(3):
        scheduler.step()
    state = train_state.build(make(0, 1), step=3, tokens_seen=3, scheduler=scheduler)
    saved_optimizer = copy.deepcopy(optimizer.state_dict())
    expected = rates(scheduler)
    for _ in range(2):
        optimizer, scheduler = new()
        optimizer.load_state_dict(saved_optimizer)
        train_state.restore(state, make(0, 1), scheduler=scheduler)
        assert rates(scheduler) == expected


def test_scalars_of_numpy_are_saved_as_the_python_values_that_they_equal(make: MakeLoader, tmp_path: Path) -> None:
    """Wherever they are: in lists, tuples, sets, dicts and their keys. Not a bit of a value changes."""
    shared = [np.float64(0.1)]
    extra = {
        "floats": (np.float64(0.1), np.float32(0.1), np.float16(0.1), np.float64("nan"), np.float64("-inf")),
        "whole": [np.int64(-3), np.uint64(2**64 - 1), np.int8(5), np.array(7), np.intp(1)],
        "flags": {np.bool_(True), np.bool_(False)},
        "texts": [np.str_("a"), np.bytes_(b"b")],
        "complex": np.complex128(1 + 2j),
        "named": {np.str_("k"): {np.int64(4): np.array(0.5)}},
        "ordered": OrderedDict([("z", np.float64(1)), ("a", np.float64(2))]),
        "counts": Counter({np.int64(3): 2}),
        "shared": [shared, shared],
        "tensor": torch.tensor(0.5, dtype=torch.bfloat16),
    }
    state = train_state.build(make(0, 1), step=1, tokens_seen=1, extra=extra)
    train_state.save(tmp_path, state)
    got = train_state.restore(train_state.load(tmp_path), make(0, 1)).extra
    assert repr(got) == repr(
        {
            "floats": (0.1, float(np.float32(0.1)), float(np.float16(0.1)), float("nan"), float("-inf")),
            "whole": [-3, 2**64 - 1, 5, 7, 1],
            "flags": {False, True},
            "texts": ["a", b"b"],
            "complex": 1 + 2j,
            "named": {"k": {4: 0.5}},
            "ordered": OrderedDict([("z", 1.0), ("a", 2.0)]),
            "counts": Counter({3: 2}),
            "shared": [[0.1], [0.1]],
            "tensor": torch.tensor(0.5, dtype=torch.bfloat16),
        }
    )
    assert np.float32(got["floats"][1]).tobytes() == np.float32(0.1).tobytes()
    assert got["shared"][0] is got["shared"][1]
    assert type(shared[0]) is np.float64, "the trainer's own values stay as they are"


def test_a_state_shares_nothing_with_the_run(make: MakeLoader) -> None:
    scheduler, loader = a_scheduler(), make(0, 1)
    mine: dict[str, Any] = {"list": [1], "tensor": torch.zeros(2)}
    state = train_state.build(loader, step=1, tokens_seen=1, scheduler=scheduler, extra=mine)
    text = repr(state)
    mine["list"].append(2)
    mine["tensor"].add_(1)
    scheduler.base_lrs[0] = 7.0
    take(loader, 3)
    drawn()
    assert repr(state) == text
    restored = train_state.restore(state, loader, scheduler=scheduler)
    restored.extra["list"].append(3)
    scheduler.base_lrs[0] = 8.0
    take(loader, 3)
    assert repr(state) == text


def test_a_scheduler_on_one_side_only_is_an_error_with_the_way_out(make: MakeLoader) -> None:
    state = train_state.build(make(0, 1), step=1, tokens_seen=1, scheduler=a_scheduler())
    with pytest.raises(fmsdata.StateError, match=r"pass restore\(..., scheduler=...\)"):
        train_state.restore(state, make(0, 1))
    train_state.restore({**state, "scheduler": None}, make(0, 1))
    with pytest.raises(fmsdata.StateError, match="the train state has none"):
        train_state.restore({**state, "scheduler": None}, make(0, 1), scheduler=a_scheduler())


class _RefusingScheduler:
    """Fails in the middle of loading, like one of another kind would."""

    def __init__(self) -> None:
        self.values = {"a": 1, "b": 2}

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values["a"] = state["a"]
        self.values["b"] = state["b"]


def _broken(state: Any, where: str, value: Any) -> Any:
    broken = copy.deepcopy(state)
    *parents, last = where.split(".")
    inner = broken
    for name in parents:
        inner = inner[name]
    inner[last] = value
    return broken


@pytest.mark.parametrize(
    ("where", "value", "words"),
    [
        ("version", 2, "version 2 and this fmsdata reads version 1; use a newer fmsdata"),
        ("version", 0, "use the fmsdata that wrote it"),
        ("version", "1", "no version"),
        ("generators.torch", torch.zeros(5, dtype=torch.uint8), "generators of rank 0 can't be restored"),
        ("generators.python", (1, 2), "generators of rank 0 can't be restored"),
        ("generators.numpy.state.key", [1, 2], "generators of rank 0 can't be restored"),
        ("loader.version", 99, "version 99"),
        ("loader.lanes", {}, "no state for lane"),
        ("scheduler", {"a": 5}, "b"),
        ("rank", 4, "lane|rank"),
    ],
)
def test_nothing_is_restored_halfway(make: MakeLoader, where: str, value: Any, words: str) -> None:
    loader = make(0, 1)
    take(loader, 3)
    state = train_state.build(loader, step=3, tokens_seen=3, scheduler=_RefusingScheduler())
    other, scheduler = make(0, 1), _RefusingScheduler()
    scheduler.values = {"a": 10, "b": 20}
    take(other, 1)
    before = other.state_dict(), copy.deepcopy(scheduler.values), repr(generator_states())
    broken = _broken(state, where, value)
    with pytest.raises((fmsdata.StateError, KeyError), match=words):
        train_state.restore(broken, other, scheduler=scheduler)
    assert (other.state_dict(), scheduler.values, repr(generator_states())) == before
    train_state.restore(state, other, scheduler=scheduler)
    assert other.state_dict() == loader.state_dict()
    assert scheduler.values == {"a": 1, "b": 2}


def test_states_that_do_not_belong_together_are_refused(make: MakeLoader) -> None:
    states, _ = built(make, 2, scheduler=a_scheduler())
    loader = make(0, 1)
    broken: Any
    for broken, words in (
        ([states[0], _broken(states[1], "step", 5)], r"step of rank 0 and of rank 1 differ \(4 and 5\)"),
        ([states[0], _broken(states[1], "tokens_seen", 1)], r"tokens_seen of rank 0 and of rank 1 differ"),
        ([states[0], _broken(states[1], "world_size", 3)], "world_size of rank 0"),
        ([states[0], _broken(states[1], "scheduler.last_epoch", 9)], "scheduler of rank 0 and of rank 1 differ"),
        ([states[0], states[0]], "given twice"),
        ([], "a train state is a dict"),
        (None, "a train state is a dict"),
        (7, "a train state is a dict"),
        ([None], "no version"),
        ([states[0]["loader"]], "train state"),
        (states[:1], "no state for lane"),
        (states[1:], "rank 0 of 2 was saved, but its state is not among those given"),
    ):
        with pytest.raises(fmsdata.StateError, match=words):
            train_state.restore(broken, loader, scheduler=a_scheduler())
    assert loader.state_dict() == make(0, 1).state_dict()


def test_what_only_rank_0_knows_is_given_to_all(make: MakeLoader) -> None:
    """An experiment tracker often runs on rank 0 alone."""
    states = []
    for rank in range(2):
        run_id = "a1b2" if rank == 0 else None
        states.append(train_state.build(make(rank, 2), step=0, tokens_seen=0, extra={"run_id": run_id}))
    for rank in range(3):
        assert train_state.restore(states[::-1], make(rank, 3)).extra == {"run_id": "a1b2"}


def test_a_folder_that_is_not_whole_is_refused_and_the_file_named(make: MakeLoader, tmp_path: Path) -> None:
    states, _ = built(make, 3)
    folder = tmp_path / "run"
    with pytest.raises(fmsdata.CheckpointError, match="holds no train state"):
        train_state.load(folder)
    for state in states:
        where = train_state.save(str(folder), state)
        assert Path(where).is_file()
    (folder / "notes.txt").write_text("a stray file is no matter")
    (folder / ".train-0-of-9.pt.unfinished").write_text("nor is one that was not finished")
    assert [state["rank"] for state in train_state.load(folder)] == [0, 1, 2]
    file = folder / "train-1-of-3.pt"
    whole = file.read_bytes()

    def refused(words: str) -> None:
        for loader in (None, make(1, 3), make(0, 3) if "missing" in words or "ranks" in words else None):
            with pytest.raises(fmsdata.CheckpointError, match=words):
                train_state.load(folder, loader)

    for size in (0, 1, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:size])
        refused(r"train-1-of-3.pt is truncated or damaged")
    file.unlink()
    refused(r"train-1-of-3.pt is missing")
    file.write_bytes((folder / "train-2-of-3.pt").read_bytes())
    refused(r"train-1-of-3.pt is truncated or damaged: it is the state of rank 2 of 3; the file was renamed")
    file.write_bytes(whole)
    (folder / "train-3-of-3.pt").write_bytes(whole)
    refused(r"train-3-of-3.pt does not belong there")
    (folder / "train-3-of-3.pt").rename(folder / "train-0-of-2.pt")
    refused("runs on 2 and 3 ranks")
    (folder / "train-0-of-2.pt").unlink()
    assert len(train_state.load(folder)) == 3


def test_a_single_wrong_byte_is_found(make: MakeLoader, tmp_path: Path) -> None:
    """Whatever torch is told about checksums of its own files."""
    torch.serialization.set_crc32_options(False)
    try:
        path = Path(train_state.save(tmp_path, built(make, 1)[0][0]))
        assert torch.serialization.get_crc32_options() is False
    finally:
        torch.serialization.set_crc32_options(True)
    whole = path.read_bytes()
    for content in (b'"lines"', b"tokens_seen", bytes(train_state.load(tmp_path)[0]["generators"]["torch"])):
        place = whole.index(content)
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(fmsdata.CheckpointError, match="damaged"):
            train_state.load(tmp_path)
        path.write_bytes(whole)


def test_a_file_that_would_run_code_is_not_loaded(make: MakeLoader, tmp_path: Path) -> None:
    state = {**built(make, 1)[0][0], "extra": {"fn": drawn}}
    buffer = io.BytesIO()
    torch.save(state, buffer)
    (tmp_path / "train-0-of-1.pt").write_bytes(buffer.getvalue())
    with pytest.raises(fmsdata.CheckpointError, match="more than plain data and tensors"):
        train_state.load(tmp_path)


def test_a_file_of_another_version_says_so(make: MakeLoader, tmp_path: Path) -> None:
    torch.save({**built(make, 1)[0][0], "version": 2}, tmp_path / "train-0-of-1.pt")
    with pytest.raises(fmsdata.CheckpointError, match="use a newer fmsdata"):
        train_state.load(tmp_path)


def test_any_filesystem_will_do(make: MakeLoader) -> None:
    states, following = built(make, 2)
    for state in states:
        train_state.save("memory://train-state/run", state)
    loader = make(1, 2)
    train_state.restore(train_state.load("memory://train-state/run", loader), loader)
    assert drawn() == following[1]


def test_saving_again_replaces_the_file(make: MakeLoader, tmp_path: Path) -> None:
    for step in (1, 2):
        train_state.save(tmp_path, train_state.build(make(0, 1), step=step, tokens_seen=0))
    assert [state["step"] for state in train_state.load(tmp_path)] == [2]
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["train-0-of-1.pt"]


def test_every_device_has_a_generator_and_new_devices_are_seeded_by_the_rule(
    make: MakeLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_devices(count: int) -> list[torch.Generator]:
        devices = [torch.Generator().manual_seed(50 + device) for device in range(count)]
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "init", lambda: None)
        monkeypatch.setattr(torch.cuda, "default_generators", tuple(devices))
        return devices

    saved = with_devices(2)
    state = train_state.build(make(0, 1), step=8, tokens_seen=0)
    expected = [torch.rand(3, generator=generator) for generator in saved]
    rule = torch.Generator().manual_seed(key_of(SEED, "train state", 8, 0, "cuda:2"))
    expected.append(torch.rand(3, generator=rule))
    for count in (1, 2, 3):
        now = with_devices(count)
        for generator in now:
            generator.manual_seed(1)
        train_state.restore(state, make(0, 1))
        assert all(
            torch.equal(torch.rand(3, generator=generator), want)
            for generator, want in zip(now, expected, strict=False)
        )
    monkeypatch.undo()
    train_state.restore(state, make(0, 1))


def test_another_kind_of_global_numpy_generator_is_refused(make: MakeLoader) -> None:
    before = np.random.mtrand.get_bit_generator()
    np.random.mtrand.set_bit_generator(np.random.PCG64(1))
    try:
        with pytest.raises(fmsdata.ConfigError, match=r"generators.numpy is a PCG64"):
            train_state.build(make(0, 1), step=1, tokens_seen=1)
    finally:
        np.random.mtrand.set_bit_generator(before)


@pytest.mark.parametrize("wrong", [-1, 1.5, "3", None, True])
def test_steps_and_tokens_are_whole_numbers(make: MakeLoader, wrong: Any) -> None:
    for given in ({"step": wrong, "tokens_seen": 1}, {"step": 1, "tokens_seen": wrong}):
        with pytest.raises(fmsdata.ConfigError, match="must be"):
            train_state.build(make(0, 1), **given)
    state = train_state.build(make(0, 1), step=np.int64(3), tokens_seen=torch.tensor(4))  # type: ignore[arg-type]
    assert (state["step"], state["tokens_seen"]) == (3, 4)


def test_the_lines_in_the_docs_run_when_pasted(make: MakeLoader, tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
    (lines,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    scheduler, folder = a_scheduler(), tmp_path / "step-7"
    names = {"loader": make(0, 1), "step": 7, "tokens": 70, "run_id": "a1", "scheduler": scheduler, "folder": folder}
    exec(lines, names)
    assert (names["step"], names["tokens"], names["extra"]) == (7, 70, {"run_id": "a1"})
