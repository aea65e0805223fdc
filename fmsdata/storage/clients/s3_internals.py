"""The parts of aiobotocore and botocore behind their public interface that `S3Client` relies on.

All of them serve one purpose: sending a presigned URL through the HTTP session of an S3 client. The
session has the client's proxies, certificates, timeouts and connections, and skips the work that
botocore does for each request, which halves the CPU time of a read. The public interface has no way
to do this. These are used:

- `client._endpoint.http_session`, an `aiobotocore.httpsession.AIOHTTPSession`;
- its `send`, with a `botocore.awsrequest.AWSPreparedRequest`;
- `status_code`, `headers` and `raw` of the response;
- `aiobotocore.response.AioStreamingBody` (`StreamingBody` before aiobotocore 3), to read the body
  as botocore does.

If a version of the libraries lacks one of them, `prepare` returns None, and `S3Client` makes plain
signed requests through the public interface: the same bytes, more slowly.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple


class RawResponse(NamedTuple):
    """A response whose body is not read yet."""

    status: int
    headers: Mapping[str, str]  # names in lower case
    body: Any  # with read() and close()


Send = Callable[[], Awaitable[RawResponse]]


def prepare(client: Any, url: str, headers: Mapping[str, str]) -> Send | None:
    """A call that sends a GET request through an S3 client's session; None if impossible."""
    try:
        from aiobotocore import response as bodies
        from aiobotocore.httpsession import AIOHTTPSession
        from botocore.awsrequest import AWSPreparedRequest

        body_class = getattr(bodies, "AioStreamingBody", None) or bodies.StreamingBody
        session = client._endpoint.http_session
        request = AWSPreparedRequest("GET", url, dict(headers), None, True)
    except (ImportError, AttributeError, TypeError):
        return None
    if not isinstance(session, AIOHTTPSession):  # users can configure another kind
        return None

    async def send() -> RawResponse:
        response = await session.send(request)
        length = response.headers.get("content-length")
        return RawResponse(response.status_code, response.headers, body_class(response.raw, length))

    return send
