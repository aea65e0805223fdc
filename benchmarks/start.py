"""How long a process takes until its first batch, from a start and from a resume, and to open many lanes.

    python benchmarks/start.py

Each measurement is a process of its own, which begins with nothing imported. Times are of a processor
(user and system, all threads) and of the clock, least of the repetitions: machines are noisy, and
nothing makes a process faster than it is.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import fmsdata
from fmsdata.corpus.index import index_corpus

SOURCES, SHARDS, LANES, MANY_LANES = 13, 8, 192, 1024
TIMED = """
import json, sys, time
clock, processor = time.perf_counter(), time.process_time()
def done(name):
    print(json.dumps([name, time.perf_counter() - clock, time.process_time() - processor]), flush=True)
"""
PROGRAMS = {
    "import fmsdata": "import fmsdata; done('import fmsdata')",
    "import torch": "import torch; done('import torch')",
    "all of fmsdata, after torch": """
import torch
clock, processor = time.perf_counter(), time.process_time()
from fmsdata import build_loader, StatefulDataLoader
done('all of fmsdata, after torch')
""",
    "first batch": """
import fmsdata
loader = fmsdata.build_loader(json.loads(sys.argv[1]), rank=0, world_size=1)
next(loader)
done('first batch')
""",
    "resume": """
import fmsdata
loader = fmsdata.build_loader(json.loads(sys.argv[1]), rank=0, world_size=1)
loader.load_state_dict(json.load(open(sys.argv[2])))
next(loader)
done('resume')
""",
    "open many lanes": """
import fmsdata
config = json.loads(sys.argv[1])
data = fmsdata.build_loader({**config, "lanes": int(sys.argv[3])}, rank=0, world_size=1).data
data.start(range(data.lanes))
clock, processor = time.perf_counter(), time.process_time()
data.start(range(data.lanes))
done('open many lanes')
""",
}


def make_corpus(root: Path, documents: int) -> None:
    random = np.random.default_rng(0)
    for source in range(SOURCES):
        for shard in range(SHARDS):
            lengths = np.maximum(1, random.lognormal(6.4, 1.0, documents // SHARDS).astype(int))
            tokens = [random.integers(1, 50_000, length) for length in lengths]
            fmsdata.write_shard(root / f"source-{source:02}/part-{shard}.arrow", tokens, dtype=np.uint16)
    index_corpus(root)


def measure(name: str, arguments: list[str], repeat: int) -> tuple[float, float]:
    """The least seconds of the clock, and of a processor."""
    found = []
    for _ in range(repeat):
        run = [sys.executable, "-c", TIMED + PROGRAMS[name], *arguments]
        done = subprocess.run(run, check=True, stdout=subprocess.PIPE, text=True, timeout=600)
        found.append(json.loads(done.stdout.splitlines()[-1])[1:])
    clock, processor = np.array(found).min(axis=0).tolist()
    return clock, processor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=16_000, help="of each source")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--only", choices=[*PROGRAMS], action="append")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root, state = Path(folder) / "corpus", Path(folder) / "state.json"
        make_corpus(root, arguments.documents)
        config: Mapping[str, Any] = {
            "path": str(root),
            "seed": 1,
            "lanes": LANES,
            "documents": {"eos": 0},
            "pack": {"seq_len": 4096},
            "shuffle": {"window": "auto"},
            "loader": {"batch_size": 8},
        }
        loader = fmsdata.build_loader(config, rank=0, world_size=1)
        for _ in range(300):
            next(loader)
        state.write_text(json.dumps(loader.state_dict()))
        loader.close()
        for name in arguments.only or PROGRAMS:
            clock, processor = measure(name, [json.dumps(config), str(state), str(MANY_LANES)], arguments.repeat)
            print(f"{name:30} {clock:7.3f} s   {processor:7.3f} s of a processor")


if __name__ == "__main__":
    main()
