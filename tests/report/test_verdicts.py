"""Verdicts on claims, from their measurements alone."""

from __future__ import annotations

from typing import Any

import pytest

from infini.report.verdicts import Claim, Finding, Measured, judge


def claim(name: str, **options: Any) -> Claim:
    """A claim about one report and task."""
    return Claim(name, "it holds", "Table 1", "loss", "a report", "a task", **options)


def measured(p: float) -> Measured:
    """A measurement with this two-sided p-value, on the claim's side."""
    return Measured("measured", ("a run",), ((p / 2, 1 - p / 2),))


NO_DATA, ONE_SEED = (
    Measured(missing="three seeds"),
    Measured("1 seed", ("a run",), ((0.0, 1.0),), missing="two more seeds"),
)


@pytest.mark.parametrize("other", [NO_DATA, ONE_SEED, measured(0.9)])
def test_a_declared_claim_counts_whether_it_has_data_or_not(other: Measured) -> None:
    """Otherwise what is published first would have the smaller p-value."""
    (alone,) = judge([(claim("a"), measured(0.02))])
    assert alone == Finding("holds", "measured; p = 0.02", run_ids=("a run",))
    of_two, _ = judge([(claim("a"), measured(0.02)), (claim("b"), other)])
    assert of_two.verdict == "holds" and of_two.measured == "measured; p = 0.04, adjusted for 2 tests"
    of_three, *_ = judge([(claim("a"), measured(0.02)), (claim("b"), other), (claim("c"), NO_DATA)])
    assert of_three.verdict == "inconclusive" and of_three.measured == "measured; p = 0.06, adjusted for 3 tests"


def test_claims_about_another_task_and_those_declared_untestable_do_not_count() -> None:
    others = [(Claim("b", "", "", "loss", "a report", "another task"), measured(0.9))]
    others += [(claim("c", not_testable="too small"), NO_DATA)]
    found, *_ = judge([(claim("a"), measured(0.02)), *others])
    assert found.measured == "measured; p = 0.02"


def test_a_claim_that_is_declared_untestable_stays_so_whatever_runs_there_are() -> None:
    for found in (NO_DATA, ONE_SEED, measured(0.001)):
        assert judge([(claim("a", not_testable="too small"), found)]) == [Finding("not testable", "too small")]


def test_every_part_must_be_right_and_each_may_be_wrong() -> None:
    """A part on the wrong side was once looked for among all parts."""
    right, wrong = (1e-9, 1 - 1e-9), (1 - 1e-9, 0.01)
    found = [judge([(claim("a"), Measured("m", parts=parts))])[0] for parts in ((right, wrong), (right, right, wrong))]
    assert [(each.verdict, each.measured) for each in found] == [
        ("does not hold", "m; p = 0.04"),
        ("inconclusive", "m; p = 0.06"),
    ]


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (NO_DATA, "needs three seeds"),
        (ONE_SEED, "needs two more seeds"),
        (Measured("m", ("a run",), ((0.2, 0.8),), to_decide="prompts of 1M"), "needs prompts of 1M"),
        (
            Measured("m", ("a run",), ((0.2, 0.8),), with_more=[("20 seeds and 16 books", lambda: [(0.001, 0.9)])]),
            "would need about 20 seeds and 16 books",
        ),
        (
            Measured("m", ("a run",), ((0.2, 0.8),), with_more=[("20 seeds", lambda: [(0.1, 0.9)])]),
            "would need more than 20 seeds",
        ),
    ],
)
def test_an_inconclusive_claim_says_what_it_needs(found: Measured, text: str) -> None:
    assert judge([(claim("a"), found)])[0].to_decide == text
