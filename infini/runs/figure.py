"""`infini figure`: draw the figures of one report, or of all, from run records."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from infini import records
from infini.config.schema import Config, groups, key_of
from infini.errors import InputError
from infini.report.load import draw, load_report, names_a_report, refuse_seed, report_of_runs
from infini.report.selection import DisputedError, RunReport, select_runs
from infini.report.suites import SUITES, SuiteReport, newest
from infini.report.text_report import Report
from infini.system.progress import progress_bar


def run(cfg: Config, overrides: list[str]) -> int:
    """Write the figures of the named report, or of every report, to `<results_dir>/figures` as PNG and SVG.

    The runs are those of the results folder. A report without runs there is drawn from the published ones. Where every
    report is drawn, one with runs that compete for a cell is left out, and the command ends with exit code 2.

    Raises:
        InputError: no run of the reports at this scale has anything to draw, or runs of the named report compete for a
            cell.
    """
    refuse_seed("figure", overrides)
    records.check_writable(cfg.results_dir)
    named = names_a_report(overrides)
    declared = load_report(cfg.report)
    if not named:
        reports, suites = every_report(overrides), list(SUITES)
    elif isinstance(declared, SuiteReport):
        reports, suites = [], [declared.suite]
    else:
        reports, suites = [report_of_runs(cfg.report, "draw")], []
    sources = [Path(cfg.results_dir), records.published_dir()]
    said, not_drawn = _draw_all(reports, suites, cfg, sources, disputed=not named)
    print(*said, sep="\n", end="\n" * bool(said))
    print(*not_drawn, sep="\n", end="\n" * bool(not_drawn), file=sys.stderr)
    if not_drawn:
        return 2
    if not said:
        if named and reports and not reports[0].figure_kinds:
            name = cfg.report["name"]
            raise InputError(f"report={name}: has no figures; its table is `infini table report={name}`")
        which = f"report={cfg.report['name']} scale={cfg.scale.name}" if named else f"scale={cfg.scale.name}"
        how = f"bench suite={suites[0]}" if named and suites else f"reproduce {which}"
        raise InputError(
            f"{cfg.results_dir}: nothing to draw there or among published runs; make it with `infini {how}`"
        )
    return 0


def draw_published(cfg: Config, published_dir: Path) -> None:
    """Write the figures that are published, of every report and bench, from published records to
    `<results_dir>/figures`."""
    reports = every_report([f"scale={cfg.scale.name}"])
    _draw_all(reports, list(SUITES), cfg, [published_dir], published=True)


def every_report(overrides: Sequence[str]) -> list[RunReport]:
    """Every report with figures, with these settings. `report.aggregate` is that of the reports whose kind has this
    choice; InputError for another key of a report, since each has its own."""
    from infini.config.compose import compose

    own = [text for text in overrides if key_of(text).startswith("report.")]
    for text in own:
        if key_of(text) != "report.aggregate":
            raise InputError(f"{text}: every report is drawn, and each has its own {key_of(text)}; add report=<name>")
    others = [text for text in overrides if text not in own]
    found = [load_report(compose([*others, f"report={name}"]).report) for name in groups()["report"]]
    reports = [report for report in found if isinstance(report, RunReport)]
    if not own:
        return reports
    choice = compose(own).report.get("aggregate")
    return [
        replace(cast(Any, report), aggregate=choice) if choice in (None, *report.choices) else report
        for report in reports
    ]


def _draw_all(
    reports: Sequence[RunReport],
    suites: Sequence[str],
    cfg: Config,
    sources: Sequence[Path],
    disputed: bool = False,
    published: bool = False,
) -> tuple[list[str], list[str]]:
    """Draw one after the other -> the lines to print, and lines on reports that were not drawn because runs compete for
    a cell. disputed: whether there may be such; otherwise it is an error. published: only figures that are published.
    """
    said: list[str] = []
    not_drawn: list[str] = []
    bar = progress_bar("drawing", len(reports) + len(suites), sys.stderr.isatty())
    with records.keep_read(), bar as advance:
        for report in reports:
            try:
                said += _draw(report, cfg, sources, report.published_figures if published else None)
            except DisputedError as error:
                if not disputed:
                    raise
                not_drawn.append(f"not drawn: {error}")
            advance(1)
        for suite in suites:
            said += _draw_bench(suite, cfg, sources)
            advance(1)
    return said, not_drawn


def _draw_bench(suite: str, cfg: Config, sources: Sequence[Path]) -> list[str]:
    """Draw the figure of `infini bench suite=<suite>` from the first source that has it. Returns the lines to print."""
    results_dir = Path(cfg.results_dir)
    for folder in sources:
        if run := newest(records.load_records(folder), cfg.scale.name, SUITES[suite].series):
            paths = SUITES[suite].draw(run, results_dir / "figures")
            return _printed_lines(f"bench suite={suite}", paths, results_dir, published=folder != results_dir)
    return []


def _draw(report: RunReport, cfg: Config, sources: Sequence[Path], kinds: Collection[str] | None = None) -> list[str]:
    """Draw the figures of one report from the first source that has some. Returns the lines to print. kinds: which
    figures; None: all."""
    results_dir = Path(cfg.results_dir)
    for folder in sources:
        known = records.load_records(folder)
        selections = [(part, select_runs(part, cfg.scale.name, known)) for part in report.parts]
        paths = [
            path
            for part, found in selections
            for path in draw(part, cfg.scale.name, found, results_dir / "figures", known, kinds)
        ]
        if paths:
            said = _printed_lines(report.name, paths, results_dir, published=folder != results_dir)
            for part, found in selections:
                if isinstance(part, Report) and part.baseline and found.runs and part.baseline not in found.runs:
                    said.append(
                        f"{part.task}: no gap by position, which needs model={part.baseline} with the same seed"
                    )
            return said
    return []


def _printed_lines(name: str, paths: list[Path], results_dir: Path, published: bool) -> list[str]:
    """The lines to print on figures that were drawn; the first says from which runs."""
    if published:
        runs = [f"{name}: no runs of yours, drawn from the published ones"]
    elif results_dir.resolve() != records.published_dir().resolve():
        runs = [f"{name}: drawn from the runs in {results_dir} alone; an empty results_dir draws the published ones"]
    else:
        runs = []
    return runs + [str(path) for path in paths]
