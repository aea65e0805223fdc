"""`fmsdata index` in a folder that is shared with other programs: what it writes, leaves alone and says."""

import csv
import logging
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import fmsdata
from fmsdata.corpus.counts import read_counts
from fmsdata.corpus.index import index_corpus, write_index
from fmsdata.corpus.manifest import FILE
from fmsdata.errors import CountsError
from tests.helpers import documents, write_source

FMSDATA = Path(sys.executable).parent / "fmsdata"
HEADER = "dataset/filename,documents,tokens"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A corpus as fms-fsdp has it, without counts yet."""
    rng = np.random.default_rng(0)
    write_source(tmp_path / "web", documents(rng, 30, shortest=1), layout="batch")
    write_source(tmp_path / "lang=en/dataset=wiki", documents(rng, 20, shortest=1), shards=2)
    return tmp_path


def index(*args: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([FMSDATA, "index", *args], capture_output=True, text=True, timeout=120)


def rows_of(root: Path) -> list[str]:
    return [
        f"/{name}/{shard},{documents},{tokens}"
        for name in ("lang=en/dataset=wiki", "web")
        for counts in [read_counts(root / name)]
        for shard, documents, tokens in zip(
            counts.shards, counts.documents.tolist(), counts.tokens.tolist(), strict=True
        )
    ]


def write_counts(root: Path, rows: list[str], name: str = "combined_counts.csv") -> Path:
    path = root / "meta" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([HEADER, *rows]) + "\n")
    return path


def in_the_other_loader(root: Path, dataset: str) -> dict[str, int]:
    """The documents of each shard, as fms-fsdp's loader finds them.

    It wants exactly one file in `meta` with "counts" and "csv" in its name, and rows in which the
    dataset follows a slash.
    """
    (file,) = (name for name in os.listdir(root / "meta") if "counts" in name and "csv" in name)
    found = {}
    with open(root / "meta" / file) as lines:
        for row in csv.DictReader(lines):
            place = row["dataset/filename"].find(f"/{dataset}")
            if place >= 0:
                found[row["dataset/filename"][place + len(dataset) + 2 :]] = int(row["documents"])
    return found


def files_in(folder: Path) -> dict[str, str]:
    """All files but the manifest."""
    return {path.name: path.read_text() for path in folder.iterdir() if path.is_file() and path.name != FILE}


def test_an_index_can_be_read_by_the_other_loader(root: Path) -> None:
    rows = rows_of(root)
    done = index(root)
    assert done.returncode == 0, done.stderr
    assert f"wrote {root}/meta/counts.csv: 5 shards, 50 documents, " in done.stdout
    assert (root / "meta/counts.csv").read_text().splitlines() == [HEADER, *rows]
    for dataset in ("web", "lang=en/dataset=wiki"):
        counts = read_counts(root / dataset)
        assert in_the_other_loader(root, dataset) == dict(zip(counts.shards, counts.documents.tolist(), strict=True))


def test_counts_of_another_program_that_are_right_are_left_alone(root: Path) -> None:
    write_counts(root, rows_of(root)[::-1])  # in an order of its own
    before = files_in(root / "meta")
    for options in ((), ("--replace",)):
        done = index(root, *options)
        assert done.returncode == 0, done.stderr
        assert files_in(root / "meta") == before
        assert f"{root}/meta/combined_counts.csv is up to date: 5 shards" in done.stdout
        assert "agrees with the shards" in done.stdout or options


def test_counts_of_another_program_that_lack_shards_get_a_file_beside_them(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = rows_of(root)
    theirs = write_counts(root, rows[:-1]).read_text()
    with caplog.at_level(logging.WARNING, "fmsdata"):
        fmsdata.ShardReader(root / "web")
    assert "lack 1 of the 3 shards, such as part-2.arrow" in caplog.text
    assert f"run `fmsdata index {root}` once" in caplog.text
    caplog.clear()
    done = index(root)
    assert done.returncode == 0, done.stderr
    assert f"left {root}/meta/combined_counts.csv as it is: another program's, it lacks 1 shard" in done.stdout
    assert f"wrote {root}/meta/fmsdata-index.csv: 5 shards" in done.stdout
    assert files_in(root / "meta") == {
        "combined_counts.csv": theirs,
        "fmsdata-index.csv": "\n".join([HEADER, *rows]) + "\n",
    }
    assert len(in_the_other_loader(root, "web")) == 2  # as before: it sees its own file only
    with caplog.at_level(logging.WARNING, "fmsdata"):
        assert fmsdata.ShardReader(root / "web").counts.csv_root == str(root)
    assert not caplog.text
    assert "up to date" in index(root).stdout


def test_the_file_beside_them_is_read_first_and_kept_up_to_date(root: Path) -> None:
    theirs = write_counts(root, rows_of(root)[:-1])
    index_corpus(root)
    theirs.write_text(theirs.read_text().replace("web/part-0.arrow,", "web/part-0.arrow,1"))  # later, wrong
    assert read_counts(root / "web").documents.sum() == 30
    theirs.unlink()
    done = index_corpus(root)
    assert (done.file.name, sorted(os.listdir(root / "meta"))) == ("counts.csv", ["counts.csv", FILE])
    assert any("removed" in note for note in done.notes)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda rows: [rows[0].rpartition(",")[0] + ",7", *rows[1:]], "and 7 tokens there, and the file"),
        (lambda rows: [*rows, "/web/gone.arrow,3,30"], "it lists web/gone.arrow, but there is no such file"),
        (lambda rows: [*rows, "/web/part-0.arrow,many,30"], "is not a row of dataset/filename"),
    ],
)
def test_wrong_counts_of_another_program_are_an_error_unless_they_are_to_be_replaced(
    root: Path, change: object, words: str
) -> None:
    rows = rows_of(root)
    theirs = write_counts(root, change(rows)).read_text()  # type: ignore[operator]
    done = index(root)
    assert done.returncode == 1
    assert words in done.stderr
    assert "nothing was written" in done.stderr
    assert "--replace" in done.stderr
    assert files_in(root / "meta") == {"combined_counts.csv": theirs}
    done = index(root, "--replace")
    assert done.returncode == 0, done.stderr
    assert f"wrote {root}/meta/combined_counts.csv: 5 shards" in done.stdout
    assert files_in(root / "meta") == {"combined_counts.csv": "\n".join([HEADER, *rows]) + "\n"}
    assert files_in(root / "meta/replaced") == {"combined_counts.csv": theirs}
    assert len(in_the_other_loader(root, "web")) == 3


def test_rows_of_datasets_that_are_not_here_are_no_mistake(root: Path) -> None:
    write_counts(root, [*rows_of(root), "/books/part-0.arrow,3,30"])
    done = index_corpus(root)
    assert not done.written
    assert "1 row is of other folders" in done.notes[0]


def test_an_index_is_rebuilt_when_shards_change(root: Path) -> None:
    index_corpus(root)
    write_source(root / "web", documents(np.random.default_rng(3), 40, shortest=1), shards=4)
    (root / "lang=en/dataset=wiki/part-0.arrow").unlink()
    with pytest.raises(CountsError, match="fmsdata index"):
        read_counts(root / "lang=en/dataset=wiki")
    done = index_corpus(root)
    assert (done.written, done.rows) == (True, 5)
    assert files_in(root / "meta") == {"counts.csv": "\n".join([HEADER, *rows_of(root)]) + "\n"}


def test_an_index_of_an_earlier_version_without_slashes_is_rebuilt(root: Path) -> None:
    rows = rows_of(root)
    write_counts(root, [row[1:] for row in rows], "counts.csv")
    assert index_corpus(root).written
    assert (root / "meta/counts.csv").read_text().splitlines()[1:] == rows


def test_a_file_that_only_has_the_name_of_an_index_is_another_program_s(root: Path) -> None:
    write_counts(root, [f'"{rows_of(root)[0].split(",")[0]}",1,1'], "counts.csv")
    with pytest.raises(CountsError, match="another program"):
        write_index(root)


def test_several_counts_files_become_one_when_they_are_replaced(root: Path) -> None:
    rows = rows_of(root)
    write_counts(root, rows[:2], "wiki_counts.csv")
    write_counts(root, rows[2:4], "web_counts.csv")
    assert index_corpus(root).file.name == "fmsdata-index.csv"
    assert index_corpus(root, replace=True).file.name == "counts.csv"
    assert set(files_in(root / "meta")) == {"counts.csv"}
    assert set(files_in(root / "meta/replaced")) == {"web_counts.csv", "wiki_counts.csv"}


def test_counts_nearer_to_the_shards_are_compared_too(root: Path) -> None:
    web = [row.removeprefix("/web") for row in rows_of(root) if row.startswith("/web")]
    write_counts(root / "web", web[:2])
    assert any("web/meta/combined_counts.csv is nearer" in note for note in index_corpus(root).notes)
    write_counts(root / "web", ["/part-0.arrow,1,1"])
    with pytest.raises(CountsError, match=f"run `fmsdata index {root}/web --replace`"):
        index_corpus(root)
