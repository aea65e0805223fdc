"""Stages of the user's own in a configuration."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import fmsdata
from fmsdata import testing
from fmsdata.config.build import build_data, make_loader
from fmsdata.config.read import read_config
from tests.helpers import CONFIG, documents, write_source

ROOT = Path(__file__).parents[2]
MODULE = '''
import numpy as np
import fmsdata


class Upper(fmsdata.Stage):
    """Keeps documents that are long enough, and counts each token up. Its argument is private."""

    def __init__(self, below, *, least, by=1000):
        super().__init__(below)
        self._least, self._by = least, by

    def transform(self, item, key):
        return [item.replace(item.tokens.astype(np.int64) + self._by)] if len(item) >= self._least else []


class Noisy(fmsdata.Stage):
    def __init__(self, below, rate=0.5):
        super().__init__(below)
        self.rate = rate

    def transform(self, item, key):
        noise = np.random.default_rng(key).random(len(item)) < self.rate
        return [item.replace(np.where(noise, 7, item.tokens.astype(np.int64)))]


def clean(below, least=3):
    return fmsdata.Filter(below, lambda item: len(item) >= least)


def nothing(below):
    return None


def fails(below):
    raise ValueError("no luck")


class NoStage:
    pass
'''


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A corpus, and beside it a module with stages; the current directory is another one."""
    rng = np.random.default_rng(0)
    for name, count in (("web", 40), ("wiki", 15)):
        write_source(tmp_path / name, documents(rng, count, shortest=1))
    (tmp_path / "runs").mkdir()
    name = f"own_stages_{abs(hash(tmp_path)):x}"  # a module is imported once in a process
    (tmp_path / "runs" / f"{name}.py").write_text(MODULE)
    (tmp_path / "runs" / "name").write_text(name)
    yield tmp_path
    sys.modules.pop(name, None)


def write_config(folder: Path, documents: list[Any] | None = None, lines: list[Any] | None = None, **more: Any) -> Path:
    module = (folder / "runs" / "name").read_text()

    def full(stages: list[Any] | None) -> list[Any]:
        named = [{"name": stage} if isinstance(stage, str) else stage for stage in stages or []]
        return [{**stage, "name": f"{module}:{stage['name']}"} for stage in named]

    config = {**CONFIG, "path": str(folder), **more}
    config["documents"] = {**CONFIG["documents"], **config["documents"], "stages": full(documents)}
    config["pack"] = {**CONFIG["pack"], "stages": full(lines)}
    path = folder / "runs" / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def transformed(folder: Path, least: int) -> dict[Any, Any]:
    """What `Upper` makes of the stored documents."""
    stored = testing.stored_documents({name: folder / name for name in ("web", "wiki")})
    return {name: tokens + 1000 for name, tokens in stored.items() if len(tokens) >= least}


def test_stages_of_ones_own_are_above_each_source_and_above_the_packer(folder: Path) -> None:
    loader = fmsdata.build_loader(write_config(folder, ["clean", {"name": "Upper", "least": 2}], ["Noisy"]))
    tree = [line.strip(" │├└─").split(" fn=")[0] for line in repr(loader).splitlines()[1:]]
    source = ["Upper least=2", "least=3", "ShardReader shards=3"]
    assert [line for line in tree if "Upper" in line] == [f"{name}: {source[0]}" for name in ("web", "wiki")]
    assert tree[:5] == [
        "Rescalable lanes=24 seed=3",
        "Shuffle window=8",
        "Noisy rate=0.5",
        "Pack mode=split seq_len=17",
        "Delimit eos=0",
    ]
    tokens = {token for batch in islice(loader, 60) for token in batch["input_ids"].flatten().tolist()}
    assert tokens <= {0, 7, *range(1010, 1250)}
    assert 7 in tokens


def test_the_laws_hold_with_stages_of_ones_own(folder: Path) -> None:
    config = read_config(
        write_config(folder, [{"name": "Upper", "least": 5}], ["Noisy", {"name": "Noisy", "rate": 0.2}])
    )
    data = build_data(config)

    def make(rank: int, world_size: int) -> fmsdata.StatefulDataLoader:
        return make_loader(config, data, rank=rank, world_size=world_size)

    testing.check_same_stream(make, world_sizes=[2, 3, 8], samples=96)
    testing.check_restore_anywhere(make, steps=10)
    inner = config.model_copy(update={"pack": config.pack.model_copy(update={"stages": ()})})
    plain = build_data(inner)
    testing.check_exactly_once(
        lambda rank, world_size: make_loader(inner, plain, rank=rank, world_size=world_size),
        stored=transformed(folder, 5),
        world_sizes=[1, 5, 7],
        steps=5,
        most_samples=4000,
    )


def test_two_stages_of_one_class_draw_different_numbers(folder: Path) -> None:
    loader = fmsdata.build_loader(write_config(folder, None, ["Noisy", "Noisy"]))
    tokens = np.concatenate([batch["input_ids"].flatten().numpy() for batch in islice(loader, 200)])
    assert 0.72 < (tokens == 7).mean() < 0.78, "half, and half of the rest; with the same numbers it would be half"


def test_workers_find_the_module_beside_the_file(folder: Path) -> None:
    path = write_config(folder, [{"name": "Upper", "least": 2}], ["Noisy"])
    program = f"""
import fmsdata
from itertools import islice
if __name__ == "__main__":
    rows = []
    for workers in (0, 2):
        loader = fmsdata.build_loader({str(path)!r}, {{"loader.num_workers": workers}})
        rows.append([row.tolist() for batch in islice(loader, 20) for row in batch["input_ids"]])
        loader.close()
    print(rows[0] == rows[1], len(rows[0]))
"""
    (folder / "train.py").write_text(program)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"}
    done = subprocess.run(
        [sys.executable, folder / "train.py"], cwd="/", env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "20"]


def test_a_run_resumes_only_with_the_same_stages_and_arguments(folder: Path) -> None:
    first = fmsdata.build_loader(write_config(folder, [{"name": "Upper", "least": 2}, "clean"], ["Noisy"]))
    for _ in range(5):
        next(first)
    state = json.loads(json.dumps(first.state_dict()))
    described = json.loads(state["pipeline"])["lines"]
    assert described["children"]["below"]["rate"] == 0.5
    (module,) = {(folder / "runs" / "name").read_text()}
    source = described["children"]["below"]["children"]["below"]["children"]["below"]["children"]["below"]
    assert source["children"]["web"]["made_by"] == f"{module}:clean"
    assert source["children"]["web"]["children"]["below"]["least"] == 2, "an argument that no public attribute holds"

    def resumed(*stages: Any, lines: list[Any] | None = None, **more: Any) -> fmsdata.StatefulDataLoader:
        loader = fmsdata.build_loader(write_config(folder, list(stages), ["Noisy"] if lines is None else lines, **more))
        loader.load_state_dict(state)
        return loader

    again = resumed({"name": "Upper", "least": 2}, "clean")
    assert next(again)["input_ids"].tolist() == next(first)["input_ids"].tolist()
    for stages, words in (
        ([{"name": "Upper", "least": 3}, "clean"], "web/least was 2 when it was saved and is 3 now"),
        ([{"name": "Upper", "least": 2}, {"name": "clean", "least": 4}], "web/least is new"),
        (["clean"], "Upper when it was saved, ShardReader now"),
        ([], "Filter when it was saved, ShardReader now"),
    ):
        with pytest.raises(fmsdata.StateError, match=words):
            resumed(*stages)
    with pytest.raises(fmsdata.StateError, match="Noisy above the mixture, a run can't resume with a different mix"):
        resumed({"name": "Upper", "least": 2}, "clean", sources={"web": {"weight": 1}, "wiki": {"weight": 1}})


def test_the_mix_can_be_edited_over_stages_of_documents_and_no_token_is_lost_or_repeated(folder: Path) -> None:
    upper = {"name": "Upper", "least": 5}
    account = testing.Account(transformed(folder, 5), epochs=1)
    loader = fmsdata.build_loader(write_config(folder, [upper]))
    for batch in islice(loader, 70):
        account.add(batch)
    sources = {"web": {"weight": 1}, "wiki": {"weight": 3}}
    edited = fmsdata.build_loader(write_config(folder, [upper], sources=sources))
    edited.load_state_dict(loader.state_dict())
    for batch in islice(edited, 400):
        account.add(batch)
    assert account.is_complete(), account.missing()


WRONG: list[tuple[Any, str]] = [
    ({"name": "Upper", "leest": 2}, "has no parameter 'leest'; did you mean 'least'?"),
    ("Upper", "can't be called with the stage below it and {}: missing a required argument: 'least'"),
    ("Uper", "has no 'Uper'; did you mean 'Upper'?"),
    ("NoStage", "the class is no stage; subclass fmsdata.Stage"),
    ("nothing", "returned None; it must return a stage"),
    ("fails", "failed with {}: ValueError: no luck"),
]


@pytest.mark.parametrize(("stage", "words"), WRONG, ids=str)
@pytest.mark.parametrize("section", ["documents", "pack"])
def test_a_wrong_stage_is_an_error_that_says_where_and_why(folder: Path, section: str, stage: Any, words: str) -> None:
    path = write_config(folder, **{"documents" if section == "documents" else "lines": [stage]})
    with pytest.raises(fmsdata.ConfigError) as caught:
        fmsdata.build_loader(path)
    assert words in str(caught.value)
    if stage not in ("nothing", "fails"):  # these are called only when the pipeline is built
        assert f"{section}.stages.0: stage '" in str(caught.value)
        assert str(caught.value).startswith(f"{path}:"), "the file and the line"


def test_what_is_no_stage_at_all_is_an_error(folder: Path) -> None:
    for stages, words in (
        ([3], "stages.0 is 3; it must be module:Class, or a mapping"),
        (["upper"], "stage 'upper': name a stage of your own as package.module:Class"),
        ([{"least": 3}], "it must have a `name`"),
        ("my:Stage", "stages is 'my:Stage'; it must be a list"),
        (["no_such_module:Stage"], "there is no module 'no_such_module' in "),
    ):
        with pytest.raises(fmsdata.ConfigError) as caught:
            fmsdata.build_loader({**CONFIG, "path": str(folder), "documents": {"stages": stages}})
        assert words in str(caught.value), stages


def test_an_argument_can_be_overridden(folder: Path) -> None:
    path = write_config(folder, [{"name": "Upper", "least": 2}])
    loader = fmsdata.build_loader(path, {"documents.stages.0.by": 2000})
    assert int(next(loader)["input_ids"].max()) >= 2010


def test_the_commands_work_with_stages_of_ones_own(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_config(folder, [{"name": "Upper", "least": 2}], loader={"batch_size": 2})

    def report(name: str, **options: Any) -> Any:
        getattr(import_module(f"fmsdata.cli.{name}"), name)(path, [], as_json=True, **options)
        return json.loads(capsys.readouterr().out)

    assert report("plan")["sources"]["web"]["documents"] == 40
    pieces = [piece for row in report("preview")["batches"][0]["rows"] for piece in row["pieces"]]
    assert all(token >= 1010 for piece in pieces if not piece["inserted"] for token in piece["tokens"])
    audit = report("audit", samples=48, world_sizes="2,5")
    assert audit["holds"]
    assert "The tokens against the shards, because Upper may drop and change documents." in audit["not_checked"]
    with pytest.raises(fmsdata.ConfigError, match="--epoch: Upper may drop and change documents"):
        report("audit", epoch=True)
    assert report("bench", batches=2)["batches"] == 2
    spans = report("trace", step=0, world_size=2, tokenizer="bytes")["spans"]
    assert spans[0]["text"].startswith("⟨1"), "tokens that are no bytes"
    name = f"{spans[0]['source']}/{spans[0]['shard']}#{spans[0]['document']}"
    found = report("trace", document=[name], until=3, world_size=2)["documents"][0]
    assert found["seen"][0]["step"] == 0
