"""The claims about summaries of books: what makes each hold, and what leaves it open."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import pytest
from summary_runs import summaries
from test_claims import verdicts as of_all

from infini.config import compose
from infini.records import RunRecord
from infini.report import claims
from infini.report.claims import Evidence
from infini.report.load import load_report
from infini.report.selection import select_runs
from infini.report.summaries import SummaryReport
from infini.report.summary_claims import BASELINES, TABLE, summary_claims
from infini.report.summary_claims import LENGTHS as BY_LENGTH

LENGTH = 500 * 1024
LENGTHS = (16, 32, 64, 128, 256, 500)
OPEN = "not measured yet"


@pytest.fixture(autouse=True)
def three_books_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as these records have."""
    monkeypatch.setattr(claims, "FEWEST_DOCUMENTS", 3)


@cache
def reports() -> list[SummaryReport]:
    found = [load_report(compose([f"report={name}"]).report) for name in (TABLE, BY_LENGTH)]
    assert all(isinstance(report, SummaryReport) for report in found)
    return found  # type: ignore[return-value]


def verdicts(runs: list[RunRecord]) -> dict[str, tuple[str, str]]:
    """Name of a claim about summaries -> verdict and what was measured."""
    known = {report.name: (report, select_runs(report, "laptop", runs)) for report in reports()}
    evidence: Any = Evidence({}, None, None, {}, known)  # type: ignore[arg-type]
    found = {claim.name: claim.judge(evidence) for claim in summary_claims()}
    return {name: (finding.verdict, finding.measured) for name, finding in found.items()}


def baseline(name: str, values: Sequence[float], **more: Any) -> list[RunRecord]:
    model, _, long = name.partition("_")
    how = "alternating" if long else "none"
    return summaries(model, {LENGTH: values}, name=name, trained={"model.unlimiformer": how}, **more)


def baselines(values: Sequence[float], **other: Sequence[float]) -> list[RunRecord]:
    return [run for name in BASELINES for run in baseline(name, other.get(name, values))]


def test_every_claim_is_open_until_there_are_runs() -> None:
    names = [claim.name for claim in summary_claims()]
    assert len(names) == len(set(names)) == 6
    found = of_all(summaries("infini_linear", {LENGTH: (1, 2, 3)}))
    assert [found.pop(name)[0] for name in names if name != "booksum_values"] == [OPEN] * 5
    assert found["booksum_values"][0] == "not testable at this scale"
    assert list(verdicts([]).values()) == [(OPEN, "")] * 6


@pytest.mark.parametrize(
    ("values", "verdict"),
    [((11, 12, 13), "holds"), ((9, 10, 11), "does not hold"), ((10, 11, 12), "does not hold")],
    ids=["better", "worse", "same"],
)
def test_a_system_must_be_better_than_all_four(values: Sequence[float], verdict: str) -> None:
    ours = summaries("infini_linear", {LENGTH: values})
    found = verdicts([*ours, *baselines((10, 11, 12))])
    assert found["booksum_infini_linear"][0] == verdict and found["booksum_infini_delta"][0] == OPEN
    assert "over PRIMERA + Unlimiformer (1 seeds); 3 books" in found["booksum_infini_linear"][1]
    # One that is as good is enough against it.
    found = verdicts([*ours, *baselines((1, 2, 3), primera=values)])
    assert found["booksum_infini_linear"][0] == "does not hold"


def test_a_baseline_that_is_missing_leaves_open_what_the_others_do_not_refute() -> None:
    ours, others = summaries("infini_delta", {LENGTH: (11, 12, 13)}), baselines((10, 11, 12))
    verdict, measured = verdicts([*ours, *others[2:]])["booksum_infini_delta"]
    assert verdict == OPEN and measured.endswith("no runs to compare of BART")
    worse = summaries("infini_delta", {LENGTH: (1, 2, 3)})
    assert verdicts([*worse, *others[2:]])["booksum_infini_delta"][0] == "does not hold"
    # Another seed is no pair.
    assert verdicts([*summaries("infini_delta", {LENGTH: (11, 12, 13)}, seed=2), *others])["booksum_infini_delta"] == (
        OPEN,
        "",
    )


def test_a_difference_within_its_error_is_none() -> None:
    linear = summaries("infini_linear", {LENGTH: (10, 10, 10)})
    sure, unsure = (summaries("infini_delta", {LENGTH: values}) for values in ((11, 11.1, 11.2), (16, 9, 8.3)))
    assert verdicts([*linear, *sure])["booksum_delta"][0] == "holds"
    assert verdicts([*linear, *unsure])["booksum_delta"][0] == "does not hold"


def test_few_or_other_books_are_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [*summaries("infini_linear", {LENGTH: (10, 10, 10)}), *summaries("infini_delta", {LENGTH: (11, 11, 11)})]
    assert verdicts(runs)["booksum_delta"][0] == "holds"
    runs[-1].data = {**runs[-1].data, "revision": "another"}
    assert verdicts(runs)["booksum_delta"] == (OPEN, "on different books")
    runs[-1].data = runs[1].data
    monkeypatch.setattr(claims, "FEWEST_DOCUMENTS", 4)
    assert verdicts(runs)["booksum_delta"] == (OPEN, "on 3 books only")


def test_the_papers_values_stand_beside_ours_and_are_no_verdict() -> None:
    runs = [*summaries("infini_linear", {LENGTH: (9, 10, 11)}), *summaries("lead", {LENGTH: (9, 10, 11)})]
    assert verdicts(runs)["booksum_values"] == (
        "not testable at this scale",
        "Infini-Transformers (Linear) 10.0/10.0/10.0/10.0 (paper 37.9/8.7/17.6/18.0)",
    )


def by_length(values: Sequence[float], lengths: Sequence[int] = LENGTHS) -> Mapping[int, Sequence[float]]:
    """A book a little better than the others at each length."""
    return {1024 * length: (value, value + 1, value) for length, value in zip(lengths, values, strict=True)}


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ((5, 6, 7, 8, 9, 10), "holds"),
        ((5, 6, 5.9, 8, 9, 9), "holds"),
        ((5, 5, 5, 5, 5, 5), "does not hold"),
        ((10, 9, 8, 7, 6, 5), "does not hold"),
        ((5, 9, 9, 9, 9, 5), "does not hold"),
    ],
)
def test_with_more_text_the_score_must_rise(values: Sequence[float], verdict: str) -> None:
    runs = summaries("infini_linear", by_length(values), split="validation")
    found = verdicts(runs)
    assert found["booksum_lengths_infini_linear"][0] == verdict
    assert found["booksum_lengths_infini_delta"][0] == OPEN
    assert f"16K {values[0] + 1 / 3:.2f}, 32K" in found["booksum_lengths_infini_linear"][1]


def test_books_that_disagree_leave_no_sure_rise() -> None:
    up, down = (5, 6, 7, 8, 9, 10), (9, 8, 7, 6, 5, 4)
    mixed = {1024 * n: (a, b, b) for n, a, b in zip(LENGTHS, up, down[::-1], strict=True)}
    assert (
        verdicts(summaries("infini_linear", mixed, split="validation"))["booksum_lengths_infini_linear"][0] == "holds"
    )
    mixed = {1024 * n: (3 * a, b, b) for n, a, b in zip(LENGTHS, up, down, strict=True)}
    runs = summaries("infini_linear", mixed, split="validation")
    assert verdicts(runs)["booksum_lengths_infini_linear"][0] == "does not hold"


def test_a_length_that_is_missing_and_the_test_books_prove_no_rise() -> None:
    values = (5, 6, 7, 8, 9)
    runs = summaries("infini_linear", by_length(values, LENGTHS[1:]), split="validation")
    assert verdicts(runs)["booksum_lengths_infini_linear"] == (OPEN, "")
    test = summaries("infini_linear", by_length((5, *values)), split="test")
    assert verdicts(test)["booksum_lengths_infini_linear"] == (OPEN, "")
