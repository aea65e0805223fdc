"""Each stage by itself: what goes in, what comes out."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fmsdata
from fmsdata import testing
from fmsdata.core.chunk import Chunk
from fmsdata.core.iterator import StageIterator
from fmsdata.core.lane import Lane
from fmsdata.core.spans import BEGINS, BUFFER, COLUMNS, DOCUMENT, LENGTH, Buffer
from fmsdata.core.stage import Size, Stage
from fmsdata.core.state import State
from tests.helpers import documents, write_source

PAD, BOL, EOL, BOS, EOS = 1, 2, 3, 4, 5


class Given(Stage):
    """These documents in this order, again and again, in chunks of a given size."""

    def __init__(self, some: Sequence[Sequence[int]], chunk: int = 3) -> None:
        self.some = [list(one) for one in some]
        self._chunk = chunk

    def children(self) -> dict[str, Stage]:
        return {}

    def size(self) -> Size:
        return Size(len(self.some), sum(map(len, self.some)))

    def open(self, lane: Lane, state: State | None = None) -> StageIterator:
        return _GivenIterator(self.some, self._chunk, state["at"] if state else 0, lane.source)


class _GivenIterator(StageIterator):
    def __init__(self, some: list[list[int]], size: int, at: int, source: str) -> None:
        self._some, self._size, self._next, self._from = some, size, at, at
        self._source = source or "given"

    def read(self) -> Chunk:
        self._from = self._next
        numbers = [(self._next + i) % len(self._some) for i in range(self._size)]
        epochs = [(self._next + i) // len(self._some) for i in range(self._size)]
        self._next += self._size
        spans = np.zeros((self._size, COLUMNS), np.int64)
        spans[:, BUFFER] = np.arange(self._size)
        spans[:, LENGTH] = [len(self._some[n]) for n in numbers]
        spans[:, DOCUMENT] = numbers
        spans[:, BEGINS] = 1
        buffers = [
            Buffer(np.array(self._some[n], np.uint16), self._source, "only", epoch, keys=partial(max, epoch))
            for n, epoch in zip(numbers, epochs, strict=True)
        ]
        return Chunk(buffers, spans, np.arange(self._size + 1))

    def state(self, taken: int) -> State:
        return {"at": self._from + taken}


def first_lines(stage: Stage, count: int) -> list[list[int]]:
    return [item.tokens.tolist() for item in islice(stage, count)]


def plain_split(tokens: list[int], length: int, bol: int | None, eol: int | None) -> list[list[int]]:
    """Split packing, written down in the most direct way."""
    lines: list[list[int]] = []
    place = 0
    while place < len(tokens):
        line = [] if bol is None or tokens[place] == bol else [bol]
        room = length - len(line)
        if place + room > len(tokens):
            return lines
        piece = tokens[place : place + room]
        if eol is not None and piece[-1] != eol:
            piece = tokens[place : place + room - 1]
            line = [*line, *piece, eol]
        else:
            line = line + piece
        place += len(piece)
        lines.append(line)
    return lines


def plain_pad(some: list[list[int]], length: int) -> list[list[int]]:
    """Pad packing, written down in the most direct way."""
    lines: list[list[int]] = [[]]
    for one in some:
        if lines[-1] and len(lines[-1]) + len(one) > length:
            lines.append([])
        for token in one:
            if len(lines[-1]) == length:
                lines.append([])
            lines[-1].append(token)
    return [line + [PAD] * (length - len(line)) for line in lines[:-1]]


docs_strategy = st.lists(st.lists(st.integers(1, 20), min_size=1, max_size=30), min_size=1, max_size=12)


@settings(max_examples=150, deadline=None)
@given(docs_strategy, st.integers(3, 25), st.integers(1, 5), st.sampled_from([None, BOL]), st.sampled_from([None, EOL]))
def test_split_is_one_long_run_of_tokens_cut_when_the_line_is_full(
    some: list[list[int]], length: int, chunk: int, bol: int | None, eol: int | None
) -> None:
    stage = fmsdata.Pack(Given(some, chunk), seq_len=length, bol=bol, eol=eol)
    expected = plain_split([token for one in some * 60 for token in one], length, bol, eol)[:20]
    assert first_lines(stage, len(expected)) == expected


@settings(max_examples=150, deadline=None)
@given(docs_strategy, st.integers(2, 25), st.integers(1, 5))
def test_pad_starts_a_new_line_where_a_document_does_not_fit(some: list[list[int]], length: int, chunk: int) -> None:
    stage = fmsdata.Pack(Given(some, chunk), seq_len=length, mode="pad", pad=PAD)
    expected = plain_pad(some * 60, length)[:20]
    assert first_lines(stage, len(expected)) == expected


@settings(max_examples=80, deadline=None)
@given(docs_strategy, st.integers(4, 25), st.integers(1, 5), st.sampled_from(["split", "pad"]))
def test_every_line_has_its_length_its_ends_and_something_in_it(
    some: list[list[int]], length: int, chunk: int, mode: Any
) -> None:
    docs = fmsdata.Delimit(Given(some, chunk), bos=BOS, eos=EOS)
    pad = PAD if mode == "pad" else None
    stage = fmsdata.Pack(docs, seq_len=length, mode=mode, bol=BOL, eol=EOL, pad=pad)
    for item in islice(stage, 20):
        padding = item.chunk.padding[0]
        tokens = item.tokens.tolist()
        assert len(tokens) == length
        assert tokens[0] == BOL
        assert tokens[length - padding - 1] == EOL
        assert padding <= length - 3
        assert tokens[length - padding :] == [PAD] * padding


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    docs_strategy,
    st.integers(1, 5),
    st.sampled_from(["split", "pad"]),
    st.sampled_from([None, BOL]),
    st.sampled_from([None, EOL]),
    st.integers(1, 7),
)
def test_packing_and_shuffling_restore_at_every_line(
    some: list[list[int]], chunk: int, mode: Any, bol: int | None, eol: int | None, window: int
) -> None:
    docs = fmsdata.Delimit(Given(some, chunk), bos=BOS, eos=EOS)
    pack = fmsdata.Pack(docs, seq_len=9, mode=mode, bol=bol, eol=eol, pad=PAD if mode == "pad" else None)
    testing.check_stage(fmsdata.Shuffle(pack, window=window), items=15, lanes=1)


def test_delimiters_are_not_doubled() -> None:
    stage = fmsdata.Delimit(Given([[7, 8], [BOS, 7], [7, EOS], [BOS, EOS], [EOS], [BOS]]), bos=BOS, eos=EOS)
    assert first_lines(stage, 6) == [
        [BOS, 7, 8, EOS],
        [BOS, 7, EOS],
        [BOS, 7, EOS],
        [BOS, EOS],
        [BOS, EOS],
        [BOS, EOS],
    ]


def test_a_stage_can_be_used_twice_in_one_pipeline() -> None:
    inner = fmsdata.Delimit(Given([[7, 8], [9]]), bos=BOS, eos=EOS)
    outer = fmsdata.Delimit(inner, bos=BOL, eos=EOL)
    assert first_lines(outer, 2) == [[BOL, BOS, 7, 8, EOS, EOL], [BOL, BOS, 9, EOS, EOL]]
    numbers = [[i] for i in range(10, 70)]
    once = fmsdata.Shuffle(Given(numbers), window=30)
    twice = fmsdata.Shuffle(once, window=30)
    orders = [[line[0] for line in first_lines(stage, 60)] for stage in (once, twice)]
    assert orders[0] != orders[1]
    for order in orders:
        assert sorted(order[:30]) == list(range(10, 40))
        assert sorted(order[30:]) == list(range(40, 70))
    testing.check_stage(fmsdata.Shuffle(fmsdata.Pack(fmsdata.Shuffle(outer, window=4), seq_len=6), window=3))


def test_the_same_reader_under_two_names_is_two_sources(tmp_path: Path) -> None:
    reader = fmsdata.ShardReader(write_source(tmp_path / "web", documents(np.random.default_rng(0), 50, shortest=1)))
    mix = fmsdata.Mixture({"a": reader, "b": reader}, {"a": 1, "b": 1})
    testing.check_stage(mix)
    items = list(islice(mix, 60))
    orders = {name: [(i.shard, i.document) for i in items if i.source == name] for name in "ab"}
    assert orders["a"] != orders["b"]


def test_map_and_filter_and_a_stage_that_makes_several_items_of_one() -> None:
    class Halves(Stage):
        def transform(self, item: fmsdata.Item, _key: int) -> list[fmsdata.Item]:
            middle = len(item) // 2
            return [item.replace(item.tokens[:middle]), item.replace(item.tokens[middle:])]

    some = [[10, 11, 12], [13], [14, 15, 16, 17], [18, 19]]
    assert first_lines(fmsdata.Map(Given(some), lambda item: item.tokens[::-1]), 2) == [[12, 11, 10], [13]]
    assert first_lines(fmsdata.Filter(Given(some), lambda item: len(item) > 2), 3) == [some[0], some[2], some[0]]
    assert first_lines(Halves(Given(some)), 4) == [[10], [11, 12], [13], [14, 15]]
    for stage in (
        fmsdata.Map(Given(some), lambda item: item.tokens[:1]),
        fmsdata.Filter(Given(some), lambda item: len(item) > 2),
        Halves(Halves(Given(some))),
        fmsdata.Pack(fmsdata.Filter(Halves(Given(some)), lambda item: len(item) > 1), seq_len=3),
        fmsdata.Map(fmsdata.Pack(fmsdata.Delimit(Given(some), eos=EOS), seq_len=5), lambda line: line.tokens + 1),
    ):
        testing.check_stage(stage)


def test_views_with_gaps_and_reused_buffers_are_fine(tmp_path: Path) -> None:
    reader = fmsdata.ShardReader(write_source(tmp_path / "web", documents(np.random.default_rng(0), 20, shortest=2)))
    held = np.zeros(100, np.int64)

    def reuse(item: fmsdata.Item) -> Any:
        held[: len(item)] = item.tokens
        return held[: len(item)]

    plain = first_lines(fmsdata.Pack(reader, seq_len=5), 30)
    assert first_lines(fmsdata.Pack(fmsdata.Map(reader, reuse), seq_len=5), 30) == plain
    backwards = fmsdata.Map(fmsdata.Map(reader, lambda i: i.tokens[::-1]), lambda i: i.tokens[::-1])
    loader = fmsdata.StatefulDataLoader(fmsdata.Rescalable(fmsdata.Pack(backwards, seq_len=5), lanes=1), batch_size=2)
    assert next(iter(loader))["input_ids"].tolist() == [line[:-1] for line in plain[:2]]


def test_several_items_of_one_have_keys_of_their_own() -> None:
    class Halves(Stage):
        def transform(self, item: fmsdata.Item, _key: int) -> list[fmsdata.Item]:
            return [item.replace(item.tokens[:1]), item.replace(item.tokens[1:]), item]

    items = list(islice(Halves(Given([[i, i + 1, i + 2] for i in range(10, 30)])), 60))
    assert len({item.key for item in items}) == 60


def test_a_filter_may_be_choosy_about_lines() -> None:
    """One line in a hundred passes: patience is a matter of epochs, not of items."""
    some = [[7] * 6000] * 99 + [[9] * 6000]
    picky = fmsdata.Filter(fmsdata.Pack(Given(some), seq_len=2), lambda line: 9 in line.tokens)
    assert first_lines(picky, 1) == [[9, 9]]


def test_a_mapped_line_keeps_its_provenance() -> None:
    lines = fmsdata.Pack(fmsdata.Delimit(Given([[10, 11, 12], [13]]), eos=EOS), seq_len=5)
    mapped = fmsdata.Map(lines, lambda line: line.tokens + 100)
    for before, after in zip(islice(lines, 5), islice(mapped, 5), strict=True):
        assert after.spans == before.spans
        assert after.tokens.tolist() == [token + 100 for token in before.tokens.tolist()]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: fmsdata.Filter(Given([[7]]), lambda _: False), "nothing passes"),
        (
            lambda: fmsdata.Map(fmsdata.Pack(Given([[7], [8]]), seq_len=4), lambda i: i.tokens[:1]),
            "must keep its length",
        ),
        (lambda: fmsdata.Map(Given([[7]]), lambda _: [0.5]), "list of integers"),
    ],
)
def test_a_stage_that_breaks_its_contract_is_told_so(make: Callable[[], Stage], words: str) -> None:
    with pytest.raises(fmsdata.StageError, match=words):
        next(iter(make()))


def test_a_transform_that_gives_no_item_is_told_so() -> None:
    class Wrong(Stage):
        def transform(self, item: fmsdata.Item, _key: int) -> Any:
            return [item.tokens]

    with pytest.raises(fmsdata.StageError, match=r"use item.replace\(tokens\)"):
        next(iter(Wrong(Given([[7]]))))


@pytest.mark.parametrize("returned", [None, 42, True])
def test_a_transform_that_gives_no_list_is_told_so(returned: Any) -> None:
    class Wrong(Stage):
        def transform(self, _item: fmsdata.Item, _key: int) -> Any:
            return returned

    with pytest.raises(fmsdata.StageError, match=f"Wrong.transform returned {returned}, expected a list of Items"):
        next(iter(Wrong(Given([[7]]))))


def test_shuffle_moves_lines_only_inside_their_window() -> None:
    numbers = [[i] for i in range(10, 110)]
    order = [line[0] for line in first_lines(fmsdata.Shuffle(Given(numbers), window=25), 100)]
    for window in range(4):
        part = order[25 * window : 25 * (window + 1)]
        assert sorted(part) == list(range(10 + 25 * window, 35 + 25 * window))
        assert part != sorted(part)


WEIGHTS = {f"s{i:02}": weight for i, weight in enumerate([77, 9, 5, 3, 2, 1.5, 1, 0.5, 0.4, 0.2, 0.2, 0.1, 0.1])}


@pytest.mark.parametrize("lane", range(5))
def test_in_a_lane_no_source_is_ever_further_off_than_documented(lane: int) -> None:
    rng = np.random.default_rng(lane)
    longest = 300
    sources: dict[str, Stage] = {
        name: Given([[1] * n for n in rng.integers(1, longest + 1, 40)], chunk=int(rng.integers(1, 30)))
        for name in WEIGHTS
    }
    mix = fmsdata.Mixture(sources, WEIGHTS)
    iterator = mix.open(Lane(index=lane, count=5, seed=9))
    taken = dict.fromkeys(WEIGHTS, 0)
    total = 0
    while total < 3_000_000:
        for item in iterator.read():
            taken[item.source] += len(item)
            total += len(item)
            for name, weight in mix.weights.items():
                assert abs(taken[name] - weight * total) <= (1 + len(WEIGHTS) * weight) * longest
    for name, weight in mix.weights.items():
        assert taken[name] == pytest.approx(weight * total, rel=0.01 if weight > 0.05 else 0.2)


def test_the_mix_holds_from_the_first_samples_on(tmp_path: Path) -> None:
    """Over many lanes the phases spread the rare sources, so the first batches are close to the mix already."""
    rng = np.random.default_rng(0)
    weights = {"web": 0.80, "books": 0.15, "code": 0.04, "wiki": 0.01}
    for name in weights:
        write_source(tmp_path / name, documents(rng, 400, longest=200, shortest=20))
    readers: dict[str, Stage] = {name: fmsdata.ShardReader(tmp_path / name) for name in weights}
    lines = fmsdata.Shuffle(fmsdata.Pack(fmsdata.Mixture(readers, weights), seq_len=257), window=16)
    data = fmsdata.Rescalable(lines, lanes=192, seed=1)

    def make(rank: int, world_size: int) -> fmsdata.StatefulDataLoader:
        outputs = ["provenance", "epochs"]
        return fmsdata.StatefulDataLoader(data, batch_size=64, rank=rank, world_size=world_size, outputs=outputs)

    shares = testing.check_mix_holds(make, weights=weights, samples=2000, within=6_000)
    for name, weight in weights.items():
        assert shares[name] == pytest.approx(weight, rel=0.12), name


def test_items_know_where_they_come_from(tmp_path: Path) -> None:
    some = documents(np.random.default_rng(0), 9, shortest=1)
    write_source(tmp_path / "web", some)
    for item in islice(fmsdata.ShardReader(tmp_path / "web"), 20):
        shard = int(item.shard.removeprefix("part-").removesuffix(".arrow"))
        assert item.source == "web"
        assert item.tokens.tolist() == some[item.document * 3 + shard].tolist()
        assert item.spans == [("web", item.shard, item.document, 0, len(item))]


def test_special_tokens_may_be_larger_than_the_shards_type(tmp_path: Path) -> None:
    write_source(tmp_path / "web", [[7, 8], [9]], shards=1, dtype=np.uint8)
    docs = fmsdata.Delimit(fmsdata.ShardReader(tmp_path / "web"), bos=100_000, eos=3_000_000_000)
    loader = fmsdata.StatefulDataLoader(
        fmsdata.Rescalable(fmsdata.Pack(docs, seq_len=9, bol=70_000), lanes=2), batch_size=2
    )
    batch = next(iter(loader))
    assert {70_000, 100_000, 3_000_000_000} <= set(batch["input_ids"].unique().tolist())


def test_every_stage_describes_itself(tmp_path: Path) -> None:
    write_source(tmp_path / "web", [[7, 8], [9]], shards=2)
    stage = fmsdata.Shuffle(fmsdata.Pack(fmsdata.ShardReader(tmp_path / "web"), seq_len=4), window=2)
    described = stage.describe()
    assert described["window"] == 2
    assert described["children"]["below"]["seq_len"] == 4
    reader = described["children"]["below"]["children"]["below"]
    assert (reader["shards"], reader["documents"], reader["tokens"]) == (2, 2, 3)
    assert stage.size() == (2, 3)
