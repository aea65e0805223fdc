"""The laws of the canonical stream, on real shards of many shapes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fmsdata
from fmsdata import testing
from tests.helpers import closed, documents, maker, opened, write_source

DIVISORS = [2, 3, 4, 6, 8, 12, 24]
SOURCES = ("web", "wiki")


def stored(root: Path, sources: tuple[str, ...] = SOURCES, **options: Any) -> testing.Stored:
    return testing.stored_documents({name: root / name for name in sources}, **options)


@pytest.mark.parametrize("seed", range(4))
def test_stream_is_the_same_at_any_world_size_and_batch_size(corpus: Path, seed: int) -> None:
    testing.check_same_stream(
        maker(corpus, seed=seed),
        world_sizes=DIVISORS,
        samples=24 * 12,
        variants=[maker(corpus, seed=seed, loader__batch_size=b) for b in (3, 8)],
    )


@pytest.mark.parametrize("world_size", [1, 2, 5, 7, 11, 24])
def test_each_document_comes_exactly_once_per_epoch(corpus: Path, world_size: int) -> None:
    testing.check_exactly_once(
        maker(corpus), stored=stored(corpus), world_sizes=[world_size], epochs=2, most_samples=20_000
    )


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("mode", ["split", "pad"])
def test_rescaling_again_and_again_loses_and_repeats_nothing(corpus: Path, seed: int, mode: str) -> None:
    chain = np.random.default_rng(seed).integers(1, 25, 9).tolist()
    testing.check_exactly_once(
        maker(corpus, seed=seed, pack__mode=mode, pack__pad=1 if mode == "pad" else None, loader__batch_size=2),
        stored=stored(corpus),
        world_sizes=chain,
        steps=2,
        epochs=3,
        most_samples=20_000,
    )


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"shuffle__window": 1},
        {"pack__mode": "pad", "pack__pad": 1},
        {"pack__mode": "bestfit", "pack__pad": 1, "pack__bol": 2},
        {"pack__bol": 2, "pack__eol": 3, "documents__bos": 4},
        {"pack__mode": "pad", "pack__pad": 1, "pack__bol": 2, "pack__eol": 3},
        {"documents__strip": [10, 11, 12], "documents__min_length": 20},
        {"lanes": 2, "pack__seq_len": 200},
    ],
    ids=str,
)
def test_restoring_after_any_step_continues_the_same(corpus: Path, overrides: dict[str, Any]) -> None:
    testing.check_restore_anywhere(maker(corpus, **{"lanes": 4, **overrides}), steps=60)


def test_restoring_on_every_rank_continues_the_same(corpus: Path) -> None:
    testing.check_restore_anywhere(maker(corpus), steps=10, world_size=7)


def test_lanes_left_behind_by_an_odd_world_size_catch_up(corpus: Path) -> None:
    make = maker(corpus, lanes=8)
    loaders = [make(rank, 3) for rank in range(3)]
    for loader in loaders:
        batches = iter(loader)
        for _ in range(9):
            next(batches)
    states = [loader.state_dict() for loader in loaders]
    taken = [lane["lines"] for state in states for lane in opened(state)["lanes"].values()]
    assert max(taken) > min(taken)
    one = make(0, 1)
    one.load_state_dict(states)
    batches = iter(one)
    for _ in range(8 * max(taken) - sum(taken)):
        next(batches)
    assert {lane["lines"] for lane in opened(one.state_dict())["lanes"].values()} == {max(taken)}


SHAPES: dict[str, list[list[int]]] = {
    "one document": [[7]],
    "fewer documents than lanes": [[5], [6] * 40, [7] * 3, [], [9] * 17],
    "one very long document": [[10 + i % 200 for i in range(20_000)], [10], [11, 12]],
    "almost all empty": [*([[]] * 1500), [10, 11, 12], *([[]] * 1500), [13]],
    "all of one token": [[10]] * 50,
}


@pytest.mark.parametrize("layout", ["list", "batch"])
@pytest.mark.parametrize("name", SHAPES)
def test_odd_corpora_keep_the_laws(tmp_path: Path, name: str, layout: Any) -> None:
    write_source(tmp_path / "web", SHAPES[name], layout=layout, shards=1, rows=1000)
    make = maker(tmp_path, sources={"web": {"weight": 1}}, lanes=6, shuffle__window=3)
    testing.check_same_stream(make, world_sizes=[2, 3, 6], samples=36)
    testing.check_exactly_once(
        make, stored=stored(tmp_path, ("web",)), world_sizes=[1, 4, 6, 5], epochs=2, most_samples=30_000
    )
    testing.check_restore_anywhere(make, steps=6)


def test_a_document_of_a_million_tokens(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    write_source(tmp_path / "web", [rng.integers(10, 250, 1_000_000), *documents(rng, 20)], shards=2)
    make = maker(tmp_path, sources={"web": {"weight": 1}}, lanes=4, pack__seq_len=1024, loader__batch_size=4)
    testing.check_exactly_once(
        make, stored=stored(tmp_path, ("web",)), world_sizes=[1, 3, 4, 2], steps=40, most_samples=20_000
    )
    testing.check_restore_anywhere(make, steps=5)


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.uint32, np.int64, np.uint64])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("layout", ["list", "batch"])
def test_every_layout_and_type_gives_the_same_stream(tmp_path: Path, layout: Any, stream: bool, dtype: Any) -> None:
    some = documents(np.random.default_rng(0), 40)
    write_source(tmp_path / "plain" / "web", some, layout="list", dtype=np.int32)
    write_source(tmp_path / "other" / "web", some, layout=layout, dtype=dtype, stream=stream, rows=5)
    sources = {"web": {"weight": 1}}
    plain = maker(tmp_path / "plain", sources=sources, lanes=6)
    other = maker(tmp_path / "other", sources=sources, lanes=6)
    testing.check_same_stream(plain, world_sizes=[1], samples=100, variants=[other])


def test_skipped_documents_never_disturb_the_rest(tmp_path: Path) -> None:
    """Taking the short documents out of an epoch leaves the order of the others as it is."""
    some = documents(np.random.default_rng(0), 80)
    write_source(tmp_path / "web", some)
    lines = {}
    for least in (1, 25):
        reader = fmsdata.ShardReader(tmp_path / "web", min_length=least)
        iterator = reader.open(fmsdata.Lane(index=1, count=2, seed=5))
        seen = [(item.shard, item.document, item.epochs[0]) for _ in range(9) for item in iterator.read()]
        lines[least] = [one for one in seen if len(some[one[1] * 3 + int(one[0][5])]) >= 25]
    shortest = min(map(len, lines.values()))
    assert shortest > 60
    assert lines[1][:shortest] == lines[25][:shortest]


def test_every_epoch_and_every_seed_has_its_own_order(tmp_path: Path) -> None:
    write_source(tmp_path / "web", documents(np.random.default_rng(0), 100, shortest=1))
    orders = {}
    for seed in (1, 2):
        iterator = fmsdata.ShardReader(tmp_path / "web").open(fmsdata.Lane(seed=seed))
        items: list[fmsdata.Item] = []
        while len(items) < 200:
            items += list(iterator.read())
        for epoch in (0, 1):
            orders[seed, epoch] = [(i.shard, i.document) for i in items[epoch * 100 : (epoch + 1) * 100]]
            assert {e for i in items[epoch * 100 : (epoch + 1) * 100] for e in i.epochs} == {epoch}
    assert len({tuple(order) for order in orders.values()}) == 4
    assert len({tuple(sorted(order)) for order in orders.values()}) == 1


def test_adding_and_reordering_sources_changes_nothing_for_the_others(corpus: Path) -> None:
    rng = np.random.default_rng(9)
    write_source(corpus / "news", documents(rng, 30))

    def web(sources: dict[str, Any]) -> list[Any]:
        loader = maker(corpus, sources=sources, lanes=2)(0, 1)
        batches = iter(loader)
        rows = [row for _ in range(200) for row in next(batches)["provenance"]]
        return [span for row in rows for span in row if span.source == "web"]

    def first_visits(spans: list[Any]) -> list[Any]:
        return list(dict.fromkeys(span[:3] for span in spans))

    two = first_visits(web({"web": {"weight": 7}, "wiki": {"weight": 3}}))
    swapped = first_visits(web({"wiki": {"weight": 3}, "web": {"weight": 7}}))
    assert two == swapped
    lanes = fmsdata.Lane(index=0, count=2, seed=3)
    alone = [(i.shard, i.document) for i in fmsdata.ShardReader(corpus / "web", name="web").open(lanes).read()]
    mixed = fmsdata.Mixture(
        {name: fmsdata.ShardReader(corpus / name) for name in ("news", "web", "wiki")},
        {"news": 5, "web": 3, "wiki": 2},
    )
    iterator = mixed.open(lanes)
    among = [(i.shard, i.document) for _ in range(8) for i in iterator.read() if i.source == "web"]
    assert among[: len(alone)] == alone[: len(among)]


def test_state_of_a_large_run_is_small(tmp_path: Path) -> None:
    """13 sources, 1,024 lanes: below 2 MB as JSON, also after a trillion tokens."""
    rng = np.random.default_rng(0)
    names = [f"lang=en/dataset=source-{i:02}" for i in range(13)]
    for name in names:
        write_source(tmp_path / name, documents(rng, 50, shortest=5), shards=1)
    make = maker(
        tmp_path,
        sources={name: {"weight": 1 + i} for i, name in enumerate(names)},
        lanes=1024,
        shuffle__window=4,
        loader__batch_size=1024,
    )
    loader = make(0, 1)
    next(iter(loader))
    state = loader.state_dict()
    assert len(json.dumps(state)) < 2_000_000
    state = opened(state)
    for lane in state["lanes"].values():
        lane["lines"] = 10**9
        lane["anchor"]["window"] = 10**7
        lane["anchor"]["below"]["used"] = 10**5
        for source in lane["anchor"]["below"]["below"]["sources"].values():
            source["taken"] = 10**12
            source["below"] = {"block": 10**8, "document": 10**4}
    assert len(json.dumps(closed(state))) < 2_000_000
    for lane in state["lanes"].values():  # no document is that long, and no block that large
        lane["anchor"]["below"]["used"] = 0
        for source in lane["anchor"]["below"]["below"]["sources"].values():
            source["below"]["document"] = 0
    loader.load_state_dict(closed(state))
    next(iter(loader))
