"""The file of tokenized rows, which all ranks and workers of a node map.

It is an Arrow IPC file with a row for each row of the dataset: its tokens, and the runs of them that
are trained. Pickling a table sends its path.
"""

import hashlib
import mmap
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fmsdata.core.keys import Ints, offsets
from fmsdata.epochs.encoded import Encoded, Int32s
from fmsdata.errors import DataError
from fmsdata.storage.own_folder import is_private, open_own_file, open_own_folder

COLUMNS = ("tokens", "trained")  # lists of integers


class TokenTable:
    """The tokens of all rows.

    >>> table = TokenTable("rows.arrow")     # doctest: +SKIP
    >>> table.tokens(3)                      # doctest: +SKIP
    array([ 97,  98,  99,   0], dtype=int32)
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            batches = self._map()
        except FileNotFoundError:
            raise DataError(
                f"{self.path}: the tokenized rows are not there; was the cache removed, or is this another machine? "
                "Create the FineTuningRows again"
            ) from None
        except (OSError, ValueError) as error:  # of the file, or of Arrow
            raise DamagedTableError(f"{self.path}: can't be read ({error})") from None
        lists = [[_flat(batch.column(name)) for batch in batches] for name in COLUMNS]
        self._tokens, runs = ([values for values, _ in parts] for parts in lists)
        lengths, run_lengths = (np.concatenate([np.empty(0, np.int64), *(n for _, n in parts)]) for parts in lists)
        self.starts: Ints = offsets(lengths)  # of each row in all tokens
        self._first_rows = offsets(np.array([batch.num_rows for batch in batches], np.int64))
        self._runs: Int32s = np.concatenate([np.empty(0, np.int32), *runs])
        self._first_runs = offsets(run_lengths)

    def _map(self) -> list[Any]:
        import pyarrow as pa  # rows of other kinds do not need it

        with open_own_folder(str(self.path.parent)) as folder:
            fd = open_own_file(self.path.name, os.O_RDONLY, folder)
        try:
            if not is_private(os.stat(fd)):
                raise ValueError("others can write to it")
            reader = pa.ipc.open_file(pa.py_buffer(mmap.mmap(fd, 0, access=mmap.ACCESS_READ)))
        finally:
            os.close(fd)
        if not reader.schema.equals(_schema()):
            raise ValueError(f"its columns are {', '.join(reader.schema.names)}")
        return [reader.get_batch(i) for i in range(reader.num_record_batches)]

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenTable, (str(self.path),)

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def lengths(self) -> Ints:
        """The number of tokens of each row."""
        return np.diff(self.starts)

    @cached_property
    def described(self) -> str:
        """The number of tokens, and a digest of all lengths: another version of a tokenizer may give others."""
        digest = hashlib.blake2b(self.starts.astype("<i8").tobytes(), digest_size=8).hexdigest()
        return f"{self.starts[-1]} in {len(self)} rows, {digest}"

    def tokens(self, row: int) -> Int32s:
        """The tokens of a row, as a view of the file."""
        part = int(np.searchsorted(self._first_rows, row, side="right")) - 1
        before = self.starts[self._first_rows[part]]
        found: Int32s = self._tokens[part][self.starts[row] - before : self.starts[row + 1] - before]
        return found

    def runs(self, row: int) -> list[list[int]]:
        """Start and stop of each run of trained tokens of a row."""
        runs: list[list[int]] = self._runs[self._first_runs[row] : self._first_runs[row + 1]].reshape(-1, 2).tolist()
        return runs

    def trained(self, rows: Ints, start: Ints, stop: Ints) -> Ints:
        """How many tokens are trained from `start` to `stop - 1` of each row."""
        at = self.starts[rows]
        return self._trained_before(at + stop) - self._trained_before(at + np.minimum(start, stop))

    def _trained_before(self, place: Ints) -> Ints:
        """How many tokens are trained before places in all tokens."""
        starts, before = self._run_places
        run = np.searchsorted(starts, place, side="right") - 1
        inside = np.minimum(place - starts[run], np.diff(before)[run])
        return np.where(run < 0, 0, before[run] + inside)

    @cached_property
    def _run_places(self) -> tuple[Ints, Ints]:
        """Where each run starts in all tokens, and how many tokens are trained before it."""
        edges = self._runs.reshape(-1, 2).astype(np.int64)
        of_rows = np.repeat(self.starts[:-1], np.diff(self._first_runs) // 2)
        starts = np.append(of_rows + edges[:, 0], np.int64(self.starts[-1]))
        return starts, offsets(np.append(edges[:, 1] - edges[:, 0], 0))


class DamagedTableError(DataError):
    """A file of rows that can't be read."""


def _flat(column: Any) -> tuple[npt.NDArray[Any], Ints]:
    """The values of a list column, without copying them, and the length of each list."""
    return column.flatten().to_numpy(zero_copy_only=True), column.value_lengths().to_numpy().astype(np.int64)


def _schema() -> Any:
    import pyarrow as pa

    return pa.schema([(name, pa.large_list(pa.int32())) for name in COLUMNS])


def write_table(path: Path, parts: Iterable[Encoded], done: Callable[[int], None]) -> None:
    """Write the rows, some at a time."""
    import pyarrow as pa

    schema = _schema()
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, schema) as writer:
        for part in parts:
            lists = [
                pa.LargeListArray.from_arrays(pa.array(offsets(counts), pa.int64()), pa.array(values, pa.int32()))
                for values, counts in ((part.tokens, part.lengths), (part.runs, part.run_lengths))
            ]
            writer.write_batch(pa.record_batch(lists, schema=schema))
            done(len(part.lengths))
    with suppress(OSError):
        path.chmod(0o600)
