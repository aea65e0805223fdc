"""The window of a shuffle that is left to choose: how large it is, and that a run keeps it."""

import json
import logging
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fmsdata
from fmsdata.cli.app import main
from fmsdata.config.build import build_data
from fmsdata.config.read import read_config
from fmsdata.core.chunk import Chunk
from fmsdata.core.iterator import Cursor, StageIterator
from fmsdata.errors import ConfigError
from fmsdata.run.trace import Trace
from tests.helpers import CONFIG, documents, write_source

LANES, LINE = 4, 17
AUTO: dict[str, Any] = {
    **CONFIG,
    "lanes": LANES,
    "shuffle": None,
    "sources": None,
    "loader": {**CONFIG["loader"], "batch_size": 2},
}
WORLDS = [(1, 0), (2, 0), (4, 0), (2, 2)]  # world size, workers


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("corpus")
    rng = np.random.default_rng(1)
    write_source(root / "web", documents(rng, 900, longest=60))
    write_source(root / "wiki", documents(rng, 300, longest=60), layout="batch")
    return root


def window_of(data: fmsdata.Rescalable) -> int:
    assert isinstance(data.lines, fmsdata.Shuffle)
    return data.lines.window


def loaders(root: Path, world_size: int, states: Any = None, **overrides: Any) -> list[fmsdata.StatefulDataLoader]:
    dotted = {name.replace("__", "."): value for name, value in overrides.items()}
    config = {**AUTO, "path": str(root)}
    made = [fmsdata.build_loader(config, dotted, rank=rank, world_size=world_size) for rank in range(world_size)]
    for loader in made if states is not None else ():
        loader.load_state_dict(states)
    return made


def stream(some: list[fmsdata.StatefulDataLoader], samples: int) -> list[tuple[list[int], Any]]:
    """The samples in the order of the canonical stream."""
    world_size = len(some)
    rows: list[list[Any]] = [[] for _ in some]
    for rank, loader in enumerate(some):
        for batch in (next(loader) for _ in range(samples // (2 * world_size))):
            rows[rank] += zip(batch["input_ids"].tolist(), map(repr, batch["provenance"]), strict=True)
    return [rows[g % world_size][g // world_size] for g in range(samples)]


def states_of(some: list[fmsdata.StatefulDataLoader]) -> Any:
    return json.loads(json.dumps([loader.state_dict() for loader in some]))


def close(some: list[fmsdata.StatefulDataLoader]) -> None:
    for loader in some:
        loader.close()


def test_a_window_is_three_times_the_distance(corpus: Path) -> None:
    lines = fmsdata.Pack(fmsdata.ShardReader(corpus / "web"), seq_len=LINE)
    assert fmsdata.Shuffle(lines, distance=10).window == 30
    assert fmsdata.Shuffle(lines, window="auto", distance=10).window == 30
    assert window_of(fmsdata.Rescalable(fmsdata.Shuffle(lines, distance=2), lanes=LANES)) == 6


def test_a_window_is_at_most_an_eighth_of_an_epoch_of_a_lane(corpus: Path) -> None:
    lines = fmsdata.Pack(fmsdata.ShardReader(corpus / "web"), seq_len=LINE)
    tokens = lines.size().tokens
    shuffle = fmsdata.Shuffle(lines)
    for lanes in (1, 3, LANES, 64):
        assert window_of(fmsdata.Rescalable(shuffle, lanes=lanes)) == max(1, tokens // LINE // lanes // 8)
    assert window_of(fmsdata.Rescalable(shuffle, lanes=100_000)) == 1


def test_without_a_limit_from_the_corpus_neighbours_are_ten_thousand_lines_apart(corpus: Path) -> None:
    class Large(fmsdata.Stage):
        """What a corpus of 100 billion tokens says of itself."""

        def size(self) -> Any:
            return super().size()._replace(tokens=10**11)

    lines = fmsdata.Pack(Large(fmsdata.ShardReader(corpus / "web")), seq_len=4097)
    assert window_of(fmsdata.Rescalable(fmsdata.Shuffle(lines), lanes=8)) == 30_000
    assert window_of(fmsdata.Rescalable(fmsdata.Shuffle(lines), lanes=192)) == 10**11 // 4097 // 192 // 8


def test_neighbouring_lines_are_the_distance_apart(corpus: Path) -> None:
    lines = fmsdata.Pack(fmsdata.ShardReader(corpus / "web"), seq_len=LINE)
    plain = [line.tokens.tolist() for line in islice(lines, 600)]
    place = {tuple(line): i for i, line in enumerate(plain)}
    shuffled = [place[tuple(item.tokens.tolist())] for item in islice(fmsdata.Shuffle(lines, distance=20), 600)]
    where = np.argsort(shuffled)
    inside = np.arange(599) % 60 != 59  # neighbours in one window
    assert 17 < np.abs(np.diff(where))[inside].mean() < 24


def test_a_window_of_documents_counts_documents(corpus: Path) -> None:
    reader = fmsdata.ShardReader(corpus / "web")
    assert window_of(fmsdata.Rescalable(fmsdata.Shuffle(reader), lanes=LANES)) == 900 // LANES // 8


def test_windows_inside_the_sources_of_a_mixture_are_chosen_too(corpus: Path) -> None:
    def mixed(lanes: int) -> Any:
        sources = {name: fmsdata.Shuffle(fmsdata.ShardReader(corpus / name)) for name in ("web", "wiki")}
        mix = fmsdata.Mixture(sources, dict.fromkeys(sources, 1.0))
        return fmsdata.Rescalable(fmsdata.Pack(mix, seq_len=LINE), lanes=lanes)

    children = mixed(LANES).description["lines"]["children"]["below"]["children"]
    assert {name: child["window"] for name, child in children.items()} == {
        "web": 900 // LANES // 8,
        "wiki": 300 // LANES // 8,
    }
    assert len(list(islice(mixed(LANES), 40))) == 40


def test_a_stage_that_is_iterated_alone_reads_as_one_lane(corpus: Path) -> None:
    lines = fmsdata.Pack(fmsdata.ShardReader(corpus / "web"), seq_len=LINE)
    number = lines.size().tokens // LINE // 8
    auto, fixed = (islice(fmsdata.Shuffle(lines, window=window), 300) for window in ("auto", number))
    assert [item.tokens.tolist() for item in auto] == [item.tokens.tolist() for item in fixed]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"window": "automatic"}, "shuffle window is 'automatic'; it must be a number of lines, or 'auto'"),
        ({"window": 0}, "shuffle window is 0; it must be at least 1"),
        ({"distance": 0}, "shuffle distance is 0; it must be at least 1"),
        ({"window": 5, "distance": 3}, "a window of 5 lines and a distance of 3; give one of the two"),
    ],
)
def test_wrong_windows_are_refused(corpus: Path, options: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        fmsdata.Shuffle(fmsdata.ShardReader(corpus / "web"), **options)


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"window": "all"}, "shuffle.window is .all.; it must be a number of lines"),
        ({"window": 5, "distance": 3}, "give one of the two"),
        ({"distance": 0}, "shuffle.distance"),
    ],
)
def test_wrong_sections_are_refused(corpus: Path, section: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_config({**AUTO, "path": str(corpus), "shuffle": section}, {})


def test_auto_is_the_default_of_a_configuration(corpus: Path) -> None:
    config = read_config({**AUTO, "path": str(corpus)}, {})
    tokens = build_data(config).lines.size().tokens
    assert window_of(build_data(config)) == tokens // LINE // LANES // 8
    distant = read_config({**AUTO, "path": str(corpus)}, {"shuffle.distance": 2})
    assert window_of(build_data(distant)) == 6


def test_the_stream_is_the_same_at_any_world_size_and_number_of_workers(corpus: Path) -> None:
    streams = []
    for world_size, workers in WORLDS:
        some = loaders(corpus, world_size, loader__num_workers=workers)
        streams.append(stream(some, 160))
        close(some)
    assert all(other == streams[0] for other in streams)


@pytest.mark.parametrize(("world_size", "workers"), WORLDS)
def test_a_run_saved_with_a_number_keeps_it(
    corpus: Path, world_size: int, workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    before = loaders(corpus, 2, shuffle__window=7)
    stream(before, 32)
    states = states_of(before)
    expected = stream(before, 160)
    close(before)
    with caplog.at_level(logging.WARNING, "fmsdata"):
        some = loaders(corpus, world_size, states, loader__num_workers=workers)
    assert stream(some, 160) == expected
    assert not caplog.messages  # no edit
    assert {window_of(loader.data) for loader in some} == {7}
    saved = json.loads(some[0].state_dict()["pipeline"])
    assert saved["lines"]["window"] == 7
    assert "edits" not in saved
    assert some[0].stats().samples == (32 + 160) // world_size
    close(some)


def test_a_loader_that_loads_two_states_takes_the_window_of_each(corpus: Path) -> None:
    (loader,) = loaders(corpus, 1)
    own = window_of(loader.data)
    start = loader.state_dict()
    for window in (7, 9):
        before = loaders(corpus, 1, shuffle__window=window)
        stream(before, 32)
        states = states_of(before)
        expected = stream(before, 64)
        loader.load_state_dict(states)
        assert stream([loader], 64) == expected
    loader.load_state_dict(start)
    assert window_of(loader.data) == own


def test_another_number_is_an_edit_as_ever(corpus: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = loaders(corpus, 1)
    stream(before, 32)
    window = window_of(before[0].data)
    with caplog.at_level(logging.WARNING, "fmsdata"):
        (after,) = loaders(corpus, 1, states_of(before), shuffle__window=5)
    assert any(f"shuffle window {window} -> 5" in message for message in caplog.messages)
    assert window_of(after.data) == 5
    stream([after], 16)
    (again,) = loaders(corpus, 1, states_of([after]))  # and with `auto` again, the run keeps that number
    assert window_of(again.data) == 5
    assert stream([again], 64) == stream([after], 64)


def test_a_source_more_leaves_the_window_as_it_is(corpus: Path, caplog: pytest.LogCaptureFixture) -> None:
    few = {"web": {"weight": 1}}
    before = loaders(corpus, 1, sources=few)
    stream(before, 32)
    window = window_of(before[0].data)
    with caplog.at_level(logging.WARNING, "fmsdata"):
        some = loaders(corpus, 2, states_of(before), sources={**few, "wiki": {"weight": 1}})
    assert "source 'wiki' is new" in caplog.text
    assert "window" not in caplog.text
    assert {window_of(loader.data) for loader in some} == {window}
    fresh = build_data(read_config({**AUTO, "path": str(corpus)}, {}))
    assert window_of(fresh) > window
    stream(some, 64)
    again = loaders(corpus, 1, states_of(some), sources={**few, "wiki": {"weight": 1}})
    assert window_of(again[0].data) == window


def test_rescalable_alone_keeps_the_saved_window(corpus: Path) -> None:
    def data(**window: Any) -> fmsdata.Rescalable:
        lines = fmsdata.Pack(fmsdata.ShardReader(corpus / "web"), seq_len=LINE)
        return fmsdata.Rescalable(fmsdata.Shuffle(lines, **window), lanes=LANES, seed=3)

    before = data(window=7)
    items = iter(before)
    list(islice(items, 30))
    state = json.loads(json.dumps(before.state_dict()))
    expected = [item.tokens.tolist() for item in islice(items, 100)]
    after = data()
    after.load_state_dict(state)
    assert [item.tokens.tolist() for item in islice(after, 100)] == expected
    assert json.loads(after.state_dict()["pipeline"])["lines"]["window"] == 7


def test_a_run_is_traced_with_the_windows_that_it_had(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its first part has a number in the configuration, its second part `auto`, its third part another number."""
    checkpoint = {"path": str(tmp_path / "run"), "every": 4, "keep": None}
    parts = [({"shuffle__window": 7}, 10), ({}, 9), ({"shuffle__window": 5}, 9), ({}, 9)]
    seen: list[Any] = []
    for number, (options, steps) in enumerate(parts):
        (loader,) = loaders(corpus, 1, checkpoint=checkpoint, **options)
        seen += [
            [list(span) for row in batch["provenance"] for span in row]
            for batch in (next(loader) for _ in range(steps))
        ]
        loader.save()
        loader.close()
        config = {**AUTO, "path": str(corpus)}
        run = Trace(build_data(read_config(config, {})), checkpoints=fmsdata.Checkpoints(str(tmp_path / "run")))
        edited = 0 if number < 2 else parts[0][1] + parts[1][1]
        assert run.since == edited
        for step in range(edited, len(seen)):
            assert [list(span[4:9]) for span in run.step(step)] == seen[step]
    (tmp_path / "run.yaml").write_text(json.dumps({**config, "checkpoint": checkpoint}))
    monkeypatch.setattr("sys.argv", ["fmsdata", "trace", str(tmp_path / "run.yaml"), "--step", "30", "--json"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code, capsys.readouterr().err


class Fails(fmsdata.Stage):
    """Lines that can't be read from a number on, without a transform: they are only planned."""

    def __init__(self, below: fmsdata.Stage, at: int) -> None:
        super().__init__(below)
        self.at = at

    def only_plans(self) -> bool:
        return True

    def open(self, lane: Any, state: Any = None) -> Any:
        return FailsIterator(self.below.open(lane, None if state is None else state["below"]), self.at, state)


class FailsIterator(StageIterator):
    def __init__(self, below: StageIterator, at: int, state: Any) -> None:
        self._below, self._at, self._done, self._read = Cursor(below), at, 0 if state is None else state["done"], 0

    def read(self) -> Chunk:
        self._done += self._read
        chunk = self._below.take(10)
        self._read = len(chunk)
        if self._done + self._read > self._at:
            raise fmsdata.DataError("a damaged shard")
        return chunk

    def state(self, taken: int) -> Any:
        assert taken == self._read
        return {"done": self._done + taken, "below": self._below.state()}


def test_an_error_in_the_next_window_comes_after_all_lines_of_this_one(corpus: Path) -> None:
    """Though the next window is planned while this one is taken."""
    lines = Fails(fmsdata.Pack(fmsdata.ShardReader(corpus / "web"), seq_len=5), 700)
    data = fmsdata.Rescalable(fmsdata.Shuffle(lines, window=200), lanes=1, seed=1)
    loader = fmsdata.StatefulDataLoader(data, batch_size=1, rank=0, world_size=1)
    handed_out = 0
    with pytest.raises(fmsdata.DataError, match="a damaged shard"):
        for _ in loader:
            handed_out += 1
    assert handed_out
    assert handed_out % 200 == 0
    assert loader.state_dict()["step"] == handed_out
    loader.close()


@pytest.mark.parametrize("window", [1, 9, 127, 128, 129, 300, 600])
def test_windows_of_any_size_are_the_same_from_every_state(corpus: Path, window: int) -> None:
    """Small windows are planned together and large ones in parts, from wherever a run resumes."""
    lines = fmsdata.Pack(fmsdata.ShardReader(corpus / "web"), seq_len=5)
    stage = fmsdata.Shuffle(lines, window=window)
    expected = [item.tokens.tolist() for item in islice(stage, 1000)]
    windows = [sorted(expected[at : at + window]) for at in range(0, 1000 - window, window)]
    in_order = [item.tokens.tolist() for item in islice(lines, 1000)]
    assert windows == [sorted(in_order[at : at + window]) for at in range(0, 1000 - window, window)]
    data = fmsdata.Rescalable(stage, lanes=1, seed=0)
    loader = fmsdata.StatefulDataLoader(data, batch_size=1, rank=0, world_size=1, prefetch=0)
    for step in (1, 63, 64, 65, 127, 129, 200, 255, 257, 400, 513):
        while loader.state_dict()["step"] < step:
            next(loader)
        resumed = fmsdata.StatefulDataLoader(data, batch_size=1, rank=0, world_size=1, prefetch=0)
        resumed.load_state_dict(loader.state_dict())
        for at in range(step, step + 300, 7):
            while resumed.state_dict()["step"] < at:
                next(resumed)
            assert next(resumed)["input_ids"][0].tolist() == expected[at][:-1]
