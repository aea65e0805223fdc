"""Sources of text in a configuration."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fmsdata import testing
from fmsdata.config.build import build_data, make_loader
from fmsdata.config.read import read_config
from fmsdata.errors import ConfigError, StateError
from fmsdata.stages.mixture import stages_down_to_mixture
from fmsdata.testing import MakeLoader
from tests.helpers import write_source
from tests.stages.test_tokenize import write_corpus

FMSDATA = Path(sys.executable).parent / "fmsdata"
CONFIG: dict[str, Any] = {
    "seed": 3,
    "sources": {"web": {"weight": 7}, "wiki": {"weight": 3}},
    "documents": {"eos": 256, "tokenizer": "bytes"},
    "pack": {"seq_len": 64},
    "shuffle": {"window": 4},
    "lanes": 6,
    "loader": {"batch_size": 1, "outputs": ["provenance", "epochs"], "prefetch": 1},
}


def maker(root: Path, **changes: Any) -> MakeLoader:
    config = read_config({**CONFIG, "path": str(root), **changes})
    data = build_data(config)
    return lambda rank, world_size: make_loader(config, data, rank=rank, world_size=world_size)


def sources(root: Path, **changes: Any) -> dict[str, Any]:
    data = build_data(read_config({**CONFIG, "path": str(root), **changes}))
    return dict(stages_down_to_mixture(data.lines)[-1].children())


def test_the_tokenizer_is_put_over_every_source_of_text_and_no_other(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    write_source(tmp_path / "tokens", [[5, 6, 7]] * 20)
    built = sources(
        tmp_path,
        sources={**CONFIG["sources"], "tokens": {"weight": 1}},
        documents={"tokenizer": "bytes", "strip": [32], "min_length": 3},
    )
    assert [type(built[name]).__name__ for name in sorted(built)] == ["ShardReader", "Tokenize", "Tokenize"]
    assert (built["web"].strip, built["web"].min_length) == ((32,), 3)
    assert (built["web"].below.strip, built["web"].below.min_length) == ((), 1)
    assert (built["tokens"].strip, built["tokens"].min_length) == ((32,), 3)


def test_the_laws_hold_for_a_configuration_of_text(tmp_path: Path) -> None:
    write_corpus(tmp_path, "txt")
    documents = {"eos": 256, "tokenizer": "bytes", "strip": [32], "min_length": 9}
    make = maker(tmp_path, documents=documents)
    testing.check_same_stream(make, world_sizes=[2, 3], samples=60)
    folders = {name: tmp_path / name for name in ("web", "wiki")}
    stored = testing.stored_documents(folders, tokenizer="bytes", strip=[32], min_length=9)
    testing.check_exactly_once(make, stored=stored, world_sizes=[4, 1, 5], steps=5, most_samples=4000)


def test_text_without_a_tokenizer_says_which_key_to_set(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    with pytest.raises(ConfigError, match=r"source 'web' holds text; .*`documents: {tokenizer: tokenizer\.json}`"):
        sources(tmp_path, documents={"eos": 1})
    with pytest.raises(ConfigError, match=r"tokenizer is 'missing\.json'; there is no such file"):
        sources(tmp_path, documents={"tokenizer": "missing.json"})


def test_a_relative_tokenizer_is_found_from_the_folder_of_the_process_as_path_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.corpus.test_tokenizer import bpe

    write_corpus(tmp_path / "corpus")
    (tmp_path / "model").mkdir()
    bpe().save(str(tmp_path / "model" / "tokenizer.json"))
    monkeypatch.chdir(tmp_path)
    built = sources(Path("corpus"), documents={"tokenizer": "model"})
    assert built["web"].tokenizer.startswith("tokenizer.json:")


def test_natural_weights_of_text_are_refused_unless_tokens_were_counted(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    with pytest.raises(ConfigError, match=r"source 'web' holds text.*natural weight, is not known.*fmsdata index"):
        sources(tmp_path, sources=None)
    assert sources(tmp_path, sources={"web": {}})  # alone, its weight does not matter
    subprocess.run([FMSDATA, "index", tmp_path, "--tokenizer", "bytes"], check=True, capture_output=True, timeout=120)
    data = build_data(read_config({**CONFIG, "path": str(tmp_path), "sources": None}))
    mixture: Any = stages_down_to_mixture(data.lines)[-1]
    stored = testing.stored_documents({name: tmp_path / name for name in ("web", "wiki")}, tokenizer="bytes")
    tokens = {name: sum(len(ids) for key, ids in stored.items() if key[0] == name) for name in ("web", "wiki")}
    assert mixture.weights == pytest.approx({name: n / sum(tokens.values()) for name, n in tokens.items()})
    # Those of another tokenizer are not used.
    with pytest.raises(ConfigError, match="natural weight, is not known"):
        sources(tmp_path, sources=None, documents={"tokenizer": str(_tokenizer(tmp_path))})


def _tokenizer(folder: Path) -> Path:
    from tests.corpus.test_tokenizer import bpe

    path = folder / "tokenizer.json"
    bpe().save(str(path))
    return path


def test_a_source_that_was_removed_is_found_again_with_its_tokenizer(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    before = maker(tmp_path)(0, 1)
    for _ in range(20):
        next(before)
    state = before.state_dict()
    after = maker(tmp_path, sources={"web": {"weight": 1}})(0, 1)
    after.load_state_dict(state)
    assert {span.source for _ in range(40) for row in next(after)["provenance"] for span in row} == {"web"}
    other = maker(tmp_path, documents={"eos": 256, "tokenizer": str(_tokenizer(tmp_path))})(0, 1)
    with pytest.raises(StateError, match="the tokenizer of source 'web' changed"):
        other.load_state_dict(state)


def test_plan_preview_and_audit_know_text(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps({**CONFIG, "path": str(tmp_path)}))

    def run(*arguments: str) -> Any:
        done = subprocess.run([FMSDATA, *arguments, path, "--json"], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    plan = run("plan")
    assert all(source["tokens_are_estimated"] for source in plan["sources"].values())
    assert any("an estimate of a quarter of its bytes" in warning for warning in plan["warnings"])
    assert plan["tokenized_per_worker_bytes"] == pytest.approx(2 * 4 * 65 * 6 * 2, rel=0.01)
    pieces = [piece for row in run("preview")["batches"][0]["rows"] for piece in row["pieces"] if not piece["inserted"]]
    assert all(bytes(piece["tokens"]).decode() == piece["text"] for piece in pieces)
    assert run("audit", "--samples", "60")["holds"]
