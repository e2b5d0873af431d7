"""`infini reproduce`: run what a report still needs, then print it. A stopped reproduction resumes when run again."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence

from rich.console import Console

from infini import records
from infini.config.schema import Config
from infini.errors import DivergedError, InputError
from infini.records import RunRecord
from infini.report.load import load_report, report_of_runs
from infini.runs import table
from infini.runs.common import catch_divergence, find_training, name_diverged
from infini.runs.preflight import check_base, check_data
from infini.system.console import plain_console
from infini.training.loggers import check_logger


def run(cfg: Config, overrides: list[str], seeds: list[int], models: Sequence[str] = ()) -> int:
    """Run what is missing for the report and every seed, then print the table.

    models: only rows of these are run; all rows if there are none. What has a record in results_dir is not run again.
    """
    console = plain_console()
    report = load_report(cfg.report)
    if "reproduce" not in report.verbs:
        report = report_of_runs(cfg.report, "reproduce")
    if report.parts and cfg.task.name not in (tasks := [part.task for part in report.parts]):
        raise InputError(f"task={cfg.task.name}: report={report.name} is about task={' or '.join(tasks)}")
    records.check_writable(cfg.results_dir)
    check_logger(cfg.logger.name)
    check_base(cfg)
    check_data(cfg)
    if records.environment().get("git_dirty"):
        console.print("uncommitted changes in the source tree: what is run now cannot be published", style="yellow")
    report = report.limited_to(models)
    work = importlib.import_module(report.verbs["reproduce"].module)
    diverged = work.reproduce(report, cfg, overrides, seeds, console, models)
    table.show(report, cfg, overrides)
    name_diverged(diverged)
    return 0


def run_jobs(jobs: Sequence[tuple[str, Callable[[], str]]], console: Console) -> list[str]:
    """Do all jobs. A job whose training diverges does not stop the others.

    jobs: a heading and a function that returns a line to print.

    Returns:
        Headings of the jobs whose training diverged.
    """
    diverged = []
    for number, (where, make) in enumerate(jobs, 1):
        console.rule(f"{number} of {len(jobs)}: {where}")
        line = catch_divergence(make)
        if isinstance(line, DivergedError):
            console.print(str(line), style="yellow")
            diverged.append(where)
        else:
            console.print(line)
    return diverged


def trained(cfg: Config, overrides: list[str], console: Console, known: RunRecord | None = None) -> RunRecord:
    """A training of this configuration: `known`, the newest on record, or a new one. overrides: composed to `cfg`."""
    found = known or find_training(cfg)
    if found is None:
        from infini.runs.train import train

        return train(cfg, overrides)
    console.print(f"trained before: {found.run_id}")
    return found
