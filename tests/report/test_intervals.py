"""Intervals contain the true value as often as they say, also where everything is right, and tests err as seldom."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from interval_simulations import CASES, LIMITS, Case, covered
from scipy import stats as scipy_stats

from infini.report import intervals

REPETITIONS = 400
ALLOWED = 0.95 - 3 * math.sqrt(0.95 * 0.05 / REPETITIONS)
"""Three standard errors of a share of so many repetitions below the nominal one."""


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.method}: {case.data}, truth {case.truth:.3g}")
def test_an_interval_covers_what_it_says(case: Case) -> None:
    ours, _ = covered(case, REPETITIONS, np.random.default_rng(1))
    assert ours >= ALLOWED - 0.02 * case.method.startswith("Student")


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.method}: {case.data}, truth {case.truth:.3g}")
def test_an_interval_covers_what_it_says_over_many_repetitions(case: Case) -> None:
    # 93 of 100 is what Student's t on the logit says of itself.
    ours, _ = covered(case, 4000, np.random.default_rng(2))
    assert ours >= (0.92 if case.method.startswith("Student") else 0.94)


@pytest.mark.parametrize(("case", "share"), zip(LIMITS, (0.48, 0.67), strict=True), ids=["3 seeds", "5 seeds"])
def test_what_the_interval_of_few_seeds_does_not_cover_is_as_it_says(case: Case, share: float) -> None:
    ours, _ = covered(case, 2000, np.random.default_rng(1))
    assert ours == pytest.approx(share, abs=0.035)


@pytest.mark.parametrize(("right", "n"), [(50, 50), (0, 50), (49, 50), (1, 10), (25, 50)])
def test_an_exact_match_has_the_library_s_interval(right: int, n: int) -> None:
    expected = scipy_stats.binomtest(right, n).proportion_ci(0.95, method="exact")
    assert intervals.proportion_interval(right, n) == pytest.approx((expected.low, expected.high), rel=1e-9)


def test_all_right_of_fifty_is_not_certainty() -> None:
    low, high = intervals.proportion_interval(50, 50)
    assert low == pytest.approx(0.025 ** (1 / 50)) and high == 1.0
    assert intervals.proportion_interval(0, 50)[1] == pytest.approx(1 - low)


@pytest.mark.parametrize(("right", "n", "expected"), [(48, 50, 0.9), (3, 50, 0.2), (50, 50, 0.98), (0, 50, 0.1)])
def test_p_values_are_the_library_s(right: int, n: int, expected: float) -> None:
    p, q = intervals.proportion_p(right, n, expected)
    assert p == pytest.approx(scipy_stats.binomtest(right, n, expected, alternative="greater").pvalue)
    assert q == pytest.approx(scipy_stats.binomtest(right, n, expected, alternative="less").pvalue)


def test_nothing_is_below_0_or_above_1() -> None:
    assert intervals.proportion_p(3, 50, -0.02) == (0.0, 1.0)
    assert intervals.proportion_p(50, 50, 1.02) == (1.0, 0.0)


@pytest.mark.parametrize(("right", "expected"), [(0, 0.0), (3, 0.0), (50, 0.0), (0, 1.0), (49, 1.0), (50, 1.0)])
def test_the_expected_outcome_is_no_evidence_against_itself(right: int, expected: float) -> None:
    """All right where all right is expected says nothing against it."""
    p, q = intervals.proportion_p(right, 50, expected)
    assert p == scipy_stats.binomtest(right, 50, expected, alternative="greater").pvalue
    assert q == scipy_stats.binomtest(right, 50, expected, alternative="less").pvalue


def test_the_lowest_of_many_cells_is_less_sure_than_one() -> None:
    cells = [(50.0, 50.0)] * 15
    low, high = intervals.minimum_interval(cells)
    assert low == pytest.approx((0.025 / 15) ** (1 / 50)) and high == 1.0
    assert intervals.minimum_interval([(45, 50), (50, 50)])[1] < 1


def test_seeds_that_differ_are_worth_fewer_prompts() -> None:
    assert intervals.effective_trials([1.0, 1.0, 1.0], 150) == 150
    assert intervals.effective_trials([0.9, 0.9, 0.9], 150) == 150
    assert intervals.effective_trials([0.5, 0.9, 1.0], 150) < 10
    assert intervals.effective_trials([0.5], 50) == 50


def test_more_prompts_do_not_make_seeds_alike() -> None:
    """Prompts reduce what chance adds to the variance of seeds, further seeds all of it."""
    shares, plain = [0.996, 0.968, 1.0], intervals.effective_trials([0.996, 0.968, 1.0], 150)
    assert intervals.effective_trials(shares, 150, times=1.0, n_seeds=3) == plain < 150
    # 50 prompts explain 0.00024 of the variance of the shares, 0.00030.
    many = intervals.effective_trials(shares, 150, times=1e9)
    assert plain < many == pytest.approx(plain * np.var(shares, ddof=1) / (np.var(shares, ddof=1) - 0.000237), rel=1e-2)
    assert intervals.effective_trials(shares, 150, times=1e9, n_seeds=20) > 20 * many / 3
    # If seeds agree, only prompts count.
    assert intervals.effective_trials([0.9, 0.9], 100, times=4) == 400
    assert intervals.effective_trials([0.9, 0.9], 100, times=4, n_seeds=3) == 600


def test_two_way_errors_by_hand() -> None:
    """Two documents of 10 tokens at two seeds: differences of one seed are alike, or those of one document."""
    documents, seeds, weights = ["a", "b", "a", "b"], [1, 1, 2, 2], [10.0] * 4
    # Clustered by seed 0.1 (0.1 and 0.3, over the root of 2), by document 0, by pair 0.1 / 1.5: no less than the first.
    found = intervals.two_way([1.0, 1.0, 3.0, 3.0], weights, documents, seeds)
    assert (found.mean, found.se, found.df) == pytest.approx((0.2, 0.1, 1))
    assert found.seeds_share == pytest.approx(1.0)
    assert found.half_width == pytest.approx(12.706 * 0.1, rel=1e-3)
    other = intervals.two_way([1.0, 3.0, 1.0, 3.0], weights, documents, seeds)
    assert (other.mean, other.se, other.seeds_share) == pytest.approx((0.2, 0.1, 0.0))
    # Both: variances add up, less that of pairs. Residuals -2, 0, 0, 2 over 10: seeds and documents 2 * 8 / 1600 each,
    # pairs 4 / 3 * 8 / 1600.
    both = intervals.two_way([0.0, 2.0, 2.0, 4.0], weights, documents, seeds)
    assert both.se**2 == pytest.approx((16 + 16 - 32 / 3) / 1600)
    one_seed = intervals.two_way([1.0, 3.0], weights[:2], documents[:2], [1, 1])
    assert (one_seed.mean, one_seed.se, one_seed.df) == pytest.approx((0.2, 0.1, 1))
    one_document = intervals.two_way([1.0, 3.0], weights[:2], ["a", "a"], [1, 2])
    assert math.isnan(one_document.se) and one_document.p == 1.0


def test_clustered_ratio_equals_the_computation_by_hand() -> None:
    # 9 / 40 in all; 6 / 20 without a and 3 / 20 without b, 0.075 away on either side; variance 1 / 2 * 2 * 0.075 ** 2.
    assert intervals.clustered([1, 2, 6], [10, 10, 20], ["a", "a", "b"]) == pytest.approx((0.225, 0.075**2, 2))
    # 9 / 40; 8 / 30, 7 / 30 and 3 / 20 without each; 40 ** 2 / (100 + 100 + 400) clusters.
    changes = (8 / 30 - 9 / 40, 7 / 30 - 9 / 40, 3 / 20 - 9 / 40)
    expected = 9 / 40, 2 / 3 * sum(change**2 for change in changes), 1600 / 600
    assert intervals.clustered([1, 2, 6], [10, 10, 20], ["a", "b", "c"]) == pytest.approx(expected)
    assert math.isnan(intervals.clustered([1.0, 2.0], [1, 1], ["a", "a"])[1])


def test_with_equal_clusters_the_error_is_that_of_a_mean() -> None:
    found = intervals.two_way([0.1, 0.4, 0.2, 0.7], [1.0] * 4, "abcd", [1] * 4)
    assert (found.se, found.df) == pytest.approx((np.std([0.1, 0.4, 0.2, 0.7], ddof=1) / 2, 3))


def test_more_seeds_help_as_far_as_seeds_are_what_scatters() -> None:
    found = intervals.Estimate(1.0, 1.0, 2, 10, 6.0, 3, seeds_share=1.0)
    assert found.with_more(12, 10).se == pytest.approx(0.5) and found.with_more(12, 10).df == pytest.approx(5)
    assert found.with_more(12, 20).df == pytest.approx(11)
    assert found.with_more(3, 40).df == 2
    assert replace(found, seeds_share=0.0).with_more(12, 10).se == pytest.approx(1.0)
    assert replace(found, seeds_share=0.0).with_more(3, 40).se == pytest.approx(0.5)


def test_p_values_of_a_mean_are_student_s() -> None:
    found = intervals.Estimate(0.3, 0.1, 2, 10, 10, 3)
    assert found.p == pytest.approx(2 * scipy_stats.t.sf(3.0, 2))
    above, below = found.p_values(0.1)
    assert above == pytest.approx(scipy_stats.t.sf(2.0, 2)) and below == pytest.approx(1 - above)
    exact = intervals.Estimate(0.0, 0.0, 2, 10, 10, 3)
    assert exact.p == 1.0 and exact.interval == (0.0, 0.0)


def test_holm_by_hand_and_in_any_order() -> None:
    assert intervals.holm([0.04, 0.01, 0.03]) == pytest.approx([0.06, 0.03, 0.06])
    assert intervals.holm([0.5]) == [0.5] and intervals.holm([]) == []


def test_holm_rejects_nothing_true_in_more_than_one_of_twenty_families() -> None:
    rng = np.random.default_rng(0)
    wrong = sum(min(intervals.holm(rng.random(9).tolist())) <= 0.05 for _ in range(2000))
    assert wrong / 2000 <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 2000)


def test_a_p_value_is_never_printed_as_0() -> None:
    assert list(map(intervals.p_value, (0.0, 0.00012, 0.0456, 0.5, 0.999))) == [
        "< 0.0001",
        "0.00012",
        "0.046",
        "0.5",
        "1",
    ]


@pytest.mark.parametrize(
    ("p", "text"),
    [
        *((0.0496, "0.0496"), (0.0504, "0.0504"), (0.049997, "0.049997"), (0.05, "0.05"), (0.044, "0.044")),
        *((0.3456, "0.35"), (0.9951, "1"), (0.00009, "< 0.0001"), (0.0001, "0.0001"), (1.0, "1")),
    ],
)
def test_a_p_value_shows_on_which_side_of_the_limit_it_is(p: float, text: str) -> None:
    assert intervals.p_value(p) == text


@pytest.mark.parametrize("n_seeds", [1, 3])
@pytest.mark.parametrize("tokens", [(100_000.0, 100.0), (100_000.0, 3_000.0, 2_000.0), (5.0, 0.0)])
def test_a_mean_that_is_almost_one_documents_has_no_error(tokens: tuple[float, ...], n_seeds: int) -> None:
    """Its interval would be as wide as the degrees of freedom are near 0, up to numbers of 150 digits."""
    pairs = [(w * (0.1 + 0.01 * at), w, at, seed) for seed in range(n_seeds) for at, w in enumerate(tokens)]
    found = intervals.two_way(*map(list, zip(*pairs, strict=True)))  # type: ignore[arg-type]
    assert found.mean == pytest.approx(sum(d for d, *_ in pairs) / sum(w for _, w, *_ in pairs))
    assert math.isnan(found.se) and math.isnan(found.half_width) and found.df == 0 and found.p == 1.0
