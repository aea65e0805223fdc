"""Text from, and shards to, an object store: the same bytes as on a local disk."""

import threading
import time
from pathlib import Path
from typing import Any

import fsspec
import pytest

from fmsdata.corpus.convert import convert_corpus
from fmsdata.corpus.prepare import lock
from fmsdata.corpus.verify import verify_corpus
from fmsdata.errors import ConfigError, DataError
from fmsdata.prepare import prepare_corpus
from fmsdata.storage.location import Location
from tests.corpus.prepare.texts import SMALL, tree, write_texts
from tests.programs.slow_prepare import Slow
from tests.servers.object_store import ObjectStore


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "BEAT_SECONDS", 0.2)
    monkeypatch.setattr(lock, "SILENCE_SECONDS", 1.0)
    monkeypatch.setattr(lock, "SETTLING_SECONDS", 0.1)


def stored(store: ObjectStore, url: str) -> dict[str, bytes]:
    """All objects below a URL."""
    files = fsspec.filesystem("s3", **store.options, use_listings_cache=False, skip_instance_cache=True)
    root = url.removeprefix("s3://")
    return {path.removeprefix(f"{root}/"): files.cat_file(path) for path in files.find(root)}


def test_text_in_an_object_store_becomes_a_corpus_there(object_store: ObjectStore, tmp_path: Path) -> None:
    write_texts(tmp_path / "in")
    options: dict[str, Any] = {**SMALL, "unit_bytes": 1500, "validation": 0.2, "deduplicate": True}
    here = prepare_corpus(tmp_path / "in", tmp_path / "here", "bytes", processes=1, **options)
    bucket = object_store.bucket("prepare")
    object_store.upload(tmp_path / "in", f"{bucket}/in")
    source, output = (Location(f"{bucket}/{name}", object_store.options) for name in ("in", "out"))
    there = prepare_corpus(source, output, "bytes", processes=2, **options)
    assert (there.tokens, there.bad, there.empty, there.duplicates) == (here.tokens, 0, here.empty, here.duplicates)

    def without_manifest(files: dict[str, bytes]) -> dict[str, bytes]:  # versions of input files differ
        return {name: data for name, data in files.items() if not name.endswith("fmsdata-prepare.json")}

    assert without_manifest(stored(object_store, f"{bucket}/out")) == without_manifest(tree(tmp_path / "here"))
    assert prepare_corpus(source, output, "bytes", processes=1, **options).continued
    report = verify_corpus(output, vocabulary=256)
    assert report.problems == []
    converted = convert_corpus(output / "web", tmp_path / "batches", layout="batch")
    assert converted.tokens == sum(source.tokens for source in here.sources if source.name == "web")
    problems = [problem.problem for problem in verify_corpus(source).problems]
    assert len(problems) == 5  # files of another kind than those before them in their source
    assert all("like the shards before it in source" in problem for problem in problems)


def test_a_second_run_to_an_object_store_is_refused_while_the_first_lives(
    object_store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_texts(tmp_path / "in")
    bucket = object_store.bucket("locked")
    output = Location(f"{bucket}/out", object_store.options)
    goes, refused = threading.Event(), []

    def wait(self: Slow, texts: list[str]) -> list[list[int]]:
        goes.wait(30)
        return [list(text.encode()) for text in texts]

    monkeypatch.setattr(Slow, "encode_batch", wait)

    def run() -> None:
        try:
            prepare_corpus(tmp_path / "in", output, Slow(0), processes=1, **SMALL)
        except DataError as error:
            refused.append(error)

    first = threading.Thread(target=run)
    first.start()
    while not output.alone().is_dir():
        time.sleep(0.05)
    with pytest.raises(ConfigError, match="another run of `fmsdata prepare` writes there"):
        prepare_corpus(tmp_path / "in", output, Slow(0), processes=1, **SMALL)
    goes.set()
    first.join()
    assert not refused
    (output / ".fmsdata-prepare" / lock.IN_USE).write_bytes(b'["killed", 3]')
    assert prepare_corpus(tmp_path / "in", output, Slow(0), processes=1, **SMALL).continued
