"""`fmsdata bench`: how fast a configuration reads here, and whether a trainer would wait for it."""

import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from fmsdata.cli.common import (
    ENDLESS,
    AsJson,
    ConfigFile,
    Overrides,
    Rank,
    Section,
    WorldSize,
    console,
    live,
    print_json,
)
from fmsdata.core import native
from fmsdata.core.wording import counted

if TYPE_CHECKING:
    from rich.console import Console

SECONDS = 10.0
INTERVAL_SECONDS = 0.1  # timings on shared machines are noisy: the report shows the median of such intervals
COPY_SECONDS, COPY_BYTES = 0.5, 1 << 28  # more than the caches of a CPU hold
MEGABYTE = 1e6
MOST_WAITED = 0.01  # of the time, with which a loader keeps up


def bench(
    config: ConfigFile,
    overrides: Overrides = None,
    seconds: Annotated[
        float | None, typer.Option(help="The duration of the measurement.", show_default=f"{SECONDS:.0f}")
    ] = None,
    batches: Annotated[
        int | None, typer.Option(min=1, help="Measure this many batches instead.", show_default=False)
    ] = None,
    step_seconds: Annotated[
        float, typer.Option(help="Simulate training steps of this duration, to see whether the loader keeps up.")
    ] = 0.0,
    rank: Rank = 0,
    world_size: WorldSize = 1,
    section: Section = None,
    as_json: AsJson = False,
) -> None:
    """Measure tokens per second, time to the first batch, time spent waiting, and memory.

    One rank reads with the settings of the configuration, from the start of the stream; the run's
    checkpoints are neither read nor written, and a finite pass (`epochs`, `evaluation`) is read as an
    endless stream. Its speed is compared with a plain copy of batches of
    the same size in memory, measured right after.

    Example: fmsdata bench run.yaml --seconds 30 --step-seconds 0.25 loader.num_workers=2
    """
    if seconds is not None and batches is not None:
        raise typer.BadParameter("--seconds and --batches: give only one of them")
    limit = SECONDS if seconds is None else seconds
    if not 0 < limit < 1e9 or not 0 <= step_seconds < 1e6:
        raise typer.BadParameter(
            f"--seconds is {limit:g} and --step-seconds is {step_seconds:g}; both must be durations"
        )
    from fmsdata.cli.run import open_run

    before = _peak_memory()
    began = time.perf_counter()
    run = open_run(config, overrides, section, finite=False)
    loader = run.make_loader(rank, world_size, steps=None)
    built = time.perf_counter()
    try:
        stream = iter(loader)
        next(stream)
        first = time.perf_counter()
        waits, ends = _measure(stream, limit if batches is None else None, batches, step_seconds)
        memory = {"before": before, "this process": _peak_memory(), "workers": _workers_memory(loader.worker_pids)}
    finally:
        loader.close()
    tokens = run.batch_size * run.seq_len
    copy = _copy_speed(tokens)
    speed = _speed(waits, ends, tokens)
    report = {
        "rank": rank,
        "world_size": world_size,
        "workers": loader.num_workers,
        "finite_read_as_endless": run.was_finite,
        "tokens_per_batch": tokens,
        "step_seconds": step_seconds,
        "seconds_to_build": built - began,
        "seconds_to_first_batch": first - began,
        **speed,
        "copy_tokens_per_second": copy,
        "share_of_copy": None if step_seconds else speed["tokens_per_second"]["median"] / copy,
        "peak_memory_bytes": memory,
        "compiled_kernel": native.kernel is not None,
    }
    if as_json:
        print_json(report)
    else:
        _print(report, console())


def _measure(
    stream: Iterator[Any], seconds: float | None, batches: int | None, step_seconds: float
) -> tuple[list[float], list[float]]:
    """How long each batch took to arrive, and when each step ended, both in seconds."""
    waits: list[float] = []
    ends: list[float] = []
    shown, begin = 0.0, time.perf_counter()
    with live() as progress:
        bar = progress.add_task("measuring", total=seconds or batches, note="")
        while (ends[-1] < seconds if ends else True) if seconds is not None else len(ends) < (batches or 0):
            requested = time.perf_counter()
            next(stream)
            waits.append(time.perf_counter() - requested)
            if step_seconds:
                time.sleep(step_seconds)
            ends.append(time.perf_counter() - begin)
            if ends[-1] - shown > INTERVAL_SECONDS:
                shown = ends[-1]
                note = f"{len(ends) / ends[-1]:,.1f} batches/s, waited {sum(waits) / ends[-1]:.1%}"
                progress.update(bar, completed=ends[-1] if batches is None else len(ends), note=note)
    return waits, ends


def _speed(waits: list[float], ends: list[float], tokens: int) -> dict[str, Any]:
    speeds: list[float] = []
    since, steps = 0.0, 0
    for end in ends:
        steps += 1
        if end - since >= INTERVAL_SECONDS or (end == ends[-1] and not speeds):
            speeds.append(steps * tokens / (end - since))
            since, steps = end, 0
    return {
        "batches": len(ends),
        "seconds": ends[-1],
        "tokens_per_second": {
            "median": median(speeds),
            "slowest": min(speeds),
            "fastest": max(speeds),
            "overall": len(ends) * tokens / ends[-1],
        },
        "intervals": len(speeds),
        "seconds_waited_per_step": {
            "median": median(waits),
            "99th percentile": float(np.quantile(waits, 0.99)),
            "longest": max(waits),
        },
        "share_of_time_waited": sum(waits) / ends[-1],
    }


def _copy_speed(tokens: int) -> float:
    """Tokens per second of one copy per batch, from a large int64 array into a new one."""
    copies = max(2, COPY_BYTES // (8 * tokens))
    source = np.ones((copies, tokens), np.int64)
    speeds: list[float] = []
    stop = time.perf_counter() + COPY_SECONDS
    while not speeds or time.perf_counter() < stop:
        begin = time.perf_counter()
        for batch in source:
            batch.copy()
        speeds.append(copies * tokens / (time.perf_counter() - begin))
    return median(speeds)


def _peak_memory() -> int:
    """The peak resident memory of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _workers_memory(pids: list[int]) -> list[int] | None:
    """The peak resident memory of each worker process; None if the system does not report it."""
    peaks = []
    for pid in pids:
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            return None
        peaks += [1024 * int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:")]
    return peaks


def verdict(report: dict[str, Any]) -> str:
    """What the measurement means for a trainer, in one line."""
    speed, steps, waited = (
        report["tokens_per_second"]["overall"],
        report["step_seconds"],
        report["share_of_time_waited"],
    )
    if not steps:
        return f"enough for {speed:,.0f} tokens/s per GPU"
    enough = "enough" if waited <= MOST_WAITED else "not enough"
    pace = report["tokens_per_batch"] / steps
    return f"{enough} for {pace:,.0f} tokens/s per GPU (steps of {steps:g} s): waited {waited:.1%} of the time"


def _print(report: dict[str, Any], out: "Console") -> None:
    from fmsdata.display.printing import write

    speed, waited, memory = (
        report[name] for name in ("tokens_per_second", "seconds_waited_per_step", "peak_memory_bytes")
    )
    steps = report["step_seconds"]
    write(out, verdict(report), "bold")
    write(
        out,
        f"rank {report['rank']} of {report['world_size']}, {counted(report['workers'], 'worker')}: "
        f"{counted(report['batches'], 'batch')} of {counted(report['tokens_per_batch'], 'token')} "
        f"in {report['seconds']:.1f} s",
    )
    if report["finite_read_as_endless"]:
        write(out, f"{ENDLESS}.")
    copy = f"{report['copy_tokens_per_second']:,.0f} tokens per second, one int64 array per batch"
    workers = memory["workers"]
    rows = [
        (
            "tokens per second",
            f"{speed['median']:,.0f}",
            f"median of {counted(report['intervals'], 'interval')}, {speed['slowest']:,.0f} to "
            f"{speed['fastest']:,.0f}; "
            f"{speed['overall']:,.0f} overall",
        ),
        (
            "first batch after",
            f"{report['seconds_to_first_batch']:.2f} s",
            f"{report['seconds_to_build']:.2f} s of it to read the configuration and the counts",
        ),
        (
            "waited per step",
            f"{1000 * waited['median']:.2f} ms",
            f"median; 99% below {1000 * waited['99th percentile']:.2f} ms, longest {1000 * waited['longest']:.2f} ms",
        ),
        (
            "waited in total",
            f"{report['share_of_time_waited']:.1%}",
            f"of the time, with steps of {steps:g} s"
            if steps
            else "of the time, as there is no training; see --step-seconds",
        ),
        (
            "peak memory",
            _megabytes(memory["this process"]),
            f"resident in this process, including mapped shards; {_megabytes(memory['before'])} before reading",
        ),
    ]
    if report["workers"]:
        rows.append(
            (
                "memory of workers",
                "unknown" if workers is None else _megabytes(sum(workers)),
                "not reported by this system" if workers is None else "in total; memory they share counts for each",
            )
        )
    if not report["compiled_kernel"]:
        rows.append(("compiled kernel", "none", "all is done in Python: reinstall fmsdata on Linux with a C compiler"))
    if steps:
        rows.append(("plain copy", "", f"{copy}; not compared, as the steps set the pace"))
    else:
        rows.append(("of a plain copy", f"{report['share_of_copy']:.1%}", copy))
    names, values = (max(len(row[column]) for row in rows) for column in (0, 1))
    for name, value, words in rows:
        guide = f"{name:{names}}  {value:>{values}}  "
        write(out, words, "dim", guide=guide, indent=" " * len(guide), apart=True)


def _megabytes(size: int) -> str:
    return f"{size / MEGABYTE:,.0f} MB"
