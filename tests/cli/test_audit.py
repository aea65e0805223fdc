"""`fmsdata audit`, through its real entry point; and that it fails where a law does not hold."""

import json
import os
import pty
import re
import signal
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from rich.progress import Progress

import fmsdata
from fmsdata import testing
from fmsdata.cli.audit import choose_world_sizes
from fmsdata.cli.audit_checks import Audit, Report
from fmsdata.cli.run import Run
from fmsdata.config.build import build_data
from fmsdata.config.read import read_config
from tests.cli.test_cli import FMSDATA, run
from tests.helpers import CONFIG, write_source


@pytest.fixture
def config(corpus: Path) -> Path:
    path = corpus / "run.yaml"
    loader = {"batch_size": 2, "outputs": ["cu_seqlens"]}
    path.write_text(yaml.safe_dump({**CONFIG, "path": str(corpus), "loader": loader, "checkpoint": {"path": "saved"}}))
    return path


def audited(
    corpus: Path, data: Callable[[Any], Any] = lambda data: data, bar: Progress | None = None, **options: Any
) -> Report:
    config = read_config({**CONFIG, "path": str(corpus)})
    settings: dict[str, Any] = {"samples": 600, "epoch": False, "world_sizes": [2, 5, 24], **options}
    audit = Audit(run=Run.of_config(config, data(build_data(config))), **settings)
    return audit.check(bar or Progress(disable=True))


def test_the_report_says_what_was_checked_and_what_not(config: Path) -> None:
    done = run("audit", config, "--samples", "300", "--world-sizes", "2,5,24,1")
    assert done.returncode == 0, done.stderr
    assert "samples 0 to 299 are the same, bit for bit, at world sizes 1, 2, 24" in done.stdout
    assert "The fields compared are epochs, input_ids, labels, provenance" in done.stdout
    assert "a run on 2, 5, 24 and 1 ranks in turn, stopped and resumed from its state 3 times" in done.stdout
    assert "The order at world sizes 5: they don't divide the 24 lanes" in done.stdout
    assert done.stdout.startswith("✓ Laws 1 and 2 hold in everything that was checked.\nChecked\n")
    assert done.stderr == ""
    assert not (config.parent / "saved").exists()


def test_a_whole_epoch_brings_every_document(config: Path) -> None:
    done = run(
        "audit", config, "--epoch", "--samples", "1500", "--json", "--world-sizes", "7,24", "documents.min_length=20"
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["holds"]
    assert report["sources"] == ["web", "wiki"]
    assert report["resumes"] >= 2
    stored = testing.stored_documents({name: config.parent / name for name in ("web", "wiki")}, min_length=20)
    assert f"Each of the {len(stored)} documents of web, wiki came exactly once" in " ".join(report["checked"])
    assert report["samples"] * 17 >= report["tokens"] >= sum(map(len, stored.values()))


def test_workers_are_part_of_the_audit_if_the_run_has_some(config: Path) -> None:
    done = run("audit", config, "--samples", "48", "--world-sizes", "3", "loader.num_workers=2")
    assert done.returncode == 0, done.stderr
    assert "They are the same with 2 worker processes" in done.stdout


def test_wrong_input_is_one_line(config: Path, tmp_path: Path) -> None:
    for arguments, words in (
        ([config, "--world-sizes", "2,25"], "25 is not possible; this run has 24 lanes"),
        ([tmp_path / "none.yaml"], "No such file"),
    ):
        done = run("audit", *map(str, arguments))
        assert done.returncode == 1, arguments
        assert done.stderr.startswith("error: ")
        assert words in done.stderr
        assert "Traceback" not in done.stderr
    assert run("audit", config, "--world-sizes", "2,x").returncode == 2
    help_text = run("audit", "--help").stdout
    for option in ("--samples", "--epoch", "--world-sizes", "--json", "Example: fmsdata audit"):
        assert option in help_text


class Careless(fmsdata.Stage):
    """Draws random numbers that are not keyed."""

    def transform(self, item: fmsdata.Item, key: int) -> Iterable[fmsdata.Item]:  # noqa: ARG002
        return [item.replace(np.frombuffer(os.urandom(len(item)), np.uint8).astype(np.int64))]


class Forgetful(fmsdata.Stage):
    """Leaves out every fifth line that this process ever made, which is not in its state."""

    made = 0

    def transform(self, item: fmsdata.Item, key: int) -> Iterable[fmsdata.Item]:  # noqa: ARG002
        Forgetful.made += 1
        return [] if Forgetful.made % 5 == 0 else [item]


class Altering(fmsdata.Stage):
    """The same for all ranks, but not what is stored."""

    def transform(self, item: fmsdata.Item, key: int) -> Iterable[fmsdata.Item]:  # noqa: ARG002
        return [item.replace(np.where(item.tokens == 77, 78, item.tokens))]


class Doubling(fmsdata.Stage):
    """The same for all ranks, but each line comes twice."""

    def transform(self, item: fmsdata.Item, key: int) -> Iterable[fmsdata.Item]:  # noqa: ARG002
        return [item, item]


class Dropping(fmsdata.Stage):
    """The same for all ranks, but some lines never come."""

    def transform(self, item: fmsdata.Item, key: int) -> Iterable[fmsdata.Item]:
        return [item] if key % 7 else []


class Restarting(fmsdata.Stage):
    """The same in every uninterrupted run, but it does not resume from its state."""

    def open(self, lane: fmsdata.Lane, state: Any = None) -> fmsdata.StageIterator:  # noqa: ARG002
        return self.below.open(lane)


def on_top(stage: type[fmsdata.Stage]) -> Callable[[Any], Any]:
    return lambda data: fmsdata.Rescalable(stage(data.lines), lanes=data.lanes, seed=data.seed)


@pytest.mark.parametrize(
    ("stage", "words"),
    [
        (Careless, "sample 0 differs from the sample read first"),
        (Forgetful, "differs from the sample read first"),
        (Altering, "are not the stored tokens"),
        (Doubling, "came twice in epoch 0"),
        (Restarting, "at world size 5, rank 0"),
    ],
)
def test_a_wrong_stage_breaks_a_law(corpus: Path, stage: type[fmsdata.Stage], words: str) -> None:
    report = audited(corpus, on_top(stage))
    assert not report.holds
    assert words in str(report.broken)
    assert ".arrow#" in str(report.broken), "the document is named"


def test_documents_that_never_come_are_found_by_an_epoch_only(corpus: Path) -> None:
    assert audited(corpus, on_top(Dropping), world_sizes=[5]).holds
    report = audited(corpus, on_top(Dropping), world_sizes=[5], epoch=True, samples=1000)
    assert not report.holds
    assert str(report.broken).startswith("Law 2 is not proven")
    assert "did not come" in str(report.broken)
    assert "Law 1 on several ranks" in " ".join(report.not_checked)
    assert audited(corpus, world_sizes=[5], epoch=True, samples=1000).holds


def test_a_shard_that_is_swapped_in_between_breaks_a_law(corpus: Path) -> None:
    class Swap(Progress):
        done = False

        def advance(self, task_id: Any, advance: float = 1) -> None:  # noqa: ARG002
            if not self.done:
                swap(corpus)
            self.done = True

    report = audited(corpus, bar=Swap(disable=True))
    assert not report.holds
    assert "at world size" in str(report.broken)


def swap(corpus: Path) -> None:
    """As many documents of the same lengths, with other tokens. The files look as before: only the audit can tell."""
    path = corpus / "web"
    stored = testing.stored_documents({"web": path}, min_length=0)
    documents: list[list[int]] = [[] for _ in range(60)]
    for (_, shard, number), tokens in stored.items():
        documents[number * 3 + int(shard[5])] = (tokens ^ 1).tolist()
    write_source(corpus / ".new", documents)
    for file in sorted((corpus / ".new").iterdir()):
        before = (path / file.name).stat()
        assert file.stat().st_size == before.st_size
        with (path / file.name).open("r+b") as old:
            old.write(file.read_bytes())
        os.utime(path / file.name, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_a_broken_law_is_exit_code_1_and_progress_is_shown_in_a_terminal(config: Path) -> None:
    """The corpus is changed when the progress bar moves: while world size 1 is read, or soon after."""
    ours, theirs = pty.openpty()
    command = [str(FMSDATA), "audit", str(config), "--samples", "4000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, text=True) as process:
        os.close(theirs)
        try:
            shown = b""
            while chunk := read_terminal(ours):
                moved = re.search(rb"law 1, same stream.* [1-9]\d*%", shown)
                shown += chunk
                if not moved and re.search(rb"law 1, same stream.* [1-9]\d*%", shown):
                    process.send_signal(signal.SIGSTOP)  # or it may see a file that is half swapped
                    os.waitpid(process.pid, os.WUNTRACED)
                    swap(config.parent)
                    process.send_signal(signal.SIGCONT)
            output = process.communicate()[0]
        finally:
            process.kill()
            os.close(ours)
    assert b"law 1, same stream" in shown
    assert process.returncode == 1, output
    assert "A law is broken: at world size" in output


def read_terminal(terminal: int) -> bytes:
    """What was written to a terminal; nothing if nobody writes any more."""
    try:
        return os.read(terminal, 10_000)
    except OSError:
        return b""


@pytest.mark.parametrize("lanes", [1, 2, 3, 7, 24, 192, 1024])
def test_the_chosen_world_sizes_are_possible(lanes: int) -> None:
    chosen = choose_world_sizes(None, lanes)
    assert all(1 <= one <= lanes for one in chosen)
    assert len(chosen) >= 2
    assert lanes == 1 or len(chosen) == len(set(chosen))
    assert lanes < 4 or any(lanes % one for one in chosen)


BESTFIT = ("pack.mode=bestfit", "pack.bol=2")


def test_best_fit_packing_is_audited_and_with_crop_for_what_can_hold(config: Path) -> None:
    done = run("audit", config, "--samples", "200", "--world-sizes", "2,5", *BESTFIT, "pack.pad=1")
    assert done.returncode == 0, done.stderr
    done = run("audit", config, "--samples", "200", "--world-sizes", "2,5", *BESTFIT, "pack.crop=true")
    assert done.returncode == 0, done.stderr
    done = run("audit", config, "--epoch", *BESTFIT, "pack.crop=true")
    assert done.returncode != 0
    assert "an epoch never comes whole" in " ".join(done.stderr.split())


def test_best_fit_packing_is_planned_and_previewed(config: Path) -> None:
    done = run("plan", config, "--json", *BESTFIT, "pack.pad=1")
    assert done.returncode == 0, done.stderr
    lines = json.loads(done.stdout)["lines"]
    assert (lines["padded"], lines["window"]) == (True, 32)
    done = run("preview", config, "--rows", "1", "--json", *BESTFIT, "pack.crop=true")
    assert done.returncode == 0, done.stderr
    (batch,) = json.loads(done.stdout)["batches"]
    assert batch["rows"][0]["pieces"][0]["tokens"] == [2]
