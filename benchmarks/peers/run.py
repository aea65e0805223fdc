"""fmsdata beside other loaders: speed, cost, start, resume, and accidents. Writes tables, JSON and plots.

    make bench                                   # makes the environments, and runs it
    python benchmarks/peers/run.py --quick       # a small corpus and short measurements
    python benchmarks/peers/run.py --only fmsdata,Grain --no-scenarios --no-pages

Each setup is measured in a process of its own. `--rounds` measures all setups in turns, and takes the
median. The tables go into docs/benchmarks.md and the README, the plots into docs/plots.
"""

import argparse
import json
import re
import shutil
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

sys.path[0] = str(Path(__file__).parents[1])  # modules of this folder are named peers.*

from peers import pages, scenarios  # noqa: E402
from peers.corpus import make  # noqa: E402
from peers.processes import LOADERS, ROOT, start  # noqa: E402

SIZES = {"web": 0.6, "code": 0.3, "books": 0.1}
BATCH, LENGTH = 8, 4096
NOT_PEERS = "memcpy", "fmsdata (record batches)"  # without scenarios of their own
# name of a row: loader, and what differs from its defaults (fmsdata: 192 lanes, a thread)
SETUPS: dict[str, tuple[str, dict[str, int]]] = {
    "memcpy": ("memcpy", {}),
    "fmsdata, 192 lanes, a thread (the default)": ("fmsdata", {}),
    "fmsdata, 192 lanes, no thread": ("fmsdata", {"prefetch": 0}),
    "fmsdata, 192 lanes, 1 worker": ("fmsdata", {"workers": 1}),
    "fmsdata, 192 lanes, 2 workers": ("fmsdata", {"workers": 2}),
    "fmsdata, 48 lanes, a thread": ("fmsdata", {"lanes": 48}),
    "fmsdata, 4 lanes, a thread": ("fmsdata", {"lanes": 4}),
    "fmsdata, 4 lanes, no thread": ("fmsdata", {"lanes": 4, "prefetch": 0}),
    "fmsdata, 4 lanes, 1 worker": ("fmsdata", {"lanes": 4, "workers": 1}),
    "fmsdata, 4 lanes, 2 workers": ("fmsdata", {"lanes": 4, "workers": 2}),
    "fmsdata (record batches), 192 lanes, a thread": ("fmsdata (record batches)", {}),
    "fmsdata (record batches), 48 lanes, a thread": ("fmsdata (record batches)", {"lanes": 48}),
    "fmsdata (record batches), 4 lanes, a thread": ("fmsdata (record batches)", {"lanes": 4}),
    "memmap + DataLoader": ("memmap + DataLoader", {}),
    "memmap + DataLoader, 1 worker": ("memmap + DataLoader", {"workers": 1}),
    "memmap + DataLoader, 2 workers": ("memmap + DataLoader", {"workers": 2}),
}
for peer in LOADERS:
    if peer not in (*NOT_PEERS, "fmsdata", "memmap + DataLoader"):
        SETUPS[peer] = (peer, {})
        if peer == "torchdata nodes":
            SETUPS[f"{peer}, 2 threads"] = (peer, {"threads": 2})
        SETUPS[f"{peer}, 2 workers"] = (peer, {"workers": 2})


def measure_all(args: argparse.Namespace, work: Path, chosen: list[str]) -> dict[str, Any]:
    """Speed and cost of all setups, and the time to the next batch after a resume."""
    corpus_of = {"tokens": args.tokens, "mean": 1000, "sizes": SIZES}
    weights = make(args.tokens, 1000, SIZES).shares()
    prepared: dict[str, Any] = {}
    rows: dict[str, list[dict[str, Any]]] = {}
    for name, (loader, differs) in [item for _ in range(args.rounds) for item in SETUPS.items()]:
        if loader not in chosen or not re.search(args.rows, name):
            continue
        mine = work / re.sub(r"\W+", "_", loader)
        mine.mkdir(exist_ok=True)
        setup = {"folder": str(mine / "corpus"), "sources": list(SIZES), "batch": BATCH, "length": LENGTH}
        if loader not in prepared:
            job = {"what": "prepare", "corpus": corpus_of, "setup": setup, "limit": 600}
            prepared[loader] = start(loader, job, mine)[0]
        if prepared[loader].get("error"):
            rows.setdefault(name, []).append({"error": prepared[loader]["error"]})
            continue
        setup |= {"weights": weights, **differs}
        job = {"what": "measure", "setup": setup, "seconds": args.seconds, "states": str(mine / "state"), "limit": 120}
        found = start(loader, job, mine)[0]
        if not found.get("error") and found["state_bytes"] is not None:
            again = start(loader, {**job, "resume": str(mine / "state")}, mine)[0]
            found["resumed"] = again.get("first_batch")
            found["resume_error"] = again.get("error")
        rows.setdefault(name, []).append(found)
        speed = found["tokens"] / found["clock"] / 1e6 if "tokens" in found else 0
        print(f"{name:36} {speed:8.1f} M tokens/s  {found.get('error') or ''}", flush=True)
    results = {}
    for name, rounds in rows.items():
        good = [each for each in rounds if not each.get("error")]
        if not good:
            results[name] = {"error": rounds[0]["error"]}
            continue
        numbers = {
            key: median(each[key] for each in good)
            for key in ("first_batch", "p50", "p99", "memory", "state_seconds", "resumed")
            if all(each.get(key) is not None for each in good)
        }
        numbers["tokens_per_second"] = median(each["tokens"] / each["clock"] for each in good)
        numbers["cpu_per_billion"] = median(each["cpu"] / each["tokens"] * 1e9 for each in good)
        results[name] = numbers | {"state_bytes": good[0]["state_bytes"], "rounds": good}
    about = {loader: {key: found.get(key) for key in ("version", "does")} for loader, found in prepared.items()}
    return {"rows": results, "loaders": about}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small corpus and short measurements")
    parser.add_argument("--tokens", type=int, default=60_000_000)
    parser.add_argument("--seconds", type=float, default=4, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", help="loaders, with commas between them")
    parser.add_argument("--rows", default="", help="a pattern of the rows of the table of speeds to measure")
    parser.add_argument("--no-scenarios", action="store_true")
    parser.add_argument("--no-speed", action="store_true", help="keep the measurements of the JSON file")
    parser.add_argument("--no-pages", action="store_true", help="only the JSON file; no tables and plots")
    parser.add_argument("--scenario-tokens", type=int, default=900_000)
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "peers.json")
    parser.add_argument("--work", type=Path, help="a folder for the corpora, on the disk to be measured")
    args = parser.parse_args()
    if args.quick:
        args.tokens, args.seconds, args.scenario_tokens = 6_000_000, 1.0, 300_000
    chosen = [name.strip() for name in args.only.split(",")] if args.only else list(LOADERS)
    unknown = sorted(set(chosen) - set(LOADERS))
    if unknown:
        parser.error(f"unknown loaders {unknown}; expected some of {list(LOADERS)}")
    results = json.loads(args.json.read_text()) if args.json.exists() else {}
    results |= {"machine": pages.machine(), "tokens": args.tokens, "seconds": args.seconds, "rounds": args.rounds}
    work = Path(tempfile.mkdtemp(prefix="fmsdata-bench-", dir=args.work))
    try:
        if not args.no_speed:
            results |= measure_all(args, work, chosen)
        if not args.no_scenarios:
            results["scenarios"] = {}
            faults = scenarios.compile_faults(work)
            for loader in chosen:
                if loader in NOT_PEERS:
                    continue
                found = scenarios.run_all(loader, work / "scenarios", args.scenario_tokens, faults)
                results["scenarios"][loader] = found
                for name, what in found.items():
                    print(f"{loader:20} {scenarios.NAMES[name]:24} {what['outcome']}", flush=True)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    args.json.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(results, indent=1).replace(str(work), "WORK")
    args.json.write_text(text + "\n")
    print(pages.speed_table(results))
    print(pages.scenario_table(results))
    if not args.no_pages:
        pages.write(results)


if __name__ == "__main__":
    main()
