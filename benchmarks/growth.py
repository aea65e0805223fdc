"""How cost grows: speed, memory, state, start and resume against the size of everything.

    make growth                                       # tables and plots of docs/growth.md
    python benchmarks/growth.py --only lanes,shards   # some of them; the others stay as they are

Each point is measured in a process of its own, which reads a small corpus before, so that imports do not count.
Speed is a part of a streaming copy of as many tokens, measured in turns. All times are processor time, which other
programs disturb less than the clock.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from peers.pages import between, machine, machine_words, number, table

import fmsdata
from fmsdata.config.build import build_data
from fmsdata.config.read import read_config
from fmsdata.corpus.shard_writer import writing_shard
from fmsdata.display.svg import Line, write_plot
from fmsdata.storage.location import Location

ROOT = Path(__file__).parents[1]
PAGE, PLOTS = ROOT / "docs" / "growth.md", ROOT / "docs" / "plots"
RESULTS = ROOT / "benchmarks" / "results" / "growth.json"
TOKENS = 48_000_000
BATCH_TOKENS = 1 << 15
SLICES = 8
POLL = 0.01  # seconds between two looks at the memory
MOST = 30.0  # seconds of processor time for the warm-up


@dataclass(frozen=True, kw_only=True)
class Point:
    """A corpus, and how it is read."""

    sources: int = 3
    lanes: int = 48
    rank_lanes: int | None = None  # of the measured rank; none: all
    shards: int = 12  # of all sources
    window: int = 32
    length: int = 2048
    document: int = 1000  # tokens on average
    only_counts: bool = False  # shards are empty files with made-up counts, and nothing is read

    @property
    def batch(self) -> int:
        return max(1, BATCH_TOKENS // self.length)

    @property
    def corpus(self) -> str:
        return f"{self.sources}-{self.shards}-{self.document}-{self.only_counts}"


@dataclass(frozen=True)
class Axis:
    title: str
    what: str  # is varied
    points: tuple[Point, ...]
    field: str

    @property
    def values(self) -> list[int]:
        return [getattr(point, self.field) for point in self.points]


def axis(title: str, what: str, field: str, values: tuple[int, ...], **fixed: Any) -> Axis:
    return Axis(title, what, tuple(Point(**{**fixed, field: value}) for value in values), field)


AXES = {
    "sources": axis("Sources", "sources, of one corpus", "sources", (1, 2, 5, 10, 20, 50), shards=100),
    "lanes": axis("Lanes on one rank", "lanes, all on one rank", "lanes", (1, 4, 16, 64, 256, 1024, 4096), length=512),
    "ranks": axis(
        "Lanes of a run", "lanes, 4 on this rank", "lanes", (4, 16, 64, 256, 1024, 4096), rank_lanes=4, length=512
    ),
    "shards": axis("Shards that are read", "shards", "shards", (10, 100, 1000, 10_000), sources=1),
    "counts": axis(
        "Shards that are planned",
        "shards, with counts in a CSV",
        "shards",
        (10, 100, 1000, 10_000, 100_000, 1_000_000),
        sources=1,
        only_counts=True,
    ),
    "window": axis("Window", "lines of a window", "window", (1, 4, 16, 64, 256, 1024, 4096), lanes=16),
    "length": axis("Length of a line", "tokens of a line", "length", (512, 2048, 8192, 32_768, 131_072), lanes=16),
    "document": axis(
        "Length of a document", "tokens of a document", "document", (10, 100, 1000, 10_000, 100_000, 1_000_000), lanes=4
    ),
}
COLUMNS = {
    "speed": ("part of a copy", 1.0),
    "plan": ("plan, ms", 1e3),
    "open": ("open lanes, ms", 1e3),
    "first": ("first batch, ms", 1e3),
    "resume": ("resume, ms", 1e3),
    "state": ("state, KB", 1e-3),
    "memory": ("peak memory, MB", 1e-6),
}


def write_corpus(root: Path, point: Point) -> None:
    """Documents of lognormal lengths in sources of equal size, or empty files and a counts file."""
    rng = np.random.default_rng(0)
    each = max(1, point.shards // point.sources)
    if point.only_counts:
        rows = ["dataset/filename,documents,tokens"]
        for name in (f"source-00/{part // 1000:04}/part-{part:07}.arrow" for part in range(each)):
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
            documents = 10_000 + int(rng.integers(-500, 500))
            rows.append(f"{name},{documents},{documents * point.document + int(rng.integers(1000))}")
        (root / "meta").mkdir()
        (root / "meta" / "fmsdata-index.csv").write_text("\n".join(rows) + "\n")
        return
    pool = rng.integers(1, 50_000, TOKENS, dtype=np.uint16)
    count = max(1, TOKENS // (each * point.sources * point.document))
    for source in range(point.sources):
        for part in range(each):
            lengths = (rng.lognormal(-0.32, 0.8, count) * point.document).astype(np.int64) + 1
            ends = np.minimum(np.concatenate([[0], np.cumsum(lengths)]), TOKENS)
            path = root / f"source-{source:02}" / f"part-{part:05}.arrow"
            with writing_shard(Location(path), dtype=np.uint16) as writer:
                writer.write(pool, ends)
    command = [sys.executable, "-c", "from fmsdata.cli.app import main; main()", "index", str(root)]
    subprocess.run(command, check=True, capture_output=True)


def config_of(root: Path, point: Point) -> dict[str, Any]:
    return {
        "path": str(root),
        "sources": {f"source-{number:02}": {"weight": 1 + number % 3} for number in range(point.sources)},
        "documents": {"eos": 0},
        "pack": {"seq_len": point.length},
        "shuffle": {"window": point.window},
        "lanes": point.lanes,
    }


def own_memory(pid: int | str = "self") -> int:
    """Bytes of memory of a process that are not pages of files."""
    text = Path(f"/proc/{pid}/status").read_text()
    lines = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    return sum(int(lines[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))


class Stopwatch:
    """Processor time between two calls."""

    def __init__(self) -> None:
        self._last = time.process_time()

    def __call__(self) -> float:
        last, self._last = self._last, time.process_time()
        return self._last - last


def open_loader(data: fmsdata.Rescalable, point: Point) -> fmsdata.StatefulDataLoader:
    """Without a thread, so that each step pays for itself."""
    world = 1 if point.rank_lanes is None else point.lanes // point.rank_lanes
    return fmsdata.StatefulDataLoader(data, batch_size=point.batch, prefetch=0, rank=0, world_size=world)


def copies(source: Any, tokens: int, size: int) -> None:
    for _ in range(max(1, tokens // len(source))):
        for at in range(0, len(source), size):
            batch = np.empty(size, np.int64)
            batch[:] = source[at : at + size]


def measure(root: Path, point: Point) -> dict[str, float]:
    """All figures of a point but the memory, in this process."""
    size = point.batch * point.length
    source = np.ones(max(1, (1 << 23) // size) * size, np.int64)
    print(json.dumps({"before": own_memory()}), flush=True)
    watch = Stopwatch()
    data = build_data(read_config(config_of(root, point)))
    len(data.fingerprint)
    found = {"plan": watch()}
    loader = open_loader(data, point)
    found["open"] = watch()
    if point.only_counts:
        return found
    batches = iter(loader)
    next(batches)
    found["first"] = watch()
    # In a turn of the windows, each lane plans one: only whole turns are compared.
    lanes = point.rank_lanes or point.lanes
    turn = max(SLICES, lanes * max(point.window, 128) // point.batch)
    began = time.process_time()
    for _ in range(turn):
        next(batches)
        if time.process_time() - began > MOST:
            break
    spent: list[tuple[float, float]] = []
    for _ in range(SLICES):
        watch()
        copies(source, min(turn // SLICES * size, 1 << 26), size)
        copied = watch() / (max(1, min(turn // SLICES * size, 1 << 26) // len(source)) * len(source))
        for _ in range(turn // SLICES):
            next(batches)
        spent.append((copied, watch() / (turn // SLICES * size)))
    found["speed"] = median(copy for copy, _ in spent) / (sum(made for _, made in spent) / SLICES)
    state = loader.state_dict()
    found["state"] = len(json.dumps(state))
    loader.close()
    watch()
    again = open_loader(data, point)
    again.load_state_dict(json.loads(json.dumps(state)))
    next(iter(again))
    found["resume"] = watch()
    again.close()
    return found


def child(root: Path, point: Point) -> None:
    """Read a small corpus, for what is done once in a process. Then measure."""
    with tempfile.TemporaryDirectory() as folder:
        fmsdata.write_shard(Path(folder) / "source-00" / "a.arrow", [np.arange(1, 5000)] * 50, dtype=np.uint16)
        small = replace(point, sources=1, lanes=2, rank_lanes=None, window=2, length=64)
        loader = open_loader(build_data(read_config(config_of(Path(folder), small))), small)
        next(iter(loader))
        loader.state_dict()
        loader.close()
    print(json.dumps(measure(root, point)), flush=True)


def run(root: Path, point: Point) -> dict[str, Any]:
    """Measure a point in a process of its own, and watch its memory."""
    command = [sys.executable, __file__, "--point", json.dumps(asdict(point)), "--corpus", str(root)]
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=output, stderr=errors)
        sizes = []
        while process.poll() is None:
            with suppress(OSError, KeyError):  # it ends
                sizes.append(own_memory(process.pid))
            time.sleep(POLL)
        output.seek(0)
        errors.seek(0)
        lines = [json.loads(line) for line in output.read().splitlines()]
        if process.returncode or len(lines) < 2:
            text = errors.read().strip().splitlines() or ["ended without a word"]
            return {"error": text[-1][:200]}
    return {**lines[-1], "memory": max(sizes) - lines[0]["before"]}


def measure_axis(chosen: Axis, work: Path) -> Iterator[dict[str, Any]]:
    corpora: dict[str, Path] = {}
    for point, value in zip(chosen.points, chosen.values, strict=True):
        if point.corpus not in corpora:
            corpora[point.corpus] = root = work / f"corpus-{len(list(work.iterdir()))}"
            write_corpus(root, point)
        found = run(corpora[point.corpus], point)
        print(f"{chosen.title:24} {value:9,} {found}", flush=True)
        yield {"value": value, **found}


def table_of(chosen: Axis, rows: list[dict[str, Any]]) -> str:
    columns = {key: column for key, column in COLUMNS.items() if any(key in row for row in rows)}
    cells = []
    for row in rows:
        if "error" in row:
            cells.append([f"{row['value']:,}", f"failed: {row['error']}", *[""] * (len(columns) - 1)])
            continue
        cells.append([f"{row['value']:,}", *(number(row[key], factor) for key, (_, factor) in columns.items())])
    cells.append(["exponent of the last step", *(exponent(rows, key) for key in columns)])
    return table([chosen.what, *(title for title, _ in columns.values())], cells)


def exponent(rows: list[dict[str, Any]], key: str) -> str:
    """How the cost grows in the last step: 0 is flat, 1 is linear. Of a speed, the cost is the time of a token."""
    last = [row for row in rows if row.get(key)][-2:]
    if len(last) < 2:
        return ""
    (a, before), (b, after) = ((row["value"], row[key]) for row in last)
    grown = math.log(after / before) / math.log(b / a)
    return f"{-grown if key == 'speed' else grown:.1f}"


def plots_of(name: str, chosen: Axis, rows: list[dict[str, Any]]) -> None:
    good = [row for row in rows if "error" not in row]
    x = [row["value"] for row in good]
    drawn = [
        Line(title, x, [row[key] * factor for row in good])
        for key, (title, factor) in COLUMNS.items()
        if key in good[0]
    ]
    write_plot(PLOTS / f"growth-{name}.svg", chosen.title, drawn, x=chosen.what, log=True)


def write_page(results: dict[str, Any]) -> None:
    text = between(PAGE.read_text(), "machine", machine_words(results["machine"]))
    for name, rows in results["axes"].items():
        text = between(text, name, table_of(AXES[name], rows))
        plots_of(name, AXES[name], rows)
    PAGE.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help=f"some of {', '.join(AXES)}, with commas between them")
    parser.add_argument("--no-pages", action="store_true", help="only print the tables")
    parser.add_argument("--work", type=Path, help="a folder for the corpora, on the disk to be measured")
    parser.add_argument("--point", help=argparse.SUPPRESS)
    parser.add_argument("--corpus", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.point:
        child(args.corpus, Point(**json.loads(args.point)))
        return
    names = args.only.split(",") if args.only else list(AXES)
    if unknown := sorted(set(names) - set(AXES)):
        parser.error(f"unknown axes {unknown}; expected some of {list(AXES)}")
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"axes": {}}
    results["machine"] = machine()
    for name in names:
        with tempfile.TemporaryDirectory(prefix="fmsdata-growth-", dir=args.work) as folder:
            results["axes"][name] = list(measure_axis(AXES[name], Path(folder)))
        print(table_of(AXES[name], results["axes"][name]), flush=True)
    if not args.no_pages:
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        write_page(results)


if __name__ == "__main__":
    main()
