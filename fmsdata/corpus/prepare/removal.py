"""Finding exact duplicates among the documents of all pieces, in bounded memory.

Of equal documents the first stays, in the order of sources, files and lines. Hashes are compared in
buckets: each bucket holds some millions of them, and reads the hashes of all pieces once.
"""

from collections.abc import Sequence

import numpy as np

from fmsdata.core.keys import Ints
from fmsdata.corpus.duplicates import HASH
from fmsdata.corpus.prepare.units import Piece
from fmsdata.corpus.prepare.work_folder import WorkFolder

BUCKET = 8 << 20  # documents that are compared at once


def find_dropped(work: WorkFolder, pieces: Sequence[tuple[str, int, Piece]], bucket: int = BUCKET) -> tuple[int, int]:
    """Write for each piece, in canonical order, which of its documents are dropped. How many documents and tokens."""
    total = sum(piece.documents + piece.held_documents for *_, piece in pieces)
    buckets = max(1, -(-total // bucket))
    dropped: list[list[Ints]] = [[] for _ in pieces]
    for number in range(buckets):
        hashes, rows, owners, places = [], [], [], []
        for owner, (unit, piece, holds) in enumerate(pieces):
            length, row, digest = _index(work, unit, piece, holds)
            inside = (length > 0) & (digest["high"] % np.uint64(buckets) == number)
            hashes.append(digest[inside])
            rows.append(row[inside])
            places.append(np.flatnonzero(inside))
            owners.append(np.full(len(places[-1]), owner))
        digest, row, owner_of, place = map(np.concatenate, (hashes, rows, owners, places))
        order = np.lexsort((row, owner_of, digest["low"], digest["high"]))
        digest = digest[order]
        later = order[1:][digest[1:] == digest[:-1]]
        for owner in np.unique(owner_of[later]).tolist():
            dropped[owner].append(place[later[owner_of[later] == owner]])
    documents = tokens = 0
    for (unit, piece, holds), found in zip(pieces, dropped, strict=True):
        gone = np.sort(np.concatenate([np.empty(0, np.int64), *found]))
        work.unit_file(unit, piece, "dropped").write_bytes(gone.tobytes())
        documents += len(gone)
        tokens += int(_index(work, unit, piece, holds)[0][gone].sum()) if len(gone) else 0
    return documents, tokens


def _index(work: WorkFolder, unit: str, piece: int, holds: Piece) -> tuple[Ints, Ints, np.ndarray]:
    """Lengths, numbers and hashes of the documents of a piece, as they are stored."""
    count = holds.documents + holds.held_documents
    data = work.unit_file(unit, piece, "index").read_bytes()
    length, row = np.frombuffer(data, np.int64, 2 * count).reshape(2, count)
    return length, row, np.frombuffer(data, HASH, count, 16 * count)


def read_dropped(work: WorkFolder, unit: str, piece: int) -> Ints:
    """The documents of a piece that are dropped, by their place in it."""
    return np.frombuffer(work.unit_file(unit, piece, "dropped").read_bytes(), np.int64)
