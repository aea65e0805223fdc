"""Check the laws of the canonical stream on any pipeline, in your own tests.

Each function takes a factory of loaders, `make(rank, world_size)`, or a stage. It raises
`LawBroken`, which says what is wrong. Where a law is about documents, build the loaders with
`outputs=["provenance", "epochs"]`.

    def make(rank, world_size):
        outputs = {"loader.outputs": ["provenance", "epochs"]}
        return fmsdata.build_loader("my.yaml", outputs, rank=rank, world_size=world_size)

    def test_the_stream_is_the_same_at_any_world_size():
        fmsdata.testing.check_same_stream(make, world_sizes=[2, 3, 8], samples=480)
"""

import hashlib
import heapq
import io
import json
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from fmsdata.core.chunk import Item
from fmsdata.core.lane import Lane
from fmsdata.core.spans import Span
from fmsdata.core.stage import Stage
from fmsdata.core.state import State
from fmsdata.corpus.listing import find_shards
from fmsdata.errors import DataError
from fmsdata.loader.loader import StatefulDataLoader
from fmsdata.planning.schedule import Turns
from fmsdata.storage.local import Recent
from fmsdata.storage.location import Location
from fmsdata.tasks.base import IGNORED

MakeLoader: TypeAlias = Callable[[int, int], StatefulDataLoader]
Document: TypeAlias = tuple[str, str, int]  # source, shard, number in the shard
Stored: TypeAlias = Mapping[Document, npt.NDArray[np.int64]]
Progress: TypeAlias = Callable[[int], None]  # is called with the number of samples checked since the last call
INSERTED_BETWEEN = 4  # EOS, EOL, BOL and BOS can stand between two documents
OPEN_SHARDS = 16
RECENT_BATCHES, REMOTE_BUFFER = 4, 1 << 20  # of a remote shard


class LawBroken(AssertionError):
    """A law does not hold."""


class Incomplete(LawBroken):
    """Documents did not come within the allowed samples: they are lost, or would come later."""


def no_progress(samples: int) -> None:
    """Report progress to no one."""


def check_same_stream(
    make: MakeLoader,
    *,
    world_sizes: Iterable[int],
    samples: int,
    variants: Iterable[MakeLoader] = (),
    progress: Progress = no_progress,
) -> None:
    """Law 1: at any of these world sizes, sample `g` is the same, and rank `g mod W` hands it out.

    The world sizes must divide the number of lanes. `variants` are other factories that must give
    the same stream, for example with another batch size.
    """
    reference = [sample.digest for sample in islice(_samples(make, 1, progress), samples)]
    for number, factory in enumerate([make, *variants]):
        for world_size in [1, *world_sizes]:
            for g, sample in enumerate(islice(_samples(factory, world_size, progress), samples)):
                if sample.digest != reference[g]:
                    name = f"variant {number} " if number else ""
                    raise LawBroken(
                        f"{name}at world size {world_size}, sample {g} differs from the sample read first, "
                        f"at world size 1; it holds {sample}"
                    )


def check_restore_anywhere(make: MakeLoader, *, steps: int, world_size: int = 1, ahead: int = 3) -> None:
    """Laws 3 and 4: restored after any step, a loader continues the same, also the second time."""
    for rank in range(world_size):
        loader = make(rank, world_size)
        batches = _endlessly(loader)
        states, seen = [_through_json(loader.state_dict())], []
        for _ in range(steps + ahead):
            seen.append(_rows(next(batches)))
            states.append(_through_json(loader.state_dict()))
        shape = _shape(states[0])
        repeated = make(rank, world_size)
        for step in range(steps):
            if _shape(states[step]) != shape:
                raise LawBroken(f"the state after step {step} has a different shape than the first")
            restored = make(rank, world_size)
            restored.load_state_dict(states[step])
            if _through_json(restored.state_dict()) != states[step]:
                raise LawBroken(f"the state after step {step} changes when it is restored")
            if [_rows(batch) for batch in islice(_endlessly(restored), ahead)] != seen[step : step + ahead]:
                raise LawBroken(f"restored after step {step}, rank {rank} of {world_size} continues differently")
            repeated.load_state_dict(_through_json(repeated.state_dict()))
            if _rows(next(iter(repeated))) != seen[step]:
                raise LawBroken(f"restored after every single step, step {step} is different")


def check_exactly_once(
    make: MakeLoader,
    *,
    stored: Stored,
    world_sizes: Sequence[int] = (1,),
    steps: int = 3,
    epochs: int = 1,
    most_samples: int = 1_000_000,
    progress: Progress = no_progress,
    account: "Account | None" = None,
) -> int:
    """Law 2: over stops and rescales, each document comes exactly once per epoch, whole, in order.

    The run takes `steps` steps at each world size in turn, saves, and resumes at the next, until
    `epochs` epochs of every source are complete. `stored` holds the documents that must come: see
    `stored_documents`. Returns the number of samples that this took. The samples are recorded in
    `account`, if given.
    """
    account = Account(stored, epochs, later=False) if account is None else account
    states: list[State] | None = None
    came = -1  # samples before the last stop
    while not account.is_complete():
        if account.samples > most_samples or account.samples == came:
            raise Incomplete(
                f"after {account.samples} samples there are documents that did not come: "
                + ", ".join(
                    f"{source}/{shard}#{number} in epoch {epoch}"
                    for epoch, (source, shard, number) in account.missing()
                )
            )
        came = account.samples
        world_size = world_sizes[account.stops % len(world_sizes)]
        loaders = _resumed(make, world_size, states)
        for rank, loader in enumerate(loaders):
            for batch in islice(_endlessly(loader), steps):
                account.add(batch, f"at world size {world_size}, rank {rank}")
                progress(len(batch["input_ids"]))
        states = _stopped(loaders)
        account.stops += 1
    return account.samples


def check_rescaling(
    make: MakeLoader,
    *,
    stored: Stored,
    world_sizes: Sequence[int],
    samples: int,
    progress: Progress = no_progress,
    account: "Account | None" = None,
) -> int:
    """Law 2 on the start of a run, before any epoch is complete.

    The run takes its share of the samples at each world size in turn, saves, and resumes at the
    next. Each sample must be the sample that an uninterrupted run has in its place; the lines of a
    lane come in order, none of them twice; and no token of a document comes twice in an epoch, or
    differs from the stored token. Returns the number of samples, rounded up to whole steps.
    """
    account = Account(stored) if account is None else account
    first = make(0, 1)
    lanes, batch_size = first.data.lanes, first.batch_size
    lines = [0] * lanes
    expected: list[tuple[int, int, list[list[int]]]] = []  # world size, steps, and the samples of each rank
    for world_size in world_sizes:
        steps = max(1, -(-samples // (len(world_sizes) * world_size * batch_size)))
        turns = [_turns(lines, range(rank, lanes, world_size), steps * batch_size) for rank in range(world_size)]
        expected.append((world_size, steps, turns))
    uninterrupted = [sample.digest for sample in islice(_samples(make, 1, progress), lanes * max(lines))]
    states: list[State] | None = None
    for world_size, steps, turns in expected:
        loaders = _resumed(make, world_size, states)
        for rank, loader in enumerate(loaders):
            where = f"at world size {world_size}, rank {rank}"
            due = iter(turns[rank])
            for batch in islice(_endlessly(loader), steps):
                account.add(batch, where)
                for sample in _rows(batch):
                    if sample.digest != uninterrupted[g := next(due)]:
                        raise LawBroken(
                            f"{where}, after {account.stops} stops: expected sample {g} of an uninterrupted run, "
                            f"got a sample that holds {sample}"
                        )
                progress(len(batch["input_ids"]))
        states = _stopped(loaders)
        account.stops += 1
    return account.samples


def check_mix_holds(make: MakeLoader, *, weights: Mapping[str, float], samples: int, within: float) -> dict[str, float]:
    """Law 5: at every prefix of the stream, each source is within `within` tokens of its share.

    Returns the share of each source at the end.
    """
    total = sum(weights.values())
    got: Counter[str] = Counter()
    for g, row in enumerate(islice(_provenance(make), samples)):
        for source, _, _, start, stop in row:
            got[source] += stop - start
        for source, weight in weights.items():
            off = got[source] - weight / total * got.total()
            if abs(off) > within:
                raise LawBroken(
                    f"after sample {g}, source {source!r} is {off:+.0f} tokens off its share; "
                    f"at most {within:.0f} are allowed"
                )
    return {source: got[source] / got.total() for source in weights}


def check_stage(stage: Stage, *, items: int = 40, lanes: int = 3, seed: int = 0, ahead: int = 3) -> None:
    """What a run needs of a stage: its state is plain data, and a restore continues the same.

    The stage is restored before each of the first `items` items of each lane.

    >>> check_stage(MyStage(ShardReader("corpus/web")))     # doctest: +SKIP
    """
    for index in range(lanes):
        lane = Lane(index=index, count=lanes, seed=seed)
        seen: list[Item] = []
        states: list[State] = []
        iterator = stage.open(lane)
        while len(seen) < items + ahead:
            chunk = iterator.read()
            if not len(chunk):
                raise LawBroken(f"{type(stage).__name__} returned an empty chunk")
            states += [_through_json(iterator.state(taken)) for taken in range(len(chunk))]
            seen += list(chunk)
        shape = _shape(states[0])
        for start in range(items):
            if _shape(states[start]) != shape:
                raise LawBroken(
                    f"the state of {type(stage).__name__} before item {start} has a different shape than the first"
                )
            again = _items(stage, lane, states[start])
            for offset in range(ahead):
                if _item(next(again)) != _item(seen[start + offset]):
                    raise LawBroken(
                        f"{type(stage).__name__} restored before item {start} of lane {index} "
                        f"differs at item {start + offset}"
                    )


def check_equal_ends(make: MakeLoader, *, world_sizes: Iterable[int], progress: Progress = no_progress) -> int:
    """Law 7: a finite pass ends at the same step on every rank, and what fills up the end is marked.

    At each of these world sizes, which need not divide the number of lanes, each rank hands out the
    lines of its lanes and then only marked rows, in as many steps as `len(loader)` says. Sample `g` is
    the same at each world size. Returns the number of samples in the pass.

    >>> check_equal_ends(make, world_sizes=[2, 3, 8])     # doctest: +SKIP
    """
    reference: dict[int, bytes] = {}
    for world_size in [1, *world_sizes]:
        ends: list[tuple[int, int]] = []  # the steps of each rank, and its length
        for rank in range(world_size):
            loader = make(rank, world_size)
            limits = np.array(loader.pass_lines, np.int64)
            lanes = loader.data.lanes
            turns = Turns(dict.fromkeys(range(rank, lanes, world_size), 0), lanes, limits)
            where = f"at world size {world_size}, rank {rank}"
            steps = 0
            for batch in loader:
                due = turns.take(loader.batch_size)
                _check_marks(batch, len(due), f"{where}, step {steps}")
                for g, sample in zip(due, _rows(batch), strict=False):
                    if reference.setdefault(g, sample.digest) != sample.digest:
                        raise LawBroken(f"{where}: sample {g} differs from that of world size 1; it holds {sample}")
                progress(len(batch["input_ids"]))
                steps += 1
            if left := turns.take(1):
                raise LawBroken(f"{where}: the pass ended after {steps} steps without sample {left[0]}")
            ends.append((steps, len(loader)))
            loader.close()
        if len(set(ends)) > 1 or ends[0][0] != ends[0][1]:
            raise LawBroken(f"at world size {world_size} the ranks end after these steps, with these lengths: {ends}")
        if len(reference) != int(limits.sum()):
            raise LawBroken(f"at world size {world_size} there are {len(reference)} samples, expected {limits.sum()}")
    return len(reference)


def _check_marks(batch: Mapping[str, Any], samples: int, where: str) -> None:
    """Raise unless exactly the rows after the first `samples` are marked as padding, and predict nothing."""
    marks = batch["is_padding"].tolist()
    if marks != [False] * samples + [True] * (len(marks) - samples):
        raise LawBroken(f"{where}: {samples} rows are samples, but is_padding is {marks}")
    if samples < len(marks) and not (batch["labels"][samples:] == IGNORED).all():
        raise LawBroken(f"{where}: a row of padding has labels")
    if any(batch.get("provenance", [])[samples:]):
        raise LawBroken(f"{where}: a row of padding holds documents")


class Account:
    """Records which tokens of which documents came, epoch by epoch.

    Raises as soon as a token comes twice in an epoch, or differs from the stored token. A document
    that came whole takes one byte, so that a corpus of any size can be recorded.
    """

    def __init__(self, stored: Stored, epochs: int = 0, *, later: bool = True) -> None:
        self.stored, self.epochs = stored, epochs  # the number of epochs that must be complete
        self._later = later  # compare the tokens of later epochs with the stored tokens too
        self.samples = self.tokens = self.stops = 0
        self.whole: Counter[int] = Counter()  # documents, by epoch
        self.latest: dict[str, int] = {}  # the latest epoch of each source
        self._whole: dict[tuple[str, str, int], bytearray] = defaultdict(bytearray)  # source, shard, epoch
        self._parts: dict[tuple[Document, int], list[int]] = defaultdict(
            list
        )  # the start and stop of each span, sorted

    def add(self, batch: Mapping[str, Any], where: str = "") -> None:
        """Record the documents of a batch."""
        for row in range(len(batch["input_ids"])):
            self.samples += 1
            tokens = torch.cat([batch["input_ids"][row], batch["labels"][row, -1:]]).cpu().numpy()
            try:
                self._add_line(tokens, batch["provenance"][row], batch["epochs"][row])
            except LawBroken as error:
                raise LawBroken(
                    f"{where}{', ' if where else ''}sample number {self.samples - 1} in the order of arrival: {error}"
                ) from None

    @property
    def begun(self) -> int:
        """The number of documents that came in part, so far."""
        return len(self._parts)

    def is_complete(self) -> bool:
        """Whether each stored document came in each epoch."""
        return all(self.whole[epoch] == len(self.stored) for epoch in range(self.epochs))

    def missing(self, most: int = 3) -> list[tuple[int, Document]]:
        """The first documents that did not come whole, each with the epoch."""
        expected = ((epoch, document) for epoch in range(self.epochs) for document in self.stored)
        return list(
            islice(((epoch, document) for epoch, document in expected if not self._is_whole(document, epoch)), most)
        )

    def _add_line(self, tokens: npt.NDArray[np.int64], spans: Sequence[Span], epochs: Sequence[int]) -> None:
        known = len(tokens) - (int(tokens[-1]) == -100)
        place, slack = 0, INSERTED_BETWEEN
        for span, epoch in zip(spans, epochs, strict=True):
            document = (span.source, span.shard, span.document)
            self.tokens += span.stop - span.start
            self.latest[span.source] = max(epoch, self.latest.get(span.source, 0))
            if epoch >= self.epochs and not self._later:
                self._record(document, epoch, span, None)
                place, slack = place + span.stop - span.start, slack + INSERTED_BETWEEN
                continue
            try:
                stored = self.stored[document]
            except KeyError:
                raise LawBroken(f"{_named(span)} of epoch {epoch} should not have come") from None
            self._record(document, epoch, span, stored)
            expected = stored[span.start : span.stop]
            for begin in range(place, place + slack + 1):
                end = min(begin + len(expected), known)
                if np.array_equal(tokens[begin:end], expected[: end - begin]):
                    place, slack = begin + len(expected), INSERTED_BETWEEN
                    break
            else:
                raise LawBroken(f"the tokens of {_named(span)} are not the stored tokens")

    def _record(self, document: Document, epoch: int, span: Span, stored: npt.NDArray[np.int64] | None) -> None:
        edges = self._parts[document, epoch]
        before = bisect_right(edges, span.start)
        if self._is_whole(document, epoch) or before % 2 or bisect_left(edges, span.stop) != before:
            raise LawBroken(f"{_named(span)} came twice in epoch {epoch}")
        edges[before:before] = [span.start, span.stop]
        if stored is None:
            return
        kept = np.flatnonzero(stored >= 0)
        if edges[0] < kept[0] or edges[-1] > kept[-1] + 1:
            raise LawBroken(
                f"{_named(span)} exceeds the tokens of the document that should come, {kept[0]}:{kept[-1] + 1}"
            )
        if sum(edges[1::2]) - sum(edges[::2]) == kept[-1] + 1 - kept[0]:
            del self._parts[document, epoch]
            flags = self._whole[document[0], document[1], epoch]
            flags.extend(bytes(max(0, document[2] + 1 - len(flags))))
            flags[document[2]] = True
            self.whole[epoch] += 1

    def _is_whole(self, document: Document, epoch: int) -> bool:
        flags = self._whole.get((document[0], document[1], epoch), b"")
        return document[2] < len(flags) and bool(flags[document[2]])


class StoredDocuments(Mapping[Document, npt.NDArray[np.int64]]):
    """All documents that an epoch must contain, read with plain pyarrow, each when it is requested.

    Stripped tokens are -1.

    >>> StoredDocuments({"web": "corpus/web"})["web", "part-0.arrow", 17]     # doctest: +SKIP
    array([ 10, 522,  73])
    """

    def __init__(
        self,
        sources: Mapping[str, str | Path | Location],
        *,
        strip: Iterable[int] = (),
        min_length: int = 1,
        column: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._folders = {source: Location(folder, storage_options) for source, folder in sources.items()}
        self._strip, self._min_length, self._column = np.array(sorted(strip), np.int64), max(1, min_length), column
        self._shards: Recent[_PlainShard] = Recent(OPEN_SHARDS)

    def __getitem__(self, document: Document) -> npt.NDArray[np.int64]:
        source, shard, number = document
        path = self._folders[source] / shard
        opened = self._shards.get(path.url, lambda: _PlainShard(path, self._column))
        if number >= opened.documents:
            raise KeyError(document)
        tokens = opened.document(number)
        kept = np.flatnonzero(~np.isin(tokens, self._strip))
        if not len(kept) or kept[-1] + 1 - kept[0] < self._min_length:
            raise KeyError(document)
        stored = np.full(len(tokens), -1, np.int64)
        stored[kept[0] : kept[-1] + 1] = tokens[kept[0] : kept[-1] + 1]
        return stored

    def __iter__(self) -> Iterator[Document]:
        for source, folder in self._folders.items():
            for name in find_shards(folder).names:
                shard = _PlainShard(folder / name, self._column)
                documents = ((source, name, number) for number in range(shard.documents))
                yield from (document for document in documents if document in self)

    def __len__(self) -> int:
        return self._count

    @cached_property
    def _count(self) -> int:
        return sum(1 for _ in self)


def stored_documents(
    sources: Mapping[str, str | Path | Location],
    *,
    strip: Iterable[int] = (),
    min_length: int = 1,
    column: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> dict[Document, npt.NDArray[np.int64]]:
    """All documents that an epoch must contain, in memory. See `StoredDocuments`."""
    return dict(
        StoredDocuments(sources, strip=strip, min_length=min_length, column=column, storage_options=storage_options)
    )


class _PlainShard:
    """A shard as pyarrow reads it."""

    def __init__(self, path: Location, column: str | None) -> None:
        self._batch: Callable[[int], pa.RecordBatch]
        try:
            file = pa.memory_map(str(path.local)) if path.local is not None else pa.PythonFile(_open_remote(path), "r")
            try:
                reader = pa.ipc.open_file(file)
                recent: Recent[pa.RecordBatch] = Recent(1 if path.local is not None else RECENT_BATCHES)
                self._batch = lambda i: recent.get(i, lambda: reader.get_batch(i))
                count = reader.num_record_batches
            except pa.ArrowInvalid:
                file.seek(0)
                batches = list(pa.ipc.open_stream(file))
                self._batch, count = (lambda i: batches[i]), len(batches)
        except (pa.ArrowInvalid, OSError) as error:
            raise DataError(f"{path}: cannot be read: {error}") from None
        names = self._batch(0).schema.names if count else []
        self._column = column or ("tokens" if "tokens" in names or len(names) != 1 else names[0])
        self._listed = count > 0 and not pa.types.is_integer(self._batch(0).column(self._column).type)
        rows = [self._batch(i).num_rows if self._listed else 1 for i in range(count)]
        self._ends = np.cumsum(rows).tolist()
        self.documents = sum(rows)

    def document(self, number: int) -> npt.NDArray[np.int64]:
        batch = bisect_right(self._ends, number)
        values: Any = self._batch(batch).column(self._column)
        if self._listed:
            values = values[number - self._ends[batch]].values  # counted from the end of the batch
        return np.array([] if values is None else values, np.int64)


def _open_remote(path: Location) -> io.BufferedReader:
    return io.BufferedReader(_RemoteFile(path), REMOTE_BUFFER)


class _RemoteFile(io.RawIOBase):
    """A remote file, read in the ranges that are requested."""

    def __init__(self, path: Location) -> None:
        self._connection, self._path = path.connection, path.path
        self._size = self._connection.run(self._connection.info(self._path)).size
        self._place = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._place = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._size}[whence]
        return self._place

    def tell(self) -> int:
        return self._place

    def readinto(self, buffer: Any) -> int:
        stop = min(self._size, self._place + len(buffer))
        data = self._connection.run(self._connection.read(self._path, self._place, max(self._place, stop))).data
        buffer[: len(data)] = data
        self._place += len(data)
        return len(data)


class _Sample(NamedTuple):
    """A digest of a sample's fields, and the documents in it."""

    digest: bytes
    spans: Sequence[Span]

    def __str__(self) -> str:
        return ", ".join(map(_named, self.spans[:3])) + (" and more" if len(self.spans) > 3 else "") or "a sample"


def _samples(make: MakeLoader, world_size: int, progress: Progress = no_progress) -> Iterator[_Sample]:
    """The samples of all ranks in canonical order."""
    ranks = [_each(_rows(batch) for batch in _endlessly(make(rank, world_size))) for rank in range(world_size)]
    while True:
        for rank in ranks:
            yield next(rank)
            progress(1)


def _endlessly(loader: StatefulDataLoader) -> Iterator[dict[str, Any]]:
    """The batches of a loader, on and on, also if its iterations end, up to the end of a finite pass."""
    while not loader.ended:
        yield from loader


def _each(batches: Iterable[Iterable[_Sample]]) -> Iterator[_Sample]:
    for batch in batches:
        yield from batch


def _rows(batch: Mapping[str, Any]) -> list[_Sample]:
    """The samples of a batch."""
    spans = batch.get("provenance") or [()] * len(batch["input_ids"])
    hashes = [hashlib.blake2b(digest_size=16) for _ in spans]
    for name, values in sorted(row_fields(batch).items()):
        for row, value in zip(hashes, values, strict=True):
            row.update(value.cpu().numpy().tobytes() if isinstance(value, torch.Tensor) else f"{name}{value}".encode())
    return [_Sample(row.digest(), row_spans) for row, row_spans in zip(hashes, spans, strict=True)]


def row_fields(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The fields with an entry for each row of a batch, which don't depend on the other rows."""
    rows = len(batch["provenance"] if "provenance" in batch else batch["input_ids"])
    return {
        name: values
        for name, values in batch.items()
        if isinstance(values, Sized)
        and not (isinstance(values, torch.Tensor) and values.ndim < 2)
        and len(values) == rows
    }


def _turns(lines: list[int], lanes: Iterable[int], count: int) -> list[int]:
    """The samples that a rank must hand out next. `lines` counts the lines taken from each lane."""
    due = [(lines[lane], lane) for lane in lanes]
    heapq.heapify(due)
    samples = []
    for _ in range(count):
        line, lane = due[0]
        samples.append(line * len(lines) + lane)
        lines[lane] += 1
        heapq.heapreplace(due, (line + 1, lane))
    return samples


def _resumed(make: MakeLoader, world_size: int, states: list[State] | None) -> list[StatefulDataLoader]:
    loaders = [make(rank, world_size) for rank in range(world_size)]
    for loader in loaders:
        if states is not None:
            loader.load_state_dict(states)
    return loaders


def _stopped(loaders: Iterable[StatefulDataLoader]) -> list[State]:
    states = [_through_json(loader.state_dict()) for loader in loaders]
    for loader in loaders:
        loader.close()
    return states


def _provenance(make: MakeLoader) -> Iterator[list[Any]]:
    for batch in _endlessly(make(0, 1)):
        yield from batch["provenance"]


def _named(span: Span) -> str:
    return f"{span.source}/{span.shard}#{span.document}[{span.start}:{span.stop}]"


def _items(stage: Stage, lane: Lane, state: State) -> Iterator[Item]:
    iterator = stage.open(lane, state)
    while True:
        yield from iterator.read()


def _item(item: Item) -> tuple[list[int], list[Any], list[int]]:
    return item.tokens.tolist(), list(item.spans), item.epochs


def _through_json(state: State) -> Any:
    return json.loads(json.dumps(state))


def _shape(state: Any) -> Any:
    if isinstance(state, Mapping):
        return {name: _shape(value) for name, value in state.items()}
    return [_shape(value) for value in state] if isinstance(state, list) else type(state).__name__
