"""`fmsdata preview`, through its real entry point."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from rich.console import Console
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from fmsdata import StatefulDataLoader, testing
from fmsdata.display.decoding import show_ids
from fmsdata.display.show import inspect_batch, print_batches
from fmsdata.tasks.batch import Batch, widen
from tests.cli.test_cli import FMSDATA, run
from tests.helpers import CONFIG, maker, write_source


@pytest.fixture
def config(corpus: Path) -> Path:
    path = corpus / "run.yaml"
    loader = {"batch_size": 3, "num_workers": 2}
    path.write_text(yaml.safe_dump({**CONFIG, "path": str(corpus), "loader": loader, "checkpoint": {"path": "saved"}}))
    return path


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """Token 10 is the word `w10`, and so on; token 11 tries to clear the screen, and 0 is `</s>`."""
    words = {"</s>": 0, "\x1b[2J": 11, **{f"w{i}": i for i in range(1, 300) if i != 11}}
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    Tokenizer(WordLevel(words, unk_token="w1")).save(str(folder / "tokenizer.json"))
    return folder


def test_every_token_of_the_first_batches_is_shown_with_its_origin(config: Path) -> None:
    arguments = ("--batches", "2", "--rank", "1", "--world-size", "2", "documents.bos=5")
    done = run("preview", config, "--json", *arguments)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert not (config.parent / "saved").exists()
    report = json.loads(done.stdout)
    stored = testing.stored_documents({name: config.parent / name for name in ("web", "wiki")})
    loader = iter(maker(config.parent, loader__batch_size=3, documents__bos=5)(1, 2))
    samples = []
    for batch in report["batches"]:
        expected = next(loader)
        assert batch["fields"] == {"input_ids": [3, 16], "labels": [3, 16]}
        for row, ids, labels, spans in zip(
            batch["rows"], expected["input_ids"], expected["labels"], expected["provenance"], strict=True
        ):
            samples.append(row["sample"])
            tokens = [token for piece in row["pieces"] for token in piece["tokens"]]
            assert tokens == [*ids.tolist(), int(labels[-1])]
            shown = [one for one in row["pieces"] if not one["inserted"]]
            assert [tuple(one[name] for name in spans[0]._fields) for one in shown] == [tuple(span) for span in spans]
            for one in shown:
                document = stored[one["source"], one["shard"], one["document"]]
                assert document[one["start"] : one["stop"]].tolist() == one["tokens"]
            assert {token for one in row["pieces"] if one["inserted"] for token in one["tokens"]} <= {0, 5}
    assert samples == [1, 3, 5, 7, 9, 11]


def test_in_a_pipe_each_document_has_a_line_and_inserted_tokens_are_marked(config: Path) -> None:
    done = run("preview", config, "--rows", "2", "documents.bos=5", "pack.seq_len=120")
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    rows = done.stdout.split("\nrow ")[1:]
    assert len(rows) == 2
    for row in rows:
        first, *lines = row.strip().splitlines()
        assert f" {len(lines)} document" in first
        assert all(line.count(".arrow#") == 1 for line in lines)
        assert all("⟨5⟩" in line for line in lines[1:]), "BOS stands before the document that it begins"
        assert all(line.endswith("⟨0⟩") for line in lines[:-1])


def test_a_long_document_is_shortened_in_the_middle_unless_asked_otherwise(config: Path) -> None:
    write_source(config.parent / "long", [list(range(10, 110))] * 30, shards=1)
    arguments = ["sources={long: {weight: 1}}", "pack={seq_len: 200, mode: pad, pad: 1}", "task.prompt_len=3"]
    short = run("preview", config, "--rows", "1", *arguments).stdout
    assert " ... 52 tokens ... " in short
    assert "⟨1 x 100⟩" in short, "padding"
    assert "103 labels ignored (-100)" in short
    full = run("preview", config, "--rows", "1", "--full", *arguments).stdout
    assert " ... " not in full
    assert " ".join(map(str, range(10, 110))) in full


def test_a_tokenizer_turns_ids_into_text_that_can_not_harm_a_terminal(config: Path, tokenizer: Path) -> None:
    for path in (tokenizer, tokenizer / "tokenizer.json"):
        done = run("preview", config, "--tokenizer", path, "--full", "loader.batch_size=24")
        assert done.returncode == 0, done.stderr
        assert "⟨</s>⟩" in done.stdout
        assert " w2" in done.stdout
        assert "\\x1b[2J" in done.stdout
        assert "\x1b" not in done.stdout


def test_wrong_input_is_one_line(config: Path, tokenizer: Path) -> None:
    for arguments, words in (
        (["--tokenizer", config], "is not a tokenizer that the library"),
        (["--tokenizer", tokenizer.parent], "the folder holds no tokenizer.json"),
        (["--rank", "2", "--world-size", "2"], "rank is 2 of world size 2"),
    ):
        done = run("preview", config, *arguments)
        assert done.returncode == 1, arguments
        assert done.stderr.startswith("error: ")
        assert words in done.stderr
        assert "Traceback" not in done.stderr


def test_without_the_library_it_says_what_to_install(config: Path, tokenizer: Path) -> None:
    program = "import sys; sys.modules['tokenizers'] = None; from fmsdata.cli.app import main; main()"
    command = [sys.executable, "-c", program, "preview", str(config), "--tokenizer", str(tokenizer)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "pip install 'fmsdata[tokenizers]'" in done.stderr


class Backwards:
    """A task of another kind: other tokens than those of the lines, and fields of its own."""

    extra_tokens, needs_lines = 0, False

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, batch: Batch) -> dict[str, torch.Tensor]:
        return {self.name: widen(batch.tokens[:, ::-1]), "loss_scale": torch.tensor(2.0)}


def test_what_a_task_makes_of_the_tokens_is_shown_beside_them(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = maker(corpus)(0, 1).data
    for name, words in (("input_ids", "as the task made them: "), ("targets", "targets (2, 17), loss_scale ()")):
        loader = StatefulDataLoader(data, batch_size=2, task=Backwards(name), outputs=["pieces"], rank=0, world_size=1)
        shown = inspect_batch(next(loader))
        print_batches([shown], show_ids, True, Console())
        printed = " ".join(capsys.readouterr().out.split())
        assert words in printed
        backwards = [token for piece in shown.rows[0].pieces for token in piece.tokens][::-1]
        assert (f"as the task made them: {show_ids(backwards)}" in printed) == (name == "input_ids")


def test_a_closed_pipe_is_no_accident(config: Path) -> None:
    command = f"{FMSDATA} preview {config} --batches 300 --full | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("step 0: input_ids (3, 16)")
    assert done.stderr == ""
