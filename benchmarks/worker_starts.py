"""Starts workers many times beside threads that never stop, under each start method: counts hangs and streams.

    python benchmarks/worker_starts.py 200 [forkserver fork spawn]

Beside them two loaders and a reader of an object store read ahead all the time, and a logger logs. Under `forkserver`
and `spawn`, other threads also hold locks that are not of this package. Every start must give the same stream.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.helpers import documents, write_source  # noqa: E402
from tests.servers.object_store import ObjectStore  # noqa: E402

SECONDS_PER_START = 60


def main() -> None:
    starts = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    with tempfile.TemporaryDirectory() as folder, ObjectStore(Path(folder) / "store") as store:
        corpus = Path(folder) / "corpus"
        for seed, name in enumerate(("web", "wiki")):
            write_source(corpus / name, documents(np.random.default_rng(seed), 2000, shortest=2))
        url = store.bucket("starts") + "/web"
        store.upload(corpus / "web", url)
        streams: set[str] = set()
        for method in sys.argv[2:] or ("forkserver", "fork", "spawn"):
            remote = {"url": url, "options": store.options}
            task = json.dumps([str(corpus), remote, method, starts, method != "fork"])
            began = time.perf_counter()
            program = [sys.executable, "-m", "tests.programs.worker_starts", task]
            try:
                done = subprocess.run(
                    program,
                    capture_output=True,
                    text=True,
                    cwd=ROOT,
                    env={**os.environ, "PYTHONPATH": str(ROOT)},
                    timeout=starts * SECONDS_PER_START,
                    check=True,
                )
                printed = done.stdout.split()
            except subprocess.TimeoutExpired as hang:
                printed = (hang.stdout or b"").decode().split()
                print(f"{method}: HANGS after {len(printed)} starts")
            streams |= set(printed)
            seconds = (time.perf_counter() - began) / max(1, len(printed))
            print(f"{method}: {len(printed)} starts of 2 workers, {seconds:.2f} s each", flush=True)
        print(f"different streams: {len(streams)}")


if __name__ == "__main__":
    main()
