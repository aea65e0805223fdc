"""How long a process takes to plan a corpus of a million shards from its manifest, and how much memory.

    python benchmarks/manifest.py --shards 1000000                # from a local disk
    python benchmarks/manifest.py --shards 1000000 --store        # from the object store of the tests

The manifest is made up: 13 sources, 10 million tokens a shard. No shard exists, because planning opens
none. Each measurement is a process of its own. `torch` and fmsdata are imported before it begins.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from fmsdata.corpus.manifest import FILE, Corpus, Shards, write_manifest
from fmsdata.storage.local import folder_times

SOURCES, LANES, RANKS = 13, 192, 8
PLAN = """
import json, sys, time, torch
import fmsdata
from fmsdata.config import build

def memory():
    lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return {name: int(lines[name].split()[0]) / 1024 for name in ("VmHWM", "RssAnon", "RssFile")}

config, before, began, worked = json.loads(sys.argv[1]), memory(), time.perf_counter(), time.process_time()
loader = build.build_loader(config, rank=0, world_size=8)
loader.data.start(loader.data.lanes_of(0, 8))
loader.state_dict()
times = {"seconds": time.perf_counter() - began, "processor": time.process_time() - worked}
after = memory()
print(json.dumps({**times, **{name: after[name] - before[name] for name in after}}))
"""


def make_corpus(root: Path, shards: int, url: str | None) -> int:
    """Write a manifest, and the folders that it lists. The bytes of the manifest."""
    names = sorted(
        f"source-{i % SOURCES:02}/year=2024/part-{i // SOURCES // 1000:05}/shard-{i:08}-of-{shards:08}.arrow"
        for i in range(shards)
    )
    random = np.random.default_rng(0)
    documents = random.integers(8_000, 12_000, shards)
    tokens = documents * 1000 + random.integers(0, 100_000, shards)
    for folder in sorted({name.rpartition("/")[0] for name in names} | {"meta"}):
        (root / folder).mkdir(parents=True, exist_ok=True)
    versions = [random.bytes(16).hex() for _ in names]
    corpus = Corpus(url=url, column=None, folders={} if url else folder_times(root), counts={}, others=[])
    thirds = [np.stack([each // 3, each // 3, each - 2 * (each // 3)], axis=1) for each in (documents, tokens)]
    blocks = list(zip(*thirds, strict=True))
    columns: Any = (names, tokens * 2, versions, documents, tokens, blocks)
    data = write_manifest(Shards(*columns), corpus)
    (root / "meta" / FILE).write_bytes(data)
    print(f"{shards:,} shards, {tokens.sum() / 1e12:.1f} T tokens: a manifest of {len(data) / 1e6:.0f} MB")
    return len(data)


def measure(config: dict[str, Any]) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-c", PLAN, json.dumps(config)], check=True, stdout=subprocess.PIPE, text=True, timeout=600
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


def report(what: str, found: dict[str, float]) -> None:
    print(
        f"{what}: {found['seconds']:.2f} s ({found['processor']:.2f} s of a processor), and {found['VmHWM']:.0f} MB "
        f"of memory at most: {found['RssAnon']:.0f} MB its own, {found['RssFile']:.0f} MB of mapped files"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=1_000_000)
    parser.add_argument("--store", action="store_true")
    parser.add_argument("--repeat", type=int, default=3)
    arguments = parser.parse_args()
    sys.path.append(str(Path(__file__).parents[1]))
    from tests.servers.object_store import ObjectStore

    with tempfile.TemporaryDirectory() as folder:
        root, cache = Path(folder) / "corpus", Path(folder) / "cache"
        config: dict[str, Any] = {
            "lanes": LANES,
            "documents": {"eos": 0},
            "pack": {"seq_len": 4096},
            "shuffle": {"window": "auto"},
            "loader": {"batch_size": 8},
        }
        with ObjectStore(Path(folder) / "store") if arguments.store else nullcontext() as store:
            if store is None:
                make_corpus(root, arguments.shards, None)
                config["path"] = str(root)
            else:
                url = f"{store.bucket()}/corpus"
                make_corpus(root, arguments.shards, url)
                store.upload(root / "meta", f"{url}/meta")
                sources = {f"source-{number:02}": {"weight": 1} for number in range(SOURCES)}
                config |= {"path": url, "storage_options": store.options, "sources": sources}
                config["storage"] = {"cache": {"path": str(cache), "limit": "1GiB"}}
            for number in range(arguments.repeat):
                report("the first process of a node" if number == 0 else "another process", measure(config))


if __name__ == "__main__":
    main()
