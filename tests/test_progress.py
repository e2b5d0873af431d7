"""Progress where there is a terminal and where there is none."""

from __future__ import annotations

import pytest

from infini import progress


def test_without_a_terminal_a_line_now_and_then_says_how_long(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with progress.progress_bar("reading", 200, shown=False) as advance:
        for _ in range(10):
            now[0] += 4.0
            advance(20)
    lines = capsys.readouterr().err.splitlines()
    # After 16 and 32 of the 40 seconds.
    assert lines == ["reading: 40 %, 24 s left", "reading: 80 %, 8 s left"]


def test_with_a_terminal_the_bar_reaches_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.progress_bar("reading", 10) as advance:
        advance(10)
    assert "100%" in capsys.readouterr().err
