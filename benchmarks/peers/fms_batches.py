"""fmsdata, over shards with one record batch per document: the layout of fms-fsdp corpora."""

from pathlib import Path

from peers import fms
from peers.corpus import Corpus

PACKAGE, DOES, open_loader = fms.PACKAGE, fms.DOES, fms.open_loader


def prepare(corpus: Corpus, folder: Path, length: int) -> None:  # noqa: ARG001
    fms.write(corpus, folder, "batch")
