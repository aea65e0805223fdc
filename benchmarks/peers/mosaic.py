"""MosaicML Streaming: MDS shards of rows that were cut before the run, mixed by streams.

Its package imports torchvision for classes of pictures that are not used here. A stand-in takes its
place, because torchvision's wheels do not load beside a torch for CPUs.
"""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from peers.corpus import Corpus
from peers.protocol import Batch, Setup, shifted

STANDINS = {"": "", ".datasets": "VisionDataset", ".transforms": "", ".transforms.functional": "to_tensor"}
importlib.import_module("transformers.models.auto.tokenization_auto")  # before the stand-in, which it would look into
for name, has in STANDINS.items():
    module = sys.modules[f"torchvision{name}"] = ModuleType(f"torchvision{name}")
    if has:
        setattr(module, has, type(has, (), {}))
from streaming import MDSWriter, Stream, StreamingDataLoader, StreamingDataset  # noqa: E402

for name in STANDINS:
    del sys.modules[f"torchvision{name}"]

PACKAGE = "mosaicml-streaming"
DOES = "mixes rows and shuffles; packed before the run"


def prepare(corpus: Corpus, folder: Path, length: int) -> None:
    for source, (first, stop) in corpus.firsts.items():
        rows = corpus.rows(range(first, stop), length + 1)
        limit = max(1 << 16, min(1 << 26, rows.nbytes // 12))
        with MDSWriter(out=str(folder / source), columns={"tokens": "ndarray:int32"}, size_limit=limit) as writer:
            for row in rows:
                writer.write({"tokens": row})


class Batches:
    def __init__(self, setup: Setup) -> None:
        streams = []
        for name in setup.sources:
            share = {"proportion": setup.weights[name]} if setup.weights else {}
            streams.append(Stream(local=str(Path(setup.folder) / name), **share))
        dataset = StreamingDataset(streams=streams, shuffle=True, batch_size=setup.batch)
        self.loader = StreamingDataLoader(dataset, batch_size=setup.batch, num_workers=setup.workers)

    def __iter__(self) -> Iterator[Batch]:
        for rows in self.loader:
            yield shifted(rows["tokens"].long())

    def state(self) -> Any:
        return self.loader.state_dict()


def open_loader(setup: Setup, states: list[Any] | None) -> Batches:
    batches = Batches(setup)
    if states is not None:
        batches.loader.load_state_dict(states[0])  # as documented: rank 0 saves, all load
    return batches
