"""What is open and what is fetched, for lanes that are read together."""

from fmsdata.readers import ArrowShard
from fmsdata.remote_source import RemoteSource
from fmsdata.shelf import Shelf
from fmsdata.storage import Mapped, Recent
from fmsdata.storage_settings import Storage
from fmsdata.storage_stats import StorageStats

OPEN_SHARDS = 256


class Files:
    """Shards that are mapped, those used last, and blocks of remote ones. Nothing is opened before it is read."""

    def __init__(self, share: float = 0.0) -> None:
        """`share` of the run's lanes are read together."""
        self.share = share
        self.shards: Recent[ArrowShard] = Recent(OPEN_SHARDS)
        self.mapped = Mapped()
        self.sources: dict[object, RemoteSource] = {}
        self._shelves: dict[Storage, Shelf] = {}

    def shelf(self, storage: Storage) -> Shelf:
        if storage not in self._shelves:
            self._shelves[storage] = Shelf(storage, all_lanes=self.share == 1)
        return self._shelves[storage]

    def traffic(self) -> StorageStats:
        """What was fetched so far."""
        return sum((shelf.traffic() for shelf in self._shelves.values()), StorageStats())

    def close(self) -> None:
        """Fetch nothing more."""
        for shelf in self._shelves.values():
            shelf.close()
