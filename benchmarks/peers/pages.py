"""The tables in docs/benchmarks.md and the README, and the plots, from the results."""

import html
import math
import os
import platform
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from peers.scenarios import NAMES

ROOT = Path(__file__).parents[2]
PAGE, PLOTS = ROOT / "docs" / "benchmarks.md", ROOT / "docs" / "plots"
# loader: its column in the comparison of the README, which starts with the name of the row
README_COLUMNS = [
    ["fmsdata, 192 lanes, a thread (the default)", "fmsdata, 4 lanes, a thread"],
    ["MosaicML Streaming", "MosaicML Streaming, 2 workers"],
    ["HF datasets", "HF datasets, 2 workers"],
    ["Grain", "Grain, 2 workers"],
    ["torchdata nodes", "torchdata nodes, 2 threads", "torchdata nodes, 2 workers"],
    ["memmap + DataLoader", "memmap + DataLoader, 1 worker", "memmap + DataLoader, 2 workers"],
]
README_ROW = re.compile(r"^\| \[M tokens/s, 2 cores\].*$", re.MULTILINE)


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in lines)


def number(value: float | None, factor: float = 1) -> str:
    """Three digits at most, as more would be noise."""
    if value is None:
        return ""
    scaled = value * factor
    return f"{scaled:,.0f}" if scaled >= 100 else f"{scaled:.3g}"


def in_a_cell(error: str) -> str:
    """An error, short, without what would end a cell of a table."""
    return error.replace("|", "/").replace("\n", " ")[:80]


def size(count: int | None) -> str:
    return "none" if count is None else f"{count:,} B" if count < 10_000 else f"{count / 1000:,.0f} KB"


def speed_table(results: dict[str, Any]) -> str:
    head = [
        "setup",
        "M tokens/s",
        "part of memcpy",
        "CPU s per billion tokens",
        "batch p50, p99, ms",
        "first batch, s",
        "next batch after resume, s",
        "memory, MB",
        "state",
        "`state_dict`, us",
    ]
    rows = []
    copies = results.get("rows", {}).get("memcpy", {}).get("tokens_per_second")
    for name, row in results.get("rows", {}).items():
        if "error" in row:
            rows.append([name, f"failed: {in_a_cell(row['error'])}", *[""] * (len(head) - 2)])
            continue
        stateless = row["state_bytes"] is None
        rows.append(
            [
                name,
                number(row["tokens_per_second"], 1e-6),
                number(row["tokens_per_second"] / copies) if copies else "",
                number(row["cpu_per_billion"]),
                f"{number(row['p50'], 1e3)}, {number(row['p99'], 1e3)}",
                number(row["first_batch"]),
                "" if stateless else number(row.get("resumed")) or "failed",
                number(row["memory"], 1e-6),
                size(row["state_bytes"]),
                "" if stateless else number(row["state_seconds"], 1e6),
            ]
        )
    return table(head, rows)


def work_table(results: dict[str, Any]) -> str:
    loaders = results.get("loaders", {})
    return table(
        ["loader", "version", "work while it is measured"],
        [[name, str(about["version"] or "not run"), str(about["does"] or "")] for name, about in loaders.items()],
    )


def scenario_table(results: dict[str, Any]) -> str:
    found = results.get("scenarios", {})
    rows = [[loader, *(each[name]["outcome"] for name in NAMES)] for loader, each in found.items()]
    return table(["loader", *NAMES.values()], rows)


def machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    pages_of_memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": model,
        "cores": os.cpu_count(),
        "memory_gib": round(pages_of_memory / 2**30),
        "python": platform.python_version(),
        "load_before": os.getloadavg()[0],
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def machine_words(what: dict[str, Any]) -> str:
    return (
        f"{what['processor']}, {what['cores']} cores, {what['memory_gib']} GiB, Python {what['python']}, "
        f"{what['date']}, load when it began: {what['load_before']:.1f}."
    )


BUSY = (
    "\n\n**The machine was busy**, so speeds, waits and starts say little: they are by the clock. Compare the CPU "
    "seconds, and run it again on an idle machine."
)


def machine_line(results: dict[str, Any]) -> str:
    busy = results["machine"]["load_before"] > results["machine"]["cores"] / 2
    return (
        f"{machine_words(results['machine'])} {results['tokens'] / 1e6:,.0f} million tokens, "
        f"{results['seconds']:g} s a setup, rounds: {results['rounds']}.{BUSY if busy else ''}"
    )


def plot(title: str, values: dict[str, float], unit: str) -> str:
    """Horizontal bars on a logarithmic scale, as SVG that is readable on light and dark pages."""
    least = min(values.values()) / 2
    most = max(values.values())
    width, left, bar = 900, 300, 22
    height = 40 + bar * len(values)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="13" fill="#888">',
        f'<text x="{left}" y="20" font-weight="bold">{html.escape(title)} ({unit}, logarithmic)</text>',
    ]
    for place, (name, value) in enumerate(values.items()):
        top = 32 + bar * place
        long = (width - left - 90) * math.log(value / least) / math.log(most / least)
        color = "#2a7ab0" if name.startswith("fmsdata") else "#999999"
        lines.append(f'<text x="{left - 8}" y="{top + 14}" text-anchor="end">{html.escape(name)}</text>')
        lines.append(f'<rect x="{left}" y="{top}" width="{long:.1f}" height="{bar - 6}" fill="{color}"/>')
        lines.append(f'<text x="{left + long + 6:.1f}" y="{top + 14}">{number(value)}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def between(text: str, marker: str, new: str) -> str:
    begin, end = f"<!-- {marker} -->", f"<!-- end of {marker} -->"
    head, rest = text.split(begin, 1)
    return f"{head}{begin}\n\n{new}\n\n{end}{rest.split(end, 1)[1]}"


def readme_row(results: dict[str, Any]) -> str:
    cells = ["M tokens/s, 2 cores"]
    for names in README_COLUMNS:
        speeds = [results["rows"][name].get("tokens_per_second") for name in names if name in results["rows"]]
        known = sorted(speed for speed in speeds if speed)
        cells.append(
            " to ".join(dict.fromkeys([number(known[0], 1e-6), number(known[-1], 1e-6)])) if known else "not measured"
        )
    return "| " + " | ".join(f"[{cell}](docs/benchmarks.md#speed-and-cost)" for cell in cells) + " |"


def write(results: dict[str, Any]) -> None:
    """Put tables and plots into the pages."""
    text = PAGE.read_text()
    for marker, new in (
        ("machine", machine_line(results)),
        ("speed", speed_table(results)),
        ("work", work_table(results)),
        ("scenarios", scenario_table(results)),
    ):
        text = between(text, marker, new)
    PAGE.write_text(text)
    readme = ROOT / "README.md"
    row = readme_row(results)
    readme.write_text(README_ROW.sub(lambda _: row, readme.read_text(), count=1))
    PLOTS.mkdir(exist_ok=True)
    good = {name: row for name, row in results["rows"].items() if "error" not in row}
    for file, title, key, factor, unit in (
        ("throughput", "Throughput", "tokens_per_second", 1e-6, "M tokens/s"),
        ("cpu", "CPU time", "cpu_per_billion", 1.0, "seconds per billion tokens"),
        ("start", "Process start to first batch", "first_batch", 1.0, "seconds"),
        ("p99", "99th percentile of a batch", "p99", 1e3, "ms"),
    ):
        values = {name: row[key] * factor for name, row in good.items()}
        (PLOTS / f"{file}.svg").write_text(plot(title, values, unit))
