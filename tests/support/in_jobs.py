"""Functions that jobs of a launcher run in processes of their own. They replace those of `infini.cli.sweep`; the jobs
find this module by PYTHONPATH."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from killed import arm

from infini.cli import sweep

_job, _worker = sweep._job, sweep._worker
SECONDS = 120
"""For which a process waits, at most."""


def _signal_in_steps(signals: Mapping[int, signal.Signals], ranks: str) -> None:
    """In a step of a training this process gets the signal of that step, from 1 on. ranks: "all", or rank 0 alone."""
    from infini.training.module import LanguageModelModule

    real = LanguageModelModule.training_step

    def step(self: LanguageModelModule, batch: Any, index: int) -> Any:
        me = os.getpid()
        if (number := signals.get(self.global_step + 1)) is not None:
            others = Path(f"/proc/{me}/task/{me}/children").read_text().split() if ranks == "all" else []
            for process in (*map(int, others), me):
                os.kill(process, number)
        return real(self, batch, index)

    LanguageModelModule.training_step = step  # type: ignore[method-assign]


def signalled(signals: Mapping[int, signal.Signals], ranks: str, name: str, marks: Path | None, cfg: Any) -> str | None:
    """A job of a sweep with these signals."""
    _signal_in_steps(signals, ranks)
    return _job(name, marks, cfg)


def signalled_worker(signals: Mapping[int, signal.Signals], name: str, words: Sequence[str], cfg: Any) -> str | None:
    """A process that makes the runs of a table, with these signals."""
    _signal_in_steps(signals, "0")
    return _worker(name, words, cfg)


def preempted_after_two_answers(name: str, marks: Path | None, cfg: Any) -> str | None:
    """A job of a sweep of evaluations. It gets SIGUSR2 after the second result, and not again when it resumes. Lists
    what it measures in `measured`, below results_dir."""
    from infini.evaluation import perplexity
    from infini.evaluation.result_cache import ResultCache

    real, measured = ResultCache.add, Path(cfg.results_dir) / "measured"

    def add(self: ResultCache, answer: str, entry: dict[str, Any]) -> None:
        real(self, answer, entry)
        with measured.open("a", encoding="utf-8") as listed:
            print(answer, file=listed)
        if len(measured.read_text(encoding="utf-8").splitlines()) == 2:
            os.kill(os.getpid(), signal.SIGUSR2)

    ResultCache.add = add  # type: ignore[method-assign]
    # A result for each of the few documents.
    perplexity.DOCS_PER_BATCH = 1
    return _job(name, marks, cfg)


def killed_if_third_or_fourth(name: str, words: Sequence[str], cfg: Any) -> str | None:
    """A process of four that share the runs of a table. The last two kill themselves (SIGKILL) in their second step.
    Both have a training, because the first two start when there are two checkpoints."""
    (results,) = (Path(word.partition("=")[2]) for word in words if word.startswith("results_dir="))
    if cfg.workers > 2:
        arm("in a step", 2)
    else:
        until = time.monotonic() + SECONDS
        while len(list(results.glob("unfinished/*/step-*.ckpt"))) < 2 and time.monotonic() < until:
            time.sleep(0.1)
    return _worker(name, words, cfg)
