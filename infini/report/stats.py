"""Differences in loss and their uncertainty, paired by seed and document and clustered by both: of whole documents, and
by position in the document or by place in the segment.

The estimate is sum(d) / sum(w) over all (seed, document) pairs. d is a difference of total negative log-likelihoods in
nats and w the number of tokens in the sum, so the unit is nats per token. Errors come from
`infini.report.intervals.two_way`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from infini.errors import InputError
from infini.records import RunRecord
from infini.report.intervals import Estimate, two_way

BY_POSITION, BY_PLACE = "nll_by_position", "nll_by_place"
"""Series of an evaluation: losses by position in the document, and by place in the segment."""
Knockout = Literal["reset", "foreign"]
Pair = tuple[float, float, str, int]
"""A difference of total losses in nats, the tokens behind it, the document and the seed."""


@dataclass(frozen=True)
class Effect(Estimate):
    """A difference of losses in nats per token."""

    run_ids: tuple[str, ...] = ()
    adjusted_p: float | None = None
    """The p-value, adjusted for all comparisons of a table; None: it is not tested."""


def by_seed(runs: Sequence[RunRecord]) -> dict[int, list[RunRecord]]:
    """Runs grouped by their seed, seeds in ascending order."""
    grouped: dict[int, list[RunRecord]] = {}
    for run in sorted(runs, key=lambda record: (record.seed, record.started, record.run_id)):
        grouped.setdefault(run.seed, []).append(run)
    return grouped


def paired_difference(
    runs_a: Sequence[RunRecord],
    runs_b: Sequence[RunRecord],
    control_a: Sequence[RunRecord] = (),
    control_b: Sequence[RunRecord] = (),
) -> Effect | None:
    """Loss of `runs_a` minus loss of `runs_b` on the same documents. Below 0, a is better.

    Runs are paired by seed; several runs of one seed count as their mean. None if no seed has runs of both, or if a
    loss is not finite (null in its record). With controls, the difference between them is subtracted: what a control
    loses by the same change is not due to the model.

    Raises:
        InputError: two runs did not score the same documents with the same numbers of tokens. The message names both.
    """
    terms = [(1, by_seed(runs_a)), (-1, by_seed(runs_b))]
    if control_a or control_b:
        terms += [(-1, by_seed(control_a)), (1, by_seed(control_b))]
    shared = sorted(set.intersection(*(set(of_seed) for _, of_seed in terms)))
    if not shared:
        return None
    pairs: list[Pair] = []
    reference = terms[0][1][shared[0]][0]
    for seed in shared:
        losses = [(sign, _mean_nll(of_seed[seed], reference)) for sign, of_seed in terms]
        for document, entry in documents_of(reference).items():
            parts = [sign * nll[document] for sign, nll in losses if nll is not None]
            if len(parts) < len(terms):
                return None
            pairs.append((sum(parts), float(entry["tokens"]), document, seed))
    return _effect(pairs, [run for seed in shared for _, of_seed in terms for run in of_seed[seed]])


def _effect(pairs: Sequence[Pair], used: Sequence[RunRecord]) -> Effect | None:
    """The effect over pairs of a document and a seed; None if there are none."""
    if not pairs:
        return None
    differences, weights, clusters, seeds = zip(*pairs, strict=True)
    estimate = two_way(differences, weights, clusters, seeds)
    return Effect(**vars(estimate), run_ids=tuple(run.run_id for run in used))


def knockout_cost(runs: Sequence[RunRecord], knockout: Knockout) -> Effect | None:
    """Loss with a model's memory knocked out minus loss without, for the same model and tokens.

    `reset` treats every segment as the first. `foreign` gives the model the memory of another document. Documents
    without the knock-out are left out; None if no document has it.
    """
    knocked, normal, tokens = f"nll_{knockout}", f"nll_{knockout}_base", f"{knockout}_tokens"
    pairs: list[Pair] = []
    used: list[RunRecord] = []
    for seed, seed_runs in by_seed(runs).items():
        measured: dict[str, list[dict[str, float]]] = {}
        for run in seed_runs:
            found = {
                document: entry
                for document, entry in documents_of(run).items()
                if entry.get(knocked) is not None and entry.get(normal) is not None and entry.get(tokens)
            }
            if found:
                used.append(run)
            for document, entry in found.items():
                measured.setdefault(document, []).append(entry)
        for document, entries in measured.items():
            # Several runs of one seed have the weight of one run.
            for entry in entries:
                difference = (entry[knocked] - entry[normal]) / len(entries)
                pairs.append((difference, entry[tokens] / len(entries), document, seed))
    return _effect(pairs, used)


def documents_of(run: RunRecord) -> dict[str, dict[str, float]]:
    """The per-document entries of a run by document name; InputError if two share a name."""
    named = {str(entry["name"]): entry for entry in run.documents}
    if len(named) != len(run.documents):
        raise InputError(f"run {run.run_id}: two documents share a name, so runs cannot be paired by document")
    return named


def check_same_documents(run: RunRecord, reference: RunRecord) -> None:
    """Raise InputError, with the first document that differs, unless two runs scored the same documents with the same
    numbers of tokens."""
    mine, theirs = documents_of(run), documents_of(reference)
    for document in sorted(mine.keys() | theirs.keys()):
        counts = [entries[document]["tokens"] if document in entries else 0 for entries in (mine, theirs)]
        if counts[0] != counts[1]:
            raise InputError(
                f"runs {run.run_id} and {reference.run_id} cannot be paired: "
                f"document {document!r} has {counts[0]} tokens in one and {counts[1]} in the other"
            )


def _mean_nll(runs: Sequence[RunRecord], reference: RunRecord) -> dict[str, float] | None:
    """Total loss of every document in nats, averaged over runs of one model and seed; None if one is not finite."""
    for run in runs:
        check_same_documents(run, reference)
    if any(entry.get("nll") is None for run in runs for entry in run.documents):
        return None
    return {
        document: float(np.mean([documents_of(run)[document]["nll"] for run in runs]))
        for document in documents_of(reference)
    }


def gap(
    runs: Sequence[RunRecord], baseline: Sequence[RunRecord], growth: float | None = None, series: str = BY_POSITION
) -> np.ndarray:
    """Loss minus the baseline's, in nats a token: rows of (first position, last position, gap, half of its interval).

    It uses the seeds that both have, pairs runs by seed and document and clusters by both (infini.report.intervals). A
    bin ends at the first edge of the series that is at least `growth` times its start; the last bin ends with the
    longest document or segment. growth None is 2 by position and 1 by place. Positions are left out where the effective
    number of documents is too small for an error. The result is empty if no seed has the series in both, or, by place,
    if the segment lengths differ.
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
    starts = growing_bins(edges, growth or (2.0 if series == BY_POSITION else 1.0))
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
        if math.isfinite(found.mean) and found.df > 0:
            points.append((bounds[index], bounds[index + 1], found.mean, found.half_width))
    return np.array(points).reshape(-1, 4)


def growing_bins(edges: np.ndarray, growth: float) -> list[int]:
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

    def grid(rows: Sequence[Sequence[Any]]) -> np.ndarray:
        """Rows of one width, because documents may end before the last bin. A loss of null becomes NaN."""
        return np.array([[*row, *[0.0] * (len(edges) - 1 - len(row))] for row in rows], dtype=np.float64)

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
        loss, counts = (np.add.reduceat(grid(series[kind])[order], starts, axis=1) for kind in ("nll", "tokens"))
        losses.append(loss)
    return np.mean(losses, axis=0), counts
