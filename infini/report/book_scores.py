"""Means of scores over books and seeds, and their intervals and differences."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from infini.report.intervals import Estimate, bounded_mean_interval, two_way

if TYPE_CHECKING:
    from infini.records import RunRecord
    from infini.report.selection import Selection

METRICS = ("rouge1", "rouge2", "rougeL")
"""Metrics that make the overall value."""
OVERALL = "overall"


def overall(means: np.ndarray) -> np.ndarray:
    """Geometric mean over the last axis, which holds mean R-1, R-2 and R-L, as in the paper's column."""
    found: np.ndarray = np.prod(means, axis=-1) ** (1 / means.shape[-1])
    return found


def influence(scores: np.ndarray) -> np.ndarray:
    """The effect of each book on the overall value of its seed, to first order, [..., books]: its mean over books is 0,
    and the standard error of the overall value is that of the mean. scores: [..., books, metrics], means above 0."""
    means = scores.mean(-2)
    return overall(means)[..., None] * (scores / means[..., None, :] - 1).mean(-1)


def mean_with_interval(scores: np.ndarray) -> tuple[float, tuple[float, float] | None]:
    """The overall value, mean over seeds, and its interval over books, or None if there is no interval.

    The interval says what these models would score on other books; see `intervals.bounded_mean_interval`. scores:
    [seeds, books, metrics]; with one metric its mean is the overall value.
    """
    mean = float(overall(scores.mean(1)).mean())
    if not (scores.mean(1) > 0).all():
        return mean, None
    return mean, bounded_mean_interval(influence(scores).mean(0), mean)


def interval_over_books(cells: Sequence[Mapping[str, Any]], metric: str) -> tuple[float, float] | None:
    """The interval over books (95 %) of a metric's mean over seeds, or None if there is none; ValueError if no book is
    in all cells. With one seed this is the interval that its evaluation recorded.

    cells: the scores of each seed at one input length, as evaluations record them. metric: of every book, or `overall`.
    """
    by_name = [{book["name"]: book for book in cell["books"]} for cell in cells]
    shared = [name for name in by_name[0] if all(name in books for books in by_name)]
    if not shared:
        raise ValueError("no book is in all cells")
    wanted = METRICS if metric == OVERALL else (metric,)
    # [seeds, books, metrics]
    scores = np.array([[[float(books[name][m]) for m in wanted] for name in shared] for books in by_name])
    return mean_with_interval(scores)[1]


def cells_at(runs: Iterable[RunRecord], length: int) -> list[tuple[RunRecord, dict[str, Any]]]:
    """The runs that have scores at an input length, with these scores. Those of a reference count at every length."""
    found = [(run, cell) for run in runs for cell in run.series.get("cells", ())]
    return [(run, cell) for run, cell in found if cell.get("length") in (None, length)]


def tokens_read(runs: Iterable[RunRecord], length: int) -> float:
    """Tokens of a book that are read if at most `length` are, the geometric mean over books: books may end before.
    `length` where records do not say how many."""
    found = [book.get("tokens_read") for _, cell in cells_at(runs, length) for book in cell["books"]]
    return float(np.exp(np.mean(np.log(found)))) if found and all(found) else float(length)


def slope_weights(lengths: Sequence[float]) -> np.ndarray | None:
    """Weights of values at these lengths whose sum is their slope over a doubling (least squares); None where the
    lengths are all the same."""
    doublings = np.log2(lengths)
    if np.ptp(doublings) < 1e-6:
        return None
    weights: np.ndarray = (doublings - doublings.mean()) / ((doublings - doublings.mean()) ** 2).sum()
    return weights


def difference_of_scores(
    selection: Selection, wanted: Sequence[tuple[str, int]], weights: np.ndarray | None
) -> tuple[Estimate, tuple[str, ...]] | None:
    """The weighted sum of the Overall of every (row, length), clustered by book and seed, and the ids of the runs; None
    without weights or if no seed has all.

    None, too, if a metric is 0 in every book of a seed: its Overall is 0 whatever one book scores, and has no interval.
    """
    scores, names, used = _scores(selection, wanted)
    if weights is None or not scores or not all((found.mean(1) > 0).all() for found in scores.values()):
        return None
    # Overall of a seed as each book alone gives it, to first order. The mean over books is the Overall.
    pseudo = {seed: weights @ (overall(found.mean(1))[:, None] + influence(found)) for seed, found in scores.items()}
    values = [value for found in pseudo.values() for value in found.tolist()]
    seeds = [seed for seed in pseudo for _ in names]
    return two_way(values, [1.0] * len(values), names * len(pseudo), seeds), used


def _scores(
    selection: Selection, wanted: Sequence[tuple[str, int]]
) -> tuple[dict[int, np.ndarray], list[str], tuple[str, ...]]:
    """Seed -> R-1, R-2 and R-L, [wanted, books, 3], for the seeds that all of `wanted` share; the shared books; and the
    ids of the runs."""
    found = [_books(selection.runs.get(row, ()), length) for row, length in wanted]
    seeds = sorted(set.intersection(*(set(of) for of in found))) if found else []
    books = [set(of[seed][1]) for of in found for seed in seeds]
    shared = sorted(set.intersection(*books)) if books else []
    if not shared:
        return {}, [], ()
    scores = {seed: np.array([[of[seed][1][name] for name in shared] for of in found]) for seed in seeds}
    return scores, shared, tuple(dict.fromkeys(of[seed][0] for seed in seeds for of in found))


def _books(runs: Sequence[RunRecord], length: int) -> dict[int, tuple[str, dict[str, list[float]]]]:
    """Seed -> run id, and book -> its R-1, R-2 and R-L at an input length."""
    return {
        run.seed: (run.run_id, {book["name"]: [float(book[metric]) for metric in METRICS] for book in cell["books"]})
        for run, cell in cells_at(runs, length)
    }
