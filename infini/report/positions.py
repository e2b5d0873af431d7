"""The gap between the losses of two rows, by position in the document or by place in the segment."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from infini.errors import InputError
from infini.records import RunRecord
from infini.report.intervals import two_way
from infini.report.stats import by_seed, check_same_documents

BY_POSITION, BY_PLACE = "nll_by_position", "nll_by_place"
"""Series of an evaluation: losses by position in the document, and by place in the segment."""


def gap(
    runs: Sequence[RunRecord], baseline: Sequence[RunRecord], growth: float = 2.0, series: str = BY_POSITION
) -> np.ndarray:
    """Loss minus the baseline's, in nats a token: rows of (first position, last position, gap, half of its interval).

    It uses the seeds that both have, pairs runs by seed and document and clusters by both (infini.report.intervals). A
    bin ends at the first edge of the series that is at least `growth` times its start; the last bin ends with the
    longest document or segment. Positions that fewer than two documents reach are left out. The result is empty if no
    seed has the series in both, or, by place, if the segment lengths differ.
    """
    known = [[run for run in side if series in run.series] for side in (runs, baseline)]
    mine, theirs = (by_seed(side) for side in known)
    shared = sorted(mine.keys() & theirs.keys())
    if not shared:
        return np.empty((0, 4))
    reference = mine[shared[0]][0]
    edges = np.asarray(reference.series[series]["edges"], dtype=np.float64)
    if series == BY_PLACE and theirs[shared[0]][0].series[series]["edges"] != reference.series[series]["edges"]:
        return np.empty((0, 4))
    starts = _growing_bins(edges, growth)
    differences, tokens, names, seeds = [], [], [], []
    for seed in shared:
        nll_a, counts = _binned(mine[seed], reference, starts, series)
        nll_b, _ = _binned(theirs[seed], reference, starts, series)
        differences.append(nll_a - nll_b)
        tokens.append(counts)
        names += [str(document["name"]) for document in reference.documents]
        seeds += [seed] * len(reference.documents)
    difference, weight = np.concatenate(differences), np.concatenate(tokens)
    longest = max(sum(row) for row in reference.series[series]["tokens"])
    bounds = np.append(edges[starts], min(edges[-1], longest))
    points = []
    for index in range(len(starts)):
        reached = np.flatnonzero(weight[:, index] > 0)
        books = [names[row] for row in reached]
        if len(set(books)) < 2:
            continue
        found = two_way(
            list(difference[reached, index]), list(weight[reached, index]), books, [seeds[row] for row in reached]
        )
        if math.isfinite(found.mean):
            points.append((bounds[index], bounds[index + 1], found.mean, found.half_width))
    return np.array(points).reshape(-1, 4)


def _growing_bins(edges: np.ndarray, growth: float) -> list[int]:
    """Indices of the edges that start a bin. A bin ends at `growth` times its start or later."""
    starts = [0]
    for index in range(1, len(edges) - 1):
        if edges[index] >= edges[starts[-1]] * growth:
            starts.append(index)
    return starts


def _binned(
    runs: Sequence[RunRecord], reference: RunRecord, starts: list[int], name: str
) -> tuple[np.ndarray, np.ndarray]:
    """Loss in nats, averaged over `runs`, and tokens: [documents of `reference`, bins]."""
    losses = []
    counts = np.empty((0, 0))
    edges = reference.series[name]["edges"]
    for run in runs:
        check_same_documents(run, reference)
        series = run.series[name]
        if series["edges"] != edges:
            raise InputError(f"runs {run.run_id} and {reference.run_id} have losses at different positions")
        rows = {document["name"]: row for row, document in enumerate(run.documents)}
        order = [rows[document["name"]] for document in reference.documents]
        loss, counts = (
            np.add.reduceat(_grid(series[kind], len(edges) - 1)[order], starts, axis=1) for kind in ("nll", "tokens")
        )
        losses.append(loss)
    return np.mean(losses, axis=0), counts


def _grid(rows: Sequence[Sequence[Any]], width: int) -> np.ndarray:
    """Rows padded to one width, because documents may end before the last bin. A loss of null becomes NaN."""
    return np.array([[*row, *[0.0] * (width - len(row))] for row in rows], dtype=np.float64)
