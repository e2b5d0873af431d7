"""Means of scores over books and seeds, and their intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from infini.report.intervals import bounded_mean_interval

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
