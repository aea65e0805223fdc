"""Bad input: each case its own clear error, naming what was wrong and the way out."""

import copy
import json
import os
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import fmsdata
from fmsdata import ConfigError, CountsError, DataError, StateError
from fmsdata.corpus.index import write_index
from fmsdata.corpus.manifest import FILE
from tests.helpers import CONFIG, closed, documents, maker, opened, write_source


def build(root: Path, overrides: dict[str, Any] | None = None, **ranks: Any) -> fmsdata.StatefulDataLoader:
    return fmsdata.build_loader({**CONFIG, "path": str(root)}, overrides, **({"rank": 0, "world_size": 1} | ranks))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"sources.web.weight": -2}, r"sources.web.weight is -2; it must be a number from 0"),
        ({"sources.web.weight": float("nan")}, r"sources.web.weight is nan; it must be a number from 0"),
        ({"sources.web.weight": "much"}, r"sources.web.weight is 'much'; .* or the word natural"),
        ({"sources": {}}, r"`sources` is empty"),
        ({"lanes": 0}, r"lanes is 0"),
        ({"shuffle.window": 0}, r"window is 0"),
        ({"pack.seq_len": 0}, r"pack.seq_len is 0; it must be at least 1"),
        ({"pack.seq_len": 1, "pack.bol": 2, "pack.eol": 3}, r"seq_len is 2; a line needs room for at least 3"),
        ({"pack.mode": "fit"}, r"pack.mode is 'fit'; it must be 'split', 'pad' or 'bestfit'"),
        ({"pack.mode": "bestfit"}, r"needs a `bol` token"),
        ({"pack.mode": "bestfit", "pack.bol": 1}, r"needs a `pad` token, or `crop`"),
        ({"pack.max_documents": 3}, r"'split' has no `max_documents`"),
        ({"pack.mode": "pad"}, r"needs a `pad` token"),
        ({"pack.pad": -1}, r"pack.pad is -1"),
        ({"documents.bos": -1}, r"bos is -1"),
        ({"loader.batch_size": 0}, r"batch_size is 0"),
        ({"loader.num_workers": -1}, r"num_workers is -1"),
        ({"loader.prefetch": -1}, r"prefetch is -1"),
        ({"loader.multiprocessing_context": "thread"}, r"multiprocessing_context is 'thread'; it must be 'fork'"),
        ({"loader.outputs": ["documents"]}, r"unknown output 'documents'.*document_ids"),
        ({"task.prompt_len": -1}, r"prompt_len is -1"),
        ({"task": "masked"}, r"task: .*'masked'"),
        ({"shufle": {"window": 3}}, r"shufle: unknown key; did you mean 'shuffle'"),
        ({"loader.batchsize": 3}, r"loader.batchsize: unknown key; did you mean 'batch_size'"),
        ({"sources.web.wieght": 3}, r"sources.web.wieght: unknown key; did you mean 'weight'"),
        ({"seed.x": 3}, r"override 'seed.x': 'seed' is a value"),
        ({"phases": [{"weights": {"web": 1, "wiki": 0}}, {}]}, r"phases.0: until_tokens is missing"),
        ({"checkpoint": {"path": "x", "every": 0}}, r"every is 0"),
        ({"checkpoint": {"path": "x", "keep": 0}}, r"keep is 0"),
        ({"checkpoint": {"path": ""}}, r"path is ''"),
        ({"checkpoint": {"path": "nosuch://x"}}, r"nosuch"),
        ({"checkpoint": {"path": "x", "evry": 3}}, r"checkpoint.evry: unknown key; did you mean 'every'"),
        ({"path": "nosuch://bucket/corpus"}, r"path 'nosuch://bucket/corpus.*' can't be used: Protocol not known"),
        ({"path": "zip::s3://bucket/corpus"}, r"path 'zip::s3://bucket/corpus' chains several filesystems"),
    ],
    ids=str,
)
def test_a_wrong_value_is_named(corpus: Path, overrides: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build(corpus, overrides)


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ({"rank": 2, "world_size": 2}, "rank is 2 of world size 2"),
        ({"rank": -1, "world_size": 2}, "rank is -1 of world size 2"),
        ({"rank": 0, "world_size": 0}, "rank is 0 of world size 0"),
        ({"rank": 0, "world_size": 25}, "world size 25 is more than the 24 lanes"),
    ],
    ids=str,
)
def test_a_rank_that_can_not_be_is_named(corpus: Path, ranks: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build(corpus, **ranks)


def test_weights_must_be_those_of_the_sources(corpus: Path) -> None:
    readers: dict[str, fmsdata.Stage] = {name: fmsdata.ShardReader(corpus / name) for name in ("web", "wiki")}
    with pytest.raises(ConfigError, match="unknown source 'wik'; the sources are web, wiki"):
        fmsdata.Mixture(readers, {"web": 1, "wik": 1})
    with pytest.raises(ConfigError, match="no weight for source 'wiki'"):
        fmsdata.Mixture(readers, {"web": 1})
    with pytest.raises(ConfigError, match="at least one source"):
        fmsdata.Mixture({}, {})


def test_a_missing_folder_is_named(corpus: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere: no such folder; check `path`"):
        build(corpus, {"path": str(corpus / "nowhere")})
    with pytest.raises(DataError, match=r"source 'news': there is no folder .*news; must be one of web, wiki"):
        build(corpus, {"sources.news": {"weight": 1}})
    with pytest.raises(DataError, match=r"part-0.arrow: is a file, not a folder"):
        fmsdata.ShardReader(corpus / "web" / "part-0.arrow")


def test_a_folder_without_shards_is_named(corpus: Path) -> None:
    (corpus / "news").mkdir()
    (corpus / "news" / "readme.md").write_text("nothing here")
    with pytest.raises(DataError, match=r"news: no shards.*\.arrow"):
        build(corpus, {"sources.news": {"weight": 1}})
    (corpus / "empty").mkdir()
    with pytest.raises(DataError, match=r"no sub-folder holds shards"):
        build(corpus, {"path": str(corpus / "empty"), "sources": None})


def test_wrong_columns_are_named(tmp_path: Path) -> None:
    def write(name: str, columns: dict[str, Any]) -> Path:
        (tmp_path / name).mkdir()
        batch = pa.record_batch(columns)
        with pa.OSFile(str(tmp_path / name / "a.arrow"), "wb") as file, pa.ipc.new_file(file, batch.schema) as writer:
            writer.write_batch(batch)
        return tmp_path / name

    floats = write("floats", {"tokens": pa.array([0.5, 1.5])})
    with pytest.raises(DataError, match=r"a.arrow: column 'tokens' is double, but tokens are integers"):
        fmsdata.ShardReader(floats)
    two = write("two", {"ids": pa.array([1, 2]), "mask": pa.array([1, 2])})
    with pytest.raises(DataError, match=r"no column 'tokens'; the file has \(ids: int64, mask: int64\)"):
        fmsdata.ShardReader(two)
    with pytest.raises(DataError, match=r"no column 'nope'"):
        fmsdata.ShardReader(two, column="nope")
    assert fmsdata.ShardReader(two, column="ids").size() == (1, 2)


def test_a_truncated_shard_is_named(corpus: Path) -> None:
    path = corpus / "web" / "part-1.arrow"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match=r"part-1.arrow: not a whole Arrow IPC file, it is truncated"):
        build(corpus)


def test_a_shard_that_vanishes_is_named(corpus: Path) -> None:
    loader = build(corpus)
    (corpus / "web" / "part-1.arrow").unlink()
    with pytest.raises(DataError, match=r"part-1.arrow: the file is gone"):
        for _ in islice(loader, 200):
            pass


def test_counts_that_disagree_are_named(corpus: Path) -> None:
    write_index(corpus)
    (corpus / "meta" / FILE).unlink()  # which would notice another size first
    build(corpus)
    write_source(corpus / "web", documents(np.random.default_rng(5), 61))
    with pytest.raises(
        CountsError, match=r"source 'web': counts say \d+ \w+ in part-\d.arrow but the file holds \d+; run"
    ):
        for _ in islice(build(corpus), 100):
            pass


@pytest.fixture
def saved(corpus: Path) -> dict[str, Any]:
    loader = maker(corpus)(0, 1)
    for _ in islice(loader, 30):
        pass
    return copy.deepcopy(loader.state_dict())


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"seed": 4}, "saved with seed 3 and this run has seed 4"),
        ({"lanes": 12}, "saved with lanes 24 and this run has lanes 12"),
        ({"documents__min_length": 2}, "web/min_length was 1 when it was saved and is 2 now"),
    ],
    ids=str,
)
def test_the_state_of_another_run_is_refused(
    corpus: Path, saved: dict[str, Any], overrides: dict[str, Any], words: str
) -> None:
    with pytest.raises(StateError, match=words):
        maker(corpus, **overrides)(0, 1).load_state_dict(saved)


def test_the_state_of_other_data_says_which_source_changed_and_how(corpus: Path, saved: dict[str, Any]) -> None:
    write_source(corpus / "wiki", documents(np.random.default_rng(7), 24), layout="batch", dtype=np.int32, shards=2)
    with pytest.raises(
        StateError, match=r"shards of source 'wiki' changed: 2 shards, 23 documents.*2 shards, 24 documents"
    ):
        maker(corpus)(0, 1).load_state_dict(saved)


def test_a_state_of_the_future_a_torn_one_and_none_at_all_are_refused(corpus: Path, saved: dict[str, Any]) -> None:
    loader = maker(corpus)(0, 1)
    with pytest.raises(StateError, match="version 3 and this fmsdata reads version 2; use a newer fmsdata"):
        loader.load_state_dict({**saved, "version": 3})
    with pytest.raises(StateError, match="has no lanes"):
        loader.load_state_dict({name: value for name, value in saved.items() if name != "lanes"})
    with pytest.raises(StateError, match="no version"):
        loader.load_state_dict({})
    for nothing in (None, 3, "state", [3]):
        with pytest.raises(StateError):
            loader.load_state_dict(nothing)  # type: ignore[arg-type]
    state = opened(saved)
    del state["lanes"]["5"]["anchor"]["below"]
    with pytest.raises(StateError, match="lane 5 can't be used: 'below' is None"):
        loader.load_state_dict(closed(state))
    for text in ("", "{", "[]", None, 3, saved["lanes"]["5"][:-1]):
        with pytest.raises(StateError, match=r"lane 5|step"):
            loader.load_state_dict({**saved, "lanes": {**saved["lanes"], "5": text}})


def test_missing_lanes_and_mixed_steps_are_refused(corpus: Path) -> None:
    make = maker(corpus)
    loaders = [make(rank, 2) for rank in range(2)]
    for loader in loaders:
        next(iter(loader))
    states = [loader.state_dict() for loader in loaders]
    with pytest.raises(StateError, match=r"no state for lane 1, 3, .* give the list of the states of all ranks"):
        make(0, 1).load_state_dict(states[0])
    with pytest.raises(StateError, match="no state for lane"):
        make(0, 1).load_state_dict([])
    next(iter(loaders[0]))
    with pytest.raises(StateError, match="the states differ in step: 1 and 2"):
        make(0, 1).load_state_dict([*states, loaders[0].state_dict()])
    with pytest.raises(StateError, match="the states differ in step: 2 and 1"):
        make(0, 1).load_state_dict([loaders[0].state_dict(), states[1]])
    with pytest.raises(StateError, match=r"lane \d+ is in two states"):
        make(0, 1).load_state_dict([*states, {**loaders[0].state_dict(), "step": 1}])
    with pytest.raises(StateError, match=r"lane 0 is from step 2, but the run is at step 1"):
        make(0, 1).load_state_dict([{**loaders[0].state_dict(), "step": 1}, states[1]])
    other = make(0, 3)
    next(iter(other))
    with pytest.raises(StateError, match="the states differ in history"):
        make(0, 1).load_state_dict([*states, other.state_dict()])


def torn(saved: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    *parents, last = path.split("/")
    inner = state = opened(saved)
    for parent in parents:
        inner = inner[parent]
    inner[last] = value
    return closed(state)


@pytest.mark.parametrize("value", [None, {}, [], "3", -3, 2.5, True, 10**40, 10**9], ids=str)
@pytest.mark.parametrize(
    "path",
    [
        "step",
        "history",
        "pipeline",
        "pipeline/lines",
        "pipeline/seed",
        "lanes",
        "lanes/5",
        "lanes/5/step",
        "lanes/5/skip",
        "lanes/5/lines",
        "lanes/5/anchor",
        "lanes/5/anchor/taken",
        "lanes/5/anchor/below",
        "lanes/5/anchor/below/used",
        "lanes/5/anchor/below/below",
        "lanes/5/anchor/below/below/sources",
        "lanes/5/anchor/below/below/sources/web",
        "lanes/5/anchor/below/below/sources/web/below",
        "lanes/5/anchor/below/below/sources/web/below/document",
    ],
)
def test_a_torn_state_never_goes_on_somewhere_else(corpus: Path, saved: dict[str, Any], path: str, value: Any) -> None:
    if path in ("step", "lanes/5/lines") and value == 10**9:
        value = 10**20  # these are counts, and may be as large as 10**9
    loader = maker(corpus)(0, 1)

    def go_on() -> None:
        loader.load_state_dict(torn(saved, path, value))
        list(islice(loader, 24))

    with pytest.raises(StateError):
        go_on()


def test_a_renamed_source_and_another_column_are_another_pipeline(tmp_path: Path) -> None:
    def loader(folder: str) -> fmsdata.StatefulDataLoader:
        lines = fmsdata.Pack(fmsdata.ShardReader(tmp_path / folder), seq_len=5)
        return fmsdata.StatefulDataLoader(fmsdata.Rescalable(lines, lanes=2), batch_size=1)

    write_source(tmp_path / "one", documents(np.random.default_rng(0), 20))
    state = loader("one").state_dict()
    (tmp_path / "one").rename(tmp_path / "two")
    with pytest.raises(StateError, match="source was one when it was saved and is two now"):
        loader("two").load_state_dict(state)


untyped: Any = fmsdata  # for arguments that a type checker would not let pass


@pytest.mark.parametrize(
    "make",
    [
        lambda below: untyped.Pack(below, seq_len="9"),
        lambda below: untyped.Pack(below, seq_len=9, bol=1.5),
        lambda _: untyped.Pack("docs", seq_len=9),
        lambda below: untyped.Delimit(below, eos=1.5),
        lambda below: untyped.Delimit(below, eos=True),
        lambda below: untyped.Shuffle(below, window=2.0),
        lambda _: untyped.Shuffle(None, window=2),
        lambda below: untyped.Rescalable(below, lanes="4"),
        lambda below: untyped.Rescalable(below, lanes=4, seed="42"),
        lambda below: untyped.Rescalable(below, lanes=4, seed=42.0),
        lambda _: untyped.Rescalable("corpus", lanes=4),
        lambda below: untyped.StatefulDataLoader(below, batch_size=1),
        lambda below: untyped.StatefulDataLoader(untyped.Rescalable(below, lanes=4), batch_size="1"),
        lambda below: untyped.StatefulDataLoader(
            untyped.Rescalable(below, lanes=4), batch_size=1, outputs="provenance"
        ),
        lambda below: untyped.StatefulDataLoader(
            untyped.Rescalable(below, lanes=4), batch_size=1, rank="0", world_size="1"
        ),
        lambda below: untyped.Mixture({"a": below}, {"a": 10**400}),
        lambda below: untyped.Mixture({"a": below}, {"a": "1"}),
        lambda below: untyped.Mixture([below], [1]),
        lambda _: untyped.Mixture({"a": "web"}, {"a": 1}),
        lambda below: untyped.ShardReader(below.path, strip="abc"),
        lambda below: untyped.ShardReader(below.path, strip=[1.5]),
        lambda below: untyped.ShardReader(below.path, min_length=float("nan")),
        lambda _: untyped.ShardReader(None),
        lambda _: untyped.ShardReader(""),
        lambda _: untyped.build_loader(None),
        lambda _: untyped.build_loader({1: 2}),
        lambda _: untyped.build_loader({"path": "x"}, overrides=["a"]),
        lambda _: untyped.CausalLM(prompt_len=0.5),
    ],
)
def test_what_is_of_the_wrong_kind_is_refused_at_once(corpus: Path, make: Any) -> None:
    with pytest.raises(ConfigError):
        make(untyped.ShardReader(corpus / "web"))


def test_numpy_numbers_are_numbers(corpus: Path) -> None:
    reader = untyped.ShardReader(corpus / "web")
    states = []
    for kind in (int, np.int64):
        mix = untyped.Mixture({"a": reader}, {"a": kind(2)})
        lines = untyped.Shuffle(untyped.Pack(untyped.Delimit(mix, eos=kind(1)), seq_len=kind(9)), window=kind(3))
        loader = untyped.StatefulDataLoader(untyped.Rescalable(lines, lanes=kind(4), seed=kind(5)), batch_size=kind(2))
        next(iter(loader))
        states.append(json.dumps(loader.state_dict()))
    assert states[0] == states[1]


def test_folders_that_can_not_be_listed_rightly_are_named(corpus: Path) -> None:
    (corpus / "web" / "sub").mkdir()
    (corpus / "web" / "sub" / "loop").symlink_to("..")
    with pytest.raises(DataError, match="links to a folder that it is in"):
        fmsdata.ShardReader(corpus / "web")
    (corpus / "web" / "sub" / "loop").unlink()
    os.mkfifo(corpus / "web" / "pipe.arrow")
    with pytest.raises(DataError, match=r"pipe.arrow: not a regular file"):
        fmsdata.ShardReader(corpus / "web")
    (corpus / "web" / "pipe.arrow").unlink()
    (corpus / "loose.arrow").write_bytes((corpus / "web" / "part-0.arrow").read_bytes())
    with pytest.raises(DataError, match=r"loose.arrow is in no source"):
        build(corpus, {"sources": None})


def test_a_failed_load_leaves_the_loader_where_it_was(corpus: Path, saved: dict[str, Any]) -> None:
    loader = maker(corpus)(0, 1)
    whole = [batch["input_ids"].tolist() for batch in islice(maker(corpus)(0, 1), 20)]
    seen = [batch["input_ids"].tolist() for batch in islice(loader, 10)]
    with pytest.raises(StateError):
        loader.load_state_dict({**saved, "version": 9})
    assert seen + [batch["input_ids"].tolist() for batch in islice(loader, 10)] == whole


def test_sources_left_out_are_every_folder_with_shards(corpus: Path) -> None:
    (corpus / "notes").mkdir()
    write_source(corpus / "metadata" / "deep", documents(np.random.default_rng(0), 10, shortest=1))
    loader = build(corpus, {"sources": None})
    mixture = loader.data.lines.below.below.below
    assert isinstance(mixture, fmsdata.Mixture)
    assert list(mixture.sources) == ["metadata", "web", "wiki"]
    tokens = {name: stage.size().tokens for name, stage in mixture.sources.items()}
    assert mixture.weights["web"] == pytest.approx(tokens["web"] / sum(tokens.values()))


def test_the_demo_configuration_is_a_valid_one(tmp_path: Path, corpus: Path) -> None:
    config = Path(__file__).parent.parent / "configs" / "demo.yaml"
    sources = {"web": {"weight": 1}}
    loader = fmsdata.build_loader(config, {"path": str(corpus), "sources": sources}, rank=0, world_size=1)
    assert next(iter(loader))["input_ids"].shape == (4, 512)
    with pytest.raises(ConfigError, match=r"nothing.yaml: No such file"):
        fmsdata.build_loader(tmp_path / "nothing.yaml")
    (tmp_path / "bad.yaml").write_text("seed: [1")
    with pytest.raises(ConfigError, match=r"bad.yaml:1: not valid YAML"):
        fmsdata.build_loader(tmp_path / "bad.yaml")
    (tmp_path / "list.yaml").write_text("- 1")
    with pytest.raises(ConfigError, match=r"expected keys and values, found a list"):
        fmsdata.build_loader(tmp_path / "list.yaml")
