"""Differences in loss and their uncertainty, paired by seed and document and clustered by both.

The estimate is sum(d) / sum(w) over all (seed, document) pairs. d is a difference of total negative log-likelihoods in
nats and w the number of tokens in the sum, so the unit is nats per token. Errors come from
`infini.report.intervals.two_way`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from infini.errors import InputError
from infini.records import RunRecord
from infini.report.intervals import Estimate, two_way

Knockout = Literal["reset", "foreign"]
Pair = tuple[float, float, str, int]
"""A difference of total losses in nats, the tokens behind it, the document and the seed."""

_KNOCKOUT_FIELDS: dict[str, tuple[str, str, str]] = {
    "reset": ("nll_reset", "nll_reset_base", "reset_tokens"),
    "foreign": ("nll_foreign", "nll_foreign_base", "foreign_tokens"),
}


@dataclass(frozen=True)
class Effect:
    """A difference of losses in nats per token."""

    estimate: Estimate
    effective_documents: float
    """Effective number of documents: as many documents of equal length would give the same weight to each."""
    run_ids: tuple[str, ...]

    @property
    def mean(self) -> float:
        return self.estimate.mean

    @property
    def n_documents(self) -> int:
        return self.estimate.n_documents

    @property
    def n_seeds(self) -> int:
        return self.estimate.n_seeds


def effective_number(weights: Sequence[float], clusters: Sequence[Hashable]) -> float:
    """Effective number of clusters: the squared sum of their weights over the sum of their squared weights."""
    by_cluster: dict[Hashable, float] = {}
    for weight, cluster in zip(weights, clusters, strict=True):
        by_cluster[cluster] = by_cluster.get(cluster, 0.0) + weight
    return sum(by_cluster.values()) ** 2 / sum(weight**2 for weight in by_cluster.values())


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
    run_ids = tuple(run.run_id for run in used)
    return Effect(two_way(differences, weights, clusters, seeds), effective_number(weights, clusters), run_ids)


def knockout_cost(runs: Sequence[RunRecord], knockout: Knockout) -> Effect | None:
    """Loss with a model's memory knocked out minus loss without, for the same model and tokens.

    `reset` treats every segment as the first. `foreign` gives the model the memory of another document. Documents
    without the knock-out are left out; None if no document has it.
    """
    knocked, normal, tokens = _KNOCKOUT_FIELDS[knockout]
    pairs: list[Pair] = []
    used: list[RunRecord] = []
    for seed_runs in by_seed(runs).values():
        for run in seed_runs:
            measured = {
                document: entry
                for document, entry in documents_of(run).items()
                if entry.get(knocked) is not None and entry.get(normal) is not None and entry.get(tokens)
            }
            if measured:
                used.append(run)
            for document, entry in measured.items():
                # Several runs of one seed have the weight of one run.
                difference = (entry[knocked] - entry[normal]) / len(seed_runs)
                pairs.append((difference, entry[tokens] / len(seed_runs), document, run.seed))
    return _effect(pairs, used)


def documents_of(run: RunRecord) -> dict[str, dict[str, float]]:
    """The per-document entries of a run by document name.

    Raises:
        InputError: two entries share a name.
    """
    named = {str(entry["name"]): entry for entry in run.documents}
    if len(named) != len(run.documents):
        raise InputError(f"run {run.run_id}: two documents share a name, so runs cannot be paired by document")
    return named


def check_same_documents(run: RunRecord, reference: RunRecord) -> None:
    """Check that two runs scored the same documents with the same numbers of tokens.

    Raises:
        InputError: they did not. The message names both runs and the first document that differs.
    """
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
