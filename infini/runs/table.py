"""`infini table report=<name>`: the paper's numbers, the published ones and yours in one table."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from rich.console import Console

from infini import records
from infini.config.schema import Config, WandbConfig
from infini.errors import InputError
from infini.records import RunRecord
from infini.report.kind import ReportKind
from infini.report.load import load_report, refuse_seed
from infini.report.render import print_report, write_report
from infini.report.selection import RunReport
from infini.report.tables import RenderedReport, counted
from infini.runs.claims import totals_of
from infini.system.paths import is_folder
from infini.system.progress import plain_console
from infini.training.loggers import check_logger, log_tables


def wide_console() -> Console:
    """A console on standard output, 120 columns wide if that is not a terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=120)


def run(cfg: Config, overrides: list[str]) -> int:
    """Print the report and write it to `<results_dir>/tables/<report>_<scale>.{md,tex,csv}`."""
    if not is_folder(Path(cfg.results_dir)) and any(text.startswith("results_dir=") for text in overrides):
        raise InputError(f"results_dir={cfg.results_dir!r}: no such folder")
    records.check_writable(cfg.results_dir)
    if isinstance(cfg.logger, WandbConfig):
        check_logger(cfg.logger.name)
    report = load_report(cfg.report)
    if not report.has_one_seed:
        refuse_seed("table", overrides)
    show(report, cfg, overrides)
    return 0


def show(report: ReportKind, cfg: Config, overrides: list[str]) -> None:
    """Print a report from published records and those in results_dir, and write it there."""
    published = records.load_records(records.published_dir())
    # In results_dir=results they are the same, and its tables are the published ones.
    is_published = Path(cfg.results_dir).resolve() == records.published_dir().resolve()
    yours = records.load_records(cfg.results_dir) if report.shows_own_runs and not is_published else None
    rendered = tabulate(report, cfg, overrides, published, yours)
    short = rendered.short()
    print_report(rendered if cfg.full else short, wide_console(), with_runs=cfg.full)
    lines = plain_console(stderr=False)
    if not cfg.full and short != rendered:
        if totals := totals_of(report.name, cfg.scale.name, published):
            lines.print(f"Claims about this table, judged by published runs (infini table report=claims): {totals}")
        more, notes = len(rendered.tables) - len(short.tables), len(rendered.notes)
        left = f"{counted(more, 'more table')}, {counted(notes, 'note')}" if more else "what is measured how"
        lines.print(f"full=true prints the rest: {left}, and the runs behind the rows")
    if not records.in_checkout() and not is_folder(records.published_dir() / "runs"):
        lines.print(records.WHERE_PUBLISHED)
    linked = "published" if is_published else "yours"
    paths = write_report(rendered, Path(cfg.results_dir) / "tables", links={linked: "../runs"})
    lines.print(f"written: {', '.join(map(str, paths))}")
    if isinstance(cfg.logger, WandbConfig):
        log_tables(cfg.logger, Path(cfg.results_dir) / "logs", rendered)


def tabulate(
    report: ReportKind,
    cfg: Config,
    overrides: list[str],
    published: Sequence[RunRecord],
    yours: Sequence[RunRecord] | None,
) -> RenderedReport:
    """A report of any kind at the scale of `cfg`. yours: None makes the table of the published records alone."""
    own = report.verbs.get("table")
    if own is None:
        return cast(RunReport, report).render(cfg.scale.name, published, yours)
    # Some kinds import torch for it, which is slow.
    rendered: RenderedReport = importlib.import_module(own.module).table(report, cfg, overrides, published, yours)
    return rendered
