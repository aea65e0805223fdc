"""How long planning a finite pass takes: the lines of all lanes, from the lengths of the documents.

    python benchmarks/finite.py --tokens 1e9

Documents are lognormal, 1,000 tokens long on average, as uint16 in shards of 62,500 documents, with an
EOS behind each. The shards are written to a temporary folder, or once to --folder. Each mode is planned in a
process of its own, with the shards in the page cache. Also shown: which part of all rows is padding at some
world sizes.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import fmsdata
from fmsdata.planning.schedule import Schedule, Segment
from fmsdata.run.finite import plan_pass

MEAN, SHARD = 1000, 62_500  # tokens of a document, documents of a shard
MODES: dict[str, dict[str, Any]] = {"split": {}, "pad": {"pad": 0}, "bestfit": {"pad": 0, "bol": 1}}


def write_corpus(folder: Path, tokens: float) -> None:
    rng = np.random.default_rng(0)
    schema = pa.schema([("tokens", pa.list_(pa.uint16()))])
    for number in range(max(1, round(tokens / MEAN / SHARD))):
        path = folder / f"part-{number:03}.arrow"
        if path.exists():
            continue
        lengths = np.maximum(1, rng.lognormal(np.log(MEAN) - 0.5, 1, SHARD).astype(np.int64))
        ends = np.concatenate([[0], np.cumsum(lengths)])
        values = rng.integers(1, 50_000, ends[-1]).astype(np.uint16)
        path.parent.mkdir(parents=True, exist_ok=True)
        with pa.ipc.new_file(str(path), schema) as writer:
            for first in range(0, SHARD, 2500):
                part = ends[first : first + 2501]
                rows = pa.ListArray.from_arrays(
                    pa.array((part - part[0]).astype(np.int32)), pa.array(values[part[0] : part[-1]])
                )
                writer.write_batch(pa.record_batch([rows], schema=schema))


def measure(folder: Path, mode: str, lanes: int) -> dict[str, Any]:
    """Plan one mode, once to warm up the page cache and once for the clock."""
    reader = fmsdata.ShardReader(folder, name="web")
    documents = fmsdata.Delimit(fmsdata.Mixture({"web": reader}, {"web": 1}), eos=0)
    lines = fmsdata.Shuffle(fmsdata.Pack(documents, seq_len=4097, mode=mode, **MODES[mode]))  # type: ignore[arg-type]
    data = fmsdata.Rescalable(lines, lanes=lanes, epochs=1)
    seconds: list[float] = []
    cpu: list[float] = []
    plan = None
    for _ in range(3):
        began, busy = time.perf_counter(), time.process_time()
        plan = plan_pass(data)
        seconds.append(time.perf_counter() - began)
        cpu.append(time.process_time() - busy)
    if plan is None:
        raise SystemExit("the plan was stopped")
    filled = {}
    for world_size in (1, 8, 64, lanes):
        now = Segment(0, world_size, 8)
        rows = Schedule([now], lanes, plan.lines).end(now) * world_size * 8
        filled[world_size] = 1 - int(plan.lines.sum()) / rows
    return {
        "tokens": reader.size().tokens,
        "seconds": min(seconds),
        "cpu": min(cpu),
        "lines": int(plan.lines.sum()),
        "filled": filled,
    }


def main() -> None:
    options = argparse.ArgumentParser(description="Measure how long planning a finite pass takes.")
    options.add_argument("--tokens", type=float, default=1e9)
    options.add_argument("--lanes", type=int, default=192)
    options.add_argument("--folder", type=Path)
    options.add_argument("--mode", help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.mode:
        print(json.dumps(measure(given.folder, given.mode, given.lanes)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        report(given.folder or Path(temporary), given.tokens, given.lanes)


def report(folder: Path, tokens: float, lanes: int) -> None:
    """Write the corpus, unless it is there, and plan it in each mode."""
    write_corpus(folder, tokens)
    for mode in MODES:
        options = ["--folder", str(folder), "--lanes", str(lanes), "--mode", mode]
        done = subprocess.run([sys.executable, __file__, *options], check=True, capture_output=True, text=True)
        found = json.loads(done.stdout)
        filled = ", ".join(f"{share:.1%} at world size {size}" for size, share in found["filled"].items())
        print(
            f"{mode}: {found['seconds']:.1f} s ({found['cpu']:.1f} s of CPU) for {found['tokens'] / 1e9:.2f} billion "
            f"tokens, {found['lines']:,} lines; "
            f"rows of padding: {filled}",
            flush=True,
        )


if __name__ == "__main__":
    main()
