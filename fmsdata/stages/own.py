"""Stages of the user's own in a configuration: `documents.stages` and `pack.stages`.

Each is a subclass of `Stage`, or a function that takes the stage below and returns one, named
`module:name`, with its arguments by name. Its arguments are part of the description of the run, also
those that it keeps in private attributes.
"""

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from fmsdata.core.own import OwnName
from fmsdata.core.stage import MadeBy, Stage
from fmsdata.core.wording import shown
from fmsdata.errors import ConfigError, FmsdataError

Described: TypeAlias = str | Mapping[str, Any]  # module:name, or that as `name` with arguments
BELOW = "the stage below it"


def with_stages(below: Stage, described: Iterable[Described], folder: str | None = None) -> Stage:
    """A stage with some stages of the user's own above it, the last one on top.

    Modules are also looked up in `folder`.

    >>> with_stages(reader, [{"name": "my_stages:DropRepetitive", "max_share": 0.1}])     # doctest: +SKIP
    """
    for one in described:
        name, arguments = check_described(one, folder)
        try:
            stage = name.load()(below, **arguments)
        except FmsdataError:
            raise
        except Exception as error:
            raise ConfigError(f"{name} failed with {arguments}: {type(error).__name__}: {error}") from error
        if not isinstance(stage, Stage):
            raise ConfigError(f"{name} returned {shown(stage)}; it must return a stage, as fmsdata.Filter(below, ...)")
        if stage is not below:
            vars(stage)["_made_by"] = MadeBy(name, arguments)
        below = stage
    return below


def check_described(described: Described, folder: str | None = None) -> tuple[OwnName, dict[str, Any]]:
    """The name and the arguments of a stage. Raises unless it exists and takes these arguments."""
    if not isinstance(described, str | Mapping):
        raise ConfigError(f"a stage is {shown(described)}; it must be module:name, or a mapping with its `name`")
    arguments = {"name": described} if isinstance(described, str) else dict(described)
    if not isinstance(written := arguments.pop("name", None), str):
        raise ConfigError(f"a stage is {shown(described)}; it must have a `name`, as in {{name: my_module:MyStage}}")
    if ":" not in written:
        raise ConfigError(f"stage {written!r}: name a stage of your own as package.module:Class")
    name = OwnName.found_from("stage", written, folder)
    made = name.load()
    if isinstance(made, type) and not issubclass(made, Stage):
        raise ConfigError(f"{name}: the class is no stage; subclass fmsdata.Stage")
    name.check_arguments(arguments, BELOW)
    return name, arguments
