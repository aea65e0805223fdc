"""A source can be a folder, a pattern, or a list of files; which files it reads is part of a run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fmsdata
from fmsdata import testing
from fmsdata.cli.outlook import outlook
from fmsdata.cli.run import Run
from fmsdata.config.build import build_data
from fmsdata.config.read import read_config
from fmsdata.corpus.index import write_index
from fmsdata.corpus.selection import locate
from fmsdata.errors import ConfigError, CountsError, DataError, StateError
from tests.helpers import CONFIG, documents, maker, write_source


@pytest.fixture
def web(tmp_path: Path) -> Path:
    """Six shards, one of them in a folder below."""
    folder = write_source(tmp_path / "web", documents(np.random.default_rng(1), 90, shortest=1), shards=5)
    write_source(folder / "more", documents(np.random.default_rng(2), 9, shortest=1), shards=1)
    return folder


def shards(path: Any, **options: Any) -> tuple[str, ...]:
    return tuple(fmsdata.ShardReader(path, **options).counts.shards)


def test_a_source_is_a_folder_a_pattern_or_a_list(web: Path) -> None:
    assert len(shards(web)) == 6
    assert shards(f"{web}/part-[12].arrow") == ("part-1.arrow", "part-2.arrow")
    assert shards(web, files="*.arrow") == tuple(f"part-{i}.arrow" for i in range(5))
    assert shards(web, files="**/*.arrow") == shards(web) == shards(f"{web}/**")
    assert shards(web, files=["*/part-0.arrow", "part-3.arrow"]) == ("more/part-0.arrow", "part-3.arrow")
    assert shards([web / "part-3.arrow", str(web / "more/part-0.arrow")]) == ("more/part-0.arrow", "part-3.arrow")
    assert shards([web / "part-3.arrow"]) == ("part-3.arrow",)


def test_the_order_of_files_does_not_matter(web: Path) -> None:
    names = ["part-0.arrow", "part-3.arrow", "more/part-0.arrow"]
    one, two = (fmsdata.ShardReader(web, files=order) for order in (names, names[::-1]))
    assert one.describe() == two.describe()
    by_list = fmsdata.ShardReader([web / name for name in names])
    assert by_list.counts.digest == one.counts.digest


def test_files_by_name_do_not_list_their_folder(web: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("listed")

    monkeypatch.setattr("fmsdata.corpus.listing.list_files", fail)
    monkeypatch.setattr("fmsdata.corpus.listing.list_ids", fail)
    assert shards(["/", web / "part-3.arrow"][1:]) == ("part-3.arrow",)


@pytest.mark.parametrize(
    ("files", "error", "message"),
    [
        (["part-0.arrow", "./part-0.arrow"], ConfigError, "'part-0.arrow' twice"),
        (["part-0.arrow", "part-*.arrow"], ConfigError, "part-0.arrow is selected twice"),
        (["/etc/passwd"], ConfigError, "relative to the folder"),
        (["../web/part-0.arrow"], ConfigError, "relative to the folder"),
        ([], ConfigError, "must be a pattern"),
        (["part-9.arrow"], DataError, "no such file"),
        (["part-9*"], DataError, r"no file matches 'part-9\*'; it has more/part-0.arrow"),
        (["notes.csv"], DataError, "unknown format"),
    ],
)
def test_files_that_cannot_be_meant_are_errors(web: Path, files: Sequence[str], error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        fmsdata.ShardReader(web, files=files)


def test_a_path_that_is_no_path_is_an_error(web: Path) -> None:
    for path in ([], 5, [""], [5], None):
        with pytest.raises(ConfigError, match="path is"):
            fmsdata.ShardReader(path)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="already selects files"):
        fmsdata.ShardReader(f"{web}/*.arrow", files="a*")
    with pytest.raises(ConfigError, match="no common folder"):
        locate(["s3://one/a.parquet", "s3://two/a.parquet"])


def test_a_folder_that_is_named_like_a_pattern_is_a_folder(tmp_path: Path) -> None:
    folder = write_source(tmp_path / "web[1]", documents(np.random.default_rng(1), 9, shortest=1))
    assert len(shards(folder)) == 3


def test_a_split_of_one_folder_is_two_sources_that_share_no_document(web: Path, tmp_path: Path) -> None:
    sources = {
        "train": {"weight": 1, "path": "web", "files": ["part-[1-4].arrow", "more/*"]},
        "validation": {"weight": 1, "path": "web", "files": "part-0.arrow"},
    }
    make = maker(tmp_path, sources=sources)
    files = {"train": ["part-[1-4].arrow", "more/*"], "validation": ["part-0.arrow"]}
    stored = testing.stored_documents(dict.fromkeys(sources, web), files=files)
    seen = {(shard, number): source for source, shard, number in stored}
    assert len(seen) == len(stored) == 99
    testing.check_exactly_once(make, stored=stored, world_sizes=[1, 3], steps=20)
    data = build_data(read_config({**CONFIG, "path": str(tmp_path)}, {"sources": sources}))
    mixture: Any = data.lines.children()["below"].children()["below"].children()["below"]
    train, validation = (mixture.sources[name].counts for name in ("train", "validation"))
    assert train.digest != validation.digest
    assert not set(train.shards) & set(validation.shards)


def test_sources_that_share_files_are_warned_about(web: Path, tmp_path: Path) -> None:
    def warnings(**sources: Any) -> str:
        settings = {name: {"weight": 1, "path": "web", "files": files} for name, files in sources.items()}
        config = read_config({**CONFIG, "path": str(tmp_path)}, {"sources": settings, "lanes": 2})
        return "\n".join(outlook(Run.of_config(config), None, 1)["warnings"])

    shared = warnings(one="part-[12].arrow", two="part-[23].arrow")
    assert f"'one' and 'two' both read 1 file, such as {web}/part-2.arrow" in shared
    assert "both read" not in warnings(one="part-[12].arrow", two="part-[03].arrow")


def test_a_pattern_in_the_path_of_a_source_says_where_it_belongs(web: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"sources\.web\.path: 'web/\*\.arrow' is a pattern; .* use `files`"):
        maker(tmp_path, sources={"web": {"weight": 1, "path": "web/*.arrow"}})


def test_other_files_cannot_resume_a_run_but_another_way_to_name_them_can(web: Path, tmp_path: Path) -> None:
    def loader(files: Any) -> fmsdata.StatefulDataLoader:
        return maker(tmp_path, sources={"web": {"weight": 1, "files": files}})(0, 1)

    first = loader("part-[12].arrow")
    next(iter(first))
    state = first.state_dict()
    loader(["part-1.arrow", "part-2.arrow"]).load_state_dict(state)
    with pytest.raises(StateError, match="shards of source 'web' changed"):
        loader("part-[13].arrow").load_state_dict(state)


def test_selected_files_have_the_counts_of_the_csv(web: Path) -> None:
    write_index(web.parent)
    reader = fmsdata.ShardReader(web, files="part-[12].arrow")
    assert reader.counts.csv_root == str(web.parent)
    assert reader.size() == fmsdata.ShardReader(web, files=["part-1.arrow", "part-2.arrow"]).size()
    csv = web.parent / "meta/counts.csv"
    csv.write_text(csv.read_text().replace("/web/part-1.arrow,18", "/web/part-1.arrow,19"))
    with pytest.raises(CountsError, match=r"counts say 19 documents in part-1\.arrow"):
        next(iter(fmsdata.ShardReader(web, files="part-1.arrow")))
    next(iter(fmsdata.ShardReader(web, files="part-2.arrow")))
