"""fmsdata, with its defaults."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import fmsdata
from fmsdata.corpus.shard_writer import Layout, write_shard
from peers.corpus import EOS, Corpus, shards
from peers.protocol import Batch, Setup

PACKAGE = "fmsdata"
DOES = "mixes, packs and shuffles while it reads"


def prepare(corpus: Corpus, folder: Path, length: int) -> None:  # noqa: ARG001
    write(corpus, folder, "list")


def write(corpus: Corpus, folder: Path, layout: Layout) -> None:
    for path, documents in shards(corpus, folder, "arrow"):
        write_shard(path, map(corpus.document, documents), dtype=np.uint32, layout=layout)
    command = [str(Path(sys.executable).with_name("fmsdata")), "index", str(folder)]
    subprocess.run(command, check=True, capture_output=True)


class Batches:
    def __init__(self, loader: fmsdata.StatefulDataLoader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._loader)

    def state(self) -> Any:
        return self._loader.state_dict()


def open_loader(setup: Setup, states: list[Any] | None) -> Batches:
    weights = setup.weights
    config: dict[str, Any] = {
        "path": setup.folder,
        "sources": {name: {"weight": weights[name]} if weights else {} for name in setup.sources},
        "documents": {"eos": EOS},
        "pack": {"seq_len": setup.length},
        "loader": {"batch_size": setup.batch, "num_workers": setup.workers},
    }
    if setup.lanes:
        config["lanes"] = setup.lanes
    if setup.prefetch is not None:
        config["loader"]["prefetch"] = setup.prefetch
    if weights is None:
        config["epochs"] = 1
    loader = fmsdata.build_loader(config, rank=setup.rank, world_size=setup.world)
    if states is not None:
        loader.load_state_dict(states)
    return Batches(loader)
