"""The drop-in for nanochat: over parquet files laid out as there, with tokenizers shaped as there.

No text has the BOS, so a row is a list of segments, each a document or a piece of a long one.
"""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiktoken
import tokenizers
import torch
import zstandard
from tokenizers import decoders, models, pre_tokenizers, trainers

import fmsdata
from fmsdata import ConfigError, DataError, StateError, testing
from fmsdata.compat import nanochat
from fmsdata.compat.nanochat import GATHER_EVERY, IGNORED, WINDOW
from fmsdata.corpus.tokenizer import open_tokenizer
from tests.programs import nanochat_ranks

without_state = nanochat.tokenizing_distributed_data_loader_bos_bestfit
with_state = nanochat.tokenizing_distributed_data_loader_with_state_bos_bestfit

BOS = "<|bos|>"
LONG = 150  # words
B, T, LANES = 2, 48, 6


def texts_of(file: int) -> list[str]:
    """Documents of one file, some of them longer than a row, one empty, one null, one that spells the BOS."""
    rng = np.random.default_rng(file)
    lengths = [*rng.integers(1, 12, 60), LONG, *rng.integers(1, 30, 20)]
    texts = [" ".join(f"{file}{word:x}" for word in rng.integers(0, 4000, length)) for length in lengths]
    return ["", f"the {BOS} token of {file}", *texts]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The base folder of nanochat, with four files of text."""
    base = tmp_path_factory.mktemp("nanochat")
    data = base / "base_data_climbmix"
    data.mkdir()
    for file in range(4):
        table = pa.table({"url": list(range(84)), "text": pa.array([*texts_of(file), None], pa.string())})
        pq.write_table(table, data / f"shard_{file:05d}.parquet", row_group_size=20)
    (data / "shard_00004.parquet.tmp").write_bytes(b"half of a download")
    return base


@pytest.fixture(autouse=True)
def base(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(folder))


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nanochat, "WINDOW", 8)


class Encodes:
    """A tokenizer as nanochat has them: one text or many, with options."""

    bos = 256

    def get_bos_token_id(self) -> int:
        return self.bos

    def get_vocab_size(self) -> int:
        return 257

    def encode(self, text: Any, prepend: int | None = None, append: int | None = None, num_threads: int = 8) -> Any:
        assert append is None
        assert num_threads > 0
        if isinstance(text, str):
            return ([] if prepend is None else [prepend]) + list(text.encode())
        return [self.encode(one, prepend) for one in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(BOS if token == self.bos else bytes([token]).decode("latin-1") for token in ids)


class WrapsTiktoken(Encodes):
    bos = 300

    def __init__(self, merges: Sequence[bytes] = (b"th", b"the")) -> None:
        ranks = {bytes([i]): i for i in range(256)} | {merge: 256 + i for i, merge in enumerate(merges)}
        self.enc = tiktoken.Encoding("tiny", pat_str=r"\w+|\W+", mergeable_ranks=ranks, special_tokens={BOS: self.bos})

    def get_vocab_size(self) -> int:
        return int(self.enc.n_vocab)


class WrapsTokenizers(Encodes):
    bos = 0

    def __init__(self) -> None:
        self.tokenizer = tokenizers.Tokenizer(models.BPE())
        self.tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self.tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer: Any = trainers.BpeTrainer(vocab_size=300, special_tokens=[BOS], initial_alphabet=alphabet)
        self.tokenizer.train_from_iterator(texts_of(0), trainer)


TOKENIZERS = [Encodes, WrapsTiktoken, WrapsTokenizers]
train = partial(with_state, B=B, T=T, split="train", device="cpu", lanes=LANES)


def rows_of(batch: Any) -> list[list[int]]:
    """The whole rows of a batch: T + 1 tokens, without the padding."""
    inputs, targets = batch[:2]
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.shape == targets.shape == (B, T)
    rows = []
    for row, target in zip(inputs.tolist(), targets.tolist(), strict=True):
        used = T - target.count(IGNORED)
        assert target == row[1 : used + 1] + target[used - 1 : used] * (used == T) + [IGNORED] * (T - used)
        rows.append(row[: used + 1] if used < T else [*row, target[-1]])
    return rows


def taken(loader: Any, batches: int) -> list[list[int]]:
    with closing(loader):
        return list(chain.from_iterable(rows_of(batch) for batch in islice(loader, batches)))


def segments(row: Sequence[int], bos: int) -> Iterator[tuple[int, ...]]:
    starts = [place for place, token in enumerate(row) if token == bos]
    assert starts[0] == 0, "a row does not begin with BOS"
    for start, stop in zip(starts, [*starts[1:], len(row)], strict=True):
        assert stop - start > 1, "a BOS stands alone"
        yield tuple(row[start + 1 : stop])


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_rows_begin_with_bos_and_documents_that_fit_come_whole(kind: type[Encodes]) -> None:
    tokenizer = kind()
    library = open_tokenizer(getattr(tokenizer, "enc", None) or getattr(tokenizer, "tokenizer", "bytes"))
    ids, ends = library.encode([text for file in range(3) for text in texts_of(file) if text])
    documents = Counter(tuple(document.tolist()) for document in np.split(ids, ends[1:-1]))
    rows = taken(train(tokenizer), 400)
    seen = Counter(segment for row in rows for segment in segments(row, tokenizer.bos))
    whole = Counter({document: count for document, count in documents.items() if len(document) <= T})
    assert whole.keys() <= seen.keys()
    parts = {part for document in documents if len(document) > T for part in pieces(document)}
    assert seen.keys() <= whole.keys() | parts
    assert parts <= seen.keys()


def pieces(document: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """A long document in pieces of T tokens. The last is never a single token."""
    cuts = list(range(0, len(document), T))
    if len(document) % T == 1:
        cuts[-1] -= 1
    return (document[start:stop] for start, stop in zip(cuts, [*cuts[1:], len(document)], strict=True))


def test_nothing_is_thrown_away_over_stops_and_world_sizes() -> None:
    tokenizer = Encodes()
    with closing(train(tokenizer)) as batches:
        data = batches.loader.data
    stored = {
        ("train", f"shard_{file:05d}.parquet", number): np.array(tokenizer.encode(text))
        for file in range(3)
        for number, text in enumerate(texts_of(file))
        if text
    }

    def make(rank: int, world_size: int) -> fmsdata.StatefulDataLoader:
        outputs = ["provenance", "epochs"]
        return fmsdata.StatefulDataLoader(data, batch_size=1, outputs=outputs, rank=rank, world_size=world_size)

    testing.check_exactly_once(make, stored=stored, world_sizes=[1, 4, 6, 5], epochs=2, most_samples=5000)


def test_the_stream_is_the_same_at_any_world_size_and_by_either_names(folder: Path) -> None:
    alone = taken(train(Encodes()), 30)
    files = sorted((folder / "base_data_climbmix").glob("*.parquet"))
    for world_size in (2, 3):
        ranks = [
            taken(
                without_state(
                    data_shards=files,
                    split="train",
                    batch_size=B,
                    sequence_len=T,
                    tokenizer=Encodes(),
                    world_size=world_size,
                    rank=rank,
                    lanes=LANES,
                ),
                30 // world_size,
            )
            for rank in range(world_size)
        ]
        assert list(chain.from_iterable(zip(*ranks, strict=True))) == alone


def test_batches_have_their_parts_by_name_too() -> None:
    with closing(train(Encodes())) as loader:
        batch = next(loader)
        assert batch["input_ids"] is batch[0]
        assert batch["targets"] is batch[1]
        assert batch["state"] is batch[-1]


def test_resumed_after_any_batch_it_continues_the_same() -> None:
    with closing(train(Encodes())) as loader:
        states = [json.loads(json.dumps(batch[2])) for batch in islice(loader, 12)]
    rows = taken(train(Encodes()), 15)
    for step, state in enumerate(states, 1):
        assert taken(train(Encodes(), resume_state_dict=state), 3) == rows[step * B : (step + 3) * B]
    assert {type(state[name]) for state in states for name in ("epoch", "pq_idx", "rg_idx")} == {int}
    assert states[0]["epoch"] == 1


def test_a_batch_that_the_trainer_holds_when_it_saves_comes_again() -> None:
    rows = taken(train(Encodes()), 9)
    with closing(train(Encodes(), pending=1)) as loader:
        states = [state for _, _, state in islice(loader, 6)]
    for step, state in enumerate(states):
        assert taken(train(Encodes(), state=state, pending=1), 3) == rows[step * B : (step + 3) * B]


def test_states_of_all_ranks_resume_at_another_world_size() -> None:
    rows = taken(train(Encodes()), 12)
    states = []
    for rank in range(2):
        with closing(train(Encodes(), rank=rank, world_size=2)) as loader:
            states.append([state for _, _, state in islice(loader, 3)][-1])
    assert taken(train(Encodes(), state=states), 6) == rows[6 * B :]
    ranks = [taken(train(Encodes(), state=states, rank=rank, world_size=3), 2) for rank in range(3)]
    assert list(chain.from_iterable(zip(*ranks, strict=True))) == rows[6 * B :]
    with pytest.raises(StateError, match="no state for lane"):
        train(Encodes(), state=states[0], rank=0, world_size=1)


def test_the_state_of_one_rank_is_enough_in_a_distributed_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").symlink_to(folder / "base_data_climbmix")

    def run(world_size: int, *state: Path) -> list[Any]:
        program = [sys.executable, nanochat_ranks.__file__, str(world_size), str(tmp_path), *map(str, state)]
        done = subprocess.run(program, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=250)
        assert done.returncode == 0, done.stderr
        return [json.loads((tmp_path / f"{world_size}-{rank}.json").read_text()) for rank in range(world_size)]

    first = run(2)
    assert first[0]["state"]["loader"] == first[1]["state"]["loader"]
    assert first[0]["state"]["batches"] == nanochat_ranks.BATCHES % GATHER_EVERY
    (tmp_path / "saved.json").write_text(json.dumps(first[0]["state"]))
    second = run(3, tmp_path / "saved.json")
    rows = [
        row
        for ranks in (first, second)
        for batch in zip(*(rank["rows"] for rank in ranks), strict=True)
        for step in zip(*batch, strict=True)
        for row in step
    ]
    options = {"bos": 256, "B": 1, "T": T, "split": "train", "device": "cpu", "lanes": LANES}
    monkeypatch.setattr(nanochat, "WINDOW", WINDOW)  # as in the program
    with closing(with_state("bytes", **options)) as loader:
        assert [next(loader)[0].tolist()[0] for _ in rows] == rows


def test_the_last_file_is_for_validation() -> None:
    rows = taken(without_state(Encodes(), B, T, "val", device="cpu", lanes=2), 120)
    seen = {segment for row in rows for segment in segments(row, 256)}
    fitting = [{tuple(text.encode()) for text in texts_of(file) if 0 < len(text) <= T} for file in range(4)]
    assert fitting[3] <= seen
    assert not seen & (fitting[0] | fitting[1] | fitting[2])


def test_compressed_lines_are_read_as_in_the_documentation(tmp_path: Path) -> None:
    paths = []
    for file in range(2):
        paths.append(str(tmp_path / f"shard_{file:03d}.zst"))
        Path(paths[-1]).write_bytes(zstandard.compress("\n".join(texts_of(file)).encode()))
    rows = taken(without_state(data_shards=paths, batch_size=B, sequence_len=T, tokenizer=Encodes(), lanes=2), 300)
    seen = {segment for row in rows for segment in segments(row, 256)}
    assert {tuple(text.encode()) for file in range(2) for text in texts_of(file) if 0 < len(text) <= T} <= seen


def test_another_tokenizer_or_other_lanes_can_not_resume() -> None:
    with closing(train(WrapsTiktoken())) as loader:
        state = next(loader)[2]
    with pytest.raises(StateError, match="tokenizer"):
        train(WrapsTiktoken([b"an", b"and"]), state=state)
    with pytest.raises(StateError, match="tokenizer"):
        train(Encodes(), state=state, bos=300)
    with pytest.raises(StateError, match="saved with lanes 6"):
        train(WrapsTiktoken(), state=state, lanes=12)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"batch_size": 2}, ConfigError, "B and batch_size are both given"),
        ({"B": None}, ConfigError, "B and batch_size are missing"),
        ({"T": 0}, ConfigError, "T is 0"),
        ({"split": "test"}, ConfigError, "split is 'test'"),
        ({"split": None}, ConfigError, "split is None"),
        ({"state": {}, "resume_state_dict": {}}, ConfigError, "both given"),
        ({"state": {"pq_idx": 3, "rg_idx": 1, "epoch": 1}}, StateError, "a state of nanochat's own loader"),
        ({"state": {"step": 3}}, StateError, "without 'loader'"),
        ({"state": {"loader": {}, "batches": 3}}, StateError, "the state can't be used"),
        ({"state": {"loader": {}, "batches": "3"}}, StateError, "'batches' is '3'"),
        ({"tokenizer": None}, ConfigError, "tokenizer is missing"),
        ({"tokenizer": "bytes"}, ConfigError, "give its id with bos="),
        ({"data_shards": "/no/such/folder"}, ConfigError, "not a folder"),
        ({"data_shards": ["a.parquet"]}, ConfigError, "at least 2"),
        ({"data_shards": ["a.parquet", "b.parquet"]}, DataError, "a.parquet"),
        ({"world_size": 7, "rank": 0}, ConfigError, "more than the 6 lanes"),
        ({"pending": -1}, ConfigError, "pending is -1"),
    ],
    ids=str,
)
def test_mistakes_are_errors_that_say_what_to_do(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        with_state(**{"tokenizer": Encodes(), "B": B, "T": T, "split": "train", "lanes": LANES, **options})


def test_batches_without_a_state_can_not_be_pending() -> None:
    with pytest.raises(ConfigError, match="come without a state"):
        without_state(Encodes(), B, T, "train", pending=1)


def test_without_downloaded_files_it_says_where_it_looked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    with pytest.raises(ConfigError, match="base_data_climbmix: there is no such folder"):
        train(Encodes())
