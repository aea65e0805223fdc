"""The errors a user can meet. Each names the value that was wrong and the way out."""


class FmsdataError(Exception):
    """The base of every error that fmsdata raises on purpose."""


class ConfigError(FmsdataError):
    """An argument or a configuration value that cannot be used."""


class DataError(FmsdataError):
    """Shards that are missing, torn, or not of a kind that can be read."""


class CountsError(DataError):
    """Counts that disagree with the files they describe."""


class StorageError(DataError):
    """A filesystem that does not give what was asked of it."""


class MissingError(StorageError):
    """A file or a folder that is not there."""


class DeniedError(StorageError):
    """What these credentials may not do."""


class StateError(FmsdataError):
    """A saved state that does not belong to this run."""


class StageError(FmsdataError):
    """A stage, often a user's own, that broke its contract."""


class WorkerError(FmsdataError):
    """A worker process that ended before its time."""


class CheckpointError(FmsdataError):
    """A checkpoint that cannot be written, or cannot be gone on from."""


class FmsdataWarning(UserWarning):
    """What a user should know of, but need not stop for."""
