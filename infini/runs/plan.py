"""`infini reproduce plan=true`: the runs that are missing, what each needs first, and how long such runs took."""

from __future__ import annotations

from collections.abc import Iterator

from infini import records
from infini.report.verdicts import counted
from infini.runs.estimate import run_seconds
from infini.runs.workers import Worker
from infini.system.progress import duration

PUBLISHED_MARK = "*"
"""Marks the time of a published run."""


def describe(worker: Worker, results_dir: str) -> Iterator[str]:
    """Lines on the runs of a worker that plans: number, time, run, cell. Cells whose training diverged have none: it is
    not repeated.

    A time is that of the quickest such run in results_dir. Where there is none it is that of a published run, on its
    machine, and marked.
    """
    yours, published = records.load_records(results_dir), records.load_records(records.published_dir())
    numbers = {run.record.run_id: run.number for run in worker.planned.values()}
    counts = {"train": 0, "eval": 0}
    total, unknown, elsewhere = 0.0, 0, False
    for run in worker.planned.values():
        made = run.record
        counts[made.verb] += 1
        seconds, mark = run_seconds(made.verb, run.cfg, yours), ""
        if seconds is None:
            seconds, mark = run_seconds(made.verb, run.cfg, published), PUBLISHED_MARK
        takes = "unknown" if seconds is None else f"{duration(seconds)}{mark}"
        total, unknown = total + (seconds or 0.0), unknown + (seconds is None)
        elsewhere = elsewhere or takes.endswith(PUBLISHED_MARK)
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
        marked = f" ({PUBLISHED_MARK} a published run, on its machine)" if elsewhere else ""
        yield f"{duration(total)} in one process{left}, as such runs took{marked}"
