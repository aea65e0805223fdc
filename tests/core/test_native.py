"""The compiled kernel gives what the Python beside it gives, to the last bit, and bad arguments are errors."""

import hashlib
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fmsdata
from fmsdata.core import native
from fmsdata.core.chunk import Chunk
from fmsdata.core.keys import keys_of, offsets
from fmsdata.core.lane import Lane
from fmsdata.core.memory import MappedTokens
from fmsdata.core.native import Kernel
from fmsdata.core.spans import BEGINS, BUFFER, COLUMNS, LENGTH, START, TAIL, Buffer
from fmsdata.errors import DataError, FmsdataError
from fmsdata.stages.mixture.iterator import _merge
from fmsdata.stages.pack.token_run import TokenRun
from fmsdata.tasks.batch import Batch, collect
from tests.helpers import documents, write_source

SEED = st.integers(0, 1 << 32)
RECORDED = (2, "2ef38a9b3de5f745")  # the version of the kernel, and a digest of its source


@pytest.fixture(autouse=True)
def kernel() -> Kernel:
    if native.kernel is None and shutil.which("cc") is None:
        pytest.skip("no C compiler: there is no kernel to test")
    assert native.kernel is not None, "there is a C compiler, but the kernel was not built, or FMSDATA_PURE is set"
    return native.kernel


def both(make: Any) -> tuple[Any, Any]:
    """What a function returns with the kernel, and without."""
    compiled = make()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "kernel", None)
        return compiled, make()


def some_chunk(seed: int, *, single: bool = False, buffers: list[Buffer] | None = None) -> Chunk:
    """Items of one span each, or of several, in buffers that chunks may share."""
    rng = np.random.default_rng(seed)
    buffers = buffers or [Buffer(rng.integers(0, 99, 50).astype(np.uint16)) for _ in range(int(rng.integers(1, 5)))]
    items = int(rng.integers(1, 12))
    first = offsets(np.ones(items, np.int64) if single else rng.integers(1, 4, items))
    spans = rng.integers(0, 20, (int(first[-1]), COLUMNS))
    spans[:, BUFFER] = rng.integers(0, len(buffers), len(spans))
    spans[:, LENGTH] = rng.integers(1, 20, len(spans))
    spans[:, BEGINS] = rng.integers(0, 8, len(spans))
    spans[:, TAIL] = rng.integers(0, 2, len(spans)) * 7
    return Chunk(buffers, spans, first)


def content(chunk: Chunk) -> tuple[Any, ...]:
    """The spans with what they refer to, whatever the places of their buffers are."""
    others = np.delete(chunk.spans, BUFFER, axis=1).tolist()
    return [id(chunk.buffers[i]) for i in chunk.spans[:, BUFFER]], others, chunk.first.tolist()


@given(
    parts=st.lists(st.integers(-(1 << 70), 1 << 70) | st.text(max_size=80), max_size=4),
    numbers=st.lists(st.integers(-(1 << 63), (1 << 63) - 1)),
)
def test_keys(parts: list[int | str], numbers: list[int]) -> None:
    compiled, python = both(lambda: keys_of(tuple(parts), np.array(numbers, np.int64)).tolist())
    assert compiled == python


@given(seeds=st.lists(SEED, min_size=1, max_size=5))
def test_chunks_are_joined(seeds: list[int]) -> None:
    shared = some_chunk(0).buffers
    chunks = [some_chunk(seed, buffers=shared if seed % 2 else None) for seed in seeds]
    compiled, python = both(lambda: content(Chunk.join(chunks)))
    assert compiled == python


@given(seeds=st.lists(SEED, min_size=1, max_size=70), single=st.booleans())
def test_sources_are_merged(seeds: list[int], single: bool) -> None:
    """Also more sources than the kernel takes, and items that have several spans."""
    parts = [some_chunk(seed, single=single) for seed in seeds]
    due = [
        np.sort(np.random.default_rng(seed).integers(0, 9, len(part)) / 3)
        for seed, part in zip(seeds, parts, strict=True)
    ]
    merged, which = _merge(parts, due)
    compiled, python = both(lambda: [(content(chunk), which.tolist()) for chunk, which in [_merge(parts, due)]])
    assert compiled == python
    assert (which.tolist(), len(merged)) == (compiled[0][1], sum(map(len, parts)))


@given(seed=SEED, data=st.data())
def test_runs_are_cut(seed: int, data: st.DataObject) -> None:
    run = TokenRun(some_chunk(seed))
    positions = data.draw(st.lists(st.integers(0, len(run)), min_size=1, max_size=9, unique=True).map(sorted))
    compiled, python = both(lambda: content(run.cut(np.array(positions))))
    assert compiled == python


@pytest.mark.parametrize("dtype", ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", ">u4", ">i2"])
@given(lines=st.integers(1, 5), length=st.integers(1, 9), extra=st.integers(0, 1), seed=SEED)
def test_lines_are_widened(dtype: str, lines: int, length: int, extra: int, seed: int) -> None:
    bits = np.random.default_rng(seed).integers(0, 256, (lines, (length + extra) * np.dtype(dtype).itemsize), np.uint8)
    tokens = bits.view(dtype)
    compiled, python = both(lambda: Batch(tokens, [0] * lines, extra, lambda: some_chunk(0)).shifted())
    for mine, theirs, part in zip(compiled, python, [tokens[:, :length], tokens[:, extra:]], strict=True):
        assert mine.dtype == torch.int64
        assert torch.equal(mine, theirs)
        assert mine.tolist() == part.astype(np.int64).tolist()


SETTINGS: list[dict[str, Any]] = [
    {},
    {"documents.eos": 0},
    {"documents.bos": 1, "documents.eos": 0},
    {"documents.strip": [0, 3]},
    {"documents.min_length": 9},
    {"pack.mode": "pad", "pack.pad": 0},
    {"pack.mode": "bestfit", "pack.bol": 1, "pack.pad": 0},
    {"shuffle.window": 3},
    {"sources.a.max_epochs": 2},
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sources in all layouts, with types that differ, and with few and many documents."""
    root, rng = tmp_path_factory.mktemp("corpus"), np.random.default_rng(0)
    write_source(root / "a", documents(rng, 300))
    write_source(root / "b", documents(rng, 25), layout="batch")
    write_source(root / "c", documents(rng, 70, longest=90), dtype=np.uint32, stream=True)
    return root


def batches(root: Path, overrides: dict[str, Any], lanes: int, count: int, states: list[Any]) -> list[Any]:
    """The next batches after the last of these states, to which the state behind them is added."""
    config = {
        "path": str(root),
        "sources": {"a": {"weight": 3}, "b": {"weight": 1}, "c": {"weight": 2}},
        "pack": {"seq_len": 16},
        "lanes": lanes,
        "loader": {"batch_size": 2, "prefetch": lanes % 2, "outputs": ["provenance"]},
    }
    loader = fmsdata.build_loader(config, overrides, rank=0, world_size=1)
    if states:
        loader.load_state_dict(states[-1])
    names = ("input_ids", "labels")
    found = [[*(batch[name].tolist() for name in names), batch["provenance"]] for batch in islice(loader, count)]
    states.append(loader.state_dict())
    loader.close()
    return found


@pytest.mark.parametrize("overrides", SETTINGS, ids=str)
@settings(max_examples=8, deadline=None)
@given(lanes=st.integers(1, 9), steps=st.lists(st.integers(1, 30), min_size=1, max_size=3))
def test_streams_and_states_are_the_same(root: Path, overrides: dict[str, Any], lanes: int, steps: list[int]) -> None:
    """Of a run that is resumed, without the kernel, with it, and with it now and then."""

    def run(kernels: list[Kernel | None]) -> tuple[list[Any], list[Any]]:
        states: list[Any] = []
        found: list[Any] = []
        with pytest.MonkeyPatch.context() as patch:
            for count, kernel in zip(steps, kernels, strict=True):
                patch.setattr(native, "kernel", kernel)
                found += batches(root, overrides, lanes, count, states)
        return found, states

    times, kernel = len(steps), native.kernel
    expected = run([None] * times)
    assert run([kernel] * times) == expected
    assert run([kernel if i % 2 else None for i in range(times)]) == expected


@pytest.mark.parametrize("pure", [False, True])
def test_documents_beyond_the_end_of_a_file_are_an_error(
    root: Path, pure: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if pure:
        monkeypatch.setattr(native, "kernel", None)
    chunk = fmsdata.ShardReader(root / "a").open(Lane()).read()
    for value in (-1, 1 << 40, (1 << 63) - 1):
        spans = chunk.spans.copy()
        spans[0, START] = value
        with pytest.raises(DataError, match="damaged"):
            collect([(Chunk(chunk.buffers, spans[:1], chunk.first[:2]), 0)], 0)


ARGUMENTS = {
    "keys_of": "bna",
    "in_order": "bnnnnnAAiiinn",
    "join": "ALn",
    "merge": "ALAnn",
    "cut": "nnnn",
    "last_tokens": "Ltnn",
    "table": "Ltnn",
    "locate": "Rits",
    "copy": "ebs",
    "start_copy": "ensAi",
    "end_copy": "b",
    "widen": "nnni",
}
INTS = st.lists(st.integers(-3, 9) | st.sampled_from([1 << 40, -(1 << 63), (1 << 63) - 1]), max_size=16).map(
    lambda numbers: np.array(numbers, np.int64)
)
BUFFERS = st.lists(st.builds(Buffer, INTS), max_size=3)
KINDS: dict[str, st.SearchStrategy[Any]] = {
    "b": st.binary(max_size=40),
    "n": INTS,
    "a": INTS.map(lambda ints: ints.view(np.uint64)),
    "A": st.lists(INTS, max_size=3),
    "i": st.integers(-2, 9) | st.just(1 << 80),
    "L": st.lists(st.builds(Buffer, INTS), max_size=3)
    | st.lists(st.lists(st.builds(Buffer, INTS), max_size=2), max_size=3),
    "R": st.lists(st.tuples(SEED.map(some_chunk), st.integers(-2, 9)), max_size=3),
    "t": st.just(MappedTokens),
    "s": st.builds(set),
    "e": st.just(b""),
}


@pytest.mark.parametrize("name", ARGUMENTS)
@settings(max_examples=300)
@given(data=st.data())
def test_bad_arguments_are_errors(name: str, data: st.DataObject) -> None:
    """Of the right kinds and of others, of any sizes, too many and too few: an exception or a result, but no crash."""
    kinds = data.draw(st.just(ARGUMENTS[name]) | st.text("".join(KINDS), max_size=14))
    arguments = [data.draw(KINDS[kind]) for kind in kinds]
    with suppress(TypeError, ValueError, IndexError, OverflowError, BufferError, AttributeError, FmsdataError):
        getattr(native.kernel, name)(*arguments)


def test_a_copy_that_was_started_is_not_waited_for_in_a_fork(kernel: Kernel) -> None:
    """Neither when it is asked for there, nor when it is dropped there."""
    source, out = np.arange(1 << 22), np.zeros(1 << 22, np.int64)
    pieces = np.array([[source.ctypes.data, source.nbytes]])
    started = kernel.start_copy(pieces, out, set(), [], 0)
    child = os.fork()
    if not child:
        ended = kernel.end_copy(started)
        del started
        os._exit(ended)
    assert os.waitpid(child, 0)[1] == 0, "it said that the copy was whole, or it did not end"
    assert kernel.end_copy(started)
    assert kernel.end_copy(started), "it may be asked for again"
    assert (out == source).all()


def test_each_thread_that_waits_for_a_copy_waits_until_it_is_whole(kernel: Kernel) -> None:
    source = np.arange(1 << 22)
    pieces = np.array([[source.ctypes.data, source.nbytes]])
    for _ in range(5):
        out = np.zeros(1 << 22, np.int64)
        started = kernel.start_copy(pieces, out, set(), [], 0)
        with ThreadPoolExecutor(4) as threads:
            ended = [threads.submit(lambda: (kernel.end_copy(started), out[-1] == source[-1])) for _ in range(4)]  # noqa: B023
        assert [each.result() for each in ended] == [(True, True)] * 4


def test_a_table_of_spans_that_is_not_whole_is_an_error(kernel: Kernel) -> None:
    for bad in (0, 1):
        spans: list[Any] = [np.zeros((2, COLUMNS), np.int64), np.zeros((2, COLUMNS), np.int64)]
        spans[bad] = np.zeros(COLUMNS + 1, np.int64)
        with pytest.raises(ValueError, match="no spans"):
            kernel.join(spans, [some_chunk(0).buffers] * 2, np.empty((4, COLUMNS), np.int64))


class Sevens(fmsdata.CausalLM):
    """A task of the user's own, which changes the tokens first."""

    def __call__(self, batch: Batch) -> dict[str, torch.Tensor]:
        return super().__call__(replace(batch, tokens=np.full_like(batch.tokens, 7)))


class SevensInPlace(fmsdata.CausalLM):
    def __call__(self, batch: Batch) -> dict[str, torch.Tensor]:
        batch.tokens[:] = 7
        return super().__call__(batch)


@pytest.mark.parametrize("task", [Sevens, SevensInPlace])
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("pure", [False, True])
def test_a_subclass_of_a_task_may_change_the_tokens(
    root: Path, task: type[fmsdata.CausalLM], workers: int, pure: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if pure:
        monkeypatch.setattr(native, "kernel", None)
    data = fmsdata.Rescalable(fmsdata.Pack(fmsdata.ShardReader(root / "a"), seq_len=17), lanes=2)
    loader = fmsdata.StatefulDataLoader(data, batch_size=2, num_workers=workers, rank=0, world_size=1, task=task())
    for batch in islice(loader, 30):
        assert {*batch["input_ids"].unique().tolist(), *batch["labels"].unique().tolist()} == {7}
    loader.close()


class Types(fmsdata.CausalLM):
    """Also returns the type of the tokens."""

    def __call__(self, batch: Batch) -> dict[str, Any]:
        return {**super().__call__(batch), "dtype": str(batch.tokens.dtype)}


@pytest.mark.parametrize(
    ("dtype", "eos", "expected"),
    [
        (np.int32, 128_001, "int32"),
        (np.int16, 32_000, "int16"),
        (np.uint16, 65_535, "uint16"),
        (np.uint16, 65_536, "uint32"),
    ],
)
def test_tasks_get_tokens_in_the_type_of_the_shards(tmp_path: Path, dtype: Any, eos: int, expected: str) -> None:
    """Or in a wider one, if a delimiter needs it."""
    write_source(tmp_path / "a", documents(np.random.default_rng(0), 50), dtype=dtype)

    def types() -> set[str]:
        docs = fmsdata.Delimit(fmsdata.ShardReader(tmp_path / "a"), eos=eos)
        data = fmsdata.Rescalable(fmsdata.Pack(docs, seq_len=64), lanes=2)
        loader = fmsdata.StatefulDataLoader(data, batch_size=2, rank=0, world_size=1, task=Types(), prefetch=0)
        return {batch["dtype"] for batch in islice(loader, 20)}

    assert both(types) == ({expected}, {expected})


def test_a_changed_kernel_has_another_version() -> None:
    """A kernel that was built before is then not used."""
    digest = hashlib.sha256(Path(native.__file__).with_name("_native.c").read_bytes()).hexdigest()[:16]
    assert (native.VERSION, digest) == RECORDED, "raise VERSION in native.py and _native.c, and record both here"


def test_without_the_kernel_nothing_is_compiled() -> None:
    """`FMSDATA_PURE` is for all of a process."""
    code = "from fmsdata.core import native; print(native.kernel)"
    printed = subprocess.check_output([sys.executable, "-c", code], env=os.environ | {"FMSDATA_PURE": "1"}, text=True)
    assert printed == "None\n"
