"""Reports of a suite of `infini bench`: tables and a figure of its newest measurement."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from infini.errors import one_of
from infini.records import RunRecord
from infini.report import layer_costs, prompt_costs
from infini.report.kind import OwnVerb, ReportKind
from infini.report.tables import RenderedReport, Source


@dataclass(frozen=True)
class Suite:
    """A suite that has tables."""

    series: str
    """The series of its records."""
    build: Callable[[ReportKind, str, RunRecord | None, Source], RenderedReport]
    """Report, scale, record and whose record it is -> the tables."""
    draw: Callable[[RunRecord, Path], list[Path]]
    """Record and folder -> paths of the figure."""


SUITES: Mapping[str, Suite] = {
    "llm_generate": Suite(prompt_costs.SERIES, prompt_costs.build_prompt_report, prompt_costs.draw_prompt_costs),
    "layer": Suite(layer_costs.SERIES, layer_costs.build_layer_report, layer_costs.draw_layer_costs),
}
_MODULE = OwnVerb(None, module="infini.runs.report_suite")


@dataclass(frozen=True)
class SuiteReport(ReportKind):
    """Tables of the newest measurement of a suite, as `conf/report/<name>.yaml` declares them."""

    sign = "suite"
    verbs: ClassVar[Mapping[str, OwnVerb]] = {"table": _MODULE, "publish": _MODULE}

    suite: str
    """The suite of `infini bench` that measures."""

    def __post_init__(self) -> None:
        one_of("report.suite", self.suite, list(SUITES))
