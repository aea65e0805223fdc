"""The servers of the tests themselves: the store is a real one, and the proxy really does what its rule says."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection, HTTPResponse, IncompleteRead
from pathlib import Path
from typing import Any

import fsspec
import psutil
import pytest
from botocore.exceptions import ClientError

from fmsdata.storage.connection import Connection
from fmsdata.storage.location import Location
from tests.servers.fault_proxy import (
    Action,
    FaultProxy,
    ProxyProcess,
    Request,
    always,
    answer,
    delay,
    faulty,
    first,
    lose,
    never,
    refuse,
    reset,
    shorten,
    stall,
    throttle,
    truncate,
)
from tests.servers.object_store import ObjectStore, S3Server, Server, SwiftStore, client
from tests.servers.other_stores import AzureStore, GcsStore

BODY = bytes(range(256)) * 4096  # 1 MB


@pytest.fixture
def url(object_store: ObjectStore) -> str:
    """An object that anybody may read by plain HTTP: what a plain client sees is what was sent."""
    url = f"{object_store.bucket()}/folder/some object"
    object_store.put(url, BODY)
    return url


def presigned(proxy: FaultProxy, url: str, method: str = "get_object") -> str:
    bucket, _, key = url.removeprefix("s3://").partition("/")
    signed = client(proxy.endpoint).generate_presigned_url(method, Params={"Bucket": bucket, "Key": key})
    return str(signed).removeprefix(proxy.endpoint)


def ask(
    proxy: FaultProxy,
    path: str,
    range: str | None = None,
    method: str = "GET",
    body: bytes | None = None,
    timeout: float = 10,
) -> tuple[HTTPConnection, HTTPResponse]:
    host, port = proxy.endpoint.removeprefix("http://").split(":")
    connection = HTTPConnection(host, int(port), timeout=timeout)
    try:
        connection.request(method, path, body=body, headers={"Range": range} if range else {})
        return connection, connection.getresponse()
    except OSError:
        connection.close()
        raise


def read(proxy: FaultProxy, path: str, range: str | None = None) -> bytes:
    connection, response = ask(proxy, path, range)
    with closing(connection), response:
        return response.read()


def refused(some: Any, **what: Any) -> tuple[int, str]:
    with pytest.raises(ClientError) as error:
        some(**what)
    response = error.value.response
    return response["ResponseMetadata"]["HTTPStatusCode"], response["Error"]["Code"]


def test_a_store_serves_ranges_and_listings(any_store: Server) -> None:
    url = any_store.bucket() + "/folder/some object"
    any_store.put(url, BODY)
    any_store.put(f"{url} too/below", b"123")
    folder = Location(url.rpartition("/")[0], any_store.options)
    assert (folder / "some object").read_range(1000, 1300) == BODY[1000:1300]
    assert folder.sizes() == {"some object": len(BODY)}
    assert folder.folders() == ["some object too"]
    assert any_store.list(str(folder)) == {"some object": len(BODY), "some object too/below": 3}
    assert any_store.get(url) == BODY


def test_a_tree_is_uploaded_whole(any_store: Server, tmp_path: Path) -> None:
    for name in ("a.arrow", "meta/counts.csv", "web/lang=de/b c.arrow"):
        (tmp_path / "corpus" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "corpus" / name).write_bytes(name.encode())
    url = any_store.bucket()
    any_store.upload(tmp_path / "corpus", f"{url}/all")
    names = {"a.arrow": 7, "meta/counts.csv": 15, "web/lang=de/b c.arrow": 21}
    assert any_store.list(f"{url}/all") == names
    assert any_store.bucket() != url


def test_the_version_tells_that_an_object_was_replaced(any_store: Server) -> None:
    url = any_store.bucket() + "/one"
    any_store.put(url, BODY)

    def version() -> str | None:
        connection = Connection.to(url, any_store.options)
        found = connection.run(connection.info(connection.path(url))).version
        (listed,) = Location(url.rpartition("/")[0], any_store.options).level().files
        assert listed.version == found
        return found

    before = version()
    assert before
    assert version() == before
    any_store.put(url, BODY[::-1])
    assert version() not in (before, None)


def test_a_wrong_secret_is_refused(s3_store: S3Server) -> None:
    bucket = s3_store.bucket().removeprefix("s3://")
    s3_store.put(f"s3://{bucket}/one", BODY)
    with FaultProxy(s3_store.endpoint) as proxy:
        for endpoint in (s3_store.endpoint, proxy.endpoint):
            known = client(endpoint, s3_store.key)
            stranger = client(endpoint, s3_store.key, "not-the-secret")
            nobody = client(endpoint, "tests:nobody")
            assert refused(stranger.get_object, Bucket=bucket, Key="one") == (403, "SignatureDoesNotMatch")
            status, code = refused(nobody.get_object, Bucket=bucket, Key="one")
            assert status == 403
            assert code in ("InvalidAccessKeyId", "AccessDenied", "SignatureDoesNotMatch")
            assert refused(known.get_object, Bucket=bucket, Key="other") == (404, "NoSuchKey")
            assert refused(known.list_objects_v2, Bucket="no-such-bucket") == (404, "NoSuchBucket")


@pytest.mark.parametrize("kind", [ObjectStore, SwiftStore, AzureStore, GcsStore])
def test_what_is_stored_survives_a_restart(tmp_path: Path, kind: type[Server]) -> None:
    with kind(tmp_path / "store") as store:
        url = f"{store.bucket()}/one"
        store.put(url, BODY)
        endpoint = store.endpoint
        store.stop()
        with pytest.raises(OSError), socket.create_connection(("127.0.0.1", store.port), timeout=1):
            pass
        store.start()
        assert store.endpoint == endpoint
        assert store.get(url) == BODY
        restarting = threading.Thread(target=store.restart)
        restarting.start()
        restarting.join()
        assert store.get(url) == BODY, "the server does not end with the thread that started it"


def test_a_store_ends_with_the_process_that_started_it_even_if_that_is_killed(tmp_path: Path) -> None:
    program = f"""
import sys, time
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from pathlib import Path
from tests.servers.object_store import ObjectStore
store = ObjectStore(Path({str(tmp_path)!r}) / "store")
print(store._process.pid, flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        keeper = psutil.Process(int(process.stdout.readline()))
        (server,) = keeper.children()
        assert server.name() == "juicefs"
        os.kill(process.pid, signal.SIGKILL)
    assert not psutil.wait_procs([keeper, server], 10)[1]


def test_the_proxy_passes_everything_on_and_tells_what_it_saw(
    object_store: ObjectStore, proxy: FaultProxy, url: str
) -> None:
    files = fsspec.filesystem("s3", **proxy.options, skip_instance_cache=True)
    assert files.cat_file(url) == BODY
    assert files.cat_file(url, start=10, end=30) == BODY[10:30]
    (whole, part) = proxy.asked("GET", "some%20object")
    assert (whole.status, whole.sent, whole.request.range) == (200, len(BODY), None)
    assert (part.status, part.sent, part.request.range) == (206, 20, "bytes=10-29")
    assert proxy.sent >= len(BODY) + 20
    files.pipe_file(f"{url}-2", BODY * 7)  # in several parts
    assert object_store.get(f"{url}-2") == BODY * 7
    assert files.cat_file(f"{url}-2") == BODY * 7
    files.rm_file(f"{url}-2")
    assert proxy.asked("DELETE")[0].status == 204
    proxy.clear()
    assert not proxy.records
    assert not proxy.sent


def test_errors_are_answered_as_s3_does(proxy: FaultProxy, url: str) -> None:
    bucket, _, key = url.removeprefix("s3://").partition("/")
    plain = client(proxy.endpoint)
    errors = [
        (403, "AccessDenied"),
        (404, "NoSuchKey"),
        (429, "TooManyRequests"),
        (500, "InternalError"),
        (503, "SlowDown"),
        (400, "ExpiredToken"),
    ]
    for status, code in errors:
        proxy.rule = always(answer(status, code))
        assert refused(plain.get_object, Bucket=bucket, Key=key) == (status, code)
        assert refused(plain.put_object, Bucket=bucket, Key=key, Body=b"12") == (status, code)
    proxy.rule = never
    assert plain.get_object(Bucket=bucket, Key=key)["Body"].read() == BODY
    assert [record.status for record in proxy.asked("GET")] == [*(status for status, _ in errors), 200]


def test_a_connection_is_reset_before_the_answer(object_store: ObjectStore, proxy: FaultProxy, url: str) -> None:
    path = presigned(proxy, url)
    for rule in (refuse(), lose()):
        proxy.rule = always(rule)
        with pytest.raises(ConnectionResetError):
            read(proxy, path)
    assert [(record.status, record.sent) for record in proxy.records] == [(0, 0)] * 2


def test_a_lost_answer_is_one_to_a_request_that_was_done(
    object_store: ObjectStore, proxy: FaultProxy, url: str
) -> None:
    path = presigned(proxy, url, "put_object")
    proxy.rule = always(refuse())
    with pytest.raises(ConnectionResetError):
        ask(proxy, path, method="PUT", body=b"first")
    assert object_store.get(url) == BODY
    proxy.rule = always(lose())
    with pytest.raises(ConnectionResetError):
        ask(proxy, path, method="PUT", body=b"second")
    assert object_store.get(url) == b"second"


@pytest.mark.parametrize("after", [0, 1, 70_000])
def test_a_connection_is_cut_within_the_body(proxy: FaultProxy, url: str, after: int) -> None:
    path = presigned(proxy, url)
    proxy.rule = always(reset(after))
    with pytest.raises((ConnectionResetError, IncompleteRead)):
        read(proxy, path)
    proxy.rule = always(truncate(after))
    with pytest.raises(IncompleteRead) as error:
        read(proxy, path, "bytes=0-199999")
    assert error.value.partial == BODY[:after]
    assert error.value.expected == 200_000 - after
    assert [record.sent for record in proxy.records] == [after, after]


def test_an_answer_is_shorter_than_the_range_and_says_so(proxy: FaultProxy, url: str) -> None:
    proxy.rule = always(shorten(99))
    connection, response = ask(proxy, presigned(proxy, url), "bytes=100-299")
    with closing(connection), response:
        assert (response.status, response.headers["Content-Length"]) == (206, "99")
        assert response.headers["Content-Range"] == f"bytes 100-299/{len(BODY)}"
        assert response.read() == BODY[100:199]


def test_an_answer_stalls_for_as_long_as_the_client_waits(proxy: FaultProxy, url: str) -> None:
    proxy.rule = always(stall(1000))
    connection, response = ask(proxy, presigned(proxy, url), timeout=0.5)
    with closing(connection), response:
        assert response.read(1000) == BODY[:1000]
        with pytest.raises(TimeoutError):
            response.read(1)


def test_answers_come_late_and_slowly(proxy: FaultProxy, url: str) -> None:
    path = presigned(proxy, url)
    began = time.monotonic()
    proxy.rule = always(delay(0.3))
    read(proxy, path)
    assert 0.3 <= time.monotonic() - began < 2
    began = time.monotonic()
    proxy.rule = always(throttle(2e6, latency=0.1))
    assert read(proxy, path) == BODY
    assert 0.6 <= time.monotonic() - began < 2


def test_the_rule_sees_what_is_asked_and_how_often(proxy: FaultProxy, url: str) -> None:
    seen: list[Request] = []

    def rule(request: Request) -> Action:
        seen.append(request)
        return first(2, answer(503, "SlowDown"))(request)

    proxy.rule = rule
    path = presigned(proxy, url)
    for _ in range(3):
        read(proxy, path, "bytes=5-9")
    read(proxy, path, "bytes=6-9")
    assert [(one.number, one.attempt, one.range) for one in seen] == [
        (0, 0, "bytes=5-9"),
        (1, 1, "bytes=5-9"),
        (2, 2, "bytes=5-9"),
        (3, 0, "bytes=6-9"),
    ]
    assert {one.path for one in seen} == {path.partition("?")[0]}
    assert [record.status for record in proxy.records] == [503, 503, 206, 503]


def test_requests_and_connections_are_counted(proxy: FaultProxy, url: str) -> None:
    path = presigned(proxy, url)
    proxy.rule = always(delay(0.3))
    with ThreadPoolExecutor(5) as pool:
        assert list(pool.map(lambda _: len(read(proxy, path)), range(5))) == [len(BODY)] * 5
    assert proxy.requests.most == proxy.connections.most == 5
    assert len(proxy.records) == 5
    proxy.clear()
    read(proxy, path)
    assert proxy.requests.most == 1


def test_faults_come_in_their_share_of_requests_and_are_the_same_every_time() -> None:
    requests = [Request("GET", f"/bucket/{number}", "", "bytes=0-9", number, 0) for number in range(4000)]
    (some, again, other) = ([faulty(0.05, seed)(one) for one in requests] for seed in (1, 1, 2))
    assert some == again != other
    faults = [action for action in some if action.end or action.status]
    assert 140 < len(faults) < 260
    assert {(action.end, action.status) for action in faults} == {
        *((None, status) for status in (429, 500, 502, 503, 504)),
        *((end, None) for end in ("refuse", "lose", "reset", "truncate", "shorten")),
    }


def test_the_proxy_can_be_a_process_of_its_own(object_store: ObjectStore, url: str) -> None:
    with ProxyProcess(object_store.endpoint, always(answer(503, "SlowDown"))) as proxy:
        bucket, _, key = url.removeprefix("s3://").partition("/")
        plain = client(proxy.endpoint)
        assert refused(plain.get_object, Bucket=bucket, Key=key) == (503, "SlowDown")
        proxy.use(never)
        assert plain.get_object(Bucket=bucket, Key=key)["Body"].read() == BODY
        assert proxy.totals() == (1, len(BODY), 1, 1)
        end = time.monotonic() + 5  # who has read the last byte may be faster than who has sent it
        while (left := proxy.totals()) != (0, 0, 0, 1) and time.monotonic() < end:
            time.sleep(0.01)
        assert left == (0, 0, 0, 1)
        pid = proxy._process.pid
    assert pid
    assert not psutil.pid_exists(pid)
