"""Progress without a terminal: a line now and then, on stderr."""

import pytest

from fmsdata.corpus import progress


def test_lines_say_the_share_the_note_and_the_time_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)  # type: ignore[attr-defined]
    with progress.showing_progress("tokenizing", 200, lines=True) as shown:
        for second in (10, 20, 40, 50, 80):
            now = second
            shown.advance(20, f"{second} tokens")
    assert capsys.readouterr().err.splitlines() == [
        "tokenizing: 30%, 40 tokens, about 2 min left",
        "tokenizing: 50%, 80 tokens, about 80 s left",
    ]


def test_short_work_is_silent_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.showing_progress("verifying", 2) as shown:
        shown.advance(2)
    assert capsys.readouterr() == ("", "")
