"""The client for Google Cloud Storage.

gcsfs finds and renews the credentials, and has the session. The requests of the JSON API are sent here:
one attempt each, and with the generation of the object as a condition. A read of an object that was
replaced fails.
"""

import asyncio
import base64
import hashlib
import json
import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, ClassVar
from urllib.parse import quote, urlencode

from fmsdata.core.pages import Data
from fmsdata.errors import ConfigError
from fmsdata.storage.clients.base import (
    Entry,
    FileBytes,
    Page,
    body_range,
    check_version,
    range_header,
    read_body,
)
from fmsdata.storage.clients.generic import AsyncClient
from fmsdata.storage.retry import BadResponse, ErrorResponse
from fmsdata.storage.settings import Storage

API, UPLOADS = "storage/v1/", "upload/storage/v1/"
GENERATION = "X-Goog-Generation"
HASH = "X-Goog-Hash"
STORED_AS = "X-Goog-Stored-Content-Encoding"


class GcsClient(AsyncClient):
    """Objects of Google Cloud Storage.

    Servers that emulate it do not name the generation in their responses, so it is looked up as well
    when a shard is first read.
    """

    lists_in_pages: ClassVar[bool] = True

    @classmethod
    async def files(cls, filesystem: type[Any], options: Mapping[str, Any], storage: Storage) -> Any:  # noqa: ARG003
        loop = asyncio.get_running_loop()
        ours = {"asynchronous": True, "loop": loop, "skip_instance_cache": True}
        # It may ask other servers for credentials, which blocks.
        return await asyncio.to_thread(lambda: filesystem(**options, **ours))

    async def open(self) -> None:
        self._session = await self._files._set_session()

    async def read(self, path: str, start: int, stop: int | None, version: str | None) -> FileBytes:
        headers = {} if stop is None else {"Range": range_header(start, stop)}
        query = {"alt": "media"} if version is None else {"alt": "media", "ifGenerationMatch": version}
        async with self._request("GET", *self._place(path), query=query, headers=headers) as response:
            if response.headers.get(STORED_AS, "identity") != "identity":
                raise ConfigError(f"{path}: it is stored compressed (Content-Encoding), so parts of it can't be read")
            found = response.headers.get(GENERATION)
            check_version(version, found)
            skip, size = body_range(
                response.status,
                response.headers.get("Content-Range"),
                response.headers.get("Content-Length"),
                start,
                stop,
            )
            data = await read_body(response.content.read, skip, size)
            if stop is None:
                _check_hash(",".join(response.headers.getall(HASH, ())), data)
            return FileBytes(data, found)

    async def info(self, path: str) -> Entry:
        async with self._request("GET", *self._place(path)) as response:
            found = _parsed(await response.read())
        return Entry(path.rpartition("/")[2], int(found["size"]), found["generation"])

    async def list(self, folder: str, recursive: bool, page: str | None) -> Page:
        bucket, key, _ = self._files.split_path(folder)
        prefix = f"{key.strip('/')}/" if key.strip("/") else ""
        query = {"prefix": prefix, "fields": "items(name,size,generation),prefixes,nextPageToken"}
        if not recursive:
            query["delimiter"] = "/"
        if page is not None:
            query["pageToken"] = page
        async with self._request("GET", bucket, query=query) as response:
            found = _parsed(await response.read())
        files = [
            Entry(item["name"].removeprefix(prefix), int(item["size"]), item["generation"])
            for item in found.get("items", ())
            if not item["name"].endswith("/")  # an object that stands for a folder
        ]
        folders = [name.removeprefix(prefix).rstrip("/") for name in found.get("prefixes", ())]
        return Page(files, folders, found.get("nextPageToken"))

    async def write(self, path: str, data: bytes) -> None:
        bucket, key = self._place(path)
        mark = secrets.token_hex(16)
        kinds = {"application/json": json.dumps({"name": key}).encode(), "application/octet-stream": data}
        parts = [
            b"--%b\r\nContent-Type: %b\r\n\r\n%b\r\n" % (mark.encode(), kind.encode(), kinds[kind]) for kind in kinds
        ]
        body = b"".join([*parts, b"--%b--" % mark.encode()])
        headers = {"Content-Type": f'multipart/related; boundary="{mark}"'}
        query = {"uploadType": "multipart"}
        async with self._request("POST", bucket, query=query, headers=headers, data=body, api=UPLOADS) as response:
            await response.read()

    async def remove(self, path: str) -> None:
        try:
            async with self._request("DELETE", *self._place(path)) as response:
                await response.read()
        except ErrorResponse as error:
            if error.status != 404:
                raise

    async def remove_folder(self, path: str) -> None:
        """Nothing to do: there are no folders."""

    @asynccontextmanager
    async def _request(
        self,
        method: str,
        bucket: str,
        key: str | None = None,
        *,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        data: bytes | None = None,
        api: str = API,
    ) -> AsyncIterator[Any]:
        url = f"{self._files.base.removesuffix(API)}{api}b/{quote(bucket, safe='')}/o"
        if key is not None:
            url += f"/{quote(key, safe='')}"
        sent = {"Accept-Encoding": "identity", **(headers or {}), **(await self._credentials())}
        params = {**(query or {}), **self._payer}
        if params:
            url += f"?{urlencode(params, quote_via=quote, safe='')}"
        async with self._session.request(method, _encoded(url), headers=sent, data=data) as response:
            if response.status >= 300:
                raise _failure(response.status, await response.read(), response.headers, is_object=key is not None)
            yield response

    async def _credentials(self) -> dict[str, str]:
        """The headers that say who asks."""
        headers: dict[str, str] = {}
        credentials = self._files.credentials.credentials
        if credentials is None:
            return headers
        if credentials.valid:
            credentials.apply(headers)
        else:  # they are fetched, which blocks
            await asyncio.to_thread(self._files.credentials.apply, headers)
        return headers

    @property
    def _payer(self) -> dict[str, str]:
        payer = self._files.requester_pays
        if not payer:
            return {}
        return {"userProject": payer if isinstance(payer, str) else str(self._files.project)}

    def _place(self, path: str) -> tuple[str, str]:
        bucket, key, _ = self._files.split_path(path)
        return bucket, key


def _check_hash(hashes: str, data: Data) -> None:
    """Raise if a whole object is not the one that the response names, for example because it was cut off."""
    expected = {name.strip(): value for name, _, value in (part.partition("=") for part in hashes.split(","))}
    found = base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()
    if expected.get("md5", found) != found:
        raise BadResponse(f"the checksum of its {len(data)} bytes is wrong")


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        raise BadResponse(f"expected JSON, got {len(body)} other bytes") from None


def _encoded(url: str) -> Any:
    from yarl import URL  # installed with gcsfs

    return URL(url, encoded=True)


def _failure(status: int, body: bytes, headers: Mapping[str, str], *, is_object: bool) -> ErrorResponse:
    """The error of a response: JSON if the store wrote it, anything if a proxy did."""
    code, message = "invalid" if status == 400 else "", ""
    try:
        error = json.loads(body)["error"]
        message = str(error.get("message", ""))
        code = str(error["errors"][0]["reason"])
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        pass
    if status == 404 and not is_object:
        code = "NoSuchBucket"
    return ErrorResponse(status, code, message, headers)
