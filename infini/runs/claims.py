"""The claims of the paper, judged by published records: `infini table report=claims`, and CLAIMS.md when publishing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, cast

from infini.config.compose import compose
from infini.config.schema import Config
from infini.errors import InputError
from infini.records import RunRecord
from infini.report.claims import ClaimsReport, Evidence, build_claims
from infini.report.kind import ReportKind
from infini.report.load import load_report
from infini.report.render import to_markdown
from infini.report.selection import RunReport, select_runs
from infini.report.tables import RenderedReport

FILE = "CLAIMS.md"


def table(
    report: ClaimsReport,
    cfg: Config,
    overrides: list[str],
    published: Sequence[RunRecord],
    yours: Sequence[RunRecord] | None,
) -> RenderedReport:
    """The claims, judged by the published records at the scale of `cfg`."""
    return judged(report, cfg.scale.name, published)


def judged(report: ClaimsReport, scale: str, published: Iterable[RunRecord]) -> RenderedReport:
    """The claims, tested on the published runs at a scale. InputError: two runs compete for a cell of a table."""
    known = [run for run in published if not run.synthetic]
    return build_claims(report, scale, {name: _evidence(name, scale, known) for name in report.reports})


def totals_of(name: str, scale: str, published: Iterable[RunRecord]) -> str:
    """The verdicts on the claims about a report, counted; empty where there are none."""
    about = cast(ClaimsReport, declared_report("claims")).about(name)
    return judged(about, scale, published).totals if about.claims else ""


def _evidence(name: str, scale: str, known: list[RunRecord]) -> Evidence:
    declared = declared_report(name)
    if not isinstance(declared, RunReport):
        raise InputError(f"report.claims: report={name} has no runs that could judge a claim")
    # The table may refuse several runs of one cell. Claims take the kind's first choice among them.
    report: RunReport = replace(cast(Any, declared), aggregate=declared.choices[0])
    selections = {}
    for part, as_shown in zip(report.parts, declared.parts, strict=True):
        # As in the table, a training that differs from its row's declaration does not count beside one that matches.
        superseded = select_runs(as_shown, scale, known, keep_disputes=True).superseded.values()
        left_out = {run_id for runs in superseded for run_id in runs}
        selections[part.task] = select_runs(part, scale, [run for run in known if run.run_id not in left_out])
    return Evidence(report, selections)


@cache
def declared_report(name: str) -> ReportKind:
    """A report as the project declares it."""
    return load_report(compose([f"report={name}"]).report)


def claims_text(scale: str, published: Iterable[RunRecord]) -> str:
    """CLAIMS.md: the claims at a scale, with links to the records."""
    report = cast(ClaimsReport, declared_report("claims"))
    return to_markdown(judged(report, scale, published), links={"published": "runs"})
