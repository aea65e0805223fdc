"""What reading from remote storage costs, as `loader.stats()` tells it."""

from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True)
class StorageStats:
    """What was fetched of remote shards since the loader was made, and how long reading waited for it.

    >>> print(loader.stats().storage.waited)     # doctest: +SKIP
    0.3
    """

    requests: int = 0
    bytes: int = 0
    retries: int = 0
    cached_bytes: int = 0  # that came from the cache on the node's disk instead
    again_bytes: int = 0  # of documents that had been given up for want of memory
    waited: float = 0.0  # seconds in which the pipeline had to wait; over all workers of a rank
    held_bytes: int = 0  # in memory now

    def __add__(self, other: "StorageStats") -> "StorageStats":
        return StorageStats(**{one.name: getattr(self, one.name) + getattr(other, one.name) for one in fields(self)})

    def __bool__(self) -> bool:
        """Whether there is anything to tell."""
        return bool(self.requests or self.cached_bytes)

    def __str__(self) -> str:
        parts = [f"{self.bytes / 1e6:,.1f} MB in {self.requests:,} requests", f"waited {self.waited:.1f} s"]
        if self.retries:
            parts.append(f"{self.retries:,} retries")
        if self.cached_bytes:
            parts.append(f"{self.cached_bytes / 1e6:,.1f} MB from the cache")
        if self.again_bytes:
            parts.append(f"{self.again_bytes / 1e6:,.1f} MB read again")
        return ", ".join(parts)
