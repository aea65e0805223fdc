"""WebDataset: tar files of documents, mixed at random, shuffled in a buffer, packed by a stage of the script."""

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import webdataset as wds

from peers.corpus import Corpus, pack, shards
from peers.protocol import Batch, Setup, shifted

PACKAGE = "webdataset"
DOES = "mixes documents and shuffles; packed by a stage of the script; has no state"


def prepare(corpus: Corpus, folder: Path, length: int) -> None:  # noqa: ARG001
    for path, documents in shards(corpus, folder, "tar"):
        with tarfile.open(path, "w") as archive:
            for number in documents:
                buffer = io.BytesIO()
                np.save(buffer, corpus.document(number))
                entry = tarfile.TarInfo(f"{number:09}.npy")
                entry.size = buffer.tell()
                buffer.seek(0)
                archive.addfile(entry, buffer)


class Packed(torch.utils.data.IterableDataset[Any]):
    """Batches of packed rows of a stream of documents."""

    def __init__(self, documents: Any, setup: Setup) -> None:
        self._documents, self._setup = documents, setup

    def __iter__(self) -> Iterator[Any]:
        rows = []
        for row in pack(self._setup.length + 1)(document for (document,) in self._documents):
            rows.append(row)
            if len(rows) == self._setup.batch:
                yield np.stack(rows)
                rows = []
        if rows:
            yield np.stack(rows)


class Batches:
    def __init__(self, setup: Setup) -> None:
        sources = []
        for name in setup.sources:
            files = sorted(str(path) for path in (Path(setup.folder) / name).glob("*.tar"))
            source = wds.WebDataset(files, shardshuffle=100, nodesplitter=wds.split_by_node, seed=0)
            sources.append(source.shuffle(setup.buffer, seed=0).decode().to_tuple("npy"))
        shares = [setup.weights[name] for name in setup.sources] if setup.weights else None
        mixed = wds.RandomMix(sources, shares, longest=True)
        self._loader = wds.WebLoader(Packed(mixed, setup), batch_size=None, num_workers=setup.workers)

    def __iter__(self) -> Iterator[Batch]:
        for rows in self._loader:
            yield shifted(rows if isinstance(rows, torch.Tensor) else torch.from_numpy(rows))

    def state(self) -> None:
        return None


def open_loader(setup: Setup, states: list[Any] | None) -> Batches:  # noqa: ARG001
    return Batches(setup)
