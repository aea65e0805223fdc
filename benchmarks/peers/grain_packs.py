"""Grain: documents in ArrayRecord files, mixed, and packed by its own concat-then-split."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grain
import numpy as np
import torch
from array_record.python.array_record_module import ArrayRecordWriter

from peers.corpus import EOS, Corpus, shards
from peers.protocol import Batch, Setup, own, shifted

PACKAGE = "grain"
DOES = "mixes documents, packs and shuffles while it reads"


def prepare(corpus: Corpus, folder: Path, length: int) -> None:  # noqa: ARG001
    for path, documents in shards(corpus, folder, "arrayrecord"):
        writer = ArrayRecordWriter(str(path), "group_size:1")
        for number in documents:
            writer.write(corpus.document(number).tobytes())
        writer.close()


def parse(record: bytes) -> dict[str, Any]:
    return {"tokens": np.append(np.frombuffer(record, np.int32), np.int32(EOS))}


class Batches:
    def __init__(self, setup: Setup) -> None:
        sources = []
        for name in setup.sources:
            paths = sorted(str(path) for path in (Path(setup.folder) / name).glob("*.arrayrecord"))
            sources.append(grain.MapDataset.source(grain.sources.ArrayRecordDataSource(paths)).seed(0))
        if setup.weights:
            weights = [setup.weights[name] for name in setup.sources]
            documents = grain.MapDataset.mix([each.shuffle().repeat() for each in sources], weights)
        else:
            documents = grain.MapDataset.concatenate(sources).seed(0).shuffle()
        rows = documents[setup.rank :: setup.world].map(parse).to_iter_dataset()
        packed = grain.experimental.ConcatThenSplitIterDataset(rows, length_struct={"tokens": setup.length + 1})
        batches = packed.batch(setup.batch)
        if setup.workers:
            batches = batches.mp_prefetch(grain.MultiprocessingOptions(num_workers=setup.workers))
        self._batches = batches
        self.iterator: Any = iter(batches)

    def __iter__(self) -> Iterator[Batch]:
        for batch in self.iterator:
            yield shifted(torch.from_numpy(batch["tokens"].astype(np.int64)))
        self.iterator = iter(self._batches)

    def state(self) -> Any:
        return self.iterator.get_state()


def open_loader(setup: Setup, states: list[Any] | None) -> Batches:
    batches = Batches(setup)
    if states is not None:
        batches.iterator.set_state(own(setup, states))
    return batches
