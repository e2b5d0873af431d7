"""The claims of the paper, judged by published records: `infini table report=claims`, and CLAIMS.md when publishing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache

from infini.config.compose import compose
from infini.errors import InputError
from infini.records import RunRecord
from infini.report.claims import ClaimsReport, Evidence, build_claims
from infini.report.declared import declared_at, find_mismatches
from infini.report.load import AnyKind, load_report
from infini.report.passkey import PasskeyReport
from infini.report.render import to_markdown
from infini.report.selection import Selection, select_runs
from infini.report.summaries import SummaryReport, report_mismatches
from infini.report.tables import RenderedReport
from infini.report.text_report import Report

FILE = "CLAIMS.md"


def judged(report: ClaimsReport, scale: str, published: Iterable[RunRecord]) -> RenderedReport:
    """The claims, tested on the published runs at a scale. InputError: two candidates for a cell of a table."""
    known = [run for run in published if not run.synthetic]
    return build_claims(report, scale, {name: _evidence(name, scale, known) for name in report.reports})


def _evidence(name: str, scale: str, known: list[RunRecord]) -> Evidence:
    report = declared_report(name)
    if isinstance(report, PasskeyReport):
        return Evidence(report, {report.task: select_runs(report, scale, known)})
    # Which of a cell's rivals its table shows is that table's affair; claims take the newest.
    if isinstance(report, SummaryReport):
        return Evidence(report, {report.task: _of_summaries(replace(report, aggregate="newest"), scale, known)})
    if isinstance(report, Report):
        return Evidence(report, _by_task(replace(report, aggregate="newest"), scale, known))
    raise InputError(f"report.claims: report={name} has no runs that a claim could be judged by")


@cache
def declared_report(name: str) -> AnyKind:
    """A report as the project declares it."""
    return load_report(compose([f"report={name}"]).report)


def _by_task(report: Report, scale: str, known: list[RunRecord]) -> dict[str, Selection]:
    """The runs of every task of a report, with what is to be said against them."""
    return {
        part.task: find_mismatches(part, scale, select_runs(part, scale, known), declared_at(part.task, scale))
        for part in report.parts
    }


def _of_summaries(report: SummaryReport, scale: str, known: list[RunRecord]) -> Selection:
    return report_mismatches(report, scale, select_runs(report, scale, known), declared_at(report.task, scale))


def claims_text(scale: str, published: Iterable[RunRecord]) -> str:
    """CLAIMS.md: the claims at a scale, with links to the records beside it."""
    report = declared_report("claims")
    assert isinstance(report, ClaimsReport)
    return to_markdown(judged(report, scale, published), links={"published": "runs"})
