"""The command line imports what a command needs, and nothing else."""

import inspect
import resource
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from fmsdata.cli.app import COMMANDS

HEAVY = ("torch", "s3fs", "aiobotocore", "botocore", "aiohttp", "rich")
PROGRAM = f"""
import sys
sys.argv[0] = "fmsdata"
for name in {HEAVY}:
    sys.modules[name] = None  # from now on, importing it is an error
from fmsdata.cli.app import main
main()
"""


def run_without_heavy_imports(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", PROGRAM, *args], capture_output=True, text=True, timeout=120)


def cpu_seconds(*args: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run_without_heavy_imports(*args)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["--help"], 0, "Commands:"),
        (["--version"], 0, "fmsdata "),
        (["plna"], 2, "Did you mean 'plan'?"),
        (["schema"], 0, '"title": "A run of fmsdata"'),
        (["plan"], 2, "Missing argument"),
        (["plan", "--nonsense"], 2, "No such option"),
        *(([name, "--help"], 0, f"Usage: fmsdata {name}") for name in COMMANDS),
    ],
    ids=str,
)
def test_help_and_usage_errors_need_no_heavy_imports(args: list[str], code: int, words: str) -> None:
    done = run_without_heavy_imports(*args)
    assert done.returncode == code, done.stderr
    assert words in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("argument", ["--help", "plna"])
def test_help_and_a_typo_take_less_than_half_a_second_of_cpu(argument: str) -> None:
    assert min(cpu_seconds(argument) for _ in range(3)) < 0.5


def test_indexing_a_local_corpus_needs_no_heavy_imports(corpus: Path) -> None:
    done = run_without_heavy_imports("index", str(corpus))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"wrote {corpus}/meta/counts.csv: ")


def test_preparing_verifying_and_converting_local_files_needs_no_heavy_imports(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text('{"text": "one"}\n')
    for args in (
        ["prepare", f"{tmp_path}/in", f"{tmp_path}/out", "--tokenizer", "bytes", "--processes", "1"],
        ["verify", f"{tmp_path}/out", "--tokenizer", "bytes"],
        ["convert", f"{tmp_path}/out", f"{tmp_path}/batches", "--layout", "batch"],
    ):
        done = run_without_heavy_imports(*args)
        assert done.returncode == 0, done.stderr


def test_the_summaries_of_the_commands_are_their_docstrings() -> None:
    for name, summary in COMMANDS.items():
        command = getattr(import_module(f"fmsdata.cli.{name}"), name)
        assert str(inspect.getdoc(command)).splitlines()[0] == summary
