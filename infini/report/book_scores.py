"""What the scores of single books say of their mean: the bootstrap over books, of several seeds together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

METRICS = ("rouge1", "rouge2", "rougeL")
"""Those of which the overall value is made."""
OVERALL = "overall"
RESAMPLES, LEVEL = 2000, 0.95


def overall(means: np.ndarray) -> np.ndarray:
    """Geometric mean over the last axis: of mean R-1, R-2 and R-L, as the paper's column is."""
    found: np.ndarray = np.prod(means, axis=-1) ** (1 / means.shape[-1])
    return found


def interval_over_books(cells: Sequence[Mapping[str, Any]], metric: str) -> tuple[float, float]:
    """Bounds of the bootstrap interval over books (95 %) of a metric's mean over seeds.

    Every resample draws the same books of each seed. One seed has the interval that its evaluation recorded.

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
    drawn = np.random.default_rng(0).integers(len(shared), size=(RESAMPLES, len(shared)))
    resampled = overall(scores[:, drawn].mean(2)).mean(0)
    low, high = np.quantile(resampled, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)
