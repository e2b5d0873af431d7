"""What happens to jobs that a launcher has started, in processes of their own: they take the place of those of
`infini.cli.sweep`, and find this module by PYTHONPATH."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from infini.cli import sweep

_job = sweep._job


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
