"""The report that a configuration names, whatever its kind."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from infini.errors import InputError
from infini.records import RunRecord
from infini.report.claims import ClaimsReport
from infini.report.declared import declared_at
from infini.report.footprint import MemoryReport
from infini.report.passkey import PasskeyReport, build_passkey_report
from infini.report.search import SearchReport
from infini.report.selection import Selection
from infini.report.summaries import SummaryReport, build_summary_report
from infini.report.tables import RenderedReport
from infini.report.text_report import Report
from infini.report.text_tables import build_report

OfRuns = Report | PasskeyReport | SummaryReport
AnyKind = OfRuns | MemoryReport | ClaimsReport | SearchReport


def load_report(config: Any) -> AnyKind:
    """A report from the `report` group of a configuration; InputError for a key or value that is not allowed."""
    # The key that only reports of that kind have.
    kinds: dict[str, type[AnyKind]] = {
        "rows": PasskeyReport,
        "segments": MemoryReport,
        "claims": ClaimsReport,
        "rates": SearchReport,
        "systems": SummaryReport,
    }
    for key, kind in kinds.items():
        if isinstance(config, Mapping) and key in config:
            return kind.from_config(config)
    return Report.from_config(config)


def report_of_runs(config: Any, verb: str) -> OfRuns:
    """load_report for a verb that needs runs; InputError for a report that has none of its own."""
    report = load_report(config)
    if not isinstance(report, OfRuns):
        hint = f"`infini table report={report.name}`"
        raise InputError(f"report={report.name}: nothing to {verb} of this kind of report; print it with {hint}")
    return report


def names_a_report(overrides: Iterable[str]) -> bool:
    """Whether a report is named, by itself or as an experiment."""
    return any(text.lstrip("+").startswith(("report=", "experiment=")) for text in overrides)


def refuse_seed(verb: str, overrides: Iterable[str]) -> None:
    """InputError where a seed is set for a verb that takes the runs of every seed: it would change nothing."""
    for text in overrides:
        if text.lstrip("+").startswith("seed="):
            raise InputError(f"{text}: infini {verb} takes the runs of every seed of a report's rows; leave it out")


def render(
    report: OfRuns,
    scale: str,
    published: Iterable[RunRecord],
    yours: Iterable[RunRecord] | None = None,
) -> RenderedReport:
    """The tables of a report at one scale; see build_report."""
    if isinstance(report, PasskeyReport):
        return build_passkey_report(report, scale, published, yours)
    if isinstance(report, SummaryReport):
        return build_summary_report(report, scale, published, yours, declared_at(report.task, scale))
    declared = {part.task: declared_at(part.task, scale) for part in report.parts}
    return build_report(report, scale, published, yours, declared)


def draw(report: OfRuns, scale: str, selection: Selection, folder: Path, known: Iterable[RunRecord] = ()) -> list[Path]:
    """All figures of a report, written to `folder`; the paths of the files. known: all records beside these runs."""
    # matplotlib is slow to load and only figures need it.
    from infini.report.bench_figures import newest_of_models
    from infini.report.costs import draw_costs
    from infini.report.curves import draw_curves
    from infini.report.figures import draw_report
    from infini.report.passkey_figures import draw_passkey
    from infini.report.summary_figures import draw_summaries

    if isinstance(report, Report) and report.variants and not report.variants.keys() & selection.runs.keys():
        # The models as they usually are have figures of their own.
        return []
    if isinstance(report, PasskeyReport):
        written = draw_passkey(report, scale, selection, folder)
    elif isinstance(report, SummaryReport):
        written = draw_summaries(report, scale, selection, folder)
    else:
        written = draw_report(report, scale, selection, folder) + draw_costs(
            report, scale, selection, folder, newest_of_models(known, scale)
        )
    heading = f"{report.title}, scale {scale}: training"
    if selection.synthetic:
        heading += " [synthetic corpus]"
    return written + draw_curves(selection, report.titles, folder / f"{report.name}_{scale}_training", heading)
