"""`fmsdata.show`, and how its words are printed."""

import io
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

import fmsdata
from fmsdata.cli.preview import preview
from fmsdata.display.printing import write, write_table
from tests.helpers import CONFIG, maker


def printed(capsys: pytest.CaptureFixture[str], batch: Any, *args: Any, **options: Any) -> str:
    fmsdata.show(batch, *args, **options)
    return capsys.readouterr().out


def test_show_prints_what_preview_prints(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = corpus / "run.yaml"
    config.write_text(f"path: {corpus}\npack: {{seq_len: 40}}\ndocuments: {{eos: 0, bos: 5}}\nlanes: 6\n")
    for tokenizer in (None, "bytes"):
        preview(config, [], rows=3, tokenizer=tokenizer)
        expected = capsys.readouterr().out
        loader = fmsdata.build_loader(config, {"loader.outputs": ["pieces"]})
        shown = printed(capsys, next(loader), tokenizer, rows=3)
        assert shown == re.sub(r", sample \d+", "", expected.replace("step 0:", "batch:"))


def test_show_takes_a_tokenizer_object(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(300)}, unk_token="w1"))
    loader = maker(corpus, loader__outputs=["pieces"])(0, 1)
    assert " w2" in printed(capsys, next(loader), words, full=True)


def test_show_without_pieces_shows_what_the_batch_has(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    batch = next(maker(corpus)(0, 1))
    text = printed(capsys, batch)
    row = batch["input_ids"][0].tolist()
    assert " ".join(map(str, row)) in text
    first = batch["provenance"][0][0]
    assert f"of {first.source}/{first.shard}#{first.document}[{first.start}:{first.stop}]" in text
    assert "'pieces'" in text
    batch = next(maker(corpus, loader__outputs=["document_ids"])(0, 1))
    lines = printed(capsys, batch).splitlines()
    documents = len(set(batch["document_ids"][0].tolist()))
    assert len([line for line in lines if line.startswith("  ")]) == documents


def test_the_pieces_of_a_batch_are_its_tokens_with_any_number_of_workers(corpus: Path) -> None:
    for workers in (0, 1):
        loader = maker(corpus, loader__outputs=["pieces", "provenance"], loader__num_workers=workers)(0, 1)
        batch = next(loader)
        for row, pieces in enumerate(batch["pieces"]):
            tokens = [token for piece in pieces for token in piece.tokens]
            assert tokens == [*batch["input_ids"][row].tolist(), int(batch["labels"][row, -1])]
            assert [piece.origin for piece in pieces if piece.origin] == batch["provenance"][row]
        loader.close()


def test_rows_that_fill_up_a_pass_are_marked(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {**CONFIG, "path": str(corpus), "epochs": 1, "loader": {"batch_size": 7, "outputs": ["pieces"]}}
    *_, last = fmsdata.build_loader(config)
    filled = int(last["is_padding"].sum())
    assert filled
    assert printed(capsys, last).count(", padding: 17 tokens, 0 documents, 16 labels ignored") == filled


@pytest.mark.parametrize("wrong", [None, 3, {}, {"input_ids": [1, 2]}, {"labels": 3}], ids=str)
def test_what_is_no_batch_is_an_error(wrong: Any) -> None:
    with pytest.raises(fmsdata.ConfigError, match="show takes a batch of a loader"):
        fmsdata.show(wrong)


TEXT = st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=12)


def console(width: int) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, no_color=True, width=width, highlight=False)


@settings(max_examples=60, deadline=None)
@given(words=st.lists(TEXT, min_size=1, max_size=30), width=st.integers(14, 90), indent=st.integers(0, 30))
def test_words_are_whole_and_lines_fit_at_any_width(words: list[str], width: int, indent: int) -> None:
    out = console(width)
    write(out, " ".join(words), guide="-" * indent, indent=" " * indent)
    file: Any = out.file
    lines = file.getvalue().splitlines()
    got = " ".join(lines).replace("-", " ").split()
    assert got == words
    assert all(len(line) <= max(width, indent) or len(line.split()) == 1 for line in lines if line.isascii())


@settings(max_examples=30, deadline=None)
@given(rows=st.lists(st.tuples(TEXT, TEXT, st.integers(0, 10**9)), min_size=1, max_size=5), width=st.integers(20, 100))
def test_a_table_keeps_its_cells_at_any_width(rows: list[tuple[str, str, int]], width: int) -> None:
    out = console(width)
    write_table(out, ("name", "kind", "number"), rows, left=["name"])
    file: Any = out.file
    words = re.sub(r"\x1b\[[0-9;]*m", "", file.getvalue()).split()
    for row in rows:
        assert {str(cell) for cell in row} <= set(words)
