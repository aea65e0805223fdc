"""Rows become tokens once: what they become, what is refused, and what is kept in the cache."""

import errno
import logging
import os
import pickle
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import tokenizers
import torch
from hypothesis import given, settings

import fmsdata
from fmsdata.epochs.token_table import TokenTable
from fmsdata.errors import ConfigError, DataError
from tests.epochs.fine_tuners import data

ROWS = [{"prompt": "ab", "response": "xyz"}, {"prompt": "", "response": "q"}]


class Counted:
    """A tokenizer that counts its calls."""

    def __init__(self, name: str = "counted") -> None:
        self.fingerprint, self.calls = name, 0

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        self.calls += 1
        return [list(text.encode()) for text in texts]


def made(rows: Any = ROWS, tokenizer: Any = "bytes", **options: Any) -> fmsdata.FineTuningRows:
    return fmsdata.FineTuningRows(rows, tokenizer, **{"seq_len": 16, "eos": 0, **options})


def test_labels_are_the_response_and_what_ends_it() -> None:
    rows = made(bos=1)
    assert rows[0]["input_ids"].tolist() == [1, *b"abxyz", 0]
    assert rows[0]["labels"].tolist() == [-100, -100, *b"xyz", 0, -100]
    assert made(shift=False)[0]["labels"].tolist() == [-100, -100, *b"xyz", 0]
    assert made()[1]["labels"].tolist() == [0, -100], "nothing predicts the first token of a row"
    assert made(eos=None)[0]["labels"].tolist() == [-100, *b"xyz", -100]
    everything = made(prompt=None, bos=1)
    assert everything[0]["labels"].tolist() == [*b"xyz", 0, -100]
    assert everything[0]["labels"].dtype == torch.int64
    with pytest.raises(IndexError):
        rows[2]


def test_prompt_and_response_are_tokenized_apart() -> None:
    joint = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    rows = made([{"prompt": "a", "response": "b"}, {"prompt": "ab", "response": "ab"}], joint, eos=3)
    assert [rows[row]["input_ids"].tolist() for row in range(2)] == [[0, 1, 3], [2, 2, 3]]


def test_the_end_of_a_response_comes_from_the_tokenizer_or_must_be_given() -> None:
    from transformers import PreTrainedTokenizerFast

    inner = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1, "</s>": 2}, []))
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>")
    rows = fmsdata.FineTuningRows([{"prompt": "a", "response": "ab"}], fast, seq_len=16)
    assert rows[0]["input_ids"].tolist() == [0, 0, 1, 2]
    with pytest.raises(ConfigError, match="eos is missing: give the id of the token that ends a response"):
        fmsdata.FineTuningRows(ROWS, "bytes", seq_len=16)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "answer": "b"}, r"row 1 has no field 'response'; its fields are 'prompt', 'answer': name"),
        ({"prompt": 7, "response": "b"}, r"row 1: field 'prompt' is a int; it must be a string"),
        ({"prompt": "a", "response": None}, r"row 1: field 'response' is a NoneType"),
        ({"prompt": "a", "response": ""}, r"row 1: field 'response' is empty, so there is nothing to train on"),
        ({"prompt": "a", "response": "b\ud800"}, r"row 1: field 'response' has '\\ud800', half of a character"),
        (["a", "b"], r"row 1 is a list; it must be a dict with the field 'prompt'"),
    ],
)
def test_a_wrong_row_is_named(row: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        made([ROWS[0], row]).table  # noqa: B018


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seq_len": 1}, "seq_len is 1; a line needs at least 2 tokens"),
        ({"mode": "bestfits"}, "mode is 'bestfits'; did you mean 'bestfit'"),
        ({"oversized": "cut"}, "oversized is 'cut'; must be one of truncate, drop, error"),
        ({"mode": "split", "oversized": "drop"}, "with mode 'split' a row continues on the next line"),
        ({"prompt": 3}, "prompt is 3; it must be the name of a field"),
        ({"response": None}, "response is None; it must be the name of a field"),
        ({"chat_template": "x"}, "name the field that holds them with messages="),
        ({"pad": -1}, "pad is -1"),
        ({"eos": 2**31}, "eos is 2147483648; token ids go up to 2147483647"),
        ({"shift": 1}, "shift is 1; it must be true or false"),
        ({"messages": "m"}, "eos is given with messages: the chat template decides"),
        ({"messages": "m", "eos": "auto"}, "tokenizer is 'bytes'; messages= needs a tokenizer with a chat template"),
    ],
)
def test_wrong_arguments_say_the_way_out(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        made(**options)


def test_what_is_no_dataset_is_refused() -> None:
    nothing: list[Any] = [[], {}, "text", 7]
    for rows in nothing:
        with pytest.raises(ConfigError, match=r"dataset is a|no rows"):
            made(rows)
    with pytest.raises(ConfigError, match=r"mix first: FineTuningRows\(RowMixture"):
        fmsdata.EpochSampler(fmsdata.RowMixture({"a": made()}), global_batch=1, rank=0, world_size=1)


def test_oversized_rows_are_cut_left_out_or_an_error_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    rows = data([(2, 3), (2, 30), (20, 3), (3, 3)])
    with caplog.at_level(logging.WARNING, "fmsdata"):
        cut = made(rows)
        assert (cut.dropped, cut.truncated, cut.untrained) == (0, 2, 1)
        assert (cut.dropped, cut.truncated, cut.untrained) == (0, 2, 1)
    assert [record.getMessage() for record in caplog.records] == [
        "2 of 4 rows have more tokens than seq_len (16), and are cut to it: rows 1, 2",
        "1 of 4 rows have no token to train on, and are left out: rows 2",
    ]
    assert len(cut[1]["input_ids"]) == 16
    assert cut[1]["labels"][-1] == -100, "the end of a row that was cut is not learned as its end"
    dropping = made(rows, oversized="drop")
    assert (dropping.dropped, dropping.truncated, dropping.untrained) == (2, 0, 0)
    splitting = made(rows, mode="split")
    assert (splitting.dropped, splitting.truncated, splitting.untrained) == (0, 0, 0)
    with pytest.raises(
        DataError, match=r"row 1 has 33 tokens, but seq_len is 16 \(2 of 4 rows too long\); use a larger"
    ):
        fmsdata.EpochSampler(made(rows, oversized="error"), global_batch=1, rank=0, world_size=1)
    with pytest.raises(
        DataError, match=r"none of the 1 row is left: 1 have more.*and 0 have no.*or oversized='truncate'"
    ):
        fmsdata.EpochSampler(made(rows[2:3], oversized="drop"), global_batch=1, rank=0, world_size=1)
    with pytest.raises(
        DataError, match=r"none of the 1 row is left: 0 have more tokens .* 1 have no token to train on"
    ):
        fmsdata.EpochSampler(made(rows[2:3]), global_batch=1, rank=0, world_size=1)


def test_the_same_rows_are_tokenized_once_and_others_again(tmp_path: Path) -> None:
    tokenizer = Counted()
    rows = data([(1, 2)] * 2500)
    first = made(rows, tokenizer, cache=tmp_path)
    tokens = [first.table.tokens(row).tolist() for row in (0, 1023, 1024, 2499)]
    assert tokenizer.calls == 3
    again = made([dict(row) for row in rows], tokenizer, cache=tmp_path, seq_len=8, mode="pad", shift=False, pad=9)
    assert [again.table.tokens(row).tolist() for row in (0, 1023, 1024, 2499)] == tokens
    assert tokenizer.calls == 3
    assert again.table.path == first.table.path
    changes: list[Any] = [
        made([*rows[:-1], {"prompt": "x", "response": "ab"}], tokenizer, cache=tmp_path),
        made(rows[:-1], tokenizer, cache=tmp_path),
        made([{"prompt": "", "response": row["prompt"] + row["response"]} for row in rows], tokenizer, cache=tmp_path),
        made(rows, tokenizer, cache=tmp_path, eos=3),
        made(rows, tokenizer, cache=tmp_path, bos=3),
        made(rows, tokenizer, cache=tmp_path, prompt=None),
        made(rows, Counted("other"), cache=tmp_path),
    ]
    assert len({rows.table.path for rows in [first, *changes]}) == 1 + len(changes)


def test_rows_that_name_their_content_are_not_read_again(tmp_path: Path) -> None:
    class Named(list[Any]):
        fingerprint, read = "v1", 0

        def __getitem__(self, row: Any) -> Any:
            Named.read += 1
            return super().__getitem__(row)

    made(Named(ROWS), cache=tmp_path).table  # noqa: B018
    assert Named.read == 2
    assert made(Named(ROWS), cache=tmp_path)[0]["input_ids"].tolist() == [*b"abxyz", 0]
    assert Named.read == 2


def test_rows_that_draw_are_drawn_once_and_leave_the_generators_alone(tmp_path: Path) -> None:
    class Drawn(list[Any]):
        def __getitem__(self, row: Any) -> Any:
            return {"prompt": "", "response": str(int(torch.randint(0, 10**9, (1,))))}

    before = torch.get_rng_state().tolist()
    first, second = (made(Drawn(ROWS), cache=tmp_path)[0]["input_ids"].tolist() for _ in range(2))
    assert first == second
    assert torch.get_rng_state().tolist() == before

    class Changing(list[Any]):
        def __getitem__(self, row: Any) -> Any:
            return {"prompt": "", "response": os.urandom(8).hex()}

    with pytest.raises(DataError, match="other texts each time they are read"):
        made(Changing(ROWS), cache=tmp_path).table  # noqa: B018
    assert not list(tmp_path.rglob("*.unfinished"))


def test_a_damaged_file_is_written_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = Counted()
    path = made(ROWS, tokenizer, cache=tmp_path).table.path
    whole = path.read_bytes()
    for damaged in (whole[:-40], b"", b"x" * 100, whole[:8] + b"\xff" * 300 + whole[308:]):
        path.write_bytes(damaged)
        assert made(ROWS, tokenizer, cache=tmp_path)[0]["input_ids"].tolist() == [*b"abxyz", 0]
        assert path.read_bytes() == whole
    assert tokenizer.calls == 5
    assert "the rows are tokenized again" in caplog.text
    (path.parent / f".{path.name}.12ab.unfinished").write_bytes(b"of a killed process")
    path.chmod(0o666)
    assert made(ROWS, tokenizer, cache=tmp_path)[0]["input_ids"].tolist() == [*b"abxyz", 0]
    assert path.stat().st_mode & 0o777 == 0o600
    assert {left.suffix for left in path.parent.iterdir()} == {".arrow", ".lock"}


def test_a_folder_that_cannot_be_used_is_an_error_with_a_way_out(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"has to hold the tokenized rows; set `cache` of FineTuningRows"):
        made(cache=tmp_path / "file").table  # noqa: B018
    others = tmp_path / "others"
    others.mkdir()
    others.chmod(0o777)
    with pytest.raises(ConfigError, match="can be written by others"):
        made(cache=others).table  # noqa: B018


def test_what_goes_wrong_on_the_way_is_named_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(Counted):
        def encode_batch(self, texts: list[str]) -> list[list[int]]:
            raise ZeroDivisionError(len(texts))

    with pytest.raises(ZeroDivisionError) as failed:
        made(ROWS, Failing(), cache=tmp_path).table  # noqa: B018
    assert failed.value.__notes__ == ["while tokenizing rows 0 to 1"]

    class Unplugged(list[Any]):
        reads = 0

        def __getitem__(self, row: Any) -> Any:
            self.reads += 1
            if self.reads > 2:
                raise OSError("the disk of the rows is gone")
            return super().__getitem__(row)

    with pytest.raises(OSError, match="the disk of the rows is gone"):
        made(Unplugged(ROWS), cache=tmp_path).table  # noqa: B018
    growing = list(ROWS)
    rows = made(growing, cache=tmp_path)
    growing.append(ROWS[0])
    with pytest.raises(ConfigError, match="the dataset had 2 rows, and has 3 now"):
        rows.table  # noqa: B018

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("fmsdata.epochs.tokenize_once.write_table", full)
    with pytest.raises(ConfigError, match=r"can't be written \(No space left on device\)"):
        made(cache=tmp_path).table  # noqa: B018
    assert {left.suffix for left in (tmp_path / "fmsdata-rows").iterdir()} == {".lock"}


def test_a_table_is_sent_as_its_path(tmp_path: Path) -> None:
    rows = data([(10, 20)] * 3000)
    table = made(rows, cache=tmp_path, seq_len=64).table
    sent = pickle.dumps(table)
    assert len(sent) < 400
    copied: TokenTable = pickle.loads(sent)
    assert copied.tokens(2999).tolist() == table.tokens(2999).tolist()
    table.path.unlink()
    with pytest.raises(DataError, match="the tokenized rows are not there"):
        pickle.loads(sent)


def test_ids_that_cannot_be_stored_are_refused() -> None:
    class Large(Counted):
        def encode_batch(self, texts: list[str]) -> list[list[int]]:
            return [[2**31] for _ in texts]

    with pytest.raises(DataError, match="the tokenizer returned the id 2147483648"):
        made(ROWS, Large("large")).table  # noqa: B018


@given(
    shapes=st.lists(st.lists(st.tuples(st.integers(1, 4), st.booleans()), max_size=5), min_size=1, max_size=6),
    random=st.randoms(),
)
@settings(max_examples=40, deadline=None)
def test_trained_tokens_of_parts_are_counted_as_a_slow_count_does(
    shapes: list[list[tuple[int, bool]]], random: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    from fmsdata.epochs.encoded import joined
    from fmsdata.epochs.token_table import write_table

    masks = [[trained for length, trained in row for _ in range(length)] for row in shapes]
    edges = []
    for mask in masks:
        padded = [False, *mask, False]
        edges.append([at for at in range(len(mask) + 1) if padded[at] != padded[at + 1]])
    folder = tmp_path_factory.mktemp("table")
    folder.chmod(0o700)
    path = folder / "rows.arrow"
    half = len(masks) // 2
    parts = [joined([list(range(len(mask))) for mask in masks[a:b]], edges[a:b]) for a, b in ((0, half), (half, None))]
    write_table(path, [part for part in parts if len(part.lengths)], lambda _: None)
    table = TokenTable(path)
    rows = np.array([random.randrange(len(masks)) for _ in range(30)])
    start = np.array([random.randint(0, len(masks[row])) for row in rows])
    stop = np.array([random.randint(int(at), len(masks[row])) for row, at in zip(rows, start, strict=True)])
    expected = [sum(masks[row][a:b]) for row, a, b in zip(rows, start, stop, strict=True)]
    assert table.trained(rows, start, stop).tolist() == expected
    assert [len(table.tokens(row)) for row in range(len(masks))] == [len(mask) for mask in masks]
