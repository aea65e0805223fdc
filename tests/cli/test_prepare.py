"""The commands prepare, verify and convert, through their real entry point."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.corpus.prepare.texts import expected, read_corpus, write_texts

FMSDATA = Path(sys.executable).parent / "fmsdata"


def run(*args: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([FMSDATA, *args], capture_output=True, text=True, timeout=120)


def test_text_is_prepared_verified_and_converted(tmp_path: Path) -> None:
    files = write_texts(tmp_path / "texts")
    options = ("--tokenizer", "bytes", "--processes", "1", "--validation", "0.1", "--seed", "3")
    done = run("prepare", tmp_path / "texts", tmp_path / "corpus", *options)
    assert done.returncode == 0, done.stderr
    assert "web: 1 shard, " in done.stdout
    assert f"of them in {tmp_path}/corpus/validation (uint16), in " in done.stdout
    corpus = tmp_path / "corpus"
    assert read_corpus(corpus, "w*") + read_corpus(corpus / "validation") == expected(files)
    again = run("prepare", tmp_path / "texts", corpus, *options, "--json")
    assert json.loads(again.stdout)["continued"] is True
    found = run("prepare", tmp_path / "texts", corpus, *options).stdout
    assert "note: an earlier run with the same files and options had finished: nothing was written\n" in found
    assert f"\nfound {corpus}: " in found
    assert "wrote" not in found
    other = run("prepare", tmp_path / "texts", corpus, *options[:-1], "4")
    assert other.returncode == 1
    assert other.stderr.startswith("error: ")
    assert "--seed was 3 and is 4 now" in other.stderr

    assert run("verify", corpus, "--tokenizer", "bytes").returncode == 0
    wrong = run("verify", corpus, "--vocabulary", "100", "--duplicates", "--json")
    assert wrong.returncode == 1
    report = json.loads(wrong.stdout)
    assert report["duplicates"] > 0
    assert any("outside the vocabulary of 100" in problem["problem"] for problem in report["problems"])

    converted = run("convert", corpus, tmp_path / "batches", "--layout", "batch", "--dtype", "uint8", "--json")
    assert converted.returncode == 0, converted.stderr
    assert json.loads(converted.stdout)["documents"] == expected(files).total()
    assert read_corpus(tmp_path / "batches", "w*") == read_corpus(corpus, "w*")


def test_skipped_documents_are_listed_in_the_summary(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text('{"text": "one"}\n{}\n')
    (tmp_path / "in" / "notes.md").write_text("notes")
    failed = run("prepare", tmp_path / "in", tmp_path / "out", "--tokenizer", "bytes")
    assert failed.returncode == 1
    assert "a.jsonl: line 2: there is no field 'text'" in failed.stderr
    assert "Traceback" not in failed.stderr
    done = run("prepare", tmp_path / "in", tmp_path / "out", "--tokenizer", "bytes", "--skip-bad")
    assert done.returncode == 0, done.stderr
    assert f"skipped 1 bad document, listed in {tmp_path}/out/meta/fmsdata-skipped.csv" in done.stdout
    assert "a.jsonl, line 2: there is no field 'text'" in done.stdout
    assert "note: left out 1 file" in done.stdout


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["prepare", "in", "out"], 2, "Missing option '--tokenizer'"),
        (["prepare", "in", "out", "--tokenizer", "nowhere.json"], 1, "nowhere.json"),
        (["prepare", "nowhere", "out", "--tokenizer", "bytes"], 1, "no such folder"),
        (["prepare", "in", "out", "--tokenizer", "bytes", "--engine", "slurm"], 1, "must be processes or ray"),
        (["prepare", "in", "out", "--tokenizer", "bytes", "--validation", "2"], 2, "validation"),
        (["verify", "nowhere"], 1, "no such folder"),
        (["verify", "in", "--tokenizer", "bytes", "--vocabulary", "3"], 1, "not both"),
        (["convert", "in", "in"], 1, "is the source itself"),
        (["convert", "in", "out", "--layout", "rows"], 1, "must be list or batch"),
        (["convert", "in", "out", "--dtype", "text"], 1, "must be an integer type"),
    ],
    ids=str,
)
def test_mistakes_are_one_line(tmp_path: Path, args: list[str], code: int, words: str) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("one\n")
    done = subprocess.run([FMSDATA, *args], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == code
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert code == 2 or len(done.stderr.splitlines()) == 1
