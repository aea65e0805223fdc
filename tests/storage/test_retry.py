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

from fmsdata.storage.clients.base import body_range, check_version, plain_tag, read_body, version_of
from fmsdata.storage.retry import BadResponse, Decision, Failure, Kind, Replaced, RetryPolicy, classify, is_missing
from fmsdata.storage.settings import Storage

RETRY, REFRESH, FAIL = Decision


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
    "throttled": (s3(503, "SlowDown"), RETRY, "503 SlowDown said the server"),
    "too many": (s3(429, "TooManyRequests"), RETRY, "429"),
    "internal": (s3(500, "InternalError"), RETRY, "500"),
    "gateway, no XML": (s3(502, "502"), RETRY, "502"),
    "gateway timeout": (s3(504, "GatewayTimeout"), RETRY, "504"),
    "request timeout, as 400": (s3(400, "RequestTimeout"), RETRY, "RequestTimeout"),
    "not implemented": (s3(501, "NotImplemented"), FAIL, "501"),
    "other bad request": (s3(400, "InvalidArgument"), FAIL, "InvalidArgument"),
    "forbidden": (s3(403, "AccessDenied"), FAIL, "access is denied: 403 AccessDenied"),
    "wrong secret": (s3(403, "SignatureDoesNotMatch"), FAIL, "policy|credentials"),
    "wrong clock": (s3(403, "RequestTimeTooSkewed"), FAIL, "clock"),
    "expired": (s3(400, "ExpiredToken"), REFRESH, "ExpiredToken"),
    "rotated": (s3(403, "InvalidAccessKeyId"), REFRESH, "InvalidAccessKeyId"),
    "expired, HEAD": (s3(400, "400"), REFRESH, "400"),
    "forbidden, HEAD": (s3(403, "403"), FAIL, "access is denied"),
    "no key": (s3(404, "NoSuchKey"), FAIL, "does not exist"),
    "no bucket": (s3(404, "NoSuchBucket"), FAIL, "no such bucket.*bucket's name"),
    "wrong region": (s3(301, "PermanentRedirect"), FAIL, "region"),
    "wrong region, signed": (s3(400, "AuthorizationHeaderMalformed"), FAIL, "region"),
    "other size": (s3(416, "InvalidRange"), FAIL, "replaced during the run"),
    "replaced": (Replaced("its version is b, not a"), FAIL, "replaced during the run: its version is b"),
    "no credentials": (botocore.exceptions.NoCredentialsError(), FAIL, "no credentials were found.*anon"),
    "metadata service": (
        botocore.exceptions.CredentialRetrievalError(provider="iam-role", error_msg="timed out"),
        RETRY,
        "iam-role",
    ),
    "name": (endpoint_error(socket.gaierror(-2, "Name not known")), RETRY, "nowhere.*Name not known.*the endpoint"),
    "refused": (endpoint_error(ConnectionRefusedError(111, "refused")), RETRY, "refused.*check the endpoint"),
    "certificate": (
        led_to(
            botocore.exceptions.SSLError(endpoint_url="https://h", error="x"),
            ssl.SSLCertVerificationError(1, "self-signed certificate"),
        ),
        FAIL,
        "certificate can't be trusted.*self-signed.*AWS_CA_BUNDLE",
    ),
    "handshake": (botocore.exceptions.SSLError(endpoint_url="https://h", error="EOF"), RETRY, "EOF"),
    "read timeout": (botocore.exceptions.ReadTimeoutError(endpoint_url="https://h"), RETRY, "timeout"),
    "body ended": (
        botocore.exceptions.IncompleteReadError(actual_bytes=1, expected_bytes=2),
        RETRY,
        "1 read.*total bytes expected is 2",
    ),
    "invalid XML": (botocore.parsers.ResponseParserError("not XML"), RETRY, "not XML"),
    "payload": (aiohttp.ClientPayloadError("not completed"), RETRY, "not completed"),
    "body that breaks off": (
        led_to(aiohttp.ClientPayloadError("not completed"), ContentLengthError("40 of 294 bytes")),
        RETRY,
        "40 of 294 bytes",
    ),
    "disconnected": (aiohttp.ServerDisconnectedError(), RETRY, "disconnected"),
    "http busy": (http(503), RETRY, "503"),
    "http forbidden": (http(403), FAIL, "access is denied"),
    "http gone": (http(404), FAIL, "does not exist"),
    "http login": (http(401), REFRESH, "401"),
    "said not found, was busy": (led_to(FileNotFoundError("url"), http(503)), RETRY, "503"),
    "httpx": (
        type("HTTPStatusError", (Exception,), {"response": SimpleNamespace(status_code=429, headers={})})(),
        RETRY,
        "429",
    ),
    "httpx transport": (other("ConnectError TransportError", "reset"), RETRY, "reset"),
    "gcsfs": (other("HttpError", code=503, message="backend"), RETRY, "503 backend"),
    "azure": (
        type("HttpResponseError", (Exception,), {"status_code": 404, "error_code": "BlobNotFound"})(),
        FAIL,
        "exist",
    ),
    "azure transport": (other("ServiceRequestError AzureError", "no route"), RETRY, "no route"),
    "reset": (ConnectionResetError(errno.ECONNRESET, "reset by peer"), RETRY, "reset by peer"),
    "timeout": (TimeoutError(), RETRY, "TimeoutError"),
    "short": (BadResponse("expected 9 bytes, got 3"), RETRY, "expected 9 bytes, got 3"),
    "missing": (FileNotFoundError("a"), FAIL, "does not exist"),
    "local permission": (PermissionError(13, "Permission denied"), FAIL, "Permission denied"),
    "disk full": (OSError(errno.ENOSPC, "No space left"), FAIL, "No space left"),
    "network disk": (OSError(errno.ESTALE, "Stale file handle"), RETRY, "Stale"),
    "a mistake": (TypeError("got an unexpected keyword"), FAIL, "unexpected keyword"),
}


def told(found: Failure) -> str:
    return f"{found.cause}; {found.advice}"


@pytest.mark.parametrize("name", CASES)
def test_an_error_is_understood(name: str) -> None:
    error, decision, text = CASES[name]
    found = classify(error)
    assert (found.decision, bool(re.search(text, told(found)))) == (decision, True), told(found)
    assert "hidden" not in told(found)


@pytest.mark.parametrize("name", ["throttled", "forbidden", "expired", "no key", "other size", "internal"])
def test_what_s3fs_makes_of_an_error_is_understood_too(name: str) -> None:
    error, decision, _ = CASES[name]
    assert classify(translate_boto_error(error)).decision is decision


def test_what_is_missing_is_told_from_what_does_not_answer() -> None:
    missing = {name for name, (error, _, _) in CASES.items() if is_missing(error)}
    assert missing == {"no key", "no bucket", "http gone", "azure", "missing"}
    replaced = {name for name, (error, _, _) in CASES.items() if classify(error).kind is Kind.REPLACED}
    assert replaced == {"other size", "replaced"}


def test_credentials_that_were_there_before_are_looked_for_again() -> None:
    """A node's metadata service that does not answer once must not end a run of weeks."""
    assert classify(botocore.exceptions.NoCredentialsError(), worked=True).decision is REFRESH


@pytest.mark.parametrize(
    ("header", "least", "most"),
    [("7", 7, 7), ("0.5", 0.5, 0.5), ("a date", 20, 31), ("0", 0, 0)],
)
def test_a_server_may_ask_to_wait(header: str, least: float, most: float) -> None:
    header = formatdate(time.time() + 30, usegmt=True) if header == "a date" else header
    for error in (s3(503, "SlowDown", {"retry-after": header}), http(429, {"Retry-After": header})):
        wait = classify(error).wait
        assert wait is not None
        assert least <= wait <= most


@pytest.mark.parametrize("header", ["soon", "-3", "", "1e9", "99999999"])
def test_nonsense_is_not_waited_for(header: str) -> None:
    assert classify(http(503, {"Retry-After": header})).wait is None


POLICY = RetryPolicy(retries=8, timeout=20, deadline=120, random=random.Random(1))


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
    wait = RetryPolicy(retries=retries, timeout=1, deadline=100).wait(attempts, left, asked)
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
    assert RetryPolicy.of(Storage(retries=3, timeout=2, deadline=9)) == RetryPolicy(retries=3, timeout=2, deadline=9)


def test_draws_of_its_own() -> None:
    before = random.getstate()
    assert RetryPolicy(retries=1, timeout=1, deadline=9).wait(1, 9) is not None
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
        (206, "bytes 4-7/20", "4", (5, 9), BadResponse),
        (206, "nonsense", "4", (5, 9), BadResponse),
        (206, "bytes 5-8/20", "3", (5, 9), BadResponse),
        (206, "bytes 5-7/20", "3", (5, 9), BadResponse),
        (206, "bytes 5-7/8", "3", (5, 9), Replaced),
        (206, "bytes 0-19/20", 7, (0, None), BadResponse),
        (200, None, "8", (5, 9), BadResponse),
    ],
)
def test_the_head_of_an_answer_is_checked(
    status: int, told: str | None, length: Any, asked: tuple[int, int | None], expected: Any
) -> None:
    if isinstance(expected, tuple):
        assert body_range(status, told, length, *asked) == expected
    else:
        with pytest.raises(expected):
            body_range(status, told, length, *asked)


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
        with pytest.raises(BadResponse):
            asyncio.run(read_body(read, skip, size))
    else:
        assert asyncio.run(read_body(read, skip, size)) == body[skip : None if size is None else skip + size]


def test_versions_are_compared_without_their_quotes() -> None:
    assert plain_tag('"abc"') == plain_tag('W/"abc"') == plain_tag("abc") == "abc"
    assert plain_tag('""') is plain_tag(None) is None
    assert version_of({"size": 1}) is None
    assert version_of({"ETag": '"a"', "mtime": 3}) == "a"
    check_version("a", "a")
    check_version("a", None)
    check_version(None, "b")
    with pytest.raises(Replaced):
        check_version("a", "b")
