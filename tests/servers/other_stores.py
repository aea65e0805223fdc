"""Object stores that do not speak S3, for the same tests: Azurite, and an emulator of Google Cloud Storage.

Azurite is Microsoft's own emulator, and verifies signatures. The emulator of Google's store takes requests of anybody,
and one at a time. The tests talk to both through the clients of Azure and Google.
"""

import base64
import shutil
import sys
from pathlib import Path
from typing import Any

from tests.servers.object_store import ROOT, SECRET, Server

ACCOUNT = "tester"


class AzureStore(Server):
    """Azurite, ready in a second or two."""

    key = ACCOUNT
    scheme = "az"
    ready, answer = f"/{ACCOUNT}?comp=list", 403

    def command(self) -> list[str]:
        node, program = shutil.which("node"), ROOT / ".azurite/node_modules/azurite/dist/src/blob/main.js"
        if node is None or not program.exists():
            raise RuntimeError(f"node or {program} is missing: Azurite is not installed; `make setup` does it")
        where = ["--location", str(self.folder), "--blobHost", "127.0.0.1", "--blobPort", str(self.port)]
        return [node, str(program), *where, "--silent", "--disableTelemetry", "--skipApiVersionCheck"]

    def environment(self) -> dict[str, str]:
        return {"AZURITE_ACCOUNTS": f"{ACCOUNT}:{account_key()}"}

    def options_at(self, endpoint: str, key: str | None = None) -> dict[str, Any]:
        parts = {
            "DefaultEndpointsProtocol": "http",
            "AccountName": ACCOUNT,
            "AccountKey": key or account_key(),
            "BlobEndpoint": f"{endpoint}/{ACCOUNT}",
        }
        return {"connection_string": ";".join(f"{name}={value}" for name, value in parts.items())}

    def create(self, bucket: str) -> None:
        with self._client() as client:
            client.create_container(bucket)

    def put(self, url: str, data: bytes) -> None:
        with self._client() as client:
            client.get_blob_client(*self.split(url)).upload_blob(data, overwrite=True)

    def get(self, url: str) -> bytes:
        with self._client() as client:
            return bytes(client.get_blob_client(*self.split(url)).download_blob().readall())

    def sizes(self, bucket: str, prefix: str) -> dict[str, int]:
        with self._client() as client:
            found = client.get_container_client(bucket).list_blobs(name_starts_with=prefix)
            return {blob.name: blob.size for blob in found}

    def _client(self) -> Any:
        from azure.storage.blob import BlobServiceClient

        return BlobServiceClient.from_connection_string(self.options["connection_string"], retry_total=0)


def account_key(secret: str = SECRET) -> str:
    return base64.b64encode(secret.encode()).decode()


class GcsStore(Server):
    """gcp-storage-emulator, ready in a second."""

    key = ""
    scheme = "gs"
    writes = "POST"

    def command(self) -> list[str]:
        program = Path(sys.executable).with_name("gcp-storage-emulator")
        if not program.exists():
            raise RuntimeError(f"{program} is missing: the emulator is not installed; `make setup` does it")
        where = ["--host", "127.0.0.1", "--port", str(self.port)]
        return [sys.executable, str(program), "--data-dir", str(self.folder / "data"), "start", "--quiet", *where]

    def options_at(self, endpoint: str) -> dict[str, Any]:
        return {"endpoint_url": endpoint, "token": "anon", "project": "tests"}

    def create(self, bucket: str) -> None:
        with self._client() as client:
            client.create_bucket(bucket)

    def put(self, url: str, data: bytes) -> None:
        bucket, key = self.split(url)
        with self._client() as client:
            client.bucket(bucket).blob(key).upload_from_string(data, "application/octet-stream")

    def get(self, url: str) -> bytes:
        bucket, key = self.split(url)
        with self._client() as client:
            return bytes(client.bucket(bucket).blob(key).download_as_bytes())

    def sizes(self, bucket: str, prefix: str) -> dict[str, int]:
        with self._client() as client:
            return {blob.name: int(blob.size) for blob in client.list_blobs(bucket, prefix=prefix)}

    def _client(self) -> Any:
        from google.auth import credentials
        from google.cloud import storage

        nobody: Any = credentials.AnonymousCredentials  # untyped
        return _Closing(storage.Client("tests", nobody(), client_options={"api_endpoint": self.endpoint}))


class _Closing:
    """A client that is closed at the end of a block."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def __enter__(self) -> Any:
        return self._client

    def __exit__(self, *_: object) -> None:
        self._client.close()
