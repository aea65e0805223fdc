"""A run whose sources grow: each document of an epoch once, old epochs from the old shards, new ones from all."""

import json
import logging
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fmsdata
from fmsdata import testing, train_state
from fmsdata.core.chunk import Chunk
from fmsdata.core.iterator import Cursor, StageIterator
from fmsdata.core.lane import Lane
from fmsdata.core.state import State
from fmsdata.corpus.counts import read_counts
from fmsdata.corpus.index import index_corpus
from fmsdata.corpus.manifest import FILE
from fmsdata.corpus.shard_writer import write_shard
from fmsdata.errors import CheckpointError, StateError
from fmsdata.run.appended import unread
from fmsdata.run.rescalable import Rescalable
from fmsdata.storage.location import Location
from tests.helpers import CONFIG, documents, maker, opened, write_source

PROJECT = Path(__file__).parents[2]
LANES = 12
SOURCES = {"web": {"weight": 7}, "wiki": {"weight": 3}}
States = list[dict[str, Any]]


def begin(root: Path, *, seed: int = 1, sizes: tuple[int, int] = (40, 16)) -> Path:
    """An indexed corpus of two small sources."""
    rng = np.random.default_rng(seed)
    for name, size in zip(SOURCES, sizes, strict=True):
        write_source(root / name, documents(rng, size, longest=30), shards=2)
    index_corpus(root)
    return root


def append(root: Path, source: str, name: str, count: int, *, seed: int = 2) -> None:
    """A new shard, whose name may sort anywhere among the others."""
    write_shard(root / source / f"{name}.arrow", documents(np.random.default_rng(seed), count, longest=30, shortest=1))


class Run:
    """A run over many resumes, and what its trainer saw."""

    def __init__(self, root: Path, **overrides: Any) -> None:
        self.root = root
        self.overrides = {"lanes": LANES, "sources": SOURCES, **overrides}
        self.states: States | None = None
        self.seen: dict[tuple[str, int], dict[testing.Document, list[tuple[int, int]]]] = defaultdict(
            lambda: defaultdict(list)
        )

    def loaders(self, world_size: int, **overrides: Any) -> list[fmsdata.StatefulDataLoader]:
        make = maker(self.root, **{**self.overrides, **overrides})
        loaders = [make(rank, world_size) for rank in range(world_size)]
        for loader in loaders:
            if self.states is not None:
                loader.load_state_dict(self.states)
        return loaders

    def go_on(self, world_size: int, steps: int, *, save: bool = True, **overrides: Any) -> "Run":
        """Resume, and take steps. A run that is killed does not save, and its trainer forgets what it saw."""
        loaders = self.loaders(world_size, **overrides)
        for loader in loaders:
            for batch in islice(loader, steps):
                if save:
                    self._look(batch)
        if save:
            self.states = [json.loads(json.dumps(loader.state_dict())) for loader in loaders]
        return self

    def _look(self, batch: Any) -> None:
        for spans, epochs in zip(batch["provenance"], batch["epochs"], strict=True):
            for span, epoch in zip(spans, epochs, strict=True):
                self.seen[span.source, epoch][tuple(span[:3])].append((span.start, span.stop))

    def generations(self, source: str) -> list[list[Any]]:
        """The timeline of a source in the state."""
        assert self.states is not None
        lines = opened(self.states[0])["pipeline"]["lines"]
        while "below" in lines["children"]:
            lines = lines["children"]["below"]
        described = lines["children"][source]
        return list(described.get("generations", [[0, described["shards"], described["digest"]]]))

    def check(self, shards: dict[str, list[set[str]]], switches: dict[str, list[int]], epochs: int = 0) -> None:
        """Nothing came twice; an epoch has shards of its generation only, and the first epochs all of these."""
        stored = testing.stored_documents({name: self.root / name for name in SOURCES})
        for (source, epoch), some in self.seen.items():
            for document, spans in some.items():
                assert document[1] in allowed(shards, switches, source, epoch), (document, epoch)
                for (_, stop), (start, _) in pairwise(sorted(spans)):
                    assert start >= stop, f"{document} came twice in epoch {epoch}: {sorted(spans)}"
        for document, tokens in stored.items():
            for epoch in range(epochs):
                if document[1] in allowed(shards, switches, document[0], epoch):
                    spans = self.seen[document[0], epoch].get(document, [])
                    assert sum(stop - start for start, stop in spans) == len(tokens), (document, epoch, spans)


def allowed(shards: dict[str, list[set[str]]], switches: dict[str, list[int]], source: str, epoch: int) -> set[str]:
    generation = sum(epoch >= switch for switch in switches[source]) - 1
    return shards[source][generation]


def names(root: Path, source: str) -> set[str]:
    return {path.name for path in (root / source).glob("*.arrow")}


def rows(loaders: list[fmsdata.StatefulDataLoader], count: int) -> list[Any]:
    """The next samples of a run, in order, with their provenance and epochs."""
    per_rank = -(-count // len(loaders))
    batches = [[*islice(loader, per_rank)] for loader in loaders]
    found = [
        (batch["input_ids"][0].tolist(), batch["provenance"][0], batch["epochs"][0])
        for step in zip(*batches, strict=True)
        for batch in step
    ]
    return found[:count]


PACKS: list[dict[str, Any]] = [
    {"pack__mode": "split"},
    {"pack__mode": "pad", "pack__pad": 1},
    {"pack__mode": "bestfit", "pack__bol": 2, "pack__pad": 1},
]


@pytest.mark.usefixtures("small_windows")
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_documents_come_once_in_each_epoch_of_their_generation(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Whatever is appended when, at any chain of world sizes, stops and kills."""
    root = begin(tmp_path_factory.mktemp("corpus"), seed=data.draw(st.integers(0, 9)))
    run = Run(
        root,
        seed=data.draw(st.integers(0, 100)),
        shuffle__window=data.draw(st.sampled_from([1, 8, 20])),
        documents__min_length=data.draw(st.sampled_from([1, 1, 9])),
        **data.draw(st.sampled_from(PACKS)),
    )
    shards = {name: [names(root, name)] for name in SOURCES}
    switches = {name: [0] for name in SOURCES}
    world = st.sampled_from([1, 2, 3, 4, 5, 6, 12])
    run.go_on(data.draw(world), data.draw(st.integers(0, 40)))
    for number in range(data.draw(st.integers(1, 3))):
        grown = data.draw(st.sets(st.sampled_from(sorted(SOURCES)), min_size=1))
        for source in grown:
            append(root, source, f"{data.draw(st.sampled_from(['a', 'part-0', 'z']))}-{number}", 1 + 7 * number)
        index_corpus(root, append=True)
        if data.draw(st.booleans()):  # killed before it saves
            run.go_on(data.draw(world), data.draw(st.integers(0, 20)), save=False)
        run.go_on(data.draw(world), data.draw(st.integers(0, 40)))
        for source in grown:
            epoch, count, digest = run.generations(source)[-1]
            counts = read_counts(root / source)
            assert (count, digest) == (counts.number, counts.digest)
            while switches[source][-1] >= epoch:
                switches[source].pop(), shards[source].pop()
            switches[source].append(epoch)
            shards[source].append(names(root, source))
    if run.overrides["documents__min_length"] > 1:
        run.check(shards, switches)
        return
    epochs = 2 + max(found for listed in switches.values() for found in listed)
    run.go_on(1, 350 * epochs)
    run.check(shards, switches, epochs)


@pytest.mark.usefixtures("small_windows")
@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_the_stream_after_the_growth_is_the_same_at_any_world_size_and_at_each_resume(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    root = begin(tmp_path_factory.mktemp("corpus"))
    run = Run(root, **data.draw(st.sampled_from(PACKS)))
    world_size = data.draw(st.sampled_from([1, 2, 3, 4, 6]))
    run.go_on(world_size, data.draw(st.integers(0, 8)) * LANES // world_size)  # all lanes have as many lines
    append(root, "web", "a", 30)
    index_corpus(root, append=True)
    count = 300
    expected = rows(run.loaders(1), count)
    pipelines = set()
    for world_size in (data.draw(st.sampled_from([2, 3, 4])), 12):
        loaders = run.loaders(world_size)
        pipelines |= {loader.state_dict()["pipeline"] for loader in loaders}
        assert rows(loaders, count) == expected
    assert len(pipelines) == 1
    done = data.draw(st.integers(0, 10)) * LANES
    again = Run(root, **run.overrides)
    again.states = run.states
    again.go_on(4, done // 4)
    again.go_on(2, 0)
    assert rows(again.loaders(1), count - done) == expected[done:]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return begin(tmp_path / "corpus")


def test_a_corpus_that_never_grew_has_the_manifest_the_state_and_the_stream_of_before(root: Path) -> None:
    before = (root / "meta" / FILE).read_bytes()
    run = Run(root).go_on(2, 20)
    assert "generations" not in json.dumps(run.states)
    done = index_corpus(root, append=True)
    assert "nothing was appended" in done.notes[-1]
    assert (root / "meta" / FILE).read_bytes() == before
    assert run.loaders(1)[0].state_dict()["pipeline"] == (run.states or [])[0]["pipeline"]


def test_a_run_that_begins_after_the_growth_is_that_of_a_listing(root: Path) -> None:
    append(root, "web", "a", 30)
    index_corpus(root, append=True)
    planned = Run(root)
    found, pipeline = rows(planned.loaders(2), 100), planned.loaders(1)[0].state_dict()["pipeline"]
    shutil.rmtree(root / "meta")
    assert rows(planned.loaders(2), 100) == found
    assert planned.loaders(1)[0].state_dict()["pipeline"] == pipeline


def test_the_switch_is_after_the_epoch_of_the_furthest_lane_and_logged(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(root, shuffle__window=2).go_on(1, 500)
    furthest = max(epoch for source, epoch in run.seen if source == "web")
    append(root, "web", "a", 30)
    index_corpus(root, append=True)
    with caplog.at_level(logging.WARNING, "fmsdata"):
        run.go_on(3, 0)
    switch = run.generations("web")[-1][0]
    assert furthest < switch <= furthest + 2
    assert f"resuming from step 500 with changes: source 'web' reads 1 appended shard from epoch {switch} on" in (
        caplog.text
    )
    assert len(run.generations("wiki")) == 1
    caplog.clear()
    run.go_on(2, 0)
    assert "appended" not in caplog.text


def test_one_rank_alone_goes_on_with_the_shards_it_knows(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(root).go_on(3, 20)
    append(root, "web", "a", 30)
    index_corpus(root, append=True)
    assert run.states is not None
    make = maker(root, **run.overrides)
    loaders = [make(rank, 3) for rank in range(3)]
    with caplog.at_level(logging.WARNING, "fmsdata"):
        for loader, state in zip(loaders, run.states, strict=True):
            loader.load_state_dict(state)
    assert caplog.text.count("this is that of one rank, which goes on with the shards of before") == 1
    assert {loader.state_dict()["pipeline"] for loader in loaders} == {run.states[0]["pipeline"]}
    assert "a.arrow" not in {span.shard for _, spans, _ in rows(loaders, 400) for span in spans}
    run.states = [loader.state_dict() for loader in loaders]
    run.go_on(1, 0)
    assert [shards for _, shards, _ in run.generations("web")] == [2, 3]


def test_some_of_the_states_in_a_list_are_refused(root: Path) -> None:
    """Another rank might have been given all of them, and read other documents."""
    run = Run(root).go_on(3, 20)
    append(root, "web", "a", 30)
    index_corpus(root, append=True)
    assert run.states is not None
    for states in (run.states[:1], run.states[:2]):
        with pytest.raises(StateError, match=r"shards were appended to .*load the list of the states of all"):
            maker(root, **run.overrides)(0, 3).load_state_dict(states)


def test_train_states_are_loaded_whole_when_a_source_has_grown(root: Path, tmp_path: Path) -> None:
    run = Run(root)
    for loader in run.loaders(2):
        for _ in range(20):
            next(loader)
        train_state.save(tmp_path / "states", train_state.build(loader, step=20, tokens_seen=0))
    append(root, "web", "a", 30)
    index_corpus(root, append=True)
    pipelines = set()
    for loader in run.loaders(4):
        states = train_state.load(tmp_path / "states", loader)
        assert len(states) == 2
        train_state.restore(states, loader)
        pipelines.add(loader.state_dict()["pipeline"])
    assert len(pipelines) == 1
    assert "generations" in pipelines.pop()


def test_more_shards_are_refused_until_they_are_appended(root: Path) -> None:
    run = Run(root).go_on(2, 20)
    append(root, "web", "a", 30)
    with pytest.raises(StateError, match=r"2 shards.* 3 shards.*run `fmsdata index --append`"):
        run.loaders(1)
    done = index_corpus(root)
    assert "1 shard new, such as web/a.arrow" in done.notes[-1]
    with pytest.raises(StateError, match="run `fmsdata index --append"):
        run.loaders(1)
    done = index_corpus(root, append=True)
    assert done.added == 0
    assert "runs may read those that it found" in done.notes[-1]
    run.go_on(1, 0)
    assert [shards for _, shards, _ in run.generations("web")] == [2, 3]


def test_a_run_that_has_grown_needs_the_manifest(root: Path) -> None:
    run = Run(root).go_on(2, 20)
    append(root, "web", "a", 30)
    index_corpus(root, append=True)
    run.go_on(1, 10)
    (root / "meta" / FILE).unlink()
    with pytest.raises(StateError, match=r"source 'web' has grown.*fmsdata-manifest\.ipc.*move the shards .* away"):
        run.loaders(1)


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("kind", ["arrow", "files", "parquet"])
def test_the_way_out_of_more_shards_is_one_that_helps(tmp_path: Path, kind: str, alone: bool) -> None:
    """`--append` is for Arrow shards of a whole folder. Of others, a source can go on with the old ones."""
    ending = "parquet" if kind == "parquet" else "arrow"

    def write(name: str) -> None:
        for source in SOURCES:
            path = tmp_path / source / f"{name}.{ending}"
            if kind == "parquet":
                path.parent.mkdir(exist_ok=True)
                pq.write_table(pa.table({"tokens": [list(range(10, 30))] * 20}), path)
            else:
                append(tmp_path, source, name, 20)

    def loader(files: Any) -> fmsdata.StatefulDataLoader:
        readers = {name: fmsdata.ShardReader(tmp_path / name, files=files) for name in SOURCES}
        documents = readers["web"] if alone else fmsdata.Mixture(readers, {"web": 7, "wiki": 3})
        data = fmsdata.Rescalable(fmsdata.Pack(documents, seq_len=17), lanes=5)
        return fmsdata.StatefulDataLoader(data, batch_size=1, rank=0, world_size=1)

    write("old")
    files = "*.arrow" if kind == "files" else None
    before = loader(files)
    assert len([*islice(before, 9)]) == 9
    write("new")
    with pytest.raises(StateError, match=r"the shards of source '(web|below)' changed") as error:
        loader(files).load_state_dict(before.state_dict())
    assert ("run `fmsdata index --append`" in str(error.value)) == (kind == "arrow")
    assert ("name the old files in `files`, and give the new ones" in str(error.value)) == (kind != "arrow")
    if kind != "arrow":
        after = loader([f"old.{ending}"])
        after.load_state_dict(before.state_dict())
        assert next(after)["input_ids"].tolist() == next(before)["input_ids"].tolist()


@pytest.mark.parametrize("lost", ["removed", "damaged"])
def test_a_lost_history_is_made_again(root: Path, tmp_path: Path, lost: str) -> None:
    run = Run(root).go_on(2, 20)
    append(root, "web", "a", 30)
    index_corpus(root, append=True)
    run.go_on(1, 10)
    (root / "meta" / FILE).unlink()  # not changed in place: the loaders of before have mapped it
    if lost == "damaged":
        (root / "meta" / FILE).write_bytes(b"damaged")
    index_corpus(root)
    assert "move the new shards away" in index_corpus(root, append=True).notes[-1]
    with pytest.raises(StateError, match=r"move the shards .* away"):
        run.loaders(1)
    (root / "web/a.arrow").rename(tmp_path / "a.arrow")
    index_corpus(root)
    (tmp_path / "a.arrow").rename(root / "web/a.arrow")
    index_corpus(root, append=True)
    run.go_on(3, 10)
    assert [shards for _, shards, _ in run.generations("web")] == [2, 3]


def test_the_mix_may_be_edited_at_the_same_time(root: Path) -> None:
    shards = {name: [names(root, name)] for name in SOURCES}
    run = Run(root).go_on(4, 60)
    append(root, "web", "a", 30)
    append(root, "wiki", "b", 9)
    index_corpus(root, append=True)
    run.go_on(3, 20, sources={"web": {"weight": 1}}, pack__seq_len=24)  # wiki is removed, and has grown
    switches = {"web": [0, run.generations("web")[-1][0]]}
    run.go_on(2, 20)  # and is back
    switches["wiki"] = [0, run.generations("wiki")[-1][0]]
    for name, listed in shards.items():
        listed.append(names(root, name))
    assert all(listed[1] > 0 for listed in switches.values())
    epochs = 2 + max(switches["web"][1], switches["wiki"][1])
    run.go_on(1, 350 * epochs)
    run.check(shards, switches, epochs)


def test_a_source_without_weight_grows_too(root: Path) -> None:
    run = Run(root).go_on(2, 200)
    run.go_on(2, 10, sources={"web": {"weight": 0}, "wiki": {"weight": 1}})
    append(root, "web", "a", 30)
    index_corpus(root, append=True)
    run.go_on(3, 10, sources={"web": {"weight": 0}, "wiki": {"weight": 1}})
    switch = run.generations("web")[-1][0]
    assert switch > max(epoch for source, epoch in run.seen if source == "web")
    epochs = 1 + switch
    run.go_on(1, 500 * epochs)
    shards = {"web": [names(root, "web") - {"a.arrow"}, names(root, "web")], "wiki": [names(root, "wiki")]}
    run.check(shards, {"web": [0, switch], "wiki": [0]}, epochs)


@pytest.mark.filterwarnings("ignore:source 'web' has been read max_epochs times")
def test_max_epochs_count_those_of_all_generations(root: Path) -> None:
    sources = {"web": {"weight": 7, "max_epochs": 4}, "wiki": {"weight": 3}}
    run = Run(root, sources=sources, shuffle__window=1).go_on(2, 20)
    append(root, "web", "a", 30)
    index_corpus(root, append=True)
    run.go_on(1, 1)
    switch = run.generations("web")[-1][0]
    assert 0 < switch < 4
    run.go_on(1, 900)
    shards = {"web": [names(root, "web") - {"a.arrow"}, names(root, "web")], "wiki": [names(root, "wiki")]}
    run.check(shards, {"web": [0, switch], "wiki": [0]}, 4)
    assert ("web", 4) not in run.seen


@pytest.mark.filterwarnings("ignore:source 'web' has been read max_epochs times")
def test_a_source_that_has_ended_grows_when_its_limit_is_raised(root: Path) -> None:
    def web(epochs: int) -> dict[str, Any]:
        return {"web": {"weight": 7, "max_epochs": epochs}, "wiki": {"weight": 3}}

    run = Run(root, sources=web(2))
    run.go_on(1, 500)
    append(root, "web", "a", 30)
    index_corpus(root, append=True)
    run.go_on(2, 10)
    assert run.generations("web")[-1][0] == 3  # each lane is at the start of an epoch that it was not to read
    run.go_on(1, 1100, sources=web(4))
    shards = {"web": [names(root, "web") - {"a.arrow"}, names(root, "web")], "wiki": [names(root, "wiki")]}
    run.check(shards, {"web": [0, 3], "wiki": [0]}, 4)


def test_a_finite_pass_goes_on_with_the_shards_that_it_was_planned_for(root: Path) -> None:
    run = Run(root, epochs=2).go_on(2, 10)
    expected = rows(run.loaders(1), 1000)
    length = len(run.loaders(1)[0])
    append(root, "web", "a", 30)
    index_corpus(root, append=True)
    loader = run.loaders(1)[0]
    assert len(loader) == length
    assert rows([loader], 1000) == expected
    assert len(maker(root, **run.overrides)(0, 1)) > length  # a new pass has all


@pytest.mark.parametrize("temperature", [None, 2])
def test_a_finite_pass_with_natural_weights_goes_on_with_the_weights_that_the_error_names(
    root: Path, temperature: float | None
) -> None:
    natural = {name: {"weight": "natural"} for name in SOURCES}
    run = Run(root, epochs=2, sources=natural, temperature=temperature).go_on(2, 10)
    expected = rows(run.loaders(1), 1000)
    append(root, "web", "a", 30)
    index_corpus(root, append=True)
    with pytest.raises(StateError, match=r"`natural` weights follow the corpus") as error:
        run.loaders(1)
    weights = re.findall(r"(\w+): \{weight: ([0-9.e+]+)\}", str(error.value))
    assert [name for name, _ in weights] == [*SOURCES]
    run.overrides |= {"sources": {name: {"weight": float(weight)} for name, weight in weights}, "temperature": None}
    assert rows(run.loaders(1), 1000) == expected


def test_two_sources_in_one_folder_grow_each_at_its_place(root: Path) -> None:
    write_source(root / "web/deep", documents(np.random.default_rng(7), 20, shortest=1), shards=1)
    index_corpus(root)
    sources = {"web": {"weight": 7, "path": "web/deep"}, "wiki": {"weight": 1, "path": "web"}}
    run = Run(root, sources=sources, shuffle__window=2).go_on(1, 600)
    append(root / "web", "deep", "a", 30)
    index_corpus(root, append=True)
    run.go_on(2, 0)
    deep, all_of_it = run.generations("web"), run.generations("wiki")
    assert [shards for _, shards, _ in deep] == [1, 2]
    assert [shards for _, shards, _ in all_of_it] == [3, 4]
    assert deep[1][0] > all_of_it[1][0]


def test_steps_and_documents_are_traced_across_the_growth(root: Path, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"

    def loaders(world_size: int) -> list[fmsdata.StatefulDataLoader]:
        make = maker(root, lanes=LANES, sources=SOURCES, checkpoint={"path": str(folder), "every": 60, "keep": 9})
        return [make(rank, world_size) for rank in range(world_size)]

    def train(world_size: int, steps: int) -> Iterator[Any]:
        ranks = loaders(world_size)
        for _ in range(steps):
            for rank, loader in enumerate(ranks):
                step = loader.state_dict()["step"]
                batch = next(loader)
                spans = zip(batch["provenance"][0], batch["epochs"][0], strict=True)
                yield from ((step, rank, *span, epoch) for span, epoch in spans)
        for loader in ranks:
            loader.save()
            loader.close()

    seen = [*train(2, 120)]
    append(root, "web", "a", 30)
    index_corpus(root, append=True)
    seen += train(3, 200)
    append(root, "web", "b", 12)  # the run has not resumed since: it knows nothing of these
    index_corpus(root, append=True)
    data = maker(root, lanes=LANES, sources=SOURCES)(0, 1).data
    for from_start in (False, True):
        trace = fmsdata.trace.Trace(data, checkpoints=fmsdata.Checkpoints(str(folder)), from_start=from_start)
        for step in (3, 100, 130, 290):
            found = [
                (s.step, s.rank, s.source, s.shard, s.document, s.start, s.stop, s.epoch) for s in trace.step(step)
            ]
            assert found == [entry for entry in seen if entry[0] == step]
        wanted = ["web/a.arrow#3", "web/part-0.arrow#5", "wiki/part-1.arrow#2"]
        for document, report in zip(wanted, trace.documents(wanted), strict=True):
            key = document.partition("/")[0], *document.partition("/")[2].split("#")
            spans = [(s.step, s.rank, s.start, s.stop, s.epoch) for s in report.seen]
            expected = [
                (step, rank, start, stop, epoch)
                for step, rank, source, shard, number, start, stop, epoch in seen
                if (source, shard, str(number)) == key
            ]
            assert sorted(spans) == sorted(expected)
            assert spans
        assert len(trace.document_tokens("web/a.arrow#3")) > 0
        with pytest.raises(fmsdata.ConfigError, match="was appended later"):
            trace.documents(["web/b.arrow#1"])


def test_a_source_that_grew_while_it_was_removed_is_traced(root: Path, tmp_path: Path) -> None:
    checkpoint: dict[str, Any] = {"path": str(tmp_path / "checkpoints"), "every": 20, "keep": 99}
    seen: list[tuple[Any, ...]] = []

    def train(steps: int, sources: dict[str, Any]) -> None:
        with closing(maker(root, lanes=LANES, sources=sources, checkpoint=checkpoint)(0, 1)) as loader:
            for step, batch in enumerate(islice(loader, steps), start=loader.state_dict()["step"]):
                spans = zip(batch["provenance"][0], batch["epochs"][0], strict=True)
                seen.extend((step, *span, epoch) for span, epoch in spans)
            loader.save()

    train(60, SOURCES)
    train(60, {"web": {"weight": 1}})
    append(root, "wiki", "a", 20)
    index_corpus(root, append=True)
    train(100, SOURCES)
    data = maker(root, lanes=LANES, sources=SOURCES)(0, 1).data
    trace = fmsdata.trace.Trace(data, checkpoints=fmsdata.Checkpoints(checkpoint["path"]))
    for step in (120, 135, 165):  # the first two start from a checkpoint in which the source is removed
        found = [(s.step, s.source, s.shard, s.document, s.start, s.stop, s.epoch) for s in trace.step(step)]
        assert found == [entry for entry in seen if entry[0] == step]
    (report,) = trace.documents(["wiki/part-0.arrow#3"])
    assert {s.step for s in report.seen} == {
        step for step, source, shard, number, *_ in seen if (source, shard, number) == ("wiki", "part-0.arrow", 3)
    } - set(range(120))


def test_checkpoints_of_several_ranks_are_read_whole_when_a_source_has_grown(root: Path, tmp_path: Path) -> None:
    checkpoint = {"path": str(tmp_path / "checkpoints"), "every": 10}

    def train(world_size: int, steps: int) -> list[str]:
        make = maker(root, lanes=LANES, sources=SOURCES, checkpoint=checkpoint)
        loaders = [make(rank, world_size) for rank in range(world_size)]
        for loader in loaders:
            for _ in range(steps):
                next(loader)
        for loader in loaders:
            loader.save()
            loader.close()
        return [loader.state_dict()["pipeline"] for loader in loaders]

    train(3, 20)
    append(root, "web", "a", 30)
    index_corpus(root, append=True)
    assert len(set(train(4, 5) + train(2, 5))) == 1
    assert "generations" in train(1, 0)[0]


@pytest.mark.parametrize("resumed", [False, True])
def test_ranks_that_opened_before_and_after_the_append_are_an_error(root: Path, tmp_path: Path, resumed: bool) -> None:
    def loader(rank: int) -> fmsdata.StatefulDataLoader:
        checkpoint = {"path": str(tmp_path / "checkpoints"), "every": 5}
        return maker(root, lanes=LANES, sources=SOURCES, checkpoint=checkpoint)(rank, 2)

    if resumed:
        for before in (loader(0), loader(1)):
            assert len([*islice(before, 6)]) == 6
            before.close()
    first = loader(0)
    append(root, "web", "a", 30)
    index_corpus(root, append=True)
    second = loader(1)
    assert len([*islice(first, 6)]) == 6
    with pytest.raises(
        CheckpointError, match=r"rank 0 and rank 1 planned .*was the corpus indexed .*start all ranks again"
    ):
        for _ in islice(second, 6):
            pass
    first.close()
    second.close()


def test_epochs_in_the_stats_are_those_of_each_generation(root: Path) -> None:
    run = Run(root).go_on(1, 100)
    append(root, "web", "a", 60)
    index_corpus(root, append=True)
    loader = run.loaders(1)[0]
    counts = read_counts(root / "web")
    old, new = (int(counts.until(generation).tokens.sum()) for generation in (0, 1))
    web = loader.stats().sources["web"]
    assert web.epochs == pytest.approx(web.tokens / old)
    run.go_on(1, 1000)
    switch = run.generations("web")[-1][0]
    web = run.loaders(1)[0].stats().sources["web"]
    assert web.epochs == pytest.approx(switch + (web.tokens - switch * old) / new)
    assert web.epoch_tokens == new


def test_a_gathered_state_grows_in_other_loaders(root: Path) -> None:
    run = Run(root).go_on(2, 20)
    append(root, "web", "a", 30)
    index_corpus(root, append=True)
    loader = run.loaders(1)[0]
    data = maker(root, **run.overrides)(0, 1).data
    assert isinstance(data, Rescalable)
    assert not unread(data.lines)
    data.load_state_dict(run.states or [])
    items = [item.tokens.tolist()[:-1] for item in islice(data, 50)]
    assert items == [tokens for tokens, _, _ in rows([loader], 50)]
    assert "generations" in data.state_dict()["pipeline"]


def test_worker_processes_read_the_appended_shards(root: Path) -> None:
    run = Run(root).go_on(2, 60)
    append(root, "web", "a", 30)
    index_corpus(root, append=True)
    expected = rows(run.loaders(1), 400)
    with closing(run.loaders(1, loader__num_workers=2)[0]) as loader:
        assert rows([loader], 400) == expected
    assert "a.arrow" in {span.shard for _, spans, _ in expected for span in spans}


def test_remote_shards_grow_as_local_ones_do(root: Path, object_store: Any) -> None:
    run = Run(root).go_on(2, 60)
    url = f"{object_store.bucket()}/corpus"
    object_store.upload(root, url)
    overrides = {"path": url, "storage_options": object_store.options}
    remote = Run(root, **overrides)
    place = Location(url, object_store.options)
    index_corpus(place)
    remote.states = run.states
    remote.go_on(3, 0)
    append(root, "web", "a", 30)
    (place / "web/a.arrow").write_bytes((root / "web/a.arrow").read_bytes())
    for each in (root, place):
        index_corpus(each, append=True)
    assert rows(remote.loaders(2), 400) == rows(run.loaders(1), 400)


def test_real_ranks_that_are_killed_take_up_what_was_appended_meanwhile(root: Path, tmp_path: Path) -> None:
    """Processes that are killed by SIGKILL, `fmsdata index --append`, and as many others that resume."""
    config = tmp_path / "run.yaml"
    checkpoint: dict[str, Any] = {"path": str(tmp_path / "checkpoints"), "every": 5}
    settings = {**CONFIG, "path": str(root), "lanes": LANES, "checkpoint": checkpoint}
    config.write_text(yaml.safe_dump(settings))
    shards = {name: [names(root, name)] for name in SOURCES}
    parts: list[tuple[int, list[dict[str, Any]]]] = []  # where each part of the run began, and what it saw

    def complete() -> set[int]:
        return {int(path.parent.name[5:]) for path in (tmp_path / "checkpoints").glob("step-*/complete")}

    def train(world_size: int, steps: int, *, kill: bool) -> None:
        before = complete()
        logs = [tmp_path / f"{len(parts)}-{rank}.jsonl" for rank in range(world_size)]
        command = [sys.executable, "-m", "tests.programs.growing", str(config)]
        ranks = [
            subprocess.Popen([*command, str(rank), str(world_size), str(log), str(steps)], cwd=PROJECT)
            for rank, log in enumerate(logs)
        ]
        if kill:
            wait_for(lambda: len(complete() - before) >= 2, ranks)
            for rank in ranks:
                rank.send_signal(signal.SIGKILL)
        assert {rank.wait(120) for rank in ranks} == {-signal.SIGKILL if kill else 0}
        lines = [line for log in logs for line in log.read_text().splitlines(keepends=True) if line.endswith("\n")]
        seen = [json.loads(line) for line in lines]
        parts.append((min(entry["step"] for entry in seen), seen))

    def grow(source: str, name: str) -> None:
        append(root, source, name, 12)
        index = "from fmsdata.cli.app import main; main()"
        subprocess.run([sys.executable, "-c", index, "index", str(root), "--append"], check=True, cwd=PROJECT)
        shards[source].append(names(root, source))

    train(2, 100_000, kill=True)
    grow("web", "a")
    train(3, 100_000, kill=True)
    grow("wiki", "b")
    train(4, max(complete()) + 150, kill=False)
    run = Run(root)
    ends = [*(begin for begin, _ in parts[1:]), sys.maxsize]  # a step that came again is that of the later part
    for (_, seen), end in zip(parts, ends, strict=True):
        for entry in seen:
            if entry["step"] < end:
                for span, epoch in zip(entry["spans"], entry["epochs"], strict=True):
                    run.seen[span[0], epoch][tuple(span[:3])].append((span[3], span[4]))
    run.states = fmsdata.Checkpoints(checkpoint["path"]).read(max(complete()), [0])
    switches = {name: [epoch for epoch, _, _ in run.generations(name)] for name in SOURCES}
    assert [len(switches[name]) for name in SOURCES] == [2, 2]
    assert max(epoch for source, epoch in run.seen if source == "web") > switches["web"][1]
    run.check(
        shards, switches, min(max(epoch for source, epoch in run.seen if source == name) // 2 for name in SOURCES)
    )


def wait_for(ready: Callable[[], bool], processes: list[subprocess.Popen[bytes]]) -> None:
    until = time.monotonic() + 120
    while not ready():
        assert all(process.poll() is None for process in processes), "a rank has ended"
        assert time.monotonic() < until, "the ranks save no checkpoints"
        time.sleep(0.05)


def test_what_was_seen_of_epochs_is_counted_once() -> None:
    """The harness itself finds a document that comes twice."""
    run = Run(Path())
    run.seen["web", 0]["web", "part-0.arrow", 1] = [(0, 5), (3, 8)]
    with pytest.raises(AssertionError, match="came twice"):
        _check_alone(run)


def _check_alone(run: Run) -> None:
    check: Callable[..., None] = run.check
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(testing, "stored_documents", lambda _: {})
        check({"web": [{"part-0.arrow"}]}, {"web": [0]})


class Pairs(fmsdata.Stage):
    """A stage with an iterator of its own, that reads two documents at a time, further than its state says."""

    def open(self, lane: Lane, state: State | None = None) -> StageIterator:
        return _PairsIterator(self, lane, state)

    def only_plans(self) -> bool:
        return True


class _PairsIterator(StageIterator):
    def __init__(self, stage: Pairs, lane: Lane, state: State | None) -> None:
        self._below = Cursor(stage.below.open(lane, None if state is None else state["below"]))
        self._anchor, self._skip = self._below.state(), 0 if state is None else int(state["skip"])
        self._size = 0

    def read(self) -> Chunk:
        if self._size:
            self._anchor, self._skip = self._below.state(), 0
        pair = self._below.take(2)
        self._size = len(pair)
        return pair.take(np.arange(len(pair))[::-1][self._skip :])

    def state(self, taken: int) -> State:
        if taken and self._skip + taken == self._size:
            return {"skip": 0, "below": self._below.state()}
        return {"skip": self._skip + taken, "below": self._anchor}


def nested(root: Path) -> fmsdata.Stage:
    web, wiki = (fmsdata.ShardReader(root / name) for name in SOURCES)
    inner = fmsdata.Mixture({"web": web}, {"web": 1})
    return fmsdata.Mixture({"english": inner, "wiki": wiki}, {"english": 7, "wiki": 3})


PIPELINES: dict[str, Callable[[Path], fmsdata.Stage]] = {
    "one reader": lambda root: fmsdata.Pack(fmsdata.ShardReader(root / "web"), seq_len=17),
    "documents shuffled below the packer": lambda root: fmsdata.Pack(
        fmsdata.Shuffle(fmsdata.ShardReader(root / "web"), window=7), seq_len=17
    ),
    "documents shuffled below the mixture": lambda root: fmsdata.Pack(
        fmsdata.Mixture({"web": fmsdata.Shuffle(fmsdata.ShardReader(root / "web"), window=7)}, {"web": 1}), seq_len=17
    ),
    "a mixture in a mixture": lambda root: fmsdata.Shuffle(fmsdata.Pack(nested(root), seq_len=17), window=5),
    "a stage of the user's own": lambda root: fmsdata.Pack(Pairs(fmsdata.ShardReader(root / "web")), seq_len=17),
    "below the mixture": lambda root: fmsdata.Pack(
        fmsdata.Mixture({"web": Pairs(fmsdata.ShardReader(root / "web"))}, {"web": 1}), seq_len=17
    ),
}


@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize("steps", [0, 37, 50, 101])
def test_any_pipeline_grows(root: Path, name: str, steps: int) -> None:
    """Whatever is between the reader and the lines, what a lane has begun to read does not change."""
    run = Run(root)

    def loader() -> fmsdata.StatefulDataLoader:
        data = fmsdata.Rescalable(PIPELINES[name](root), lanes=5, seed=3)
        return fmsdata.StatefulDataLoader(data, batch_size=1, outputs=["provenance", "epochs"], rank=0, world_size=1)

    before = loader()
    for batch in islice(before, steps):
        run._look(batch)
    state = before.state_dict()
    append(root, "web", "a", 30)
    index_corpus(root, append=True)
    after = loader()
    after.load_state_dict(state)
    (found,) = re.findall(r'"generations": (\[\[.*?\]\])', after.state_dict()["pipeline"])
    switch = json.loads(found)[1][0]
    for batch in islice(after, 150 + 60 * switch):
        run._look(batch)
    shards = {"web": [names(root, "web") - {"a.arrow"}, names(root, "web")]}
    assert switch > 0
    for (source, epoch), some in run.seen.items():
        if source == "wiki":
            continue
        for document, spans in some.items():
            assert document[1] in shards["web"][epoch >= switch], (document, epoch, switch)
            for (_, stop), (start, _) in pairwise(sorted(spans)):
                assert start >= stop
    stored = testing.stored_documents({"web": root / "web"})
    web = next(source for source, _ in run.seen if source != "wiki")
    for (_, shard, number), tokens in stored.items():
        for epoch in range(switch + 1):
            if shard in shards["web"][epoch >= switch]:
                spans = run.seen[web, epoch].get((web, shard, number), [])
                assert sum(stop - start for start, stop in spans) == len(tokens), (shard, number, epoch, spans)
