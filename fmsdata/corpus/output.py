"""Checks of the folder that a new corpus is written to."""

import os

from fmsdata.errors import ConfigError
from fmsdata.storage.location import Location


def require_apart(source: Location, output: Location) -> None:
    """Raise if one of the folders is in the other: the next run would read what this one wrote."""
    if (source.local is None) != (output.local is None):
        return
    here, there = (_real(place) for place in (source, output))
    if here == there:
        raise ConfigError(f"the output {output} is the source itself; write to another folder")
    for inner, outer, names in (
        (there, here, f"the output {output} is inside the source {source}"),
        (here, there, f"the source {source} is inside the output {output}"),
    ):
        if inner.startswith(outer.rstrip("/") + "/"):
            raise ConfigError(f"{names}; write to a folder beside it")


def _real(place: Location) -> str:
    return place.url if place.local is None else os.path.realpath(place.local)


def require_empty(output: Location, but: str = "") -> None:
    """Raise if there is anything in the folder, except for one folder."""
    if output.local is not None and output.local.exists() and not output.local.is_dir():
        raise ConfigError(f"{output} is a file; write to a new or empty folder")
    found = output.alone().level()
    there = [name for name in [*found.folders, *(entry.name for entry in found.files)] if name != but]
    if there:
        raise ConfigError(f"{output} is not empty (there is {there[0]}); write to a new or empty folder, or remove it")
