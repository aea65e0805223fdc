"""The folder with the work in progress: `OUTPUT/.fmsdata-prepare`.

A unit of work is done when its record is there: a small JSON file that is written after everything
else of it. Every file is written completely or not at all, and always with the same content. So
work that is done twice, after a kill or on two nodes, does no harm.
"""

import json
from typing import Any

from fmsdata.corpus.listing import UNFINISHED
from fmsdata.corpus.prepare.settings import Settings, Unit
from fmsdata.errors import DataError, MissingError
from fmsdata.storage.location import Location

SETTINGS = "settings.json"
UNITS, SHARDS = "units", "shards"


class WorkFolder:
    """Names and records in the folder."""

    def __init__(self, output: Location) -> None:
        self.folder = output / UNFINISHED

    def settings(self) -> Settings | None:
        """The settings of the work that was begun here, if any."""
        data = read_if_there(self.folder, SETTINGS)
        return None if data is None else Settings.parse(data, str(self.folder / SETTINGS))

    def begin(self, settings: Settings) -> None:
        (self.folder / SETTINGS).write_bytes(json.dumps(settings.to_json(), indent=1).encode())

    def unit_file(self, unit: Unit | str, piece: int, kind: str) -> Location:
        name = unit if isinstance(unit, str) else unit.name
        return self.folder / UNITS / f"{name}-{piece:04}.{kind}"

    def record(self, kind: str, name: str) -> dict[str, Any] | None:
        """What was recorded when something was done; None if it is not done."""
        data = read_if_there(self.folder / kind, f"{name}.json")
        if data is None:
            return None
        try:
            found: dict[str, Any] = json.loads(data)
        except ValueError:
            raise DataError(f"{self.folder / kind / name}.json is damaged; remove it, and run again") from None
        return found

    def records(self, kind: str) -> set[str]:
        """The names of everything that is done."""
        files = (self.folder / kind).alone().level().files
        return {entry.name.removesuffix(".json") for entry in files if entry.name.endswith(".json")}

    def done(self, kind: str, name: str, record: dict[str, Any]) -> None:
        (self.folder / kind / f"{name}.json").write_bytes(json.dumps(record).encode())

    def remove_unfinished(self, output: Location) -> None:
        """Remove what a run that was killed left of shards that it was writing."""
        if output.local is not None:
            for path in sorted(output.local.rglob(".*.arrow.*.unfinished")):
                path.unlink(missing_ok=True)

    def remove(self) -> None:
        for kind in (UNITS, SHARDS):
            (self.folder / kind).remove_folder(first="")
        self.folder.remove_folder(first=SETTINGS)


def read_if_there(folder: Location, name: str) -> bytes | None:
    """The content of a small file, if it exists.

    Lists the folder first: a request for a missing file counts as a failure.
    """
    if folder.local is not None:
        path = folder.local / name
        return path.read_bytes() if path.exists() else None
    if not any(entry.name == name for entry in folder.alone().level().files):
        return None
    try:
        return (folder / name).read_bytes()
    except MissingError:
        return None
