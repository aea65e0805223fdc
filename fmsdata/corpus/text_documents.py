"""The documents of one text file, from the first to the last, in little memory."""

import io
from collections.abc import Iterator
from typing import BinaryIO, cast

from fmsdata.core.limits import describe_os_error
from fmsdata.errors import DataError
from fmsdata.formats import format_of, open_stream
from fmsdata.formats.base import Documents
from fmsdata.formats.parquet import NAMES, stream_parquet
from fmsdata.storage.clients.base import Entry
from fmsdata.storage.local import file_entry
from fmsdata.storage.location import Location
from fmsdata.storage.seekable import RemoteFile

READ = 1 << 22  # bytes that are read at once


def read_documents(
    folder: Location, file: Entry, column: str | None = None, *, skip_bad: bool = False
) -> Iterator[Documents]:
    """The documents of a text file of any format, local or remote. A changed or cut file is an error.

    With `skip_bad`, a bad line becomes an empty document and is listed.

    >>> folder = Location("corpus/web")                                                           # doctest: +SKIP
    >>> for documents in read_documents(folder, Entry("a.jsonl.gz", size, version), "text"):      # doctest: +SKIP
    ...     print(documents.first, len(documents))
    """
    name = str(folder / file.name)
    with _open(folder, file) as opened:
        if format_of(file.name).kind == "parquet":
            yield from stream_parquet(opened, name, NAMES[0] if column is None else column)
        else:
            stream = open_stream(name, column, skip_bad=skip_bad)
            while data := opened.read(READ):
                yield stream.feed(data)
            yield stream.finish()
    if folder.local is not None and file_entry(folder.local, file.name)[1:] != file[1:]:
        raise DataError(f"{name}: the file was written to while it was read; wait until it is whole")


def _open(folder: Location, file: Entry) -> BinaryIO:
    place = folder / file.name
    if place.local is None:
        return cast(BinaryIO, io.BufferedReader(RemoteFile(place, file), READ))
    try:
        return open(place.local, "rb")
    except OSError as error:
        raise DataError(f"{place}: cannot be read: {describe_os_error(error)}") from None
