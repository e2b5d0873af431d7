"""`infini figure`: draw the figures of one report, or of all, from run records."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from infini import records
from infini.config.schema import groups
from infini.errors import InputError
from infini.report.bench_figures import DRAWN_BY, newest
from infini.report.kind import ReportKind
from infini.report.load import draw, load_report, names_a_report, refuse_seed, report_of_runs
from infini.report.prompt_costs import PromptReport
from infini.report.selection import RunReport, select_runs
from infini.system.progress import progress_bar

if TYPE_CHECKING:
    from infini.config.schema import Config


def run(cfg: Config, overrides: list[str]) -> int:
    """Write the figures of the named report, or of every report, to `<results_dir>/figures` as PNG and SVG.

    The runs are those of the results folder. A report without runs there is drawn from the published ones.

    Raises:
        InputError: no run of the reports at this scale has anything to draw.
    """
    refuse_seed("figure", overrides)
    records.check_writable(cfg.results_dir)
    named = names_a_report(overrides)
    declared = load_report(cfg.report)
    suites = [declared.suite] if isinstance(declared, PromptReport) else []
    reports: list[ReportKind] = []
    if not named:
        from infini.config.compose import compose

        others = [text for text in overrides if not text.startswith("report.")]
        reports = [load_report(compose([*others, f"report={name}"]).report) for name in groups()["report"]]
        suites = list(DRAWN_BY)
    elif not suites:
        reports = [report_of_runs(cfg.report, "draw")]
    said: list[str] = []
    drawn_by: list[Callable[[], list[str]]] = [
        partial(_draw, report, cfg) for report in reports if isinstance(report, RunReport)
    ]
    drawn_by += [partial(_draw_bench, suite, cfg) for suite in suites]
    with progress_bar("drawing", len(drawn_by), sys.stderr.isatty()) as advance:
        for draw_some in drawn_by:
            said += draw_some()
            advance(1)
    print(*said, sep="\n", end="\n" * bool(said))
    if not said:
        which = f"report={cfg.report['name']} scale={cfg.scale.name}" if named else f"scale={cfg.scale.name}"
        how = f"bench suite={suites[0]}" if named and suites else f"reproduce {which}"
        raise InputError(
            f"{cfg.results_dir}: nothing to draw there or among published runs; make it with `infini {how}`"
        )
    return 0


def _draw_bench(suite: str, cfg: Config) -> list[str]:
    """Draw the figure of `infini bench suite=<suite>`. Returns the lines to print."""
    series, draw_one = DRAWN_BY[suite]
    results_dir = Path(cfg.results_dir)
    for folder in (results_dir, records.published_dir()):
        if run := newest(records.load_records(folder), cfg.scale.name, series):
            paths = draw_one(run, results_dir / "figures")
            return _said(f"bench suite={suite}", paths, published=folder != results_dir)
    return []


def _draw(report: RunReport, cfg: Config) -> list[str]:
    """Draw the figures of one report. Returns the lines to print."""
    results_dir = Path(cfg.results_dir)
    for folder in (results_dir, records.published_dir()):
        known = records.load_records(folder)
        selections = [(part, select_runs(part, cfg.scale.name, known)) for part in report.parts]
        paths = [
            path
            for part, found in selections
            for path in draw(part, cfg.scale.name, found, results_dir / "figures", known)
        ]
        if paths:
            said = _said(report.name, paths, published=folder != results_dir)
            for part, found in selections:
                if part.baseline and found.runs and part.baseline not in found.runs:
                    said.append(
                        f"{part.task}: no gap by position, which needs model={part.baseline} with the same seed"
                    )
            return said
    return []


def _said(name: str, paths: list[Path], published: bool) -> list[str]:
    return [f"{name}: no runs of yours, drawn from the published ones"] * published + [str(path) for path in paths]
