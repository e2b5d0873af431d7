"""What a claim of the paper is, what can be found of it, and the thresholds that were chosen before the runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from infini.report.passkey import PasskeyReport
from infini.report.selection import Selection
from infini.report.summaries import SummaryReport

Verdict = Literal["holds", "does not hold", "not testable at this scale", "not measured yet"]

SURE, FEWEST_DOCUMENTS = 2.5, 7
"""Standard errors, the larger of those over documents and over seeds, that a difference must be away from 0: with so
many documents that is Student's t at 95 %, with three seeds, where their error is the larger, at 87 %."""
FEWEST_SEEDS, FEWEST_EXAMPLES = 3, 50
"""Less is no answer, but for what is far behind."""


def counted(number: int, what: str) -> str:
    """`1 seed`, `3 seeds`."""
    return f"{number} {what}{'s' * (number != 1)}"


@dataclass(frozen=True)
class Finding:
    """What was measured of a claim, and what follows."""

    verdict: Verdict
    measured: str = ""
    run_ids: tuple[str, ...] = ()


@dataclass(frozen=True)
class Evidence:
    """Published runs: of running text by task, the passkey task, reports with variants of models, and summaries."""

    text: Mapping[str, Selection]
    passkey_report: PasskeyReport
    passkey: Selection
    variants: Mapping[str, Mapping[str, Selection]]
    """Name of the report -> task -> runs."""
    summaries: Mapping[str, tuple[SummaryReport, Selection]]
    """Name of the report -> the report and its runs."""


@dataclass(frozen=True)
class Claim:
    """A claim of the paper, where it stands, the test that was chosen for it, and the function that applies it."""

    name: str
    says: str
    place: str
    test: str
    judge: Callable[[Evidence], Finding]
