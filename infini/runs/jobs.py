"""Shared by the modules that run the rows of a report. The report's kind names its module."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console

from infini.config.schema import Config
from infini.errors import DivergedError
from infini.records import RunRecord
from infini.runs.common import catch_divergence, find_training
from infini.runs.train import train


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
        return train(cfg, overrides)
    console.print(f"trained before: {found.run_id}")
    return found
