"""Trainings whose process is killed, at named moments and at random ones, end as if they had not been."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import killed
import pytest
from tiny_runs import STEPS, outcome, words


def kill(moment: str, occurrence: int, arguments: list[str]) -> int:
    """Exit code of a process that kills itself at that moment, or ends because it never came to it."""
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here.parent), str(here)])
    done = subprocess.run(
        [sys.executable, str(here / "killed.py"), moment, str(occurrence), "train", *arguments],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode


def killed_and_finished(arguments: list[str], moments: list[tuple[str, int]]) -> Counter[str]:
    """Kill a training at these moments, one process after the other, then let it end; how often each was hit."""
    hit: Counter[str] = Counter()
    for moment, occurrence in moments:
        if kill(moment, occurrence, arguments) == 0:
            return hit
        hit[moment] += 1
    assert kill("in a step", 10**6, arguments) == 0
    return hit


def test_killed_while_it_saves(corpus: Path, tmp_path: Path) -> None:
    # In a process of its own too, for with other threads the last bits are others.
    assert kill("in a step", 10**6, words(corpus, tmp_path / "straight")) == 0
    moments = [("before a point's rename", 2), ("in the weights' write", 1), ("before the record", 1)]
    hit = killed_and_finished(words(corpus, tmp_path / "killed"), moments)
    assert sum(hit.values()) == len(moments)
    assert outcome(tmp_path / "killed") == outcome(tmp_path / "straight")


@pytest.mark.slow
@pytest.mark.parametrize("task", ["pg19", "passkey"])
def test_ten_kills_at_random_moments(corpus: Path, tmp_path: Path, task: str) -> None:
    expected = words(corpus, tmp_path / "straight", task)
    assert kill("in a step", 10**6, expected) == 0
    # Every moment once, in an order that lets the training come to it, and one more at random.
    rng = random.Random(task)
    early = [*killed.MOMENTS[:5], rng.choice(killed.MOMENTS[:5])]
    rng.shuffle(early)
    moments = [(moment, 1) for moment in early] + [(moment, 1) for moment in killed.MOMENTS[5:]]
    hit = killed_and_finished(words(corpus, tmp_path / "killed", task), moments)
    print(f"{task}: {dict(hit)}")
    assert sum(hit.values()) == len(moments) == 10
    curve, weights = outcome(tmp_path / "killed")
    assert curve == outcome(tmp_path / "straight")[0]
    assert weights == outcome(tmp_path / "straight")[1]
    assert len(curve) == STEPS
