"""The drop-in for fms-fsdp: over a corpus laid out as there, seen only through what the loader yields.

Every token tells its document. Where a document with its EOS fills a line, a line is a document, and 40 lanes of one
window each hold all of them: so the first epoch is the first 10,240 lines, and the second epoch the next.
"""

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import cycle, islice, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, processors, trainers

import fmsdata
from fmsdata import CheckpointError, ConfigError, DataError, FmsdataError, FmsdataWarning
from fmsdata.compat import fms_fsdp
from fmsdata.compat.fms_fsdp import Loader, causal_lm, get_data_loader, get_dummy_loader, parse_data_args

EOS, FIRST, LENGTH = 0, 100, 16
LANES, EPOCH = 40, 10_240
SECOND = FIRST + EPOCH * LENGTH  # the first token of the nested dataset
NESTED = "lang=en/dataset=wiki"
COPIES = 512  # of a document, where it is alone
ONE = {"logical_shards": 1, "batch_size": 1}  # quick to start, for a few lines
Line = tuple[int, ...]


def write_shard(path: Path, documents: Sequence[Sequence[int]], stream: bool = False) -> tuple[int, int]:
    """One record batch per document, with a primitive column: how corpora are laid out there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    schema = pa.schema([pa.field("tokens", pa.uint32())])
    write: Any = pa.ipc.new_stream if stream else pa.ipc.new_file
    with write(str(path), schema) as writer:
        for document in documents:
            writer.write(pa.record_batch([pa.array(document, pa.uint32())], schema=schema))
    return len(documents), sum(map(len, documents))


def write_corpus(root: Path, shards: dict[str, Sequence[Sequence[int]]]) -> Path:
    rows = ["dataset/filename,documents,tokens"]
    for number, (path, documents) in enumerate(shards.items()):
        count = write_shard(root / path, documents, stream=number % 2 == 1)
        rows.append(f"/{path},{count[0]},{count[1]}")
    (root / "meta").mkdir()
    (root / "meta" / "combined_counts.csv").write_text("\n".join(rows) + "\n")
    return root


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    even = [list(range(FIRST + number * LENGTH, FIRST + (number + 1) * LENGTH)) for number in range(EPOCH)]
    rng = np.random.default_rng(5)
    starts = np.cumsum([SECOND, *rng.integers(2, 60, 500)]).tolist()
    uneven = [list(range(start, stop)) for start, stop in pairwise(starts)]
    return write_corpus(
        tmp_path_factory.mktemp("corpus"),
        {
            "web/part-0.arrow": even[: EPOCH // 2],
            "web/more/part-1.arrow": even[EPOCH // 2 :],
            f"{NESTED}/part-0.arrow": uneven,
        },
    )


def config(corpus: Path, folder: Path) -> SimpleNamespace:
    """A config with the fields that fms-fsdp has, and others that are none of the loader's business."""
    return SimpleNamespace(
        model_variant="7b",
        ckpt_load_path=str(folder / "load"),
        ckpt_save_path=str(folder / "save"),
        use_dummy_dataset=False,
        data_path=str(corpus),
        file_type="arrow",
        col_name="tokens",
        tokenizer_path="/no/such/tokenizer",
        datasets="web",
        weights="1",
        seq_length=LENGTH,
        vocab_size=32000,
        bos_token=None,
        eos_token=EOS,
        bol_token=None,
        eol_token=None,
        strip_tokens="",
        logical_shards=LANES,
        num_workers=0,
        batch_size=32,
        seed=2023,
        resuming_dataset=False,
        checkpoint_interval=1_000_000,
    )


@pytest.fixture
def cfg(corpus: Path, tmp_path: Path) -> SimpleNamespace:
    return config(corpus, tmp_path)


def changed(cfg: SimpleNamespace, **values: Any) -> SimpleNamespace:
    return SimpleNamespace(**{**vars(cfg), **values})


def mixed(cfg: SimpleNamespace, **values: Any) -> SimpleNamespace:
    """Both datasets, on a number of lanes with many divisors."""
    return changed(cfg, datasets=["web", NESTED], weights=[3, 1], logical_shards=12, **values)


def lines_of(batch: tuple[torch.Tensor, torch.Tensor]) -> list[Line]:
    """The lines that became these inputs and labels."""
    return [tuple(line) for line in torch.cat([batch[0], batch[1][:, -1:]], 1).tolist()]


def take(cfg: Any, count: int, world_size: int = 1, state: list[Any] | None = None) -> tuple[list[Line], list[Any]]:
    """The next lines of all ranks together, in the order of the canonical stream, and the states after that."""
    loaders = [get_data_loader(cfg, rank, world_size) for rank in range(world_size)]
    for loader in loaders:
        if state is not None:
            loader.load_state_dict(state)
    steps = count // (world_size * cfg.batch_size)
    ranks = [[lines_of(batch) for batch in islice(loader, steps)] for loader in loaders]
    states = json.loads(json.dumps([loader.state_dict() for loader in loaders]))
    for loader in loaders:
        loader.close()
    return [line for step in zip(*ranks, strict=True) for row in zip(*step, strict=True) for line in row], states


@pytest.fixture(scope="module")
def stream(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Line]:
    """The canonical stream of both datasets."""
    return take(mixed(config(corpus, tmp_path_factory.mktemp("run"))), 1920)[0]


def whole_epoch() -> set[Line]:
    starts = range(FIRST, SECOND, LENGTH)
    return {(*range(start, start + LENGTH), EOS) for start in starts}


# What is yielded


def test_batches_are_input_and_label_of_int32(cfg: SimpleNamespace) -> None:
    batch = next(iter(get_data_loader(cfg, 0, 1)))
    assert isinstance(batch, tuple)
    for part in batch:
        assert part.dtype == torch.int32
        assert part.shape == (32, LENGTH)
        assert part.is_contiguous()
    inputs, labels = batch
    assert (labels[:, 0] == -100).all()
    assert torch.equal(labels[:, 1:-1], inputs[:, 2:])
    assert (labels[:, -1] == EOS).all(), "each document fills a line"


def test_causal_lm_of_a_line_is_what_it_is_there() -> None:
    for line in ([5, 6, 7, 8], torch.tensor([5, 6, 7, 8])):
        inputs, labels = causal_lm(line)
        assert inputs.tolist() == [5, 6, 7]
        assert labels.tolist() == [-100, 7, 8]
        assert inputs.dtype == labels.dtype == torch.int32
        assert causal_lm(line, prompt_len=0)[1].tolist() == [6, 7, 8]
        assert causal_lm(line, 2)[1].tolist() == [-100, -100, 8]


def test_all_lines_at_once_give_the_same_as_line_by_line(cfg: SimpleNamespace) -> None:
    fast, slow = get_data_loader(cfg, 0, 1), get_data_loader(cfg, 0, 1, [causal_lm, lambda pair: pair])
    for one, other in islice(zip(fast, slow, strict=True), 5):
        assert type(one) is type(other) is tuple
        assert all(map(torch.equal, one, other))
        assert [part.dtype for part in one] == [part.dtype for part in other]


def test_without_functions_a_batch_is_the_lines_themselves(cfg: SimpleNamespace) -> None:
    batch = next(iter(get_data_loader(changed(cfg, seq_length=LENGTH + 1), 0, 1, postprocess=[])))
    assert batch.dtype == torch.int32
    assert batch.shape == (32, LENGTH + 1)
    assert {tuple(line) for line in batch.tolist()} <= whole_epoch()


def test_functions_are_applied_in_their_order(cfg: SimpleNamespace) -> None:
    functions: list[Callable[[Any], Any]] = [lambda line: line + 1, lambda line: {"twice": 2 * line, "n": len(line)}]
    batch = next(iter(get_data_loader(changed(cfg, seq_length=LENGTH + 1), 0, 1, functions)))
    assert batch["n"].tolist() == [LENGTH + 1] * 32
    assert {tuple(line) for line in (batch["twice"] // 2 - 1).tolist()} <= whole_epoch()


def test_a_token_that_int32_cannot_hold_is_an_error(cfg: SimpleNamespace, tmp_path: Path) -> None:
    root = write_corpus(tmp_path / "huge", {"web/a.arrow": [[5, 2**31, 6]] * COPIES})
    with pytest.raises(DataError, match="2147483648"):
        next(iter(get_data_loader(changed(cfg, data_path=root, **ONE), 0, 1)))


# Epochs, loaders, workers


def test_every_document_is_seen_exactly_once_in_each_of_two_epochs(cfg: SimpleNamespace) -> None:
    lines, _ = take(cfg, 2 * EPOCH)
    first, second = lines[:EPOCH], lines[EPOCH:]
    assert Counter(first) == Counter(second) == Counter(whole_epoch())
    assert first != second, "each epoch has an order of its own"


@pytest.mark.parametrize("world_size", [2, 40])
def test_any_number_of_loaders_shares_the_same_stream(cfg: SimpleNamespace, world_size: int) -> None:
    cfg.batch_size = 4
    assert take(cfg, 320, world_size)[0] == take(cfg, 320)[0]


def test_two_loaders_see_every_document_exactly_once_together(cfg: SimpleNamespace) -> None:
    assert Counter(take(cfg, EPOCH, world_size=2)[0]) == Counter(whole_epoch())


@pytest.mark.parametrize("num_workers", [1, 2])
def test_the_stream_does_not_depend_on_the_workers(cfg: SimpleNamespace, stream: list[Line], num_workers: int) -> None:
    assert take(mixed(cfg, num_workers=num_workers), 640)[0] == stream[:640]


def test_the_seed_decides_the_order(cfg: SimpleNamespace) -> None:
    assert take(changed(cfg, **ONE), 8)[0] != take(changed(cfg, seed=2024, **ONE), 8)[0]


# Reloading and rescaling


def test_a_reload_in_the_middle_of_an_epoch_goes_on_exactly(cfg: SimpleNamespace, stream: list[Line]) -> None:
    state = None
    for at in range(0, 960, 320):  # again and again: the second reload must work as the first
        some, state = take(mixed(cfg), 320, state=state)
        assert some == stream[at : at + 320]


def test_after_rescaling_from_4_ranks_the_stream_goes_on_as_if_nothing_had_happened(
    cfg: SimpleNamespace, stream: list[Line]
) -> None:
    before, state = take(mixed(cfg), 1152, 4)
    assert before == stream[:1152]
    for world_size in (1, 2, 3, 6, 12):
        assert take(mixed(cfg), 768, world_size, state)[0] == stream[1152:1920]


def test_nothing_is_lost_or_repeated_over_a_chain_of_world_sizes_that_divide_nothing(cfg: SimpleNamespace) -> None:
    cfg.batch_size = 1
    seen: list[Line] = []
    state = None
    for world_size, count in ((4, 2000), (3, 1500), (7, 2100), (1, 4640)):
        some, state = take(cfg, count, world_size, state)
        seen += some
    assert len(seen) == EPOCH
    assert Counter(seen) == Counter(whole_epoch())


def test_other_weights_and_fewer_datasets_on_resume_repeat_nothing(cfg: SimpleNamespace) -> None:
    """Every token of this corpus is another, so none may come twice; the other dataset is too small for that."""
    seen: Counter[int] = Counter()
    state = None
    for weights in ({"web": 3, NESTED: 1}, {"web": 1, NESTED: 1}, {NESTED: 1}, {NESTED: 1, "web": 9}):
        told = changed(mixed(cfg), datasets=list(weights), weights=list(weights.values()))
        some, state = take(told, 320, state=state)
        seen.update(one for line in some for one in line[:-1])
    web = [count for one, count in seen.items() if FIRST <= one < SECOND]
    assert len(web) > 600 * LENGTH
    assert set(web) == {1}


# Delimiters and chunks


def strip_and_delimit(document: list[int], strip: set[int], bos: int | None, eos: int) -> list[int]:
    while document and document[0] in strip:
        document = document[1:]
    while document and document[-1] in strip:
        document = document[:-1]
    return [*([] if bos is None else [bos]), *document, eos]


def cut(tokens: Iterator[int], length: int, bol: int | None, eol: int | None) -> Iterator[Line]:
    """Lines of an endless run of tokens, in the plainest way."""
    held: list[int] = []
    while True:
        held += islice(tokens, length)
        line = [bol] if bol is not None and held[0] != bol else []
        line += held[: length - len(line)]
        used = len(line) - (line[0] == bol != held[0])
        if eol is not None and line[-1] != eol:
            line[-1], used = eol, used - 1
        held = held[used:]
        yield tuple(line)


specials = st.one_of(st.none(), st.integers(0, 5))


@settings(max_examples=8, deadline=None)
@given(
    head=st.lists(st.integers(0, 9), max_size=3),
    body=st.lists(st.integers(0, 40), max_size=30),
    seq_length=st.integers(3, 20),
    tokens=st.tuples(specials, st.integers(0, 5), specials, specials),
    strip=st.sets(st.integers(0, 9), max_size=2),
)
def test_lines_are_cut_of_delimited_documents(
    tmp_path_factory: pytest.TempPathFactory,
    head: list[int],
    body: list[int],
    seq_length: int,
    tokens: tuple[int | None, int, int | None, int | None],
    strip: set[int],
) -> None:
    root = tmp_path_factory.mktemp("one")
    document = [*head, 77, *body, 88, *head]
    bos, eos, bol, eol = tokens
    config = SimpleNamespace(
        data_path=write_corpus(root, {"web/a.arrow": [document] * COPIES}),
        datasets="web",
        weights=1,
        seq_length=seq_length,
        bos_token=bos,
        eos_token=eos,
        bol_token=bol,
        eol_token=eol,
        strip_tokens=", ".join(map(str, strip)),
        logical_shards=1,
        num_workers=0,
        batch_size=1000,
        ckpt_save_path=root / "save",
    )
    unwanted = strip | {one for one in tokens if one is not None}
    run = cycle(strip_and_delimit(document, unwanted, bos, eos))
    expected = islice(cut(run, seq_length + 1, bol, eol), 10_000)  # one window
    assert Counter(take(config, 10_000)[0]) == Counter(expected)


@pytest.mark.parametrize(
    ("stored", "special", "line"),
    [
        ([7, 8, 9], {}, [7, 8, 9, 0]),
        ([7, 8, 9, 0], {}, [7, 8, 9, 0]),
        ([7, 8, 9], {"bos_token": 1}, [1, 7, 8, 9, 0]),
        ([1, 7, 8, 9, 0], {"bos_token": 1}, [1, 7, 8, 9, 0]),
        ([50, 7, 8, 9, 51], {"strip_tokens": "50, 51"}, [7, 8, 9, 0]),
        ([50, 7, 8, 9, 51], {"strip_tokens": [50]}, [7, 8, 9, 51, 0]),
        ([7, 8, 9], {"bol_token": 2}, [2, 7, 8, 9, 0]),
        ([7, 8, 9], {"bol_token": 2, "eol_token": 3}, [2, 7, 8, 9, 0, 3]),
        ([7, 8, 9], {"bos_token": 1, "bol_token": 1}, [1, 7, 8, 9, 0]),
        ([7, 8, 9], {"eol_token": 0}, [7, 8, 9, 0]),
    ],
)
def test_a_document_that_fits_a_line_has_its_delimiters(
    cfg: SimpleNamespace, tmp_path: Path, stored: list[int], special: dict[str, Any], line: list[int]
) -> None:
    root = write_corpus(tmp_path / "one", {"web/a.arrow": [stored] * COPIES})
    lines, _ = take(changed(cfg, data_path=root, seq_length=len(line) - 1, **special, **ONE), 8)
    assert set(lines) == {tuple(line)}


@pytest.mark.parametrize(("bos", "kept"), [(None, {(5, 6)}), (1, {(5, 6), (7,)})])
def test_empty_documents_and_those_below_three_tokens_with_delimiters_are_skipped(
    cfg: SimpleNamespace, tmp_path: Path, bos: int | None, kept: set[Line]
) -> None:
    root = write_corpus(tmp_path / "short", {"web/a.arrow": [[5, 6], [], [7], [0], [9, 9]] * COPIES})
    lines, _ = take(changed(cfg, data_path=root, strip_tokens=9, bos_token=bos, seq_length=30, **ONE), 8)
    documents = {tuple(map(int, text.split())) for line in lines for text in inner(line, bos)}
    assert documents == kept


def inner(line: Line, bos: int | None) -> list[str]:
    """The whole documents in a line, as text."""
    return [part.removeprefix(f"{bos} ") for part in " ".join(map(str, line)).split(" 0 ")[1:-1]]


def test_documents_run_on_over_lines_and_stay_whole_inside_them(cfg: SimpleNamespace) -> None:
    lines, _ = take(mixed(cfg, seq_length=50, batch_size=100), 6000)
    lengths = set()
    for line in lines:
        parts = " ".join(map(str, line)).split(" 0 ")
        for part in parts:
            tokens = [int(one) for one in part.split() if one != "0"]
            assert tokens == list(range(tokens[0], tokens[0] + len(tokens))) if tokens else True
        for part in parts[1:-1]:
            tokens = list(map(int, part.split()))
            if tokens[0] < SECOND:
                assert (tokens[0] - FIRST) % LENGTH == 0
                assert len(tokens) == LENGTH
            else:
                lengths.add((tokens[0], len(tokens)))
    assert len(lengths) == len({start for start, _ in lengths}) > 300, "a document is as long each time"


# Datasets and weights


@pytest.mark.parametrize(("weights", "share"), [([1, 1], 0.5), ("1,19", 0.05)])
def test_each_dataset_gets_its_share_of_the_tokens(cfg: SimpleNamespace, weights: Any, share: float) -> None:
    lines, _ = take(changed(mixed(cfg), weights=weights, batch_size=100), 6000)
    for some in (lines[:1200], lines):
        tokens = np.array(some)
        web = ((tokens >= FIRST) & (tokens < SECOND)).sum() / (tokens != EOS).sum()
        assert web == pytest.approx(share, abs=0.02)


def test_datasets_and_weights_may_be_strings_with_commas_or_lists(cfg: SimpleNamespace, stream: list[Line]) -> None:
    for datasets, weights in ((f"web, {NESTED}", "3,1"), (("web/", NESTED), ("3", 1.0)), ([NESTED, "web"], [10, 30])):
        assert take(changed(mixed(cfg), datasets=datasets, weights=weights), 64)[0] == stream[:64]
    assert parse_data_args("a, b/c", "1, 2.5") == (["a", "b/c"], [1.0, 2.5])
    assert parse_data_args(["a"], 3) == (["a"], [3.0])


def test_counts_at_the_root_are_believed_and_checked(cfg: SimpleNamespace, tmp_path: Path) -> None:
    root = write_corpus(tmp_path / "wrong", {f"{NESTED}/a.arrow": [[5, 6, 7]] * 4})
    counts = root / "meta" / "combined_counts.csv"
    counts.write_text(counts.read_text().replace(",4,", ",3,"))
    with pytest.raises(FmsdataError, match="counts say 3 documents"):
        next(iter(get_data_loader(changed(cfg, data_path=root, datasets=NESTED), 0, 1)))


# Configs


def test_what_a_config_does_not_tell_is_as_it_is_there(corpus: Path, tmp_path: Path) -> None:
    told = SimpleNamespace(data_path=corpus, datasets=["web"], weights=[1], ckpt_save_path=tmp_path)
    loader = get_data_loader(told, 0, 1)
    assert (loader.batch_size, loader.num_workers, loader.data.lanes, loader.data.seed) == (2, 1, 1024, 2023)
    shuffle = loader.data.lines
    assert isinstance(shuffle, fmsdata.Shuffle)
    assert isinstance(shuffle.below, fmsdata.Pack)
    assert (shuffle.window, shuffle.below.seq_len) == (256, 4097)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"datasets": "web,wiki"}, "datasets has 2 names and weights has 1"),
        ({"datasets": "wep"}, "dataset 'wep': there is no folder"),
        ({"datasets": "web,", "weights": "1,1"}, "a name is empty"),
        ({"datasets": "web,web/", "weights": "1,1"}, "'web' is there twice"),
        ({"datasets": None}, "datasets is None"),
        ({"weights": "abc"}, "weights is 'abc'"),
        ({"weights": "-1"}, "it must be a number from 0 to"),
        ({"weights": "nan"}, "it must be a number from 0 to"),
        ({"weights": {"web": 1}}, "weights is {'web': 1}"),
        ({"logical_shards": 3}, "logical_shards is 3, less than the world size 4"),
        ({"logical_shards": "many"}, "logical_shards is 'many'"),
        ({"seq_length": 0}, "seq_length is 0"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"checkpoint_interval": 0}, "checkpoint_interval is 0"),
        ({"strip_tokens": "0,x"}, "strip_tokens is '0,x'"),
        ({"strip_tokens": [0.5]}, "strip_tokens is 0.5"),
        ({"bos_token": "x"}, "bos_token is 'x'"),
        ({"eos_token": -1}, "eos_token is -1"),
        ({"file_type": "hf_parquet"}, "file_type is 'hf_parquet', but the folder has more/part-1.arrow"),
        ({"file_type": "csv"}, "file_type is 'csv'; it must be 'arrow' or 'hf_parquet' or 'auto'"),
        ({"col_name": ["tokens", 3]}, "col_name is"),
        ({"col_name": "text, "}, "col_name is"),
        ({"col_name": "text,ids"}, "none of the columns text, ids .col_name. fits: .*no column 'ids'"),
        ({"data_path": ""}, "data_path is ''"),
        ({"ckpt_save_path": None}, "ckpt_save_path is None"),
        ({"ckpt_load_path": None, "resuming_dataset": True}, "ckpt_load_path is None"),
    ],
)
def test_a_wrong_value_is_named(cfg: SimpleNamespace, wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        get_data_loader(changed(cfg, **wrong), 0, 4)


@pytest.mark.parametrize("name", ["data_path", "datasets", "weights", "ckpt_save_path"])
def test_what_has_no_default_must_be_told(cfg: SimpleNamespace, name: str) -> None:
    delattr(cfg, name)
    with pytest.raises(ConfigError, match=f"{name} is None; the config must have"):
        get_data_loader(cfg, 0, 1)


@pytest.mark.parametrize("postprocess", [causal_lm, ["causal_lm"], "causal_lm", None])
def test_postprocess_must_be_a_list_of_functions(cfg: SimpleNamespace, postprocess: Any) -> None:
    with pytest.raises(ConfigError, match="postprocess is"):
        get_data_loader(cfg, 0, 1, postprocess)


def test_several_columns_are_tried_in_order(cfg: SimpleNamespace) -> None:
    lines = take(changed(cfg, **ONE), 8)[0]
    for columns in ("ids,tokens", ["text", "contents", "tokens"]):
        assert take(changed(cfg, col_name=columns, **ONE), 8)[0] == lines
    for columns in ("text", "tokens", "text,tokens"):
        assert take(changed(cfg, file_type="auto", col_name=columns, **ONE), 8)[0] == lines


def test_a_run_that_was_saved_with_auto_resumes(cfg: SimpleNamespace) -> None:
    lines, states = take(changed(cfg, file_type="auto", **ONE), 8)
    assert '"column": null' in states[0]["pipeline"]
    assert (
        lines[4:]
        == take(
            changed(cfg, file_type="auto", col_name="text", **ONE),
            4,
            state=take(changed(cfg, file_type="auto", **ONE), 4)[1],
        )[0]
    )


WORDS = ["the", "cat", "sat", "on", "mat", "and", "dog", "lay", "by", "sun", "until", "noon"]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of Parquet files of text, one of tokens, and a tokenizer."""
    root = tmp_path_factory.mktemp("texts")
    rng = np.random.default_rng(2)
    some = [" ".join(rng.choice(WORDS, rng.integers(1, 9))) + f" {number}" for number in range(90)]
    for name in ("text", "tokens", "both", "lines"):
        (root / name / "train").mkdir(parents=True)
    (root / "lines" / "0.jsonl").write_text('{"text": "a"}\n')
    for number in range(3):
        table = pa.table({"id": range(30), "content": some[number::3]})
        pq.write_table(table, root / "text" / "train" / f"{number}.parquet", row_group_size=8)
    pq.write_table(table, root / "both" / "0.parquet")
    write_shard(root / "both" / "0.arrow", [[5, 6, 7]])
    tokens = pa.array([[1000 + n, 2000 + n, 3000 + n] for n in range(40)], pa.list_(pa.int32()))
    pq.write_table(pa.table({"input_ids": tokens}), root / "tokens" / "0.parquet")
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer: Any = trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(some, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(root / "tokenizer.json"))
    return root


@pytest.fixture
def of_text(cfg: SimpleNamespace, texts: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.setattr(fms_fsdp, "SHUFFLED", 16)
    monkeypatch.setattr(fms_fsdp, "WINDOW", 8)
    path = str(texts / "tokenizer.json")
    cfg = changed(cfg, data_path=str(texts), datasets="text", tokenizer_path=path, col_name="text,content,contents")
    return changed(cfg, eos_token=1, strip_tokens="0", logical_shards=2, batch_size=4, num_workers=0)


@pytest.mark.parametrize("file_type", ["hf_parquet", "auto"])
def test_text_in_parquet_is_tokenized_and_comes_whole(of_text: SimpleNamespace, texts: Path, file_type: str) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(texts / "tokenizer.json"))
    stored = [
        text
        for path in sorted((texts / "text").rglob("*.parquet"))
        for text in pq.read_table(path)["content"].to_pylist()
    ]
    expected = {tuple(tokenizer.encode(text, add_special_tokens=False).ids) for text in stored}
    with closing(get_data_loader(changed(of_text, file_type=file_type, seq_length=500), 0, 1)) as loader:
        # Lines of a lane are shuffled, but a document that is within a line is whole.
        seen = [
            tokens
            for lines in (lines_of(batch) for batch in islice(loader, 6))
            for line in lines
            for tokens in whole_documents(line)
        ]
    assert set(seen) == expected


def whole_documents(line: Line) -> Iterator[tuple[int, ...]]:
    """The documents of a line between its first and its last EOS."""
    ends = [place for place, token in enumerate(line) if token == 1]
    return (line[start + 1 : stop] for start, stop in pairwise(ends))


def test_tokens_in_parquet_need_no_tokenizer(of_text: SimpleNamespace) -> None:
    cfg = changed(of_text, datasets="tokens", tokenizer_path=None, col_name="text,input_ids", file_type="auto")
    lines, _ = take(cfg, 32)
    assert {token - token % 1000 for line in lines for token in line if token != 1} == {1000, 2000, 3000}


def test_text_resumes_exactly_at_another_world_size(of_text: SimpleNamespace) -> None:
    cfg = changed(of_text, file_type="auto", datasets="text,tokens", weights="3,1", col_name="text,content,input_ids")
    lines, _ = take(cfg, 64)
    first, states = take(cfg, 32, world_size=2)
    assert first + take(cfg, 32, state=states)[0] == lines


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"tokenizer_path": None}, "dataset 'text' holds text, and tokenizer_path is None"),
        ({"tokenizer_path": "/no/such/file"}, "there is no such file"),
        ({"col_name": "text,words"}, "none of the columns text, words .col_name. fits: .*the column content"),
        ({"col_name": "text"}, "none of the columns text .col_name. fits: .*the column content"),
        ({"datasets": "both", "file_type": "auto"}, "it has 0.arrow and 0.parquet"),
        ({"file_type": "arrow"}, "file_type is 'arrow', but the folder has train/0.parquet"),
        ({"datasets": "lines"}, "it has 0.jsonl, but no .arrow or .parquet files"),
    ],
)
def test_what_is_wrong_with_text_is_named(of_text: SimpleNamespace, wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        get_data_loader(changed(of_text, **{"file_type": "hf_parquet", **wrong}), 0, 1)


def test_each_kind_is_read_where_both_are(of_text: SimpleNamespace) -> None:
    arrow = changed(of_text, datasets="both", file_type="arrow", col_name="tokens", batch_size=1)
    assert {token for line in take(arrow, 4)[0] for token in line} == {1, 5, 6, 7}
    parquet = changed(of_text, datasets="both", file_type="hf_parquet", batch_size=1)
    assert not {token for line in take(parquet, 4)[0] for token in line} & {5, 6, 7}


def test_another_column_can_hold_the_tokens(cfg: SimpleNamespace) -> None:
    with pytest.raises(DataError, match="no column 'ids'"):
        next(iter(get_data_loader(changed(cfg, col_name="ids"), 0, 1)))


def test_the_dummy_loader_counts() -> None:
    told = SimpleNamespace(seq_length=4, vocab_size=10, batch_size=3)
    loader = get_dummy_loader(told, 0, 1)
    again = get_data_loader(changed(told, use_dummy_dataset=True), 0, 1)
    assert torch.equal(next(iter(again))[0], next(iter(get_dummy_loader(told, 0, 1)))[0])
    rows = []
    for inputs, labels in islice(loader, 2):
        assert inputs.dtype == torch.int32
        assert inputs.shape == (3, 4)
        assert torch.equal(inputs, labels)
        rows += inputs.flatten().tolist()
    assert rows == [number % 10 for number in range(24)]
    with pytest.raises(ConfigError, match="vocab_size is 0"):
        get_dummy_loader(changed(told, vocab_size=0), 0, 1)


# Checkpoints


TRAINER = """
import json, os, sys
from types import SimpleNamespace
from fmsdata.compat.fms_fsdp import get_data_loader

cfg = SimpleNamespace(**json.loads(sys.argv[1]))
world_size, start, steps = map(int, sys.argv[2:])
ranks = [iter(get_data_loader(cfg, rank, world_size)) for rank in range(world_size)]
for step in range(start + 1, start + steps + 1):
    batches = [next(rank) for rank in ranks]
    print(json.dumps([[part.tolist() for part in batch] for batch in batches]), flush=True)
    if step % cfg.checkpoint_interval == 0:  # as the trainer saves its model
        folder = os.path.join(cfg.ckpt_save_path, "checkpoints", f"step_{step}_ckp")
        os.makedirs(folder)
        open(os.path.join(folder, "metadata.pth"), "w").close()
os._exit(9)
"""


def train(cfg: SimpleNamespace, world_size: int, start: int, steps: int) -> list[Line]:
    """Train in a process that ends without a goodbye; the lines that it saw, in the order of the stream."""
    told = json.dumps(vars(cfg))
    command = [sys.executable, "-W", "error", "-c", TRAINER, told, str(world_size), str(start), str(steps)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 9, done.stderr
    lines = []
    for step in map(json.loads, done.stdout.splitlines()):
        ranks = [lines_of((torch.tensor(inputs), torch.tensor(labels))) for inputs, labels in step]
        lines += [line for row in zip(*ranks, strict=True) for line in row]
    return lines


def test_a_killed_run_goes_on_from_its_own_checkpoint_in_another_process(
    cfg: SimpleNamespace, stream: list[Line]
) -> None:
    cfg = mixed(cfg, checkpoint_interval=12, batch_size=4)
    assert train(cfg, world_size=2, start=0, steps=27) == stream[: 27 * 8]
    assert train(cfg, world_size=3, start=24, steps=13) == stream[24 * 8 : 24 * 8 + 13 * 12]
    saved = Path(cfg.ckpt_save_path)
    assert sorted(path.name for path in saved.iterdir()) == ["checkpoints", "fmsdata-loader"]
    names = sorted(path.name for path in (saved / "fmsdata-loader").iterdir())
    assert names == ["in-use.json", "step-12", "step-24", "step-36"], "the killed run left its lease"
    assert sorted(path.name for path in (saved / "checkpoints").iterdir()) == [
        "step_12_ckp",
        "step_24_ckp",
        "step_36_ckp",
    ], "nothing of ours is where the trainer looks for its newest model"


def run(cfg: Any, steps: int) -> tuple[list[Line], Loader]:
    """Train for some steps, and ask for one batch more, so that the last step is done."""
    loader = get_data_loader(cfg, 0, 1)
    batches = list(islice(loader, steps + 1))[:steps]
    loader.close()
    return [line for batch in batches for line in lines_of(batch)], loader


def model(path: str, step: int, *files: str) -> Path:
    folder = Path(path) / "checkpoints" / f"step_{step}_ckp"
    folder.mkdir(parents=True)
    for file in files or ("metadata.pth",):
        (folder / file).write_bytes(b"")
    return folder


def test_a_run_resumes_from_the_load_path_and_saves_to_the_save_path_in_its_own_steps(cfg: SimpleNamespace) -> None:
    cfg = changed(cfg, **ONE)
    lines, _ = take(cfg, 50)
    run(changed(cfg, ckpt_save_path=cfg.ckpt_load_path, checkpoint_interval=15), 15)
    new = changed(cfg, resuming_dataset=True, checkpoint_interval=10)
    assert run(new, 3)[0] == lines[15:18], "from the other run's step 15"
    assert run(new, 12)[0] == lines[15:27], "again, for nothing was saved yet"
    assert run(new, 5)[0] == lines[25:30], "from its own step 10, although the load path is still set"
    assert [path.name for path in (Path(cfg.ckpt_save_path) / "fmsdata-loader").iterdir()] == ["step-10"]
    assert [path.name for path in (Path(cfg.ckpt_load_path) / "fmsdata-loader").iterdir()] == ["step-15"]


def test_without_resuming_dataset_the_load_path_does_not_matter(cfg: SimpleNamespace) -> None:
    cfg = changed(cfg, **ONE)
    lines, _ = run(changed(cfg, ckpt_save_path=cfg.ckpt_load_path, checkpoint_interval=5), 5)
    assert run(cfg, 3)[0] == lines[:3], "from the beginning"


def test_nothing_to_resume_from_is_an_error(cfg: SimpleNamespace) -> None:
    cfg.resuming_dataset = True
    with pytest.raises(CheckpointError, match="has no checkpoint to resume from"):
        get_data_loader(cfg, 0, 1)
    get_data_loader(changed(cfg, ckpt_load_path=f"{cfg.ckpt_save_path}/"), 0, 1)  # the first start of such a run


@pytest.mark.parametrize("resuming", [False, True])
def test_states_of_the_other_loader_are_refused(cfg: SimpleNamespace, resuming: bool) -> None:
    cfg.resuming_dataset = resuming
    path = cfg.ckpt_load_path if resuming else cfg.ckpt_save_path
    folder = model(path, 20, "metadata.pth", "loader_state_0.pth", "loader_state_1.pth")
    model(path, 3, "metadata.pth", "loader_state_0.pth")
    with pytest.raises(CheckpointError, match=r"step_20_ckp/loader_state_\d\.pth is a state of fms-fsdp's own loader"):
        get_data_loader(cfg, 0, 1)
    for file in folder.glob("loader_state_*.pth"):
        file.unlink()
    if resuming:
        with pytest.raises(CheckpointError, match="has no checkpoint to resume from"):
            get_data_loader(cfg, 0, 1)


def test_a_run_that_moves_over_counts_on_from_the_step_of_its_model(cfg: SimpleNamespace) -> None:
    cfg = changed(cfg, checkpoint_interval=10, **ONE)
    lines, _ = take(changed(cfg, ckpt_save_path=f"{cfg.ckpt_save_path}-fresh"), 20)
    model(cfg.ckpt_save_path, 20)
    model(cfg.ckpt_save_path, 30, "__0_0.distcp")  # was cut short
    with pytest.warns(FmsdataWarning, match="starts from the beginning, although .* a model of step 20"):
        assert run(cfg, 10)[0] == lines[:10]
    (Path(cfg.ckpt_save_path) / "checkpoints" / "step_30_ckp" / "metadata.pth").write_bytes(b"")
    assert run(cfg, 10)[0] == lines[10:], "loader and model are both at step 30, and there is nothing to warn of"


def test_a_model_of_another_step_than_the_loader_is_told(cfg: SimpleNamespace) -> None:
    cfg = changed(cfg, checkpoint_interval=10, logical_shards=2, batch_size=1)
    run(cfg, 10)
    model(cfg.ckpt_save_path, 20)
    with pytest.warns(FmsdataWarning, match="resumes from step 10 .* is of step 20"):
        get_data_loader(cfg, 0, 2)
    get_data_loader(cfg, 1, 2)  # one rank tells it


def test_the_calls_of_the_checkpointer_save_the_loader_beside_the_model(cfg: SimpleNamespace, tmp_path: Path) -> None:
    cfg = changed(cfg, **ONE)
    loader = get_data_loader(cfg, 0, 1)
    batches = iter(loader)
    for _ in range(7):
        next(batches)
    folder = model(cfg.ckpt_save_path, 7)
    loader.dataset.save_to_path(str(folder))
    assert [path.name for path in folder.iterdir()] == ["metadata.pth"]
    ahead = next(batches)
    loader.close()
    again = get_data_loader(cfg, 0, 1)
    again.dataset.load_from_path(str(folder.parent))
    assert all(map(torch.equal, next(iter(again)), ahead))


# The page for those who move over


PAGE = (Path(__file__).parents[2] / "docs" / "moving-from-fms-fsdp.md").read_text()


def test_the_page_tells_of_every_field(cfg: SimpleNamespace) -> None:
    told = {name for row in PAGE.splitlines() if row.startswith("| `") for name in re.findall("`([a-z_]+)`", row)}
    assert vars(cfg).keys() - {"model_variant"} <= told


def test_a_run_can_change_over_to_the_yaml_of_the_page(cfg: SimpleNamespace, stream: list[Line]) -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    cfg = mixed(cfg, checkpoint_interval=3)
    run(cfg, 3)
    overrides = {
        "path": cfg.data_path,
        "pack.seq_len": LENGTH,
        "shuffle.window": 834,
        "lanes": 12,
        "loader.batch_size": 32,
        "checkpoint.path": f"{cfg.ckpt_save_path}/fmsdata-loader",
    }
    loader = fmsdata.build_loader(yaml.safe_load(text), overrides, rank=0, world_size=1)
    batch = next(iter(loader))
    assert lines_of((batch["input_ids"], batch["labels"])) == stream[96:128]
    assert (batch["labels"][:, 0] == -100).all()
    loader.close()
