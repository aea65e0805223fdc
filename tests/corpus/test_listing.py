"""Which files are shards: not the caches of other programs, and a warning if some are there twice."""

import logging
import os
import re
import shutil
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fmsdata
from fmsdata.cli.outlook import outlook
from fmsdata.cli.run import Run
from fmsdata.config.read import read_config
from fmsdata.corpus.index import index_corpus
from fmsdata.errors import DataError, StateError
from tests.helpers import CONFIG, documents, maker, write_source

CACHES = [
    "cache-5b3f1c0d9e8a7b6c.arrow",
    "cache-5b3f1c0d9e8a7b6c_00000_of_00004.arrow",
    "tmpab12_xyz.arrow",
    "part.incomplete/part-0.arrow",
    "_temporary/0/part-0.arrow",
]


@pytest.fixture
def web(tmp_path: Path) -> Path:
    return write_source(tmp_path / "web", documents(np.random.default_rng(1), 60, shortest=1))


def notes(folder: Path) -> tuple[str, ...]:
    return fmsdata.ShardReader(folder).counts.notes


def copy(source: Path, target: Path) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy(source, target))


def plan_of(root: Path, **overrides: Any) -> dict[str, Any]:
    dotted = {name.replace("__", "."): value for name, value in overrides.items()}
    config = read_config({**CONFIG, "path": str(root)}, {"sources": None, "lanes": 2, **dotted})
    return outlook(Run.of_config(config), None, 1)


@pytest.mark.parametrize(
    ("name", "way_out"),
    [
        ("b.ndjson", "rename .ndjson to .jsonl"),
        ("b.JSONL", "rename .JSONL to .jsonl"),
        ("b.jsonlines.gz", "rename .jsonlines.gz to .jsonl.gz"),
        ("b.PARQUET.x", None),
        ("meta/b.ndjson", None),
    ],
)
def test_files_whose_endings_are_almost_those_of_shards_are_noted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, way_out: str | None
) -> None:
    lines = "".join(f'{{"text": "document {number}"}}\n' for number in range(9))
    (tmp_path / "meta").mkdir()
    (tmp_path / name).write_text(lines)
    if way_out is not None:
        with pytest.raises(fmsdata.DataError, match=f"no shards; .*{re.escape(way_out)}"):
            fmsdata.ShardReader(tmp_path)
    (tmp_path / "a.jsonl").write_text(lines)
    with caplog.at_level(logging.WARNING, "fmsdata"):
        reader = fmsdata.ShardReader(tmp_path)
    assert reader.counts.shards == ("a.jsonl",)
    expected = [] if way_out is None else [f"does not read 1 file, such as {name}, because of the ending; {way_out}"]
    assert [message.partition(": ")[2] for message in caplog.messages] == expected


def test_caches_of_other_programs_are_skipped_with_a_note(web: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = fmsdata.ShardReader(web)
    for name in CACHES:
        copy(web / "part-0.arrow", web / name)
    with caplog.at_level(logging.WARNING, "fmsdata"):
        after = fmsdata.ShardReader(web)
    assert after.describe() == before.describe()
    (message,) = caplog.messages
    assert f"{web}: skipped 5 files that another program left there, such as _temporary/0/part-0.arrow" in message
    assert "rename it" in message
    report = plan_of(web.parent)
    assert any("source 'web': skipped 5 files" in warning for warning in report["warnings"])
    assert report["sources"]["web"]["notes"] == list(after.counts.notes)


def test_caches_are_in_no_index_and_make_no_source(web: Path) -> None:
    copy(web / "part-0.arrow", web / CACHES[0])
    copy(web / "part-0.arrow", web.parent / "scratch" / CACHES[0])
    done = index_corpus(web.parent)
    assert done.rows == 3
    assert any("skipped 2 files" in note for note in done.notes)
    assert list(plan_of(web.parent)["sources"]) == ["web"]
    with pytest.raises(DataError, match=r"scratch: no shards.*skipped 1 file that another program left there"):
        fmsdata.ShardReader(web.parent / "scratch")


def test_counts_that_list_a_cache_are_no_mistake(web: Path) -> None:
    """Earlier versions wrote such rows."""
    index_corpus(web.parent)
    counts = web.parent / "meta/counts.csv"
    counts.write_text(counts.read_text() + f"/web/{CACHES[0]},3,30\n")
    copy(web / "part-0.arrow", web / CACHES[0])
    assert len(fmsdata.ShardReader(web).counts.shards) == 3


def test_a_run_that_was_saved_with_a_cache_as_a_shard_says_what_changed(web: Path) -> None:
    renamed = copy(web / "part-0.arrow", web / "other.arrow")
    make = maker(web.parent, sources={"web": {"weight": 1}})
    loader = make(0, 1)
    list(islice(loader, 3))
    state = loader.state_dict()
    loader.close()
    renamed.rename(web / CACHES[0])
    with pytest.raises(StateError, match="the shards of source 'web' changed: 4 shards"):
        maker(web.parent, sources={"web": {"weight": 1}})(0, 1).load_state_dict(state)


COPIES = [
    "part-0 (1).arrow",
    "part-0(2).arrow",
    "part-0 copy.arrow",
    "part-0 - Copy.arrow",
    "part-0.copy.arrow",
    "part-0.bak.arrow",
    "copy-of-part-0.arrow",
]


@pytest.mark.parametrize("name", COPIES)
def test_copies_by_their_names_are_noticed(web: Path, name: str) -> None:
    copy(web / "part-0.arrow", web / name)
    (note,) = notes(web)
    assert f"1 of 4 files look like copies of others ({name} has the same counts as part-0.arrow)" in note


def test_a_folder_that_was_copied_into_a_source_is_noticed(web: Path, caplog: pytest.LogCaptureFixture) -> None:
    for path in list(web.iterdir()):
        copy(path, web / "backup" / path.name)
    with caplog.at_level(logging.WARNING, "fmsdata"):
        (note,) = notes(web)
    assert "3 of 6 files look like copies of others (backup/part-0.arrow" in note
    assert note in caplog.text
    assert any(note in warning for warning in plan_of(web.parent)["warnings"])


@pytest.mark.parametrize("link", ["hard", "soft", "folder"])
def test_one_file_under_two_names_is_noticed(web: Path, link: str) -> None:
    if link == "hard":
        os.link(web / "part-1.arrow", web / "zzz.arrow")
    elif link == "soft":
        (web / "zzz.arrow").symlink_to(web / "part-1.arrow")
    else:
        write_source(web.parent / "elsewhere", [[1, 2, 3]] * 9, shards=1)
        for name in ("a", "zzz"):
            (web / name).symlink_to(web.parent / "elsewhere")
    (note,) = notes(web)
    assert "1 of " in note
    assert "is the same file as" in note


def test_shards_of_equal_size_are_no_copies(tmp_path: Path) -> None:
    """Packed rows of one length, the same number in each shard, in folders with the same names."""
    rng = np.random.default_rng(0)
    for folder in ("lang=en", "lang=de", "lang=fr"):
        write_source(tmp_path / "rows" / folder, [rng.integers(0, 99, 64) for _ in range(40)], shards=4)
    assert notes(tmp_path / "rows") == ()


def test_different_shards_with_the_same_names_are_no_copies(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for folder in ("2023", "2024"):
        write_source(tmp_path / "news" / folder, documents(rng, 200, shortest=1))
    assert notes(tmp_path / "news") == ()


def test_a_link_that_leads_nowhere_is_still_an_error(web: Path) -> None:
    (web / "zzz.arrow").symlink_to(web / "gone.arrow")
    with pytest.raises(DataError, match=r"zzz\.arrow"):
        fmsdata.ShardReader(web)


def test_sources_that_are_copies_or_inside_one_another_are_warned_about(web: Path) -> None:
    shutil.copytree(web, web.parent / "web2")
    warnings = "\n".join(plan_of(web.parent)["warnings"])
    assert "sources 'web' and 'web2' have the same shards" in warnings
    inside = {"all": {"weight": 1, "path": "."}, "web": {"weight": 1}}
    assert "is a folder inside another source" in "\n".join(plan_of(web.parent, sources=inside)["warnings"])
