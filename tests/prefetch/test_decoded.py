"""Compressed shards on a local disk: decoded once for all lanes, within a budget, and the same stream."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import fmsdata
from fmsdata.core.blocks import Block
from fmsdata.errors import FmsdataWarning
from fmsdata.formats.base import Decoded
from fmsdata.prefetch import decoded as module
from fmsdata.prefetch.decoded import DecodedBatches
from tests.helpers import documents

BATCHES = 4


def write(folder: Path, compression: Any, *, nulls: bool = False) -> Path:
    folder.mkdir(parents=True)
    rows: list[list[int] | None] = [each.tolist() for each in documents(np.random.default_rng(0), 2000, 200, 1)]
    if nulls:
        rows[::7] = [None] * len(rows[::7])
    table = pa.table({"tokens": pa.array(rows, pa.list_(pa.uint16()))})
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_file(str(folder / "part-0.arrow"), table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=2000 // BATCHES)
    return folder


def stream(folder: Path, batches: int, storage: fmsdata.Storage | None = None) -> list[Any]:
    return list(read(folder, batches, storage))


def read(folder: Path, batches: int, storage: fmsdata.Storage | None) -> Iterator[Any]:
    documents = fmsdata.Delimit(fmsdata.ShardReader(folder, name="web", storage=storage, block_tokens=2000), eos=0)
    lines = fmsdata.Shuffle(fmsdata.Pack(documents, seq_len=64), window=24)
    data = fmsdata.Rescalable(lines, lanes=24)
    loader = fmsdata.StatefulDataLoader(data, batch_size=12, rank=0, world_size=1, prefetch=0, outputs=["provenance"])
    for _, batch in zip(range(batches), loader, strict=False):
        yield batch["input_ids"].tolist(), batch["provenance"]


@pytest.mark.parametrize("budget", [0, 1, 40_000, 1 << 28])
@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_the_stream_does_not_depend_on_compression_or_budget(tmp_path: Path, compression: str, budget: int) -> None:
    plain = stream(write(tmp_path / "plain", None), 80)
    assert stream(write(tmp_path / compression, compression), 80, fmsdata.Storage(prefetch_bytes=budget)) == plain


def test_null_rows_are_empty_documents_at_any_budget(tmp_path: Path) -> None:
    folder = write(tmp_path / "web", "lz4", nulls=True)
    assert stream(folder, 40, fmsdata.Storage(prefetch_bytes=1)) == stream(folder, 40)
    assert stream(write(tmp_path / "plain", None, nulls=True), 40) == stream(folder, 40)


def test_lanes_share_what_is_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "web", "lz4")
    calls = []
    real = pa.ipc.read_record_batch

    def count(*arguments: Any) -> Any:
        calls.append(arguments)
        return real(*arguments)

    monkeypatch.setattr(pa.ipc, "read_record_batch", count)
    stream(folder, 80)
    assert len(calls) == BATCHES


def test_what_is_kept_stays_within_the_budget() -> None:
    batches = DecodedBatches(1000)

    def decode() -> Decoded:
        return Decoded(np.zeros(100, np.uint16), np.arange(3), 200)

    for key in range(20):
        batches.get(key, decode)
    assert batches._batch_bytes == 400
    array = np.arange(50, dtype=np.uint16)
    block = Block([array], np.zeros(1, np.int64), np.zeros(1, np.int64), np.array([50]))
    lent = [batches.lend(block, lambda: block).arrays[0] for _ in range(20)]
    assert batches._copies.bytes == 500
    assert all(tokens[3:5].tolist() == [3, 4] for tokens in lent)  # those that were dropped are read again
    assert batches._copies.bytes == 500
    del lent
    batches.lend(block, lambda: block)
    assert batches._copies.bytes <= 200


def test_a_budget_that_is_far_too_small_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WARN_BYTES", 1 << 20)
    with pytest.warns(FmsdataWarning, match="prefetch_bytes is 1: raise it, or write the shards without compression"):
        stream(write(tmp_path / "web", "lz4"), 80, fmsdata.Storage(prefetch_bytes=1))


MEMORY = """
import itertools, resource, sys, fmsdata
lines = fmsdata.Shuffle(fmsdata.Pack(fmsdata.ShardReader(sys.argv[1]), seq_len=512), window=8)
data = fmsdata.Rescalable(lines, lanes=96)
loader = fmsdata.StatefulDataLoader(data, batch_size=96, rank=0, world_size=1, prefetch=0)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
list(itertools.islice(loader, 2))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_memory_does_not_grow_with_the_lanes(tmp_path: Path) -> None:
    """Each lane would otherwise hold some record batches of 6 MB as a whole."""
    lengths = np.random.default_rng(0).integers(100, 600, 20_000)
    values = pa.array(np.random.default_rng(1).integers(10, 50_000, lengths.sum()).astype(np.uint16))
    ends: Any = pa.array(np.append(0, np.cumsum(lengths)).astype(np.int32))
    tokens: Any = pa.ListArray.from_arrays(ends, values)
    table = pa.table({"tokens": tokens})
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    with pa.ipc.new_file(str(tmp_path / "part-0.arrow"), table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=10_000)
    command = [sys.executable, "-c", MEMORY, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert int(done.stdout) < 300_000  # KiB
