"""How remote shards are read: the settings below `storage` in YAML."""

from dataclasses import dataclass
from typing import Any

from fmsdata.core.checks import whole
from fmsdata.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class CacheSettings:
    """A folder on the node's own disk that keeps what was fetched, for all processes of the node."""

    path: str
    limit: int  # bytes

    def __post_init__(self) -> None:
        if not isinstance(self.path, str) or not self.path or "://" in self.path:
            raise ConfigError(f"storage.cache.path is {self.path!r}; it must be a folder on a local disk")
        whole("storage.cache.limit", self.limit, least=1)


@dataclass(frozen=True, kw_only=True)
class Storage:
    """How shards that are not on a local disk are read, by each worker process.

    >>> storage = Storage(prefetch_bytes=512 << 20, connections=64)
    """

    prefetch_bytes: int = 256 << 20  # of shards that are held in memory: fetched ahead, or in use
    connections: int = 32  # requests at a time
    retries: int = 8  # attempts after the first, for one read
    timeout: float = 20.0  # seconds for one attempt
    deadline: float = 120.0  # seconds for a read with all its attempts
    cache: CacheSettings | None = None

    def __post_init__(self) -> None:
        whole("storage.prefetch_bytes", self.prefetch_bytes)
        whole("storage.connections", self.connections, least=1)
        whole("storage.retries", self.retries)
        _seconds("storage.timeout", self.timeout)
        _seconds("storage.deadline", self.deadline)


def _seconds(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        raise ConfigError(f"{name} is {value!r}; it must be a number of seconds above zero")
