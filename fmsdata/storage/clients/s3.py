"""The client for S3 and compatible stores, through s3fs.

Building and signing a request takes the libraries below several times as long as sending it and
reading the response, and a process that reads small blocks makes hundreds a second. So ranges are
read through presigned URLs, which the same libraries make: one per object, valid for some minutes.
`s3_internals.py` sends them. Everything else uses the public interface of s3fs and botocore.
"""

import html
import math
import re
import time
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, ClassVar

from fmsdata.core.checks import flag
from fmsdata.errors import ConfigError
from fmsdata.storage.clients import s3_internals
from fmsdata.storage.clients.base import (
    Entry,
    FileBytes,
    Page,
    body_range,
    check_version,
    plain_tag,
    range_header,
    read_body,
)
from fmsdata.storage.clients.generic import AsyncClient
from fmsdata.storage.clients.s3_internals import RawResponse
from fmsdata.storage.retry import EXPIRED, BadResponse
from fmsdata.storage.settings import Storage

SIGNED_SECONDS = 900  # for which a URL is valid
USED_SECONDS = 300  # for which it is used: credentials that were valid at signing last that long
MOST_URLS = 10_000
# Statuses where a presigned URL does not work but a signed request may: another region, a policy.
NOT_BY_URL = {301, 302, 307, 308, 400, 403}
AGENT = "fmsdata"
TEXTS = ("key", "secret", "token", "username", "password", "endpoint_url")
SWITCHES = ("anon", "use_ssl", "requester_pays", "version_aware")


class S3Client(AsyncClient):
    """Objects of S3. Reads go through presigned URLs where that works."""

    reports_versions: ClassVar[bool] = True
    lists_in_pages: ClassVar[bool] = True

    def __init__(self, files: Any) -> None:
        super().__init__(files)
        self._clients: set[Any] = set()  # botocore's; s3fs may have one per region
        self._by_url: dict[str, bool] = {}  # whether presigned URLs work, for buckets that answered before
        self._urls: OrderedDict[str, tuple[float, str]] = OrderedDict()  # time of signing and URL, oldest first

    @classmethod
    def options(cls, options: Mapping[str, Any], storage: Storage) -> dict[str, Any]:
        return s3_options(options, storage)

    async def open(self) -> None:
        await super().open()
        self._clients.add(self._session)
        with suppress(ValueError):  # nobody needs the times, and parsing them takes a tenth of a request
            self._files.session.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=str)

    async def read(self, path: str, start: int, stop: int | None, version: str | None) -> FileBytes:
        try:  # also a whole object is requested as a range: the response then says how large it is
            status, headers, body = await self._get(path, range_header(start, stop))
        except Exception as error:
            if stop is None and _status(error) == 416 and not (await self.info(path)).size:
                return FileBytes(b"", None)
            raise
        try:
            found = plain_tag(headers.get("etag"))
            check_version(version, found)
            skip, size = body_range(status, headers.get("content-range"), headers.get("content-length"), start, stop)
            return FileBytes(await read_body(body.read, skip, size), found)
        finally:
            body.close()

    async def _get(self, path: str, byte_range: str) -> RawResponse:
        """The response to a GET.

        The first request of each bucket is a plain one, to see that it works.
        """
        place = self._place(path)
        bucket = place["Bucket"]
        if self._by_url.get(bucket):
            response = await self._get_by_url(path, place, byte_range)
            if response is not None:
                return response
            self._by_url[bucket] = False
        answer = await self._call("get_object", **place, Range=byte_range)
        self._by_url.setdefault(bucket, not self._files.req_kw and not bucket.endswith("--x-s3"))
        metadata = answer["ResponseMetadata"]
        return RawResponse(metadata["HTTPStatusCode"], metadata["HTTPHeaders"], answer["Body"])

    async def _get_by_url(self, path: str, place: dict[str, str], byte_range: str) -> RawResponse | None:
        """The response to a presigned URL; None if a signed request has to be made instead."""
        from botocore.exceptions import ClientError

        client = await self._client(place["Bucket"])
        url = await self._presigned(client, path, place)
        send = s3_internals.prepare(client, url, {"Range": byte_range, "User-Agent": AGENT})
        if send is None:
            return None
        response = await send()
        if response.status < 300:
            return response
        text = (await response.body.read()).decode(errors="replace")
        error = {name: _element(text, name) for name in ("Code", "Message")}
        if response.status in NOT_BY_URL and error["Code"] not in EXPIRED:
            return None
        metadata = {"HTTPStatusCode": response.status, "HTTPHeaders": response.headers}
        raise ClientError({"Error": error, "ResponseMetadata": metadata}, "GetObject")

    async def _presigned(self, client: Any, path: str, place: dict[str, str]) -> str:
        """A URL for an object. It is signed again after some minutes."""
        signed, url = self._urls.get(path, (-math.inf, ""))
        if time.monotonic() > signed + USED_SECONDS:
            url = await client.generate_presigned_url("get_object", Params=place, ExpiresIn=SIGNED_SECONDS)
            self._urls[path] = time.monotonic(), url
            self._urls.move_to_end(path)
            if len(self._urls) > MOST_URLS:
                self._urls.popitem(last=False)
        return url

    async def info(self, path: str) -> Entry:
        head = await self._call("head_object", **self._place(path))
        return Entry(path.rpartition("/")[2], head["ContentLength"], plain_tag(head.get("ETag")))

    async def list(self, folder: str, recursive: bool, page: str | None) -> Page:
        bucket, prefix = self._prefix(folder)
        token = {} if page is None else {"ContinuationToken": page}
        delimiter = "" if recursive else "/"
        listing = await self._call("list_objects_v2", Bucket=bucket, Prefix=prefix, Delimiter=delimiter, **token)
        if "IsTruncated" not in listing:  # botocore takes an empty body for an empty listing
            raise BadResponse("expected a listing, got an empty response")
        files = [
            Entry(item["Key"].removeprefix(prefix), item["Size"], plain_tag(item.get("ETag")))
            for item in listing.get("Contents", ())
            if not item["Key"].endswith("/")  # an object that stands for a folder
        ]
        folders = [item["Prefix"].removeprefix(prefix).rstrip("/") for item in listing.get("CommonPrefixes", ())]
        return Page(files, folders, listing["NextContinuationToken"] if listing.get("IsTruncated") else None)

    async def write(self, path: str, data: bytes) -> None:
        await self._call("put_object", **self._place(path), Body=data)

    async def remove(self, path: str) -> None:
        await self._call("delete_object", **self._place(path))

    async def remove_folder(self, path: str) -> None:
        """Nothing to do: S3 has no folders."""

    async def _call(self, method: str, **arguments: Any) -> Any:
        """Call a method of S3, with the arguments that the user's options add to every request.

        s3fs's own `call_s3` would also retry, which the connection does already.
        """
        client = await self._client(arguments["Bucket"])
        operation = client.meta.service_model.operation_model(client.meta.method_to_api_mapping[method])
        accepted = operation.input_shape.members
        arguments = {**self._files.s3_additional_kwargs, **self._files.req_kw, **arguments}
        given = {name: value for name, value in arguments.items() if name in accepted and value is not None}
        return await getattr(client, method)(**given)

    async def _client(self, bucket: str) -> Any:
        client = await self._files.get_s3(bucket)
        self._clients.add(client)
        return client

    def _place(self, path: str) -> dict[str, str]:
        bucket, key, version = self._files.split_path(path)
        if version:
            return {"Bucket": bucket, "Key": key, "VersionId": version}
        return {"Bucket": bucket, "Key": "".join([key, *path.partition("?versionId=")[1:]])}  # part of the key

    def _prefix(self, folder: str) -> tuple[str, str]:
        bucket, key, _ = self._files.split_path(folder)
        key = key.strip("/")
        return bucket, f"{key}/" if key else ""

    async def close(self) -> None:
        for client in self._clients:
            await client.close()


def s3_options(options: Mapping[str, Any], storage: Storage) -> dict[str, Any]:
    """The user's options, with our limits. Retries and checks of the responses are ours, too."""
    from botocore.config import Config  # only needed, and so only installed, for S3

    for name in TEXTS:
        if not isinstance(options.get(name, ""), str | None):
            raise ConfigError(f"storage_options.{name} is not text; put quotes around it")
    for name in SWITCHES:
        flag(f"storage_options.{name}", options.get(name, False))
    for name, example in (("client_kwargs", "endpoint_url: https://host"), ("config_kwargs", "region_name: eu-1")):
        if not isinstance(options.get(name) or {}, Mapping):
            raise ConfigError(f"storage_options.{name} must be keys and values, such as {{{example}}}")
    ours = {
        "max_pool_connections": storage.connections,
        "connect_timeout": storage.timeout,
        "read_timeout": storage.timeout,
        "parameter_validation": False,
        "response_checksum_validation": "when_required",
        "request_checksum_calculation": "when_required",
        "signature_version": "s3v4",  # URLs may otherwise be signed in a way that few stores support
        "user_agent": AGENT,  # the default is built again for each request, which takes a tenth of it
    }
    config = {
        **{name: value for name, value in ours.items() if name in Config.OPTION_DEFAULTS},  # some are recent
        **(options.get("config_kwargs") or {}),
        "retries": {"total_max_attempts": 1},
    }
    return {**options, "config_kwargs": config, "use_listings_cache": False}


def _status(error: Exception) -> int:
    response = getattr(error, "response", {})
    return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _element(text: str, name: str) -> str:
    """An element of an error response: XML if S3 wrote it, anything if a proxy did."""
    found = re.search(f"<{name}>(.*?)</{name}>", text, re.DOTALL)
    return html.unescape(found[1]) if found else ""
