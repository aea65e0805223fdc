"""Finite passes over text: the laws of `test_finite.py`, planned from token counts without reading text."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fmsdata
from fmsdata import testing
from fmsdata.core.chunk import Item
from fmsdata.corpus.index import index_corpus
from fmsdata.corpus.tokenizer import open_tokenizer
from fmsdata.errors import ConfigError, CountsError, DataError
from fmsdata.testing import MakeLoader
from tests.corpus.test_tokenizer import bpe
from tests.helpers import maker as maker_of
from tests.run.test_finite import take_pass
from tests.text_files import write_source

SUFFIXES = ["jsonl.gz", "parquet"]
EOS = 1000
MODES: list[dict[str, Any]] = [
    {},
    {"pack__bol": 1001, "pack__eol": 1002, "documents__bos": 1003},
    {"pack__mode": "pad", "pack__pad": 1, "documents__min_length": 7},
    {"pack__mode": "bestfit", "pack__pad": 1, "pack__bol": 1001},
]
WORDS = ["the", "cat", "sat", "on", "mat", "naïve", "☕", "<|endoftext|>", "q"]


def some_texts(seed: int, count: int) -> list[str | None]:
    """Texts of different lengths; some are null, empty or blank."""
    rng = np.random.default_rng(seed)
    texts = [" ".join(rng.choice(WORDS, rng.integers(0, 30))) for _ in range(count)]
    return [None if i % 17 == 3 else " " if i % 13 == 5 else text for i, text in enumerate(texts)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tokenizer of text") / "tokenizer.json"
    bpe().save(str(path))
    return str(path)


def write_corpus(root: Path, suffix: str = "jsonl") -> Path:
    write_source(root / "web", some_texts(1, 60), suffix, shards=3)
    write_source(root / "wiki", some_texts(2, 23), suffix, shards=2)
    return root


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory, tokenizer: str) -> dict[str, Path]:
    """The same corpus in two formats, with the tokens counted."""
    roots = {suffix: write_corpus(tmp_path_factory.mktemp("text"), suffix) for suffix in SUFFIXES}
    for root in roots.values():
        index_corpus(root, tokenizer=open_tokenizer(tokenizer))
    return roots


@pytest.fixture
def corpus(tmp_path: Path, corpora: dict[str, Path]) -> Path:
    """A copy that a test may change. Its files have other times than those that were indexed."""
    shutil.copytree(corpora["jsonl.gz"], tmp_path / "corpus", copy_function=shutil.copyfile)
    return tmp_path / "corpus"


def maker(root: Path, tokenizer: str, **overrides: Any) -> MakeLoader:
    options = {"documents__tokenizer": tokenizer, "documents__eos": EOS, "pack__seq_len": 24, "epochs": 1}
    return maker_of(root, **{**options, **overrides})


def stored(root: Path, tokenizer: object, **options: Any) -> testing.Stored:
    return testing.stored_documents({name: root / name for name in ("web", "wiki")}, tokenizer=tokenizer, **options)


@contextmanager
def without_text() -> Iterator[None]:
    """Nothing that is opened meanwhile can read or tokenize text."""

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("text was read")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fmsdata.prefetch.open_files.open_shard", fail)
        patch.setattr("fmsdata.stages.tokenize.Tokenize.encode", fail)
        yield


@pytest.mark.parametrize("overrides", MODES, ids=str)
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_pass_over_text_ends_as_planned_at_any_world_size_and_over_stops(
    corpora: dict[str, Path], tokenizer: str, small_windows: None, suffix: str, overrides: dict[str, Any]
) -> None:
    make = maker(corpora[suffix], tokenizer, loader__batch_size=4, loader__prefetch=0, **overrides)
    with without_text():
        planned = make(0, 1).pass_lines
    assert testing.check_equal_ends(make, world_sizes=[2, 7]) == sum(planned)
    account = testing.Account(stored(corpora[suffix], tokenizer, min_length=overrides.get("documents__min_length", 1)))
    steps = take_pass(make, account, [(3, 2), (5, 1), (2, 0)])
    assert len(set(steps)) == 1
    assert account.is_complete(), account.missing()


class Words:
    """One id for each word, the length of the word; and one for nothing at all."""

    fingerprint = "words"

    def encode(self, text: str) -> list[int]:
        return [len(word) for word in text.split()] or [77]


shapes = st.fixed_dictionaries(
    {
        "web": st.lists(st.integers(0, 40), min_size=1, max_size=30),
        "wiki": st.lists(st.integers(0, 40), min_size=1, max_size=5),
        "pack": st.sampled_from(
            [{}, {"bol": 101, "eol": 102}, {"mode": "pad", "pad": 0}, {"mode": "bestfit", "bol": 101, "pad": 0}]
        ),
        "min_length": st.sampled_from([1, 4]),
        "lanes": st.integers(1, 9),
        "epochs": st.integers(1, 3),
        "chain": st.lists(st.tuples(st.integers(1, 9), st.integers(0, 3)), min_size=1, max_size=3),
    }
)


@settings(max_examples=15, deadline=None)
@given(shapes)
def test_each_document_of_text_comes_exactly_so_many_times(shape: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for name in ("web", "wiki"):
            texts = [" ".join("x" * (1 + i % 9) for i in range(words)) for words in [*shape[name], 5]]
            write_source(root / name, texts, "txt", shards=1)
        index_corpus(root, tokenizer=open_tokenizer(Words()))
        readers = {name: fmsdata.ShardReader(root / name) for name in ("web", "wiki")}
        mixed = {
            name: fmsdata.Tokenize(reader, Words(), min_length=shape["min_length"]) for name, reader in readers.items()
        }
        documents = fmsdata.Delimit(fmsdata.Mixture(mixed, {"web": 7, "wiki": 3}), eos=100)
        lines = fmsdata.Shuffle(fmsdata.Pack(documents, seq_len=16, **shape["pack"]), window=3)
        data = fmsdata.Rescalable(lines, lanes=shape["lanes"], epochs=shape["epochs"])

        def make(rank: int, world_size: int) -> fmsdata.StatefulDataLoader:
            outputs = ["provenance", "epochs"]
            return fmsdata.StatefulDataLoader(
                data, batch_size=2, rank=rank, world_size=world_size, prefetch=0, outputs=outputs
            )

        account = testing.Account(stored(root, Words(), min_length=shape["min_length"]), shape["epochs"])
        chain = [(1 + (world_size - 1) % shape["lanes"], steps) for world_size, steps in shape["chain"]]
        steps = take_pass(make, account, chain)
    assert len(set(steps)) == 1
    assert account.is_complete(), account.missing()


def test_documents_without_text_are_not_planned_whatever_the_tokenizer_makes_of_nothing(tmp_path: Path) -> None:
    write_source(tmp_path / "web", ["", "x x x", *[None] * 50], "jsonl", shards=1)
    index_corpus(tmp_path, tokenizer=open_tokenizer(Words()))
    text = fmsdata.Tokenize(fmsdata.ShardReader(tmp_path / "web"), Words())
    assert text.size() == (52, 3)
    data = fmsdata.Rescalable(fmsdata.Pack(text, seq_len=3), lanes=2, epochs=1)
    assert sum(data.plan().result().lines) == len(list(fmsdata.StatefulDataLoader(data, batch_size=1))) == 1


def test_an_evaluation_of_text_is_the_same_set_at_any_world_size(corpora: dict[str, Path], tokenizer: str) -> None:
    root = corpora["parquet"]
    make = maker(root, tokenizer, epochs=None, evaluation=True, loader__batch_size=5)
    testing.check_equal_ends(make, world_sizes=[2, 7])
    loader = make(1, 3)
    assert str(list(loader)) == str(list(loader))
    some = maker(root, tokenizer, epochs=None, evaluation={"samples": 9}, loader__batch_size=2)
    with without_text():
        assert sum(some(0, 1).pass_lines) == 9
    whole = [row for batch in maker(root, tokenizer, epochs=None, evaluation=True)(0, 1) for row in batch["provenance"]]
    for world_size in (1, 4):
        rows = [row for rank in range(world_size) for batch in some(rank, world_size) for row in batch["provenance"]]
        assert sorted(filter(None, rows)) == sorted(whole[:9])


def test_workers_read_the_same_pass_over_text(corpora: dict[str, Path], tokenizer: str) -> None:
    alone, together = (
        maker(corpora["jsonl.gz"], tokenizer, loader__batch_size=9, loader__num_workers=n)(0, 2) for n in (0, 2)
    )
    assert str(list(alone)) == str(list(together))


def commands_in(message: str) -> list[str]:
    return re.findall(r"`(fmsdata[ .].*?)`", message)


def test_without_counts_the_error_has_the_command_that_makes_them(tmp_path: Path, tokenizer: str) -> None:
    root = write_corpus(tmp_path / "a corpus")
    with pytest.raises(ConfigError, match=r"'web', 'wiki' were not counted with this tokenizer") as caught:
        maker(root, tokenizer)
    commands = [command for command in commands_in(str(caught.value)) if command.startswith("fmsdata index")]
    assert len(commands) == 2
    for command in commands:
        program, *arguments = shlex.split(command)
        subprocess.run([Path(sys.executable).parent / program, *arguments], check=True, capture_output=True, cwd="/")
    testing.check_equal_ends(maker(root, tokenizer), world_sizes=[2])


def test_one_index_of_another_tokenizer_is_counted_again_with_one_command(corpus: Path, tokenizer: str) -> None:
    with pytest.raises(ConfigError) as caught:
        maker(corpus, "bytes")
    assert commands_in(str(caught.value)) == [f"fmsdata index {corpus} --tokenizer bytes", "fmsdata prepare"]


def test_a_tokenizer_that_is_an_object_is_counted_by_a_call(tmp_path: Path) -> None:
    write_source(tmp_path / "web", some_texts(1, 20), "jsonl", column="body")

    def data() -> fmsdata.Rescalable:
        text = fmsdata.Tokenize(fmsdata.ShardReader(tmp_path / "web", column="body"), Words())
        return fmsdata.Rescalable(fmsdata.Pack(text, seq_len=9), lanes=2, epochs=1)

    with pytest.raises(ConfigError) as caught:
        data()
    eval(commands_in(str(caught.value))[0], {"fmsdata": fmsdata, "tokenizer": Words()})
    assert len(list(fmsdata.StatefulDataLoader(data(), batch_size=9))) > 0


def test_text_that_changed_since_it_was_indexed_is_an_error(corpus: Path, tokenizer: str) -> None:
    file = corpus / "web/part-1.jsonl.gz"
    with file.open("ab") as opened:
        opened.write(b"more")
    with pytest.raises(CountsError, match=rf"part-1.*run `fmsdata index {corpus}`"):
        maker(corpus, tokenizer)


def test_text_of_the_same_size_with_other_tokens_is_an_error_when_a_lane_ends(tmp_path: Path, tokenizer: str) -> None:
    root = tmp_path / "corpus"
    write_source(root / "web", ["the cat sat on the mat"] * 40, "txt", shards=1)
    index_corpus(root, tokenizer=open_tokenizer(tokenizer))
    write_source(root / "web", ["qzqzqzqzqzqzqzqzqzqzqz"] * 40, "txt", shards=1)
    loader = maker(root, tokenizer, sources={"web": {}}, lanes=2)(0, 1)
    with pytest.raises(DataError, match=r"not what was planned.*count its tokens again.*fmsdata index --tokenizer"):
        list(loader)


@pytest.mark.parametrize("damage", ["removed", "cut", "of another file"])
def test_token_counts_that_are_damaged_are_an_error_that_names_the_command(
    corpus: Path, tokenizer: str, damage: str
) -> None:
    kept = corpus / "meta/fmsdata-tokens/web/part-2.jsonl.gz.ipc"
    content = kept.read_bytes()
    kept.unlink()
    if damage == "cut":
        kept.write_bytes(content[:-30])
    elif damage == "of another file":
        shutil.copy(kept.with_name("part-0.jsonl.gz.ipc"), kept)
    loader = maker(corpus, tokenizer)(0, 1)
    with pytest.raises(CountsError, match=rf"web/part-2\.jsonl\.gz are missing in {corpus}/meta.*fmsdata index"):
        len(loader)
    index_corpus(corpus, tokenizer=open_tokenizer(tokenizer))
    assert len(maker(corpus, tokenizer)(0, 1)) > 0


@pytest.mark.parametrize(
    ("option", "what"), [("documents__eos", "`eos`"), ("documents__bos", "`bos`"), ("pack__bol", "`bol`")]
)
def test_a_delimiter_that_the_text_contains_is_refused(
    corpora: dict[str, Path], tokenizer: str, option: str, what: str
) -> None:
    """A document that ends with it gets no other, so its length in lines does not follow from its tokens."""
    letter = int(open_tokenizer(tokenizer).encode(["q"])[0][0])
    loader = maker(corpora["parquet"], tokenizer, **{option: letter})(0, 1)
    with pytest.raises(ConfigError, match=rf"contains token {letter}, which is {what}.*fmsdata prepare"):
        len(loader)


def test_strip_is_refused_only_if_the_text_contains_what_it_strips(corpora: dict[str, Path], tokenizer: str) -> None:
    root, letter = corpora["parquet"], int(open_tokenizer(tokenizer).encode(["q"])[0][0])
    with pytest.raises(ConfigError, match=rf"contains token {letter}, which is in `strip`"):
        len(maker(root, tokenizer, documents__strip=[letter, EOS])(0, 1))
    testing.check_equal_ends(maker(root, tokenizer, documents__strip=[0, EOS]), world_sizes=[2])


def test_stages_of_the_users_own_may_use_lengths_but_not_tokens(corpora: dict[str, Path], tokenizer: str) -> None:
    reader = fmsdata.ShardReader(corpora["parquet"] / "web")

    def make(stage: fmsdata.Stage) -> MakeLoader:
        data = fmsdata.Rescalable(fmsdata.Pack(stage, seq_len=17), lanes=6, epochs=1)
        outputs = ["provenance", "epochs"]
        return lambda rank, size: fmsdata.StatefulDataLoader(
            data, batch_size=2, rank=rank, world_size=size, outputs=outputs
        )

    text = fmsdata.Tokenize(reader, tokenizer)
    testing.check_equal_ends(make(fmsdata.Filter(text, lambda item: len(item) > 9)), world_sizes=[2])

    def reverse(item: Item) -> Any:
        return item.tokens[::-1]

    with pytest.raises(ConfigError, match="a stage above Tokenize reads the tokens"):
        len(make(fmsdata.Map(text, reverse))(0, 1))
    with pytest.raises(ConfigError, match="goes through Map before it is tokenized"):
        make(fmsdata.Tokenize(fmsdata.Map(reader, reverse), tokenizer))
    with pytest.raises(ConfigError, match="min_length of a ShardReader of text count bytes"):
        make(fmsdata.Tokenize(reader.without_short((), 9), tokenizer))


def test_a_plan_that_was_kept_is_not_used_after_text_was_counted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("fmsdata.run.finite.KEPT_SECONDS", -1.0)
    lines = []
    for text in ("x x x x", "xxxxxxx"):
        write_source(tmp_path / "web", [text] * 40, "txt", shards=1)
        index_corpus(tmp_path / "web", tokenizer=open_tokenizer(Words()))
        packed = fmsdata.Pack(fmsdata.Tokenize(fmsdata.ShardReader(tmp_path / "web"), Words()), seq_len=8)
        loader = fmsdata.StatefulDataLoader(fmsdata.Rescalable(packed, lanes=1, epochs=1), batch_size=1)
        lines.append(loader.pass_lines)
        assert len(list(loader)) == sum(loader.pass_lines)
    assert lines == [[20], [5]]
    assert len(list((tmp_path / "cache/fmsdata").glob("pass-*.json"))) == 2


def test_plan_shows_the_length_of_a_pass_over_text(corpora: dict[str, Path], tokenizer: str, tmp_path: Path) -> None:
    config = {"path": str(corpora["parquet"]), "epochs": 1, "lanes": 6, "pack": {"seq_len": 24}}
    config |= {"documents": {"tokenizer": tokenizer, "eos": EOS}}
    (tmp_path / "run.yaml").write_text(json.dumps(config))
    fmsdata_command = Path(sys.executable).parent / "fmsdata"
    done = subprocess.run(
        [fmsdata_command, "plan", tmp_path / "run.yaml", "--json"],
        check=True,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    tokens = sum(len(ids) + 1 for ids in stored(corpora["parquet"], tokenizer).values())
    assert json.loads(done.stdout)["pass"]["samples"] == pytest.approx(tokens / 25, abs=7)
