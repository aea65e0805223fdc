"""What errors mean and how long to wait: no network, no clock."""

import asyncio
import errno
import random
import re
import socket
import ssl
import time
from email.utils import formatdate
from types import SimpleNamespace
from typing import Any

import aiohttp
import botocore.exceptions
import botocore.parsers
import pytest
from aiohttp.http_exceptions import ContentLengthError
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict, CIMultiDictProxy
from s3fs.errors import translate_boto_error
from yarl import URL

from fmsdata.storage.clients.base import check_version, collect, place, plain, version_of
from fmsdata.storage.retry import Damaged, Finding, Kind, Policy, Replaced, Verdict, clean, is_missing, understand
from fmsdata.storage.settings import Storage

AGAIN, FRESH, FAIL = Verdict


def s3(status: int, code: str, headers: dict[str, str] | None = None) -> Exception:
    about = {"HTTPStatusCode": status, "HTTPHeaders": headers or {}}
    response: Any = {"Error": {"Code": code, "Message": "said the server"}, "ResponseMetadata": about}
    error: Exception = botocore.exceptions.ClientError(response, "GetObject")
    return error


def http(status: int, headers: dict[str, str] | None = None) -> Exception:
    url = URL("https://host/a.arrow?sig=hidden")
    asked = aiohttp.RequestInfo(url, "GET", CIMultiDictProxy(CIMultiDict()), url)
    return aiohttp.ClientResponseError(asked, (), status=status, message="No", headers=CIMultiDict(headers or {}))


def other(names: str, text: str = "", **attributes: Any) -> Exception:
    """An error of a library that is not installed: the names of its class and its bases, and what it has."""
    kind: type[Exception] = Exception
    for name in reversed(names.split()):
        kind = type(name, (kind,), attributes)
    return kind(text)


def led_to(error: Exception, *causes: Exception) -> Exception:
    """The error, raised while the others were handled, the last of them first."""
    outer = error
    for cause in causes:
        outer.__context__ = cause
        outer = cause
    return error


def endpoint_error(cause: Exception) -> Exception:
    return led_to(
        botocore.exceptions.EndpointConnectionError(endpoint_url="https://nowhere/b/k", error=cause),
        aiohttp.ClientConnectionError("no way"),
        cause,
    )


CASES = {
    "throttled": (s3(503, "SlowDown"), AGAIN, "503 SlowDown said the server"),
    "too many": (s3(429, "TooManyRequests"), AGAIN, "429"),
    "internal": (s3(500, "InternalError"), AGAIN, "500"),
    "gateway, no XML": (s3(502, "502"), AGAIN, "502"),
    "gateway timeout": (s3(504, "GatewayTimeout"), AGAIN, "504"),
    "request timeout, as 400": (s3(400, "RequestTimeout"), AGAIN, "RequestTimeout"),
    "not implemented": (s3(501, "NotImplemented"), FAIL, "501"),
    "other bad request": (s3(400, "InvalidArgument"), FAIL, "InvalidArgument"),
    "forbidden": (s3(403, "AccessDenied"), FAIL, "access is denied: 403 AccessDenied"),
    "wrong secret": (s3(403, "SignatureDoesNotMatch"), FAIL, "policy|credentials"),
    "wrong clock": (s3(403, "RequestTimeTooSkewed"), FAIL, "clock"),
    "expired": (s3(400, "ExpiredToken"), FRESH, "ExpiredToken"),
    "rotated": (s3(403, "InvalidAccessKeyId"), FRESH, "InvalidAccessKeyId"),
    "expired, HEAD": (s3(400, "400"), FRESH, "400"),
    "forbidden, HEAD": (s3(403, "403"), FAIL, "access is denied"),
    "no key": (s3(404, "NoSuchKey"), FAIL, "does not exist"),
    "no bucket": (s3(404, "NoSuchBucket"), FAIL, "no such bucket.*bucket's name"),
    "wrong region": (s3(301, "PermanentRedirect"), FAIL, "region"),
    "wrong region, signed": (s3(400, "AuthorizationHeaderMalformed"), FAIL, "region"),
    "other size": (s3(416, "InvalidRange"), FAIL, "replaced while the run reads it"),
    "replaced": (Replaced("its version is b, not a"), FAIL, "replaced while the run reads it: its version is b"),
    "no credentials": (botocore.exceptions.NoCredentialsError(), FAIL, "no credentials were found.*anon"),
    "metadata service": (
        botocore.exceptions.CredentialRetrievalError(provider="iam-role", error_msg="timed out"),
        AGAIN,
        "iam-role",
    ),
    "name": (endpoint_error(socket.gaierror(-2, "Name not known")), AGAIN, "nowhere.*Name not known.*the endpoint"),
    "refused": (endpoint_error(ConnectionRefusedError(111, "refused")), AGAIN, "refused.*check the endpoint"),
    "certificate": (
        led_to(
            botocore.exceptions.SSLError(endpoint_url="https://h", error="x"),
            ssl.SSLCertVerificationError(1, "self-signed certificate"),
        ),
        FAIL,
        "certificate can't be trusted.*self-signed.*AWS_CA_BUNDLE",
    ),
    "handshake": (botocore.exceptions.SSLError(endpoint_url="https://h", error="EOF"), AGAIN, "EOF"),
    "read timeout": (botocore.exceptions.ReadTimeoutError(endpoint_url="https://h"), AGAIN, "timeout"),
    "body ended": (
        botocore.exceptions.IncompleteReadError(actual_bytes=1, expected_bytes=2),
        AGAIN,
        "1 read.*total bytes expected is 2",
    ),
    "invalid XML": (botocore.parsers.ResponseParserError("not XML"), AGAIN, "not XML"),
    "payload": (aiohttp.ClientPayloadError("not completed"), AGAIN, "not completed"),
    "body that breaks off": (
        led_to(aiohttp.ClientPayloadError("not completed"), ContentLengthError("40 of 294 bytes")),
        AGAIN,
        "40 of 294 bytes",
    ),
    "disconnected": (aiohttp.ServerDisconnectedError(), AGAIN, "disconnected"),
    "http busy": (http(503), AGAIN, "503"),
    "http forbidden": (http(403), FAIL, "access is denied"),
    "http gone": (http(404), FAIL, "does not exist"),
    "http login": (http(401), FRESH, "401"),
    "said not found, was busy": (led_to(FileNotFoundError("url"), http(503)), AGAIN, "503"),
    "httpx": (
        type("HTTPStatusError", (Exception,), {"response": SimpleNamespace(status_code=429, headers={})})(),
        AGAIN,
        "429",
    ),
    "httpx transport": (other("ConnectError TransportError", "reset"), AGAIN, "reset"),
    "gcsfs": (other("HttpError", code=503, message="backend"), AGAIN, "503 backend"),
    "azure": (
        type("HttpResponseError", (Exception,), {"status_code": 404, "error_code": "BlobNotFound"})(),
        FAIL,
        "exist",
    ),
    "azure transport": (other("ServiceRequestError AzureError", "no route"), AGAIN, "no route"),
    "reset": (ConnectionResetError(errno.ECONNRESET, "reset by peer"), AGAIN, "reset by peer"),
    "timeout": (TimeoutError(), AGAIN, "TimeoutError"),
    "short": (Damaged("3 bytes came instead of 9"), AGAIN, "3 bytes came instead of 9"),
    "missing": (FileNotFoundError("a"), FAIL, "does not exist"),
    "local permission": (PermissionError(13, "Permission denied"), FAIL, "Permission denied"),
    "disk full": (OSError(errno.ENOSPC, "No space left"), FAIL, "No space left"),
    "network disk": (OSError(errno.ESTALE, "Stale file handle"), AGAIN, "Stale"),
    "a mistake": (TypeError("got an unexpected keyword"), FAIL, "unexpected keyword"),
}


def told(found: Finding) -> str:
    return f"{found.cause}; {found.advice}"


@pytest.mark.parametrize("name", CASES)
def test_an_error_is_understood(name: str) -> None:
    error, verdict, text = CASES[name]
    found = understand(error)
    assert (found.verdict, bool(re.search(text, told(found)))) == (verdict, True), told(found)
    assert "hidden" not in told(found)


@pytest.mark.parametrize("name", ["throttled", "forbidden", "expired", "no key", "other size", "internal"])
def test_what_s3fs_makes_of_an_error_is_understood_too(name: str) -> None:
    error, verdict, _ = CASES[name]
    assert understand(translate_boto_error(error)).verdict is verdict


def test_what_is_missing_is_told_from_what_does_not_answer() -> None:
    missing = {name for name, (error, _, _) in CASES.items() if is_missing(error)}
    assert missing == {"no key", "no bucket", "http gone", "azure", "missing"}
    replaced = {name for name, (error, _, _) in CASES.items() if understand(error).kind is Kind.REPLACED}
    assert replaced == {"other size", "replaced"}


def test_credentials_that_were_there_before_are_looked_for_again() -> None:
    """A node's metadata service that does not answer once must not end a run of weeks."""
    assert understand(botocore.exceptions.NoCredentialsError(), worked=True).verdict is FRESH


@pytest.mark.parametrize(
    ("header", "least", "most"),
    [("7", 7, 7), ("0.5", 0.5, 0.5), ("a date", 20, 31), ("0", 0, 0)],
)
def test_a_server_may_ask_to_wait(header: str, least: float, most: float) -> None:
    header = formatdate(time.time() + 30, usegmt=True) if header == "a date" else header
    for error in (s3(503, "SlowDown", {"retry-after": header}), http(429, {"Retry-After": header})):
        wait = understand(error).wait
        assert wait is not None
        assert least <= wait <= most


@pytest.mark.parametrize("header", ["soon", "-3", "", "1e9", "99999999"])
def test_nonsense_is_not_waited_for(header: str) -> None:
    assert understand(http(503, {"Retry-After": header})).wait is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("GET https://host/a?X-Amz-Signature=1f&b=2 failed", "GET https://host/a failed"),
        ("url='https://user:word@host:80/a?sig=x'", "url='https://host:80/a'"),
        ("(https://host/a?x=1)", "(https://host/a)"),
        ("s3://bucket/lang=de/part 0.arrow", "s3://bucket/lang=de/part 0.arrow"),
        ("what? no url", "what? no url"),
    ],
)
def test_secrets_in_urls_are_not_told(text: str, expected: str) -> None:
    assert clean(text) == expected


POLICY = Policy(retries=8, timeout=20, deadline=120, random=random.Random(1))


def test_waits_double_and_are_drawn_from_the_upper_half_of_the_interval() -> None:
    for attempts in range(1, 9):
        longest = min(10.0, 0.1 * 2 ** (attempts - 1))
        waits = sorted(POLICY.wait(attempts, 120) or 0.0 for _ in range(1000))
        assert waits[-1] <= longest
        assert waits[-1] > 0.95 * longest
        assert 0.5 * longest <= waits[0] < 0.55 * longest
        assert 0.7 * longest < sum(waits) / 1000 < 0.8 * longest


@given(st.integers(1, 12), st.floats(-10, 200), st.none() | st.floats(0, 300), st.integers(0, 10))
def test_no_wait_goes_beyond_the_deadline_or_the_attempts(
    attempts: int, left: float, asked: float | None, retries: int
) -> None:
    wait = Policy(retries=retries, timeout=1, deadline=100).wait(attempts, left, asked)
    if attempts > retries or left <= 0 or (asked is not None and asked >= left):
        assert wait is None
    else:
        assert wait is not None
        assert (asked or 0) <= wait < left


def test_a_deadline_shorter_than_the_backoff_is_used_nevertheless() -> None:
    assert all(0 <= (POLICY.wait(7, 0.01) or 9) <= 0.005 for _ in range(100))


def test_an_attempt_is_given_time_for_its_size_but_not_beyond_the_deadline() -> None:
    assert POLICY.limit(4096, 120) == pytest.approx(20, abs=0.01)
    assert POLICY.limit(64 << 20, 120) == 84
    assert POLICY.limit(64 << 20, 30) == 30
    assert Policy.of(Storage(retries=3, timeout=2, deadline=9)) == Policy(retries=3, timeout=2, deadline=9)


def test_draws_of_its_own() -> None:
    before = random.getstate()
    assert Policy(retries=1, timeout=1, deadline=9).wait(1, 9) is not None
    assert random.getstate() == before


@pytest.mark.parametrize(
    ("status", "told", "length", "asked", "expected"),
    [
        (206, "bytes 5-8/20", "4", (5, 9), (0, 4)),
        (206, "bytes 5-8/*", None, (5, 9), (0, 4)),
        (206, None, 4, (5, 9), (0, 4)),
        (200, None, "20", (5, 9), (5, 4)),
        (200, None, None, (5, 9), (5, 4)),
        (206, "bytes 0-19/20", 20, (0, None), (0, 20)),
        (200, None, 20, (0, None), (0, 20)),
        (200, None, None, (0, None), (0, None)),
        (206, "bytes 4-7/20", "4", (5, 9), Damaged),
        (206, "nonsense", "4", (5, 9), Damaged),
        (206, "bytes 5-8/20", "3", (5, 9), Damaged),
        (206, "bytes 5-7/20", "3", (5, 9), Damaged),
        (206, "bytes 5-7/8", "3", (5, 9), Replaced),
        (206, "bytes 0-19/20", 7, (0, None), Damaged),
        (200, None, "8", (5, 9), Damaged),
    ],
)
def test_the_head_of_an_answer_is_checked(
    status: int, told: str | None, length: Any, asked: tuple[int, int | None], expected: Any
) -> None:
    if isinstance(expected, tuple):
        assert place(status, told, length, *asked) == expected
    else:
        with pytest.raises(expected):
            place(status, told, length, *asked)


@given(st.binary(max_size=60), st.integers(0, 70), st.none() | st.integers(0, 70), st.integers(1, 9))
def test_exactly_the_bytes_that_were_asked_for(body: bytes, skip: int, size: int | None, piece: int) -> None:
    rest = [body[i : i + piece] for i in range(0, len(body), piece)]

    async def read(most: int) -> bytes:
        if not rest:
            return b""
        part, rest[0] = rest[0][:most], rest[0][most:]
        if not rest[0]:
            del rest[0]
        return part

    if skip > len(body) or (size is not None and skip + size > len(body)):
        with pytest.raises(Damaged):
            asyncio.run(collect(read, skip, size))
    else:
        assert asyncio.run(collect(read, skip, size)) == body[skip : None if size is None else skip + size]


def test_versions_are_compared_without_their_quotes() -> None:
    assert plain('"abc"') == plain('W/"abc"') == plain("abc") == "abc"
    assert plain('""') is plain(None) is None
    assert version_of({"size": 1}) is None
    assert version_of({"ETag": '"a"', "mtime": 3}) == "a"
    check_version("a", "a")
    check_version("a", None)
    check_version(None, "b")
    with pytest.raises(Replaced):
        check_version("a", "b")
