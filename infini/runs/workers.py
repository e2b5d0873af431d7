"""The runs of `infini reproduce`. Several processes may share a results folder: each run is made by one of them.
With plan=true they are listed, with what each needs first, and how long such runs took.

A process locks a file for each run that it makes. The lock ends with the process, so that another one takes over the
run of a process that was killed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from infini import records
from infini.config.compose import config_hash
from infini.config.schema import FOLDER_KEYS, Config
from infini.errors import BusyError
from infini.evaluation.result_cache import cache_path
from infini.records import RunRecord
from infini.report.tables import counted
from infini.runs.estimate import evaluation_seconds, training_seconds
from infini.system.paths import is_locked, lock_file
from infini.system.progress import duration

T = TypeVar("T")
SECONDS_BETWEEN = 1.0
"""Seconds after which a process that waits looks whether another one has ended."""
_NOT_IDENTIFYING = ("logger", "parallel", "full", "plan", "workers", *FOLDER_KEYS)
"""Root keys that two commands may set differently for the same evaluation."""
_PUBLISHED = "*"
"""Marks the time of a published run."""


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
        """Cells whose training diverged, which is not repeated -> how it did."""
        self._cell = ""

    def say(self, text: str, style: str | None = None) -> None:
        """Print a line on a run; a plan has none."""
        if not self.planning:
            self.console.print(text, style=style)

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
        identity = {key: value for key, value in asdict(cfg).items() if key not in _NOT_IDENTIFYING}
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
                if (found := find()) is not None:
                    return found
                with records.keep_read(False):
                    return make()
            finally:
                path.unlink(missing_ok=True)

    def do_all(self, jobs: Sequence[tuple[str, Callable[[], T]]]) -> list[T]:
        """The results of all jobs. Jobs whose run another process is making are done last.

        jobs: a name, and the function that does it.
        """
        with records.keep_read():
            return self._do_all(jobs)

    def _do_all(self, jobs: Sequence[tuple[str, Callable[[], T]]]) -> list[T]:
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
            with records.keep_read(False):
                while busy and not left:
                    time.sleep(SECONDS_BETWEEN)
                    left = [number for number, path in busy.items() if not is_locked(path)]
        return [done[number] for number in range(len(jobs))]


def describe(worker: Worker, results_dir: str) -> Iterator[str]:
    """Lines on the runs of a worker that plans: number, time, run, cell. Cells whose training diverged have none: it is
    not repeated.

    A time is that of the quickest such run in results_dir, on devices as this machine would use. If there is none, it
    is that of a published run, on its machine, and marked.
    """
    yours, published = records.load_records(results_dir), records.load_records(records.published_dir())
    numbers = {run.record.run_id: run.number for run in worker.planned.values()}
    counts = {"train": 0, "eval": 0}
    total, unknown, elsewhere = 0.0, 0, False
    for run in worker.planned.values():
        made = run.record
        counts[made.verb] += 1
        took = training_seconds if made.verb == "train" else evaluation_seconds
        seconds, mark = took(run.cfg, yours, here=True), ""
        if seconds is None:
            seconds, mark = took(run.cfg, published), _PUBLISHED
        takes = "unknown" if seconds is None else f"{duration(seconds)}{mark}"
        total, unknown = total + (seconds or 0.0), unknown + (seconds is None)
        elsewhere = elsewhere or takes.endswith(_PUBLISHED)
        after = f", after {numbers[made.parent]}" if made.parent in numbers else ""
        what = f"{made.verb} {made.task}, {made.model}, seed {made.seed}{after}"
        made_up = ", made-up text" if run.cfg.task.data_dir == "synthetic" else ""
        yield f"{run.number:>3}  {takes:>11}  {what} ({run.cell}{made_up})"
    for cell, how in worker.diverged.items():
        yield f"     diverged  {cell}: {how}"
    failed = f"; {counted(len(worker.diverged), 'cell')} diverged" if worker.diverged else ""
    yield (
        f"{counted(counts['train'], 'training')} and {counted(counts['eval'], 'evaluation')} to run; "
        f"{counted(len(worker.filled), 'cell')} filled{failed}"
    )
    if any(run.cfg.task.data_dir == "synthetic" for run in worker.planned.values()):
        yield "made-up text says nothing about the models: set INFINI_DATA_DIR or task.data_dir for the real table"
    if total:
        left = f", without {counted(unknown, 'run')} of unknown time" if unknown else ""
        marked = f" ({_PUBLISHED} a published run, on its machine)" if elsewhere else ""
        yield f"{duration(total)} in one process{left}, as such runs took{marked}"
