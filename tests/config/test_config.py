"""Configurations: what is wrong in one is told with file and line and the way out; what is right does what it says."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, get_args

import fsspec
import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

import fmsdata
from fmsdata import ConfigError, Mixture
from fmsdata.cli.common import parse_overrides
from fmsdata.cli.outlook import outlook
from fmsdata.cli.run import Run
from fmsdata.config.build import build_data, make_loader
from fmsdata.config.read import read_config
from fmsdata.config.sections import Config
from fmsdata.core.options import OUTPUT_NAMES, Mode
from fmsdata.stages.mixture import Phase
from fmsdata.stages.pack import MODES
from fmsdata.tasks.batch import OUTPUTS
from tests.helpers import CONFIG, documents, write_source

LAUGHS = "x-0: &a0 [1]\n" + "".join(f"x-{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12))
ROOT = Path(__file__).parents[2]
FMSDATA = Path(sys.executable).parent / "fmsdata"
WHOLE = "path: corpus\npack: {seq_len: 16}\n"  # lines 1 and 2


def write(tmp_path: Path, text: str | bytes, name: str = "run.yaml") -> Path:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def refused(tmp_path: Path, text: str | bytes, overrides: dict[str, Any] | None = None) -> str:
    """What is said to a file, without the folder."""
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as error:
        read_config(path, overrides)
    return str(error.value).replace(f"{tmp_path}/", "")


def read(tmp_path: Path, text: str, overrides: dict[str, Any] | None = None) -> Config:
    return read_config(write(tmp_path, WHOLE + text), overrides)


def mixture_of(data: fmsdata.Rescalable) -> Mixture:
    mixture = data.lines.below.below.below
    assert isinstance(mixture, Mixture)
    return mixture


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("shufle: {window: 3}", "run.yaml:3: shufle: unknown key; did you mean 'shuffle'?"),
        ("loader:\n  bacth_size: 3", "run.yaml:4: loader.bacth_size: unknown key; did you mean 'batch_size'?"),
        ("sources:\n  web:\n    wieght: 3", "run.yaml:5: sources.web.wieght: unknown key; did you mean 'weight'?"),
        ("phases:\n- until_token: 3", "run.yaml:4: phases.0.until_token: unknown key; did you mean 'until_tokens'?"),
        ("checkpoint: {path: x,\n  evry: 3}", "run.yaml:4: checkpoint.evry: unknown key; did you mean 'every'?"),
        ("batch_size: 3", "run.yaml:3: batch_size: unknown key; did you mean 'loader.batch_size'?"),
        ("shuffle: {qqq: 3}", "run.yaml:3: shuffle.qqq: unknown key; must be one of window, distance"),
    ],
)
def test_an_unknown_key_is_named_with_its_line_and_the_right_one(tmp_path: Path, text: str, message: str) -> None:
    assert refused(tmp_path, WHOLE + text) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('checkpoint:\n  path: x\n  every: "5"', "run.yaml:5: checkpoint.every is '5'; it must be a whole number"),
        ("loader: {num_workers: true}", "run.yaml:3: loader.num_workers is True; it must be a whole number"),
        ("lanes: 16.5", "run.yaml:3: lanes is 16.5; it must be a whole number"),
        ("lanes: 16.0", "run.yaml:3: lanes is 16.0; it must be a whole number"),
        ("lanes:", "run.yaml:3: lanes is None; it must be a whole number"),
        ("lanes: 0", "run.yaml:3: lanes is 0; it must be at least 1"),
        ("loader: {pin_memory: 1}", "run.yaml:3: loader.pin_memory is 1; it must be true or false"),
        ("loader: 4", "run.yaml:3: loader is 4; it must be keys and values"),
        ("documents: {column: 7}", "run.yaml:3: documents.column is 7; it must be text; put quotes around it"),
        ("documents:\n  strip: 0", "run.yaml:4: documents.strip is 0; it must be a list"),
        ("documents:\n  strip:\n  - 0\n  - -1", "run.yaml:6: documents.strip.1 is -1; it must be at least 0"),
        ("sources: {web: 3}", "run.yaml:3: sources.web is 3; it must be keys and values, such as {weight: 3}"),
        ("sources:\n  web:", "run.yaml:4: sources.web is None; it must be keys and values, such as {weight: 3}"),
        ("sources: {web: {weight: true}}", "run.yaml:3: sources.web.weight is True; it must be a number from 0"),
        ("sources: {web: {weight: .inf}}", "run.yaml:3: sources.web.weight is inf; it must be a number from 0"),
        ("sources: {web: {max_epochs: 0}}", "run.yaml:3: sources.web.max_epochs is 0; it must be above 0"),
        ("temperature: .nan", "run.yaml:3: temperature is nan; it must be a finite number"),
        ("temperature: 0", "run.yaml:3: temperature is 0; it must be above 0"),
        ("phases: [{until_tokens: 1.5}]", "run.yaml:3: phases.0.until_tokens is 1.5; it must be a whole number"),
        ("phases: [{until_tokens: .inf}]", "run.yaml:3: phases.0.until_tokens is inf; it must be a whole number"),
        ("phases: [{weights: flat}]", "run.yaml:3: phases.0.weights is 'flat'; it must be a mapping from sources to"),
        ("phases: [{weights: 3}]", "run.yaml:3: phases.0.weights is 3; it must be a mapping from sources to"),
        ("phases:\n- weights:\n    web: x", "run.yaml:5: phases.0.weights.web is 'x'; it must be a number"),
        ("phases:\n- weights:\n    web: -1", "run.yaml:5: phases.0.weights.web is -1; it must be at least 0"),
        ("task: 3", "run.yaml:3: task is 3; it must be the name of a task, or a mapping with its name and options"),
        ("task: masked", "run.yaml:3: task: unknown task 'masked'"),
        ("loader:\n  outputs: [tokens]", "run.yaml:4: loader.outputs: unknown output 'tokens'; batches can hold"),
        ("checkpoint: {every: 3}", "run.yaml:3: checkpoint.path is missing"),
        ("checkpoint: false", "run.yaml:3: checkpoint is False; it must be keys and values"),
    ],
)
def test_a_wrong_value_is_named_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    assert refused(tmp_path, WHOLE + text).startswith(message)


def test_all_that_is_wrong_is_told_at_once(tmp_path: Path) -> None:
    told = refused(
        tmp_path,
        "seed: x\npack:\n  mode: pda\nsources:\n  web: {wieght: 1}\n  web: {weight: 1}\n  no: {}\n"
        "shuffle: {window: '${env:NOT_SET}'}\nphases: [{}, {}]\nloader: {batch_size: 0}\n",
    )
    assert told.splitlines() == [
        "10 problems in the configuration:",
        "  run.yaml: path is missing",
        "  run.yaml:1: seed is 'x'; it must be a whole number",
        "  run.yaml:2: pack.seq_len is missing",
        "  run.yaml:3: pack.mode is 'pda'; it must be 'split', 'pad' or 'bestfit'",
        "  run.yaml:6: sources.web: the same key is already in line 5; remove one of them",
        '  run.yaml:7: sources.no: the key is read as bool; put quotes around it: "no"',
        "  run.yaml:7: sources.no: its weight is left out, but the weight of 'web' is a number: the two can't be "
        "compared; give numbers to all sources or to none",
        "  run.yaml:8: shuffle.window: the environment variable NOT_SET is not set; set it, or write a default as in "
        "${env:NOT_SET:-default}",
        "  run.yaml:9: phases.0: until_tokens is missing; only the last phase may be without end",
        "  run.yaml:10: loader.batch_size is 0; it must be at least 1",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "run.yaml: expected keys and values, found nothing"),
        ("# only a comment\n", "run.yaml: expected keys and values, found nothing"),
        ("- seed: 1\n", "run.yaml: expected keys and values, found a list"),
        ("seed\n", "run.yaml: expected keys and values, found 'seed'"),
        ("loader:\n\tbatch_size: 1\n", "run.yaml:2: not valid YAML: a tab where spaces are needed"),
        ("seed: 1\nlanes: [1\n", "run.yaml:3: not valid YAML: while parsing a flow sequence, expected ',' or ']'"),
        ("seed: 1\n---\nseed: 2\n", "run.yaml:2: not valid YAML: expected a single document"),
        ("a: 1\nseed: *b\n", "run.yaml:2: not valid YAML: found undefined alias 'b'"),
        ("seed: 1\npath: caf\xe9\n".encode("latin-1"), "run.yaml is not text in UTF-8"),
        ("seed: \x07\n", "run.yaml: not valid YAML: unacceptable character"),
        ("seed: 1\npath: 2024-13-45\n", "run.yaml:2: path: '2024-13-45' can't be read: month must be in 1..12"),
        ("loader: &a\n  x: *a\n", "run.yaml:1: the anchor here contains itself"),
        ("loader: !!python/tuple [1]\n", "run.yaml:1: loader: the tag tag:yaml.org,2002:python/tuple is not supported"),
        ("seed: !!python/name:os.system\n", "run.yaml:1: not valid YAML: could not determine a constructor"),
        ("sources: {<<: 3}\n", "run.yaml:1: << takes the alias of a mapping"),
        (LAUGHS, "run.yaml: its aliases (*name) stand for too many values"),
        ("[" * 1500, "run.yaml: nested too deep"),
        (WHOLE + "2024: {}\n", 'run.yaml:3: 2024: the key is read as int; put quotes around it: "2024"'),
        (WHOLE + "2024-13-45: 1\n", "run.yaml:3: 2024-13-45: the key is read as timestamp; put quotes around it"),
        (WHOLE + "? [1]\n: 2\n", "run.yaml:3: the file has a key that is a list or a mapping, not a name"),
    ],
    ids=lambda text: repr(text[:30]),
)
def test_what_is_no_configuration_is_told_why(tmp_path: Path, text: str | bytes, message: str) -> None:
    assert message in refused(tmp_path, text)


def test_a_folder_a_missing_file_and_other_things_are_no_files(tmp_path: Path) -> None:
    for config, words in (
        (tmp_path, "Is a directory"),
        (tmp_path / "nowhere.yaml", "nowhere.yaml: No such file"),
        (3, "a configuration is a dict or the path of a YAML file, not 3"),
        ({"path": "x", "pack": {7: 1, "seq_len": 2}}, "configuration: the key 7 is not text"),
    ):
        with pytest.raises(ConfigError, match=words):
            read_config(config)  # type: ignore[arg-type]


def test_a_dict_is_checked_as_a_file_is(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^configuration: loader.bacth_size: unknown key; did you mean 'batch_size'"):
        read_config({"path": tmp_path, "pack": {"seq_len": 3}, "loader": {"bacth_size": 1}})
    with pytest.raises(ConfigError, match=r"^configuration: include: unknown key; only a file can include others"):
        read_config({"path": tmp_path, "pack": {"seq_len": 3}, "include": "a.yaml"})
    told = read_config({"path": tmp_path, "pack": {"seq_len": np.int64(3)}, "documents": {"strip": (1, 2)}})
    assert (told.path, told.pack.seq_len, told.documents.strip) == (str(tmp_path), 3, (1, 2))


def test_numbers_with_exponents_are_numbers(tmp_path: Path) -> None:
    for text, tokens in (("1e12", 10**12), ("1.8e12", 1_800_000_000_000), ("5.E+3", 5000), ("1_000", 1000)):
        assert read(tmp_path, f"phases: [{{until_tokens: {text}}}]").phases[0].until_tokens == tokens
    told = read(tmp_path, "sources: {a: {weight: 1e-3}, b: {weight: .5e1}, c: {weight: 2}}").sources
    assert told is not None
    assert [source.weight for source in told.values()] == [0.001, 5, 2]
    assert parse_overrides(["phases.0.until_tokens=2e9"]) == {"phases.0.until_tokens": 2e9}


def test_a_section_with_nothing_in_it_is_as_if_it_were_left_out(tmp_path: Path) -> None:
    empty = "".join(f"{name}:\n" for name in ("documents", "shuffle", "loader", "phases", "storage_options"))
    assert read(tmp_path, empty + "checkpoint: {}\nsources:\n") == read(tmp_path, "")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sources: {a: {}, b: {weight: 1}}", "3: sources.a: its weight is left out, but the weight of 'b' is a number"),
        (
            "sources:\n  b: {weight: 1}\n  a: {weight: natural}",
            "5: sources.a: its weight is natural, but the weight of",
        ),
        ("sources: {a: {weight: 0}}", "3: sources: no source has a weight above 0"),
        ("sources: {}", "3: sources: `sources` is empty"),
        ("sources: {'': {}}", "3: sources: a source has no name"),
        ("temperature: 2\nsources: {a: {weight: 1}}", "3: temperature: temperature is for `weight: natural`"),
        ("phases: [{weights: {a: 1}, temperature: 2}]", "3: phases.0.temperature: temperature is for natural weights"),
        (
            "sources: {a: {weight: 1}}\nphases: [{temperature: 2}]",
            "4: phases.0.temperature: temperature is for natural weights",
        ),
        ("phases: [{weights: {a: 0}}]", "3: phases.0.weights: no source has a weight above 0"),
        (
            "phases:\n- {until_tokens: 5}\n- {until_tokens: 5}",
            "5: phases.1.until_tokens: it must be more than in the phase before",
        ),
        (
            "sources: {wiki: {}}\nphases:\n- weights:\n    wikki: 1",
            "6: phases.0.weights.wikki: no such source; did you mean 'wiki'?",
        ),
        (
            "sources: {web: {}, wiki: {}, code: {}}\nphases:\n- until_tokens: 9\n- weights: {web: 1}",
            "6: phases.1.weights: no weight for 'code', 'wiki': write `code: 0, wiki: 0` to stop them in this phase",
        ),
    ],
)
def test_a_mix_that_makes_no_sense_is_refused(tmp_path: Path, text: str, message: str) -> None:
    assert refused(tmp_path, WHOLE + text).startswith(f"run.yaml:{message}")


# Overrides


def test_overrides_name_values_of_any_section(tmp_path: Path) -> None:
    text = "sources: {web: {weight: 1}, wiki: {weight: 1}}\nphases: [{until_tokens: 5}, {}]\ntask: causal_lm\nloader:\n"
    given = [
        "loader.batch_size=4",
        "shuffle.window=9",  # of a section that is not there
        "documents.strip=[0, 1]",
        "sources.wiki=null",
        "sources.news={weight: 2, path: lang=en/news.path=x}",
        "phases.1.weights.web=3",
        "phases.1.weights.news=0",
        "task.prompt_len=1",
        "path=/data/lang=en",
        "checkpoint={path: c, every: null}",
    ]
    told = read(tmp_path, text, parse_overrides(given))
    assert (told.loader.batch_size, told.shuffle.window, told.documents.strip) == (4, 9, (0, 1))
    assert told.sources is not None
    assert {name: source.path for name, source in told.sources.items()} == {"web": None, "news": "lang=en/news.path=x"}
    assert told.phases[1].weights == {"web": 3, "news": 0}
    assert told.task == {"name": "causal_lm", "prompt_len": 1}
    assert told.path == "/data/lang=en"
    assert told.checkpoint is not None
    assert told.checkpoint.every is None


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "loader.bacth_size=4",
            "override 'loader.bacth_size': loader.bacth_size: unknown key; did you mean 'batch_size'?",
        ),
        ("loder.batch_size=4", "override 'loder.batch_size': loder: unknown key; did you mean 'loader'?"),
        ("lanes=x", "override 'lanes': lanes is 'x'; it must be a whole number"),
        ("lanes.x=1", "override 'lanes.x': 'lanes' is a value, not a section"),
        (
            "sources.web.wieght=1",
            "override 'sources.web.wieght': sources.web.wieght: unknown key; did you mean 'weight'?",
        ),
        ("sources.wbe.weight=1", "override 'sources.wbe.weight': there is no source 'wbe'; did you mean 'web'?"),
        ("sources.wbe=null", "override 'sources.wbe': there is no source 'wbe'; did you mean 'web'?"),
        (
            "phases.1.until_tokens=1",
            "override 'phases.1.until_tokens': 'phases' is a list of 1; its items are numbered",
        ),
        (
            "phases.0.weights.wbe=1",
            "override 'phases.0.weights.wbe': phases.0.weights.wbe: no such source; did you mean",
        ),
        ("pack=null", "run.yaml: pack is missing"),
        ("lanes", "override 'lanes': write KEY=VALUE, such as loader.batch_size=4"),
        ("=4", "override '=4': write KEY=VALUE"),
        ("lanes=", "override 'lanes=' has no value; write lanes=null for no value"),
        ("lanes=[1", "override 'lanes=[1': '[1' is not a YAML value"),
        (
            "loader={batch_size: 1, batch_size: 2}",
            "is not a YAML value (value:1: batch_size: the same key is already in line 1",
        ),
        (".=3", "override '.': a key is names joined by dots"),
        ("loader.=3", "override 'loader.': a key is names joined by dots"),
    ],
)
def test_an_override_that_can_not_be_is_told_why(tmp_path: Path, override: str, message: str) -> None:
    path = write(tmp_path, WHOLE + "lanes: 3\nsources: {web: {weight: 1}}\nphases: [{}]\n")
    with pytest.raises(ConfigError) as error:
        read_config(path, parse_overrides([override]))
    assert message in str(error.value)


@given(
    names=st.lists(st.text("ab./=-", min_size=1, max_size=8), min_size=1, max_size=5, unique=True),
    pick=st.integers(0),
    weight=st.integers(2, 10**6),
)
def test_any_name_of_a_source_can_be_overridden(names: list[str], pick: int, weight: int) -> None:
    name = names[pick % len(names)]
    config: dict[str, Any] = {"path": "x", "pack": {"seq_len": 4}, "sources": {one: {"weight": 1} for one in names}}
    told = read_config(config, parse_overrides([f"sources.{name}.weight={weight}"]))
    assert told.sources is not None
    assert {one: source.weight for one, source in told.sources.items()} == {**dict.fromkeys(names, 1), name: weight}
    if len(names) > 1:
        without = read_config(config, parse_overrides([f"sources.{name}=null"]))
        assert set(without.sources or {}) == set(names) - {name}


@given(
    key=st.sampled_from(["seed", "lanes", "loader.batch_size", "loader.prefetch", "shuffle.window", "documents.eos"]),
    value=st.integers(1, 10**9),
)
def test_an_override_is_as_if_it_stood_in_the_file(key: str, value: int) -> None:
    config: dict[str, Any] = {"path": "x", "pack": {"seq_len": 4}}
    section, dot, name = key.rpartition(".")
    written = read_config({**config, **({section: {name: value}} if dot else {name: value})})
    assert read_config(config, parse_overrides([f"{key}={value}"])) == read_config(config, {key: value}) == written


# The environment


def test_variables_of_the_environment_are_put_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"BATCH": "6", "BUCKET": "corpus", "KEY": "12345", "EMPTY": "", "RATE": "1e3"}.items():
        monkeypatch.setenv(name, value)
    text = """
loader: {batch_size: "${env:BATCH}", num_workers: "${env:WORKERS_NOT_SET:-2}", pin_memory: "${env:EMPTY:-true}"}
storage_options:
  key: ${env:KEY}
  deeper: {port: "${env:KEY}", none: "${env:EMPTY}"}
documents: {column: "a$${env:KEY}", strip: ["${env:BATCH}"]}
checkpoint: {path: "s3://${env:BUCKET}/${env:NOT_SET:-run}-${env:BATCH}/", every: "${env:NOT_SET:-null}"}
phases: [{until_tokens: "${env:RATE}"}]
"""
    told = read(tmp_path, text)
    assert dict(told.loader) | {"batch_size": 6, "num_workers": 2, "pin_memory": True} == dict(told.loader)
    assert told.storage_options == {"key": "12345", "deeper": {"port": "12345", "none": ""}}
    assert told.documents.column == "a${env:KEY}"
    assert told.documents.strip == (6,)
    assert told.checkpoint is not None
    assert (told.checkpoint.path, told.checkpoint.every) == ("s3://corpus/run-6/", None)
    assert told.phases[0].until_tokens == 1000
    overridden = read_config({"path": "${env:BUCKET}", "pack": {"seq_len": 3}}, {"lanes": "${env:BATCH}"})
    assert (overridden.path, overridden.lanes) == ("corpus", 6)


def test_a_variable_that_is_not_set_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SECRET", raising=False)
    text = WHOLE + "storage_options:\n  key: ${env:SECRET}\n"
    assert refused(tmp_path, text) == (
        "run.yaml:4: storage_options.key: the environment variable SECRET is not set; set it, or write a default as in "
        "${env:SECRET:-default}"
    )
    assert read_config(tmp_path / "run.yaml", {"storage_options": {}}).storage_options == {}
    for wrong in ("${SECRET}", "${env:}", "${env:SECRET", "${oc.env:SECRET}"):
        said = refused(tmp_path, WHOLE + f"documents:\n  column: '{wrong}'\n")
        assert said.startswith("run.yaml:4: documents.column: '${' starts a variable, as in ${env:HOME}; write $${ for")


def test_a_secret_is_never_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "hunter2")
    for text in (
        "lanes: ${env:SECRET}",
        "sources: {a: {weight: '${env:SECRET}'}}",
        "pack: {seq_len: 16, mode: '${env:SECRET}'}",
        "storage_options: [hunter2]",
        "storage_options: hunter2",
        "task: ${env:SECRET}",
        "loader: ['${env:SECRET}', 3]",
        "loader: {outputs: ['${env:SECRET}']}",
    ):
        said = refused(tmp_path, WHOLE.replace("pack:", "x-pack:" if "pack:" in text else "pack:") + text)
        assert "run.yaml:3" in said
        assert "hunter2" not in said
    told = read(
        tmp_path, "storage_options: {key: '${env:SECRET}'}\ncheckpoint: {path: x, storage_options: {key: hunter2}}"
    )
    assert told.storage_options == {"key": "hunter2"}
    assert "hunter2" not in repr(told)


# Includes and anchors


def test_a_file_is_laid_over_those_it_includes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHICH", "two")
    write(
        tmp_path, "include: ../base.yaml\nsources: {a: {weight: 1}, b: {weight: 2, path: deep/b}}\n", "shared/one.yaml"
    )
    write(tmp_path, "sources: {b: {weight: 3}, c: {weight: 4}}\nlanes: 5\n", "shared/two.yaml")
    write(tmp_path, "seed: 9\nlanes: 4\ncheckpoint: {path: x}\nloader: {batch_size: 7, prefetch: 1}\n", "base.yaml")
    told = read(
        tmp_path,
        "include: [shared/one.yaml, 'shared/${env:WHICH}.yaml']\nsources: {a: null, c: {max_epochs: 2}}\n"
        "checkpoint: null\nloader:\n  prefetch: 2\ndocuments:\n",
    )
    assert (told.seed, told.lanes, told.checkpoint, told.loader.batch_size, told.loader.prefetch) == (9, 5, None, 7, 2)
    assert {name: dict(source) for name, source in (told.sources or {}).items()} == {
        "b": {"weight": 3, "path": "deep/b", "files": None, "max_epochs": None},
        "c": {"weight": 4, "path": None, "files": None, "max_epochs": 2},
    }
    kept = read(tmp_path, "include: shared/one.yaml\nsources:\n  # a: {weight: 3}\n")
    assert set(kept.sources or {}) == {"a", "b"}, "a section that has nothing in it removes nothing"


def test_what_is_wrong_in_an_included_file_is_told_of_that_file(tmp_path: Path) -> None:
    write(tmp_path, "sources:\n  web: {weigth: 1}\n", "shared/sources.yaml")
    message = "shared/sources.yaml:2: sources.web.weigth: unknown key; did you mean 'weight'?"
    assert refused(tmp_path, WHOLE + "include: shared/sources.yaml\n") == message
    write(tmp_path, "sources: [\n", "shared/sources.yaml")
    assert refused(tmp_path, WHOLE + "include: shared/sources.yaml\n").startswith(
        "shared/sources.yaml:2: not valid YAML"
    )


def test_an_include_that_can_not_be_is_told_why(tmp_path: Path) -> None:
    write(tmp_path, "lanes: 3\ninclude: run.yaml\n", "other.yaml")
    for include, message in (
        ("nowhere.yaml", "run.yaml:3: include 'nowhere.yaml': there is no file nowhere.yaml"),
        (".", "run.yaml:3: include '.': there is no file"),
        ("run.yaml", "run.yaml:3: files include each other: run.yaml -> run.yaml"),
        ("other.yaml", "other.yaml:2: files include each other: run.yaml -> other.yaml -> run.yaml"),
        ("[other.yaml, 3]", "other.yaml:2: files include each other"),
        ("{a: b}", "run.yaml:3: include takes the name of a YAML file, or a list of names"),
        ("${env:NOT_SET}", "run.yaml:3: include: the environment variable NOT_SET is not set"),
        ("3", "run.yaml:3: include takes the name of a YAML file, or a list of names"),
    ):
        assert refused(tmp_path, WHOLE + f"include: {include}\n").startswith(message)


def test_anchors_and_merge_keys_share_values(tmp_path: Path) -> None:
    told = read(
        tmp_path,
        "x-small: &small {max_epochs: 2, weight: 1}\nx-deep: &deep {path: deep}\n"
        "sources:\n  a: *small\n  b: {<<: *small, weight: 3}\n  c: {<<: [*deep, *small]}\n",
    )
    assert {name: dict(source) for name, source in (told.sources or {}).items()} == {
        "a": {"weight": 1, "path": None, "files": None, "max_epochs": 2},
        "b": {"weight": 3, "path": None, "files": None, "max_epochs": 2},
        "c": {"weight": 1, "path": "deep", "files": None, "max_epochs": 2},
    }
    wrong = WHOLE + "x-small: &small\n  weigth: 1\nsources:\n  a: {<<: *small}\n"
    assert refused(tmp_path, wrong) == "run.yaml:4: sources.a.weigth: unknown key; did you mean 'weight'?"


# What the stages are made of


def mixture(root: Path, **told: Any) -> Mixture:
    return mixture_of(build_data(read_config({**CONFIG, "path": root, **told})))


def test_natural_weights_are_tokens_and_temperature_flattens_them(corpus: Path) -> None:
    sizes = {name: fmsdata.ShardReader(corpus / name).size().tokens for name in ("web", "wiki")}
    natural = mixture(corpus, sources={"web": {}, "wiki": {"weight": "natural"}}).weights
    assert natural == pytest.approx({name: size / sum(sizes.values()) for name, size in sizes.items()})
    assert mixture(corpus, sources=None).weights == natural
    assert mixture(corpus, sources=None, temperature=1).weights == pytest.approx(natural)
    roots = {name: size**0.5 for name, size in sizes.items()}
    flatter = mixture(corpus, sources=None, temperature=2).weights
    assert flatter == pytest.approx({name: root / sum(roots.values()) for name, root in roots.items()})
    assert mixture(corpus, sources=None, temperature=1e9).weights == pytest.approx({"web": 0.5, "wiki": 0.5})
    sharp = mixture(corpus, sources=None, temperature=1e-9).weights
    assert 0 < sharp["wiki"] < 1e-300, "it is still read"
    assert mixture(corpus, sources={"web": {}, "wiki": {"weight": 0}}).weights == {"web": 1, "wiki": 0}


def test_phases_are_what_the_configuration_says(corpus: Path) -> None:
    sources: dict[str, Any] = {"web": {"weight": 7}, "wiki": {"weight": 3, "max_epochs": 2.5}}
    phases = [
        {"until_tokens": 1.0e3},
        {"until_tokens": 2000, "weights": {"web": 1, "wiki": 0}},
        {"until_tokens": 3000, "weights": "natural"},
        {"weights": "natural", "temperature": 1e12},
    ]
    made = mixture(corpus, sources=sources, phases=phases)
    natural = mixture(corpus, sources=None).weights
    assert made.phases[:2] == (
        Phase(until_tokens=1000, weights={"web": 0.7, "wiki": 0.3}),
        Phase(until_tokens=2000, weights={"web": 1, "wiki": 0}),
    )
    assert made.phases[2] == Phase(until_tokens=3000, weights=natural)
    assert made.phases[3].until_tokens is None
    assert made.phases[3].weights == pytest.approx({"web": 0.5, "wiki": 0.5})
    assert made.weights == {"web": 0.7, "wiki": 0.3}
    assert [getattr(stage, "max_epochs", None) for stage in made.sources.values()] == [None, 2.5]
    flat = mixture(corpus, sources=None, temperature=1e12, phases=[{"until_tokens": 9}, {"temperature": 1}]).phases
    assert [phase.weights for phase in flat] == [pytest.approx({"web": 0.5, "wiki": 0.5}), pytest.approx(natural)]
    with pytest.raises(ConfigError, match="unknown source 'wikki'"):
        mixture(corpus, sources=None, phases=[{"weights": {"wikki": 1}}])
    with pytest.raises(ConfigError, match="phase 0: no weight for 'wiki': write `wiki: 0` to stop it in this phase"):
        mixture(corpus, sources=None, phases=[{"weights": {"web": 1}}])


def test_checkpoints_take_the_storage_options_of_the_same_kind_of_path(corpus: Path, tmp_path: Path) -> None:
    def options(**told: Any) -> Any:
        config = read_config({**CONFIG, "path": corpus, "storage_options": {"auto_mkdir": True}, "checkpoint": told})
        loader = make_loader(config, build_data(config), rank=0, world_size=1)
        assert loader.checkpoint is not None
        return loader.checkpoint._folder.options

    assert options(path=str(tmp_path / "a")) == {"auto_mkdir": True}
    assert options(path=f"file://{tmp_path}/b") == {"auto_mkdir": True}
    assert options(path=str(tmp_path / "a"), storage_options={}) == {}
    assert options(path="memory://c") == {}
    fsspec.filesystem("memory").store.clear()


# The examples, the schema and the docs


def examples() -> Iterator[tuple[str, Any]]:
    for path in sorted((ROOT / "configs").glob("*.yaml")):
        yield path.name, yaml.safe_load(path.read_text())["data"] if path.name == "train-demo.yaml" else path


@pytest.mark.parametrize(("name", "config"), list(examples()), ids=lambda one: one if isinstance(one, str) else "")
def test_every_example_can_be_planned_and_read(tmp_path: Path, name: str, config: Any) -> None:
    overrides: dict[str, Any] = {"path": tmp_path / "corpus", "storage_options": {}, "loader.pin_memory": False}
    overrides |= {"loader.prefetch": 1, "shuffle.window": 2}  # the corpus is too small for more
    told = read_config(config, overrides)
    if told.checkpoint is not None:
        overrides["checkpoint.path"] = tmp_path / "checkpoints"
        told = read_config(config, overrides)
    rng = np.random.default_rng(0)
    assert told.sources is not None
    for source, one in told.sources.items():
        write_source(tmp_path / "corpus" / (one.path or source), documents(rng, 40, longest=400, shortest=20))
    data = build_data(told)
    ranks = 1024 if name == "s3-128-nodes.yaml" else told.lanes // 2
    assert told.lanes % ranks == 0
    planned = outlook(Run.of_config(told, data), None, ranks)
    assert planned["sources"].keys() == told.sources.keys()
    assert ranks in planned["same_stream_at_world_sizes"]
    loader = make_loader(told, data, rank=ranks - 1, world_size=ranks)
    for batch in islice(loader, 2):
        assert batch["input_ids"].shape == (told.loader.batch_size, told.pack.seq_len)
    loader.close()
    total = sum(float(one.weight) for one in told.sources.values())
    if name == "multilingual.yaml":
        shares = sorted(float(one.weight) / total for one in told.sources.values())
        assert (len(shares), shares[0], shares[-1]) == (13, 0.001, 0.7725)
    if name == "two-phases.yaml":
        assert [phase.until_tokens for phase in mixture_of(data).phases] == [1_800_000_000_000, None]
    if name == "s3-128-nodes.yaml":
        assert (told.sources["code"].weight, told.sources["code"].path) == (1200, "lang=code/dataset=github")
        assert "proofs" not in told.sources


def test_the_s3_example_asks_for_its_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    path = ROOT / "configs" / "s3-128-nodes.yaml"
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match=r"s3-128-nodes.yaml:\d+: storage_options.key: .*AWS_ACCESS_KEY_ID"):
        read_config(path)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "123")
    told = read_config(path)
    assert told.path.startswith("s3://")
    assert told.storage_options["key"] == told.storage_options["secret"] == "123"


def test_examples_name_the_schema_that_is_up_to_date() -> None:
    schema = ROOT / "configs" / "schema.json"
    done = subprocess.run([FMSDATA, "schema"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == schema.read_text(), "run `fmsdata schema > configs/schema.json`"
    for path in (ROOT / "configs").glob("**/*.yaml"):
        first = path.read_text().splitlines()[0]
        if path.name != "train-demo.yaml":  # a configuration is only a part of it
            named = re.fullmatch(r"# yaml-language-server: \$schema=(\S+)", first)
            assert named, path
            assert (path.parent / named[1]).resolve() == schema


def fields(schema: Any) -> Iterator[tuple[str, Any]]:
    for section in [schema, *schema["$defs"].values()]:
        yield from section["properties"].items()


def test_the_schema_knows_all_outputs_and_modes() -> None:
    """Their names are in a module of their own, which needs no torch."""
    assert tuple(OUTPUTS) == OUTPUT_NAMES
    assert tuple(MODES) == get_args(Mode)


def test_every_key_is_described_in_the_schema_and_in_the_docs() -> None:
    schema = json.loads((ROOT / "configs" / "schema.json").read_text())
    page = (ROOT / "docs" / "configuration.md").read_text()
    for name, field in fields(schema):
        section = schema["$defs"].get(field.get("$ref", "").removeprefix("#/$defs/"), {})
        assert field.get("description") or section.get("description"), name
        assert f"`{name}`" in page, name
    assert schema["patternProperties"] == {"^x-": {"description": "Ignored: a place for anchors."}}
    assert not schema["additionalProperties"]


def test_the_yaml_of_the_docs_is_valid(tmp_path: Path) -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "configuration.md").read_text(), re.DOTALL)
    assert len(blocks) == 6
    for block in blocks:
        block = block.replace("sources/multilingual.yaml", str(ROOT / "configs" / "sources" / "multilingual.yaml"))
        assert read_config(write(tmp_path, block), {"path": "x", "pack.seq_len": 4}).pack.seq_len == 4
