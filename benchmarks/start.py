"""How long a process takes until its first batch, from a start and from a resume, and to open many lanes.

    python benchmarks/start.py [--steps 0,300,3000,30000]

The resumes are at these steps of one run, which reads every batch up to the last of them. Nothing of
a resume may grow with the step.
Each measurement is a process of its own, which begins with nothing imported. Times are of a processor
(user and system, all threads) and of the clock, least of the repetitions: machines are noisy, and
nothing makes a process faster than it is.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import fmsdata
from fmsdata.corpus.index import index_corpus

SOURCES, SHARDS, LANES, MANY_LANES = 13, 8, 192, 1024
RESUME = "resume"
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
    RESUME: """
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


def save_states(config: Mapping[str, Any], steps: Sequence[int], folder: Path) -> dict[int, Path]:
    """The state of a run at each of these steps, in a file."""
    loader = fmsdata.build_loader(config, rank=0, world_size=1)
    states, done = {}, 0
    for step in sorted(steps):
        for _ in range(step - done):
            next(loader)
        done, states[step] = step, folder / f"state-{step}.json"
        states[step].write_text(json.dumps(loader.state_dict()))
    loader.close()
    return states


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
    parser.add_argument("--steps", default="0,300,3000,30000", help="at which a run is resumed")
    parser.add_argument("--only", choices=[*PROGRAMS], action="append")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "corpus"
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
        states = save_states(config, [int(step) for step in arguments.steps.split(",")], Path(folder))
        for name in arguments.only or PROGRAMS:
            for step, state in states.items() if name == RESUME else [(None, Path())]:
                clock, processor = measure(name, [json.dumps(config), str(state), str(MANY_LANES)], arguments.repeat)
                shown = name if step is None else f"{name} at step {step:,}, {state.stat().st_size / 1e3:,.0f} KB"
                print(f"{shown:36} {clock:7.3f} s   {processor:7.3f} s of a processor", flush=True)


if __name__ == "__main__":
    main()
