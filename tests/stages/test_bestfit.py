"""Best-fit packing: whole documents, nothing lost, every line and every piece begins with BOS."""

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fmsdata
from fmsdata import testing
from fmsdata.core.keys import offsets
from fmsdata.errors import ConfigError, StateError
from fmsdata.stages.pack.fit import best_fit, overfill
from fmsdata.tasks.batch import collect
from tests.helpers import maker, write_source

BOS, EOS, PAD = 1, 2, 0


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Makes a new folder for each example."""
    return lambda: tmp_path_factory.mktemp("corpus")


def numbered(lengths: Sequence[int]) -> list[npt.NDArray[np.int64]]:
    """Documents of these lengths. No token is a special one."""
    ends = offsets(np.array(lengths, np.int64))
    return [np.arange(begin, end) % 60_000 + 10 for begin, end in pairwise(ends.tolist())]


def packed(folder: Path, some: Sequence[npt.ArrayLike], *, bos: int | None = None, **options: Any) -> fmsdata.Pack:
    reader = fmsdata.ShardReader(write_source(folder / "web", some, shards=1))
    mixture = fmsdata.Mixture({"web": reader}, {"web": 1})
    options = {"mode": "bestfit", "bol": BOS, "pad": None if options.get("crop") else PAD, **options}
    return fmsdata.Pack(fmsdata.Delimit(mixture, bos=bos, eos=EOS), **options)


def lines_of_epoch(pack: fmsdata.Pack, tokens: int) -> list[fmsdata.Item]:
    """Lines until one epoch must have come: a window holds documents of several."""
    iterator, lines, seen = pack.open(fmsdata.Lane()), [], 0
    while seen < tokens:
        for line in iterator.read():
            lines.append(line)
            seen += sum(
                stop - start for (*_, start, stop), epoch in zip(line.spans, line.epochs, strict=True) if not epoch
            )
    return lines


def segments(line: fmsdata.Item) -> list[list[int]]:
    """The tokens of each segment of a line, as attention sees them, without the padding."""
    batch = collect([(line.chunk, 0)], 0)
    numbers, tokens = batch.document_numbers()[0], line.tokens
    return [tokens[numbers == number].tolist() for number in range(int(numbers.max()) + 1)]


def check_lines(lines: Sequence[fmsdata.Item], some: Sequence[npt.NDArray[np.int64]], pack: fmsdata.Pack) -> None:
    """All that holds for every line, and for the documents of the first epoch."""
    parts: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for line in lines:
        assert len(line) == pack.seq_len
        assert line.spans, "a line is all padding"
        pieces = segments(line)
        assert len(pieces) == len(line.spans)
        assert pack.max_documents is None or len(pieces) <= pack.max_documents
        for piece, span, epoch in zip(pieces, line.spans, line.epochs, strict=True):
            stored = some[span.document]
            expected = stored[span.start : span.stop].tolist()
            ends = span.stop == len(stored)
            assert piece[0] == BOS
            assert piece == ([] if expected[0] == BOS else [BOS]) + expected + ([EOS] if ends else [])
            if epoch == 0:
                parts[span.document].append((span.start, span.stop))
    for document, stored in enumerate(some):
        spans = sorted(parts[document])
        assert sum(stop - start for start, stop in spans) == len(stored), "exactly once"
        assert all(before[1] == after[0] for before, after in pairwise(spans))
        fits = len(stored) + 2 - (stored[0] == BOS) <= pack.seq_len
        assert len(spans) == 1 or not fits, "a document that fits is cut"


LENGTHS = st.lists(st.one_of(st.integers(1, 12), st.integers(1, 90)), min_size=1, max_size=60)


@settings(max_examples=60, deadline=None)
@given(
    lengths=LENGTHS,
    seq_len=st.integers(3, 40),
    window=st.integers(1, 9),
    bos=st.sampled_from([None, BOS]),
    most=st.sampled_from([None, 1, 2, 5]),
)
def test_documents_come_whole_and_every_piece_begins_with_bos(
    folders: Any, lengths: list[int], seq_len: int, window: int, bos: int | None, most: int | None
) -> None:
    some = numbered(lengths)
    pack = packed(folders(), some, bos=bos, seq_len=seq_len, window=window, max_documents=most)
    check_lines(lines_of_epoch(pack, sum(lengths)), some, pack)


L = 32
SHAPES: dict[str, list[int]] = {
    "longer than a line": [L, 40, 3 * L, 5 * L + 1] * 3,
    "one token": [1] * 100,
    "exactly a line": [L - 2] * 20,
    "one token more": [L - 1] * 20,
    "one token less": [L - 3] * 20,
    "one very long": [*range(1, 20), 100_000, *range(1, 20)],
}


@pytest.mark.parametrize("most", [None, 1])
@pytest.mark.parametrize("bos", [None, BOS])
@pytest.mark.parametrize("name", SHAPES)
def test_odd_lengths_keep_the_rules(tmp_path: Path, name: str, bos: int | None, most: int | None) -> None:
    some = numbered(SHAPES[name])
    pack = packed(tmp_path, some, bos=bos, seq_len=L, window=20, max_documents=most)
    lines = lines_of_epoch(pack, sum(SHAPES[name]))
    check_lines(lines, some, pack)
    if name == "exactly a line":
        assert all(line.tokens[0] == BOS and line.tokens[-1] == EOS and len(line.spans) == 1 for line in lines)


def test_a_bos_that_is_stored_is_not_doubled_where_a_document_begins_or_is_cut(tmp_path: Path) -> None:
    some = [np.array([BOS, 10, 11]), np.array([BOS, *range(10, 17), BOS, BOS, 20]), np.full(40, BOS), np.arange(10, 40)]
    pack = packed(tmp_path, some, bos=BOS, seq_len=8, window=3)
    check_lines(lines_of_epoch(pack, sum(map(len, some))), some, pack)


def test_positions_restart_in_every_piece(tmp_path: Path) -> None:
    iterator = packed(tmp_path, numbered([50, 7, 3, 90]), seq_len=17, window=4).open(fmsdata.Lane())
    chunk = iterator.read()
    batch = collect([(chunk, row) for row in range(len(chunk))], 0)
    starts = set(batch.cu_seqlens().tolist())
    assert starts >= set(np.flatnonzero(batch.tokens.reshape(-1) == BOS).tolist())


@settings(max_examples=25, deadline=None)
@given(
    lengths=LENGTHS,
    seq_len=st.integers(3, 40),
    window=st.integers(1, 9),
    options=st.sampled_from([{}, {"crop": True}, {"max_documents": 2}, {"first_window": 1}]),
)
def test_restored_before_any_line_it_continues_the_same(
    folders: Any, lengths: list[int], seq_len: int, window: int, options: dict[str, Any]
) -> None:
    pack = packed(folders(), numbered(lengths), seq_len=seq_len, window=window, **options)
    testing.check_stage(pack, items=25, lanes=2)
    testing.check_stage(fmsdata.Shuffle(pack, window=5), items=12, lanes=1)


@settings(max_examples=40, deadline=None)
@given(lengths=LENGTHS, seq_len=st.integers(2, 40), window=st.integers(1, 9))
def test_cropped_lines_are_never_padded_and_begin_with_whole_documents(
    folders: Any, lengths: list[int], seq_len: int, window: int
) -> None:
    some = numbered(lengths)
    pack = packed(folders(), some, seq_len=seq_len, window=window, crop=True)
    iterator, seen = pack.open(fmsdata.Lane()), Counter[tuple[int, int]]()
    for _ in range(3):
        chunk = iterator.read()
        read = iterator.state(len(chunk))
        for line in chunk:
            assert len(line) == seq_len
            assert line.tokens[0] == BOS
            assert not line.chunk.padding[0]
            for span, epoch in zip(line.spans, line.epochs, strict=True):
                assert span.stop <= len(some[span.document])
                seen.update((epoch, span.document, place) for place in range(span.start, span.stop))  # type: ignore[misc]
    assert set(seen.values()) <= {1}
    assert read["below"]["sources"]["web"]["taken"] == seen.total() + read["cropped"]


@settings(max_examples=200, deadline=None)
@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=80), most=st.sampled_from([None, 1, 3]))
def test_best_fit_is_what_placing_one_by_one_gives(lengths: list[int], most: int | None) -> None:
    rooms: list[list[int]] = []  # room, pieces
    expected = Counter[int]()
    for length in sorted(lengths, reverse=True):
        fitting = [line for line in rooms if line[0] >= length and line[1] < (most or 1000)]
        line = min(fitting, key=lambda one: one[0], default=None)
        if line is None:
            rooms.append(line := [20, 0])
        line[0] -= length
        line[1] += 1
    expected = Counter(20 - room for room, _ in rooms)
    line_of = best_fit(np.array(lengths), 20, most)
    assert Counter(np.bincount(line_of, lengths).astype(int).tolist()) == expected


@settings(max_examples=200, deadline=None)
@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=80), size=st.integers(20, 50))
def test_overfilled_lines_have_few_tokens_too_many(lengths: list[int], size: int) -> None:
    lengths = [*lengths, *[20] * 3]
    filled = np.bincount(overfill(np.array(lengths), size), lengths)
    assert filled.min() >= size
    assert len(filled) > sum(lengths) / (size + 20) - 1


@pytest.mark.parametrize("seq_len", [1024, 2048, 8192])
def test_lognormal_lengths_use_more_than_995_of_1000_places(tmp_path: Path, seq_len: int) -> None:
    lengths = np.random.default_rng(0).lognormal(np.log(1000) - 0.5, 1, 20_000).astype(np.int64) + 1
    pool = np.arange(lengths.sum()) % 60_000 + 10
    some = np.split(pool, np.cumsum(lengths)[:-1])
    iterator = packed(tmp_path, some, seq_len=seq_len + 1).open(fmsdata.Lane())
    chunks = [iterator.read() for _ in range(2 + 8192 // seq_len)]
    used = 1 - sum(sum(chunk.padding) for chunk in chunks) / sum(len(chunk) * (seq_len + 1) for chunk in chunks)
    assert used >= 0.995, used
    half = [sum(chunk.padding[: len(chunk) // 2]) / max(1, sum(chunk.padding)) for chunk in chunks]
    assert min(half) < 0.5 < max(half) or 0.05 < half[0] < 0.95, "lines are not sorted by how full they are"


def windows(pack: fmsdata.Pack, lanes: int, saved: Any = None) -> tuple[int, int | None]:
    """The windows of a run that leaves them to choose."""
    settled: Any = pack.settled(lanes, saved)
    return settled.window, settled.first_window


def test_a_window_that_is_not_given_is_at_most_half_an_epoch_of_a_lane(tmp_path: Path) -> None:
    pack = packed(tmp_path, numbered([99] * 6400), seq_len=100)
    assert windows(pack, lanes=1) == (512, None)
    assert windows(pack, lanes=32) == (6336 // 64, None)
    assert windows(pack, lanes=1000) == (32, None)
    assert windows(packed(tmp_path / "one", numbered([99]), seq_len=100, window=7), lanes=32) == (7, None)
    assert "first_window" not in pack.parameters()
    data = fmsdata.Rescalable(fmsdata.Shuffle(pack), lanes=32)
    loader = fmsdata.StatefulDataLoader(data, batch_size=1, rank=0, world_size=1)
    next(loader)
    state = loader.state_dict()
    loader.close()
    assert windows(pack, 32, json.loads(state["pipeline"])["lines"]["children"]["below"]) == (6336 // 64, None)
    assert windows(pack, 32, {**pack.describe(), "window": 512}) == (512, None), "a saved run keeps its windows"


def test_windows_over_text_begin_small_and_are_limited_over_all_lanes(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some words of text\n" * 100_000)
    docs = fmsdata.Tokenize(fmsdata.ShardReader(tmp_path), "bytes")
    pack = fmsdata.Pack(docs, seq_len=2000, mode="bestfit", bol=256, pad=0)
    assert 100 < pack.epoch_items() // 2 < 120
    assert windows(pack, lanes=1) == (pack.epoch_items() // 2, 8)
    wide = fmsdata.Pack(docs, seq_len=1 << 18, mode="bestfit", bol=256, pad=0)
    assert windows(wide, lanes=192) == (32, 8)
    iterator: Any = pack.settled(1).open(fmsdata.Lane())
    chunks = [iterator.read() for _ in range(4)]
    assert [sum(chunk.lengths()) // 2000 for chunk in chunks] == [len(chunk) for chunk in chunks]
    sizes = [8, 10, 12, 15]
    assert all(size <= len(chunk) <= size + 2 for size, chunk in zip(sizes, chunks, strict=True))


BESTFIT = {"pack__mode": "bestfit", "pack__bol": 2, "pack__pad": 1}
PIPELINES: dict[str, dict[str, Any]] = {
    "bestfit": BESTFIT,
    "bos": {**BESTFIT, "documents__bos": 2, "shuffle__window": 1},
    "most": {**BESTFIT, "pack__max_documents": 2},
}


@pytest.mark.usefixtures("small_windows")
@pytest.mark.parametrize("name", [*PIPELINES, "crop"])
def test_the_laws_hold(corpus: Path, name: str) -> None:
    crop = {"pack__mode": "bestfit", "pack__bol": 2, "pack__crop": True}
    options = crop if name == "crop" else PIPELINES[name]
    make = maker(corpus, **options, lanes=6)
    testing.check_same_stream(
        make,
        world_sizes=[2, 3, 6],
        samples=72,
        variants=[maker(corpus, **options, lanes=6, loader__batch_size=3, loader__num_workers=1)],
    )
    testing.check_restore_anywhere(make, steps=40)
    stored = testing.stored_documents({name: corpus / name for name in ("web", "wiki")})
    testing.check_rescaling(make, stored=stored, world_sizes=[1, 4, 6, 5], samples=200)
    if name != "crop":
        testing.check_exactly_once(make, stored=stored, world_sizes=[1, 4, 6, 5], epochs=2, most_samples=20_000)
    testing.check_mix_holds(make, weights={"web": 7, "wiki": 3}, samples=600, within=6 * 8 * 17 * 2)


@pytest.mark.usefixtures("small_windows")
@pytest.mark.parametrize("crop", [False, True])
@pytest.mark.parametrize("window", [1, 5])
def test_stats_are_exact_after_any_number_of_resumes(corpus: Path, crop: bool, window: int) -> None:
    options = {"pack__mode": "bestfit", "pack__bol": 2, "pack__crop": crop, "pack__pad": None if crop else 1}
    make = maker(corpus, **options, lanes=6, shuffle__window=window)
    seen: Counter[str] = Counter()
    states: Any = None
    uninterrupted = make(0, 1)
    batches = iter(uninterrupted)
    for world_size, steps in [(1, 12), (2, 9), (3, 6), (6, 5), (1, 60)]:
        loaders = [make(rank, world_size) for rank in range(world_size)]
        for loader in loaders:
            if states is not None:
                loader.load_state_dict(states)
            for batch in islice(loader, steps):
                for spans in batch["provenance"]:
                    for span in spans:
                        seen[span.source] += span.stop - span.start
        for _ in range(world_size * steps):
            next(batches)
        total = fmsdata.Stats.total([loader.stats() for loader in loaders])
        assert {name: source.tokens for name, source in total.sources.items()} == dict(seen)
        if total.samples % 6 == 0:
            assert (total.tokens, total.cropped) == (uninterrupted.stats().tokens, uninterrupted.stats().cropped)
        assert bool(total.cropped) == crop
        assert 0 <= total.cropped_share < 0.4
        states = [loader.state_dict() for loader in loaders]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"bol": None, "pad": 0}, "needs a `bol` token"),
        ({"bol": 1}, "needs a `pad` token, or `crop`"),
        ({"bol": 1, "pad": 0, "eol": 3}, "has no `eol`"),
        ({"bol": 1, "crop": True, "max_documents": 3}, "one of `crop` and `max_documents`"),
        ({"bol": 1, "pad": 0, "max_documents": 0}, "at least 1"),
        ({"mode": "split", "max_documents": 3}, "has no `max_documents`"),
        ({"mode": "pad", "pad": 0, "crop": True}, "has no `crop`"),
    ],
    ids=str,
)
def test_options_that_do_not_go_together_are_refused(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    reader = fmsdata.ShardReader(write_source(tmp_path / "web", numbered([3])))
    with pytest.raises(ConfigError, match=words):
        fmsdata.Pack(reader, seq_len=8, **{"mode": "bestfit", **options})


def test_a_state_with_more_lines_than_the_window_has_is_refused(tmp_path: Path) -> None:
    pack = packed(tmp_path, numbered([5] * 30), seq_len=8, window=2)
    state = pack.open(fmsdata.Lane()).state(0)
    with pytest.raises(StateError, match="'taken' is 99"):
        pack.open(fmsdata.Lane(), {**state, "taken": 99}).read()
    for extra in ("x", '{"web":"y"}', 3):
        with pytest.raises(StateError, match="extra"):
            pack.open(fmsdata.Lane(), {**state, "extra": extra})
