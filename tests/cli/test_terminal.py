"""What the commands look like: in terminals of any width, and in pipes."""

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import termios
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from fmsdata.cli.app import COMMANDS
from tests.cli.test_cli import FMSDATA, run
from tests.helpers import CONFIG, write_corpus

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07")
WIDTHS = (40, 60, 80, 200)
SLOW = ("audit", "bench")  # fewer widths
REPORTS: dict[str, dict[str, Any]] = {
    "plan": {"world_size": 5},
    "preview": {"rows": 1, "full": True, "tokenizer": "bytes"},
    "trace": {"step": 2, "world_size": 1, "tokenizer": "bytes"},
    "audit": {"samples": 60, "world_sizes": "2,5"},
    "bench": {"batches": 3},
}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    corpus = write_corpus(tmp_path_factory.mktemp("corpus"))
    path = corpus / "run.yaml"
    path.write_text(yaml.safe_dump({**CONFIG, "path": str(corpus), "loader": {"batch_size": 2}}))
    return path


def report(monkeypatch: pytest.MonkeyPatch, name: str, config: Path, width: int | None) -> str:
    """What a command prints in a terminal of this width, or (None) in a pipe; without colours."""
    module, file = import_module(f"fmsdata.cli.{name}"), io.StringIO()
    out = Console(file=file, force_terminal=width is not None, width=width, soft_wrap=True, highlight=False)
    monkeypatch.setattr(module, "console", lambda: out)
    getattr(module, name)(config, [], **REPORTS[name])
    return file.getvalue() if width is None else ESCAPES.sub("", file.getvalue())


def in_terminal(width: int, *args: str | Path) -> str:
    """What a command prints in a real terminal of this width, without colours."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
    environment = {**os.environ, "COLUMNS": str(width), "TERM": "xterm"}
    process = subprocess.Popen([FMSDATA, *args], stdout=theirs, stderr=theirs, stdin=theirs, env=environment)
    os.close(theirs)
    printed = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # the command has ended
            break
        printed += part
    process.wait(timeout=60)
    os.close(ours)
    return ESCAPES.sub("", printed.decode()).replace("\r\n", "\n")


def words_of(text: str) -> list[str]:
    return [word for word in text.split() if not set(word) <= set("─│├└╭╮╰╯━┃")]


@pytest.mark.parametrize("name", REPORTS)
def test_no_width_breaks_a_word_of_a_report(monkeypatch: pytest.MonkeyPatch, config: Path, name: str) -> None:
    piped = report(monkeypatch, name, config, None)
    numbers = re.compile(r"[\d.,%]+") if name == "bench" else re.compile("$^")  # those of a measurement differ
    for width in (40, 80) if name in SLOW else WIDTHS:
        printed = report(monkeypatch, name, config, width)
        expected, words = (set(words_of(numbers.sub("", text))) for text in (piped, printed))
        assert words == expected, (width, printed)
        too_wide = [line for line in printed.splitlines() if len(line) > width and len(line.split()) > 1]
        assert too_wide == [], (width, printed)


@pytest.mark.parametrize("name", REPORTS)
def test_no_line_of_a_pipe_ends_with_blanks(monkeypatch: pytest.MonkeyPatch, config: Path, name: str) -> None:
    piped = report(monkeypatch, name, config, None)
    assert [line for line in piped.splitlines() if line != line.rstrip()] == []
    assert "\x1b" not in piped


@cache
def help_of(*command: str) -> str:
    return run(*command, "--help").stdout


@pytest.mark.parametrize("width", WIDTHS)
def test_help_and_errors_break_no_word(tmp_path: Path, width: int) -> None:
    for command in ([], ["prepare"], ["plan"]):
        expected = set(words_of(help_of(*command))) - {"Options:", "Commands:", "Arguments:"}
        words = set(words_of(re.sub("[│╭╮╰╯─`]", " ", in_terminal(width, *command, "--help"))))
        assert {word for word in expected if word.isalpha()} - words == set(), command
    wrong = ("index", tmp_path)
    assert words_of(in_terminal(width, *wrong)) == words_of(run(*wrong).stderr)


def test_help_in_a_narrow_terminal_has_the_whole_summaries() -> None:
    words = " ".join(in_terminal(40, "--help").split())
    for summary in COMMANDS.values():
        assert summary in words


def completions(words: str, count: int) -> list[str]:
    environment = {**os.environ, "_FMSDATA_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(count)}
    return subprocess.run([FMSDATA], env=environment, capture_output=True, text=True, timeout=60).stdout.split()


def test_the_shell_completes_commands_and_their_options(tmp_path: Path) -> None:
    assert completions("fmsdata p", 1) == ["plan", "preview", "prepare"]
    assert "--world-size" in completions("fmsdata plan --w", 2)
    home = {**os.environ, "HOME": str(tmp_path), "SHELL": "/bin/bash"}
    command = ["bash", "-c", f"{FMSDATA} --install-completion; exit $?"]  # it installs for the shell that calls it
    done = subprocess.run(command, env=home, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    written = [file.read_text() for file in tmp_path.rglob("*") if file.is_file()]
    assert any("_FMSDATA_COMPLETE" in text for text in written)
