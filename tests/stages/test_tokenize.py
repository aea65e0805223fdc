"""Tokenize: text becomes tokens while it is read, with the same laws as shards of tokens."""

import gzip
import itertools
import json
import os
import signal
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

import fmsdata
from fmsdata import testing
from fmsdata.core.lane import Lane
from fmsdata.core.stage import Size
from fmsdata.core.state import State
from fmsdata.corpus.tokenizer import open_tokenizer
from fmsdata.corpus.tokenizer_threads import THREADS
from fmsdata.errors import ConfigError, DataError, StageError, StateError
from fmsdata.testing import MakeLoader
from tests.corpus.test_tokenizer import bpe
from tests.helpers import worker_processes

SUFFIXES = ["jsonl", "jsonl.gz", "jsonl.zst", "txt", "txt.gz", "txt.zst", "parquet"]
EOS = 1000
LANES = 6


class Words:
    """A tokenizer whose ids are easy to check: one for each word, its length. It counts what it encodes."""

    fingerprint = "words"

    def __init__(self) -> None:
        self.encoded: Counter[str] = Counter()

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        self.encoded.update(texts)
        return [[len(word) for word in text.split()] for text in texts]


def some_texts(seed: int, count: int, longest: int = 30) -> list[str]:
    """Texts of words, each with its own number; some are empty, and some give no token."""
    rng = np.random.default_rng(seed)
    texts = [" ".join("x" * n for n in rng.integers(1, 12, rng.integers(0, longest))) for _ in range(count)]
    return [" " if i % 13 == 5 else text for i, text in enumerate(texts)]


def write_texts(path: Path, texts: Sequence[str]) -> None:
    """A file of texts, in the format that its name says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"text": pa.array(texts, pa.string())}), path, row_group_size=7)
        return
    lines = [json.dumps({"text": text}) if ".jsonl" in path.name else text for text in texts]
    content = "".join(f"{line}\n" for line in lines).encode()
    if path.suffix == ".gz":
        content = gzip.compress(content)
    elif path.suffix == ".zst":
        content = zstandard.ZstdCompressor().compress(content)
    path.write_bytes(content)


def write_source(folder: Path, texts: Sequence[str], suffix: str = "jsonl", shards: int = 3) -> Path:
    for shard in range(shards):
        write_texts(folder / f"part-{shard}.{suffix}", texts[shard::shards])
    return folder


def write_corpus(root: Path, suffix: str = "jsonl") -> Path:
    write_source(root / "web", some_texts(1, 60), suffix)
    write_source(root / "wiki", some_texts(2, 25), suffix, shards=2)
    return root


def stored(root: Path, suffix: str = "jsonl", sources: Sequence[str] = ("web", "wiki")) -> dict[Any, Any]:
    """The documents that an epoch must hold, from the same texts."""
    counts = {"web": (1, 60, 3), "wiki": (2, 25, 2)}
    found = {}
    for source in sources:
        seed, count, shards = counts[source]
        for shard in range(shards):
            for number, text in enumerate(some_texts(seed, count)[shard::shards]):
                if text.split():
                    ids = np.array([len(word) for word in text.split()], np.int64)
                    found[source, f"part-{shard}.{suffix}", number] = ids
    return found


def sources(root: Path, tokenizer: Any, **options: Any) -> dict[str, fmsdata.Stage]:
    return {name: fmsdata.Tokenize(fmsdata.ShardReader(root / name), tokenizer, **options) for name in ("web", "wiki")}


def pipeline(
    mixed: dict[str, fmsdata.Stage],
    weights: dict[str, float] | None = None,
    window: Any = 8,
    pack: dict[str, Any] | None = None,
) -> fmsdata.Rescalable:
    mix = fmsdata.Mixture(mixed, weights or {"web": 7, "wiki": 3})
    lines = fmsdata.Pack(fmsdata.Delimit(mix, eos=EOS), **{"seq_len": 17, **(pack or {})})
    return fmsdata.Rescalable(fmsdata.Shuffle(lines, window=window), lanes=LANES, seed=3)


def maker(data: fmsdata.Rescalable, **options: Any) -> MakeLoader:
    settings = {"batch_size": 1, "outputs": ["provenance", "epochs"], "prefetch": 1, **options}
    return lambda rank, world_size: fmsdata.StatefulDataLoader(data, rank=rank, world_size=world_size, **settings)


# One document in, one document out.


def test_documents_keep_where_they_come_from(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    reader = fmsdata.ShardReader(tmp_path / "web")
    below = list(islice(reader, 120))
    tokenized = list(islice(fmsdata.Tokenize(reader, Words()), 100))
    kept = [item for item in below if bytes(item.tokens.tolist()).split()]
    for text, item in zip(kept, tokenized, strict=False):
        assert (item.source, item.shard, item.document) == (text.source, text.shard, text.document)
        assert (item.epochs, item.key) == (text.epochs, text.key)
        assert item.tokens.tolist() == [len(word) for word in bytes(text.tokens.tolist()).split()]
        assert [(span.start, span.stop) for span in item.spans] == [(0, len(item.tokens))]


def test_strip_and_min_length_count_tokens(tmp_path: Path) -> None:
    texts = ["x xx x", "x x x", "xx", "x xxx xx xxx x x x x x x x x x x x", ""]
    write_source(tmp_path, texts, shards=1)
    stage = fmsdata.Tokenize(fmsdata.ShardReader(tmp_path), Words(), strip=[1], min_length=2)
    (item,) = islice(stage, 1)
    assert item.document == 3
    assert item.tokens.tolist() == [3, 2, 3]
    assert [(span.start, span.stop) for span in item.spans] == [(1, 4)]


def test_a_stage_below_may_change_the_text(tmp_path: Path) -> None:
    write_source(tmp_path, ["a bb", "ccc"], shards=1)
    upper = fmsdata.Map(fmsdata.ShardReader(tmp_path), lambda item: list(bytes(item.tokens.tolist()) + b" dddd"))
    assert {tuple(item.tokens.tolist()) for item in islice(fmsdata.Tokenize(upper, Words()), 6)} == {(1, 2, 4), (3, 4)}
    odd = fmsdata.Map(fmsdata.ShardReader(tmp_path), lambda _: [70_000])
    with pytest.raises(DataError, match="its values are no bytes"):
        next(iter(fmsdata.Tokenize(odd, Words())))


def test_the_stage_keeps_the_contract_of_all_stages(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    stage = fmsdata.Tokenize(fmsdata.ShardReader(tmp_path / "web"), Words(), strip=[3], min_length=2)
    testing.check_stage(stage)
    testing.check_stage(fmsdata.Map(fmsdata.Map(stage, lambda item: item), lambda item: item))


# The laws.


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_the_laws_hold_over_every_format_of_text(tmp_path: Path, suffix: str) -> None:
    write_corpus(tmp_path, suffix)
    make = maker(pipeline(sources(tmp_path, Words())))
    testing.check_same_stream(make, world_sizes=[2, 3, 6], samples=60)
    testing.check_exactly_once(
        make, stored=stored(tmp_path, suffix), world_sizes=[2, 5, 1, 4, 3], steps=3, most_samples=4000
    )


@pytest.mark.parametrize("window", [8, "auto", 1])
@pytest.mark.parametrize("pack", [{}, {"mode": "bestfit", "bol": 999, "pad": 0, "window": 4}], ids=["split", "bestfit"])
def test_restoring_after_any_step_continues_the_same(tmp_path: Path, window: Any, pack: dict[str, Any]) -> None:
    write_corpus(tmp_path)
    testing.check_restore_anywhere(maker(pipeline(sources(tmp_path, Words()), window=window, pack=pack)), steps=26)


def test_workers_read_the_same_stream_under_every_start_method(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    data = pipeline(sources(tmp_path, "bytes"))
    variants = [
        maker(data, num_workers=1),
        maker(data, num_workers=2, batch_size=3),
        maker(data, num_workers=2, multiprocessing_context="fork"),
        maker(data, num_workers=1, multiprocessing_context="spawn"),
    ]
    testing.check_same_stream(maker(data), world_sizes=[], samples=120, variants=variants)


def test_the_mix_holds_in_tokens_from_the_first_batch_on(tmp_path: Path) -> None:
    write_source(tmp_path / "web", some_texts(1, 300), "jsonl")
    write_source(tmp_path / "wiki", ["xxxxxxxxxxxxxxxxxxxx " * 8] * 100, "jsonl")  # far more bytes per token
    make = maker(pipeline(sources(tmp_path, Words()), {"web": 1, "wiki": 1}))
    testing.check_mix_holds(make, weights={"web": 0.5, "wiki": 0.5}, samples=600, within=120)


def test_a_source_may_end_after_max_epochs(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    mixed = sources(tmp_path, Words())
    mixed["wiki"] = fmsdata.Tokenize(fmsdata.ShardReader(tmp_path / "wiki", max_epochs=2), Words())
    make = maker(pipeline(mixed, {"web": 1, "wiki": 1}))
    documents: Counter[Any] = Counter()
    with pytest.warns(fmsdata.FmsdataWarning, match="max_epochs times"):
        batches = list(islice(make(0, 1), 800))
    for batch in batches:
        for spans, epochs in zip(batch["provenance"], batch["epochs"], strict=True):
            for span, epoch in zip(spans, epochs, strict=True):
                if span.source == "wiki":
                    documents[*span[:3], epoch] += span.stop - span.start
    expected = {
        (*name, epoch): len(ids) for name, ids in stored(tmp_path, sources=["wiki"]).items() for epoch in (0, 1)
    }
    assert documents == expected


# What is stored on the way, and what is not.


def test_a_resume_tokenizes_nothing_before_the_windows_in_progress(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    tokenizer = Words()
    data = pipeline(sources(tmp_path, tokenizer))
    loader = maker(data, prefetch=0)(0, 1)
    batches = iter(loader)
    steps = 40 * LANES + 3  # each lane is in its sixth window
    for _ in range(steps):
        next(batches)
    state = loader.state_dict()
    all_before = sum(tokenizer.encoded.values())
    expected = [next(batches)["provenance"] for _ in range(2 * LANES)]
    tokenizer.encoded.clear()
    resumed = maker(data, prefetch=0)(0, 1)
    resumed.load_state_dict(state)
    assert not tokenizer.encoded  # until a batch is requested
    batches = iter(resumed)
    assert [next(batches)["provenance"] for _ in range(2 * LANES)] == expected
    again = sum(tokenizer.encoded.values())
    in_windows = 8 * 17 * LANES / np.mean([len(text.split()) + 1 for text in some_texts(1, 60)])
    assert again < 3 * in_windows + 60  # two windows, and what is ahead
    assert again < all_before / 2


def test_a_lane_tokenizes_ahead_of_its_windows_in_small_parts(tmp_path: Path) -> None:
    """At no line more than a part of a window is tokenized, though a window is read in one go."""
    write_source(tmp_path / "web", some_texts(1, 3000, longest=60), "jsonl")
    tokenizer = Words()
    window, length = 64, 33
    lines = fmsdata.Pack(fmsdata.Tokenize(fmsdata.ShardReader(tmp_path / "web"), tokenizer), seq_len=length)
    data = fmsdata.Rescalable(fmsdata.Shuffle(lines, window=window), lanes=2, seed=3)
    loader = maker(data, prefetch=0)(0, 1)
    batches = iter(loader)
    work = []
    for _ in range(10 * window):
        before = sum(len(text.split()) * count for text, count in tokenizer.encoded.items())
        next(batches)
        work.append(sum(len(text.split()) * count for text, count in tokenizer.encoded.items()) - before)
    assert max(work[:2]) > 0.9 * window * length  # the first windows are due at once
    steady = work[4 * window :]
    assert max(steady) < 0.3 * window * length
    assert sum(steady) < 1.3 * len(steady) * length


def test_windows_over_text_start_small_and_keep_their_sizes_on_resume(tmp_path: Path) -> None:
    write_source(tmp_path / "web", some_texts(1, 4000, longest=60), "jsonl")
    stage = fmsdata.Tokenize(fmsdata.ShardReader(tmp_path / "web"), "bytes")
    lines = fmsdata.Shuffle(fmsdata.Pack(stage, seq_len=3000))
    data = fmsdata.Rescalable(lines, lanes=2, seed=3)
    shuffle: Any = data.lines
    assert (shuffle.window, shuffle.first_window) == (shuffle.window, min(shuffle.window, (1 << 18) // 6000))
    small: Any = fmsdata.Shuffle(fmsdata.Pack(stage, seq_len=30), window=100, first_window=3)
    assert small.sizes()[:8] == [3, 4, 5, 6, 7, 8, 10, 12]
    assert small.sizes()[-1] == 100
    plain: Any = fmsdata.Shuffle(fmsdata.Pack(stage, seq_len=30), window=100)
    assert plain.sizes() == [100]
    assert "first_window" not in plain.parameters()
    # What a run was saved with stays, also if the rule for it changes later.
    saved = {**shuffle.describe(), "window": 5, "first_window": 2}
    resumed: Any = shuffle.settled(2, saved)
    assert (resumed.window, resumed.first_window) == (5, 2)
    del saved["first_window"]
    assert shuffle.settled(2, saved).first_window is None


def test_windows_of_all_lanes_are_capped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_source(tmp_path / "web", ["x" * 1000], shards=1)
    reader = fmsdata.ShardReader(tmp_path / "web")
    monkeypatch.setattr(fmsdata.ShardReader, "size", lambda _: Size(10**9, 10**13))
    for lanes in (1, 24, 192, 4096):
        data = fmsdata.Rescalable(
            fmsdata.Shuffle(fmsdata.Pack(fmsdata.Tokenize(reader, "bytes"), seq_len=4097)), lanes=lanes
        )
        shuffle: Any = data.lines
        assert shuffle.window * 4097 * lanes <= max(1 << 25, 4097 * lanes)
        assert shuffle.window == max(1, min(30_000, (1 << 25) // (4097 * lanes)))


def test_text_tokenized_on_the_fly_is_read_as_shards_of_its_tokens_with_the_same_blocks(tmp_path: Path) -> None:
    """The same documents, tokens and order, if the shards of tokens are cut where the text is: by its counts."""
    write_corpus(tmp_path / "text")
    tokenizer = open_tokenizer(Words())
    mixed = sources(tmp_path / "text", Words())
    prepared: dict[str, fmsdata.Stage] = {}
    for name, source in mixed.items():
        reader: Any = source.below
        for shard in reader.counts.shards:
            texts = [json.loads(line)["text"] for line in (tmp_path / "text" / name / shard).read_text().splitlines()]
            tokens, ends = tokenizer.encode(texts)
            documents = [tokens[a:b] for a, b in pairwise(ends.tolist())]
            fmsdata.write_shard(
                tmp_path / "tokens" / name / shard.replace("jsonl", "arrow"), documents, dtype=np.uint32
            )
        made = fmsdata.ShardReader(tmp_path / "tokens" / name, block_tokens=reader.block_size)
        made.counts = replace(made.counts, tokens=reader.counts.tokens)
        prepared[name] = made
    text, token = (maker(pipeline(some))(0, 1) for some in (mixed, prepared))
    for one, other in islice(zip(text, token, strict=True), 400):
        assert one["input_ids"].tolist() == other["input_ids"].tolist()
        assert one["epochs"] == other["epochs"]
        assert [
            [span._replace(shard=span.shard.replace("jsonl", "arrow")) for span in row] for row in one["provenance"]
        ] == other["provenance"]


# Another tokenizer is another run.


def test_another_tokenizer_cannot_resume_a_run(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    state = maker(pipeline(sources(tmp_path, "bytes")))(0, 1).state_dict()
    with pytest.raises(
        StateError, match=r"the tokenizer of source 'web' changed: bytes when it was saved, .*words now"
    ):
        maker(pipeline(sources(tmp_path, Words())))(0, 1).load_state_dict(state)
    lines = [
        fmsdata.Pack(fmsdata.Tokenize(fmsdata.ShardReader(tmp_path / "web"), spec), seq_len=9)
        for spec in ("bytes", Words())
    ]
    alone = [maker(fmsdata.Rescalable(line, lanes=2))(0, 1) for line in lines]
    with pytest.raises(StateError, match="the tokenizer of source 'below' changed"):
        alone[1].load_state_dict(alone[0].state_dict())
    other = maker(pipeline(sources(tmp_path, "bytes", min_length=3)))(0, 1)
    with pytest.raises(StateError, match="min_length was 1"):
        other.load_state_dict(state)


def test_weights_sources_and_max_epochs_can_be_edited(tmp_path: Path) -> None:
    """No document is lost or repeated when the mix changes in the middle of windows."""
    write_corpus(tmp_path)

    def data(weights: dict[str, float], max_epochs: float | None = None, window: int = 8) -> fmsdata.Rescalable:
        mixed = {
            "web": fmsdata.Tokenize(fmsdata.ShardReader(tmp_path / "web"), Words()),
            "wiki": fmsdata.Tokenize(fmsdata.ShardReader(tmp_path / "wiki", max_epochs=max_epochs), Words()),
        }

        def find(name: str, _: State) -> fmsdata.Stage:
            return mixed[name]

        mix = fmsdata.Mixture({name: mixed[name] for name in weights}, weights, find=find)
        lines = fmsdata.Pack(fmsdata.Delimit(mix, eos=EOS), seq_len=17)
        return fmsdata.Rescalable(fmsdata.Shuffle(lines, window=window), lanes=LANES, seed=3)

    edits = [
        data({"web": 7, "wiki": 3}),
        data({"web": 1, "wiki": 9}),
        data({"web": 1}),
        data({"web": 2, "wiki": 5}, max_epochs=50),
        data({"web": 4, "wiki": 5}, window=5),
    ]
    account = testing.Account(stored(tmp_path), epochs=1)
    states: list[Any] | None = None
    for edited, steps in zip(edits, (21, 17, 9, 13, 400), strict=True):
        make = maker(edited)
        loaders = [make(rank, 2) for rank in range(2)]
        for loader in loaders:
            if states is not None:
                loader.load_state_dict(states)
        for _ in range(steps):
            for loader in loaders:
                account.add(next(loader))
        states = [loader.state_dict() for loader in loaders]
    assert account.is_complete()
    assert json.loads(states[0]["pipeline"])["edits"] if states else False


def test_documents_of_text_can_be_traced(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    data = pipeline(sources(tmp_path, Words()))
    loader = maker(data)(0, 1)
    seen = [span for batch in islice(loader, 150) for row in batch["provenance"] for span in row]
    trace = fmsdata.Trace(data, world_size=1, batch_size=1)
    expected = stored(tmp_path)
    for name in list(expected)[::9]:
        (found,) = trace.documents([f"{name[0]}/{name[1]}#{name[2]}"], until=150)
        assert (found.start, found.stop) == (0, len(expected[name]))
        assert Counter(span.stop - span.start for span in seen if span[:3] == name) == Counter(
            span.stop - span.start for span in found.seen
        )
    (none,) = trace.documents(["web/part-2.jsonl#1"], until=150)  # tokenizes to nothing
    assert (none.start, none.stop, none.seen) == (0, 0, ())


# Errors.


def test_text_without_tokenize_and_tokenize_over_tokens_are_refused_at_once(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    text, tokens = (
        fmsdata.ShardReader(tmp_path / "web"),
        fmsdata.Tokenize(fmsdata.ShardReader(tmp_path / "web"), "bytes"),
    )
    ways: list[Any] = [
        lambda: fmsdata.Mixture({"web": text}, {"web": 1}),
        lambda: fmsdata.Mixture({"web": text, "wiki": tokens}, {"web": 1, "wiki": 1}),
        lambda: fmsdata.Delimit(text, eos=1),
        lambda: fmsdata.Pack(text, seq_len=9),
        lambda: fmsdata.Pack(fmsdata.Map(text, lambda item: item), seq_len=9),
        lambda: fmsdata.Shuffle(text),
        lambda: fmsdata.Rescalable(text, lanes=2),
    ]
    for way in ways:
        with pytest.raises(
            ConfigError, match=r"holds text; tokenize it: fmsdata\.Tokenize\(stage, 'tokenizer\.json'\)"
        ):
            way()
    for stage in (tokens, fmsdata.Map(tokens, lambda item: item)):
        with pytest.raises(ConfigError, match="holds tokens already; remove the Tokenize"):
            fmsdata.Tokenize(stage, "bytes")
    with pytest.raises(ConfigError, match="Tokenize takes the stage below it"):
        fmsdata.Tokenize(tmp_path, "bytes")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="strip is 7"):
        fmsdata.Tokenize(text, "bytes", strip=7)  # type: ignore[arg-type]


class Broken(Words):
    """A tokenizer that fails in some way at texts that say so."""

    def __init__(self, made: Any) -> None:
        super().__init__()
        self.made = made

    def encode_batch(self, texts: Sequence[str]) -> list[Any]:
        made: list[Any] = [[len(text)] for text in texts]
        for i, text in enumerate(texts):
            if text == "bad":
                if isinstance(self.made, Exception):
                    raise self.made
                made[i] = self.made
        return made


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (ValueError("no"), "ValueError: no"),
        ([1.5], "ids must be a list of integers"),
        ([-1], "returned the id -1"),
        ([1 << 64], "below 2\\^63"),
        (None, "returned None"),
    ],
)
def test_a_failing_tokenizer_is_an_error_that_names_the_document(tmp_path: Path, made: Any, message: str) -> None:
    texts = ["good"] * 40
    texts[29] = "bad"
    write_source(tmp_path, texts, shards=1)
    stage = fmsdata.Tokenize(fmsdata.ShardReader(tmp_path, name="web"), Broken(made))
    with pytest.raises(
        StageError, match=rf"source 'web': the tokenizer failed at part-0\.jsonl, document 29 .*{message}"
    ):
        list(islice(stage, 41))


def test_an_error_ahead_comes_only_after_what_was_tokenized_before_it(tmp_path: Path) -> None:
    """Working ahead neither hides an error nor raises it while there are lines before it."""
    texts = [f"good {i}" for i in range(200)]
    write_source(tmp_path, texts, shards=1)
    counted = []
    for ahead in (False, True):
        tokenizer = Words()
        stage = fmsdata.Tokenize(fmsdata.ShardReader(tmp_path, name="web"), tokenizer)
        lane = Lane(window_tokens=1000)
        iterator = stage.open(lane)
        documents = 0
        calls = iter(range(1000))

        def bad_later(texts: Sequence[str], calls: Any = calls) -> list[list[int]]:
            if next(calls) == 4:
                raise ValueError("no")
            return [[1]] * len(texts)

        tokenizer.encode_batch = bad_later  # type: ignore[method-assign]
        with pytest.raises(StageError, match="ValueError: no"):
            while True:
                if ahead:
                    lane.ahead.advance(300)
                documents += len(iterator.read())
        counted.append(documents)
    assert counted[0] == counted[1] > 0


def test_a_tokenizer_that_returns_too_few_texts_is_an_error(tmp_path: Path) -> None:
    class Short(Words):
        def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
            return [[1]] * (len(texts) - 1)

    write_corpus(tmp_path)
    with pytest.raises(StageError, match="the ids of 0 texts, expected those of 1"):
        next(iter(fmsdata.Tokenize(fmsdata.ShardReader(tmp_path / "web"), Short())))


def test_a_source_of_which_nothing_is_left_is_an_error_and_not_a_hang(tmp_path: Path) -> None:
    write_source(tmp_path / "web", [" "] * 20)
    with pytest.raises(DataError, match="none of its documents has at least 1 token "):
        next(iter(fmsdata.Tokenize(fmsdata.ShardReader(tmp_path / "web"), Words())))
    write_corpus(tmp_path)
    with pytest.raises(DataError, match="has at least 100,000 tokens"):
        next(iter(fmsdata.Tokenize(fmsdata.ShardReader(tmp_path / "web"), Words(), min_length=100_000)))


def test_a_long_document_works(tmp_path: Path) -> None:
    write_source(tmp_path, ["ab " * 1_000_000, "c"], shards=1)
    lengths = {len(item) for item in islice(fmsdata.Tokenize(fmsdata.ShardReader(tmp_path), "bytes"), 2)}
    assert lengths == {3_000_000, 1}


# In worker processes.


class Environment(Words):
    """Ids that say how many threads the process may use."""

    fingerprint = "environment"

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        parallel = os.environ.get("TOKENIZERS_PARALLELISM", "")
        threads = int(os.environ.get("RAYON_NUM_THREADS", "0"))
        return [[{"": 1, "false": 2}[parallel], 10 + threads, 100 + THREADS.count] for _ in texts]


@pytest.mark.parametrize("method", ["forkserver", "fork"])
def test_workers_share_the_cores_and_the_trainer_keeps_its_environment(
    tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TOKENIZERS_PARALLELISM", "RAYON_NUM_THREADS", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    write_corpus(tmp_path)
    before, cores = dict(os.environ), len(os.sched_getaffinity(0))
    data = pipeline(sources(tmp_path, Environment()))
    workers = cores  # so that each has one core
    batch = next(iter(maker(data, num_workers=workers, multiprocessing_context=method)(0, 1)))
    assert {2, 10, 101} <= set(batch["input_ids"].flatten().tolist())
    assert dict(os.environ) == before
    assert THREADS.count == cores


def test_a_killed_worker_is_an_error_and_the_state_resumes(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    data = pipeline(sources(tmp_path, "bytes"))
    others = {process.pid for process in worker_processes()}
    loader = maker(data, num_workers=2)(0, 1)
    seen = [next(loader)["provenance"] for _ in range(20)]
    workers = {process.pid for process in worker_processes()} - others
    os.kill(max(workers), signal.SIGKILL)
    with pytest.raises(fmsdata.WorkerError, match="SIGKILL"):
        seen.extend(batch["provenance"] for batch in loader)  # what was on its way still comes
    resumed = maker(data, num_workers=1)(0, 1)
    resumed.load_state_dict(loader.state_dict())
    seen += [next(resumed)["provenance"] for _ in range(20)]
    assert seen == [batch["provenance"] for batch in islice(maker(data)(0, 1), len(seen))]


def test_an_error_of_the_tokenizer_reaches_the_trainer_from_a_worker(tmp_path: Path) -> None:
    write_source(tmp_path / "web", ["good"] * 40 + ["bad"], shards=1)
    stage = fmsdata.Tokenize(fmsdata.ShardReader(tmp_path / "web"), Broken(ValueError("no")))
    data = fmsdata.Rescalable(fmsdata.Pack(stage, seq_len=9), lanes=2)
    with pytest.raises(StageError, match=r"the tokenizer failed at part-0\.jsonl, document 40 .*ValueError: no"):
        list(islice(maker(data, num_workers=1)(0, 1), 50))


def test_two_loaders_of_one_process_do_not_disturb_one_another(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    bpe().save(str(tmp_path / "tokenizer.json"))
    data = pipeline(sources(tmp_path, tmp_path / "tokenizer.json"))
    alone = [batch["input_ids"].tolist() for batch in islice(maker(data)(0, 1), 60)]
    both = [maker(data, prefetch=2)(0, 1), maker(data, num_workers=1)(0, 1)]
    for batches in zip(*(islice(loader, 60) for loader in both), [None] * 60, strict=True):
        assert batches[0]["input_ids"].tolist() == batches[1]["input_ids"].tolist() == alone.pop(0)


@settings(max_examples=25, deadline=None)
@given(
    texts=st.lists(st.text("ab é", max_size=40), min_size=1, max_size=25).filter(any),
    work=st.lists(st.integers(0, 120), min_size=1, max_size=12),
    window=st.integers(1, 400),
    stop=st.integers(0, 40),
)
def test_working_ahead_changes_neither_documents_nor_states(
    texts: list[str], work: list[int], window: int, stop: int
) -> None:
    """Whatever was encoded ahead, and in whatever pieces, a restored iterator continues with the next document."""
    with tempfile.TemporaryDirectory() as folder:
        write_source(Path(folder) / "web", texts, shards=1)
        stage = fmsdata.Tokenize(fmsdata.ShardReader(Path(folder) / "web"), "bytes")

        def documents(state: State | None, ahead: bool) -> list[tuple[tuple[Any, ...], State]]:
            lane = Lane(window_tokens=window if ahead else 0)
            iterator = stage.open(lane, state)
            found: list[tuple[tuple[Any, ...], State]] = []
            for tokens in itertools.cycle(work):
                if ahead:
                    lane.ahead.advance(tokens)
                for i, item in enumerate(iterator.read()):
                    key = (item.document, item.epochs, item.tokens.tolist())
                    found.append((key, iterator.state(i + 1)))
                if len(found) > 60:
                    return found[:60]
            raise AssertionError

        plain, ahead = documents(None, False), documents(None, True)
        assert plain == ahead
        assert [name for name, _ in documents(plain[stop][1], True)][:19] == [name for name, _ in plain[stop + 1 :]][
            :19
        ]
