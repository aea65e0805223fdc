"""Rows are tokenized once, into a file of the user's cache.

The file is named by a digest of the texts of all rows and of everything that their tokens depend on.
So rows that changed are tokenized again, and the same rows never are. Of several processes that
need the file, one writes it, and the others wait.
"""

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from fmsdata.core.keys import key_of
from fmsdata.corpus.progress import showing_progress
from fmsdata.corpus.text_cache import TextCache
from fmsdata.epochs.encoded import Encoded, Encoder, batches_of
from fmsdata.epochs.keyed_random import KeyedRandom
from fmsdata.epochs.rows import read_rows
from fmsdata.epochs.token_table import DamagedTableError, TokenTable, write_table
from fmsdata.errors import DataError
from fmsdata.storage.atomic import replacing
from fmsdata.storage.own_folder import user_cache

AT_ONCE = 1024  # rows that are read and tokenized together
FOLDER = "fmsdata-rows"
LABELS = 2  # another number where the same texts get other tokens or labels
log = logging.getLogger("fmsdata")


class RowCache(TextCache):
    """The folder for tokenized rows: `cache`, or that of the user."""

    work = "tokenizes"
    contents = "the tokenized rows; set `cache` of FineTuningRows"

    def __init__(self, cache: str | os.PathLike[str] | None) -> None:
        base = user_cache() if cache is None else os.path.abspath(os.path.expanduser(cache))
        self.folder = Path(base) / FOLDER


class Tokenized(NamedTuple):
    """The tokens of all rows, and a digest of their texts."""

    table: TokenTable
    content: str


def tokenize_once(rows: Any, size: int, encoder: Encoder, cache: RowCache) -> Tokenized:
    """The tokens of all rows, from the cache or from the tokenizer.

    A dataset with an attribute `fingerprint`, a text, names its content itself, and is not read for it.
    """
    named = getattr(rows, "fingerprint", None)
    content = f"named {named}" if isinstance(named, str) else _digest(rows, size, encoder)
    key = f"rows\n{LABELS}\n{size}\n{content}\n{json.dumps(encoder.settings, sort_keys=True)}"
    path = cache.path(key, "arrow")
    table = _open(path)
    if table is None:
        with cache.lock(key):
            table = _open(path)
            if table is None:
                _write(rows, size, encoder, cache, path, content)
                table = TokenTable(path)
    return Tokenized(table, content)


def _open(path: Path) -> TokenTable | None:
    """The file, if it is there and can be read."""
    if not path.exists():
        return None
    try:
        return TokenTable(path)
    except DamagedTableError as error:
        log.warning("%s: the rows are tokenized again", error)
        return None


def _write(rows: Any, size: int, encoder: Encoder, cache: RowCache, path: Path, content: str) -> None:
    cache.clean(path)
    log.info("tokenizing %d rows into %s", size, path)
    digest = hashlib.sha256()

    def parts() -> Iterator[Encoded]:
        for first, contents in _contents(rows, size, encoder):
            _add(digest.update, contents)
            try:
                yield encoder.encode(contents, first)
            except DataError:
                raise
            except Exception as error:
                error.add_note(f"while tokenizing rows {first} to {first + len(contents) - 1}")
                raise
        if digest.hexdigest() != content and not content.startswith("named "):
            raise DataError(
                "the rows have other texts each time they are read, but they are tokenized once; remove what is "
                "random from the dataset, or save its rows first"
            )

    with showing_progress("tokenizing rows", size, lines=True) as progress:
        try:
            with replacing(path) as unfinished:
                write_table(unfinished, parts(), progress.advance)
        except OSError as error:
            if getattr(error, "__notes__", None):  # of reading a row
                raise
            raise cache.unwritable(error) from None


def _digest(rows: Any, size: int, encoder: Encoder) -> str:
    """A digest of the texts of all rows."""
    digest = hashlib.sha256()
    for _, contents in _contents(rows, size, encoder):
        _add(digest.update, contents)
    return digest.hexdigest()


def _add(update: Callable[[bytes], None], contents: list[tuple[str, ...]]) -> None:
    for texts in contents:
        for text in texts:
            data = text.encode(errors="surrogatepass")
            update(b"%d " % len(data))
            update(data)


def _contents(rows: Any, size: int, encoder: Encoder) -> Iterator[tuple[int, list[tuple[str, ...]]]]:
    """The texts of all rows, some at a time. What rows draw from global generators is the same each time."""
    calls = KeyedRandom()

    def read(seed: Callable[[int], None], first: int, stop: int) -> list[Any]:
        seed(key_of("fine-tuning rows", first))
        return read_rows(rows, range(first, stop))

    for first, stop in batches_of(size, AT_ONCE):
        some = calls.call(read, first, stop)
        yield first, [encoder.content(row, first + i) for i, row in enumerate(some)]
