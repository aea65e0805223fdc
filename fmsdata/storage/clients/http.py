"""The client for files behind http and https URLs.

It asks fsspec for the session and sends the requests itself, to see the headers of each response.
"""

from typing import ClassVar

from fmsdata.errors import ConfigError
from fmsdata.storage.clients.base import FileBytes, body_range, check_version, range_header, read_body, version_of
from fmsdata.storage.clients.generic import AsyncClient


class HttpClient(AsyncClient):
    """Files behind http(s) URLs."""

    reports_versions: ClassVar[bool] = True

    async def read(self, path: str, start: int, stop: int | None, version: str | None) -> FileBytes:
        session = await self._files.set_session()
        settings = dict(self._files.kwargs)
        request_headers = {**settings.pop("headers", {}), "Accept-Encoding": "identity"}
        if stop is not None:
            request_headers["Range"] = range_header(start, stop)
        async with session.get(self._files.encode_url(path), headers=request_headers, **settings) as response:
            response.raise_for_status()
            headers = response.headers
            if headers.get("Content-Encoding", "identity") != "identity":
                raise ConfigError(f"{path}: the server compresses it in transit, so parts of it can't be read")
            found = version_of(headers)
            check_version(version, found)
            skip, size = body_range(
                response.status, headers.get("Content-Range"), headers.get("Content-Length"), start, stop
            )
            return FileBytes(await read_body(response.content.read, skip, size), found)
