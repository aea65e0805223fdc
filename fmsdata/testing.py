"""The laws of the canonical stream, as functions that check them on any pipeline: ours in our tests, yours in yours.

Each takes a factory `make(rank, world_size)` of loaders, or a stage, and raises `LawBroken` with what went
wrong. Where a law is about documents, the loaders must be built with `outputs=["provenance", "epochs"]`.

    def make(rank, world_size):
        outputs = {"loader.outputs": ["provenance", "epochs"]}
        return fmsdata.build_loader("my.yaml", outputs, rank=rank, world_size=world_size)

    def test_the_stream_is_the_same_at_any_world_size():
        fmsdata.testing.check_same_stream(make, world_sizes=[2, 3, 8], samples=480)
"""

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from fmsdata.chunk import Item
from fmsdata.loader import StatefulDataLoader
from fmsdata.stage import Lane, Stage, State

MakeLoader: TypeAlias = Callable[[int, int], StatefulDataLoader]
Document: TypeAlias = tuple[str, str, int]  # source, shard, number in the shard
Stored: TypeAlias = Mapping[Document, npt.NDArray[np.int64]]
INSERTED_BETWEEN = 4  # EOS, EOL, BOL and BOS can stand between two documents


class LawBroken(AssertionError):
    """A law does not hold."""


def check_same_stream(
    make: MakeLoader, *, world_sizes: Iterable[int], samples: int, variants: Iterable[MakeLoader] = ()
) -> None:
    """Law 1: at any of these world sizes, sample `g` is the same, and rank `g mod W` hands it out.

    The world sizes must divide the number of lanes. `variants` are factories that must give the same stream
    too, with another batch size, say.
    """
    reference = list(islice(_samples(make, 1), samples))
    for which, factory in enumerate([make, *variants]):
        for world_size in [1, *world_sizes]:
            for g, sample in enumerate(islice(_samples(factory, world_size), samples)):
                if sample != reference[g]:
                    name = f"variant {which} " if which else ""
                    raise LawBroken(f"{name}at world size {world_size}, sample {g} is not the one at world size 1")


def check_restore_anywhere(make: MakeLoader, *, steps: int, world_size: int = 1, ahead: int = 3) -> None:
    """Laws 3 and 4: a restore after any step continues as if nothing had happened, also the second time."""
    for rank in range(world_size):
        loader = make(rank, world_size)
        batches = iter(loader)
        states, seen = [_through_json(loader.state_dict())], []
        for _ in range(steps + ahead):
            seen.append(_rows(next(batches)))
            states.append(_through_json(loader.state_dict()))
        shape = _shape(states[0])
        once_more = make(rank, world_size)
        for step in range(steps):
            if _shape(states[step]) != shape:
                raise LawBroken(f"the state after step {step} has another shape than the first")
            restored = make(rank, world_size)
            restored.load_state_dict(states[step])
            if _through_json(restored.state_dict()) != states[step]:
                raise LawBroken(f"the state after step {step} changes by being restored")
            if [_rows(batch) for batch in islice(restored, ahead)] != seen[step : step + ahead]:
                raise LawBroken(f"restored after step {step}, rank {rank} of {world_size} goes on differently")
            once_more.load_state_dict(_through_json(once_more.state_dict()))
            if _rows(next(iter(once_more))) != seen[step]:
                raise LawBroken(f"restoring after every single step, step {step} is different")


def check_exactly_once(
    make: MakeLoader,
    *,
    stored: Stored,
    world_sizes: Sequence[int] = (1,),
    steps: int = 3,
    epochs: int = 1,
    most_samples: int = 1_000_000,
) -> int:
    """Law 2: over a chain of stops and rescales, each document appears exactly once per epoch, whole and in order.

    The run takes `steps` steps at each world size in turn, saves, and goes on at the next, until `epochs`
    epochs of every source are complete. `stored` holds what must come: see `stored_documents`. Returns the
    number of samples that it took.
    """
    seen: dict[tuple[str, int], dict[Document, list[tuple[int, int]]]] = defaultdict(lambda: defaultdict(list))
    states: list[State] | None = None
    count = turn = 0
    while not _complete(seen, stored, epochs):
        if count > most_samples:
            raise LawBroken(
                f"after {count} samples there are documents that did not come: {_missing(seen, stored, epochs)}"
            )
        world_size = world_sizes[turn % len(world_sizes)]
        loaders = [make(rank, world_size) for rank in range(world_size)]
        for loader in loaders:
            if states is not None:
                loader.load_state_dict(states)
            for batch in islice(loader, steps):
                for row in range(len(batch["input_ids"])):
                    count += 1
                    _collect(batch, row, stored, epochs, seen)
        states = [_through_json(loader.state_dict()) for loader in loaders]
        turn += 1
    for (source, epoch), documents in seen.items():
        for document, spans in documents.items():
            _check_whole(document, epoch, sorted(spans), stored, complete=epoch < epochs)
        unknown = [document for document in documents if document not in stored]
        if unknown:
            raise LawBroken(f"source {source!r}, epoch {epoch}: {unknown[0]} should not have come")
    return count


def check_mix_holds(make: MakeLoader, *, weights: Mapping[str, float], samples: int, within: float) -> dict[str, float]:
    """Law 5: at every prefix of the stream each source has its share of the tokens, give or take `within` tokens.

    Returns the share that each source got in the end.
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
                    f"after sample {g}, source {source!r} is {off:+.0f} tokens off its share; allowed are {within:.0f}"
                )
    return {source: got[source] / got.total() for source in weights}


def check_stage(stage: Stage, *, items: int = 40, lanes: int = 3, seed: int = 0, ahead: int = 3) -> None:
    """What a stage must do to be used in a run.

    Restored at any item of any lane, it continues the same, and its state is plain data.

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
                raise LawBroken(f"{type(stage).__name__} gave an empty chunk")
            states += [_through_json(iterator.state(taken)) for taken in range(len(chunk))]
            seen += list(chunk)
        shape = _shape(states[0])
        for start in range(items):
            if _shape(states[start]) != shape:
                raise LawBroken(
                    f"the state of {type(stage).__name__} before item {start} has another shape than the first"
                )
            again = _items(stage, lane, states[start])
            for offset in range(ahead):
                if _item(next(again)) != _item(seen[start + offset]):
                    raise LawBroken(
                        f"{type(stage).__name__} restored before item {start} of lane {index} "
                        f"differs at item {start + offset}"
                    )


def stored_documents(
    sources: Mapping[str, str | Path], *, strip: Iterable[int] = (), min_length: int = 1, column: str = "tokens"
) -> dict[Document, npt.NDArray[np.int64]]:
    """All documents that an epoch must bring, read from the shards in the plainest way there is, for comparison."""
    unwanted = set(strip)
    out = {}
    for source, folder in sources.items():
        for path in sorted(Path(folder).rglob("*.arrow")):
            for number, tokens in enumerate(_plain_read(path, column)):
                start, stop = 0, len(tokens)
                while start < stop and tokens[start] in unwanted:
                    start += 1
                while start < stop and tokens[stop - 1] in unwanted:
                    stop -= 1
                if stop - start >= max(1, min_length):
                    kept = np.full(len(tokens), -1, np.int64)
                    kept[start:stop] = tokens[start:stop]
                    out[source, path.relative_to(folder).as_posix(), number] = kept
    return out


def _plain_read(path: Path, column: str) -> Iterator[list[int]]:
    with pa.memory_map(str(path)) as file:
        try:
            table = pa.ipc.open_file(file)
            batches = [table.get_batch(i) for i in range(table.num_record_batches)]
        except pa.ArrowInvalid:
            file.seek(0)
            batches = list(pa.ipc.open_stream(file))
        for batch in batches:
            values = batch.column(column)
            rows: list[Any] = values.to_pylist()
            yield from [rows] if pa.types.is_integer(values.type) else rows


def _samples(make: MakeLoader, world_size: int) -> Iterator[bytes]:
    """The samples of all ranks in canonical order."""
    ranks = [_each(_rows(batch) for batch in make(rank, world_size)) for rank in range(world_size)]
    while True:
        for rank in ranks:
            yield next(rank)


def _each(batches: Iterable[Iterable[bytes]]) -> Iterator[bytes]:
    for batch in batches:
        yield from batch


def _rows(batch: Mapping[str, Any]) -> list[bytes]:
    """What each row of a batch holds, in a form that can be compared."""
    rows = len(batch["input_ids"])
    out = [b""] * rows
    for name, values in sorted(batch.items()):
        if len(values) != rows or (isinstance(values, torch.Tensor) and values.ndim < 2):
            continue  # not one entry a row
        for row in range(rows):
            value = values[row]
            out[row] += value.numpy().tobytes() if isinstance(value, torch.Tensor) else f"{name}{value}".encode()
    return out


def _provenance(make: MakeLoader) -> Iterator[list[Any]]:
    for batch in make(0, 1):
        yield from batch["provenance"]


def _collect(batch: Mapping[str, Any], row: int, stored: Stored, epochs: int, seen: dict[Any, Any]) -> None:
    """Note which tokens of which documents a row holds, and, in the epochs asked for, that they are the stored ones."""
    tokens = torch.cat([batch["input_ids"][row], batch["labels"][row, -1:]]).numpy()
    known = len(tokens) - (int(tokens[-1]) == -100)
    place, slack = 0, INSERTED_BETWEEN
    for span, epoch in zip(batch["provenance"][row], batch["epochs"][row], strict=True):
        document, start, stop = tuple(span[:3]), span[3], span[4]
        seen[document[0], epoch][document].append((start, stop))
        if epoch >= epochs or document not in stored:
            place, slack = place + stop - start, slack + INSERTED_BETWEEN
            continue
        expected = stored[document][start:stop]
        for begin in range(place, place + slack + 1):
            end = min(begin + len(expected), known)
            if np.array_equal(tokens[begin:end], expected[: end - begin]):
                place, slack = begin + len(expected), INSERTED_BETWEEN
                break
        else:
            raise LawBroken(f"tokens {start} to {stop} of {document} are not what is stored there")


def _extent(tokens: npt.NDArray[np.int64]) -> tuple[int, int]:
    kept = np.flatnonzero(tokens >= 0)
    return int(kept[0]), int(kept[-1]) + 1


def _complete(seen: Mapping[Any, Any], stored: Stored, epochs: int) -> bool:
    return not _missing(seen, stored, epochs)


def _missing(seen: Mapping[Any, Any], stored: Stored, epochs: int) -> list[tuple[int, Document]]:
    missing = []
    for document, tokens in stored.items():
        start, stop = _extent(tokens)
        for epoch in range(epochs):
            spans = seen.get((document[0], epoch), {}).get(document, [])
            if sum(end - begin for begin, end in spans) < stop - start:
                missing.append((epoch, document))
                if len(missing) == 3:
                    return missing
    return missing


def _check_whole(
    document: Document, epoch: int, spans: list[tuple[int, int]], stored: Stored, *, complete: bool
) -> None:
    for (_, stop), (start, _) in pairwise(spans):
        if start < stop:
            raise LawBroken(f"{document} came twice in epoch {epoch}: tokens {start} to {stop}")
    if complete and document in stored:
        first, last = _extent(stored[document])
        joined = [place for span in spans for place in span]
        if joined[0] != first or joined[-1] != last or joined[1:-1:2] != joined[2:-1:2]:
            raise LawBroken(f"{document} is not whole in epoch {epoch}: {spans} of {first} to {last}")


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
