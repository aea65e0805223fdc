"""Real object stores for the tests, on loopback and in a temporary folder: JuiceFS' S3 gateway, and OpenStack Swift.

Both verify signatures, and serve ranges, listings and multipart uploads as S3 does. The gateway is what the tests
use; Swift is there for a second opinion, since it shares no code with it. `other_stores.py` has stores that do not
speak S3.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import botocore.config
import botocore.session

KEY, SECRET = "tester", "tester-secret"
ROOT = Path(__file__).parents[2]
PATIENCE = 20.0  # seconds for a server to start or to end

# Starts a server and ends with it. Ends it on SIGTERM, and when the parent process has ended, even if that was
# killed. (The kernel could do this alone, but it does so already when the thread that started it ends.)
KEEPER = """
import ctypes, os, signal, sys
parent, signals = int(sys.argv[1]), {signal.SIGTERM, signal.SIGCHLD}
signal.pthread_sigmask(signal.SIG_BLOCK, signals)
server = os.fork()
if not server:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    os.execv(sys.argv[2], sys.argv[2:])
while not os.waitpid(server, os.WNOHANG)[0]:
    if os.getppid() != parent:
        os.kill(server, signal.SIGKILL)
    got = signal.sigtimedwait(signals, 0.2)
    if got and got.si_signo == signal.SIGTERM:
        os.kill(server, signal.SIGTERM)
"""


def storage_options(endpoint: str, key: str = KEY, secret: str = SECRET) -> dict[str, Any]:
    """What fsspec needs to know of a server to reach it by `s3://` URLs."""
    return {"key": key, "secret": secret, "client_kwargs": {"endpoint_url": endpoint, "region_name": "us-east-1"}}


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def client(endpoint: str, key: str = KEY, secret: str = SECRET) -> Any:
    """A plain blocking S3 client that asks once and never again."""
    return botocore.session.Session().create_client(
        "s3",
        aws_access_key_id=key,
        aws_secret_access_key=secret,
        endpoint_url=endpoint,
        region_name="us-east-1",
        config=botocore.config.Config(retries={"total_max_attempts": 1}, connect_timeout=5, read_timeout=30),
    )


class Server:
    """A server process on loopback that stores objects in a folder of its own, until it is stopped.

    >>> with ObjectStore(tmp_path) as store:                                                  # doctest: +SKIP
    ...     url = store.bucket("corpus")
    ...     store.upload(folder, f"{url}/web")
    ...     fsspec.filesystem("s3", **store.options).ls(url)
    """

    key = KEY
    scheme = "s3"
    writes = "PUT"  # the method that writes an object
    ready, answer = "/", 200  # the path that is answered with this status when the server is ready

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.log = folder / "log"
        self._process: subprocess.Popen[bytes] | None = None
        self._buckets: Counter[str] = Counter()
        folder.mkdir(parents=True, exist_ok=True)
        self.prepare()
        self.start()

    def prepare(self) -> None:
        """What is done once, before the first start."""

    def command(self) -> list[str]:
        raise NotImplementedError

    def environment(self) -> dict[str, str]:
        return {}

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def options(self) -> dict[str, Any]:
        return self.options_at(self.endpoint)

    def options_at(self, endpoint: str) -> dict[str, Any]:
        """The same for a proxy in front of it."""
        raise NotImplementedError

    def start(self) -> None:
        program, *arguments = self.command()
        kept = [sys.executable, "-I", "-S", "-c", KEEPER, str(os.getpid()), program, *arguments]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                kept,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **self.environment()},
                cwd=self.folder,
                start_new_session=True,
            )
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise

    def _wait(self) -> None:
        assert self._process
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end and self._process.poll() is None:
            try:
                with urllib.request.urlopen(self.endpoint + self.ready, timeout=5) as answer:
                    status = answer.status
            except urllib.error.HTTPError as error:
                status = error.code
                error.close()
            except OSError:
                status = 0
            if status == self.answer:
                return
            time.sleep(0.02)
        raise RuntimeError(f"{self.command()[0]} did not start: {self.log.read_text(errors='replace')[-2000:]}")

    def stop(self) -> None:
        """End the server. What it stored stays in its folder."""
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(PATIENCE)

    def restart(self) -> None:
        """End the server and start it again on the same port, with what it had stored."""
        self.stop()
        self.start()

    def bucket(self, name: str = "test") -> str:
        """Create a bucket with a new name, and return its URL. The first of a name is `name-1`."""
        self._buckets[name] += 1
        bucket = f"{name}-{self._buckets[name]}"
        self.create(bucket)
        return f"{self.scheme}://{bucket}"

    def split(self, url: str) -> tuple[str, str]:
        """Bucket and key of a URL."""
        bucket, _, key = url.removeprefix(f"{self.scheme}://").partition("/")
        return bucket, key

    def create(self, bucket: str) -> None:
        raise NotImplementedError

    def put(self, url: str, data: bytes) -> None:
        raise NotImplementedError

    def get(self, url: str) -> bytes:
        raise NotImplementedError

    def list(self, url: str) -> dict[str, int]:
        """The objects below a URL, by their name relative to it, with their sizes."""
        bucket, prefix = self.split(url)
        prefix = f"{prefix.rstrip('/')}/".lstrip("/")
        return {key.removeprefix(prefix): size for key, size in self.sizes(bucket, prefix).items()}

    def sizes(self, bucket: str, prefix: str) -> dict[str, int]:
        """The objects of a bucket whose keys begin so."""
        raise NotImplementedError

    def upload(self, folder: Path, url: str) -> None:
        """Copy all files below a local folder to a URL: `folder/a/b` becomes `url/a/b`."""
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                self.put(f"{url.rstrip('/')}/{path.relative_to(folder).as_posix()}", path.read_bytes())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


class S3Server(Server):
    """A server that speaks S3."""

    _client: Any = None

    def options_at(self, endpoint: str) -> dict[str, Any]:
        return storage_options(endpoint, self.key)

    @property
    def client(self) -> Any:
        """A plain blocking client, for the tests themselves."""
        if self._client is None:
            self._client = client(self.endpoint, self.key)
        return self._client

    def create(self, bucket: str) -> None:
        self.client.create_bucket(Bucket=bucket)

    def put(self, url: str, data: bytes) -> None:
        bucket, key = self.split(url)
        self.client.put_object(Bucket=bucket, Key=key, Body=data)

    def get(self, url: str) -> bytes:
        bucket, key = self.split(url)
        return bytes(self.client.get_object(Bucket=bucket, Key=key)["Body"].read())

    def sizes(self, bucket: str, prefix: str) -> dict[str, int]:
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
        return {item["Key"]: item["Size"] for page in pages for item in page.get("Contents", ())}

    def stop(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None
        super().stop()


class ObjectStore(S3Server):
    """JuiceFS' gateway: one binary with MinIO's S3 layer, ready in a fraction of a second."""

    ready = "/minio/health/live"

    def prepare(self) -> None:
        data = str(self.folder / "data")
        format = ["format", "--storage", "file", "--bucket", data, "--trash-days", "0", self._meta, "tests"]
        done = subprocess.run([_juicefs(), *format], capture_output=True, text=True, timeout=PATIENCE)
        if done.returncode:
            raise RuntimeError(f"juicefs format failed: {done.stderr}")

    @property
    def _meta(self) -> str:
        return f"sqlite3://{self.folder / 'meta.db'}"

    def command(self) -> list[str]:
        quiet = ["--no-usage-report", "--no-banner", "--metrics", "127.0.0.1:0"]
        cache = ["--cache-dir", "memory", "--cache-size", "64M"]
        return [
            *[_juicefs(), "gateway", "--multi-buckets", "--keep-etag", *quiet, *cache],
            *[self._meta, f"127.0.0.1:{self.port}"],
        ]

    def environment(self) -> dict[str, str]:
        return {"MINIO_ROOT_USER": KEY, "MINIO_ROOT_PASSWORD": SECRET}


def _juicefs() -> str:
    beside = Path(sys.executable).with_name("juicefs")
    found = str(beside) if beside.exists() else shutil.which("juicefs")
    if not found:
        raise RuntimeError("juicefs is not installed; `make setup` does it")
    return found


class SwiftStore(S3Server):
    """OpenStack Swift with its S3 interface, ready in a second or two."""

    key = f"tests:{KEY}"  # account and user
    ready = "/healthcheck"

    def command(self) -> list[str]:
        python = ROOT / ".swift" / "bin" / "python"
        if not python.exists():
            raise RuntimeError(f"{python} is missing: Swift is not installed; `make setup` does it")
        program = ROOT / "tests" / "programs" / "swift_server.py"
        return [
            *[str(python), "-W", "ignore", str(program)],
            *[str(self.folder), str(self.port), *self.key.split(":"), SECRET],
        ]
