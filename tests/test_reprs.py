"""What a person sees of an object: in a notebook, in a log, in an error."""

import html
import inspect
import json
import re
import shutil
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from typing import Any

import numpy as np
import pytest

import fmsdata
from fmsdata import stages, testing
from fmsdata.core.wording import shown
from fmsdata.prefetch.open_files import OpenFiles
from fmsdata.run.checkpoints import Checkpoints
from fmsdata.tasks.batch import collect
from tests.helpers import maker, write_corpus

DOCUMENTED = ("errors", "keys", "prepare", "testing", "trace", "train_state", "compat.fms_fsdp", "compat.nanochat")
OBJECT = re.compile(r"object at 0x| at 0x[0-9a-f]{6}")


def public_classes() -> Iterator[type]:
    for module in ("", *DOCUMENTED):
        home = import_module(f"fmsdata.{module}".rstrip("."))
        named = getattr(home, "__all__", None)
        for name in named or [name for name in vars(home) if not name.startswith("_")]:
            value = getattr(home, name)
            own = inspect.isclass(value) and value.__module__.startswith("fmsdata." if named else home.__name__)
            if own and not issubclass(value, Exception):
                yield value


def stage_classes() -> set[type[fmsdata.Stage]]:
    for module in walk_packages(stages.__path__, "fmsdata.stages."):
        import_module(module.name)

    def below(kind: type[fmsdata.Stage]) -> Iterator[type[fmsdata.Stage]]:
        for other in kind.__subclasses__():
            if other.__module__.startswith("fmsdata.stages"):
                yield other
            yield from below(other)

    return set(below(fmsdata.Stage))


def test_every_public_class_has_a_repr_of_its_own() -> None:
    classes = set(public_classes())
    assert len(classes) > 25
    inherited: Any = object.__repr__
    assert [kind for kind in classes if kind.__repr__ == inherited and not getattr(kind, "_is_protocol", False)] == []


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = write_corpus(tmp_path / "corpus")
    (folder / "text").mkdir()
    (folder / "text" / "a.txt").write_text("one\ntwo\n")
    return folder


def objects(folder: Path) -> dict[str, Any]:
    """One of each: all stages, what is above them, and what is handed out."""
    loader = maker(folder, loader__num_workers=0)(0, 1)
    reader = fmsdata.ShardReader(folder / "web", strip=[0], min_length=2)
    mix = fmsdata.Mixture({"web": reader}, {"web": 1}, phases=[fmsdata.Phase(until_tokens=10, weights={"web": 1})])
    sampler = fmsdata.EpochSampler(range(20), global_batch=4, rank=0, world_size=1)
    item = next(iter(reader))
    made = [
        reader,
        mix,
        fmsdata.Tokenize(fmsdata.ShardReader(folder / "text"), "bytes"),
        fmsdata.Delimit(mix, eos=0),
        fmsdata.Map(mix, lambda item: item.tokens[:5]),
        fmsdata.Filter(mix, lambda item: len(item) > 3),
        fmsdata.Pack(mix, seq_len=8),
        fmsdata.Shuffle(mix, window=4),
        loader,
        loader.data,
        loader.stats(),
        item,
        item.chunk,
        sampler,
        fmsdata.StatefulDataLoader(range(20), sampler=sampler, batch_size=4),
        fmsdata.RowMixture({"a": range(3)}, {"a": 1}),
        fmsdata.Trace(loader.data, world_size=1, batch_size=1),
        Checkpoints(str(folder / "saved"), every=5),
        collect([(item.chunk, 0)], 1),
        loader.data.lines.open(fmsdata.Lane()),
        loader.data.lane(0, OpenFiles()),
        fmsdata.Collate(),
        fmsdata.Storage(),
        testing.Account({}),
        testing.StoredDocuments({"web": folder / "web"}),
    ]
    return {type(thing).__name__: thing for thing in made}


def test_every_repr_names_its_class_and_shows_no_address(folder: Path) -> None:
    made = objects(folder)
    assert {kind.__name__ for kind in stage_classes()} <= set(made), "a stage is missing in this test"
    for name, thing in made.items():
        public = "StatefulDataLoader" if name == "RowLoader" else name.lstrip("_")
        assert public in repr(thing)
        assert not OBJECT.search(repr(thing)), repr(thing)


def test_a_repr_reads_and_starts_nothing(folder: Path) -> None:
    made = objects(folder)
    for thing in made.values():
        repr(thing)
    shutil.rmtree(folder)
    began = time.perf_counter()
    for _ in range(20):
        for thing in made.values():
            assert repr(thing)
            if hasattr(thing, "_repr_html_"):
                assert thing._repr_html_()
    assert time.perf_counter() - began < 2, "about a millisecond each"
    loader = made["StatefulDataLoader"]
    assert loader._engine is None
    assert loader.state_dict()["step"] == 0


def test_a_loader_shows_its_pipeline_as_a_tree(folder: Path) -> None:
    loader = maker(folder)(0, 1)
    first, *tree = repr(loader).splitlines()
    assert first.startswith("StatefulDataLoader rank=0 world_size=1 batch_size=1 ")
    assert tree == [
        "└── Rescalable lanes=24 seed=3",
        "    └── Shuffle window=8",
        "        └── Pack mode=split seq_len=17",
        "            └── Delimit eos=0",
        "                └── Mixture of 2",
        "                    ├── web: ShardReader shards=3",
        "                    └── wiki: ShardReader shards=2",
    ]
    next(loader)
    assert "step=1" in repr(loader)
    plain = re.sub("<[^>]*>", "", loader._repr_html_())
    assert html.unescape(plain) == repr(loader)


def test_a_description_is_plain_data_of_the_run(folder: Path) -> None:
    loader = maker(folder)(0, 1)
    next(loader)
    described = json.loads(json.dumps(loader.describe()))
    assert (described["step"], described["batch_size"], described["world_size"]) == (1, 1, 1)
    assert described["pipeline"] == json.loads(loader.state_dict()["pipeline"]) == loader.data.describe()
    assert described["pipeline"]["lines"] == loader.data.lines.describe()
    sampler = fmsdata.EpochSampler(range(20), global_batch=4, rank=0, world_size=1)
    rows = fmsdata.StatefulDataLoader(range(20), sampler=sampler, batch_size=4)
    next(rows)
    assert json.loads(json.dumps(rows.describe()))["sampler"]["position"] == 4


class Broken(fmsdata.Stage):
    """A stage whose own code fails when it is looked at."""

    def parameters(self) -> dict[str, Any]:
        raise RuntimeError("not ready")


def test_a_repr_never_raises(folder: Path) -> None:
    reader = fmsdata.ShardReader(folder / "web")
    assert repr(Broken(reader)) == "Broken (not complete)"
    assert "not complete" in repr(fmsdata.Shuffle(Broken(reader), window=2))
    kinds: list[Any] = [*stage_classes(), fmsdata.Rescalable, fmsdata.StatefulDataLoader, fmsdata.EpochSampler]
    for kind in kinds:
        empty = kind.__new__(kind)  # as an error in its __init__ leaves it
        assert kind.__name__ in repr(empty)


def errors(folder: Path) -> list[Callable[[], Any]]:
    loader: Any = maker(folder)(0, 1)
    data, lines = loader.data, loader.data.lines
    wrong: Any = object()
    modes: Any = [wrong]
    return [
        lambda: fmsdata.Shuffle(loader),
        lambda: fmsdata.Pack(wrong, seq_len=4),
        lambda: fmsdata.Mixture({"web": data}, {"web": 1}),
        lambda: fmsdata.Rescalable(data, lanes=2),
        lambda: fmsdata.Rescalable(lines, lanes=wrong),
        lambda: fmsdata.StatefulDataLoader(lines, batch_size=1),
        lambda: fmsdata.StatefulDataLoader(data, batch_size=1, checkpoint=data),
        lambda: fmsdata.StatefulDataLoader(data, batch_size=1, task=wrong),
        lambda: fmsdata.StatefulDataLoader(range(3), sampler=loader, batch_size=1),
        lambda: fmsdata.StatefulDataLoader(data, batch_size=1, outputs=wrong),
        lambda: fmsdata.StatefulDataLoader(data, batch_size=1, process_group=wrong, rank=None),
        lambda: fmsdata.build_loader(wrong),
        lambda: fmsdata.build_loader({"path": str(folder), "pack": {"seq_len": wrong}}),
        lambda: fmsdata.task_from(wrong),
        lambda: fmsdata.ShardReader(folder / "web", strip=wrong),
        lambda: fmsdata.ShardReader(folder / "web", files=loader),
        lambda: fmsdata.Mixture({"web": wrong}, {"web": 1}),
        lambda: fmsdata.Mixture({wrong: lines}, {"web": 1}),
        lambda: fmsdata.Mixture({"web": fmsdata.ShardReader(folder / "web")}, {wrong: 1}),
        lambda: fmsdata.Mixture({"web": fmsdata.ShardReader(folder / "web")}, {"web": 1}, phases=wrong),
        lambda: fmsdata.Pack(fmsdata.ShardReader(folder / "web"), seq_len=4, mode=modes),
        lambda: fmsdata.Shuffle(lines, window=4, distance=wrong),
        lambda: fmsdata.Rescalable(lines.below, lanes=4, rank=wrong),
        lambda: fmsdata.EpochSampler(range(4), global_batch=2, world_size=wrong),
        lambda: fmsdata.Collate(sources=loader),
        lambda: fmsdata.train_state.build(step=0, tokens_seen=0, loader=wrong),
    ]


def test_an_error_names_the_class_of_a_wrong_object_and_not_its_address(folder: Path) -> None:
    for cause in errors(folder):
        with pytest.raises(fmsdata.FmsdataError) as caught:
            cause()
        text = str(caught.value)
        assert not OBJECT.search(text), text
        assert "\n" not in text, text


def test_a_wrong_value_is_shown_in_one_line() -> None:
    class Fails:
        def __repr__(self) -> str:
            raise RuntimeError

    assert shown("a\nb") == "'a\\nb'"
    assert shown(np.zeros((3, 3))).endswith(" ...")
    assert shown([1] * 1000).endswith(" ...")
    assert shown(Fails()) == "an object of class Fails"
    assert shown([object()]) == "[an object of class object]"
    assert "0x" not in shown(test_a_wrong_value_is_shown_in_one_line)
