"""What the loader tells of its progress is what the batches held, whatever happened on the way to them."""

import json
import math
import multiprocessing
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fmsdata
from fmsdata.errors import FmsdataWarning
from fmsdata.run.stats import Stats, Throughput
from tests.helpers import documents, maker, opened, write_source

# `Checked` takes some steps of a loader after others, on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:the same line iterates over an endless loader again")


class Checked:
    """A loader, and what its batches held, by their provenance."""

    def __init__(self, loader: fmsdata.StatefulDataLoader, before: Counter[str] | None = None) -> None:
        self.loader = loader
        self.seen: Counter[str] = Counter(before or {})
        self.handed_out = 0  # tokens, since this was made

    def steps(self, count: int) -> Iterator[Stats]:
        """The stats after each step, which must be right in all that does not depend on earlier loaders."""
        for batch in islice(self.loader, count):
            for spans in batch["provenance"]:
                for span in spans:
                    self.seen[span.source] += span.stop - span.start
                    self.handed_out += span.stop - span.start
            stats = self.loader.stats()
            assert stats.overall.tokens == self.handed_out
            yield stats

    def exactly(self, count: int) -> None:
        """Some steps, after each of which all is right."""
        for stats in self.steps(count):
            assert tokens(stats) == self.seen
            assert stats.tokens == self.seen.total()


def tokens(stats: Stats) -> Counter[str]:
    return Counter({name: source.tokens for name, source in stats.sources.items()})


def used(states: list[Any]) -> int:
    """The tokens of documents in progress when the windows in progress began."""
    return sum(lane["anchor"]["below"]["used"] for state in states for lane in opened(state)["lanes"].values())


PIPELINES: dict[str, dict[str, Any]] = {
    "split": {},
    "pad": {"pack__mode": "pad", "pack__pad": 1, "pack__bol": 2, "pack__eol": 3, "documents__bos": 4},
    "bol": {"pack__bol": 2, "pack__eol": 3, "documents__bos": 4, "documents__strip": [11, 12]},
}


@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize(("rank", "world_size"), [(0, 1), (1, 2), (3, 5)])
def test_stats_are_what_the_batches_held(corpus: Path, pipeline: str, rank: int, world_size: int) -> None:
    for batch_size, prefetch in [(1, 0), (3, 4), (20, 1)]:
        options = {"loader__batch_size": batch_size, "loader__prefetch": prefetch, **PIPELINES[pipeline]}
        checked = Checked(maker(corpus, **options)(rank, world_size))
        checked.exactly(40)
        assert checked.loader.stats().samples == 40 * batch_size
        checked.loader.close()


@pytest.mark.parametrize(("workers", "prefetch"), [(1, 0), (2, 4), (3, 1)])
def test_stats_are_the_same_with_workers(corpus: Path, workers: int, prefetch: int) -> None:
    options = {"loader__num_workers": workers, "loader__prefetch": prefetch, "loader__batch_size": 4}
    checked = Checked(maker(corpus, **options)(0, 2))
    checked.exactly(60)
    checked.loader.close()


@pytest.fixture(scope="module")
def shared_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, rng = tmp_path_factory.mktemp("corpus"), np.random.default_rng(1)
    write_source(folder / "web", documents(rng, 60))
    write_source(folder / "wiki", documents(rng, 23), layout="batch", shards=2)
    return folder


@settings(max_examples=20, deadline=None)
@given(
    seq_len=st.integers(3, 90),
    window=st.integers(1, 20),
    lanes=st.integers(1, 9),
    batch_size=st.integers(1, 30),
    pad=st.booleans(),
    steps=st.integers(1, 12),
)
def test_stats_are_right_for_any_shape(
    shared_corpus: Path, seq_len: int, window: int, lanes: int, batch_size: int, pad: bool, steps: int
) -> None:
    options: dict[str, Any] = {"pack__mode": "pad", "pack__pad": 1} if pad else {}
    options |= {"pack__seq_len": seq_len, "shuffle__window": window, "lanes": lanes}
    Checked(maker(shared_corpus, **options, loader__batch_size=batch_size, loader__prefetch=0)(0, 1)).exactly(steps)


def pipeline_of(corpus: Path, *, shuffled: bool, fn: Callable[[Any], Any] | None = None) -> fmsdata.Rescalable:
    """Lines of a nested mixture. Without a shuffle, chunks are of other lengths whenever a lane is opened."""
    web, wiki = (fmsdata.ShardReader(corpus / name) for name in ("web", "wiki"))
    inner = fmsdata.Mixture({"wiki": wiki, "again": wiki}, {"wiki": 3, "again": 1})
    below: fmsdata.Stage = fmsdata.Mixture({"web": web, "more": fmsdata.Delimit(inner, eos=0)}, {"web": 3, "more": 2})
    if fn is not None:
        below = fmsdata.Map(below, fn)
    lines: fmsdata.Stage = fmsdata.Pack(below, seq_len=17)
    return fmsdata.Rescalable(fmsdata.Shuffle(lines, window=8) if shuffled else lines, lanes=6, seed=1)


def loader_of(data: fmsdata.Rescalable, **options: Any) -> fmsdata.StatefulDataLoader:
    return fmsdata.StatefulDataLoader(data, batch_size=2, outputs=["provenance"], rank=0, world_size=1, **options)


@pytest.mark.parametrize("shuffled", [True, False])
@pytest.mark.parametrize(("workers", "times"), [(0, 40), (2, 6)])
def test_closing_changes_nothing(corpus: Path, shuffled: bool, workers: int, times: int) -> None:
    checked = Checked(loader_of(pipeline_of(corpus, shuffled=shuffled), num_workers=workers))
    for turn in range(times):
        checked.exactly(1 + turn % 5)
        checked.loader.close()
    assert list(checked.loader.stats().sources) == ["more/again", "more/wiki", "web"]


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_that_do_not_persist_change_nothing(corpus: Path, workers: int) -> None:
    checked = Checked(loader_of(pipeline_of(corpus, shuffled=True), num_workers=workers, persistent_workers=False))
    for count in (1, 2, 9, 4):
        checked.exactly(count)


@pytest.mark.parametrize("shuffled", [True, False])
@pytest.mark.parametrize(("workers", "prefetch"), [(0, 0), (0, 3), (2, 2)])
def test_a_batch_that_failed_does_not_count(corpus: Path, shuffled: bool, workers: int, prefetch: int) -> None:
    away = corpus / "away"

    def fails_now_and_then(document: Any) -> Any:
        if document.key % 10 == 0 and away.exists():
            raise OSError("away for a moment")
        return document

    data = pipeline_of(corpus, shuffled=shuffled, fn=fails_now_and_then)
    checked = Checked(loader_of(data, num_workers=workers, prefetch=prefetch))
    for _ in range(4):
        away.touch()
        with pytest.raises(OSError, match="away"):
            checked.exactly(500)
        assert tokens(checked.loader.stats()) == checked.seen
        away.unlink()
        checked.exactly(12)
    checked.loader.close()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_fork_counts_for_itself(corpus: Path, workers: int) -> None:
    checked = Checked(maker(corpus, loader__num_workers=workers)(0, 1))
    checked.exactly(10)
    receiver, sender = multiprocessing.Pipe(duplex=False)

    def child() -> None:
        checked.exactly(30)
        checked.loader.close()
        sender.send(tokens(checked.loader.stats()))

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    checked.exactly(30)
    assert receiver.poll(30)
    assert receiver.recv() == checked.seen
    process.join(30)
    assert process.exitcode == 0
    checked.loader.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_totals_after_a_resume_are_those_of_the_run_but_for_documents_in_progress(corpus: Path, workers: int) -> None:
    """And the pace is that of the loader, although the windows in progress are counted when they are read again."""
    make = maker(corpus, lanes=6, loader__batch_size=2, loader__num_workers=workers)
    alone = Checked(make(0, 1))
    at: dict[int, tuple[Any, Counter[str]]] = {0: (alone.loader.state_dict(), Counter())}
    for stats in alone.steps(50):
        at[stats.step] = alone.loader.state_dict(), Counter(alone.seen)
    alone.loader.close()
    again = make(0, 1)
    for step, (state, seen) in sorted(at.items(), reverse=True)[:: 1 if workers == 0 else 10]:
        again.load_state_dict(state)  # back to an earlier one, each time
        told = again.stats()
        assert told.step == step
        assert told.overall == Throughput()
        assert all(told.sources[name].tokens <= seen[name] for name in seen)
        checked = Checked(again, seen)
        missing = used([state])
        for stats in checked.steps(8):
            if stats.step >= step + 3:  # every lane has read its window again
                assert stats.tokens == checked.seen.total() - missing
                assert tokens(stats) <= checked.seen
    again.close()


def test_ranks_together_have_the_totals_of_the_run_at_any_world_size(corpus: Path) -> None:
    seen: Counter[str] = Counter()
    states: list[Any] | None = None
    steps = samples = missing = 0
    for world_size in (1, 2, 5, 3, 24):
        ranks = [Checked(maker(corpus, loader__batch_size=3)(rank, world_size)) for rank in range(world_size)]
        for rank in ranks:
            if states is not None:
                rank.loader.load_state_dict(states)
        if states is not None:
            missing = used(states)
        last = [list(rank.steps(30))[-1] for rank in ranks]
        for rank in ranks:
            seen += rank.seen
            rank.loader.close()
        steps, samples = steps + 30, samples + 30 * 3 * world_size
        total = Stats.total(last)
        assert (total.step, total.samples, total.lanes) == (steps, samples, 24)
        assert total.tokens == seen.total() - missing
        assert tokens(total) <= seen
        assert total.overall.tokens == sum(rank.handed_out for rank in ranks)
        assert math.fsum(source.share for source in total.sources.values()) == pytest.approx(1)
        for source in total.sources.values():
            assert source.epochs == pytest.approx(source.tokens / source.epoch_tokens)
        states = [rank.loader.state_dict() for rank in ranks]


def test_sources_of_a_mixture_in_a_mixture_go_on_after_a_resume(corpus: Path) -> None:
    data = pipeline_of(corpus, shuffled=True, fn=unchanged)
    first = Checked(loader_of(data))
    first.exactly(150)
    state = first.loader.state_dict()
    again = Checked(loader_of(data), first.seen)
    again.loader.load_state_dict(state)
    assert all(source.tokens > 0 for source in again.loader.stats().sources.values())
    *_, last = again.steps(5)
    assert tokens(last) <= again.seen
    assert last.tokens == again.seen.total() - used([state])
    for loader in (first.loader, again.loader):
        loader.close()


def test_a_pipeline_without_a_mixture_counts_from_the_resume(corpus: Path) -> None:
    lines = fmsdata.Pack(fmsdata.ShardReader(corpus / "web"), seq_len=17)
    data = fmsdata.Rescalable(lines, lanes=4)
    checked = Checked(loader_of(data))
    checked.exactly(100)
    assert [source.share for source in checked.loader.stats().sources.values()] == [1.0]
    again = loader_of(data)
    again.load_state_dict(checked.loader.state_dict())
    assert again.stats().samples == 200
    assert again.stats().tokens == 0
    for loader in (checked.loader, again):
        loader.close()


def test_shares_come_near_those_that_are_planned(corpus: Path) -> None:
    loader = loader_of(pipeline_of(corpus, shuffled=True))
    for _ in islice(loader, 400):
        pass
    stats = loader.stats()
    planned = {name: source.planned for name, source in stats.sources.items()}
    assert planned == pytest.approx({"web": 0.6, "more/wiki": 0.3, "more/again": 0.1})
    assert math.fsum(source.share for source in stats.sources.values()) == pytest.approx(1)
    for source in stats.sources.values():
        assert source.share == pytest.approx(source.planned, abs=0.05)
    loader.close()


def test_epochs_of_a_rank_are_about_those_of_the_run(corpus: Path) -> None:
    make = maker(corpus, loader__batch_size=4)
    ranks = [make(rank, 3) for rank in range(3)]
    for loader in ranks:
        for _ in islice(loader, 100):
            pass
        loader.close()
    total = Stats.total([loader.stats() for loader in ranks])
    for loader in ranks:
        for name, source in loader.stats().sources.items():
            assert source.epochs == pytest.approx(total.sources[name].epochs, rel=0.15)


def unchanged(document: Any) -> Any:
    return document


def slow(document: Any) -> Any:
    time.sleep(0.002)
    return document


@pytest.mark.parametrize("workers", [0, 1])
def test_waiting_is_told_where_the_data_is_slow_and_not_where_the_trainer_is(corpus: Path, workers: int) -> None:
    starved = loader_of(pipeline_of(corpus, shuffled=True, fn=slow), num_workers=workers)
    for _ in islice(starved, 30):
        pass
    stats = starved.stats()
    assert stats.overall.waited_share > 0.9
    assert 0 < stats.overall.waited <= stats.overall.seconds
    busy = loader_of(pipeline_of(corpus, shuffled=True), num_workers=workers)
    for step, _ in enumerate(islice(busy, 30)):
        if step == 4:
            busy.stats()
        time.sleep(0.01)
    stats = busy.stats()
    assert stats.recent.seconds > 0.25
    assert stats.recent.waited_share < 0.3
    assert stats.recent.seconds < stats.overall.seconds
    for loader in (starved, busy):
        loader.close()


def test_the_pace_since_the_last_call_adds_up_to_the_whole(corpus: Path) -> None:
    checked = Checked(maker(corpus)(0, 1))
    parts = [stats.recent for stats in checked.steps(20)]
    whole = checked.loader.stats().overall
    assert sum(part.tokens for part in parts) == whole.tokens == checked.handed_out
    assert math.fsum(part.waited for part in parts) == pytest.approx(whole.waited)
    assert math.fsum(part.seconds for part in parts) <= whole.seconds
    assert checked.loader.stats().recent.tokens == 0
    checked.loader.close()


def test_time_begins_with_the_first_batch(corpus: Path) -> None:
    loader = maker(corpus)(0, 1)
    time.sleep(0.05)
    assert loader.stats().overall == Throughput()
    assert loader.stats().overall.tokens_per_second == loader.stats().recent.waited_share == 0.0
    next(iter(loader))
    assert loader.stats().overall.seconds > 0
    loader.close()


def test_scalars_are_floats_and_the_text_is_one_line(corpus: Path) -> None:
    loader = maker(corpus)(0, 1)
    for stats in (loader.stats(), next(Checked(loader).steps(1))):
        scalars = stats.as_scalars()
        assert all(type(value) is float and math.isfinite(value) for value in scalars.values())
        assert json.loads(json.dumps(scalars)) == scalars
        assert {"data/tokens", "data/tokens_per_second", "data-share/web", "data-planned/wiki"} <= scalars.keys()
        assert stats.as_scalars("train").keys() == {"train" + name.removeprefix("data") for name in scalars}
        assert str(stats).startswith(f"step {stats.step}: ")
        assert "\n" not in str(stats)
    loader.close()


def test_stats_that_do_not_belong_together_are_refused(corpus: Path) -> None:
    make = maker(corpus)
    first, second = make(0, 2), make(1, 2)
    with pytest.raises(fmsdata.ConfigError, match="give the stats of every rank"):
        Stats.total([])
    with pytest.raises(fmsdata.ConfigError, match="36 lanes, but the run has 24; give the stats of each rank once"):
        Stats.total([first.stats(), second.stats(), first.stats()])
    next(iter(first))
    with pytest.raises(fmsdata.ConfigError, match=r"stats of step 1 .* and of step 0"):
        Stats.total([first.stats(), second.stats()])
    first.close()


def test_shares_after_an_edit_are_held_against_the_new_weights(corpus: Path) -> None:
    def mix(web: float, wiki: float) -> dict[str, Any]:
        return {"web": {"weight": web}, "wiki": {"weight": wiki}}

    before = maker(corpus, sources=mix(9, 1), loader__batch_size=6)(0, 1)
    for _ in islice(before, 150):
        pass
    after = maker(corpus, sources=mix(1, 4), loader__batch_size=6)(0, 1)
    after.load_state_dict(before.state_dict())
    for _ in islice(after, 150):
        pass
    stats = after.stats()
    assert {name: one.planned for name, one in stats.sources.items()} == pytest.approx({"web": 0.2, "wiki": 0.8})
    assert stats.sources["wiki"].share == pytest.approx(0.8, abs=0.04)
    assert stats.tokens == pytest.approx(2 * stats.overall.tokens, rel=0.05)
    alone = maker(corpus, sources={"web": {"weight": 1}}, loader__batch_size=6)(0, 1)
    alone.load_state_dict(after.state_dict())
    assert alone.stats().tokens == pytest.approx(stats.tokens, rel=0.02)


def test_the_planned_share_is_that_of_the_phases_that_were_read(corpus: Path) -> None:
    phases = [{"until_tokens": 6000, "weights": {"web": 1, "wiki": 0}}, {"weights": {"web": 0, "wiki": 1}}]
    loader = maker(corpus, phases=phases, lanes=4, loader__batch_size=4)(0, 1)
    batches = iter(loader)
    for _ in range(20):
        next(batches)
    assert loader.stats().sources["web"].planned == 1
    while loader.stats().tokens < 12_000:
        next(batches)
    stats = loader.stats()
    assert stats.sources["web"].planned == pytest.approx(6000 / stats.tokens)
    assert stats.sources["web"].share == pytest.approx(stats.sources["web"].planned, abs=0.05)


def test_the_planned_share_of_a_source_that_ended_goes_to_the_others(corpus: Path) -> None:
    sources = {"web": {"weight": 1}, "wiki": {"weight": 1, "max_epochs": 1}}
    loader = maker(corpus, sources=sources, lanes=4, loader__batch_size=4)(0, 1)
    with pytest.warns(FmsdataWarning, match="max_epochs"):
        for _ in islice(loader, 150):
            pass
    stats = loader.stats()
    assert stats.sources["wiki"].share < 0.2
    for source in stats.sources.values():
        assert source.share == pytest.approx(source.planned, abs=0.02)
