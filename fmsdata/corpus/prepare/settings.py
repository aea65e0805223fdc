"""What a prepared corpus depends on: the options, the tokenizer, and the input files.

Equal settings give equal bytes, on any number of processes and machines. They are kept beside the
work in progress and with the finished corpus, so that a second run with others is noticed.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

from fmsdata.errors import ConfigError, DataError

VERSION = 1
UNIT_BYTES = 64 << 20  # of a file that are tokenized as one piece of work
PIECE_TOKENS = 16 << 20  # tokens that are held in memory, and permuted, while a unit is tokenized
GROUP_PIECES = 64  # pieces whose documents are distributed over the same shards
SHARD_TOKENS = 100_000_000
NAMES = {  # how a user writes it
    "shard_tokens": "--shard-tokens",
    "validation": "--validation",
    "shuffle": "--shuffle",
    "deduplicate": "--deduplicate",
    "column": "--column",
    "seed": "--seed",
    "skip_bad": "--skip-bad",
    "tokenizer": "the tokenizer",
}


class InputFile(NamedTuple):
    """A file of text, as it was listed."""

    source: str
    path: str  # relative to the folder that was given
    inner: str  # relative to its source
    size: int
    version: str | None


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the bytes of a prepared corpus depend on."""

    tokenizer: str  # its identity
    dtype: str
    column: str | None
    seed: int
    shuffle: bool
    shard_tokens: int | None  # None: one shard for each file
    validation: float
    skip_bad: bool
    deduplicate: bool
    unit_bytes: int = UNIT_BYTES
    piece_tokens: int = PIECE_TOKENS
    group_pieces: int = GROUP_PIECES
    version: int = VERSION
    files: tuple[InputFile, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "files": [list(file) for file in self.files]}

    @classmethod
    def parse(cls, data: bytes, name: str) -> "Settings":
        """The settings in the content of a file."""
        try:
            found: dict[str, Any] = json.loads(data)
            found = found.get("settings", found)
            files = tuple(InputFile(*file) for file in found["files"])
            return cls(**{field.name: found[field.name] for field in fields(cls)} | {"files": files})
        except (ValueError, TypeError, KeyError, AttributeError):
            raise DataError(
                f"{name} is not a file of this version of `fmsdata prepare`; remove the output folder and start again"
            ) from None

    def require_same(self, before: "Settings", output: str) -> None:
        """Raise if a run with these settings can't continue what a run with others began."""
        for difference in self._differences(before):
            raise ConfigError(
                f"{output} was begun with other settings: {difference}; use the same ones to continue, "
                "another folder, or remove this one to start again"
            )

    def _differences(self, before: "Settings") -> Iterator[str]:
        for field in fields(self):
            old, new = getattr(before, field.name), getattr(self, field.name)
            if field.name == "files" or old == new or (field.name == "skip_bad" and new):
                continue  # documents that a run skips now were an error before: none was finished
            yield f"{NAMES.get(field.name, field.name)} was {_shown(old)} and is {_shown(new)} now"
        known = {file.path: file for file in before.files}
        for file in self.files:
            if file.path not in known:
                yield f"the file {file.path} is new"
            elif known[file.path] != file:
                yield f"the file {file.path} has changed"
        for path in sorted(known.keys() - {file.path for file in self.files}):
            yield f"the file {path} is gone"


def _shown(value: object) -> str:
    if value is None:
        return "not set"
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


class Unit(NamedTuple):
    """A part of a file that is tokenized as one piece of work."""

    number: int
    file: InputFile
    part: int
    parts: int

    def __str__(self) -> str:
        return self.file.path if self.parts == 1 else f"{self.file.path} (part {self.part + 1} of {self.parts})"

    @property
    def name(self) -> str:
        """The start of the names of its files in the work folder."""
        return f"{self.number:06}"

    @property
    def stored_bytes(self) -> float:
        return self.file.size / self.parts
