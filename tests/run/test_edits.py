"""A run that goes on with another mix: nothing of an unfinished epoch comes twice, and nothing is left out."""

import json
import logging
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fmsdata
from fmsdata import testing
from fmsdata.errors import StateError
from tests.helpers import documents, maker, opened, write_source

SIZES = {"web": 60, "wiki": 23, "code": 41, "books": 9}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("corpus")
    rng = np.random.default_rng(1)
    for i, (name, count) in enumerate(SIZES.items()):
        write_source(root / name, documents(rng, count), layout="batch" if i % 2 else "list")
    return root


def mix(**weights: float) -> dict[str, Any]:
    return {name: {"weight": weight} for name, weight in weights.items()}


class Run:
    """A run over many resumes, and what its trainer saw."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.states: list[Any] | None = None
        self.seen: dict[tuple[str, int], dict[testing.Document, list[tuple[int, int]]]] = defaultdict(
            lambda: defaultdict(list)
        )
        self.rows: list[Any] = []  # of the last part
        self.tokens: Counter[str] = Counter()

    def go_on(self, world_size: int, steps: int, **overrides: Any) -> "Run":
        make = maker(self.root, **overrides)
        loaders = [make(rank, world_size) for rank in range(world_size)]
        self.rows = []
        for loader in loaders:
            if self.states is not None:
                loader.load_state_dict(self.states)
            for batch in islice(loader, steps):
                self._look(batch)
        self.states = [json.loads(json.dumps(loader.state_dict())) for loader in loaders]
        return self

    def _look(self, batch: Mapping[str, Any]) -> None:
        for row, (spans, epochs) in enumerate(zip(batch["provenance"], batch["epochs"], strict=True)):
            self.rows.append((batch["input_ids"][row].tolist(), spans))
            for span, epoch in zip(spans, epochs, strict=True):
                self.seen[span.source, epoch][tuple(span[:3])].append((span.start, span.stop))
                self.tokens[span.source] += span.stop - span.start

    def check(self) -> None:
        """Nothing came twice, and an epoch is not begun before the one before is nearly done."""
        for (source, epoch), some in self.seen.items():
            for document, spans in some.items():
                for (_, stop), (start, _) in pairwise(sorted(spans)):
                    assert start >= stop, f"{document} of {source} came twice in epoch {epoch}: {sorted(spans)}"

    def check_complete(self, epochs: int) -> None:
        """All of these epochs came, whole."""
        self.check()
        stored = testing.stored_documents({name: self.root / name for name in SIZES})
        for document, tokens in stored.items():
            for epoch in range(epochs):
                spans = self.seen[document[0], epoch].get(document, [])
                assert sum(stop - start for start, stop in spans) == len(tokens), (document, epoch, spans)

    def finish(self, epochs: int = 1, **overrides: Any) -> None:
        """Go on with all sources until so many epochs of each must be complete."""
        self.go_on(1, 2500 * epochs, sources=mix(web=5, wiki=5, code=5, books=5), **overrides)
        self.check_complete(epochs)


def test_edits_over_five_resumes_at_different_world_sizes_repeat_and_skip_nothing(corpus: Path) -> None:
    run = Run(corpus).go_on(4, 20, sources=mix(web=7, wiki=3, code=1))
    run.go_on(3, 17, sources=mix(web=2, wiki=3, code=5))  # other weights
    run.go_on(8, 9, sources=mix(code=5, web=2))  # one removed, the others in another order
    assert "wiki" not in {span.source for _, spans in run.rows for span in spans}
    run.go_on(1, 90, sources=mix(books=4, code=1, web=2))  # one new
    run.go_on(5, 13, sources=mix(wiki=9, books=1))  # one back, two gone
    assert {span.source for _, spans in run.rows for span in spans} == {"wiki", "books"}
    run.go_on(2, 31, sources=mix(web=1, wiki=1, code=1, books=1))
    run.check()
    run.finish(epochs=3)


CHANGES: dict[str, list[Any]] = {
    "pack__seq_len": [7, 16, 33],
    "pack__mode": ["split", "pad", "bestfit"],
    "pack__bol": [None, 2],
    "pack__eol": [None, 3],
    "documents__bos": [None, 4],
    "documents__eos": [None, 0, 5],
    "shuffle__window": [1, 8, 20],
    "loader__batch_size": [1, 3],
}


@pytest.mark.usefixtures("small_windows")
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_chain_of_edits_repeats_and_skips_nothing(corpus: Path, data: st.DataObject) -> None:
    run = Run(corpus)
    seed = data.draw(st.integers(0, 1000))
    for _ in range(data.draw(st.integers(2, 6))):
        names = data.draw(st.sets(st.sampled_from(sorted(SIZES)), min_size=1))
        weights = {name: data.draw(st.sampled_from([0.01, 1, 3, 50])) for name in names}
        chosen = {name: data.draw(st.sampled_from(values)) for name, values in CHANGES.items()}
        chosen["pack__pad"] = None if chosen["pack__mode"] == "split" else 1
        if chosen["pack__mode"] == "bestfit":
            chosen |= {"pack__bol": chosen["pack__bol"] or 2, "pack__eol": None}
            chosen["pack__max_documents"] = data.draw(st.sampled_from([None, 2]))
        run.go_on(
            data.draw(st.sampled_from([1, 2, 3, 5, 6])),
            data.draw(st.integers(0, 30)),
            sources=mix(**weights),
            seed=seed,
            lanes=6,
            **chosen,
        )
    run.finish(seed=seed, lanes=6)


BESTFIT: dict[str, Any] = {"pack__mode": "bestfit", "pack__bol": 2, "pack__pad": 1}
SPLIT: dict[str, Any] = {"pack__mode": "split"}
PAD: dict[str, Any] = {"pack__mode": "pad", "pack__pad": 1}


@pytest.mark.usefixtures("small_windows")
@pytest.mark.parametrize(
    "modes",
    [
        [SPLIT, BESTFIT, PAD, BESTFIT, SPLIT],
        [BESTFIT, {**BESTFIT, "pack__seq_len": 33}, {**BESTFIT, "pack__max_documents": 2}, BESTFIT],
        [BESTFIT, {**BESTFIT, "documents__bos": 2}, {**BESTFIT, "shuffle__window": 1}, SPLIT],
    ],
)
def test_a_run_may_change_how_it_packs(corpus: Path, modes: list[dict[str, Any]]) -> None:
    run = Run(corpus)
    for world_size, steps, mode in zip([2, 3, 1, 5, 4], [9, 14, 31, 6, 20], modes, strict=False):
        run.go_on(world_size, steps, sources=mix(web=5, wiki=5, code=5, books=5), lanes=6, **mode)
    run.check()
    run.finish(lanes=6)


@pytest.mark.usefixtures("small_windows")
def test_after_tokens_were_thrown_away_none_comes_twice(corpus: Path) -> None:
    crop: dict[str, Any] = {"pack__mode": "bestfit", "pack__bol": 2, "pack__crop": True}
    run = Run(corpus)
    for world_size, steps, mode in [(2, 40, crop), (3, 5, BESTFIT), (1, 90, crop), (2, 60, SPLIT), (1, 300, crop)]:
        run.go_on(world_size, steps, sources=mix(web=5, wiki=5, code=5), lanes=6, **mode)
    run.check()


def test_windows_of_many_hundred_lines_are_given_back_whole(corpus: Path) -> None:
    run, options = Run(corpus), {"lanes": 2, "shuffle__window": 1100}
    for steps, web in [(150, 7), (90, 1), (260, 5)]:
        run.go_on(1, steps, sources=mix(web=web, wiki=3, code=1, books=1), **options)
    run.finish(**options)


def test_after_an_edit_the_laws_hold_as_before(corpus: Path) -> None:
    states = Run(corpus).go_on(3, 12, sources=mix(web=7, wiki=3, books=1), lanes=6).states
    make = maker(corpus, sources=mix(web=1, code=3, wiki=6), lanes=6, pack__seq_len=21)

    def resumed(rank: int, world_size: int) -> fmsdata.StatefulDataLoader:
        loader = make(rank, world_size)
        loader.load_state_dict(states or [])
        return loader

    testing.check_restore_anywhere(resumed, steps=20)
    streams = [list(islice(_rows_of(resumed, world_size), 120)) for world_size in (1, 2, 3, 6)]
    assert streams[0] == streams[1] == streams[2] == streams[3]


def _rows_of(make: testing.MakeLoader, world_size: int) -> Iterator[Any]:
    ranks = [iter(make(rank, world_size)) for rank in range(world_size)]
    while True:
        for rank in ranks:
            yield next(rank)["input_ids"].tolist()


def test_weights_hold_from_the_first_new_line_on_and_nobody_catches_up(corpus: Path) -> None:
    run = Run(corpus).go_on(1, 600, sources=mix(web=90, wiki=10), shuffle__window=64, lanes=4)
    run.tokens.clear()
    run.go_on(1, 400, sources=mix(web=50, wiki=50), shuffle__window=64, lanes=4)
    assert run.tokens["wiki"] / run.tokens.total() == pytest.approx(0.5, abs=0.03)
    run.tokens.clear()
    run.go_on(1, 60, sources=mix(web=10, wiki=90), shuffle__window=1, lanes=4)
    assert run.tokens["wiki"] / run.tokens.total() == pytest.approx(0.9, abs=0.1)


def test_what_changed_is_logged_once_in_words(corpus: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(corpus).go_on(2, 5, sources=mix(web=1, wiki=1))
    caplog.clear()
    with caplog.at_level(logging.WARNING, "fmsdata"):
        run.go_on(3, 5, sources=mix(web=3, code=1), pack__seq_len=20, documents__eos=None)
    (record,) = caplog.records
    for words in (
        "step 5",
        "line length 17 -> 21 tokens",
        "delimit eos 0 -> None",
        "share of 'web' 50.0000% -> 75.0000%",
        "source 'wiki' is removed, and keeps its position",
        "source 'code' is new, with 25.0000%",
    ):
        assert words in record.getMessage()
    caplog.clear()
    run.go_on(3, 5, sources=mix(code=1, web=3), pack__seq_len=20, documents__eos=None)
    assert not caplog.records
    run.go_on(3, 5, sources=mix(code=1, web=3, wiki=1), pack__seq_len=20, documents__eos=None)
    assert "source 'wiki' is back at its old position" in caplog.text


def test_a_document_that_comes_in_parts_has_its_delimiters_at_its_own_ends(tmp_path: Path) -> None:
    """Each document is 10, 11, 12, ...: what stands before a 10 is a BOS, and before anything else never."""
    write_source(tmp_path / "web", [np.arange(10, 10 + n) for n in (5, 30, 17, 60, 9, 44, 3, 28)], shards=1)

    def go_on(run: Run, steps: int, seq_len: int) -> None:
        delimiters = {"documents__bos": 1, "documents__eos": 2}
        run.go_on(1, steps, sources=mix(web=1), lanes=2, shuffle__window=16, pack__seq_len=seq_len, **delimiters)

    run = Run(tmp_path)
    go_on(run, 9, 11)
    go_on(run, 60, 8)
    tokens = [tokens for tokens, _ in run.rows]
    for row in tokens:
        for before, after in pairwise(row):
            assert (before == 1) == (after == 10)
            assert before != 2 or after == 1 or after > 10
    run.check()


def test_what_is_edited_back_at_once_goes_on_without_repeat(corpus: Path) -> None:
    run = Run(corpus).go_on(2, 10, sources=mix(web=7, wiki=3))
    for turn in range(8):
        run.go_on(1 + turn % 3, 1, sources=mix(web=7, wiki=3) if turn % 2 else mix(wiki=3, code=2))
    run.check()
    run.finish(epochs=2)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"seed": 4}, "seed 3 and this run has seed 4"),
        ({"lanes": 12}, "lanes 24 and this run has lanes 12"),
        ({"documents__strip": [10]}, r"web/strip was \[\] when it was saved and is \[10\] now"),
        ({"documents__min_length": 5}, "web/min_length was 1"),
    ],
    ids=str,
)
def test_what_places_depend_on_may_not_change(corpus: Path, overrides: dict[str, Any], words: str) -> None:
    run = Run(corpus).go_on(2, 5)
    with pytest.raises(StateError, match=words):
        run.go_on(2, 5, **overrides)


def test_a_source_that_comes_back_with_other_shards_is_refused(corpus: Path, tmp_path: Path) -> None:
    for name in ("web", "wiki"):
        (tmp_path / name).symlink_to(corpus / name)
    run = Run(tmp_path).go_on(2, 5).go_on(2, 5, sources=mix(web=1))
    (tmp_path / "wiki").unlink()
    run.go_on(2, 5, sources=mix(web=2))  # by now its shards are not needed any more
    write_source(tmp_path / "wiki", documents(np.random.default_rng(5), 30))
    with pytest.raises(StateError, match="the shards of source 'wiki' changed"):
        run.go_on(2, 5)


def test_a_source_that_is_removed_with_its_shards_is_missed_at_once(corpus: Path, tmp_path: Path) -> None:
    for name in ("web", "wiki"):
        (tmp_path / name).symlink_to(corpus / name)
    run = Run(tmp_path).go_on(2, 5)
    (tmp_path / "wiki").unlink()
    with pytest.raises(StateError, match=r"'wiki' was removed, and its shards too .*restore the shards"):
        run.go_on(2, 5, sources=mix(web=1))


def test_a_source_with_weight_zero_is_not_read_and_keeps_its_place(corpus: Path) -> None:
    run = Run(corpus).go_on(2, 20).go_on(3, 20, sources=mix(web=1, wiki=0))
    assert {span.source for _, spans in run.rows for span in spans} == {"web"}
    run.finish(epochs=2)


def test_a_state_after_an_edit_is_not_much_larger(corpus: Path) -> None:
    options: dict[str, Any] = {"lanes": 12, "shuffle__window": 256, "loader__batch_size": 12}
    run = Run(corpus).go_on(1, 128, sources=mix(web=7, wiki=3, code=1), **options)
    before = len(json.dumps(run.states))
    run.go_on(1, 1, sources=mix(web=3, wiki=3, code=1), **options)
    after = len(json.dumps(run.states))
    assert after < before + 12 * 3 * 128 * 20
    run.go_on(1, 300, sources=mix(web=3, wiki=3, code=1), **options)
    assert len(json.dumps(run.states)) < 1.3 * before + 1000


def test_phases_change_the_mix_at_the_same_place_at_any_scale(corpus: Path) -> None:
    readers = {name: fmsdata.ShardReader(corpus / name) for name in SIZES}
    phases = [
        fmsdata.Phase(until_tokens=6_000, weights={**dict.fromkeys(SIZES, 0), "web": 1}),
        fmsdata.Phase(until_tokens=20_000, weights={**dict.fromkeys(SIZES, 0), "wiki": 3, "code": 1}),
    ]
    mixture = fmsdata.Mixture(readers, dict.fromkeys(SIZES, 1), phases=phases)
    data = fmsdata.Rescalable(fmsdata.Pack(mixture, seq_len=17), lanes=12, seed=1)

    def make(rank: int, world_size: int) -> fmsdata.StatefulDataLoader:
        outputs = ["provenance", "epochs"]
        return fmsdata.StatefulDataLoader(data, batch_size=2, rank=rank, world_size=world_size, outputs=outputs)

    testing.check_same_stream(make, world_sizes=[2, 3, 12], samples=2400)
    testing.check_restore_anywhere(make, steps=90, world_size=6, ahead=2)
    testing.check_exactly_once(
        make, stored=testing.stored_documents({name: corpus / name for name in SIZES}), world_sizes=[1, 5, 7], steps=40
    )
    tokens: list[Any] = [s for row in islice(_spans(make), 2400) for s in row]
    place = offsets_of(tokens)
    parts = [Counter[str](), Counter[str](), Counter[str]()]
    for span, at in zip(tokens, place, strict=True):
        parts[int(at > 6_000 + 12 * 60) + int(at > 20_000 + 12 * 60)][span.source] += span.stop - span.start
    first = sum(parts[0].values())
    assert parts[0]["web"] > 0.88 * first
    second = parts[1]
    assert second["wiki"] / second.total() == pytest.approx(0.75, abs=0.03)
    third = parts[2]
    for name in SIZES:
        assert third[name] / third.total() == pytest.approx(0.25, abs=0.03)


def offsets_of(spans: list[Any]) -> npt.NDArray[np.int64]:
    return np.cumsum([span.stop - span.start for span in spans])


def _spans(make: testing.MakeLoader) -> Iterator[Any]:
    for batch in make(0, 1):
        yield from batch["provenance"]


def test_after_max_epochs_the_share_goes_to_the_others_and_nothing_is_lost(corpus: Path) -> None:
    def make(rank: int, world_size: int, epochs: float | None = 2) -> fmsdata.StatefulDataLoader:
        readers = {
            name: fmsdata.ShardReader(corpus / name, max_epochs=epochs if name == "wiki" else None)
            for name in ("web", "wiki", "code")
        }
        mixture = fmsdata.Mixture(readers, {"web": 2, "wiki": 5, "code": 1})
        lines = fmsdata.Shuffle(fmsdata.Pack(mixture, seq_len=17), window=4)
        data = fmsdata.Rescalable(lines, lanes=12, seed=1)
        outputs = ["provenance", "epochs"]
        return fmsdata.StatefulDataLoader(data, batch_size=2, rank=rank, world_size=world_size, outputs=outputs)

    with pytest.warns(fmsdata.FmsdataWarning, match="'wiki' has been read max_epochs times"):
        rows = list(islice(_spans(make), 1500))
    got = Counter(span[:5] for row in rows for span in row if span.source == "wiki")
    stored = testing.stored_documents({"wiki": corpus / "wiki"})
    assert sum((span[4] - span[3]) * n for span, n in got.items()) == 2 * sum(map(len, stored.values()))
    late = Counter[str]()
    for row in rows[900:]:
        for span in row:
            late[span.source] += span.stop - span.start
    assert late["web"] / late.total() == pytest.approx(2 / 3, abs=0.02)
    assert late["wiki"] == 0


def test_a_source_whose_max_epochs_are_raised_goes_on_without_catching_up(corpus: Path) -> None:
    def data(epochs: float | None) -> fmsdata.Rescalable:
        readers = {name: fmsdata.ShardReader(corpus / name) for name in ("web", "code")}
        readers["wiki"] = fmsdata.ShardReader(corpus / "wiki", max_epochs=epochs)
        mixture = fmsdata.Mixture(readers, {"web": 2, "wiki": 5, "code": 3})
        return fmsdata.Rescalable(fmsdata.Pack(mixture, seq_len=17), lanes=4, seed=1)

    def rows(data: fmsdata.Rescalable, state: Any, count: int) -> tuple[list[Any], Any]:
        loader = fmsdata.StatefulDataLoader(data, batch_size=1, rank=0, world_size=1, outputs=["provenance"])
        if state:
            loader.load_state_dict(state)
        return [row for batch in islice(loader, count) for row in batch["provenance"]], loader.state_dict()

    with pytest.warns(fmsdata.FmsdataWarning, match="max_epochs"):
        _, state = rows(data(1), None, 900)
    then, _ = rows(data(None), state, 200)
    tokens = Counter[str]()
    for row in then:
        for span in row:
            tokens[span.source] += span.stop - span.start
    assert tokens["wiki"] / tokens.total() == pytest.approx(0.5, abs=0.03)


def test_a_mix_that_would_end_is_refused(corpus: Path) -> None:
    web = fmsdata.ShardReader(corpus / "web", max_epochs=1)
    wiki = fmsdata.ShardReader(corpus / "wiki")
    for make in (
        lambda: fmsdata.Mixture({"web": web}, {"web": 1}),
        lambda: fmsdata.Mixture({"web": web, "wiki": wiki}, {"web": 1, "wiki": 0}),
        lambda: fmsdata.Mixture(
            {"web": web, "wiki": wiki}, {"web": 1, "wiki": 1}, phases=[fmsdata.Phase(weights={"web": 1, "wiki": 0})]
        ),
        lambda: fmsdata.Pack(web, seq_len=9),
        lambda: fmsdata.Shuffle(web, window=9),
        lambda: fmsdata.Rescalable(web, lanes=3),
    ):
        with pytest.raises(fmsdata.ConfigError, match="max_epochs"):
            make()
    assert len(list(web)) == sum(len(tokens) > 0 for tokens in testing.stored_documents({"w": corpus / "web"}).values())


def test_a_state_before_an_edit_tells_nothing_of_edits_and_one_after_it_does(corpus: Path) -> None:
    run = Run(corpus).go_on(2, 5)
    assert run.states is not None
    assert opened(run.states[0])["pipeline"].keys() == {"seed", "lanes", "lines"}
    run.go_on(2, 5, sources=mix(web=1))
    pipeline = opened(run.states[0])["pipeline"]
    assert pipeline["edits"] == [5]
    assert list(pipeline["removed"]) == ["wiki"]


def test_a_restore_after_the_last_phase_goes_on_exactly(corpus: Path) -> None:
    phases = [{"until_tokens": 300}, {"until_tokens": 500, "weights": {"web": 0, "wiki": 1, "code": 0}}]
    make = maker(corpus, phases=phases, sources=mix(web=50, wiki=7, code=50), lanes=4, loader__batch_size=4)
    testing.check_restore_anywhere(make, steps=60)
    testing.check_exactly_once(
        make,
        stored=testing.stored_documents({name: corpus / name for name in ("web", "wiki", "code")}),
        world_sizes=[1, 3, 2],
        steps=5,
    )


def test_edits_of_phases_and_of_max_epochs_repeat_and_skip_nothing(corpus: Path) -> None:
    """Also where the lines in progress reach over the end of a phase, and a source that had more than it may."""
    every = mix(web=3, wiki=2, code=4, books=1)

    def with_epochs(most: float | None) -> dict[str, Any]:
        return every if most is None else {**every, "books": {"weight": 1, "max_epochs": most}}

    run = Run(corpus)
    for turn, most in enumerate([None, 1, None, 0.5, 2, None]):
        weights = {"web": 1, "wiki": 0, "code": 0, "books": 1}
        phases = [{"until_tokens": 900 * (turn + 1), "weights": weights}] if turn % 2 else []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", fmsdata.FmsdataWarning)
            run.go_on(1 + turn % 3, 40, sources=with_epochs(most), phases=phases, lanes=6)
    run.finish(epochs=2, lanes=6)


def test_weights_hold_at_once_where_the_lines_in_progress_reach_over_the_end_of_a_phase(tmp_path: Path) -> None:
    for name in ("web", "wiki"):
        write_source(tmp_path / name, [np.arange(10, 30)] * 3000, rows=500)
    phases = [{"until_tokens": 12_000, "weights": {"web": 1, "wiki": 0}}, {"weights": {"web": 1, "wiki": 99}}]
    options: dict[str, Any] = {"shuffle__window": 128, "lanes": 4, "pack__seq_len": 32}
    for steps in (40, 200, 400):
        run = Run(tmp_path).go_on(1, steps, sources=mix(web=1, wiki=1), phases=phases, **options)
        run.tokens.clear()
        run.go_on(1, 200, sources=mix(web=1, wiki=1), **options)
        assert run.tokens["web"] / run.tokens.total() == pytest.approx(0.5, abs=0.04)


def test_a_phase_with_explicit_zeros_resumes_what_was_saved_when_sources_could_be_left_out(corpus: Path) -> None:
    """A description has always had the shares of all sources, so nothing of a saved run changed."""
    phases = [{"until_tokens": 700, "weights": {"web": 1, "wiki": 0}}, {"weights": {"web": 0, "wiki": 3}}]
    loader = maker(corpus, phases=phases)(0, 1)
    state = loader.state_dict()
    mixture = opened(state)["pipeline"]["lines"]["children"]["below"]["children"]["below"]["children"]["below"]
    assert mixture["phases"] == [
        {"until_tokens": 700, "weights": {"web": 1.0, "wiki": 0.0}},
        {"until_tokens": None, "weights": {"web": 0.0, "wiki": 1.0}},
    ]
    without = maker(corpus)(0, 1)
    without.load_state_dict(state)
    assert opened(without.state_dict())["pipeline"]["edits"] == [0]


def test_toggling_padding_is_one_edit(corpus: Path) -> None:
    """The token to pad with may stay in the configuration: without padding it is no part of the run."""
    assert maker(corpus, pack__pad=1)(0, 1).state_dict() == maker(corpus)(0, 1).state_dict()
    run = Run(corpus)
    for turn, mode in enumerate(["split", "pad", "split", "pad"]):
        run.go_on(1 + turn % 2, 30, sources=mix(web=1, wiki=2, code=3, books=1), pack__mode=mode, pack__pad=1, lanes=6)
    run.finish(lanes=6)
    assert run.states is not None
    assert opened(run.states[0])["pipeline"]["edits"] == [30, 60, 90, 120]
