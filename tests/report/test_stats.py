"""Differences between losses: paired by seed and book, clustered by both."""

from __future__ import annotations

import math

import pytest
from report_runs import TOKENS, make_eval

from infini.bench import training as bench_training
from infini.errors import InputError
from infini.records import RunRecord
from infini.report import stats


def test_what_a_control_loses_by_the_same_change_is_subtracted() -> None:
    def runs(model: str, loss: float, slope: float = 0.0) -> list[RunRecord]:
        """Three seeds; the loss of each document is higher by `slope` for each seed."""
        return [make_eval(model, seed, loss + slope * seed) for seed in (1, 2, 3)]

    long, usual = runs("infini_linear", 4.3), runs("infini_delta", 4.1)
    alone = stats.paired_difference(long, usual)
    control = runs("local", 4.2), runs("full", 4.15, slope=0.01)
    effect = stats.paired_difference(long, usual, *control)
    assert alone is not None and effect is not None
    assert alone.mean == pytest.approx(0.2)
    # 0.2 less 0.05 - 0.01 seed, whose mean over three seeds is 0.03.
    assert effect.mean == pytest.approx(0.2 - (0.05 - 0.02))
    assert effect.se > alone.se
    assert set(effect.run_ids) == {
        f"eval-{m}-{s}" for m in ("infini_linear", "infini_delta", "local", "full") for s in (1, 2, 3)
    }
    # Seeds that all four have.
    fewer = stats.paired_difference(long, usual, control[0][:2], control[1])
    assert fewer is not None and fewer.n_seeds == 2
    control[1][0].documents[0]["nll"] = None
    assert stats.paired_difference(long, usual, *control) is None


def test_paired_difference_pairs_shared_seeds_and_weighs_books_by_tokens() -> None:
    model = [make_eval("infini_linear", seed, 3.9) for seed in (1, 2, 3)]
    for run in model:
        run.documents[2]["nll"] += 4000 * 0.07
    effect = stats.paired_difference(model, [make_eval("local", seed, 4.0) for seed in (2, 3, 4)])
    assert effect is not None
    assert effect.mean == pytest.approx(-0.1 + 0.07 * 4 / 7, rel=1e-9)
    # The mean without each book in turn, over both seeds. Seeds are alike, and single pairs scatter less.
    books = list(zip(TOKENS, (-0.1, -0.1, -0.03), strict=True))
    without = [[book for book in books if book != left_out] for left_out in books]
    changes = [sum(w * d for w, d in rest) / sum(w for w, _ in rest) - effect.mean for rest in without]
    assert effect.se == pytest.approx(math.sqrt(2 / 3 * sum(change**2 for change in changes)), rel=1e-9)
    assert effect.df == 1
    assert (effect.n_documents, effect.n_seeds) == (3, 2)
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
    assert (foreign.n_documents, foreign.n_seeds) == (3, 2)
    assert stats.knockout_cost([make_eval("local", 1)], "reset") is None


def test_two_runs_of_one_seed_count_as_one_run() -> None:
    seeds = [make_eval("infini_linear", seed, knockouts=True) for seed in (1, 2)]
    again = make_eval("infini_linear", 1, knockouts=True, run_id="again")
    for entry in seeds[1].documents:
        entry["nll_reset"] += 0.2 * entry["tokens"]
    once, twice = stats.knockout_cost(seeds, "reset"), stats.knockout_cost([*seeds, again], "reset")
    assert once is not None and twice is not None
    assert (twice.mean, twice.se, twice.df) == pytest.approx((once.mean, once.se, once.df))
    # A run that has no knock-outs says nothing of them.
    without = make_eval("infini_linear", 1, run_id="without")
    more = stats.knockout_cost([*seeds, without], "reset")
    assert more is not None and once is not None
    assert (more.mean, more.se, more.df) == pytest.approx((once.mean, once.se, once.df))
    baseline = [make_eval("local", seed, 4.1) for seed in (1, 2)]
    once, twice = (stats.paired_difference(runs, baseline) for runs in (seeds, [*seeds, again]))
    assert once is not None and twice is not None
    assert (twice.mean, twice.se, twice.df) == pytest.approx((once.mean, once.se, once.df))


def test_quartiles() -> None:
    assert bench_training.quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == (2.0, 3.0, 4.0)
    assert bench_training.quartiles([7.0]) == (7.0, 7.0, 7.0)


def test_seeds_that_differ_make_every_difference_unsure() -> None:
    far = [make_eval("infini_linear", seed, loss) for seed, loss in ((1, 3.9), (2, 3.8))]
    effect = stats.paired_difference(far, [make_eval("local", seed) for seed in (1, 2)])
    assert effect is not None
    assert (effect.mean, effect.se) == pytest.approx((-0.15, 0.05))
    # Two seeds leave one degree of freedom.
    assert effect.p > 0.2
    runs = [make_eval("infini_linear", seed, knockouts=True) for seed in (1, 2)]
    for entry in runs[1].documents:
        entry["nll_reset"] += 0.2 * entry["tokens"]
    cost = stats.knockout_cost(runs, "reset")
    assert cost is not None and cost.se == pytest.approx(0.1)


def test_long_books_count_for_more_than_one_of_many() -> None:
    effect = stats.paired_difference([make_eval("local", 1)], [make_eval("full", 1)])
    assert effect is not None and effect.effective_documents == pytest.approx(49 / 21)
    assert effect.df == pytest.approx(49 / 21 - 1)


@pytest.mark.parametrize(("tokens", "bins"), [((40.0, 40.0), 5), ((1.0, 40.0), 4)], ids=["two books", "hardly two"])
def test_a_position_that_one_document_fills_is_left_out(tokens: tuple[float, float], bins: int) -> None:
    """If one book had 40 tokens in 41, the interval over books would be hundreds of times as wide as the others."""
    runs = [make_eval("full", 1, 3.9), make_eval("local", 1, 4.0)]
    for run, loss in zip(runs, (3.9, 4.0), strict=True):
        for kind, factor in (("tokens", 1.0), ("nll", loss)):
            for row, number in zip(run.series["nll_by_position"][kind][1:], tokens, strict=True):
                row[-1] = number * factor
    assert len(stats.gap(runs[:1], runs[1:])) == bins


def test_the_last_positions_end_with_the_longest_document() -> None:
    runs = [make_eval("full", 1, 3.9), make_eval("local", 1, 4.0)]
    for run in runs:
        run.series["nll_by_position"]["edges"] = [0, 250, 500, 1000, 1500, 6000]
    assert stats.gap(runs[:1], runs[1:])[-1, :2].tolist() == [1000, 4000]


def test_documents_are_paired_by_name_in_whatever_order_they_were_read() -> None:
    runs = [make_eval("full", 1, 3.9), make_eval("local", 1, 4.0)]
    expected = stats.gap(runs[:1], runs[1:])
    runs[1].documents.reverse()
    for kind in ("tokens", "nll"):
        runs[1].series["nll_by_position"][kind].reverse()
    assert stats.gap(runs[:1], runs[1:]) == pytest.approx(expected)
    whole = stats.paired_difference(runs[:1], runs[1:])
    assert whole is not None and whole.mean == pytest.approx(-0.1)
