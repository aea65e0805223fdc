"""Blocks of a remote Arrow file that are parts of record batches of lists.

A block takes two steps: the list offsets of its documents say which values to ask for. Other
columns are left out. Both steps need the metadata of the record batches. It was read with the
layout, or it is read with the first block that needs it, together with the list offsets, which are
most often right behind it.
"""

from dataclasses import dataclass, field

import numpy as np

from fmsdata.core.blocks import Block
from fmsdata.core.keys import Ints, offsets
from fmsdata.core.ranges import Range, merge, worth_bridging
from fmsdata.core.tokens import Tokens
from fmsdata.errors import DataError
from fmsdata.formats.arrow.metadata import Shape
from fmsdata.formats.arrow.runs import OWN, concatenate, read_batches
from fmsdata.formats.arrow.scan import WINDOW, Scan
from fmsdata.formats.base import Blocks, Reading
from fmsdata.formats.damage import Guarded
from fmsdata.formats.fetched import Fetched, in_parts

# The columns of a table of record batches: the place of each, and its number of rows; from its
# metadata, whether it is plain (its tokens are stored as they are), and its null rows and tokens;
# if it is plain, the places and sizes of its list offsets and values.
OFFSET, METADATA, BODY, ROWS, PLAIN, NULLS, TOKENS, TABLE, TABLE_SIZE, VALUES, VALUES_SIZE = range(11)
UNKNOWN = -1  # in PLAIN: the metadata was not read yet; in ROWS: any number is right
SMALL = 1 << 16  # bytes that cost less than another request
MANY = 8  # ranges of a block; if there are more, all gaps up to SMALL are bridged


class BatchTable:
    """What is known of each record batch of a file."""

    def __init__(self, scan: Scan, messages: Ints) -> None:
        self.scan = scan
        self.rows = np.zeros((len(messages), VALUES_SIZE + 1), np.int64)
        self.rows[:, : BODY + 1] = messages
        self.rows[:, [ROWS, PLAIN]] = UNKNOWN

    @property
    def messages(self) -> Ints:
        return self.rows[:, : BODY + 1]

    def read_all(self, fetched: Fetched) -> Reading[None]:
        """Read all metadata that was not read yet."""
        unknown = np.flatnonzero(self.rows[:, PLAIN] == UNKNOWN)
        yield from self.scan.read(self.messages, unknown, self._add, fetched)

    def guess_rows(self, documents: int, fetched: Fetched) -> Reading[bool]:
        """Read the metadata of the first and the last record batch, and infer the rows of all.

        Writers give all record batches but the last the same number of rows. If that adds up to the
        number of documents, it is taken as true, and checked when a record batch is read. Returns
        whether it adds up.
        """
        yield from self.scan.read(self.messages, np.array([0, len(self.rows) - 1]), self._add, fetched)
        first, last = self.rows[[0, -1], ROWS].tolist()
        regular: bool = documents == (len(self.rows) - 1) * first + last and 0 < last <= first
        if regular:
            self.rows[1:-1, ROWS] = first
        return regular

    def stored(self) -> int:
        """The number of bytes that are fetched to read all tokens."""
        plain = self.rows[:, TABLE_SIZE] + self.rows[:, VALUES_SIZE]
        return int(np.where(self.rows[:, PLAIN] == 1, plain, self.messages[:, 1:].sum(axis=1)).sum())

    def parse(self, number: int, data: memoryview) -> None:
        """Parse the metadata of a record batch that was fetched."""
        self.scan.parse(self.messages, np.array([number]), data, int(self.rows[number, OFFSET]), self._add)

    def _add(self, which: Ints, nodes: Ints, buffers: Ints, shape: Shape) -> None:
        column = self.scan.column
        expected, found = self.rows[which, ROWS], column.rows_of(nodes)
        if (wrong := (expected != UNKNOWN) & (found != expected)).any():
            raise DataError(
                f"{column.name}: a record batch has {found[wrong][0]} rows, but the first and the last batch and the "
                f"counts imply {expected[wrong][0]}; write the file again, with the same number of rows in all record "
                "batches but the last"
            )
        plain = column.are_plain(nodes, shape)
        rows = self.rows[which]
        rows[:, ROWS], rows[:, NULLS], rows[:, PLAIN] = found, nodes[:, column.node, 1], plain
        rows[:, TOKENS] = column.row_tokens(nodes, buffers, plain)
        if plain.any():
            if column.fixed_size is None:
                rows[:, TABLE : TABLE_SIZE + 1] = buffers[:, column.table]
            rows[:, VALUES : VALUES_SIZE + 1] = buffers[:, column.values]
        self.rows[which] = rows


@dataclass
class _Part:
    """The rows of one record batch that are in a block: `count` of them, from `row` on."""

    number: int  # of the record batch
    batch: list[int]  # its row in the table
    row: int
    count: int
    whole: bool  # whether all of the record batch's tokens are fetched
    start: Ints = field(init=False)  # of each row, in tokens from the start of the file
    length: Ints = field(init=False)
    values: Range = field(init=False)  # the place of all its tokens

    @property
    def known(self) -> bool:
        return self.batch[PLAIN] != UNKNOWN

    @property
    def plain(self) -> bool:
        return self.batch[PLAIN] == 1

    @property
    def cut(self) -> bool:
        """Whether its list offsets must be known before its tokens can be requested."""
        return self.plain and not self.whole

    def message(self, *, body: bool) -> Range:
        offset, metadata, size = self.batch[: BODY + 1]
        return Range(offset, offset + metadata + (size if body else 0))


class Slices:
    """Blocks that are parts of record batches of lists.

    With `dense`, the list offsets of a record batch are fetched all at once, and kept for its other
    blocks.
    """

    text = False

    def __init__(self, table: BatchTable, first_row: Ints, tokens: int | None, *, dense: bool) -> None:
        self.documents, self.known_tokens = int(first_row[-1]), tokens
        self._scan, self._column = table.scan, table.scan.column
        self._table, self._first_row = table, first_row
        self._alone = len(self._column.schema.names) == 1  # whether there are no other columns
        self._whole_is_quicker = self._alone and self._column.fixed_size is None  # it takes one step, not two
        self._dense = dense and self._column.fixed_size is None
        self._kept: dict[int, Ints] = {}  # list offsets, by record batch
        self.nbytes = OWN + table.rows.nbytes + first_row.nbytes
        if self._dense:
            self.nbytes += self._column.ends.itemsize * self.documents

    @property
    def blocks(self) -> Blocks | None:
        return None if self.known_tokens is None else (self._table.rows[:, ROWS], self._table.rows[:, TOKENS])

    def block(self, first: int, stop: int) -> Reading[Block[Tokens]]:
        parts, fetched = self._parts(first, stop), Fetched()
        unknown = [part for part in parts if not part.known]
        yield from self._fetch([self._lookups(part) for part in parts], fetched)
        for part in unknown:
            self._table.parse(part.number, fetched.get(part.message(body=False)))
            part.batch = self._table.rows[part.number].tolist()
        if unknown:  # seldom: their list offsets were not where they were expected
            yield from self._fetch([self._lookups(part) for part in unknown], fetched)
        for part in parts:
            if part.cut:
                self._locate(part, fetched)
        yield from self._fetch([self._contents(part) for part in parts], fetched)
        for part in parts:
            if part.plain and part.whole:
                self._locate(part, fetched)
        return concatenate(self._read(part, fetched) for part in parts)

    def tokens(self) -> Reading[int]:
        if self.known_tokens is not None:
            return self.known_tokens
        total = 0
        rows, sizes = self._first_row.tolist(), offsets(self._table.messages[:, 1:].sum(axis=1))
        batch = 0
        while batch < len(rows) - 1:
            behind = max(batch + 1, int(np.searchsorted(sizes, sizes[batch] + WINDOW, "right")) - 1)
            if rows[batch] < rows[behind]:
                block = yield from in_parts(self.block(rows[batch], rows[behind]), WINDOW)
                total += int(block.length.sum())
            batch = behind
        return total

    def _parts(self, first: int, stop: int) -> list[_Part]:
        begin = int(self._first_row.searchsorted(first, "right")) - 1
        end = int(self._first_row.searchsorted(stop, "left"))
        low = self._first_row[begin : end + 1].tolist()
        rows = low[-1] - low[0]
        nearly_all = self._whole_is_quicker and worth_bridging(rows - (stop - first), rows)
        parts = []
        for number, batch in enumerate(self._table.rows[begin:end].tolist(), begin):
            row, behind = max(first - low[number - begin], 0), min(stop - low[number - begin], batch[ROWS])
            if row < behind:
                whole = nearly_all or behind - row == batch[ROWS]
                parts.append(_Part(number, batch, row, behind - row, whole))
        return parts

    def _lookups(self, part: _Part) -> list[Range]:
        """What to fetch before the tokens of a part can be requested."""
        if not part.known:
            return self._guesses(part)
        if not part.cut or self._column.fixed_size is not None or part.number in self._kept:
            return []
        return [self._list_offsets(part, *self._looked_up(part))]

    def _guesses(self, part: _Part) -> list[Range]:
        """The metadata of a record batch, and its list offsets where they most often are."""
        if part.whole and self._alone:
            return [part.message(body=True)]
        (offset, head), body, rows = part.message(body=False), part.batch[BODY], part.batch[ROWS]
        width = self._column.ends.itemsize
        if self._column.fixed_size is not None or (rows + 1) * width > body:
            return [Range(offset, head)]
        row, count = self._looked_up(part)
        table = Range(head + row * width, head + (row + count + 1) * width)
        near = worth_bridging(row * width, body * count // rows)
        return [Range(offset, table.stop)] if near else [Range(offset, head), table]

    def _looked_up(self, part: _Part) -> tuple[int, int]:
        """The first and the number of rows whose list offsets are fetched."""
        return (0, part.batch[ROWS]) if self._dense else (part.row, part.count)

    def _list_offsets(self, part: _Part, row: int, count: int) -> Range:
        """The place of the list offsets of some rows."""
        place, width = part.batch[TABLE], self._column.ends.itemsize
        with Guarded(self._column.name):
            self._column.require_table(place, part.batch[TABLE_SIZE], part.batch[ROWS])
        return Range(place + row * width, place + (row + count + 1) * width)

    def _locate(self, part: _Part, fetched: Fetched) -> None:
        """Find the start and the length of each row."""
        row, count, column = part.row, part.count, self._column
        with Guarded(column.name):
            if column.fixed_size is not None:
                ends = np.arange(row, row + count + 1) * column.fixed_size
            elif self._dense and part.cut:
                if part.number not in self._kept:
                    table = fetched.get(self._list_offsets(part, 0, part.batch[ROWS]))
                    self._kept[part.number] = np.frombuffer(table, column.ends).copy()
                ends = self._kept[part.number][row : row + count + 1].astype(np.int64)
            else:
                ends = np.frombuffer(fetched.get(self._list_offsets(part, row, count)), column.ends).astype(np.int64)
            part.start, part.length = column.rows(ends, part.batch[VALUES], part.batch[VALUES_SIZE])
        width = column.dtype.itemsize
        part.values = Range(part.batch[VALUES] + ends.item(0) * width, part.batch[VALUES] + ends.item(-1) * width)

    def _contents(self, part: _Part) -> list[Range]:
        """What to fetch for the tokens of a part."""
        if not part.plain:
            return [part.message(body=True)]
        if part.cut:
            return [part.values]
        values = Range(part.batch[VALUES], part.batch[VALUES] + part.batch[VALUES_SIZE])
        return (
            [values] if self._column.fixed_size is not None else [self._list_offsets(part, 0, part.batch[ROWS]), values]
        )

    def _read(self, part: _Part, fetched: Fetched) -> Block[Tokens]:
        if not part.plain:
            message = part.message(body=True)
            here = np.array([[0, part.batch[METADATA], part.batch[BODY]]])
            data, stop = fetched.get(message), part.row + part.count
            return read_batches(self._scan, message.start, data, here, first=part.row, stop=stop)
        array, dtype = np.zeros(part.count, np.int64), self._column.dtype
        if not part.length.any():
            return Block([np.empty(0, dtype)], array, array, part.length, [None])
        tokens, base = fetched.array(part.values, dtype)
        return Block([tokens], array, part.start - base // dtype.itemsize, part.length, [base])

    def _fetch(self, ranges: list[list[Range]], fetched: Fetched) -> Reading[None]:
        """Request the ranges of each part that were not fetched yet, merging those that are close together.

        Between two parts is the metadata of a record batch, which is requested by itself. It is
        requested again only where it would take many requests not to.
        """
        aligned = -self._column.dtype.itemsize
        missing = [
            [Range(start & aligned, stop) for start, stop in fetched.missing(part) if start < stop] for part in ranges
        ]
        asked = merge(each for part in missing for each in merge(part, bridge=True))
        if len(asked) > MANY:
            asked = merge((each for part in missing for each in part), bridge=True, small=SMALL)
        if asked:
            fetched.add(asked, (yield asked))
