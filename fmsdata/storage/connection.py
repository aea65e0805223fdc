"""A filesystem as this process uses it: ranges of bytes, listings and small files, with retries.

Every request is tried again until it is answered as it should be, the attempts are used up or the time is over.
What was read is what was asked for: its length and, where the server tells it, the version of the object it is of.

Everything happens in the loop of the process (`io_thread.py`), in coroutines. Clients are made there when they are
first needed, so never before a fork, and made anew when their credentials have expired.
"""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import fsspec

from fmsdata.errors import ConfigError, DeniedError, MissingError, StorageError
from fmsdata.storage.clients.base import Client, Entry, Fetched, protocols
from fmsdata.storage.clients.connect import connect
from fmsdata.storage.io_thread import IoThread
from fmsdata.storage.retry import Finding, Kind, Policy, Replaced, Verdict, clean, understand
from fmsdata.storage.settings import Storage

T = TypeVar("T")
ERRORS = {Kind.MISSING: MissingError, Kind.DENIED: DeniedError}
ASSUMED = 64 << 20  # bytes of a file that is read whole: its size is not known before
FRESH_CLIENTS = 3  # that a request may ask for, one after the other
SECRET = re.compile("key|secret|token|password|credential|sas|sig", re.IGNORECASE)


class Listing(NamedTuple):
    """What is in a folder."""

    files: list[Entry]
    folders: list[str]  # names of the folders in it; none if the listing goes into them


@dataclass
class Traffic:
    """What went through a connection since it was made."""

    requests: int = 0
    bytes: int = 0  # that were read
    retries: int = 0  # attempts after the first
    errors: int = 0  # that were given up


class Connection:
    """One filesystem, as this process uses it.

    >>> connection = Connection.to("memory://corpus", {})
    >>> connection.run(connection.write("/corpus/a", b"0123456789"))
    >>> connection.run(connection.read("/corpus/a", 2, 5)).data
    b'234'
    """

    def __init__(
        self, protocol: str, kind: type[Any], options: Mapping[str, Any], storage: Storage, thread: IoThread
    ) -> None:
        self.traffic = Traffic()
        self._protocol, self._kind, self._options, self._storage = protocol, kind, options, storage
        self._thread = thread
        self._policy = Policy.of(storage)
        self._slots = asyncio.Semaphore(storage.connections)
        self._making = asyncio.Lock()
        self._lease: _Lease | None = None  # the client in use
        self._open: set[_Lease] = set()  # it, and earlier ones that are in use or being closed
        self._worked = False
        self._secrets = set(_secrets(options))

    @classmethod
    def to(cls, url: str, options: Mapping[str, Any], storage: Storage | None = None) -> "Connection":
        """The connection of this process to the filesystem of a URL."""
        storage = storage or Storage()
        if "::" in url:
            raise ConfigError(f"path {clean(url)!r} has two filesystems; give the one that the files are on")
        protocol = str(fsspec.utils.get_protocol(url))
        try:
            kind = fsspec.get_filesystem_class(protocol)
            options = {**kind._get_kwargs_from_urls(url), **options}
        except (ValueError, ImportError, TypeError) as cause:
            raise ConfigError(f"path {clean(url)!r} can't be used: {cause}") from None
        thread = IoThread.current()
        limits = (storage.connections, storage.retries, storage.timeout, storage.deadline)
        key = (protocols(kind), _frozen(options), limits)
        return thread.keep(key, lambda: cls(protocol, kind, options, storage, thread), lambda one: one._close())

    def path(self, url: str) -> str:
        """The path of a URL, as the filesystem wants it."""
        return str(self._kind._strip_protocol(url))

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run it in the loop and wait for it, from any other thread. An interrupt ends both."""
        return self._thread.run(coroutine)

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run it in the loop, without waiting."""
        return self._thread.start(coroutine)

    def start_all(self, work: Sequence[tuple[Coroutine[Any, Any, T], Future[T]]]) -> None:
        """Run many in the loop, each with the future that it tells."""
        self._thread.start_all(work)

    def soon(self, call: Callable[..., object], *args: object) -> None:
        """Call it in the loop, soon. If that has ended, there is nothing more to do."""
        with suppress(RuntimeError):
            self._thread.loop.call_soon_threadsafe(call, *args)

    def url(self, path: str) -> str:
        """The URL of a path, fit to be shown."""
        return self._url(path)

    @property
    def sees_versions(self) -> bool:
        """Whether reads tell the version of what they read. Where they don't, `check` does."""
        return bool({"s3", "http"} & set(protocols(self._kind)))

    async def read(self, path: str, start: int, stop: int, version: str | None = None, what: str = "") -> Fetched:
        """The bytes from start to stop of a file, all of them. With a version, of that version or an error.

        `what` is told in errors, such as "source 'web'".
        """
        if start == stop:
            return Fetched(b"", version)
        about = _About(f"bytes {start}-{stop - 1} of {self._url(path)}", "read", what, listed=True)
        fetched = await self._request(lambda client: client.read(path, start, stop, version), about, stop - start)
        self.traffic.bytes += len(fetched.data)
        return fetched

    async def read_all(self, path: str, what: str = "") -> bytes:
        """All of a file."""
        about = _About(self._url(path), "read", what)
        data = (await self._request(lambda client: client.read(path, 0, None, None), about, ASSUMED)).data
        self.traffic.bytes += len(data)
        return data

    async def info(self, path: str, what: str = "") -> Entry:
        """Size and version of a file."""
        return await self._request(lambda client: client.info(path), _About(self._url(path), "looked up", what))

    async def check(self, path: str, version: str, what: str = "") -> None:
        """Raise if a file is not of this version any more. For filesystems whose reads don't tell it."""

        async def look(client: Client) -> None:
            found = (await client.info(path)).version
            if found != version:
                raise Replaced(f"its version is {found}, not {version}")

        await self._request(look, _About(self._url(path), "read", what, listed=True))

    async def list(self, folder: str, recursive: bool = True, what: str = "") -> Listing:
        """The files in a folder; `recursive`: also in those below it. Empty if there is no such folder."""
        about = _About(self._url(folder), "listed", what)
        all_at_once = "s3" not in protocols(self._kind)
        files: list[Entry] = []
        folders: list[str] = []
        page: str | None = None
        while True:
            ask = partial(_list, folder, recursive, page)
            some, others, page = await self._request(ask, about, patient=all_at_once)
            files += some
            folders += others
            if page is None:
                return Listing(sorted(files), [] if recursive else sorted(folders))

    async def is_folder(self, path: str, what: str = "") -> bool:
        """Whether there is something below this path."""
        return await self._request(lambda client: client.is_folder(path), _About(self._url(path), "listed", what))

    async def write(self, path: str, data: bytes, what: str = "") -> None:
        """Write a file, whole or not at all."""
        about = _About(self._url(path), "written", what)
        await self._request(lambda client: client.write(path, data), about, len(data))

    async def remove(self, path: str, what: str = "") -> None:
        """Remove a file. It is no matter if it is gone."""
        await self._request(lambda client: client.remove(path), _About(self._url(path), "removed", what))

    async def remove_folder(self, path: str, what: str = "") -> None:
        """Remove a folder whose files are removed, where there are folders at all."""
        await self._request(lambda client: client.remove_folder(path), _About(self._url(path), "removed", what))

    def _url(self, path: str) -> str:
        return clean(path) if "://" in path else f"{self._protocol}://{path}"

    async def _request(
        self, call: Callable[[Client], Awaitable[T]], about: "_About", size: int = 0, patient: bool = False
    ) -> T:
        """What the call brings, with as many attempts as it takes and the policy allows.

        A request keeps its place among those in flight while it waits: where a server is busy, there are fewer then.
        """
        async with self._slots:
            began = time.monotonic()
            attempts = fresh = 0
            while True:
                left = began + self._policy.deadline - time.monotonic()
                limit = left if patient else self._policy.limit(size, left)
                outcome = await self._attempt(call, limit, left)
                attempts += 1
                self.traffic.requests += 1
                if isinstance(outcome, _Answer):
                    self._worked = True
                    return outcome.value
                seconds = time.monotonic() - began
                wait = self._policy.wait(attempts, self._policy.deadline - seconds, outcome.wait)
                if outcome.verdict is Verdict.FRESH:
                    fresh += 1
                    wait = None if fresh > (FRESH_CLIENTS if self._worked else 1) else wait
                if outcome.verdict is Verdict.FAIL or wait is None:
                    self.traffic.errors += 1
                    raise about.error(outcome, attempts, seconds)
                self.traffic.retries += 1
                await asyncio.sleep(wait)

    async def _attempt(
        self, call: Callable[[Client], Awaitable[T]], limit: float, left: float
    ) -> "_Answer[T] | Finding":
        lease: _Lease | None = None
        try:
            async with asyncio.timeout(left) as timer:  # if a client must be made, that takes time of its own
                lease = await self._borrow()
                timer.reschedule(asyncio.get_running_loop().time() + limit)
                return _Answer(await call(lease.client))
        except ConfigError:
            raise
        except Exception as error:
            if timer.expired():
                return Finding(Verdict.AGAIN, f"there was no complete answer within {limit:.3g} s")
            found = understand(error, self._worked)
            if found.verdict is Verdict.FRESH and lease is self._lease:
                self._lease = None  # the next request makes one that looks for credentials anew
            return found._replace(cause=self._without_secrets(found.cause))
        finally:
            if lease is not None:
                lease.users -= 1
                if not lease.users and lease is not self._lease:
                    await self._drop(lease)

    async def _borrow(self) -> "_Lease":
        """The client, made if there is none. However many requests need a new one, one is made."""
        while self._lease is None:
            async with self._making:
                if self._lease is None:
                    self._lease = _Lease(await connect(self._kind, self._options, self._storage))
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

    def _without_secrets(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text


@dataclass(frozen=True)
class _Answer(Generic[T]):
    """What came of an attempt that succeeded."""

    value: T


@dataclass(eq=False)
class _Lease:
    """A client, and how many requests use it."""

    client: Client
    users: int = 0


class _About(NamedTuple):
    """What a request is about, for its errors."""

    subject: str
    verb: str
    what: str = ""
    listed: bool = False  # it was there when the shards were listed

    def error(self, found: Finding, attempts: int, seconds: float) -> StorageError:
        subject = f"{self.what}: {self.subject}" if self.what else self.subject
        cause, advice = found.cause, found.advice
        if found.verdict is Verdict.AGAIN:
            asked = f"; the server asks to wait {found.wait:.0f} s" if found.wait else ""
            resume = "" if self.verb == "listed" else "; the run can be resumed from its last state"
            return StorageError(
                f"{subject} could not be {self.verb} in {attempts} attempt{'s' * (attempts > 1)} and {seconds:.1f} s, "
                f"at last for this reason: {cause}{asked}{f'; {advice}' if advice else ''}{resume}"
            )
        if found.verdict is Verdict.FRESH:
            cause = f"the credentials are not accepted, and new ones were looked for in vain: {cause}"
        if found.kind is Kind.MISSING and self.listed and not advice:
            cause = "it is gone; it was there when the shards were listed"
        kind = ERRORS.get(found.kind, StorageError)
        return kind(f"{subject} can't be {self.verb}: {cause}{f'; {advice}' if advice else ''}")


def _list(folder: str, recursive: bool, page: str | None, client: Client) -> Awaitable[tuple[Any, Any, Any]]:
    return client.list(folder, recursive, page)


def _frozen(value: Any) -> object:
    """Something to tell equal options by."""
    if isinstance(value, Mapping):
        return tuple(sorted((str(name), _frozen(one)) for name, one in value.items()))
    if isinstance(value, list | tuple):
        return tuple(map(_frozen, value))
    return value if isinstance(value, str | int | float | bool | None) else repr(value)


def _secrets(options: Mapping[str, Any]) -> list[str]:
    found = []
    for name, value in options.items():
        if isinstance(value, Mapping):
            found += _secrets(value)
        elif isinstance(value, str) and len(value) > 3 and SECRET.search(str(name)):
            found.append(value)
    return found


def close_connections() -> None:
    """End all connections of this process. Those that are needed later are made anew."""
    IoThread.close_current()
