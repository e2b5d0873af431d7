"""`infini reproduce plan=true`: the runs that are missing, what each needs first, and how long such runs took."""

from __future__ import annotations

from collections.abc import Iterator

from infini import records
from infini.report.verdicts import counted
from infini.runs.estimate import run_seconds
from infini.runs.workers import Worker
from infini.system.progress import duration


def describe(worker: Worker, results_dir: str) -> Iterator[str]:
    """Lines on the runs of a worker that plans: number, time, run, cell.

    A time is that of the quickest such run in results_dir, or if there is none among published ones.
    """
    known = [records.load_records(folder) for folder in (results_dir, records.published_dir())]
    numbers = {run.record.run_id: run.number for run in worker.planned.values()}
    counts = {"train": 0, "eval": 0}
    total, unknown = 0.0, 0
    for run in worker.planned.values():
        made = run.record
        seconds = run_seconds(made.verb, run.cfg, known)
        counts[made.verb] += 1
        total, unknown = total + (seconds or 0.0), unknown + (seconds is None)
        after = f", after {numbers[made.parent]}" if made.parent in numbers else ""
        what = f"{made.verb} {made.task}, {made.model}, seed {made.seed}{after}"
        made_up = ", made-up text" if run.cfg.task.data_dir == "synthetic" else ""
        takes = "unknown" if seconds is None else duration(seconds)
        yield f"{run.number:>3}  {takes:>10}  {what} ({run.cell}{made_up})"
    yield (
        f"{counted(counts['train'], 'training')} and {counted(counts['eval'], 'evaluation')} to run; "
        f"{counted(len(worker.filled), 'cell')} filled"
    )
    if any(run.cfg.task.data_dir == "synthetic" for run in worker.planned.values()):
        yield "made-up text says nothing about the models: set INFINI_DATA_DIR or task.data_dir for the real table"
    if total:
        left = f", without {counted(unknown, 'run')} of unknown time" if unknown else ""
        yield f"{duration(total)} in one process{left}, as such runs took: yours, or else published ones"
