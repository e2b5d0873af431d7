"""What a claim is, as data, and the one function that judges all of them.

A claim is about one or more numbers, its parts, each with a margin and a side of it. What was measured gives every part
two one-sided p-values. The claim holds where every part is surely on the right side (the largest p-value of the parts
counts), it does not hold where any part is surely on the wrong side (the smallest counts, times the number of parts).
The claims about one report and one task are a family: their p-values are adjusted by Holm's method. Anything else is
inconclusive, and the finding says what it would take to decide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from infini.errors import InputError, did_you_mean
from infini.report.intervals import LEVEL, holm, p_value

Verdict = Literal["holds", "does not hold", "inconclusive", "not testable"]
Direction = Literal["below", "above"]
PValues = tuple[float, float]
"""One-sided, of a part: small where it is surely on the right side, small where it is surely on the wrong side."""


def counted(number: int, what: str) -> str:
    """`1 seed`, `3 seeds`."""
    return f"{number} {what}{'s' * (number != 1)}"


@dataclass(frozen=True)
class Claim:
    """A claim of the paper and the test it is put to, as `conf/report/claims.yaml` declares it."""

    name: str
    says: str
    place: str
    """Where the paper says it."""
    measure: str
    """What is measured: a key of infini.report.claims.MEASURES."""
    report: str = ""
    """The report whose published runs are judged; empty for arithmetic."""
    task: str = ""
    rows: tuple[str, ...] = ()
    """Rows of the report: the one that the claim is about, then those that it is compared with."""
    direction: Direction = "below"
    """The side of the margin on which the claim puts the measure."""
    margin: float = 0.0
    seeds: int = 3
    """Fewer decide nothing."""
    documents: int = 7
    """Fewer decide nothing, where documents are compared."""
    options: dict[str, Any] = field(default_factory=dict)
    """What else the measure reads."""
    test: str = ""
    """What is to be said of the test beside what follows from these fields."""
    not_testable: str = ""
    """Why it cannot be tested at this scale; empty where it can."""

    @classmethod
    def from_config(cls, values: Any, measures: Iterable[str]) -> Claim:
        """A claim from a mapping; InputError for a key or value that is not allowed."""
        if isinstance(values, cls):
            return values
        name = values.get("name") if isinstance(values, dict) else None
        try:
            made = cls(**{**values, "rows": tuple(values.get("rows", ()))})
        except (TypeError, AttributeError) as error:
            raise InputError(f"report.claims.{name}: {error}") from error
        if made.direction not in ("below", "above"):
            raise InputError(f"report.claims.{name}.direction={made.direction!r}: must be below or above")
        if made.measure not in measures:
            hint = did_you_mean(made.measure, measures)
            raise InputError(f"report.claims.{name}.measure={made.measure!r}: one of {', '.join(measures)}{hint}")
        return made


@dataclass(frozen=True)
class Measured:
    """What published runs say of a claim."""

    text: str = ""
    run_ids: tuple[str, ...] = ()
    parts: tuple[PValues, ...] = ()
    """Empty where nothing can be said."""
    missing: str = ""
    """What is missing before anything follows, as "2 more seeds"; empty where nothing is."""
    to_decide: str = ""
    """What it would take where these parts decide nothing; empty: what `with_more` says."""
    with_more: Sequence[tuple[str, Callable[[], Sequence[PValues]]]] = ()
    """("5 seeds", the parts that so many would give if they scatter as those that there are), the cheapest first."""
    exact: bool = False
    """Whether this is arithmetic: no sample, so no part of a family of tests."""


@dataclass(frozen=True)
class Finding:
    """The verdict on a claim, and what it rests on."""

    verdict: Verdict
    measured: str = ""
    to_decide: str = ""
    """What it would take, where the verdict is inconclusive."""
    run_ids: tuple[str, ...] = ()


def judge(measured: Sequence[tuple[Claim, Measured]]) -> list[Finding]:
    """The finding of every claim, in the order given."""
    families: dict[tuple[str, str], list[int]] = {}
    for index, (claim, found) in enumerate(measured):
        if found.parts and not found.missing and not found.exact:
            families.setdefault((claim.report, claim.task), []).append(index)
    adjusted: dict[int, tuple[float, int]] = {}
    for family in families.values():
        p_values = holm([2 * min(sides(measured[index][1].parts)) for index in family])
        adjusted |= {index: (p, len(family)) for index, p in zip(family, p_values, strict=True)}
    return [_finding(claim, found, adjusted.get(index)) for index, (claim, found) in enumerate(measured)]


def sides(parts: Sequence[PValues]) -> PValues:
    """One-sided p-values of all parts together: that every part is on the right side, that any is on the wrong one."""
    return max(right for right, _ in parts), min(1.0, len(parts) * min(wrong for _, wrong in parts))


def _finding(claim: Claim, found: Measured, adjusted: tuple[float, int] | None) -> Finding:
    if claim.not_testable and not found.run_ids:
        return Finding("not testable", claim.not_testable)
    if found.missing or not found.parts:
        return Finding("inconclusive", found.text, found.missing or f"{claim.seeds} seeds", found.run_ids)
    right, wrong = sides(found.parts)
    verdict: Verdict = "holds" if right < wrong else "does not hold"
    if adjusted is None:
        return Finding(verdict, found.text, run_ids=found.run_ids)
    p, size = adjusted
    among = f", adjusted for {size} tests" if size > 1 else ""
    text = f"{found.text}; p {_printed(p)}{among}"
    if p <= 1 - LEVEL:
        return Finding(verdict, text, run_ids=found.run_ids)
    return Finding("inconclusive", text, _takes(found, size), found.run_ids)


def _printed(p: float) -> str:
    text = p_value(p)
    return text if text.startswith("<") else f"= {text}"


def _takes(found: Measured, size: int) -> str:
    """The least that would decide, at the spread that was measured, against all tests of the family."""
    if found.to_decide:
        return found.to_decide
    for what, parts in found.with_more:
        if 2 * min(sides(parts())) * size <= 1 - LEVEL:
            return f"about {what}"
    return f"more than {found.with_more[-1][0]}" if found.with_more else ""
