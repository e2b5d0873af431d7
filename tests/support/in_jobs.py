"""Functions that jobs of a launcher run in processes of their own. They replace those of `infini.cli.sweep`; the jobs
find this module by PYTHONPATH."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from killed import arm

from infini.cli import sweep

_job, _worker = sweep._job, sweep._worker
SECONDS = 120
"""For which a process waits, at most."""


def preempted_in_step_5(name: str, marks: Path | None, cfg: Any) -> str | None:
    """A job of a sweep. In step 5 of its training it gets the signal that submitit sends at the end of its time."""
    from infini.training.module import LanguageModelModule

    real = LanguageModelModule.training_step

    def signalled(self: LanguageModelModule, batch: Any, index: int) -> Any:
        if self.global_step + 1 == 5:
            os.kill(os.getpid(), signal.SIGUSR2)
        return real(self, batch, index)

    LanguageModelModule.training_step = signalled  # type: ignore[method-assign]
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
