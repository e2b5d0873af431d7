"""The runs of `infini reproduce`. Several processes may share a results folder: each run is made by one of them.

A process locks a file for each run that it makes. The lock ends with the process, so that another one takes over the
run of a process that was killed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from infini.config.compose import config_hash
from infini.config.schema import PLACES, Config
from infini.errors import BusyError
from infini.evaluation.result_cache import cache_path
from infini.records import RunRecord
from infini.system.paths import is_locked, lock_file

T = TypeVar("T")
SECONDS_BETWEEN = 1.0
"""Seconds after which a process that waits looks whether another one has ended."""
_DECIDES_NOTHING = ("logger", "parallel", "full", "plan", "workers", *PLACES)
"""Root keys that two commands may set differently for the same evaluation."""


@dataclass(frozen=True)
class PlannedRun:
    """A run that is still to be made."""

    number: int
    """Place in the plan, from 1 on."""
    cell: str
    cfg: Config
    record: RunRecord
    """Stands for the run; other runs may have its run id as their parent."""


class Worker:
    """Makes the runs of a reproduction that no other process makes, or lists them.

    console: for lines on progress. planning: no run is made; `planned` has those that are missing.
    """

    def __init__(self, console: Console, planning: bool = False) -> None:
        self.console, self.planning = console, planning
        self.planned: dict[Path, PlannedRun] = {}
        self.filled: list[str] = []
        """Cells of a plan that need no run."""
        self.diverged: dict[str, str] = {}
        """Cells of a plan whose training diverged and is not repeated -> how it did."""
        self._cell = ""

    def make(
        self,
        verb: str,
        cfg: Config,
        parent: str | None,
        find: Callable[[], RunRecord | None],
        make: Callable[[], RunRecord],
    ) -> RunRecord:
        """The result of `make`, for a run that is not on record; or of `find`, if another process made it meanwhile.

        verb: train or eval. parent: run id of the training from which it starts, or which it evaluates.
        Raises BusyError while another process makes it.
        """
        identity = {key: value for key, value in asdict(cfg).items() if key not in _DECIDES_NOTHING}
        decides = config_hash(cfg) if verb == "train" else identity
        path = cache_path(cfg.results_dir, verb, parent, decides).with_suffix(".lock")
        if self.planning:
            number = len(self.planned) + 1
            made = RunRecord(
                run_id=f"planned-{number}",
                verb=verb,
                task=cfg.task.name,
                model=str(getattr(cfg.task, "reference", None) or cfg.model["name"]),
                scale=cfg.scale.name,
                seed=cfg.seed,
                parent=parent,
                command="",
                overrides=[],
                config=asdict(cfg),
                config_hash=config_hash(cfg),
                started="",
                environment={},
            )
            return self.planned.setdefault(path, PlannedRun(number, self._cell, cfg, made)).record
        with lock_file(path, "another process makes this run"):
            try:
                return find() or make()
            finally:
                path.unlink(missing_ok=True)

    def do_all(self, jobs: Sequence[tuple[str, Callable[[], T]]]) -> list[T]:
        """The results of all jobs. Jobs whose run another process is making are done last.

        jobs: a name, and the function that does it.
        """
        done: dict[int, T] = {}
        left = list(range(len(jobs)))
        busy: dict[int, Path] = {}
        said = ""
        while left:
            found = len(done)
            for number in left:
                self._cell, job = jobs[number]
                before = len(self.planned)
                try:
                    done[number] = job()
                except BusyError as error:
                    busy[number] = error.path
                    continue
                busy.pop(number, None)
                if len(self.planned) == before and self._cell not in self.diverged:
                    self.filled.append(self._cell)
            left = [number for number, path in busy.items() if not is_locked(path)]
            if left and len(done) > found:
                continue
            waiting = "; ".join(jobs[number][0] for number in sorted(busy))
            if waiting not in ("", said):
                said = waiting
                self.console.print(f"waiting for other processes, which run {said}", highlight=False)
            left = []
            while busy and not left:
                time.sleep(SECONDS_BETWEEN)
                left = [number for number, path in busy.items() if not is_locked(path)]
        return [done[number] for number in range(len(jobs))]
