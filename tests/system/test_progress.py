"""Progress where there is a terminal and where there is none."""

from __future__ import annotations

import io
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from infini.runs import train
from infini.system import progress


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
    # The bar is shown after 16 and 32 of the 40 seconds.
    assert lines == ["reading: 40 %, 24 s left", "reading: 80 %, 8 s left"]


def test_what_was_done_before_is_in_no_estimate(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the part done it would promise that the rest takes next to no time."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with progress.progress_bar("reading", 1000, shown=False) as advance:
        advance.skip(800)
        for _ in range(10):
            now[0] += 4.0
            advance(20)
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["reading: 40 %, 24 s left", "reading: 80 %, 8 s left"]
    with progress.progress_bar("reading", 10) as advance:
        advance.skip(4)
        advance(6)
    assert "100%" in capsys.readouterr().err


def test_with_a_terminal_the_bar_reaches_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.progress_bar("reading", 10) as advance:
        advance(10)
    assert "100%" in capsys.readouterr().err


def shown_by(
    monkeypatch: pytest.MonkeyPatch, ends: Iterable[float], first: int = 0, terminal: bool | None = None
) -> str:
    """The output of a training of 100 steps of 100 tokens. ends: when steps end, in seconds, from step `first` on."""
    now, shown = [0.0], io.StringIO()
    monkeypatch.setattr(train.time, "perf_counter", lambda: now[0])
    bar = train.TrainingProgress(100, Console(file=shown, force_terminal=terminal, width=100))
    trainer: Any
    module: Any
    trainer, module = SimpleNamespace(global_step=first), SimpleNamespace(tokens_seen=first * 100, last_loss=1.25)
    bar.on_train_start(trainer, module)
    for step, end in enumerate(ends, first + 1):
        now[0], trainer.global_step, module.tokens_seen = end, step, step * 100
        bar.on_train_batch_end(trainer, module, None, None, step)
    bar.on_train_end(trainer, module)
    return shown.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_a_training_that_goes_on_shows_where_it_is(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = shown_by(monkeypatch, map(float, range(1, 21)), first=60, terminal=terminal)
    # A step a second since this sitting began at 60; without a terminal a line every 15 seconds.
    step, left = (80, 20) if terminal else (75, 25)
    assert f"step {step}/100  loss 1.250  100 tokens/s  {left} s left" in shown
    assert terminal or shown.count("\n") == 1


def test_what_is_prepared_at_the_first_step_is_in_no_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    # Thirty seconds, and a second each from then on.
    shown = shown_by(monkeypatch, (step + 29.0 for step in range(1, 11)))
    assert shown == "step 1/100  loss 1.250  after 30 s\nstep 2/100  loss 1.250  100 tokens/s  98 s left\n"


def test_slow_steps_have_an_estimate_from_the_second_on(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third = shown_by(monkeypatch, (20.0, 40.0, 60.0)).splitlines()
    assert first == "step 1/100  loss 1.250  after 20 s"
    assert second == "step 2/100  loss 1.250  5 tokens/s  33 minutes left" and "32 minutes left" in third


def test_work_of_unknown_length_has_no_estimate(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with progress.progress_bar("reading (bytes)", None, shown=False) as advance:
        for _ in range(5):
            now[0] += 4.0
            advance(2000)
    assert capsys.readouterr().err.splitlines() == ["reading (bytes): 8,000 in 16 s"]
    with progress.progress_bar("reading", None) as advance:
        advance(12_345)
    assert "12,345" in capsys.readouterr().err
