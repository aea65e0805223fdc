"""Which client a kind of filesystem gets."""

import asyncio
import inspect
import re
from collections.abc import Mapping
from typing import Any

from fmsdata.core.checks import suggestion
from fmsdata.errors import ConfigError
from fmsdata.storage.clients.base import Client, protocols
from fmsdata.storage.clients.filesystem import AsyncClient, BlockingClient, LocalClient
from fmsdata.storage.clients.http import HttpClient
from fmsdata.storage.clients.s3 import S3Client, s3_options
from fmsdata.storage.settings import Storage


async def connect(kind: type[Any], options: Mapping[str, Any], storage: Storage) -> Client:
    """A client of this kind of filesystem. Must be called in the loop that it will be used in."""
    try:
        if not getattr(kind, "async_impl", False):
            files = await asyncio.to_thread(kind, **{**options, "skip_instance_cache": True})
            return LocalClient(files) if "file" in protocols(kind) else BlockingClient(files)
        needed = {"asynchronous": True, "loop": asyncio.get_running_loop(), "skip_instance_cache": True}
        if "s3" in protocols(kind):
            client: AsyncClient = S3Client(kind(**{**s3_options(options, storage), **needed}))
        elif "http" in protocols(kind):
            client = HttpClient(kind(**{**options, **needed}))
        else:
            client = AsyncClient(kind(**{**options, **needed}))
        await client.open()
        return client
    except (TypeError, ValueError, KeyError, ImportError) as cause:
        raise ConfigError(f"storage_options can't be used: {_reason(kind, cause)}") from None


def _reason(kind: type[Any], cause: Exception) -> str:
    """Why, in terms of the options, where a library talks of its functions."""
    unknown = re.search(r"unexpected keyword argument '(\w+)'", str(cause))
    if unknown is None:
        return str(cause)
    if str(cause).startswith("Got unexpected"):  # botocore's settings
        return f"config_kwargs has {unknown[1]!r}, which botocore does not know"
    known = [name for name in inspect.signature(kind.__init__).parameters if name not in ("self", "kwargs")]
    return f"{kind.__name__} knows no {unknown[1]!r}; {suggestion(unknown[1], known)}"
