"""The claims of the paper, judged by published records: `infini table report=claims`, and CLAIMS.md when publishing."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from infini.config import compose
from infini.records import RunRecord, write_atomically
from infini.report.claims import ClaimsReport, Evidence, build_claims
from infini.report.load import load_report
from infini.report.passkey import PasskeyReport
from infini.report.render import to_markdown
from infini.report.selection import Report, select_runs
from infini.report.tables import RenderedReport

FILE = "CLAIMS.md"


def judged(report: ClaimsReport, scale: str, published: Iterable[RunRecord]) -> RenderedReport:
    """The claims, tested on the published runs at a scale. InputError: two candidates for a cell of a table."""
    known = [run for run in published if not run.synthetic]
    reports = [load_report(compose([f"report={name}"]).report) for name in report.tables]
    text = next(found for found in reports if isinstance(found, Report))
    passkey = next(found for found in reports if isinstance(found, PasskeyReport))
    evidence = Evidence(
        {part.task: select_runs(part, scale, known) for part in text.parts},
        passkey,
        select_runs(passkey, scale, known),
    )
    return build_claims(report, scale, evidence, text.benchmarks)


def write_claims(scale: str, published: Iterable[RunRecord], folder: Path) -> Path:
    """Write the claims at a scale to `folder`/CLAIMS.md; its path."""
    report = load_report(compose(["report=claims"]).report)
    assert isinstance(report, ClaimsReport)
    path = folder / FILE
    write_atomically(path, to_markdown(judged(report, scale, published), links={"published": "runs"}).encode())
    return path
