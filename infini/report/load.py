"""The registry of the kinds of reports, and the steps that all kinds share."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from infini.errors import InputError
from infini.records import RunRecord
from infini.report.claims import ClaimsReport
from infini.report.footprint import MemoryReport
from infini.report.kind import ReportKind
from infini.report.long_context import LongContextReport
from infini.report.passkey import PasskeyReport
from infini.report.search import SearchReport
from infini.report.selection import RunReport, Selection
from infini.report.suites import SuiteReport
from infini.report.summaries import SummaryReport
from infini.report.text_report import Report

KINDS: tuple[type[ReportKind], ...] = (
    LongContextReport,
    PasskeyReport,
    MemoryReport,
    ClaimsReport,
    SearchReport,
    SummaryReport,
    SuiteReport,
)
"""Every kind of report but Report, the table of running text. A kind is recognized by its `sign`, the first of
them whose sign the report has."""


def load_report(config: Mapping[str, Any]) -> ReportKind:
    """A report from the `report` group of a configuration; InputError for a key or value that is not allowed.

    A list inside a list stands for its entries, so that rows can share settings by an anchor: [*common, seed=1].
    """
    return next((kind for kind in KINDS if kind.sign in config), Report).from_config(_spliced(config))


def _spliced(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _spliced(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        parts = ((_spliced(inner), isinstance(inner, list | tuple)) for inner in value)
        return [entry for part, is_list in parts for entry in (part if is_list else [part])]
    return value


def report_of_runs(config: Mapping[str, Any], verb: str) -> RunReport:
    """load_report for a verb that needs evaluation runs; InputError for a report without runs of its own."""
    report = load_report(config)
    if not isinstance(report, RunReport):
        hint = f"`infini table report={report.name}`"
        raise InputError(f"report={report.name}: has no runs of its own to {verb}; print it with {hint}")
    return report


def names_a_report(overrides: Iterable[str]) -> bool:
    """Whether a report is named, directly or by an experiment."""
    return any(text.lstrip("+").startswith(("report=", "experiment=")) for text in overrides)


def refuse_seed(verb: str, overrides: Iterable[str]) -> None:
    """Raise InputError if a seed is set for a verb that takes the runs of every seed."""
    for text in overrides:
        if text.lstrip("+").startswith("seed="):
            raise InputError(f"{text}: infini {verb} takes the runs of every seed of a report's rows; leave it out")


def draw(
    report: RunReport,
    scale: str,
    selection: Selection,
    folder: Path,
    known: Iterable[RunRecord] = (),
    kinds: Collection[str] | None = None,
) -> list[Path]:
    """Write the figures of a report to `folder`, as `<report>_<scale>_<kind>`. Returns the paths of the files.

    known: all records beside the selection. kinds: which figures; None: all.
    """
    drawings = report.drawings(scale, selection, known) if selection.runs else {}
    wanted = [kind for kind in drawings if kinds is None or kind in kinds]
    return [path for kind in wanted for path in drawings[kind](folder / f"{report.name}_{scale}_{kind}")]
