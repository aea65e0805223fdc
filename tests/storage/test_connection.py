"""Connections against a real object store, a proxy that misbehaves, and answers that no store should give."""

import asyncio
import gc
import os
import random
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import fsspec
import psutil
import pytest
from aiohttp import web
from fsspec.asyn import AsyncFileSystem
from fsspec.spec import AbstractFileSystem

import fmsdata
import fmsdata.storage.clients.connect
import fmsdata.storage.clients.s3
import fmsdata.storage.connection
from fmsdata.errors import CheckpointError, ConfigError, MissingError, StorageError
from fmsdata.storage.clients import s3_internals
from fmsdata.storage.clients.base import Entry, Listing
from fmsdata.storage.connection import Connection, close_connections
from fmsdata.storage.io_thread import THREADS
from fmsdata.storage.location import Location
from fmsdata.storage.settings import Storage
from tests.servers.fault_proxy import (
    PASS,
    Action,
    FaultProxy,
    always,
    answer,
    delay,
    faulty,
    first,
    lose,
    refuse,
    reset,
    shorten,
    stall,
    throttle,
    truncate,
)
from tests.servers.object_store import ObjectStore, Server, free_port, storage_options
from tests.servers.scripted_server import ScriptedServer, partial, range_of, s3_error

DATA = random.Random(0).randbytes(1 << 20)
QUICK = Storage(retries=4, timeout=5.0, deadline=30.0)


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    close_connections()


@pytest.fixture
def bucket(object_store: ObjectStore) -> str:
    url = object_store.bucket("connection")
    object_store.put(f"{url}/a", DATA)
    return url


def own_threads() -> int:
    return sum(thread.name.startswith("fmsdata-io") for thread in threading.enumerate())


@pytest.fixture(autouse=True)
def _fresh_connections() -> None:
    """Those of other tests, to the same store, have counted requests already."""
    close_connections()


def test_an_object_store_is_read_listed_and_written(any_store: Server) -> None:
    bucket = any_store.bucket("connection")
    any_store.put(f"{bucket}/a", DATA)
    connection = Connection.to(bucket, any_store.options)
    run, path = connection.run, connection.path(bucket)
    tag = run(connection.info(f"{path}/a")).version
    assert run(connection.info(f"{path}/a")) == Entry("a", len(DATA), tag)
    assert run(connection.read(f"{path}/a", 100, 4100, tag)) == (
        DATA[100:4100],
        tag if connection.sees_versions else None,
    )
    assert run(connection.read(f"{path}/a", 7, 7)).data == b""
    assert run(connection.read_all(f"{path}/a")) == DATA
    for name in ("x/b", "x/y/c d&é.arrow", "x/empty", "x/.hidden", "xx/other"):
        run(connection.write(f"{path}/{name}", name.encode() if name != "x/empty" else b""))
    assert any_store.get(f"{bucket}/x/y/c d&é.arrow") == "x/y/c d&é.arrow".encode()
    below = run(connection.list(f"{path}/x"))
    assert {(one.name, one.size) for one in below.files} == {
        (".hidden", 9),
        ("b", 3),
        ("empty", 0),
        ("y/c d&é.arrow", 16),
    }
    assert below.files == sorted(below.files)
    assert all(one.version == run(connection.info(f"{path}/x/{one.name}")).version for one in below.files)
    inside = run(connection.list(f"{path}/x", recursive=False))
    assert ([one.name for one in inside.files], inside.folders) == ([".hidden", "b", "empty"], ["y"])
    assert run(connection.list(path, recursive=False)).folders == ["x", "xx"]
    assert run(connection.list(f"{path}/none")) == Listing([], [])
    assert run(connection.read_all(f"{path}/x/empty")) == b""
    for _ in range(2):
        run(connection.remove(f"{path}/x/b"))
    with pytest.raises(MissingError, match=rf"^{bucket}/x/b can't be looked up: it does not exist$"):
        run(connection.info(f"{path}/x/b"))
    with pytest.raises(MissingError, match="can't be read: it does not exist"):
        run(connection.read_all(f"{path}/x/b"))
    assert connection.traffic.bytes == 4000 + len(DATA)
    assert (connection.traffic.retries, connection.traffic.errors) == (0, 2)


FAULTS: dict[str, Action] = {
    "429": answer(429, "TooManyRequests"),
    "500": answer(500, "InternalError"),
    "502": answer(502, "BadGateway"),
    "503": answer(503, "SlowDown"),
    "504": answer(504, "GatewayTimeout"),
    "refused": refuse(),
    "lost": lose(),
    "reset at once": reset(0),
    "reset in the middle": reset(100_000),
    "closed in the middle": truncate(100_000),
    "shorter, and says so": shorten(100_000),
    "empty, and says so": shorten(0),
}
SLOW: dict[str, Action] = {
    "stalled at once": stall(0),
    "stalled in the middle": stall(100_000),
    "late": delay(20),
    "a trickle": throttle(30_000),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_tried_again(proxy: FaultProxy, bucket: str, fault: str) -> None:
    connection = Connection.to(bucket, proxy.options)
    proxy.rule = first(2, FAULTS[fault])
    got = connection.run(connection.read(connection.path(f"{bucket}/a"), 1000, 301_000))
    assert got.data == DATA[1000:301_000]
    assert len(proxy.asked()) == 3
    assert connection.traffic.retries in (1, 2)  # aiohttp asks again by itself, once, where a connection ended
    assert connection.traffic.errors == 0


@pytest.mark.parametrize("fault", SLOW)
def test_a_slow_answer_is_cut_short_and_tried_again(proxy: FaultProxy, bucket: str, fault: str) -> None:
    connection = Connection.to(bucket, proxy.options, Storage(timeout=0.5))
    proxy.rule = first(1, SLOW[fault])
    began = time.monotonic()
    got = connection.run(connection.read(connection.path(f"{bucket}/a"), 1000, 301_000))
    assert got.data == DATA[1000:301_000]
    assert connection.traffic.retries >= 1
    assert 0.5 < time.monotonic() - began < 9


@pytest.mark.parametrize("fault", ["429", "503", "refused", "lost", "shorter, and says so"])
def test_small_files_are_tried_again_too(proxy: FaultProxy, bucket: str, fault: str) -> None:
    connection = Connection.to(bucket, proxy.options, QUICK)
    path = connection.path(bucket)
    proxy.rule = first(1, FAULTS[fault])
    connection.run(connection.write(f"{path}/new/b", DATA))
    assert connection.run(connection.read_all(f"{path}/new/b")) == DATA
    assert [one.name for one in connection.run(connection.list(f"{path}/new")).files] == ["b"]
    assert connection.run(connection.info(f"{path}/new/b")).size == len(DATA)
    connection.run(connection.remove(f"{path}/new/b"))
    proxy.clear()
    assert connection.run(connection.list(f"{path}/new")).files == []
    assert connection.traffic.errors == 0


@pytest.mark.parametrize("after", [0, 1, 200])
def test_a_listing_that_is_cut_short_is_no_listing(proxy: FaultProxy, bucket: str, after: int) -> None:
    connection = Connection.to(bucket, proxy.options, QUICK)
    proxy.rule = first(2, shorten(after))
    assert [one.name for one in connection.run(connection.list(connection.path(bucket))).files] == ["a"]
    assert connection.traffic.retries == 2


def test_with_faults_in_five_percent_of_the_requests_every_byte_is_right(proxy: FaultProxy, bucket: str) -> None:
    connection = Connection.to(bucket, proxy.options, Storage())
    path = connection.path(f"{bucket}/a")
    proxy.rule = faulty(0.05, seed=1)
    draw = random.Random(1)
    starts = [draw.randrange(len(DATA) - 9000) for _ in range(500)]
    ranges = [(start, start + draw.randrange(1, 9000)) for start in starts]

    async def read_all_ranges() -> list[bytes]:
        return [bytes(one.data) for one in await asyncio.gather(*(connection.read(path, *some) for some in ranges))]

    assert connection.run(read_all_ranges()) == [DATA[start:stop] for start, stop in ranges]
    assert 10 < connection.traffic.retries < 75
    assert connection.traffic.requests == 500 + connection.traffic.retries <= len(proxy.records)


def test_the_error_names_everything_when_the_attempts_are_used_up(proxy: FaultProxy, bucket: str) -> None:
    connection = Connection.to(bucket, proxy.options, Storage(retries=3))
    proxy.rule = always(answer(503, "SlowDown"))
    with pytest.raises(
        StorageError,
        match=r"^source 'web': bytes 10-19 of s3://connection-\d+/a could not be read in 4 attempts and \d\.\d s, "
        r"last error: 503 SlowDown .*; the run can be resumed from its last state$",
    ):
        connection.run(connection.read(connection.path(f"{bucket}/a"), 10, 20, owner="source 'web'"))
    assert len(proxy.records) == 4
    assert (connection.traffic.requests, connection.traffic.retries, connection.traffic.errors) == (4, 3, 1)
    proxy.rule = always(answer(503, "SlowDown"))
    with pytest.raises(StorageError, match="could not be written in 4 attempts"):
        connection.run(connection.write(connection.path(f"{bucket}/b"), b"x"))


@pytest.mark.parametrize("fault", ["503", *SLOW])
def test_the_deadline_ends_it_all(proxy: FaultProxy, bucket: str, fault: str) -> None:
    """Also where the next wait, or the next attempt, would take longer than is left."""
    connection = Connection.to(bucket, proxy.options, Storage(retries=10_000, timeout=60, deadline=0.6))
    with suppress(StorageError):  # making the client may take as long
        connection.run(connection.info(connection.path(f"{bucket}/a")))
    proxy.rule = always((FAULTS | SLOW)[fault])
    began = time.monotonic()
    with pytest.raises(StorageError, match=r"could not be read in \d+ attempts? and \d\.\d s"):
        connection.run(connection.read(connection.path(f"{bucket}/a"), 0, 300_000))
    assert 0.55 < time.monotonic() - began < 3


@pytest.mark.parametrize(
    ("action", "kind", "text"),
    [
        (answer(403, "AccessDenied"), StorageError, "access is denied: 403 AccessDenied.*credentials.*policy.*region"),
        (answer(404, "NoSuchKey"), MissingError, "it is gone; it was there when the shards were listed"),
        (answer(404, "NoSuchBucket"), MissingError, "there is no such bucket; check the bucket's name"),
        (answer(400, "InvalidRequest"), StorageError, "400 InvalidRequest"),
        (answer(416, "InvalidRange"), StorageError, "was replaced during the run"),
        (answer(301, "PermanentRedirect"), StorageError, "check the region"),
    ],
)
def test_what_will_not_change_fails_at_once(
    proxy: FaultProxy, bucket: str, action: Action, kind: type[Exception], text: str
) -> None:
    connection = Connection.to(bucket, proxy.options)
    proxy.rule = lambda request: action if request.method == "GET" else PASS  # botocore follows redirects by HEAD
    with pytest.raises(kind, match=rf"source 'web': bytes 0-9 of s3://[^ ]*/a can't be read: .*{text}"):
        connection.run(connection.read(connection.path(f"{bucket}/a"), 0, 10, owner="source 'web'"))
    assert len(proxy.asked()) == 1
    assert connection.traffic.requests == 1


def test_a_wrong_secret_is_told_without_telling_it(object_store: ObjectStore, bucket: str) -> None:
    options = storage_options(object_store.endpoint, secret="not-the-secret")
    connection = Connection.to(bucket, options)
    with pytest.raises(StorageError, match="access is denied: 403 SignatureDoesNotMatch") as caught:
        connection.run(connection.read(connection.path(f"{bucket}/a"), 0, 10))
    assert "not-the-secret" not in str(caught.value)
    assert connection.traffic.requests == 1
    options = storage_options(object_store.endpoint, key="nobody-known")
    with pytest.raises(
        StorageError, match=r"credentials were rejected, and refreshing them did not help: 403 InvalidAcc"
    ) as caught:
        connection = Connection.to(bucket, options)
        connection.run(connection.read(connection.path(f"{bucket}/a"), 0, 10))
    assert "nobody-known" not in str(caught.value)
    with pytest.raises(MissingError, match="there is no such bucket"):
        connection = Connection.to(bucket, object_store.options)
        connection.run(connection.read("no-such-bucket/a", 0, 10))


@pytest.mark.parametrize("host", ["127.0.0.1", "no-such-host.invalid"])
def test_a_server_that_cannot_be_reached_is_named(host: str) -> None:
    options = storage_options(f"http://{host}:{free_port()}")
    connection = Connection.to("s3://b/a", options, Storage(retries=2))
    with pytest.raises(StorageError, match=rf"in 3 attempts .*{host}.*check the endpoint and the network"):
        connection.run(connection.read("b/a", 0, 10))


def test_a_certificate_that_nobody_trusts_fails_at_once(tmp_path: Path) -> None:
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=elsewhere"]
    subprocess.run(
        [*made, "-keyout", tmp_path / "key", "-out", tmp_path / "cert"], check=True, capture_output=True, timeout=30
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert", tmp_path / "key")

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        return partial(DATA, request)

    with ScriptedServer(handle, context) as server:
        connection = Connection.to("s3://b/a", server.options)
        with pytest.raises(StorageError, match="its certificate can't be trusted"):
            connection.run(connection.read("b/a", 0, 10))
        assert connection.traffic.requests == 1
        trusting = {**server.options, "client_kwargs": {"endpoint_url": server.endpoint, "verify": False}}
        connection = Connection.to("s3://b/a", trusting)
        assert connection.run(connection.read("b/a", 0, 10)).data == DATA[:10]
        del connection
        close_connections()
        gc.collect()  # what was left open would warn now


def test_an_object_that_was_replaced_is_noticed(object_store: ObjectStore, bucket: str) -> None:
    connection = Connection.to(bucket, object_store.options)
    path = connection.path(f"{bucket}/a")
    before = connection.run(connection.read(path, 0, 10)).version
    assert before == connection.run(connection.list(connection.path(bucket))).files[0].version
    connection.run(connection.check(path, before or ""))
    object_store.put(f"{bucket}/a", DATA[::-1])
    with pytest.raises(StorageError, match="was replaced during the run: its version is"):
        connection.run(connection.read(path, 0, 10, before))
    with pytest.raises(StorageError, match="was replaced during the run: its version is"):
        connection.run(connection.check(path, before or ""))
    object_store.put(f"{bucket}/a", DATA[:1000])
    for start in (990, 5000):
        with pytest.raises(StorageError, match=r"was replaced during the run: it .*(1000 bytes|these bytes)"):
            connection.run(connection.read(path, start, start + 20))
    assert connection.traffic.retries == 0


def unranged(_: web.BaseRequest) -> web.Response:
    return web.Response(body=DATA, headers={"ETag": '"one"'})


def shifted(request: web.BaseRequest) -> web.Response:
    start, stop = range_of(request)
    told = {"Content-Range": f"bytes {start + 1}-{stop}/{len(DATA)}"}
    return web.Response(status=206, body=DATA[start + 1 : stop + 1], headers=told)


def cut(request: web.BaseRequest) -> web.Response:
    start, stop = range_of(request)
    told = {"Content-Range": f"bytes {start}-{stop - 1}/{len(DATA)}"}
    return web.Response(status=206, body=DATA[start : stop - 5], headers=told)


def cut_whole(_: web.BaseRequest) -> web.Response:
    return web.Response(body=DATA[:150])


ODD = {"without a range": unranged, "shifted": shifted, "cut": cut, "all, but cut": cut_whole}


@pytest.mark.parametrize("scheme", ["s3", "http"])
@pytest.mark.parametrize("odd", ODD)
def test_wrong_bytes_are_never_taken(scheme: str, odd: str) -> None:
    times = 2

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        return ODD[odd](request) if len(server.requests) <= times else partial(DATA, request)

    with ScriptedServer(handle) as server:
        url = "s3://b/a" if scheme == "s3" else f"{server.endpoint}/b/a"
        connection = Connection.to(url, server.options if scheme == "s3" else {}, QUICK)
        path = connection.path(url)
        got = connection.run(connection.read(path, 100, 200))
        assert got == (DATA[100:200], "one")
        assert len(server.requests) == (1 if odd == "without a range" else 3)
        times = 1000
        if odd != "without a range":
            with pytest.raises(
                StorageError, match=r"could not be read in 5 attempts .*, last error: expected (bytes )?\d+.* got "
            ):
                connection.run(connection.read(path, 100, 200))


def test_files_behind_http(tmp_path: Path) -> None:
    tag = "one"

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        if request.path == "/secret":
            return web.Response(status=403)
        if request.path == "/busy" and len(server.requests) < 3:
            return web.Response(status=503)
        if request.path not in ("/a", "/busy"):
            return web.Response(status=404)
        if "Range" in request.headers:
            return partial(DATA, request, tag)
        return web.Response(body=DATA, headers={"ETag": f'"{tag}"'})

    with ScriptedServer(handle) as server:
        url = f"{server.endpoint}/a?token=hidden"
        connection = Connection.to(url, {}, QUICK)
        path = connection.path(url)
        assert connection.run(connection.info(path)).size == len(DATA)
        assert connection.run(connection.info(path)).version == "one"
        assert connection.run(connection.read_all(path)) == DATA
        server.requests.clear()
        assert connection.run(connection.read(f"{server.endpoint}/busy", 0, 9, "one")).data == DATA[:9]
        assert connection.traffic.retries == 2
        for name, text in (("none", "it is gone"), ("secret", "access is denied")):
            with pytest.raises(StorageError, match=text):
                connection.run(connection.read(f"{server.endpoint}/{name}", 0, 9))
        tag = "two"
        with pytest.raises(StorageError, match="replaced during the run: its version is two") as caught:
            connection.run(connection.read(path, 0, 9, "one"))
        assert "hidden" not in str(caught.value)


def test_a_listing_comes_in_pages_each_tried_again() -> None:
    names = [f"part-{i:03}.arrow" for i in range(50)]
    seen: dict[str, int] = {}

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        first_one = int(request.query.get("continuation-token", "0"))
        seen[str(first_one)] = seen.get(str(first_one), 0) + 1
        if first_one == 20 and seen["20"] < 3:
            return s3_error(503, "SlowDown")
        items = "".join(
            f"<Contents><Key>web/{name}</Key><Size>{i}</Size><ETag>&quot;e{i}&quot;</ETag>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            for i, name in list(enumerate(names))[first_one : first_one + 10]
        )
        more = first_one + 10 < len(names)
        next_one = f"<NextContinuationToken>{first_one + 10}</NextContinuationToken>" if more else ""
        text = (
            f"<ListBucketResult><IsTruncated>{str(more).lower()}</IsTruncated>{next_one}"
            f"<Contents><Key>web/</Key><Size>0</Size></Contents>{items}</ListBucketResult>"
        )
        return web.Response(text=text, content_type="application/xml")

    with ScriptedServer(handle) as server:
        connection = Connection.to("s3://b", server.options, QUICK)
        listed = connection.run(connection.list("b/web"))
        assert listed.files == [Entry(name, i, f"e{i}") for i, name in enumerate(names)]
        assert seen == {"0": 1, "10": 1, "20": 3, "30": 1, "40": 1}


@pytest.mark.parametrize("status", [429, 503])
def test_a_server_is_given_the_time_it_asks_for(status: int) -> None:
    times: list[float] = []
    asked = "1"

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        times.append(time.monotonic())
        return partial(DATA, request) if len(times) == 2 else s3_error(status, "SlowDown", Retry_After=asked)

    with ScriptedServer(handle) as server:
        connection = Connection.to("s3://b/a", server.options, QUICK)
        assert connection.run(connection.read("b/a", 0, 9)).data == DATA[:9]
        assert 1.0 <= times[1] - times[0] < 3
        asked = "600"
        with pytest.raises(StorageError, match=r"in 1 attempt and \d\.\d s.*the server asks to wait 600 s"):
            connection.run(connection.read("b/a", 0, 9))


def signed(request: web.BaseRequest) -> bool:
    return "X-Amz-Signature" in request.query


def test_a_url_is_signed_once_for_an_object_and_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        return partial(DATA, request)

    with ScriptedServer(handle) as server:
        connection = Connection.to("s3://b/a", server.options)
        for start in range(20):
            assert connection.run(connection.read("b/a", start, start + 9)).data == DATA[start : start + 9]
            assert connection.run(connection.read("b/c d?", start, start + 9)).data == DATA[start : start + 9]
        assert [signed(one) for one in server.requests] == [
            False,
            *[True] * 39,
        ]  # the first shows that the bucket is fine
        assert {one.path for one in server.requests} == {"/b/a", "/b/c d?"}
        assert len({one.query_string for one in server.requests}) == 3
        assert all(one.query["X-Amz-Algorithm"] == "AWS4-HMAC-SHA256" for one in server.requests[1:])
        monkeypatch.setattr(fmsdata.storage.clients.s3, "USED_SECONDS", 0.0)
        monkeypatch.setattr(fmsdata.storage.clients.s3, "MOST_URLS", 1)
        time.sleep(1.1)  # signatures tell the second
        for start in range(20):
            assert connection.run(connection.read("b/a", start, start + 9)).data == DATA[start : start + 9]
        assert len({one.query_string for one in server.requests}) > 3
        connection.run(connection.read("b/c d?", 0, 9))
        assert connection._lease
        assert isinstance(connection._lease.client, fmsdata.storage.clients.s3.S3Client)
        assert len(connection._lease.client._urls) == 1


@pytest.mark.parametrize("status", [301, 307, 400, 403])
def test_where_signed_urls_will_not_do_requests_are_signed(status: int) -> None:
    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        code = "AccessDenied" if status == 403 else "PermanentRedirect"
        return s3_error(status, code) if signed(request) else partial(DATA, request)

    with ScriptedServer(handle) as server:
        connection = Connection.to("s3://b/a", server.options, QUICK)
        for start in range(20):
            assert connection.run(connection.read("b/a", start, start + 9)).data == DATA[start : start + 9]
        assert [signed(one) for one in server.requests] == [False, True, *[False] * 19]
        assert connection.traffic.retries == 0


def test_the_installed_libraries_have_the_internals_that_signed_urls_need() -> None:
    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        return partial(DATA, request)

    with ScriptedServer(handle) as server:
        connection = Connection.to("s3://b/a", server.options, QUICK)
        connection.run(connection.read("b/a", 0, 9))
        assert connection._lease
        client: Any = connection._lease.client
        send = s3_internals.prepare(client._session, f"{server.endpoint}/b/a", {"Range": "bytes=5-8"})
        assert send is not None, "presigned URLs are no longer used, and reads take twice the CPU: see s3_internals.py"

        async def read() -> tuple[int, bytes]:
            response = await send()
            return response.status, await response.body.read()

        assert connection.run(read()) == (206, DATA[5:9])


@pytest.mark.parametrize(
    "missing",
    [
        ["aiobotocore.httpsession.AIOHTTPSession"],
        ["aiobotocore.response.AioStreamingBody", "aiobotocore.response.StreamingBody"],
    ],
)
def test_without_these_internals_requests_are_signed(monkeypatch: pytest.MonkeyPatch, missing: list[str]) -> None:
    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        return partial(DATA, request)

    with ScriptedServer(handle) as server:
        connection = Connection.to("s3://b/a", server.options, QUICK)
        connection.run(connection.read("b/a", 0, 9))
        for name in missing:
            monkeypatch.delattr(name, raising=False)
        for start in range(3):
            assert connection.run(connection.read("b/a", start, start + 9)).data == DATA[start : start + 9]
        assert [signed(request) for request in server.requests] == [False] * 4
        assert connection.traffic.retries == 0


def test_what_the_user_wants_in_each_request_is_in_it() -> None:
    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        assert request.headers["x-amz-request-payer"] == "requester"
        return partial(DATA, request)

    with ScriptedServer(handle) as server:
        connection = Connection.to("s3://b/a", {**server.options, "requester_pays": True}, QUICK)
        for start in range(3):
            assert connection.run(connection.read("b/a", start, start + 9)).data == DATA[start : start + 9]


def test_nobody_signs_for_who_has_no_name() -> None:
    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        assert "Authorization" not in request.headers
        assert not request.query_string
        return partial(DATA, request)

    with ScriptedServer(handle) as server:
        options = {"anon": True, "client_kwargs": {"endpoint_url": server.endpoint}}
        connection = Connection.to("s3://b/a", options, QUICK)
        for start in range(3):
            assert connection.run(connection.read("b/a", start, start + 9)).data == DATA[start : start + 9]


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (
            403,
            "<Error><Code>AccessDenied</Code><Message>not &lt;you&gt;</Message></Error>",
            "403 AccessDenied not <you>",
        ),
        (404, "<Error><Code>NoSuchKey</Code></Error>", "it is gone"),
        (403, "<html>somebody between</html>", "access is denied: 403"),
        (503, "", "3 attempts"),
    ],
)
def test_errors_are_understood_from_signed_urls_too(status: int, body: str, words: str) -> None:
    good = True

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        return partial(DATA, request) if good else web.Response(status=status, text=body, content_type="text/xml")

    with ScriptedServer(handle) as server:
        connection = Connection.to("s3://b/a", server.options, Storage(retries=2))
        connection.run(connection.read("b/a", 0, 9))
        good = False
        with pytest.raises(StorageError, match=words) as told:
            connection.run(connection.read("b/a", 0, 9))
        assert signed(server.requests[1])
        assert [signed(one) for one in server.requests[2:]] == (
            [False] if status == 403 else [True] * (status == 503) * 2
        )
        assert "Signature" not in str(told.value)


class Vault:
    """A server that takes one access key only, and says of others that they have expired."""

    def __init__(self) -> None:
        self.key = "first"
        self.refused = 0

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        signed = request.headers.get("Authorization", "") + unquote(request.path_qs)
        if f"Credential={self.key}/" not in signed:
            self.refused += 1
            return s3_error(400, "ExpiredToken")
        if request.method == "HEAD":
            return web.Response(headers={"Content-Length": str(len(DATA)), "ETag": '"one"'})
        return partial(DATA, request)


def write_credentials(path: Path, key: str) -> None:
    path.write_text(f"[default]\naws_access_key_id={key}\naws_secret_access_key=secret\naws_session_token=t\n")


def test_expired_credentials_are_looked_for_again_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    write_credentials(tmp_path / "credentials", "first")
    made = []
    plain = fmsdata.storage.clients.connect.connect

    async def counted(*args: Any) -> Any:
        made.append(await plain(*args))
        return made[-1]

    monkeypatch.setattr(fmsdata.storage.connection, "connect", counted)
    vault = Vault()
    with ScriptedServer(vault) as server:
        connection = Connection.to("s3://b/a", {"client_kwargs": {"endpoint_url": server.endpoint}})

        async def many() -> list[bytes]:
            found = await asyncio.gather(*(connection.read("b/a", i, i + 9) for i in range(64)))
            return [bytes(one.data) for one in found]

        for number, key in enumerate(("first", "second", "third"), 1):
            vault.key = key
            write_credentials(tmp_path / "credentials", key)
            assert connection.run(many()) == [DATA[i : i + 9] for i in range(64)]
            assert len(made) == number
            assert len(connection._open) == 1
        assert vault.refused <= 2 * 32
        vault.key = "fourth"
        write_credentials(tmp_path / "credentials", "fourth")
        assert connection.run(connection.info("b/a")).size == len(DATA)  # HEAD: nothing tells why it failed
        vault.key = "nobody"
        with pytest.raises(
            StorageError, match="credentials were rejected, and refreshing them did not help: 400 ExpiredToken"
        ):
            connection.run(connection.read("b/a", 0, 9))
        (tmp_path / "credentials").unlink()
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        with pytest.raises(StorageError, match="no credentials were found; give them in storage_options"):
            connection.run(connection.read("b/a", 0, 9))
        vault.key = "fifth"
        write_credentials(tmp_path / "credentials", "fifth")
        assert connection.run(connection.read("b/a", 0, 9)).data == DATA[:9]
        close_connections()
        (tmp_path / "credentials").unlink()
        connection = Connection.to("s3://b/a", {"client_kwargs": {"endpoint_url": server.endpoint}})
        before = len(server.requests)
        with pytest.raises(StorageError, match="no credentials were found"):
            connection.run(connection.read("b/a", 0, 9))
        assert len(server.requests) == before


def test_requests_and_sockets_are_bounded(proxy: FaultProxy, bucket: str) -> None:
    connection = Connection.to(bucket, proxy.options, Storage(connections=4))
    path = connection.path(f"{bucket}/a")
    proxy.rule = always(delay(0.02))

    async def many() -> None:
        await asyncio.gather(*(connection.read(path, i, i + 10) for i in range(60)))

    connection.run(many())
    assert proxy.requests.most == 4
    assert proxy.connections.most <= 4


def test_ten_thousand_reads_leave_nothing_behind(object_store: ObjectStore, bucket: str) -> None:
    connection = Connection.to(bucket, object_store.options, Storage(connections=8))
    path = connection.path(f"{bucket}/a")

    async def some(count: int) -> None:
        numbers = iter(range(count))

        async def reader() -> None:
            for number in numbers:
                start = number * 61 % (len(DATA) - 500)
                if number % 500 == 499:
                    with pytest.raises(StorageError):
                        await connection.read(path, start, start + 500, "another version")
                    with pytest.raises(StorageError):
                        await connection.read(f"{path}/none", 0, 9)
                else:
                    got = await connection.read(path, start, start + 500)
                    assert got.data == DATA[start : start + 500]

        await asyncio.gather(*(reader() for _ in range(8)))

    process = psutil.Process()
    connection.run(some(1500))
    before = process.memory_info().rss, process.num_threads(), process.num_fds()
    connection.run(some(8500))
    after = process.memory_info().rss, process.num_threads(), process.num_fds()
    assert after[0] - before[0] < 8 << 20
    assert after[1] <= before[1]
    assert after[2] <= before[2] + 2  # sockets are opened again after an error
    close_connections()
    assert process.num_fds() < before[2]


def test_an_interrupt_ends_the_waiting(proxy: FaultProxy, bucket: str) -> None:
    connection = Connection.to(bucket, proxy.options)
    path = connection.path(f"{bucket}/a")
    connection.run(connection.read(path, 0, 9))
    proxy.rule = always(stall(0))
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        connection.run(connection.read(path, 0, 9))
    assert time.monotonic() - began < 3
    timer.join()
    proxy.rule = always(Action())
    assert connection.run(connection.read(path, 0, 9)).data == DATA[:9]


def test_a_connection_belongs_to_its_options_and_ends_with_the_others(object_store: ObjectStore, bucket: str) -> None:
    one = Connection.to(bucket, object_store.options)
    assert Connection.to(f"{bucket}/a", object_store.options, Storage(prefetch_bytes=1)) is one
    assert Connection.to(bucket, object_store.options, Storage(connections=1)) is not one
    assert Connection.to(bucket, {**object_store.options, "anon": True}) is not one
    stalled = one.start(asyncio.sleep(100))
    path = one.path(f"{bucket}/a")
    one.run(one.read(path, 0, 9))

    async def inside() -> Any:
        return one.run(one.read(path, 0, 9))

    with pytest.raises(RuntimeError, match="can't wait for itself"):
        one.run(inside())
    close_connections()
    close_connections()
    assert stalled.cancelled()
    end = time.monotonic() + 10
    while own_threads() and time.monotonic() < end:
        time.sleep(0.01)
    assert not own_threads()
    with pytest.raises(RuntimeError, match="was closed"):
        one.run(one.read(path, 0, 9))
    another = Connection.to(bucket, object_store.options)
    assert another is not one
    assert another.run(another.read(path, 0, 9)).data == DATA[:9]


@pytest.mark.parametrize(
    ("url", "options", "text"),
    [
        ("nosuch://a/b", {}, "nosuch"),
        ("simplecache::s3://a/b", {}, "two filesystems"),
        ("s3://a/b", {"key": "k", "username": "u"}, "not both"),
        ("s3://a/b", {"config_kwargs": {"nonsense": 1}}, "nonsense"),
        ("s3://a/b", {"endpoint_url": "not a url"}, "not a url"),
        ("memory://a/b", {"nonsense": {"a": [1]}}, None),
    ],
)
def test_options_that_cannot_be_used_are_told(url: str, options: dict[str, Any], text: str | None) -> None:
    def read() -> None:
        connection = Connection.to(url, options)
        connection.run(connection.read(connection.path(url), 0, 9))

    with pytest.raises(ConfigError if text else MissingError, match=text):
        read()


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Callable[[str], str]]:
    """The URL of a folder on a filesystem that is not S3."""
    fsspec.register_implementation("elsewhere", Elsewhere, clobber=True)
    fsspec.register_implementation("slow", Slow, clobber=True)
    yield lambda name: f"file://{tmp_path}/{name}" if name == "file" else f"{name}://connection/{name}"
    fsspec.filesystem("memory").store.clear()


class Elsewhere(AsyncFileSystem):  # type: ignore[misc]
    """An asynchronous filesystem that is not S3, as gs:// and az:// are. It fails now and then."""

    protocol = "elsewhere"
    failures = 0

    def __init__(self, **options: Any) -> None:
        super().__init__(asynchronous=options["asynchronous"], loop=options["loop"])
        assert self.asynchronous
        assert asyncio.get_running_loop() is options["loop"]
        self._files = fsspec.filesystem("memory")
        self._own_loop = options["loop"]

    async def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        assert asyncio.get_running_loop() is self._own_loop
        if self.failures:
            type(self).failures -= 1
            raise ConnectionResetError("reset")
        return getattr(self._files, method)(*args, **kwargs)

    async def _cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> Any:
        return await self._call("cat_file", path, start, end)

    async def _pipe_file(self, path: str, value: bytes, **_: Any) -> None:
        await self._call("pipe_file", path, value)

    async def _info(self, path: str, **_: Any) -> Any:
        told = await self._call("info", path)
        return {**told, "name": told["name"].lstrip("/"), "generation": 7}

    async def _ls(self, path: str, **_: Any) -> Any:
        return [{**one, "name": one["name"].lstrip("/"), "generation": 7} for one in await self._call("ls", path)]

    async def _rm_file(self, path: str, **_: Any) -> None:
        await self._call("rm_file", path)


class Slow(AbstractFileSystem):  # type: ignore[misc]
    """A filesystem that blocks."""

    protocol = "slow"
    delay = 0.0

    def cat_file(self, _: str, start: int | None = None, end: int | None = None) -> bytes:
        time.sleep(self.delay)
        return DATA[start:end]


@pytest.mark.parametrize("name", ["memory", "file", "elsewhere"])
def test_any_filesystem_will_do(files: Callable[[str], str], name: str) -> None:
    url = files(name)
    connection = Connection.to(url, {}, QUICK)
    run, path = connection.run, connection.path(url)
    assert run(connection.list(path)) == Listing([], [])
    for one in ("a", "x/b", "x/y/c", "empty"):
        run(connection.write(f"{path}/{one}", b"" if one == "empty" else DATA))
    Elsewhere.failures = 3 if name == "elsewhere" else 0
    assert run(connection.read(f"{path}/a", 5, 900)).data == DATA[5:900]
    assert connection.traffic.retries == (3 if name == "elsewhere" else 0)
    assert [run(connection.read_all(f"{path}/{one}")) for one in ("a", "empty")] == [DATA, b""]
    Elsewhere.failures = 1 if name == "elsewhere" else 0
    listed = run(connection.list(path))
    assert [(one.name, one.size) for one in listed.files] == [
        *[("a", len(DATA)), ("empty", 0), ("x/b", len(DATA)), ("x/y/c", len(DATA))]
    ]
    inside = run(connection.list(path, recursive=False))
    assert ([one.name for one in inside.files], inside.folders) == (["a", "empty"], ["x"])
    told = run(connection.info(f"{path}/a"))
    assert told == listed.files[0] == inside.files[0]
    run(connection.check(f"{path}/a", told.version or ""))
    run(connection.write(f"{path}/a", DATA[:100]))
    with pytest.raises(StorageError, match="replaced during the run: it has 100 bytes"):
        run(connection.read(f"{path}/a", 90, 120))
    if name != "elsewhere":
        with pytest.raises(StorageError, match="replaced during the run: its version is"):
            run(connection.check(f"{path}/a", told.version or ""))
    for _ in range(2):
        run(connection.remove(f"{path}/a"))
    with pytest.raises(MissingError, match="it is gone"):
        run(connection.read(f"{path}/a", 0, 9))


def test_a_filesystem_that_blocks_keeps_nobody_waiting(
    files: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = files("slow")
    connection = Connection.to(url, {}, Storage(connections=200, retries=0, timeout=0.2))
    assert connection.run(connection.read("a", 1, 9)).data == DATA[1:9]
    monkeypatch.setattr(Slow, "delay", 5.0)

    async def many() -> list[Any]:
        return await asyncio.gather(*(connection.read("a", 1, 9) for _ in range(200)), return_exceptions=True)

    began = time.monotonic()
    assert all(isinstance(one, StorageError) for one in connection.run(many()))
    assert own_threads() <= THREADS + 1
    close_connections()
    assert time.monotonic() - began < 4


def test_a_folder_of_checkpoints_survives_faults(proxy: FaultProxy, bucket: str) -> None:
    folder = Location(f"{bucket}/run/", proxy.options, error=CheckpointError)
    proxy.rule = first(1, answer(503, "SlowDown"))
    for step in ("step-1", "step-2"):
        for name in ("rank-0", "rank-1", "complete", ".hidden"):
            (folder / step / name).write_bytes(name.encode())
    proxy.rule = first(1, refuse())
    assert folder.folders() == ["step-1", "step-2"]
    assert (folder / "step-1").sizes() == {"rank-0": 6, "rank-1": 6, "complete": 8}
    assert (folder / "step-2/rank-1").read_bytes() == b"rank-1"
    proxy.clear()
    (folder / "step-1").remove_folder(first="complete")
    removed = [record.request.path.rpartition("/")[2] for record in proxy.asked("DELETE") if record.status == 204]
    assert removed == ["complete", ".hidden", "rank-0", "rank-1"]
    assert not proxy.asked("POST")
    (folder / "step-1").remove_folder(first="complete")
    (folder / "step-2/rank-0").remove()
    (folder / "step-2/rank-0").remove()
    proxy.clear()
    assert folder.folders() == ["step-2"]
    assert (folder / "none").sizes() == {}
    with pytest.raises(CheckpointError, match=r"run/step-2/rank-0 can't be read: it does not exist"):
        (folder / "step-2/rank-0").read_bytes()
    proxy.rule = always(answer(403, "AccessDenied"))
    with pytest.raises(CheckpointError, match=r"run/step-2/rank-0 can't be written: access is denied"):
        (folder / "step-2/rank-0").write_bytes(b"x")


PROGRAM = """
import asyncio, gc, os, sys, threading, time
from fmsdata.storage.connection import Connection
from fmsdata.storage.settings import Storage

url, endpoint, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
options = {"key": "tester", "secret": "tester-secret", "client_kwargs": {"endpoint_url": endpoint}}
settings = Storage(connections=8)
connection = Connection.to(url, options, settings)
path = connection.path(url)
whole = connection.run(connection.read_all(path))
assert len(whole) == size

async def many(connection, count):
    await asyncio.gather(*(check(connection, number * 37 % (size - 999)) for number in range(count)))

async def check(connection, start):
    assert (await connection.read(path, start, start + 999)).data == whole[start : start + 999]

def fork(number):
    child = os.fork()
    if child:
        return child
    global connection
    own = Connection.to(url, options, settings)
    assert own is not connection
    try:
        connection.run(connection.read(path, 0, 9))
    except RuntimeError:
        pass
    else:
        raise SystemExit("the parent's connection was used")
    own.run(many(own, 20))
    assert sum(thread.name == "fmsdata-io" for thread in threading.enumerate()) == 1
    connection = None
    gc.collect()
    sys.exit(10 + number)

def wait_for(children):
    codes = sorted(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)
    assert codes == [10, 11, 12][: len(codes)], codes

under_way = connection.start(many(connection, 300))
time.sleep(0.05)
wait_for([fork(number) for number in range(2)])
under_way.result(60)
wait_for([fork(0)])  # now nothing is under way, and only connections that wait to be used could be harmed
connection.run(many(connection, 100))
assert connection.traffic.retries == 0, connection.traffic
print("read", flush=True)
sys.stdin.readline()  # from here on, the server stalls
waiting = [connection.start(connection.read(path, 0, 999)) for _ in range(20)]
waiting.append(connection.start(asyncio.to_thread(time.sleep, 100)))
time.sleep(0.3)
"""


def test_forks_and_a_clean_exit(proxy: FaultProxy, bucket: str) -> None:
    """Each process has connections of its own and ends in silence, also in the middle of requests that stall."""
    proxy.rule = always(delay(0.005))
    program = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", PROGRAM, f"{bucket}/a", proxy.endpoint, str(len(DATA))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert program.stdin
        assert program.stdout
        if program.stdout.readline() == "read\n":
            proxy.rule = always(stall(0))
        began = time.monotonic()
        _, told = program.communicate("\n", timeout=40)
        assert (program.returncode, told) == (0, "")
        assert time.monotonic() - began < 15
    finally:
        program.kill()
        program.wait()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"client_kwargs": "https://host"}, r"storage_options\.client_kwargs must be keys and values"),
        ({"config_kwargs": ["a"]}, r"storage_options\.config_kwargs must be keys and values"),
        ({"secrets": "x"}, "S3FileSystem has no option 'secrets'; did you mean 'secret'"),
        ({"client_kwargs": {"endpoint": "http://host"}}, "has no option 'endpoint'; did you mean 'endpoint_url'"),
        ({"client_kwargs": {"endpoint_url": "host:80"}}, "Invalid endpoint: host:80"),
        ({"config_kwargs": {"sig": 1}}, "config_kwargs has 'sig', which botocore does not know"),
        ({"key": 5}, r"storage_options\.key is not text; put quotes around it"),
        ({"anon": "maybe"}, r"storage_options\.anon is 'maybe'; it must be true or false"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], words: str) -> None:
    connection = Connection.to("s3://b/a", options)
    with pytest.raises(ConfigError, match=words):
        connection.run(connection.list("b/a"))


def test_a_name_that_no_bucket_has_is_told(object_store: ObjectStore) -> None:
    connection = Connection.to("s3://Data_1!/a", object_store.options)
    with pytest.raises(
        StorageError, match=r"s3://Data_1!/a can't be listed: Invalid bucket name \"Data_1!\"; check the path$"
    ):
        connection.run(connection.list("Data_1!/a"))
    with pytest.raises(ConfigError, match="'s3:///corpus' names no folder; write s3://bucket/folder"):
        fmsdata.ShardReader("s3:///corpus")


def test_any_key_can_be_read_and_is_told_whole(object_store: ObjectStore) -> None:
    bucket = object_store.bucket("keys")
    connection = Connection.to(bucket, object_store.options)
    for key in ("a b+c", "100%", "é#1", "a?b", "a?versionId=c", "a//b", "x&y=z;"):
        path = connection.path(f"{bucket}/folder") + f"/{key}"
        connection.run(connection.write(path, DATA))
        for start in (0, 1, 2):  # through the library, and through a signed URL
            assert connection.run(connection.read(path, start, 9)).data == DATA[start:9]
        connection.run(connection.remove(path))
        with pytest.raises(MissingError) as told:
            connection.run(connection.read(path, 0, 9))
        assert f"/folder/{key} can't be read" in str(told.value)


def test_only_a_run_can_be_resumed(proxy: FaultProxy, bucket: str) -> None:
    connection = Connection.to(bucket, proxy.options, Storage(retries=0))
    proxy.rule = always(answer(503, "SlowDown"))
    with pytest.raises(StorageError, match="could not be listed in 1 attempt") as told:
        connection.run(connection.list(connection.path(bucket)))
    assert "resumed" not in str(told.value)
