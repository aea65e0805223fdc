"""Batches: labels, padding, and the outputs on request."""

import copy
import json
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fmsdata
from fmsdata.core.options import OUTPUT_NAMES
from tests.helpers import documents, maker, write_source

ALL = list(OUTPUT_NAMES)


def test_labels_are_the_inputs_one_token_further_on(corpus: Path) -> None:
    for batch in islice(maker(corpus, loader__batch_size=3)(0, 1), 20):
        inputs, labels = batch["input_ids"], batch["labels"]
        assert inputs.dtype == labels.dtype == torch.int64
        assert inputs.shape == labels.shape == (3, 16)
        assert inputs.is_contiguous()
        assert labels.is_contiguous()
        assert torch.equal(inputs[:, 1:], labels[:, :-1])


def test_prompt_tokens_are_not_learned(corpus: Path) -> None:
    plain = next(iter(maker(corpus, loader__batch_size=4)(0, 1)))
    prompted = next(iter(maker(corpus, loader__batch_size=4, task={"name": "causal_lm", "prompt_len": 3})(0, 1)))
    assert torch.equal(plain["input_ids"], prompted["input_ids"])
    assert (prompted["labels"][:, :3] == -100).all()
    assert torch.equal(plain["labels"][:, 3:], prompted["labels"][:, 3:])


def test_padding_is_not_learned_even_if_it_looks_like_a_token(corpus: Path) -> None:
    """The padding token here is the EOS token: it is recognized by its position."""
    make = maker(corpus, pack__mode="pad", pack__pad=0, pack__seq_len=24, loader__outputs=ALL)
    padded = 0
    for batch in islice(make(0, 1), 60):
        ids = batch["document_ids"][0]
        length = int((ids >= 0).sum())
        assert (ids[length:] == -1).all()
        assert (batch["input_ids"][0, length:] == 0).all()
        assert (batch["labels"][0, length:] == -100).all()
        assert (batch["labels"][0, : length - 1] != -100).all()
        assert length > 0
        padded += 24 - length
    assert padded > 100


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"documents__bos": 4, "pack__bol": 2, "pack__eol": 3},
        {"pack__mode": "pad", "pack__pad": 1, "documents__bos": 4},
        {"pack__mode": "pad", "pack__pad": 1, "pack__bol": 2, "pack__eol": 3},
    ],
    ids=str,
)
def test_outputs_agree_with_each_other_and_with_the_provenance(corpus: Path, overrides: dict[str, Any]) -> None:
    make = maker(corpus, loader__batch_size=4, loader__outputs=ALL, pack__seq_len=40, **overrides)
    for batch in islice(make(0, 1), 25):
        shape = batch["input_ids"].shape
        ids, positions, cu = batch["document_ids"], batch["position_ids"], batch["cu_seqlens"]
        assert ids.shape == positions.shape == shape
        assert cu.dtype == torch.int32
        assert cu[0] == 0
        assert cu[-1] == ids.numel()
        lengths = cu.diff()
        assert (lengths > 0).all()
        expected = torch.cat([torch.arange(int(n)) for n in lengths])
        assert torch.equal(positions.flatten(), expected)
        starts = set(cu[:-1].tolist())
        assert set(range(0, ids.numel(), shape[1])) <= starts, "every row starts a sequence"
        for row in range(shape[0]):
            line = ids[row].tolist()
            real = [number for number in line if number >= 0]
            assert real == sorted(real)
            assert sorted(set(real)) == list(range(max(real) + 1))
            changes = {row * shape[1] + i for i in range(1, shape[1]) if line[i] != line[i - 1] and line[i] >= 0}
            assert changes == {s for s in starts if row * shape[1] < s < (row + 1) * shape[1]}
            # behind each EOS (0) the next document starts; EOL (3) still belongs to the one before
            # it
            tokens = batch["input_ids"][row].tolist()
            for i, number in enumerate(line):
                if number >= 0:
                    assert number == tokens[:i].count(0) - (tokens[i] == 3 and tokens[i - 1] == 0)
            assert len(batch["epochs"][row]) == len(batch["provenance"][row])


def test_each_visit_is_a_document_of_its_own(tmp_path: Path) -> None:
    """One document, epoch after epoch: two visits side by side are two documents."""
    write_source(tmp_path / "web", [[10, 11, 12]], shards=1)
    make = maker(
        tmp_path, sources={"web": {"weight": 1}}, lanes=1, loader__outputs=ALL, pack__seq_len=8, shuffle__window=1
    )
    batch = next(iter(make(0, 1)))
    assert batch["input_ids"].tolist() == [[10, 11, 12, 0, 10, 11, 12, 0]]
    assert batch["document_ids"].tolist() == [[0, 0, 0, 0, 1, 1, 1, 1]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 2, 3]]
    assert batch["cu_seqlens"].tolist() == [0, 4, 8]
    assert batch["epochs"] == [[0, 1, 2]]
    assert batch["provenance"] == [[("web", "part-0.arrow", 0, 0, 3)] * 2 + [("web", "part-0.arrow", 0, 0, 1)]]


def test_batches_are_not_overwritten_and_share_nothing(corpus: Path) -> None:
    batches = iter(maker(corpus, loader__batch_size=4)(0, 1))
    first = next(batches)
    before = {name: first[name].clone() for name in ("input_ids", "labels")}
    for _ in range(20):
        next(batches)
    assert all(torch.equal(first[name], before[name]) for name in before)
    first["labels"].fill_(-100)
    assert torch.equal(first["input_ids"], before["input_ids"])


def test_iterating_again_goes_on_and_states_share_nothing_with_the_loader(corpus: Path) -> None:
    whole = [batch["input_ids"].tolist() for batch in islice(maker(corpus)(0, 1), 40)]
    loader = maker(corpus)(0, 1)
    seen = [batch["input_ids"].tolist() for batch in islice(loader, 10)]
    state = loader.state_dict()
    kept = json.dumps(state)
    seen += [batch["input_ids"].tolist() for batch in islice(loader, 30)]
    assert seen == whole
    assert json.dumps(state) == kept
    state["lanes"].clear()
    state["history"].clear()
    assert [batch["input_ids"].tolist() for batch in islice(loader, 1)] != whole[:1]
    loader.load_state_dict(json.loads(kept))
    assert [batch["input_ids"].tolist() for batch in islice(loader, 30)] == whole[10:]


def test_a_state_can_be_mutated_after_loading_it(corpus: Path) -> None:
    loader = maker(corpus, lanes=2)(0, 1)
    for _ in islice(loader, 5):
        pass
    state = loader.state_dict()
    expected = [batch["input_ids"].tolist() for batch in islice(loader, 20)]
    loader.load_state_dict(state)
    state["lanes"].clear()
    assert [batch["input_ids"].tolist() for batch in islice(loader, 20)] == expected


def until(error: type[BaseException], loader: fmsdata.StatefulDataLoader) -> Iterator[list[list[int]]]:
    """Batches up to the one that fails."""
    try:
        for batch in loader:
            yield batch["input_ids"].tolist()
    except error:
        return


@pytest.mark.parametrize("prefetch", [0, 3])
@pytest.mark.parametrize("pack", [{}, {"pack__mode": "pad", "pack__pad": 1, "pack__bol": 2, "documents__bos": 4}])
@pytest.mark.parametrize("error", [KeyboardInterrupt, fmsdata.DataError, ValueError])
def test_whatever_interrupts_a_batch_the_loader_stays_where_it_was(
    corpus: Path, error: type[BaseException], pack: dict[str, Any], prefetch: int
) -> None:
    """An error at any depth, in any document: the next batch is the one that failed.

    So it is when the state that was saved then is loaded.
    """
    data = maker(corpus, lanes=4, **pack)(0, 1).data
    calls, fail_at = 0, -1

    def interrupt(item: fmsdata.Item) -> fmsdata.Item:
        nonlocal calls
        calls += 1
        if calls == fail_at:
            raise error("stop")
        return item

    shuffle = data.lines
    lines = shuffle.below
    mapped = copy.copy(lines)
    mapped.below = fmsdata.Map(lines.below, interrupt)
    top = copy.copy(shuffle)
    top.below = mapped

    def loader() -> fmsdata.StatefulDataLoader:
        return fmsdata.StatefulDataLoader(
            fmsdata.Rescalable(top, lanes=4, seed=3), batch_size=3, rank=0, world_size=1, prefetch=prefetch
        )

    uninterrupted = loader()
    expected = [batch["input_ids"].tolist() for batch in islice(uninterrupted, 150)]
    uninterrupted.close()
    for place in range(3, 250, 19):
        calls, fail_at = 0, place
        interrupted = loader()
        seen = list(until(error, interrupted))
        assert len(seen) < 140
        fail_at = -1
        state = interrupted.state_dict()
        restored = loader()
        restored.load_state_dict(state)
        for going_on in (interrupted, restored):
            more = [batch["input_ids"].tolist() for batch in islice(going_on, 8)]
            assert more == expected[len(seen) : len(seen) + 8]
            going_on.close()


def test_sources_of_different_types_share_a_batch(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    big = [rng.integers(100_000, 4_000_000_000, 9) for _ in range(20)]
    write_source(tmp_path / "web", documents(rng, 20, shortest=3), dtype=np.uint8)
    write_source(tmp_path / "wiki", big, dtype=np.uint64, layout="batch")
    write_source(tmp_path / "code", documents(rng, 20, shortest=3), dtype=np.int16)
    sources = {name: {"weight": 1} for name in ("web", "wiki", "code")}
    make = maker(tmp_path, sources=sources, loader__batch_size=8)
    seen = {token for batch in islice(make(0, 1), 40) for token in batch["input_ids"].flatten().tolist()}
    assert {int(token) for document in big for token in document} & seen
    assert min(seen) == 0


def test_rank_and_world_size_come_from_the_environment(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = maker(corpus)(0, 1).data
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    loader = fmsdata.StatefulDataLoader(data, batch_size=1)
    assert (loader.rank, loader.world_size) == (2, 3)
    assert len(next(iter(data)).tokens) == 17
    explicit = fmsdata.StatefulDataLoader(data, batch_size=1, rank=0, world_size=2)
    assert (explicit.rank, explicit.world_size) == (0, 2)
    monkeypatch.delenv("RANK")
    with pytest.raises(fmsdata.ConfigError, match="WORLD_SIZE=3 is in the environment, but RANK is not; set both"):
        fmsdata.StatefulDataLoader(data, batch_size=1)
    monkeypatch.setenv("RANK", "zero")
    with pytest.raises(fmsdata.ConfigError, match="RANK='zero'"):
        fmsdata.StatefulDataLoader(data, batch_size=1)


def test_a_rescalable_is_a_dataset_of_samples(corpus: Path) -> None:
    make = maker(corpus)
    loader = make(0, 1)
    rows = [batch["input_ids"][0].tolist() for batch in islice(loader, 30)]
    items = [item.tokens.tolist() for item in islice(make(0, 1).data, 30)]
    assert [tokens[:-1] for tokens in items] == rows
    assert isinstance(loader.data, torch.utils.data.IterableDataset)


def test_tokens_that_a_stage_keeps_are_never_overwritten(tmp_path: Path) -> None:
    """Memory of lines that were read is used again, if it is large. What a user holds is not."""
    rng = np.random.default_rng(0)
    shards = [rng.integers(1, 1000, 50_000) for _ in range(60)]
    fmsdata.write_shard(tmp_path / "web" / "a.arrow", shards, dtype=np.uint16)
    kept: list[tuple[Any, Any]] = []

    def keep(item: fmsdata.Item) -> fmsdata.Item:
        kept.append((item.tokens, item.tokens.copy()))
        return item

    lines = fmsdata.Map(fmsdata.Pack(fmsdata.ShardReader(tmp_path / "web"), seq_len=700_001), keep)
    data = fmsdata.Rescalable(lines, lanes=2, seed=1)
    loader = fmsdata.StatefulDataLoader(data, batch_size=1, rank=0, world_size=1, prefetch=0)
    batches = [(batch["input_ids"], batch["input_ids"].clone()) for batch in islice(loader, 8)]
    assert all(torch.equal(now, then) for now, then in batches)
    assert len(kept) >= 8
    assert all(np.array_equal(now, then) for now, then in kept)


def test_a_resume_does_as_much_at_any_step(corpus: Path) -> None:
    config = {
        "path": str(corpus),
        "seed": 3,
        "lanes": 12,
        "documents": {"eos": 0},
        "pack": {"seq_len": 16},
        "shuffle": {"window": 4},
        "loader": {"batch_size": 6, "prefetch": 0},
    }

    def calls(state: Any) -> int:
        """The number of calls that Python makes until the next batch."""
        made = 0

        def count(_: Any, event: str, __: Any) -> None:
            nonlocal made
            made += event in ("call", "c_call")

        loader = fmsdata.build_loader(config, rank=0, world_size=1)
        sys.setprofile(count)
        try:
            loader.load_state_dict(state)
            next(loader)
        finally:
            sys.setprofile(None)
        loader.close()
        return made

    loader = fmsdata.build_loader(config, rank=0, world_size=1)
    states = {}
    for step in range(1, 6001):
        next(loader)
        if step in (2000, 6000):
            states[step] = loader.state_dict()
    loader.close()
    calls(states[2000])  # what is made once
    assert calls(states[6000]) < 1.2 * calls(states[2000])
