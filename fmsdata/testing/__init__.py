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
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from fmsdata.core.chunk import Item
from fmsdata.core.lane import Lane
from fmsdata.core.spans import Span
from fmsdata.core.stage import Stage
from fmsdata.core.state import State
from fmsdata.core.wording import counted
from fmsdata.loader.loader import StatefulDataLoader
from fmsdata.planning.schedule import Turns
from fmsdata.tasks.base import IGNORED
from fmsdata.testing.account import Account as Account
from fmsdata.testing.account import Incomplete as Incomplete
from fmsdata.testing.account import LawBroken as LawBroken
from fmsdata.testing.account import named
from fmsdata.testing.stored import Document as Document
from fmsdata.testing.stored import Stored as Stored
from fmsdata.testing.stored import StoredDocuments as StoredDocuments
from fmsdata.testing.stored import stored_documents as stored_documents

MakeLoader: TypeAlias = Callable[[int, int], StatefulDataLoader]
Progress: TypeAlias = Callable[[int], None]  # is called with the number of samples checked since the last call


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
    account: Account | None = None,
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
                f"after {counted(account.samples, 'sample')} there are documents that did not come: "
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
    account: Account | None = None,
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
                            f"{where}, after {counted(account.stops, 'stop')}: expected sample {g} of an "
                            "uninterrupted run, "
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
                raise LawBroken(f"{where}: the pass ended after {counted(steps, 'step')} without sample {left[0]}")
            ends.append((steps, len(loader)))
            loader.close()
        if len(set(ends)) > 1 or ends[0][0] != ends[0][1]:
            raise LawBroken(f"at world size {world_size} the ranks end after these steps, with these lengths: {ends}")
        if len(reference) != int(limits.sum()):
            raise LawBroken(
                f"at world size {world_size} there are {counted(len(reference), 'sample')}, expected {limits.sum()}"
            )
    return len(reference)


def _check_marks(batch: Mapping[str, Any], samples: int, where: str) -> None:
    """Raise unless exactly the rows after the first `samples` are marked as padding, and predict nothing."""
    marks = batch["is_padding"].tolist()
    if marks != [False] * samples + [True] * (len(marks) - samples):
        raise LawBroken(f"{where}: {counted(samples, 'row')} are samples, but is_padding is {marks}")
    if samples < len(marks) and not (batch["labels"][samples:] == IGNORED).all():
        raise LawBroken(f"{where}: a row of padding has labels")
    if any(batch.get("provenance", [])[samples:]):
        raise LawBroken(f"{where}: a row of padding holds documents")


class _Sample(NamedTuple):
    """A digest of a sample's fields, and the documents in it."""

    digest: bytes
    spans: Sequence[Span]

    def __str__(self) -> str:
        return ", ".join(map(named, self.spans[:3])) + (" and more" if len(self.spans) > 3 else "") or "a sample"


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
