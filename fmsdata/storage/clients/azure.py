"""The client for Azure Blob Storage.

Options and paths are those of adlfs. The requests go through the library that it uses, too
(azure-storage-blob), without the retries of either, and with the ETag of the blob as a condition. A
read of a blob that was replaced fails. (A filesystem of adlfs stays in memory until its process ends,
and then waits for an event loop, which a forked process does not have.)
"""

import inspect
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, ClassVar, NamedTuple

from fmsdata.storage.clients.base import Entry, FileBytes, Page, plain_tag
from fmsdata.storage.clients.generic import AsyncClient
from fmsdata.storage.retry import BadResponse, Replaced
from fmsdata.storage.settings import Storage

SINGLE = 1 << 30  # bytes of a read that is one request
FOLDER = "hdi_isfolder"  # in the metadata of a blob that stands for a folder
FROM_ENVIRONMENT = (
    *("account_name", "account_key", "connection_string", "sas_token", "client_id", "client_secret", "tenant_id"),
    "anon",
)


class AzureFiles(NamedTuple):
    """A client of the service."""

    service: Any
    credential: Any  # to close with it, if there is one


class AzureClient(AsyncClient):
    """Blobs of Azure."""

    reports_versions: ClassVar[bool] = True
    lists_in_pages: ClassVar[bool] = True

    @classmethod
    async def files(cls, filesystem: type[Any], options: Mapping[str, Any], storage: Storage) -> AzureFiles:
        known = inspect.signature(filesystem.__init__).parameters
        for name in options:
            if name not in known:
                raise TypeError(f"unexpected keyword argument '{name}'")
        return _service(storage.timeout, options)

    async def open(self) -> None:
        """Nothing to do: connections are opened by requests."""

    async def read(self, path: str, start: int, stop: int | None, version: str | None) -> FileBytes:
        from azure.core import MatchConditions

        condition: dict[str, Any] = {}
        if version is not None:
            condition = {"etag": f'"{version}"', "match_condition": MatchConditions.IfNotModified}
        part = {} if stop is None else {"offset": start, "length": stop - start}
        stream = await self._blob(path).download_blob(**part, **condition)
        data = await stream.readall()
        if stop is not None and len(data) != stop - start:
            if (size := (await self.info(path)).size) < stop:
                raise Replaced(f"it has {size} bytes, not {stop} or more")
            raise BadResponse(f"expected {stop - start} bytes, got {len(data)}")
        return FileBytes(data, plain_tag(stream.properties.etag))

    async def info(self, path: str) -> Entry:
        found = await self._blob(path).get_blob_properties()
        if found.metadata.get(FOLDER) == "true":
            raise FileNotFoundError(path)
        return Entry(path.rpartition("/")[2], found.size, plain_tag(found.etag))

    async def list(self, folder: str, recursive: bool, page: str | None) -> Page:
        from azure.core.exceptions import DecodeError

        container, _, key = folder.partition("/")
        prefix = f"{key.strip('/')}/" if key.strip("/") else ""
        blobs = self._files.service.get_container_client(container)
        found = (blobs.list_blobs if recursive else blobs.walk_blobs)(name_starts_with=prefix, include=["metadata"])
        pages = found.by_page(page)
        files: list[Entry] = []
        folders: list[str] = []
        try:
            listed = await anext(pages)
        except (AttributeError, DecodeError):  # the library expects XML
            raise BadResponse("expected a listing, got another response") from None
        async for blob in listed:
            name = blob.name.removeprefix(prefix)
            if name.endswith("/"):
                folders.append(name.rstrip("/"))
            elif (blob.metadata or {}).get(FOLDER) != "true":
                files.append(Entry(name, blob.size, plain_tag(blob.etag)))
        return Page(files, folders, pages.continuation_token or None)

    async def write(self, path: str, data: bytes) -> None:
        await self._blob(path).upload_blob(data, overwrite=True)

    async def remove(self, path: str) -> None:
        from azure.core.exceptions import ResourceNotFoundError

        with suppress(ResourceNotFoundError):
            await self._blob(path).delete_blob()

    async def remove_folder(self, path: str) -> None:
        """Nothing to do: there are no folders."""

    async def close(self) -> None:
        await self._files.service.close()
        if self._files.credential is not None:
            await self._files.credential.close()

    def _blob(self, path: str) -> Any:
        container, _, key = path.partition("/")
        return self._files.service.get_blob_client(container, key)


def _service(seconds: float, options: Mapping[str, Any]) -> AzureFiles:
    from azure.core.credentials import AzureSasCredential
    from azure.storage.blob.aio import BlobServiceClient

    given: dict[str, Any] = {name: os.environ.get(f"AZURE_STORAGE_{name.upper()}") or None for name in FROM_ENVIRONMENT}
    given |= {name: value for name, value in options.items() if value is not None}
    how: dict[str, Any] = {
        "retry_total": 0,  # retries are ours
        "connection_timeout": seconds,
        "read_timeout": seconds,
        "max_single_get_size": SINGLE,
        "max_single_put_size": SINGLE,
        "location_mode": given.get("location_mode") or "primary",
    }
    if given["connection_string"] is not None:
        return AzureFiles(BlobServiceClient.from_connection_string(given["connection_string"], **how), None)
    if given["account_name"] is None:
        raise ValueError("Azure needs an account_name, with credentials, or a connection_string")
    url = f"https://{given.get('account_host') or given['account_name'] + '.blob.core.windows.net'}"
    own = None
    credential = given.get("credential") or given["account_key"]
    if credential is None and given["sas_token"] is not None:
        credential = AzureSasCredential(given["sas_token"].removeprefix("?"))
    if credential is None and str(given["anon"] or "false").lower() in ("false", "0", "f"):
        own = credential = _identity(given)
    return AzureFiles(BlobServiceClient(url, credential=credential, **how), own)


def _identity(given: Mapping[str, Any]) -> Any:
    from azure.identity.aio import ClientSecretCredential, DefaultAzureCredential

    if given["client_id"] is not None and given["client_secret"] is not None:
        return ClientSecretCredential(given["tenant_id"], given["client_id"], given["client_secret"])
    return DefaultAzureCredential()
