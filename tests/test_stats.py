"""Differences between losses: paired by seed and book, with errors that are as large as the scatter they stand for."""

from __future__ import annotations

import math

import numpy as np
import pytest
from report_runs import TOKENS, make_eval

from infini.commands import bench_training
from infini.errors import InputError
from infini.report import stats


def test_clustered_ratio_equals_the_computation_by_hand() -> None:
    # ratio = (1 + 2 + 6) / (10 + 10 + 20) = 0.225; residuals -1.25, -0.25, 1.5; clusters a = -1.5, b = 1.5;
    # variance = 2 / 1 * (2.25 + 2.25) / 1600.
    ratio, error = stats.clustered_ratio([1, 2, 6], [10, 10, 20], ["a", "a", "b"])
    assert ratio == pytest.approx(0.225, rel=1e-12)
    assert error == pytest.approx(math.sqrt(2 * 4.5 / 1600), rel=1e-12)


def test_one_cluster_has_no_error() -> None:
    assert math.isnan(stats.clustered_ratio([1.0, 2.0], [1, 1], ["a", "a"])[1])


def test_clustered_error_matches_the_scatter_of_the_estimate_where_a_plain_error_does_not() -> None:
    rng = np.random.default_rng(0)
    n_books, n_seeds, n_trials = 30, 3, 400
    clusters = [book for book in range(n_books) for _ in range(n_seeds)]
    weights = np.repeat(rng.integers(500, 1500, n_books), n_seeds).astype(float)
    estimates, clustered, plain = [], [], []
    for _ in range(n_trials):
        per_token = np.repeat(rng.normal(0.0, 0.1, n_books), n_seeds) + rng.normal(0.0, 0.02, n_books * n_seeds)
        ratio, error = stats.clustered_ratio(list(per_token * weights), list(weights), clusters)
        estimates.append(ratio)
        clustered.append(error)
        plain.append(stats.clustered_ratio(list(per_token * weights), list(weights), range(len(weights)))[1])
    scatter = np.std(estimates)
    assert np.mean(clustered) == pytest.approx(scatter, rel=0.1)
    assert np.mean(plain) < 0.75 * scatter


def test_paired_difference_pairs_shared_seeds_and_weighs_books_by_tokens() -> None:
    model = [make_eval("infini_linear", seed, 3.9) for seed in (1, 2, 3)]
    for run in model:
        run.documents[2]["nll"] += 4000 * 0.07
    effect = stats.paired_difference(model, [make_eval("local", seed, 4.0) for seed in (2, 3, 4)])
    assert effect is not None
    assert effect.mean == pytest.approx(-0.1 + 0.07 * 4 / 7, rel=1e-9)
    # Residuals a book, over both seeds: tokens * (d - mean) * 2.
    residuals = [2 * tokens * (d - effect.mean) for tokens, d in zip(TOKENS, (-0.1, -0.1, -0.03), strict=True)]
    assert effect.se == pytest.approx(math.sqrt(3 / 2 * sum(e * e for e in residuals)) / 14000, rel=1e-9)
    assert effect.t == pytest.approx(effect.mean / effect.se)
    assert (effect.n_books, effect.n_seeds) == (3, 2)
    assert set(effect.run_ids) == {f"eval-{m}-{s}" for m in ("infini_linear", "local") for s in (2, 3)}


def test_no_shared_seed_is_no_difference() -> None:
    assert stats.paired_difference([make_eval("infini_linear", 1)], [make_eval("local", 2)]) is None


def test_a_loss_that_is_not_finite_is_no_difference() -> None:
    diverged = make_eval("infini_linear", 1)
    diverged.documents[1]["nll"] = None
    assert stats.paired_difference([diverged], [make_eval("local", 1)]) is None


def test_runs_over_different_tokens_are_not_paired() -> None:
    other = make_eval("local", 1)
    other.documents[1]["tokens"] += 1
    with pytest.raises(InputError, match=r"eval-local-1 and eval-infini_linear-1.*'beta'"):
        stats.paired_difference([make_eval("infini_linear", 1)], [other])


def test_knockouts_are_compared_with_the_same_model_on_the_same_tokens() -> None:
    runs = [make_eval("infini_linear", seed, knockouts=True) for seed in (1, 2)]
    reset, foreign = stats.knockout_cost(runs, "reset"), stats.knockout_cost(runs, "foreign")
    assert reset is not None
    assert foreign is not None
    assert reset.mean == pytest.approx(0.1 + 3 / 7000, rel=1e-9)
    assert foreign.mean == pytest.approx(0.1 + 6 / 3500, rel=1e-9)
    assert (foreign.n_books, foreign.n_seeds) == (3, 2)
    assert stats.knockout_cost([make_eval("local", 1)], "reset") is None


def test_quartiles() -> None:
    assert bench_training.quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == (2.0, 3.0, 4.0)
    assert bench_training.quartiles([7.0]) == (7.0, 7.0, 7.0)


def test_the_error_is_the_larger_of_those_over_books_and_over_seeds() -> None:
    """By hand: two books of 10 tokens at two seeds; differences of one seed are alike, or those of one book."""
    books, seeds, weights = ["a", "b", "a", "b"], [1, 1, 2, 2], [10.0] * 4
    alike_by_seed = [1.0, 1.0, 3.0, 3.0]
    assert stats.clustered_ratio(alike_by_seed, weights, books)[1] == 0
    # 0.1 and 0.3: their standard deviation over the root of 2.
    assert stats.ratio_with_error(alike_by_seed, weights, books, seeds) == pytest.approx((0.2, 0.1))
    assert stats.ratio_with_error([1.0, 3.0, 1.0, 3.0], weights, books, seeds) == pytest.approx((0.2, 0.1))
    assert stats.ratio_with_error([1.0, 3.0], weights[:2], books[:2], [1, 1]) == pytest.approx((0.2, 0.1))
    assert math.isnan(stats.ratio_with_error([1.0, 3.0], weights[:2], ["a", "a"], [1, 2])[1])


def test_seeds_that_differ_make_every_difference_unsure() -> None:
    far = [make_eval("infini_linear", seed, loss) for seed, loss in ((1, 3.9), (2, 3.8))]
    effect = stats.paired_difference(far, [make_eval("local", seed) for seed in (1, 2)])
    assert effect is not None
    assert (effect.mean, effect.se) == pytest.approx((-0.15, 0.05))
    runs = [make_eval("infini_linear", seed, knockouts=True) for seed in (1, 2)]
    for entry in runs[1].documents:
        entry["nll_reset"] += 0.2 * entry["tokens"]
    cost = stats.knockout_cost(runs, "reset")
    assert cost is not None and cost.se == pytest.approx(0.1)


def test_long_books_count_for_more_than_one_of_many() -> None:
    assert stats.effective_number([5.0, 5.0, 5.0], ["a", "b", "c"]) == pytest.approx(3)
    assert stats.effective_number([9.0, 1.0, 9.0, 1.0], ["a", "b", "a", "b"]) == pytest.approx(20**2 / (18**2 + 2**2))
    effect = stats.paired_difference([make_eval("local", 1)], [make_eval("full", 1)])
    assert effect is not None and effect.effective_books == pytest.approx(49 / 21)
