"""What a failed request means, and whether to try it again. Nothing here touches a network.

The filesystems of fsspec raise errors of many libraries. `classify` looks at what these errors have
in common (HTTP statuses, error codes and class names), so it needs none of the libraries.
"""

import email.utils
import errno
import re
import socket
import ssl
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from random import Random, SystemRandom
from typing import Any, NamedTuple

from fmsdata.storage.secrets import mask_text
from fmsdata.storage.settings import Storage

FIRST_WAIT, LONGEST_WAIT = 0.1, 10.0  # seconds; the first doubles with each attempt
SLOWEST = 1 << 20  # bytes a second; a larger read gets more time than the timeout accordingly


class Decision(Enum):
    """What to do after a failed attempt."""

    RETRY = "retry"
    REFRESH = "refresh"  # retry with a new client, which loads the credentials again
    FAIL = "fail"


class Kind(Enum):
    """Kinds of failures that callers handle differently."""

    MISSING = "missing"
    DENIED = "denied"
    REPLACED = "replaced"
    OTHER = "other"


class Failure(NamedTuple):
    """A failed attempt: what to do, the cause, and advice for the user."""

    decision: Decision
    cause: str
    advice: str = ""
    wait: float | None = None  # seconds that the server asks to wait
    kind: Kind = Kind.OTHER


class Replaced(Exception):
    """The object is no longer the one that was listed."""


class BadResponse(Exception):
    """The response does not hold what was requested. The next attempt may get a correct one."""


class ErrorResponse(Exception):
    """A response that says that a request failed, for clients that read responses themselves."""

    def __init__(self, status: int, code: str, message: str, headers: Mapping[str, str]) -> None:
        super().__init__(f"{status} {code} {message}")
        self.status, self.error_code, self.message, self.headers = status, code, message, headers


class _Response(NamedTuple):
    """The server's response, as far as the error contains it."""

    status: int
    code: str
    message: str
    headers: Mapping[str, Any]


EXPIRED = {
    *("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired", "InvalidToken"),
    *("InvalidAccessKeyId", "InvalidClientTokenId", "UnrecognizedClientException", "InvalidTokenId"),
    *("AuthenticationFailed", "InvalidAuthenticationInfo", "authError"),  # Azure, Google
}
BUSY = {
    *("SlowDown", "RequestTimeout", "InternalError", "ServiceUnavailable", "Throttling", "ThrottlingException"),
    *("RequestLimitExceeded", "BandwidthLimitExceeded", "OperationAborted", "TooManyRequests", "RequestThrottled"),
    *("IncompleteBody", "BadDigest", "XAmzContentSHA256Mismatch"),
    *("rateLimitExceeded", "userRateLimitExceeded", "backendError"),  # Google
}
OFFLINE = {"BlobArchived", "BlobBeingRehydrated"}  # Azure
NO_BUCKET = {"NoSuchBucket", "ContainerNotFound"}
ELSEWHERE = {
    *("PermanentRedirect", "TemporaryRedirect", "Redirect", "AuthorizationHeaderMalformed"),
    *("IllegalLocationConstraintException",),
}
REGION = "check the region (client_kwargs: {region_name: ...}) and the endpoint"
NO_CREDENTIALS = {
    *("NoCredentialsError", "PartialCredentialsError", "NoAuthTokenError", "DefaultCredentialsError"),
    *("ClientAuthenticationError", "RefreshError"),  # of azure-identity and google-auth
}
# Base classes of the connection errors of botocore, aiohttp, urllib3, httpx, azure and google.
CONNECTION_ERRORS = {
    *("HTTPClientError", "ResponseParserError", "IncompleteReadError", "ResponseStreamingError"),
    *("MetadataRetrievalError", "CredentialRetrievalError", "FlexibleChecksumError"),
    *("ClientConnectionError", "ClientPayloadError", "HttpProcessingError", "IncompleteRead", "ProtocolError"),
    *("TransportError", "ServiceRequestError", "ServiceResponseError"),
}
LASTING = {
    *(errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY),
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ENAMETOOLONG, errno.EINVAL, errno.ENOSYS, errno.EFBIG),
}


def classify(error: BaseException, worked: bool = False) -> Failure:
    """What an error means. `worked` says that the same credentials were accepted before.

    >>> classify(ConnectionResetError(104, "Connection reset by peer")).decision
    <Decision.RETRY: 'retry'>
    >>> classify(FileNotFoundError("a.arrow")).kind
    <Kind.MISSING: 'missing'>
    """
    chain = list(_chain(error))
    names = {base.__name__ for link in chain for base in type(link).__mro__}
    if replaced := next((link for link in chain if isinstance(link, Replaced)), None):
        return _replaced(str(replaced))
    if response := next(filter(None, map(_response, chain)), None):
        return _classify_response(response)
    cause = mask_text(_text(chain))
    if untrusted := next((link for link in chain if isinstance(link, ssl.SSLCertVerificationError)), None):
        advice = "check the endpoint's name, the clock, and the certificates that are trusted (AWS_CA_BUNDLE)"
        return Failure(Decision.FAIL, f"its certificate can't be trusted: {mask_text(str(untrusted))}", advice)
    if any(isinstance(link, ssl.SSLError) and link.reason == "WRONG_VERSION_NUMBER" for link in chain):
        return Failure(Decision.FAIL, "the server does not use TLS", "check whether the endpoint is http or https")
    if names & NO_CREDENTIALS:
        advice = "give them in storage_options, the environment or ~/.aws, or say `anon: true` for public data"
        return Failure(Decision.REFRESH if worked else Decision.FAIL, "no credentials were found", advice)
    if "ParamValidationError" in names:  # botocore's, a long text
        return Failure(Decision.FAIL, cause.splitlines()[-1].partition(": ")[0], "check the path")
    if "RecursionError" in names:  # botocore's, after a redirect that does not say where to
        return Failure(Decision.FAIL, cause, REGION)
    if isinstance(error, BadResponse) or names & CONNECTION_ERRORS:
        return Failure(Decision.RETRY, cause, _network_advice(chain))
    if isinstance(error, FileNotFoundError):
        return Failure(Decision.FAIL, "it does not exist", kind=Kind.MISSING)
    if isinstance(error, PermissionError):
        return _denied(cause)
    if isinstance(error, OSError | EOFError) and getattr(error, "errno", None) not in LASTING:
        return Failure(Decision.RETRY, cause, _network_advice(chain))
    return Failure(Decision.FAIL, cause)


def is_missing(error: BaseException) -> bool:
    """Whether nothing exists at a path, as opposed to a server that does not answer."""
    return classify(error).kind is Kind.MISSING


def _classify_response(response: _Response) -> Failure:
    status, code, message, headers = response
    cause = mask_text(" ".join(part for part in (str(status), code if code != str(status) else "", message) if part))
    bare = code in ("", str(status))  # the response to HEAD has no body with an error code
    if code in EXPIRED or (bare and status in (400, 401)):
        return Failure(Decision.REFRESH, cause, "renew the credentials, or check that they belong to this endpoint")
    if code in OFFLINE:
        return Failure(Decision.FAIL, cause, "move it to a tier that can be read at once")
    if code in BUSY or status in (408, 409, 425, 429) or (status >= 500 and status not in (501, 505)):
        return Failure(Decision.RETRY, cause, wait=_retry_after(headers))
    if code in ELSEWHERE or status in (301, 302, 307, 308):
        return Failure(Decision.FAIL, cause, REGION)
    if code == "RequestTimeTooSkewed":
        return Failure(Decision.FAIL, cause, "set this machine's clock")
    if code in NO_BUCKET:
        advice = "check the bucket's name, the endpoint and the region"
        return Failure(Decision.FAIL, "there is no such bucket", advice, kind=Kind.MISSING)
    if status in (404, 410):
        return Failure(Decision.FAIL, "it does not exist", kind=Kind.MISSING)
    if status in (412, 416):
        return _replaced(f"it no longer has these bytes ({cause})")
    if status in (401, 403):
        return _denied(cause)
    return Failure(Decision.FAIL, cause)


def _denied(cause: str) -> Failure:
    advice = (
        "check the credentials, what the bucket's policy allows them, the region and the endpoint "
        "(S3 gives the same answer for objects that do not exist, if the credentials may not list them)"
    )
    return Failure(Decision.FAIL, f"access is denied: {cause}", advice, kind=Kind.DENIED)


def _replaced(cause: str) -> Failure:
    advice = (
        "restore the original object, or start a run with the new data (if it was replaced before the run "
        "started, the manifest of the corpus is older: run `fmsdata index`)"
    )
    return Failure(Decision.FAIL, f"it was replaced during the run: {cause}", advice, kind=Kind.REPLACED)


def _network_advice(chain: list[BaseException]) -> str:
    if any(isinstance(link, socket.gaierror | ConnectionRefusedError) for link in chain):
        return "check the endpoint and the network"
    return ""


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error and its causes, outermost first."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _text(chain: list[BaseException]) -> str:
    """The outermost error, and the innermost if it adds anything."""
    outer, inner = (str(link) or type(link).__name__ for link in (chain[0], chain[-1]))
    return outer if inner in outer else f"{outer} ({inner})"


def _response(error: BaseException) -> _Response | None:
    """The server's response, from the errors of botocore, aiohttp, httpx, requests, azure,
    gcsfs and our clients.
    """
    if CONNECTION_ERRORS & {base.__name__ for base in type(error).__mro__}:
        return None  # aiohttp makes up codes for some of these, for example when a response is cut off
    response = getattr(error, "response", None)
    if isinstance(response, Mapping):  # botocore
        details, metadata = response.get("Error", {}), response.get("ResponseMetadata", {})
        code = str(details.get("Code", ""))
        status = metadata.get("HTTPStatusCode") or (int(code) if code.isdigit() else 0)
        return _Response(status, code, str(details.get("Message", "")), metadata.get("HTTPHeaders", {}))
    for owner, name in ((error, "status"), (error, "status_code"), (response, "status_code"), (error, "code")):
        status = getattr(owner, name, None)
        if isinstance(status, int) and 300 <= status < 600:
            headers = getattr(error, "headers", None) or getattr(response, "headers", None) or {}
            kind: Any = getattr(error, "error_code", None) or status
            message = str(getattr(error, "message", "") or "").partition("\n")[0]
            return _Response(status, str(getattr(kind, "value", kind)), message, headers)
    return None


def _retry_after(headers: Mapping[str, Any]) -> float | None:
    text = next((str(value) for name, value in headers.items() if str(name).lower() == "retry-after"), "")
    if re.fullmatch(r"[0-9]{1,6}(\.[0-9]+)?", text):
        return float(text)
    date = email.utils.parsedate_tz(text) if text else None
    return None if date is None else max(0.0, email.utils.mktime_tz(date) - time.time())


@dataclass(frozen=True)
class RetryPolicy:
    """How often and how long a request is tried.

    Waits are drawn from the upper half of an interval that doubles. Processes that failed together
    do not come back together, and no request gives up long before the others.
    """

    retries: int
    timeout: float
    deadline: float
    random: Random = field(default_factory=SystemRandom, compare=False)

    @classmethod
    def of(cls, storage: Storage) -> "RetryPolicy":
        return cls(storage.retries, storage.timeout, storage.deadline)

    def limit(self, size: int, left: float) -> float:
        """Seconds for an attempt to move `size` bytes, if `left` seconds remain in total."""
        return min(self.timeout + size / SLOWEST, left)

    def wait(self, attempts: int, left: float, requested: float | None = None) -> float | None:
        """Seconds to wait after the given number of attempts; None if it is time to give up."""
        if attempts > self.retries or left <= 0:
            return None
        longest = min(LONGEST_WAIT, FIRST_WAIT * 2.0 ** (attempts - 1))
        wait = self.random.uniform(longest / 2, longest)
        if requested is None:
            return min(wait, left / 2)  # better too soon than not at all
        return min(requested + wait, (requested + left) / 2) if requested < left else None
