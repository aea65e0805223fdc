"""The files of fms-fsdp's datasets: Arrow shards of tokens, or Parquet files of text or tokens.

`file_type` says which of them are read, and `col_name` lists columns: the first one that a dataset
has holds its documents. Text is tokenized while it is read.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fmsdata.core.stage import Stage
from fmsdata.core.state import State
from fmsdata.corpus.counts import count_shards
from fmsdata.corpus.listing import all_shards
from fmsdata.errors import ConfigError, DataError
from fmsdata.stages.shard_reader import ShardReader
from fmsdata.stages.tokenize import Tokenize
from fmsdata.storage.location import Location

ARROW, PARQUET, AUTO = FILE_TYPES = ("arrow", "hf_parquet", "auto")
TOKENS = "tokens"  # the column of Arrow shards if `col_name` is for the text of other files


@dataclass(frozen=True, kw_only=True)
class Datasets:
    """How datasets are read."""

    file_type: str
    columns: Sequence[str]
    tokenizer: Any  # the path of a tokenizer; None if there is none
    strip: Sequence[int]
    min_length: int

    def open(self, root: Location, name: str, _removed: State | None = None) -> Stage:
        """A dataset by its name, also if the config no longer names it."""
        folder = root / name
        names = all_shards(folder).names
        arrow, parquet = ([file for file in names if file.endswith(end)] for end in (".arrow", ".parquet"))
        if names and not arrow and not parquet:
            raise ConfigError(f"dataset {name!r}: it has {names[0]}, but no .arrow or .parquet files")
        self._check_kind(name, arrow, parquet)
        read: dict[str, Any] = {"strip": self.strip, "min_length": self.min_length}
        if self.file_type == ARROW or not parquet:
            column = self._column(name, arrow[0], partial(_check_arrow, folder, arrow[0])) if arrow else None
            return ShardReader(folder, name=name, column=column, **read)
        reader = partial(ShardReader, folder, name=name, files="**/*.parquet" if arrow else None)
        opened: dict[str | None, ShardReader] = {}
        column = self._column(name, parquet[0], lambda column: opened.setdefault(column, reader(column=column)))
        if not opened[column].holds_text():
            return reader(column=column, **read)
        return Tokenize(opened[column], self._tokenizer(name), **read)

    def _check_kind(self, name: str, arrow: Sequence[str], parquet: Sequence[str]) -> None:
        """Raise if a dataset has files of two kinds, or only files of the other kind."""
        if self.file_type == AUTO and arrow and parquet:
            raise ConfigError(
                f"dataset {name!r}: it has {arrow[0]} and {parquet[0]}; with file_type 'auto' a dataset has files of "
                "one kind: move the others to a dataset of their own, or set file_type to 'arrow' or 'hf_parquet'"
            )
        wanted, other = (parquet, arrow) if self.file_type == PARQUET else (arrow, parquet)
        if self.file_type != AUTO and other and not wanted:
            raise ConfigError(
                f"dataset {name!r}: file_type is {self.file_type!r}, but the folder has {other[0]} and no such files; "
                "use file_type 'auto'"
            )

    def _column(self, name: str, file: str, check: Callable[[str], object]) -> str | None:
        """The first of the columns that a dataset has; None for the usual one of Arrow shards."""
        is_arrow = file.endswith(".arrow")
        usual = self.file_type == AUTO and is_arrow
        if len(self.columns) == 1 and is_arrow and not usual:
            return self.columns[0]  # not looked for at the start, only when the shard is read
        failed = ""
        for column in self.columns:
            if usual and column == TOKENS:
                break
            try:
                check(column)
            except DataError as error:
                failed = str(error)
            else:
                return column
        if usual:
            return None
        raise ConfigError(f"dataset {name!r}: none of the columns {', '.join(self.columns)} (col_name) fits: {failed}")

    def _tokenizer(self, name: str) -> Any:
        if not self.tokenizer:
            raise ConfigError(
                f"dataset {name!r} holds text, and tokenizer_path is {self.tokenizer!r}; "
                "it must be the path of a tokenizer.json, or of a folder that holds one"
            )
        return self.tokenizer


def _check_arrow(folder: Location, file: str, column: str) -> None:
    """Raise if a shard has no such column of tokens."""
    count_shards(folder, [file], column)
