"""The first pass: a part of a file becomes pieces of tokens, in the work folder.

A piece holds some millions of tokens: first the documents for training, then those for validation,
each in keyed order (or in the order of the file, without shuffling). Beside its tokens are the
lengths of its documents and, if duplicates are to be removed, their numbers and hashes.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fmsdata.core.keys import Ints, key_of, keyed_order, offsets, uniform
from fmsdata.core.tokens import Tokens
from fmsdata.corpus.duplicates import HASH, document_hashes
from fmsdata.corpus.prepare.settings import Settings, Unit
from fmsdata.corpus.prepare.work_folder import UNITS, WorkFolder
from fmsdata.corpus.scan import Scanned, line_before, scan_part
from fmsdata.corpus.tokenizer import Tokenizer, texts_of
from fmsdata.errors import DataError
from fmsdata.storage.clients.base import Entry
from fmsdata.storage.location import Location

BATCH_BYTES = 1 << 20  # of text that are encoded at once; libraries take some 200 bytes for each token
BATCH_TEXTS = 4096
BAD_LISTED = 1000  # bad documents of a unit that are listed; all of them are counted


class Piece(NamedTuple):
    """How much a piece holds, for training and for validation."""

    documents: int
    tokens: int
    held_documents: int
    held_tokens: int


@dataclass
class UnitRecord:
    """What is known of a unit that is done."""

    lines: int = 0  # or rows
    empty: int = 0  # of them
    bad: int = 0
    bad_listed: list[tuple[int, str]] = field(default_factory=list)  # lines of the part, from 1, and reasons
    pieces: list[Piece] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "pieces": [list(piece) for piece in self.pieces]}

    @classmethod
    def parse(cls, record: dict[str, Any]) -> "UnitRecord":
        pieces = [Piece(*piece) for piece in record["pieces"]]
        return cls(**record | {"pieces": pieces, "bad_listed": [(line, why) for line, why in record["bad_listed"]]})


def tokenize_unit(
    source: Location, work: WorkFolder, settings: Settings, tokenizer: Tokenizer, unit: Unit
) -> UnitRecord:
    """Tokenize a part of a file."""
    record = UnitRecord()
    pieces = _Pieces(work, settings, unit, record)
    file = source / unit.file.path
    entry = Entry(unit.file.path, unit.file.size, unit.file.version)
    for some in scan_part(file, entry, settings.column, unit.part, unit.parts):
        if not some.text:
            raise DataError(
                f"{file} holds tokens; `fmsdata prepare` makes tokens of text. Use `fmsdata convert`, or name the "
                "text with --column"
            )
        for line, reason in some.bad:
            if not settings.skip_bad:
                number = line + line_before(file, entry, unit.part, unit.parts)
                raise DataError(f"{file}: line {number}: {reason}; correct the line, or skip such lines: --skip-bad")
            record.bad += 1
            if len(record.bad_listed) < BAD_LISTED:
                record.bad_listed.append((line, reason))
        record.lines += len(some.ends) - 1
        record.empty += int((np.diff(some.ends) == 0).sum()) - len(some.bad)
        for first, stop in _batches(some):
            pieces.add(some, first, stop, *_encode(tokenizer, some, first, stop, settings, file))
    pieces.flush()
    work.done(UNITS, unit.name, record.to_json())
    return record


def _batches(some: Scanned) -> Iterator[tuple[int, int]]:
    """Runs of documents of about BATCH_BYTES."""
    first, count = 0, len(some.ends) - 1
    while first < count:
        stop = int(np.searchsorted(some.ends, some.ends[first] + BATCH_BYTES, "right")) - 1
        stop = min(count, max(stop, first + 1), first + BATCH_TEXTS)
        yield first, stop
        first = stop


def _encode(
    tokenizer: Tokenizer, some: Scanned, first: int, stop: int, settings: Settings, file: Location
) -> tuple[Tokens, Ints]:
    ends = some.ends[first : stop + 1]
    tokens, token_ends = tokenizer.encode(texts_of(some.tokens[ends[0] : ends[-1]], ends - ends[0]))
    dtype = np.dtype(settings.dtype)
    if tokens.dtype != dtype:
        if len(tokens) and int(tokens.max()) > np.iinfo(dtype).max:
            raise DataError(
                f"{file}: the tokenizer returned the id {int(tokens.max())}, which does not fit {dtype}; tell the "
                "number of its ids by an attribute `vocabulary`"
            )
        tokens = tokens.astype(dtype)
    return tokens, token_ends


class _Pieces:
    """Collects the documents of a unit, and writes a piece whenever there are enough of them."""

    def __init__(self, work: WorkFolder, settings: Settings, unit: Unit, record: UnitRecord) -> None:
        self._work, self._settings, self._unit, self._record = work, settings, unit, record
        self._hashing = settings.deduplicate or settings.validation > 0
        self._clear()

    def _clear(self) -> None:
        self._parts: list[Tokens] = []
        self._lengths: list[Ints] = []
        self._rows: list[Ints] = []
        self._hashes: list[npt.NDArray[np.void]] = []
        self._tokens = 0

    def add(self, some: Scanned, first: int, stop: int, tokens: Tokens, ends: Ints) -> None:
        self._parts.append(tokens)
        self._lengths.append(np.diff(ends))
        self._rows.append(np.arange(some.first + first, some.first + stop))
        if self._hashing:
            self._hashes.append(document_hashes(some.tokens, some.ends[first : stop + 1]))
        self._tokens += len(tokens)
        if self._tokens >= self._settings.piece_tokens:
            self.flush()

    def flush(self) -> None:
        if not self._parts:
            return
        settings, unit, number = self._settings, self._unit, len(self._record.pieces)
        tokens = np.concatenate(self._parts)
        length, rows = np.concatenate(self._lengths), np.concatenate(self._rows)
        hashes = np.concatenate(self._hashes) if self._hashing else np.empty(0, HASH)
        self._clear()
        ends = offsets(length)
        held = np.zeros(len(length), np.bool_)
        if settings.validation:
            held = (uniform(hashes["low"], key_of(settings.seed, "validation")) < settings.validation) & (length > 0)
        order = np.arange(len(length))
        if settings.shuffle:
            file = unit.file
            order = keyed_order(len(length), key_of(settings.seed, file.source, file.inner, unit.part, number))
            order = order[length[order] > 0]
        order = np.concatenate([order[~held[order]], order[held[order]]])
        if not len(order):
            return
        starts, stops = ends[:-1][order].tolist(), ends[1:][order].tolist()
        joined = np.concatenate([tokens[start:stop] for start, stop in zip(starts, stops, strict=True)])
        index = length[order].tobytes()
        if settings.deduplicate:
            index += rows[order].tobytes() + hashes[order].tobytes()
        self._work.unit_file(unit, number, "tokens").write_bytes(joined.tobytes())
        self._work.unit_file(unit, number, "index").write_bytes(index)
        away = int(held.sum()), int(length[held].sum())
        self._record.pieces.append(Piece(len(order) - away[0], len(joined) - away[1], *away))
