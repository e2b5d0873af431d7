"""The interval over books of a mean over seeds, and how the table of summaries says it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from summary_runs import on_the_logit, summaries

from infini.config.compose import compose
from infini.errors import InputError
from infini.records import RunRecord
from infini.report.book_scores import METRICS, difference_of_scores, interval_over_books
from infini.report.load import load_report
from infini.report.selection import Selection, select_runs
from infini.report.summaries import SummaryReport
from infini.report.tables import DASH
from infini.tasks.booksum.metrics import OVERALL, TYPES, over_books


def cell(scores: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Book -> R-1, R-2, R-L and R-Lsum, as an evaluation records them."""
    return {"books": [{"name": name, **dict(zip(TYPES, values, strict=True))} for name, values in scores.items()]}


def alike(values: Sequence[float]) -> dict[str, Any]:
    """Books a, b, ... of which all metrics are one number each."""
    return cell({name: [value] * len(TYPES) for name, value in zip("abcdef", values, strict=False)})


def test_one_seed_has_the_interval_of_its_evaluation() -> None:
    scores = np.random.default_rng(1).uniform(1, 30, (7, len(TYPES)))
    expected = over_books([dict(zip(TYPES, row, strict=True)) for row in scores.tolist()])
    made = cell({str(number): row for number, row in enumerate(scores.tolist())})
    for metric in (*TYPES, OVERALL):
        assert interval_over_books([made], metric) == pytest.approx(expected[metric][1:], rel=1e-12)


def interval(cells: Sequence[dict[str, Any]], metric: str) -> tuple[float, float]:
    found = interval_over_books(cells, metric)
    assert found is not None
    return found


def test_the_interval_is_student_s_on_the_logit() -> None:
    assert interval([alike([1, 3, 2])], "rouge1") == pytest.approx(on_the_logit([1, 3, 2]))
    # If all metrics of a book are one number, so is the overall value.
    assert interval([alike([1, 3, 2])], OVERALL) == pytest.approx(on_the_logit([1, 3, 2]))


def test_no_score_is_above_100_or_below_0() -> None:
    low, high = interval([alike([1, 90])], "rouge1")
    assert 0 < low < 1 and 99 < high < 100


def test_one_book_or_scores_of_zero_give_no_interval() -> None:
    assert interval_over_books([alike([3])], "rouge1") is None
    assert interval_over_books([alike([0, 0, 0])], OVERALL) is None
    mean, low, high = over_books([dict.fromkeys(TYPES, 0.0)] * 3)[OVERALL]
    assert (mean, low, high) == (0.0, None, None)


def test_the_same_books_are_compared_in_every_seed() -> None:
    # Where one seed scores more on a book, the other scores less: the mean over seeds is 2 for every book.
    opposite = [alike([1, 3, 2]), alike([3, 1, 2])]
    assert interval(opposite, "rouge1") == pytest.approx((2.0, 2.0))
    assert interval(opposite, OVERALL) == pytest.approx((2.0, 2.0))


def test_the_overall_value_is_made_of_means_over_books() -> None:
    """Books that differ in their metrics, but not in what these add to the overall value, do not make it unsure."""
    apart = [cell({"a": [8, 1, 1, 0], "b": [1, 8, 1, 0]})]
    assert interval(apart, METRICS[0]) == pytest.approx(on_the_logit([8, 1]))
    assert interval(apart, OVERALL) == pytest.approx((4.5 ** (2 / 3),) * 2)


def test_the_interval_is_about_the_mean_over_seeds() -> None:
    """The interval of the first seed does not contain the mean if the others are far from it."""
    cells = [alike([10, 10.1, 10.2]), alike([20, 20.1, 20.2]), alike([20, 20.1, 20.2])]
    low, high = interval(cells, OVERALL)
    assert low < 16.77 < high and high - low < 1
    assert interval(cells[:1], OVERALL)[1] < 11


def test_books_that_a_seed_lacks_count_in_none() -> None:
    fewer = cell({"b": [3] * 4, "a": [1] * 4})
    assert interval([alike([1, 3, 1000]), fewer], "rouge2") == pytest.approx(on_the_logit([1, 3]))
    with pytest.raises(ValueError, match="no book is in all cells"):
        interval_over_books([alike([1, 3]), cell({"z": [3] * 4})], "rouge2")


def test_rows_are_compared_on_the_books_that_both_have() -> None:
    more, fewer = (summaries(model, {0: (3, 5, 40)})[1] for model in ("infini_linear", "infini_delta"))
    del fewer.series["cells"][0]["books"][2]
    for book in fewer.series["cells"][0]["books"]:
        book |= dict.fromkeys(METRICS, 2.0)
    for runs in ({"a": [more], "b": [fewer]}, {"b": [more], "a": [fewer]}):
        found = difference_of_scores(Selection(runs, {}), [("a", 0), ("b", 0)], np.array([1.0, -1.0]))
        assert found is not None and found[0].n_documents == 2
        assert abs(found[0].mean) == pytest.approx(2.0)


def reference(model: str, scores: Sequence[Sequence[float]]) -> list[RunRecord]:
    """Evaluations of a reference, one a seed, with a score of each of three books."""
    runs = []
    for seed, values in enumerate(scores, 1):
        run = summaries(model, {0: values}, seed=seed)[1]
        run.series["cells"][0]["length"] = run.parent = None
        runs.append(run)
    return runs


def test_a_reference_that_no_seed_changes_is_not_three() -> None:
    report = load_report(compose(["report=table4_booksum"]).report)
    assert isinstance(report, SummaryReport)
    runs = reference("lead", [(1, 2, 6)] * 3) + reference("random", [(1, 2, 6), (2, 3, 7), (3, 4, 8)])
    # The same of a model is no accident, and stands there.
    for seed in (1, 2, 3):
        runs += summaries("infini_linear", {500 * 1024: (5, 5, 5)}, seed=seed)
    (table,) = report.render("laptop", runs, None).tables
    cells = {row.model: row.cells[table.columns.index("R-1")].text for row in table.rows}
    lead, random = on_the_logit([1, 2, 6]), on_the_logit([2, 3, 7])
    assert cells["lead/published"] == f"3.0 [{lead[0]:.1f}, {lead[1]:.1f}]"
    # Its influence is the mean over seeds of what each book moves, in which all three are alike.
    assert cells["random/published"] == f"4.0 ± 1.0 (3) [{random[0]:.1f}, {random[1]:.1f}]"
    assert cells["infini_linear/published"] == "5.0 ± 0.0 (3) [5.0, 5.0]"


def test_beside_the_scores_stands_how_much_of_a_book_was_read_and_of_one_book_no_interval() -> None:
    report = load_report(compose(["report=table4_booksum"]).report)
    assert isinstance(report, SummaryReport)
    runs = summaries("infini_linear", {500 * 1024: (1, 2, 6)})
    for book, count in zip(runs[-1].series["cells"][0]["books"], (1000, 2000, 6001), strict=True):
        book["tokens_read"] = count
    human = reference("human", [(1, 2, 6)])
    human[0].series["cells"][0]["books"] = human[0].series["cells"][0]["books"][:1]
    (table,) = report.render("laptop", runs + human, None).tables
    cells = {row.model: dict(zip(table.columns, row.cells, strict=True)) for row in table.rows}
    assert cells["infini_linear/published"]["Tokens read"].text == "3,000"
    assert cells["infini_linear/paper"]["Tokens read"].origin == "missing"
    assert cells["human/published"]["Tokens read"].origin == "missing"
    assert cells["human/published"]["R-1"].text == "3.0" and cells["human/published"]["Books"].text == "1"


@pytest.mark.parametrize("newer_lengths", [(64,), (64, 128), (64, 256), (64, 128, 256)])
def test_a_newer_run_takes_the_cells_that_it_fills_and_no_others(newer_lengths: Sequence[int]) -> None:
    words = ["report=booksum_lengths", "report.input_lengths=[64,128,256]"]
    parent, older = summaries("infini_linear", {64: [1, 1, 1], 128: [2, 2, 2]}, split="validation")
    scores = {length: [length / 10] * 3 for length in newer_lengths}
    _, newer = summaries(
        "infini_linear", scores, split="validation", name="newer", started="2025", parent=parent.run_id
    )
    runs = [parent, older, newer]
    disputed = load_report(compose(words).report)
    assert isinstance(disputed, SummaryReport)
    with pytest.raises(InputError, match="two runs for seed 1"):
        select_runs(disputed, "laptop", runs)
    report = load_report(compose([*words, "report.aggregate=newest"]).report)
    assert isinstance(report, SummaryReport)
    table = report.render("laptop", runs).tables[0]
    (row,) = [row for row in table.rows if row.model.startswith("infini_linear")]
    shown = {length: text.text.split()[0] for length, text in zip((64, 128, 256), row.cells[1:], strict=True)}
    older_scores = {128: "2.0"} if 128 not in newer_lengths else {}
    expected = older_scores | {length: f"{length / 10:.1f}" for length in newer_lengths}
    assert shown == dict.fromkeys((64, 128, 256), DASH) | expected
    # The records themselves stay as they are.
    assert [cell["length"] for cell in older.series["cells"]] == [64, 128]
