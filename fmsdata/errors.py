"""The errors that a user can meet. Each message names the value that was wrong and the way out."""

import re

_OBJECT = re.compile(r"<(?:[^<> ]+\.)?(\w+) object at 0x[0-9a-f]+>")
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def without_addresses(text: str) -> str:
    """A text that may hold the `repr` of objects, without where they are in memory.

    >>> without_addresses("lanes is <__main__.Lanes object at 0x7f2b8c0>")
    'lanes is an object of class Lanes'
    """
    return _ADDRESS.sub("", _OBJECT.sub(r"an object of class \1", text))


class FmsdataError(Exception):
    """The base of every error that fmsdata raises on purpose."""

    def __str__(self) -> str:
        return without_addresses(super().__str__())


class ConfigError(FmsdataError):
    """An argument or a configuration value that cannot be used."""


class NoSuchAttributeError(ConfigError, AttributeError):
    """An attribute of torch's loaders that a trainer looks up, and a loader of fmsdata does not have."""


class DataError(FmsdataError):
    """Shards that are missing, truncated, or of an unknown format."""


class CountsError(DataError):
    """Counts that disagree with the files they describe."""


class StorageError(DataError):
    """A request to a filesystem that failed."""


class MissingError(StorageError):
    """A file or a folder that does not exist."""


class DeniedError(StorageError):
    """A request that the credentials do not allow."""


class StateError(FmsdataError):
    """A saved state that does not belong to this run."""


class StageError(FmsdataError):
    """A stage, often a user's own, that broke its contract."""


class WorkerError(FmsdataError):
    """A worker process or a thread that died, or could not be started."""


class StallError(FmsdataError):
    """A batch that did not come within `stall_timeout`."""


class CheckpointError(FmsdataError):
    """A checkpoint that cannot be written, or cannot be resumed from."""


class FmsdataWarning(UserWarning):
    """Something that a user should know about, but that does not stop the run."""
