"""Claims as data, and the one function that judges them.

A claim is about one or more numbers, its parts. Each part has a margin and a side of the margin. The measurement gives
every part two one-sided p-values. The claim holds if every part is significantly on the right side (the largest p-value
of the parts counts). It does not hold if any part is significantly on the wrong side (the smallest counts, times the
number of parts). The claims about one report and one task are a family: their p-values are adjusted by Holm's method.
All that are declared count, with p = 1 where data are missing, so that a verdict does not depend on which runs are
published first. All other claims are inconclusive, and the finding says what would decide them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from infini.report.intervals import LEVEL, holm, p_value
from infini.report.tables import in_words

Verdict = Literal["holds", "does not hold", "inconclusive", "not testable"]
Direction = Literal["below", "above"]
PValues = tuple[float, float]
"""One-sided p-values of a part: the first is small on the right side of the margin, the second on the wrong side."""


@dataclass(frozen=True)
class Claim:
    """A claim of the paper and its test, as `conf/report/claims.yaml` or `own_claims` of its report declares it."""

    name: str
    says: str
    place: str
    """Section, table or figure of the paper."""
    measure: str
    """A key of infini.report.claims.MEASURES."""
    report: str = ""
    """The report whose published runs are judged; empty for arithmetic. In `own_claims` its default is the report."""
    task: str = ""
    rows: tuple[str, ...] = ()
    """Rows of the report: first the row of the claim, then the rows it is compared with."""
    direction: Direction = "below"
    """The side of the margin on which the claim puts the measure."""
    margin: float = 0.0
    seeds: int = 3
    """Minimum number of seeds."""
    documents: int = 7
    """Minimum number of documents, if documents are compared."""
    unequal_tokens: bool = False
    """Whether the claim is about rows with different numbers of training tokens. Otherwise such rows decide nothing."""
    options: dict[str, Any] = field(default_factory=dict)
    """Other arguments of the measure."""
    test: str = ""
    """An addition to the description of the test."""
    not_testable: str = ""
    """Why it cannot be tested at this scale, whatever runs there are; empty if it can."""


@dataclass(frozen=True)
class Measured:
    """The measurement of a claim on published runs."""

    text: str = ""
    run_ids: tuple[str, ...] = ()
    parts: tuple[PValues, ...] = ()
    """Empty if nothing was measured."""
    missing: str = ""
    """Evidence that a verdict lacks, for example "two more seeds"; empty if nothing is missing."""
    to_decide: str = ""
    """Evidence that an inconclusive claim needs; empty: computed from `with_more`."""
    with_more: Sequence[tuple[str, Callable[[], Sequence[PValues]]]] = ()
    """("5 seeds", function that returns the parts for that many with the same spread), the cheapest first."""
    exact: bool = False
    """Whether this is arithmetic without a sample, which does not belong to a family of tests."""


@dataclass(frozen=True)
class Finding:
    """The verdict on a claim, its measurement and its runs."""

    verdict: Verdict
    measured: str = ""
    to_decide: str = ""
    """Evidence that would decide an inconclusive claim."""
    run_ids: tuple[str, ...] = ()


def judge(measured: Sequence[tuple[Claim, Measured]]) -> list[Finding]:
    """The finding of every claim, in the order given."""
    families: dict[tuple[str, str], list[int]] = {}
    for index, (claim, found) in enumerate(measured):
        if not (claim.not_testable or found.exact):
            families.setdefault((claim.report, claim.task), []).append(index)
    adjusted: dict[int, tuple[float, int]] = {}
    for family in families.values():
        p_values = holm([_two_sided(measured[index][1]) for index in family])
        adjusted |= {index: (p, len(family)) for index, p in zip(family, p_values, strict=True)}
    return [_finding(claim, found, adjusted.get(index)) for index, (claim, found) in enumerate(measured)]


def sides(parts: Sequence[PValues]) -> PValues:
    """One-sided p-values of all parts together: every part is on the right side, or any part is on the wrong side."""
    return max(right for right, _ in parts), min(1.0, len(parts) * min(wrong for _, wrong in parts))


def _two_sided(found: Measured) -> float:
    """The p-value of a measurement; 1 if data are missing."""
    return 2 * min(sides(found.parts)) if found.parts and not found.missing else 1.0


def _finding(claim: Claim, found: Measured, adjusted: tuple[float, int] | None) -> Finding:
    if claim.not_testable:
        return Finding("not testable", claim.not_testable)
    if found.missing or not found.parts:
        return Finding(
            "inconclusive", found.text, f"needs {found.missing or in_words(claim.seeds, 'seed')}", found.run_ids
        )
    right, wrong = sides(found.parts)
    verdict: Verdict = "holds" if right < wrong else "does not hold"
    if adjusted is None:
        return Finding(verdict, found.text, run_ids=found.run_ids)
    p, size = adjusted
    among = f", adjusted for {size} tests" if size > 1 else ""
    text = f"{found.text}; p {'' if p_value(p).startswith('<') else '= '}{p_value(p)}{among}"
    if p <= 1 - LEVEL:
        return Finding(verdict, text, run_ids=found.run_ids)
    return Finding("inconclusive", text, _takes(found, size), found.run_ids)


def _takes(found: Measured, size: int) -> str:
    """The least data that would decide, at the measured spread, with all tests of the family."""
    if found.to_decide:
        return f"needs {found.to_decide}"
    for what, parts in found.with_more:
        if 2 * min(sides(parts())) * size <= 1 - LEVEL:
            return f"would need about {what}"
    return f"would need more than {found.with_more[-1][0]}" if found.with_more else ""
