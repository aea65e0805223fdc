"""What the commands look at: a file, a section of it, or a function."""

import json
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

import fmsdata
from fmsdata import testing
from fmsdata.cli.bench import verdict
from fmsdata.config.read import read_config
from fmsdata.display.decoding import decoder
from tests.helpers import CONFIG

ROOT = Path(__file__).parents[2]
MODULE = """
import fmsdata

def data(lanes=6, epochs=None, reader=fmsdata.ShardReader):
    docs = fmsdata.Delimit(reader({folder!r} + "/web"), eos=0)
    return fmsdata.Rescalable(fmsdata.Shuffle(fmsdata.Pack(docs, seq_len=17), window=4), lanes=lanes, epochs=epochs)

def loader():
    return fmsdata.StatefulDataLoader(data(), batch_size=3, outputs=["provenance"], rank=0, world_size=1)

def saving():
    checkpoint = fmsdata.Checkpoints({folder!r} + "/saved", every=2)
    return fmsdata.StatefulDataLoader(data(), batch_size=2, checkpoint=checkpoint, rank=0, world_size=1)

def changed():
    docs = fmsdata.Map(fmsdata.ShardReader({folder!r} + "/web"), lambda item: item.tokens + 1000)
    return fmsdata.Rescalable(fmsdata.Pack(docs, seq_len=17), lanes=6)

def kind():
    return fmsdata.Rescalable

def lines():
    return data().lines
"""


@pytest.fixture
def own(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    name = f"own_data_{abs(hash(corpus)):x}"
    (corpus / f"{name}.py").write_text(MODULE.replace("{folder!r}", repr(str(corpus))))
    monkeypatch.chdir(corpus)
    yield name
    sys.modules.pop(name, None)


@pytest.fixture
def report(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    def call(name: str, config: str | Path, *overrides: str, **options: Any) -> Any:
        command = getattr(import_module(f"fmsdata.cli.{name}"), name)
        command(Path(config), list(overrides), as_json=True, **options)
        return json.loads(capsys.readouterr().out)

    return call


def test_the_commands_take_a_function_that_returns_the_data(own: str, report: Callable[..., Any]) -> None:
    planned = report("plan", f"{own}:data", "lanes=12")
    assert (planned["lanes"], planned["lines_per_step"], list(planned["sources"])) == (12, 8, ["web"])
    assert report("plan", f"{own}:data", "epochs=1")["pass"]["samples"] > 10
    batch = report("preview", f"{own}:data")["batches"][0]
    assert batch["fields"] == {"input_ids": [8, 16], "labels": [8, 16]}
    assert report("bench", f"{own}:data", batches=2)["tokens_per_batch"] == 8 * 16
    audit = report("audit", f"{own}:data", samples=36, world_sizes="2,5")
    assert audit["holds"]
    assert audit["documents_whole"] > 0
    assert report("audit", f"{own}:data", "epochs=1", epoch=True, world_sizes="2,3")["pass_samples"] > 10
    assert len(report("trace", f"{own}:data", step=1, world_size=1)["spans"]) >= 8


def test_a_function_may_return_a_loader(own: str, report: Callable[..., Any], corpus: Path) -> None:
    assert report("plan", f"{own}:loader")["lines_per_step"] == 3
    loader = import_module(own).saving()
    for _ in range(5):
        next(loader)
    loader.close()
    assert report("trace", f"{own}:saving", step=3)["read_from_step"] == 2
    assert sorted(path.name for path in (corpus / "saved").glob("step-*")) == ["step-2", "step-4"]


def test_stages_that_change_documents_are_audited_without_the_shards(own: str, report: Callable[..., Any]) -> None:
    audit = report("audit", f"{own}:changed", samples=36, world_sizes="2,5")
    assert audit["holds"]
    assert any("because Map may drop and change documents" in sentence for sentence in audit["not_checked"])


def test_a_wrong_function_is_an_error_that_names_it(own: str, report: Callable[..., Any]) -> None:
    for function, overrides, words in (
        ("dta", (), "has no 'dta'; did you mean 'data'?"),
        ("data", ("lane=3",), "has no parameter 'lane'; did you mean 'lanes'?"),
        ("kind", (), "returned <class 'fmsdata.run.rescalable.Rescalable'>; it must return the data"),
        ("lines", (), "returned Shuffle(...); it must return the data, a Rescalable, or a StatefulDataLoader"),
    ):
        with pytest.raises(fmsdata.ConfigError) as caught:
            report("plan", f"{own}:{function}", *overrides)
        assert words in str(caught.value)
    with pytest.raises(fmsdata.ConfigError, match="--section is for YAML files"):
        report("plan", f"{own}:data", section="data")
    with pytest.raises(fmsdata.ConfigError, match=f"there is no module .*; write {own}:data"):
        report("plan", f"{own}.py:data")
    with pytest.raises(fmsdata.ConfigError, match="nowhere"):
        report("plan", "nowhere.yaml")


def test_a_section_of_a_file_is_the_configuration(corpus: Path, report: Callable[..., Any]) -> None:
    data = {**CONFIG, "path": str(corpus)}
    path = corpus / "train.yaml"
    path.write_text(yaml.safe_dump({"data": data, "model": {"width": 4}, "nested": {"data": data}}))
    for section in ("data", "nested.data"):
        assert report("plan", path, "lanes=12", section=section)["lanes"] == 12
        assert report("preview", path, section=section)["batches"]
        assert len(report("trace", path, section=section, step=0, world_size=1)["spans"])
    assert fmsdata.build_loader(path, section="data").data.lanes == 24
    with pytest.raises(fmsdata.ConfigError, match="the section 'data' of this file: add --section data, or"):
        report("plan", path)
    with pytest.raises(fmsdata.ConfigError, match=r"train.yaml: there is no section 'dta'; did you mean 'data'\?"):
        report("plan", path, section="dta")
    with pytest.raises(fmsdata.ConfigError, match=r"'model\.width' is 4, not a section"):
        report("plan", path, section="model.width")


def test_the_configuration_of_the_example_is_a_section() -> None:
    assert read_config(ROOT / "configs/train-demo.yaml", section="data").lanes == 24


def test_index_reports_as_json(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from fmsdata.cli.index import index

    (corpus / "text").mkdir()
    (corpus / "text" / "a.txt").write_text("one\ntwo\n")
    for written in (True, False):
        index(str(corpus), tokenizer="bytes", as_json=True)
        done = json.loads(capsys.readouterr().out)
        assert (done["file"], done["written"], done["shards"]) == (f"{corpus}/meta/counts.csv", written, 5)
        assert done["text"]["documents"] == 2
        assert done["text"]["tokens"] == 6


def test_the_verdict_of_a_bench_is_about_a_gpu() -> None:
    speed = {"overall": 1_234_567.8, "median": 2e6}
    report = {"tokens_per_second": speed, "step_seconds": 0.0, "tokens_per_batch": 4096, "share_of_time_waited": 0.99}
    assert verdict(report) == "enough for 1,234,568 tokens/s per GPU"
    steps = {**report, "step_seconds": 0.25}
    assert verdict({**steps, "share_of_time_waited": 0.004}) == (
        "enough for 16,384 tokens/s per GPU (steps of 0.25 s): waited 0.4% of the time"
    )
    assert verdict({**steps, "share_of_time_waited": 0.3}).startswith("not enough for 16,384 tokens/s per GPU")


def test_a_traced_span_is_shown_with_its_stored_tokens(corpus: Path, report: Callable[..., Any]) -> None:
    path = corpus / "run.yaml"
    path.write_text(yaml.safe_dump({**CONFIG, "path": str(corpus), "loader": {"batch_size": 4}}))
    stored = testing.stored_documents({name: corpus / name for name in ("web", "wiki")})
    decode = decoder("bytes")
    spans = report("trace", path, step=2, world_size=3, tokenizer="bytes")["spans"]
    assert len(spans) >= 12
    for span in spans:
        document = stored[span["source"], span["shard"], span["document"]]
        assert span["text"] == decode(document[span["start"] : span["stop"]].tolist())
    name = f"{spans[0]['source']}/{spans[0]['shard']}#{spans[0]['document']}"
    (found,) = report("trace", path, document=[name], until=9, world_size=3, tokenizer="bytes")["documents"]
    assert found["text"] == decode(stored[found["source"], found["shard"], found["document"]].tolist())
    assert "text" not in report("trace", path, step=2, world_size=3)["spans"][0]
