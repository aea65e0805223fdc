"""The client of S3 and what speaks its language, through s3fs.

To put a request together and to sign it takes the libraries below several times as long as to send it and to take the
answer, and a process that reads small blocks makes hundreds in a second. So ranges are read through URLs that
were signed before, by the same libraries: one for an object, for some minutes.
"""

import html
import math
import re
import time
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from fmsdata.errors import ConfigError
from fmsdata.storage.clients.base import Entry, Fetched, Page, check_version, collect, place, plain, span
from fmsdata.storage.clients.filesystem import AsyncClient
from fmsdata.storage.retry import EXPIRED, Damaged
from fmsdata.storage.settings import Storage

SIGNED_SECONDS = 900  # for which a URL is good
USED_SECONDS = 300  # for which it is used: credentials that were good when it was signed last that long
MOST_URLS = 10_000
# What is answered where a signed URL won't do: in another region, or where a policy forbids them.
OTHERWISE = {301, 302, 307, 308, 400, 403}
AGENT = "fmsdata"
TEXTS = ("key", "secret", "token", "username", "password", "endpoint_url")
SWITCHES = ("anon", "use_ssl", "requester_pays", "version_aware")


class _Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]  # names in small letters
    body: Any


class S3Client(AsyncClient):
    """See above."""

    def __init__(self, files: Any) -> None:
        super().__init__(files)
        self._plain: dict[str, bool] = {}  # buckets that answered: whether signed URLs do for them
        self._urls: OrderedDict[str, tuple[float, str]] = OrderedDict()  # when they were signed, the oldest first

    async def open(self) -> None:
        await super().open()
        with suppress(ValueError):  # times are not looked at, and parsing them takes a tenth of a request
            self._files.session.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=str)

    async def read(self, path: str, start: int, stop: int | None, version: str | None) -> Fetched:
        try:  # all of it, too, is asked for as a range, since then the answer tells how much that is
            status, told, body = await self._get(path, span(start, stop))
        except Exception as error:
            if stop is None and _status(error) == 416 and not (await self.info(path)).size:
                return Fetched(b"", None)
            raise
        try:
            found = plain(told.get("etag"))
            check_version(version, found)
            skip, size = place(status, told.get("content-range"), told.get("content-length"), start, stop)
            return Fetched(await collect(body.read, skip, size), found)
        finally:
            body.close()

    async def _get(self, path: str, wanted: str) -> _Answer:
        """The answer of S3, with the head read. The first of each bucket shows that there is nothing special to it."""
        where = self._place(path)
        bucket = where["Bucket"]
        if self._plain.get(bucket):
            answer = await self._get_signed(path, where, wanted)
            if answer is not None:
                return answer
            self._plain[bucket] = False
        told = await self._ask("get_object", **where, Range=wanted)
        self._plain.setdefault(bucket, not self._files.req_kw and not bucket.endswith("--x-s3"))
        about = told["ResponseMetadata"]
        return _Answer(about["HTTPStatusCode"], about["HTTPHeaders"], told["Body"])

    async def _get_signed(self, path: str, where: dict[str, str], wanted: str) -> _Answer | None:
        """The answer to a signed URL; None if it has to be asked for in another way."""
        from aiobotocore.httpsession import AIOHTTPSession
        from aiobotocore.response import AioStreamingBody
        from botocore.awsrequest import AWSPreparedRequest
        from botocore.exceptions import ClientError

        s3 = await self._files.get_s3(where["Bucket"])
        session = getattr(getattr(s3, "_endpoint", None), "http_session", None)
        if not isinstance(session, AIOHTTPSession):
            return None
        headers = {"Range": wanted, "User-Agent": AGENT}
        request = AWSPreparedRequest("GET", await self._signed(s3, path, where), headers, None, True)
        answer = await session.send(request)
        status, told = answer.status_code, answer.headers
        if status < 300:
            return _Answer(status, told, AioStreamingBody(answer.raw, told.get("content-length")))
        text = (await answer.content).decode(errors="replace")
        error = {name: _element(text, name) for name in ("Code", "Message")}
        if status in OTHERWISE and error["Code"] not in EXPIRED:
            return None
        about = {"HTTPStatusCode": status, "HTTPHeaders": told}
        raise ClientError({"Error": error, "ResponseMetadata": about}, "GetObject")

    async def _signed(self, s3: Any, path: str, where: dict[str, str]) -> str:
        """A URL for an object that is good for a while."""
        signed, url = self._urls.get(path, (-math.inf, ""))
        if time.monotonic() > signed + USED_SECONDS:
            url = await s3.generate_presigned_url("get_object", Params=where, ExpiresIn=SIGNED_SECONDS)
            self._urls[path] = time.monotonic(), url
            self._urls.move_to_end(path)
            if len(self._urls) > MOST_URLS:
                self._urls.popitem(last=False)
        return url

    async def info(self, path: str) -> Entry:
        told = await self._ask("head_object", **self._place(path))
        return Entry(path.rpartition("/")[2], told["ContentLength"], plain(told.get("ETag")))

    async def list(self, folder: str, recursive: bool, page: str | None) -> Page:
        bucket, prefix = self._prefix(folder)
        further = {} if page is None else {"ContinuationToken": page}
        delimiter = "" if recursive else "/"
        told = await self._page(Bucket=bucket, Prefix=prefix, Delimiter=delimiter, **further)
        files = [
            Entry(one["Key"].removeprefix(prefix), one["Size"], plain(one.get("ETag")))
            for one in told.get("Contents", ())
            if not one["Key"].endswith("/")  # stands for a folder
        ]
        folders = [one["Prefix"].removeprefix(prefix).rstrip("/") for one in told.get("CommonPrefixes", ())]
        return Page(files, folders, told["NextContinuationToken"] if told.get("IsTruncated") else None)

    async def is_folder(self, path: str) -> bool:
        bucket, prefix = self._prefix(path)
        told = await self._page(Bucket=bucket, Prefix=prefix, MaxKeys=1)
        return not prefix or bool(told.get("Contents"))

    async def _page(self, **arguments: Any) -> Any:
        told = await self._ask("list_objects_v2", **arguments)
        if "IsTruncated" not in told:  # an empty body would be understood as an empty listing
            raise Damaged("an answer without a listing came")
        return told

    async def write(self, path: str, data: bytes) -> None:
        await self._ask("put_object", **self._place(path), Body=data)

    async def remove(self, path: str) -> None:
        await self._ask("delete_object", **self._place(path))

    async def remove_folder(self, path: str) -> None:
        """There are none."""

    async def _ask(self, method: str, **arguments: Any) -> Any:
        """A call of S3's interface, with what the user wants to be part of each.

        s3fs's own way to make it also waits after a failure, which is not needed here.
        """
        call = getattr(await self._files.get_s3(arguments["Bucket"]), method)
        return await call(**self._files._get_s3_method_kwargs(call, self._files.req_kw, **arguments))

    def _place(self, path: str) -> dict[str, str]:
        bucket, key, version = self._files.split_path(path)
        if version:
            return {"Bucket": bucket, "Key": key, "VersionId": version}
        return {"Bucket": bucket, "Key": "".join([key, *path.partition("?versionId=")[1:]])}  # it is a part of the key

    def _prefix(self, folder: str) -> tuple[str, str]:
        bucket, key, _ = self._files.split_path(folder)
        key = key.strip("/")
        return bucket, f"{key}/" if key else ""

    async def close(self) -> None:
        maker = getattr(self._files, "_s3creator", None)
        if maker is not None:
            await maker.__aexit__(None, None, None)


def s3_options(options: Mapping[str, Any], storage: Storage) -> dict[str, Any]:
    """The user's options. Attempts and limits are ours, and so are the checks of what comes."""
    from botocore.config import Config  # only needed, and so only installed, for S3

    for name in TEXTS:
        if not isinstance(options.get(name, ""), str | None):
            raise ConfigError(f"storage_options.{name} is no text; write it in quotes")
    for name in SWITCHES:
        if not isinstance(options.get(name, False), bool):
            raise ConfigError(f"storage_options.{name} is {options[name]!r}; write true or false")
    for name, example in (("client_kwargs", "endpoint_url: https://host"), ("config_kwargs", "region_name: eu-1")):
        if not isinstance(options.get(name) or {}, Mapping):
            raise ConfigError(f"storage_options.{name} is no set of keys and values, such as {{{example}}}")
    ours = {
        "max_pool_connections": storage.connections,
        "connect_timeout": storage.timeout,
        "read_timeout": storage.timeout,
        "parameter_validation": False,
        "response_checksum_validation": "when_required",
        "request_checksum_calculation": "when_required",
        "signature_version": "s3v4",  # else URLs may be signed in a way that few understand
        "user_agent": AGENT,  # the default is put together anew for each request, which takes a tenth of it
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
    """What an error says, which is XML if it is of S3 and anything if it is of somebody between."""
    found = re.search(f"<{name}>(.*?)</{name}>", text, re.DOTALL)
    return html.unescape(found[1]) if found else ""
