"""The same accidents for each loader, for real, and what became of the tokens.

A run is a pass over a small corpus in which each document comes once. It is stopped in the middle
and resumed in a changed way, and all that the trainer saw is compared with the run that was not
stopped: the same rows in each step are "same bits". If not, tokens that came less often are lost, and
tokens that came more often are repeated.
"""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np

from peers.corpus import Corpus, Ints, make
from peers.processes import start

LENGTH, GLOBAL_BATCH, LIMIT = 128, 24, 120
SIZES = {"web": 1.0, "code": 1.0, "books": 1.0}
NAMES = {
    "whole": "a pass without a stop",
    "same": "resumed",
    "ranks": "2 -> 3 ranks",
    "workers": "1 -> 2 workers",
    "mix": "changed mix",
    "kill": "SIGKILL of a worker",
    "faults": "5% of reads fail",
}
Found = dict[str, Any]


class Run:
    """What the ranks of a run saw: the rows of each step, of all ranks together."""

    def __init__(self, path: Path, found: list[Found]) -> None:
        self.errors = [each["error"] for each in found if each.get("error")]
        self.hung = any(each.get("hung") for each in found)
        self.found = found
        ranks = []
        for rank in range(len(found)):
            file = Path(f"{path}-{rank}.npz")
            ranks.append(list(np.load(file).values()) if file.exists() else [])
        self.steps: list[Ints] = []
        for step in range(max(map(len, ranks))):
            rows = np.concatenate([rank[step] for rank in ranks if step < len(rank)])
            rows = np.where(rows > 0, rows, 0)
            rows = rows[rows.any(axis=1)]
            self.steps.append(rows[np.lexsort(rows.T[::-1])])

    def counts(self, corpus: Corpus, start: int = 0, stop: int | None = None) -> Ints:
        """How often each token came."""
        steps = [step.ravel() for step in self.steps[start:stop]]
        return np.bincount(np.concatenate([np.zeros(1, np.int32), *steps]), minlength=corpus.tokens + 1)[1:]


def outcome(counts: Ints, expected: Ints) -> str:
    lost, repeated = (int(np.maximum(part, 0).sum()) for part in (expected - counts, counts - expected))
    parts = [f"{what} {number:,}" for what, number in (("lost", lost), ("repeated", repeated)) if number]
    return ", ".join(parts)


def refused(run: Run) -> str | None:
    if run.hung:
        return f"no end within {LIMIT} s"
    if run.errors:
        return "refused" if not any(each["steps"] for each in run.found) else "stops with an error"
    return None


def compare(after: Run, whole: Run, stop: int, corpus: Corpus) -> str:
    """What the run after a stop saw, beside the one that was not stopped."""
    bad = refused(after)
    if bad:
        return bad
    expected = whole.counts(corpus)
    changed = outcome(whole.counts(corpus, 0, stop) + after.counts(corpus), expected)
    rest = whole.steps[stop:]
    pairs = zip(rest, after.steps, strict=False)
    equal = [np.array_equal(left, right) for left, right in pairs]
    if all(equal) and len(rest) == len(after.steps):
        return "same bits"
    first = equal.index(False) if False in equal else len(equal)
    beginning = f"same bits for {first} of {len(rest)} steps, then " if first else ""
    return beginning + (changed or "the same tokens in another order")


def run_all(loader: str, work: Path, tokens: int, faults: Path | None) -> dict[str, Found]:
    """All scenarios of one loader: what happened, and errors in their own words."""
    corpus_of = {"tokens": tokens, "mean": 300, "sizes": SIZES}
    corpus = make(tokens, 300, SIZES)
    folder = work / "corpus"
    setup = {"folder": str(folder), "sources": list(SIZES), "length": LENGTH, "lanes": 12, "buffer": 100}
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    prepared = start(loader, {"what": "prepare", "corpus": corpus_of, "setup": setup | {"batch": 1}}, work)
    results: dict[str, Found] = {}
    if prepared[0].get("error"):
        return {name: {"outcome": "not run", "errors": [prepared[0]["error"]]} for name in NAMES}

    def launch(name: str, extra: dict[str, str] | None = None, **changes: Any) -> Run:
        of_setup = {key: changes.pop(key) for key in ("world", "workers", "weights") if key in changes}
        world = of_setup.get("world", 1)
        mine = setup | of_setup | {"batch": GLOBAL_BATCH // world}
        job = {"what": "run", "setup": mine, "rows": str(work / name), "states": str(work / f"{name}.state")}
        return Run(work / name, start(loader, {"limit": LIMIT, **job, **changes}, work, extra))

    def note(name: str, run: Run, text: str, **more: Any) -> None:
        results[name] = {"outcome": text, "errors": run.errors, **more}

    middle = corpus.tokens // (LENGTH + 1) // GLOBAL_BATCH * 2 // 5
    ones = np.ones(corpus.tokens, np.int64)

    two = launch("two", world=2, save_at=middle)
    note("whole", two, refused(two) or outcome(two.counts(corpus), ones) or "each token once")
    one = launch("one", workers=1, save_at=middle)
    state = work / "one.state.0"
    stateless = not one.errors and state.read_bytes() == STATELESS
    if one.errors:
        for name in ("same", "ranks", "workers", "mix"):
            results[name] = {"outcome": "not run", "errors": one.errors}
    elif stateless:
        for name in ("same", "ranks", "workers", "mix"):
            results[name] = {"outcome": "no state", "errors": []}
    else:
        of_one, of_two = str(work / "one.state"), str(work / "two.state")
        for name, before, after in (
            ("same", one, launch("same", workers=1, resume=of_one)),
            ("ranks", two, launch("ranks", world=3, resume=of_two)),
            ("workers", one, launch("workers", workers=2, resume=of_one)),
        ):
            note(name, after, compare(after, before, middle, corpus))
        if loader.startswith("memmap"):
            results["mix"] = {"outcome": "no mix", "errors": []}
        else:
            results["mix"] = changed_mix(launch, corpus, work)

    killed = launch("kill", workers=1, kill_at=middle)
    seconds, silent = killed.found[0].get("seconds_after_kill"), killed.found[0].get("silent")
    if killed.hung:
        text = refused(killed) or "" if silent is None else f"hangs, {silent:.0f} s at least"
    elif killed.errors and seconds is not None:
        text = f"error after {seconds:.1f} s"
    elif killed.errors:
        text = "no worker process" if "no worker process" in killed.errors[0] else "stops with an error"
    else:
        text = outcome(killed.counts(corpus), one.counts(corpus)) or "same bits"
    if killed.errors and seconds is not None and not stateless:
        text += f", then {results['same']['outcome']}"
    note("kill", killed, text, seconds=seconds)
    if faults is None:
        results["faults"] = {"outcome": "not run", "errors": []}
        return results
    count = work / "faults.count"
    extra = {"LD_PRELOAD": str(faults), "FAULTS_FOLDER": str(folder), "FAULTS_PERCENT": "5", "FAULTS_COUNT": str(count)}
    faulty = launch("faults", extra, workers=1)
    failed = count.stat().st_size if count.exists() else 0
    text = refused(faulty) or outcome(faulty.counts(corpus), one.counts(corpus)) or "same bits"
    text = "stops with an error" if text == "refused" else text
    note("faults", faulty, f"{text} ({failed} failed)" if failed else f"{text} (mapped: none failed)", failed=failed)
    return results


def changed_mix(launch: Any, corpus: Corpus, work: Path) -> Found:
    """From equal weights to 4:1:1 in the middle. No source ends, so nothing may come twice."""
    equal = dict.fromkeys(SIZES, 1.0)
    steps = corpus.tokens // (LENGTH + 1) // GLOBAL_BATCH // 6
    before = launch("mix0", weights=equal, workers=0, save_at=steps, steps=steps)
    after = launch("mix", weights=equal | {"web": 4.0}, workers=0, resume=str(work / "mix0.state"), steps=steps)
    bad = refused(before) or refused(after)
    if bad:
        return {"outcome": bad, "errors": before.errors + after.errors}
    counts = before.counts(corpus) + after.counts(corpus)
    later = after.counts(corpus)
    first, stop = (int(corpus.ends[place]) for place in corpus.firsts["web"])
    share = float(later[first:stop].sum() / later.sum())
    repeated = int(np.maximum(counts - 1, 0).sum())
    text = f"repeated {repeated:,}" if repeated else "nothing repeated"
    return {"outcome": f"{text}; {share:.0%} instead of 67%", "errors": [], "share": share, "repeated": repeated}


STATELESS = b"\x80\x04N."  # a pickled None


def compile_faults(work: Path) -> Path | None:
    """The library that makes reads fail, or none without a C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    target = work / "faults.so"
    source = Path(__file__).with_name("faults.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O2", "-o", str(target), str(source), "-ldl"], check=True)
    return target
