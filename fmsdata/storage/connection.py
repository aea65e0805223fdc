"""One filesystem as this process uses it: ranges of bytes, listings and small files, with retries.

A request is tried again until it gets a correct response, the retries are used up, or the deadline
has passed. A read returns exactly the requested bytes: their number is checked and, where the
server reports it, the version of the object.

Everything runs as coroutines in the event loop of the process (`io_thread.py`). Clients are created
there on first use, so never before a fork, and are created again when their credentials expire.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import fsspec

from fmsdata.core.wording import counted
from fmsdata.errors import ConfigError, DeniedError, MissingError, StorageError
from fmsdata.storage.clients.base import Client, Entry, FileBytes, Listing, Page, protocols
from fmsdata.storage.clients.connect import client_class, connect, filesystem_class
from fmsdata.storage.io_thread import IoThread
from fmsdata.storage.retry import Decision, Failure, Kind, Replaced, RetryPolicy, classify
from fmsdata.storage.secrets import mask_text, secrets_in
from fmsdata.storage.settings import Storage

T = TypeVar("T")
ERRORS = {Kind.MISSING: MissingError, Kind.DENIED: DeniedError}
ASSUMED = 64 << 20  # bytes of a file that is read whole: its size is not known before
MOST_REFRESHES = 3  # new clients for one request


@dataclass
class Traffic:
    """What went through a connection since it was created."""

    requests: int = 0
    bytes: int = 0  # that were read
    retries: int = 0  # attempts after the first
    errors: int = 0  # requests that failed for good


class Connection:
    """One filesystem, as this process uses it.

    >>> connection = Connection.to("memory://corpus", {})
    >>> connection.run(connection.write("/corpus/a", b"0123456789"))
    >>> connection.run(connection.read("/corpus/a", 2, 5)).data
    b'234'
    """

    def __init__(
        self, protocol: str, filesystem: type[Any], options: Mapping[str, Any], storage: Storage, thread: IoThread
    ) -> None:
        self.traffic = Traffic()
        self._protocol, self._filesystem, self._options, self._storage = protocol, filesystem, options, storage
        self._thread = thread
        self._policy = RetryPolicy.of(storage)
        self._slots = asyncio.Semaphore(storage.connections)
        self._connecting = asyncio.Lock()
        self._lease: _Lease | None = None  # the current client
        self._open: set[_Lease] = set()  # it, and earlier ones that are still in use or being closed
        self._worked = False
        self._secrets = secrets_in(options)

    @classmethod
    def to(cls, url: str, options: Mapping[str, Any], storage: Storage | None = None) -> "Connection":
        """The connection of this process to the filesystem of a URL."""
        storage = storage or Storage()
        if "::" in url:
            raise ConfigError(f"path {mask_text(url)!r} has two filesystems; give the one that holds the files")
        protocol = str(fsspec.utils.get_protocol(url))
        try:
            filesystem = filesystem_class(protocol)
            options = {**filesystem._get_kwargs_from_urls(url), **options}
        except (ValueError, ImportError, TypeError) as cause:
            raise ConfigError(f"path {mask_text(url)!r} can't be used: {cause}") from None
        thread = IoThread.current()
        limits = (storage.connections, storage.retries, storage.timeout, storage.deadline)
        key = (protocols(filesystem), _hashable(options), limits)
        return thread.keep(
            key, lambda: cls(protocol, filesystem, options, storage, thread), lambda connection: connection._close()
        )

    def path(self, url: str) -> str:
        """The path of a URL, in the form that the filesystem expects."""
        return str(self._filesystem._strip_protocol(url))

    def url(self, path: str) -> str:
        """The URL of a path, without secrets."""
        return mask_text(path) if "://" in path else f"{self._protocol}://{path}"

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the event loop and wait for it, from any other thread.

        An interrupt ends both.
        """
        return self._thread.run(coroutine)

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine in the event loop, without waiting."""
        return self._thread.start(coroutine)

    def start_all(self, work: Sequence[tuple[Coroutine[Any, Any, T], Future[T]]]) -> None:
        """Run many coroutines in the event loop, each with the future that gets its result."""
        self._thread.start_all(work)

    def soon(self, call: Callable[..., object], *args: object) -> None:
        """Call a function in the event loop, soon. Does nothing if the loop has ended."""
        with suppress(RuntimeError):
            self._thread.loop.call_soon_threadsafe(call, *args)

    @property
    def sees_versions(self) -> bool:
        """Whether reads report the version of the file. Where they don't, use `check`."""
        return client_class(self._filesystem).reports_versions

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """One of the `connections` requests that may be in flight at a time.

        Requests take a slot by themselves. Take it yourself to choose what to read only when there
        is room for it, and read with `has_slot=True`:

        >>> async def read_next(connection, queue):
        ...     async with connection.slot():
        ...         return await connection.read(*queue.pop(), has_slot=True)
        """
        async with self._slots:
            yield

    async def read(
        self,
        path: str,
        start: int,
        stop: int,
        version: str | None = None,
        owner: str = "",
        *,
        has_slot: bool = False,
    ) -> FileBytes:
        """The bytes from start to stop of a file, all of them.

        Raises if the file has another version. Errors mention the `owner` of the file, such as
        "source 'web'".
        """
        if start == stop:
            return FileBytes(b"", version)
        about = _About(f"bytes {start}-{stop - 1} of {self.url(path)}", "read", owner, listed=True)
        fetched = await self._request(
            lambda client: client.read(path, start, stop, version), about, stop - start, has_slot=has_slot
        )
        self.traffic.bytes += len(fetched.data)
        return fetched

    async def read_all(self, path: str) -> bytes:
        """All bytes of a file."""
        about = _About(self.url(path), "read")
        data = (await self._request(lambda client: client.read(path, 0, None, None), about, ASSUMED)).data
        self.traffic.bytes += len(data)
        return bytes(data)

    async def info(self, path: str) -> Entry:
        """Size and version of a file."""
        return await self._request(lambda client: client.info(path), _About(self.url(path), "looked up"))

    async def check(self, path: str, version: str, owner: str = "") -> None:
        """Raise if a file has another version. For filesystems whose reads don't report it."""

        async def compare(client: Client) -> None:
            found = (await client.info(path)).version
            if found != version:
                raise Replaced(f"its version is {found}, not {version}")

        await self._request(compare, _About(self.url(path), "read", owner, listed=True))

    async def list(self, folder: str, recursive: bool = True) -> Listing:
        """The files in a folder; `recursive`: and in the folders below it.

        Empty if there is no such folder.
        """
        about = _About(self.url(folder), "listed")
        in_pages = client_class(self._filesystem).lists_in_pages
        files: list[Entry] = []
        folders: list[str] = []
        token: str | None = None
        while True:
            page = await self._request(partial(_list, folder, recursive, token), about, patient=not in_pages)
            files += page.files
            folders += page.folders
            token = page.next
            if token is None:
                return Listing(sorted(files), [] if recursive else sorted(folders))

    async def write(self, path: str, data: bytes) -> None:
        """Write a file, completely or not at all."""
        about = _About(self.url(path), "written")
        await self._request(lambda client: client.write(path, data), about, len(data))

    async def remove(self, path: str) -> None:
        """Remove a file. It need not exist."""
        await self._request(lambda client: client.remove(path), _About(self.url(path), "removed"))

    async def remove_folder(self, path: str) -> None:
        """Remove a folder whose files are removed already. Object stores have no folders."""
        await self._request(lambda client: client.remove_folder(path), _About(self.url(path), "removed"))

    async def _request(
        self,
        call: Callable[[Client], Awaitable[T]],
        about: "_About",
        size: int = 0,
        *,
        patient: bool = False,
        has_slot: bool = False,
    ) -> T:
        """The result of a call, with as many attempts as necessary and allowed.

        A request keeps its slot while it waits to retry, so there are fewer requests to a busy
        server.
        """
        async with nullcontext() if has_slot else self._slots:
            began = time.monotonic()
            attempts = refreshes = 0
            while True:
                left = began + self._policy.deadline - time.monotonic()
                limit = left if patient else self._policy.limit(size, left)
                outcome = await self._attempt(call, limit, left)
                attempts += 1
                self.traffic.requests += 1
                if isinstance(outcome, _Success):
                    self._worked = True
                    return outcome.value
                seconds = time.monotonic() - began
                wait = self._policy.wait(attempts, self._policy.deadline - seconds, outcome.wait)
                if outcome.decision is Decision.REFRESH:
                    refreshes += 1
                    wait = None if refreshes > (MOST_REFRESHES if self._worked else 1) else wait
                if outcome.decision is Decision.FAIL or wait is None:
                    self.traffic.errors += 1
                    raise about.error(outcome, attempts, seconds)
                self.traffic.retries += 1
                await asyncio.sleep(wait)

    async def _attempt(
        self, call: Callable[[Client], Awaitable[T]], limit: float, left: float
    ) -> "_Success[T] | Failure":
        lease: _Lease | None = None
        try:
            async with asyncio.timeout(left) as timer:  # creating a client is not part of the limit
                lease = await self._borrow()
                timer.reschedule(asyncio.get_running_loop().time() + limit)
                return _Success(await call(lease.client))
        except ConfigError:
            raise
        except Exception as error:
            if timer.expired():
                return Failure(Decision.RETRY, f"there was no complete response within {limit:.3g} s")
            failure = classify(error, self._worked)
            if failure.decision is Decision.REFRESH and lease is self._lease:
                self._lease = None  # the next request creates a client, which loads the credentials again
            return failure._replace(cause=mask_text(failure.cause, self._secrets))
        finally:
            if lease is not None:
                lease.users -= 1
                if not lease.users and lease is not self._lease:
                    await self._drop(lease)

    async def _borrow(self) -> "_Lease":
        """The current client, created if there is none: once, however many requests wait for it."""
        while self._lease is None:
            async with self._connecting:
                if self._lease is None:
                    self._lease = _Lease(await connect(self._filesystem, self._options, self._storage))
                    self._open.add(self._lease)
        self._lease.users += 1
        return self._lease

    async def _drop(self, lease: "_Lease") -> None:
        with suppress(Exception):
            await lease.client.close()
        self._open.discard(lease)

    async def _close(self) -> None:
        self._lease = None
        for lease in list(self._open):
            await self._drop(lease)


@dataclass(frozen=True)
class _Success(Generic[T]):
    """The result of an attempt that succeeded."""

    value: T


@dataclass(eq=False)
class _Lease:
    """A client, and the number of requests that use it."""

    client: Client
    users: int = 0


class _About(NamedTuple):
    """What a request is about, for its errors."""

    subject: str
    verb: str
    owner: str = ""
    listed: bool = False  # the file existed when the shards were listed

    def error(self, failure: Failure, attempts: int, seconds: float) -> StorageError:
        subject = f"{self.owner}: {self.subject}" if self.owner else self.subject
        cause = failure.cause
        advice = f"; {failure.advice}" if failure.advice else ""
        if failure.decision is Decision.RETRY:
            wait = f"; the server asks to wait {failure.wait:.0f} s" if failure.wait else ""
            resume = "" if self.verb == "listed" else "; the run can be resumed from its last state"
            return StorageError(
                f"{subject} could not be {self.verb} in {counted(attempts, 'attempt')} and {seconds:.1f} s, "
                f"last error: {cause}{wait}{advice}{resume}"
            )
        if failure.decision is Decision.REFRESH:
            cause = f"the credentials were rejected, and refreshing them did not help: {cause}"
        if failure.kind is Kind.MISSING and self.listed and not advice:
            cause = "it is gone; it was there when the shards were listed"
        return ERRORS.get(failure.kind, StorageError)(f"{subject} can't be {self.verb}: {cause}{advice}")


def _list(folder: str, recursive: bool, page: str | None, client: Client) -> Awaitable[Page]:
    return client.list(folder, recursive, page)


def _hashable(value: Any) -> object:
    """A hashable form of options: equal options get the same connection."""
    if isinstance(value, Mapping):
        return tuple(sorted((str(name), _hashable(option)) for name, option in value.items()))
    if isinstance(value, list | tuple):
        return tuple(map(_hashable, value))
    return value if isinstance(value, str | int | float | bool | None) else repr(value)


def close_connections() -> None:
    """Close all connections of this process. New ones are created when they are needed."""
    IoThread.close_current()
