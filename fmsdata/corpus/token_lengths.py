"""The number of tokens of each document of a text file, for one tokenizer.

`fmsdata index --tokenizer` keeps them beside the corpus, in a file for each text file. So a run of it
that was stopped continues with the files that are missing. A finite pass is planned from them, without
reading text. Where a token at the end of a document matters, lengths are not enough: so the file also
lists which ids occur.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from fmsdata.core.keys import Ints
from fmsdata.core.wording import counted
from fmsdata.corpus.text_documents import read_documents
from fmsdata.corpus.tokenizer import Tokenizer, texts_of
from fmsdata.errors import CountsError, MissingError
from fmsdata.formats.damage import DAMAGE, Truncated
from fmsdata.storage.clients.base import Entry
from fmsdata.storage.location import Location

FOLDER = "fmsdata-tokens"  # in `meta`
LENGTHS: Any = pa.list_(pa.uint32())
IDS: Any = pa.list_(pa.int64())
SCHEMA = pa.schema({"tokens": LENGTHS, "ids": IDS})  # one row


class TokenLengths(NamedTuple):
    """What a tokenizer makes of a text file."""

    lengths: npt.NDArray[np.uint32]  # the tokens of each document
    ids: Ints  # that occur in any of them, sorted

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum(dtype=np.int64))


def token_lengths(
    root: Location, file: Entry, column: str | None, tokenizer: Tokenizer, documents: int
) -> tuple[TokenLengths, bool]:
    """The tokens of each document, and whether they had to be counted now."""
    kept = None if file.version is None else kept_lengths(root, file, column, tokenizer.identity, documents)
    if kept is not None:
        return kept, False
    found = _count(root, file, column, tokenizer)
    if len(found.lengths) != documents:
        raise CountsError(
            f"{root / file.name}: holds {counted(len(found.lengths), 'document')}, but {documents} when it was indexed"
        )
    schema = SCHEMA.with_metadata(_about(file, column, tokenizer.identity))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_table(pa.table([pa.array([found.lengths], LENGTHS), pa.array([found.ids], IDS)], schema=schema))
    _place(root, file).write_bytes(sink.getvalue().to_pybytes())
    return found, True


def kept_lengths(
    root: Location, file: Entry, column: str | None, tokenizer: str, documents: int
) -> TokenLengths | None:
    """What was counted before; None if that is of another file or tokenizer, damaged, or not there."""
    try:
        data = _place(root, file).read_bytes()
    except (FileNotFoundError, MissingError):
        return None
    try:
        table = pa.ipc.open_file(pa.py_buffer(data)).read_all()
        table.validate(full=True)
        if table.schema != SCHEMA or table.num_rows != 1:
            raise Truncated("it has other columns")
        lengths, ids = _values(table, 0), _values(table, 1)
        if lengths.null_count or ids.null_count:
            raise Truncated("it has rows without a number")
    except DAMAGE:
        return None
    if table.schema.metadata != _about(file, column, tokenizer) or len(lengths) != documents:
        return None
    return TokenLengths(lengths.to_numpy(), ids.to_numpy())


def _values(table: Any, column: int) -> Any:
    return table.column(column).chunk(0).flatten()


def _place(root: Location, file: Entry) -> Location:
    return root / "meta" / FOLDER / f"{file.name}.ipc"


def _about(file: Entry, column: str | None, tokenizer: str) -> dict[Any, Any]:
    """What the lengths depend on."""
    # With the name, since two files of one size may be written in the same moment.
    of_file = {"name": file.name, "size": str(file.size), "version": file.version or ""}
    values = {"tokenizer": tokenizer, "column": column or "", **of_file}
    return {name.encode(): value.encode() for name, value in values.items()}


def _count(root: Location, file: Entry, column: str | None, tokenizer: Tokenizer) -> TokenLengths:
    lengths, ids = [np.empty(0, np.uint32)], np.empty(0, np.int64)
    for text, ends, _, _ in read_documents(root, file, column):
        if len(ends) < 2:
            continue
        tokens, token_ends = tokenizer.encode(texts_of(text, ends))
        # Documents without text are skipped, whatever the tokenizer makes of nothing.
        lengths.append((np.diff(token_ends) * (np.diff(ends) > 0)).astype(np.uint32))
        ids = np.union1d(ids, np.unique(tokens)).astype(np.int64)
    return TokenLengths(np.concatenate(lengths), ids)
