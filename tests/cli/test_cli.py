"""The commands, through their real entry point."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

FMSDATA = Path(sys.executable).parent / "fmsdata"


def run(*args: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([FMSDATA, *args], capture_output=True, text=True, timeout=120)


def test_help_lists_the_commands() -> None:
    done = run("--help")
    assert done.returncode == 0
    assert "demo" in done.stdout
    assert "index" in done.stdout


def test_index_writes_the_counts(corpus: Path) -> None:
    done = run("index", corpus)
    assert done.returncode == 0, done.stderr
    lines = (corpus / "meta" / "counts.csv").read_text().splitlines()
    assert lines[0] == "dataset/filename,documents,tokens"
    assert [line.split(",")[0] for line in lines[1:]] == [
        *(f"/web/part-{i}.arrow" for i in range(3)),
        *(f"/wiki/part-{i}.arrow" for i in range(2)),
    ]


def test_a_user_error_is_one_line_and_no_traceback(tmp_path: Path) -> None:
    for folder, words in ((tmp_path / "nowhere", "no such folder"), (tmp_path, "no files ending in .arrow")):
        done = run("index", folder)
        assert done.returncode == 1
        assert done.stderr.startswith("error: ")
        assert words in done.stderr
        assert "Traceback" not in done.stderr
    assert run("index").returncode == 2
    assert run("nonsense").returncode == 2


def test_the_demo_shows_what_it_promises() -> None:
    done = run("demo")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("yes") == 4
    assert "came exactly once, whole" in " ".join(done.stdout.split())
    assert "Same stream, nothing lost, nothing twice." in done.stdout


def test_interrupting_the_demo_leaves_nothing_behind(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(
        [FMSDATA, "demo"], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while not any(tmp_path.glob("fmsdata-demo-*/meta/counts.csv")) and time.monotonic() < deadline:
        time.sleep(0.05)
    while process.poll() is None:  # Python drops an interrupt that falls into a destructor: press again
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=15)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert not list(tmp_path.glob("fmsdata-demo-*"))


def test_the_demo_does_not_touch_a_folder_that_is_not_its_own(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "notes.txt").write_text("mine")
    for folder, words in ((mine, "holds other files"), (mine / "notes.txt", "holds other files")):
        done = run("demo", "--folder", folder)
        assert done.returncode == 1
        assert words in done.stderr
        assert "Traceback" not in done.stderr
    assert sorted(one.name for one in mine.iterdir()) == ["notes.txt"]
    done = run("demo", "--folder", "/proc/nowhere/demo")
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")


def test_a_full_disk_is_one_line(corpus: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([FMSDATA, "schema"], stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
