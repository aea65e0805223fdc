"""Settings for reading remote shards. They are also the `storage` section of a YAML file.

This is their only description. The fields say what each setting is and how it is checked;
`fmsdata.config` derives the YAML section, its error messages and its JSON schema from them.
"""

from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any

from fmsdata.core.checks import seconds, whole
from fmsdata.core.wording import shown
from fmsdata.errors import ConfigError


class SettingKind(Enum):
    """What the value of a setting must be."""

    BYTES = "bytes"  # YAML files may also say 256MB
    COUNT = "count"
    POSITIVE_COUNT = "positive count"
    SECONDS = "seconds"
    LOCAL_FOLDER = "local folder"
    SECTION = "section"  # settings in their own right, or None


def _about(kind: SettingKind, description: str) -> dict[str, Any]:
    return {"kind": kind, "description": description}


def _check(settings: Any, section: str) -> None:
    for setting in fields(settings):
        name, value = f"{section}.{setting.name}", getattr(settings, setting.name)
        match setting.metadata["kind"]:
            case SettingKind.BYTES | SettingKind.COUNT:
                whole(name, value)
            case SettingKind.POSITIVE_COUNT:
                whole(name, value, least=1)
            case SettingKind.SECONDS:
                seconds(name, value)
            case SettingKind.LOCAL_FOLDER:
                optional = setting.default is None and value is None
                if not optional and (not isinstance(value, str) or not value or "://" in value):
                    raise ConfigError(f"{name} is {shown(value)}; it must be a folder on a local disk")


@dataclass(frozen=True, kw_only=True)
class CacheSettings:
    """Where a node keeps what its processes fetched.

    >>> cache = CacheSettings(path="/scratch/cache", limit=200 * 10**9)
    """

    path: str = field(
        metadata=_about(SettingKind.LOCAL_FOLDER, "A folder on a disk of the node, for all processes of one user.")
    )
    limit: int = field(metadata=_about(SettingKind.BYTES, "How much it holds at most, such as 200GB."))

    def __post_init__(self) -> None:
        _check(self, "storage.cache")
        whole("storage.cache.limit", self.limit, least=1)


@dataclass(frozen=True, kw_only=True)
class SpoolSettings:
    """Where a process keeps blocks that it still needs and that do not fit into memory.

    >>> spool = SpoolSettings(path="/scratch", limit=200 * 10**9)
    """

    path: str | None = field(
        default=None,
        metadata=_about(
            SettingKind.LOCAL_FOLDER,
            "A folder on a disk of the node; by default that for temporary files (`$TMPDIR`, `/tmp`, `/var/tmp`) or "
            "the user's cache folder, whichever is first on a disk.",
        ),
    )
    limit: int = field(
        default=64 << 30, metadata=_about(SettingKind.BYTES, "How much each process stores at most, such as 200GB.")
    )

    def __post_init__(self) -> None:
        _check(self, "storage.spool")
        whole("storage.spool.limit", self.limit, least=1)


@dataclass(frozen=True, kw_only=True)
class Storage:
    """How shards that are not on a local disk are read, by each worker. None of this changes the
    stream.

    >>> storage = Storage(prefetch_bytes=512 << 20, connections=64)
    """

    prefetch_bytes: int = field(
        default=256 << 20,
        metadata=_about(SettingKind.BYTES, "How much of the shards is held in memory, fetched ahead or in use."),
    )
    connections: int = field(default=32, metadata=_about(SettingKind.POSITIVE_COUNT, "Requests at a time."))
    retries: int = field(default=8, metadata=_about(SettingKind.COUNT, "Attempts after the first, for each read."))
    timeout: float = field(default=20.0, metadata=_about(SettingKind.SECONDS, "Seconds for one attempt."))
    deadline: float = field(
        default=120.0,
        metadata=_about(
            SettingKind.SECONDS,
            "Seconds for a read with all its attempts; after that the run ends with an error, and can be resumed.",
        ),
    )
    cache: CacheSettings | None = field(
        default=None,
        metadata=_about(SettingKind.SECTION, "Where a node keeps what its processes fetched; by default nowhere."),
    )
    spool: SpoolSettings | None = field(
        default=SpoolSettings(),
        metadata=_about(
            SettingKind.SECTION,
            "Where a process keeps blocks in use that do not fit into `prefetch_bytes`; null: they are fetched again.",
        ),
    )

    def __post_init__(self) -> None:
        _check(self, "storage")
