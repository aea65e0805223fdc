"""Choosing the client for a filesystem, and explaining options that it does not accept."""

import inspect
import re
from collections.abc import Mapping
from typing import Any

import fsspec

from fmsdata.core.checks import suggestion
from fmsdata.errors import ConfigError
from fmsdata.storage.clients.azure import AzureClient
from fmsdata.storage.clients.base import Client, protocols
from fmsdata.storage.clients.gcs import GcsClient
from fmsdata.storage.clients.generic import AsyncClient, BlockingClient, LocalClient
from fmsdata.storage.clients.http import HttpClient
from fmsdata.storage.clients.s3 import S3Client
from fmsdata.storage.settings import Storage

CLIENTS: dict[str, type[AsyncClient]] = {  # by protocol
    "abfs": AzureClient,
    "file": LocalClient,
    "gs": GcsClient,
    "http": HttpClient,
    "s3": S3Client,
}
EXTRAS = {"abfs": "azure", "abfss": "azure", "az": "azure", "gcs": "gcs", "gs": "gcs"}  # by protocol


def filesystem_class(protocol: str) -> type[Any]:
    """The fsspec filesystem class of a protocol."""
    try:
        found: type[Any] = fsspec.get_filesystem_class(protocol)
    except ImportError as cause:
        if protocol not in EXTRAS:
            raise
        extra = EXTRAS[protocol]
        raise ImportError(f'{cause.msg}: pip install "fmsdata[{extra}]"') from None
    return found


def client_class(filesystem: type[Any]) -> type[AsyncClient]:
    """The client for an fsspec filesystem class: its own, or a generic one."""
    for protocol in protocols(filesystem):
        if protocol in CLIENTS:
            return CLIENTS[protocol]
    return AsyncClient if getattr(filesystem, "async_impl", False) else BlockingClient


async def connect(filesystem: type[Any], options: Mapping[str, Any], storage: Storage) -> Client:
    """A client of an fsspec filesystem class.

    Call it in the event loop that will use the client.
    """
    try:
        kind = client_class(filesystem)
        client = kind(await kind.files(filesystem, options, storage))
        await client.open()
        return client
    except (TypeError, ValueError, KeyError, ImportError) as cause:
        raise ConfigError(f"storage_options can't be used: {_reason(filesystem, cause)}") from None


def _reason(filesystem: type[Any], cause: Exception) -> str:
    """The reason in terms of the options, where a library names the arguments of its functions."""
    unknown = re.search(r"unexpected keyword argument '(\w+)'", str(cause))
    if unknown is None:
        return str(cause)
    if str(cause).startswith("Got unexpected"):  # botocore's settings
        return f"config_kwargs has {unknown[1]!r}, which botocore does not know"
    known = [name for name in inspect.signature(filesystem.__init__).parameters if name not in ("self", "kwargs")]
    return f"{filesystem.__name__} has no option {unknown[1]!r}; {suggestion(unknown[1], known)}"
