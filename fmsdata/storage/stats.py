"""What reading from remote storage costs: the storage part of `loader.stats()`."""

from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True)
class StorageStats:
    """What was fetched of remote shards since the loader was created, and the time spent waiting
    for it.

    >>> print(loader.stats().storage.waited)     # doctest: +SKIP
    0.3
    """

    requests: int = 0
    bytes: int = 0
    retries: int = 0
    cached_bytes: int = 0  # read from the cache on the node's disk instead
    again_bytes: int = 0  # fetched a second time, because the documents were evicted for lack of memory
    waited: float = 0.0  # seconds in which the pipeline had to wait, over all workers of a rank
    held_bytes: int = 0  # in memory now
    spooled_bytes: int = 0  # in the spool files now

    def __add__(self, other: "StorageStats") -> "StorageStats":
        names = [field.name for field in fields(self)]
        return StorageStats(**{name: getattr(self, name) + getattr(other, name) for name in names})

    def __bool__(self) -> bool:
        """Whether anything was read from remote storage."""
        return bool(self.requests or self.cached_bytes)

    def __str__(self) -> str:
        parts = [f"{self.bytes / 1e6:,.1f} MB in {self.requests:,} requests", f"waited {self.waited:.1f} s"]
        if self.retries:
            parts.append(f"{self.retries:,} retries")
        if self.cached_bytes:
            parts.append(f"{self.cached_bytes / 1e6:,.1f} MB from the cache")
        if self.again_bytes:
            parts.append(f"{self.again_bytes / 1e6:,.1f} MB read again")
        if self.spooled_bytes:
            parts.append(f"{self.spooled_bytes / 1e6:,.1f} MB spooled")
        return ", ".join(parts)
