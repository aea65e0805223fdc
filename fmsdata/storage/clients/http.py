"""TODO."""

from fmsdata.errors import ConfigError
from fmsdata.storage.clients.base import Fetched, check_version, collect, place, span, version_of
from fmsdata.storage.clients.filesystem import AsyncClient


class HttpClient(AsyncClient):
    """Files behind http(s) URLs."""

    async def read(self, path: str, start: int, stop: int | None, version: str | None) -> Fetched:
        session = await self._files.set_session()
        settings = dict(self._files.kwargs)
        headers = {**settings.pop("headers", {}), "Accept-Encoding": "identity"}
        if stop is not None:
            headers["Range"] = span(start, stop)
        async with session.get(self._files.encode_url(path), headers=headers, **settings) as answer:
            answer.raise_for_status()
            told = answer.headers
            if told.get("Content-Encoding", "identity") != "identity":
                raise ConfigError(f"{path}: the server compresses it on the way, so parts of it can't be read")
            found = version_of(told)
            check_version(version, found)
            skip, size = place(answer.status, told.get("Content-Range"), told.get("Content-Length"), start, stop)
            return Fetched(await collect(answer.content.read, skip, size), found)

    async def is_folder(self, path: str) -> bool:
        return bool(await self.call("ls", path, detail=True))
