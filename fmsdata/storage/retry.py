"""What a failed request means, and whether to try again. Nothing here touches a network.

Filesystems of fsspec fail with errors of many libraries. They are told apart by what they have in common, HTTP
statuses, error codes and names of classes, so none of those libraries is needed here.
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

from fmsdata.storage.settings import Storage

FIRST_WAIT, LONGEST_WAIT = 0.1, 10.0  # seconds; the first doubles with each attempt
SLOWEST = 1 << 20  # bytes a second that an attempt is given time for, beyond its timeout


class Verdict(Enum):
    """What to do after a failed attempt."""

    AGAIN = "again"
    FRESH = "fresh"  # again, with a new client that looks for credentials anew
    FAIL = "fail"


class Kind(Enum):
    """What a caller may want to tell apart in a failure."""

    MISSING = "missing"
    DENIED = "denied"
    REPLACED = "replaced"
    OTHER = "other"


class Finding(NamedTuple):
    """A failed attempt, understood."""

    verdict: Verdict
    cause: str
    advice: str = ""
    wait: float | None = None  # seconds that the server asks to wait
    kind: Kind = Kind.OTHER


class Replaced(Exception):
    """An object that is not the one that was listed."""


class Damaged(Exception):
    """An answer that is not what was asked for, and may be right the next time."""


class _Answer(NamedTuple):
    """What a server said, as far as an error tells."""

    status: int
    code: str
    message: str
    headers: Mapping[str, Any]


EXPIRED = {
    *("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired", "InvalidToken"),
    *("InvalidAccessKeyId", "InvalidClientTokenId", "UnrecognizedClientException", "InvalidTokenId"),
}
BUSY = {
    *("SlowDown", "RequestTimeout", "InternalError", "ServiceUnavailable", "Throttling", "ThrottlingException"),
    *("RequestLimitExceeded", "BandwidthLimitExceeded", "OperationAborted", "TooManyRequests", "RequestThrottled"),
    *("IncompleteBody", "BadDigest", "XAmzContentSHA256Mismatch"),
}
ELSEWHERE = {
    *("PermanentRedirect", "TemporaryRedirect", "Redirect", "AuthorizationHeaderMalformed"),
    *("IllegalLocationConstraintException",),
}
REGION = "check the region (client_kwargs: {region_name: ...}) and the endpoint"
NO_CREDENTIALS = {"NoCredentialsError", "PartialCredentialsError", "NoAuthTokenError", "DefaultCredentialsError"}
# Bases of the errors that libraries raise when a connection fails: botocore, aiohttp, urllib3, httpx, azure, google.
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


def understand(error: BaseException, worked: bool = False) -> Finding:
    """What an error means; `worked` tells that the same credentials were good before.

    >>> understand(ConnectionResetError(104, "Connection reset by peer")).verdict
    <Verdict.AGAIN: 'again'>
    >>> understand(FileNotFoundError("a.arrow")).kind
    <Kind.MISSING: 'missing'>
    """
    chain = list(_chain(error))
    names = {base.__name__ for one in chain for base in type(one).__mro__}
    if replaced := next((one for one in chain if isinstance(one, Replaced)), None):
        return _replaced(str(replaced))
    if answer := next(filter(None, map(_answer, chain)), None):
        return _understand_answer(answer)
    cause = clean(_text(chain))
    if found := next((one for one in chain if isinstance(one, ssl.SSLCertVerificationError)), None):
        advice = "check the endpoint's name, the clock, and the certificates that are trusted (AWS_CA_BUNDLE)"
        return Finding(Verdict.FAIL, f"its certificate can't be trusted: {clean(str(found))}", advice)
    if any(isinstance(one, ssl.SSLError) and one.reason == "WRONG_VERSION_NUMBER" for one in chain):
        return Finding(Verdict.FAIL, "the server does not speak TLS", "check whether the endpoint is http or https")
    if names & NO_CREDENTIALS:
        advice = "give them in storage_options, the environment or ~/.aws, or say `anon: true` for public data"
        return Finding(Verdict.FRESH if worked else Verdict.FAIL, "no credentials were found", advice)
    if "ParamValidationError" in names:  # botocore's, which is long
        return Finding(Verdict.FAIL, cause.splitlines()[-1].partition(": ")[0], "check the path")
    if "RecursionError" in names:  # botocore's, where a server sends it elsewhere without telling where
        return Finding(Verdict.FAIL, cause, REGION)
    if isinstance(error, Damaged) or names & CONNECTION_ERRORS:
        return Finding(Verdict.AGAIN, cause, _reach(chain))
    if isinstance(error, FileNotFoundError):
        return Finding(Verdict.FAIL, "it does not exist", kind=Kind.MISSING)
    if isinstance(error, PermissionError):
        return _forbidden(cause)
    if isinstance(error, OSError | EOFError) and getattr(error, "errno", None) not in LASTING:
        return Finding(Verdict.AGAIN, cause, _reach(chain))
    return Finding(Verdict.FAIL, cause)


def is_missing(error: BaseException) -> bool:
    """Whether there is nothing under a path, rather than no answer about it."""
    return understand(error).kind is Kind.MISSING


def _understand_answer(answer: _Answer) -> Finding:
    status, code, message, headers = answer
    cause = clean(" ".join(part for part in (str(status), code if code != str(status) else "", message) if part))
    bare = code in ("", str(status))  # the answer to HEAD has no body that tells more
    if code in EXPIRED or (bare and status in (400, 401)):
        return Finding(Verdict.FRESH, cause, "renew the credentials, or check that they are those of this endpoint")
    if code in BUSY or status in (408, 409, 425, 429) or (status >= 500 and status not in (501, 505)):
        return Finding(Verdict.AGAIN, cause, wait=_retry_after(headers))
    if code in ELSEWHERE or status in (301, 302, 307, 308):
        return Finding(Verdict.FAIL, cause, REGION)
    if code == "RequestTimeTooSkewed":
        return Finding(Verdict.FAIL, cause, "set this machine's clock")
    if code == "NoSuchBucket":
        advice = "check the bucket's name, the endpoint and the region"
        return Finding(Verdict.FAIL, "there is no such bucket", advice, kind=Kind.MISSING)
    if status in (404, 410):
        return Finding(Verdict.FAIL, "it does not exist", kind=Kind.MISSING)
    if status in (412, 416):
        return _replaced(f"it does not have these bytes any more ({cause})")
    if status in (401, 403):
        return _forbidden(cause)
    return Finding(Verdict.FAIL, cause)


def _forbidden(cause: str) -> Finding:
    advice = (
        "check the credentials, what the bucket's policy allows them, the region and the endpoint "
        "(S3 also says so of objects that do not exist, to who may not list them)"
    )
    return Finding(Verdict.FAIL, f"access is denied: {cause}", advice, kind=Kind.DENIED)


def _replaced(cause: str) -> Finding:
    advice = "bring the object back as it was, or start a run with the new data"
    return Finding(Verdict.FAIL, f"it was replaced while the run reads it: {cause}", advice, kind=Kind.REPLACED)


def _reach(chain: list[BaseException]) -> str:
    if any(isinstance(one, socket.gaierror | ConnectionRefusedError) for one in chain):
        return "check the endpoint and the network"
    return ""


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error and what led to it, outermost first."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _text(chain: list[BaseException]) -> str:
    """The outermost error, and the innermost if that tells more."""
    texts = [str(one) or type(one).__name__ for one in (chain[0], chain[-1])]
    return texts[0] if texts[1] in texts[0] else f"{texts[0]} ({texts[1]})"


def _answer(error: BaseException) -> _Answer | None:
    """What the server said, in the forms that botocore, aiohttp, httpx, requests, azure and gcsfs have."""
    if CONNECTION_ERRORS & {base.__name__ for base in type(error).__mro__}:
        return None  # aiohttp's have codes of their own making, as when an answer breaks off
    response = getattr(error, "response", None)
    if isinstance(response, Mapping):  # botocore
        told, about = response.get("Error", {}), response.get("ResponseMetadata", {})
        code = str(told.get("Code", ""))
        status = about.get("HTTPStatusCode") or (int(code) if code.isdigit() else 0)
        return _Answer(status, code, str(told.get("Message", "")), about.get("HTTPHeaders", {}))
    for owner, name in ((error, "status"), (error, "status_code"), (response, "status_code"), (error, "code")):
        status = getattr(owner, name, None)
        if isinstance(status, int) and 300 <= status < 600:
            headers = getattr(error, "headers", None) or getattr(response, "headers", None) or {}
            code = str(getattr(error, "error_code", None) or status)
            return _Answer(status, code, str(getattr(error, "message", "") or ""), headers)
    return None


def _retry_after(headers: Mapping[str, Any]) -> float | None:
    text = next((str(value) for name, value in headers.items() if str(name).lower() == "retry-after"), "")
    if re.fullmatch(r"[0-9]{1,6}(\.[0-9]+)?", text):
        return float(text)
    date = email.utils.parsedate_tz(text) if text else None
    return None if date is None else max(0.0, email.utils.mktime_tz(date) - time.time())


def clean(text: str) -> str:
    """The text without what URLs in it may keep secret.

    >>> clean("403 for https://me:word@host/a.arrow?sig=abc")
    '403 for https://host/a.arrow'
    """
    return re.sub(r"([a-z0-9+]+://)(?:[^\s/@'\"]*@)?([^\s?'\"]*)(?:\?[^\s'\")]*)?", r"\1\2", text)


@dataclass(frozen=True)
class Policy:
    """How often and how long a request is tried. Waits are drawn from the upper half of an interval that doubles: many
    processes that failed together do not come back together, and none of many requests gives up long before others."""

    retries: int
    timeout: float
    deadline: float
    random: Random = field(default_factory=SystemRandom, compare=False)

    @classmethod
    def of(cls, storage: Storage) -> "Policy":
        return cls(storage.retries, storage.timeout, storage.deadline)

    def limit(self, size: int, left: float) -> float:
        """Seconds that an attempt to move so many bytes may take, when so many are left for all of them."""
        return min(self.timeout + size / SLOWEST, left)

    def wait(self, attempts: int, left: float, asked: float | None = None) -> float | None:
        """Seconds to wait after so many attempts; None if it is time to give up."""
        if attempts > self.retries or left <= 0:
            return None
        longest = min(LONGEST_WAIT, FIRST_WAIT * 2.0 ** (attempts - 1))
        wait = self.random.uniform(longest / 2, longest)
        if asked is None:
            return min(wait, left / 2)  # rather too soon than not at all
        return min(asked + wait, (asked + left) / 2) if asked < left else None
