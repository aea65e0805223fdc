"""The number of tokens of each document of a text file, for one tokenizer.

`fmsdata index --tokenizer` keeps them beside the corpus, in a file for each text file. So a run of it
that was stopped continues with the files that are missing.
"""

from typing import Any

import numpy as np
import pyarrow as pa

from fmsdata.core.keys import Ints
from fmsdata.corpus.text_documents import read_documents
from fmsdata.corpus.tokenizer import Tokenizer
from fmsdata.errors import CountsError
from fmsdata.formats.damage import DAMAGE, Truncated
from fmsdata.storage.clients.base import Entry
from fmsdata.storage.location import Location

FOLDER = "fmsdata-tokens"  # in `meta`
COLUMN = "tokens"


def token_lengths(
    root: Location, file: Entry, column: str | None, tokenizer: Tokenizer, documents: int
) -> tuple[Ints, bool]:
    """The tokens of each document, and whether they had to be counted now."""
    place = root / "meta" / FOLDER / f"{file.name}.ipc"
    about: dict[Any, Any] = {b"tokenizer": tokenizer.identity.encode(), b"size": str(file.size).encode()}
    about |= {b"version": (file.version or "").encode(), b"column": (column or "").encode()}
    if file.version is not None and place.is_file():
        kept = _read(place.read_bytes(), about, documents)
        if kept is not None:
            return kept, False
    lengths = _count(root, file, column, tokenizer)
    if len(lengths) != documents:
        raise CountsError(f"{root / file.name}: holds {len(lengths)} documents, but {documents} when it was indexed")
    schema = pa.schema({COLUMN: pa.uint32()}, about)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_table(pa.table([pa.array(lengths, pa.uint32())], schema=schema))
    place.write_bytes(sink.getvalue().to_pybytes())
    return lengths, True


def _read(data: bytes, about: dict[Any, Any], documents: int) -> Ints | None:
    """What was kept; None if it is of another file or tokenizer, or damaged."""
    try:
        table = pa.ipc.open_file(pa.py_buffer(data)).read_all()
        table.validate(full=True)
        if table.schema != pa.schema({COLUMN: pa.uint32()}) or table.column(0).null_count:
            raise Truncated("it has other columns")
    except DAMAGE:
        return None
    if table.schema.metadata != about or table.num_rows != documents:
        return None
    lengths: Any = table.column(0).to_numpy()
    return np.asarray(lengths, np.int64)


def _count(root: Location, file: Entry, column: str | None, tokenizer: Tokenizer) -> Ints:
    lengths = [np.empty(0, np.int64)]
    for tokens, ends, _, _ in read_documents(root, file, column):
        data, places = tokens.tobytes(), ends.tolist()
        texts = [str(data[places[i] : places[i + 1]], "utf-8") for i in range(len(places) - 1)]
        if texts:
            lengths.append(np.diff(tokenizer.encode(texts)[1]))
    return np.concatenate(lengths)
