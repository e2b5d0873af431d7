"""What the scores of single books say of their mean: means over books and seeds, and their intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from infini.report.intervals import bounded_mean_interval

METRICS = ("rouge1", "rouge2", "rougeL")
"""Those of which the overall value is made."""
OVERALL = "overall"


def overall(means: np.ndarray) -> np.ndarray:
    """Geometric mean over the last axis: of mean R-1, R-2 and R-L, as the paper's column is."""
    found: np.ndarray = np.prod(means, axis=-1) ** (1 / means.shape[-1])
    return found


def influence(scores: np.ndarray) -> np.ndarray:
    """How much each book moves the overall value of its seed, to first order.

    Args:
        scores: [..., books, metrics], above 0 on the average.

    Returns:
        [..., books]; the mean over books is 0, and the standard error of the overall value is that of their mean.
    """
    means = scores.mean(-2)
    return overall(means)[..., None] * (scores / means[..., None, :] - 1).mean(-1)


def mean_with_interval(scores: np.ndarray) -> tuple[float, tuple[float, float] | None]:
    """The overall value, mean over seeds, and its interval over books; None where there is none.

    The interval is that of these models on other books: `infini.report.intervals.bounded_mean_interval`.

    Args:
        scores: [seeds, books, metrics]; of one metric its own mean is the overall value.
    """
    mean = float(overall(scores.mean(1)).mean())
    if not (scores.mean(1) > 0).all():
        return mean, None
    return mean, bounded_mean_interval(influence(scores).mean(0), mean)


def interval_over_books(cells: Sequence[Mapping[str, Any]], metric: str) -> tuple[float, float] | None:
    """Bounds of the interval over books (95 %) of a metric's mean over seeds; None where there is none.

    One seed has the interval that its evaluation recorded.

    Args:
        cells: Of each seed the scores at one length of the input, as evaluations record them.
        metric: A metric of every book, or `overall`.

    Raises:
        ValueError: No book is in all cells.
    """
    by_name = [{book["name"]: book for book in cell["books"]} for cell in cells]
    shared = [name for name in by_name[0] if all(name in books for books in by_name)]
    if not shared:
        raise ValueError("no book is in all cells")
    wanted = METRICS if metric == OVERALL else (metric,)
    # [seeds, books, metrics]
    scores = np.array([[[float(books[name][m]) for m in wanted] for name in shared] for books in by_name])
    return mean_with_interval(scores)[1]
