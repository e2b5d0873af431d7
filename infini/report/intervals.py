"""All intervals and p-values of this project. Quantiles are scipy's.

Three things are estimated. A share of prompts (`proportion_interval`), the lowest of many shares (`minimum_interval`),
and a mean over documents and seeds (`two_way`). Each interval covers the true value in at least 95 of 100
repetitions, or nearly so if its function says so; `tests/report/test_intervals.py` simulates that.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import special

LEVEL = 0.95
"""Coverage of every interval, and one minus the error rate of every family of tests."""


def proportion_interval(successes: float, trials: float, level: float = LEVEL) -> tuple[float, float]:
    """Clopper-Pearson interval of a share, (low, high).

    A prompt with some correct digits counts as that fraction of a success. A fraction varies less than a coin flip of
    the same mean, so the interval covers at least `level`, however the tokens of one prompt depend on each other.
    trials: number of prompts, above 0.
    """
    tail = (1 - level) / 2
    low = 0.0 if successes <= 0 else float(special.betaincinv(successes, trials - successes + 1, tail))
    high = 1.0 if successes >= trials else float(special.betaincinv(successes + 1, trials - successes, 1 - tail))
    return low, high


def proportion_p(successes: float, trials: float, expected: float) -> tuple[float, float]:
    """One-sided p-values (p, q) of a share, the tests that correspond to `proportion_interval`.

    p is the probability of at least this many successes if the share were `expected`; a small p means it is above. q is
    the probability of at most this many; a small q means it is below. If `expected` is 0 or 1, only one outcome is
    possible. Every share is above an `expected` below 0, and below one above 1.
    """
    if not 0 <= expected <= 1:
        return (0.0, 1.0) if expected < 0 else (1.0, 0.0)
    at_least = 1.0 if successes <= 0 else float(special.betainc(successes, trials - successes + 1, expected))
    at_most = 1.0 if successes >= trials else float(special.betaincc(successes + 1, trials - successes, expected))
    return at_least, at_most


def minimum_interval(counts: Sequence[tuple[float, float]], level: float = LEVEL) -> tuple[float, float]:
    """Interval of the lowest of several shares, each (successes, trials).

    The lowest observed share is partly low by chance, so its own interval would cover less than `level`. Each share
    gets an interval at the level at which all are right together (Bonferroni). The lowest share lies between the lowest
    of their lower ends and the lowest of their upper ends.
    """
    each = [proportion_interval(successes, trials, 1 - (1 - level) / len(counts)) for successes, trials in counts]
    return min(low for low, _ in each), min(high for _, high in each)


def effective_trials(shares: Sequence[float], trials: float, times: float = 1.0, n_seeds: int | None = None) -> float:
    """Effective number of independent trials behind the mean of the shares of several seeds, at most their number.

    If seeds differ, a mean is less certain than its number of prompts suggests. Their variance gives the effective
    number, corrected by Student's quantile for few seeds (Korn and Graubard 1998). The correction holds also where the
    variance is no larger than chance would make it: a rule without that covers 89 to 94 in 100 if three seeds differ.
    If seeds are equal, the number is `trials`. One wrong answer of 480 can therefore widen an interval more than three
    wrong answers, one in each seed. And the interval does not cover seeds that would fail: if one training in five
    answers half of the prompts, it covers 48 in 100 with three seeds and 67 with five.

    times, n_seeds: for the number expected with `times` as many prompts per seed, and with n_seeds seeds. More prompts
    reduce only what chance adds to the variance between seeds.
    """
    n = len(shares)
    seeds = n if n_seeds is None else n_seeds
    most = trials * times * seeds / n
    if n < 2:
        return most
    mean, variance = float(np.mean(shares)), float(np.var(shares, ddof=1))
    if variance <= 0 or not 0 < mean < 1:
        return most
    by_chance = min(variance, mean * (1 - mean) * n / trials)
    of_mean = (variance - by_chance + by_chance / times) / seeds
    few = float(special.ndtri(0.5 + LEVEL / 2) / special.stdtrit(seeds - 1, 0.5 + LEVEL / 2))
    return min(most, mean * (1 - mean) / of_mean * few**2)


MIN_EFFECTIVE_DOCUMENTS = 1.5
"""Minimum effective number of documents for which a mean has an error. Below it one document has nearly all tokens."""


@dataclass(frozen=True)
class Estimate:
    """A mean, its error, and the share of the error that depends on the number of seeds."""

    mean: float
    se: float
    """Standard error; NaN with an effective number of documents below MIN_EFFECTIVE_DOCUMENTS."""
    df: float
    """Degrees of freedom of Student's t: one less than the smaller effective number of clusters; 0 without an error."""
    n_documents: int
    effective_documents: float
    """Effective number of documents: as many documents of equal length would give the same weight to each."""
    n_seeds: int
    seeds_share: float = 0.0
    """The share of the variance that decreases with the number of seeds."""

    @property
    def interval(self) -> tuple[float, float]:
        """(low, high) of the mean at LEVEL; NaN without an error."""
        half = self.half_width
        return self.mean - half, self.mean + half

    @property
    def half_width(self) -> float:
        """Half the width of the interval."""
        return float(special.stdtrit(self.df, 0.5 + LEVEL / 2)) * self.se if self.df > 0 else math.nan

    def p_values(self, expected: float = 0.0) -> tuple[float, float]:
        """(p, q), one-sided: p is small if the mean is above `expected`, q if it is below; both are 1 without an
        error."""
        if math.isnan(self.se) or self.df <= 0:
            return 1.0, 1.0
        above = self.mean - expected
        t = above / self.se if self.se > 0 else math.copysign(math.inf, above) if above else 0.0
        return float(special.stdtr(self.df, -t)), float(special.stdtr(self.df, t))

    @property
    def p(self) -> float:
        """Two-sided p-value of a mean of 0."""
        return min(1.0, 2 * min(self.p_values()))

    def with_more(self, n_seeds: int, n_documents: int) -> Estimate:
        """The estimate with this many seeds and documents, at the same spread."""
        of_seeds = self.seeds_share * self.se**2 * self.n_seeds / n_seeds
        others = (1 - self.seeds_share) * self.se**2 * self.n_documents / n_documents
        effective = self.effective_documents * n_documents / self.n_documents
        return replace(
            self,
            se=math.sqrt(of_seeds + others),
            df=min(n_seeds, effective) - 1,
            n_documents=n_documents,
            effective_documents=effective,
            n_seeds=n_seeds,
        )


def clustered(
    differences: Sequence[float], weights: Sequence[float], clusters: Sequence[Hashable]
) -> tuple[float, float, float]:
    """sum(differences) / sum(weights), its variance robust to dependence within clusters, and the effective number of
    clusters: the squared sum of their weights over the sum of their squared weights.

    The variance is the jackknife's: (G - 1) / G times the sum of the squared changes of the ratio as each of the G
    clusters in turn is left out; NaN with one cluster. A cluster with much of the weight pulls the ratio to itself, so
    its own residual would understate what it contributes.
    """
    labels = {label: index for index, label in enumerate(dict.fromkeys(clusters))}
    index = np.array([labels[label] for label in clusters])
    difference, weight = np.asarray(differences, np.float64), np.asarray(weights, np.float64)
    of_cluster, total = np.bincount(index, weights=weight), weight.sum()
    ratio, effective = float(difference.sum() / total), float(total**2 / (of_cluster**2).sum())
    # A cluster without weight changes nothing as it is left out.
    counts = of_cluster > 0
    n = int(counts.sum())
    if n < 2:
        return ratio, math.nan, effective
    residual = np.bincount(index, weights=difference - ratio * weight)
    changes = residual[counts] / (total - of_cluster[counts])
    return ratio, float((n - 1) / n * (changes**2).sum()), effective


def two_way(
    differences: Sequence[float],
    weights: Sequence[float],
    documents: Sequence[Hashable],
    seeds: Sequence[Hashable],
) -> Estimate:
    """sum(differences) / sum(weights) over pairs of a document and a seed, clustered by both.

    All runs of a document share its text, and all documents of a seed share the weights of its model. The variance is
    the one clustered by document plus the one clustered by seed minus the one of single pairs (Cameron, Gelbach and
    Miller 2011), and at least as large as each of the first two. Student's t has one degree of freedom less than the
    smaller effective number of clusters. With one seed the error is over documents and does not cover other seeds.
    """
    mean, of_documents, effective = clustered(differences, weights, documents)
    _, of_seeds, effective_seeds = clustered(differences, weights, seeds)
    n_documents, n_seeds = len(set(documents)), len(set(seeds))
    if effective < MIN_EFFECTIVE_DOCUMENTS:
        return Estimate(mean, math.nan, 0, n_documents, effective, n_seeds)
    if n_seeds < 2:
        return Estimate(mean, math.sqrt(of_documents), effective - 1, n_documents, effective, n_seeds)
    _, of_pairs, _ = clustered(differences, weights, list(zip(documents, seeds, strict=True)))
    variance = max(of_documents + of_seeds - of_pairs, of_documents, of_seeds)
    share, df = of_seeds / variance if variance > 0 else 0.0, min(effective, effective_seeds) - 1
    return Estimate(mean, math.sqrt(variance), df, n_documents, effective, n_seeds, share)


def bounded_mean_interval(influence: np.ndarray, mean: float, top: float = 100.0) -> tuple[float, float] | None:
    """Interval of a statistic of documents between 0 and `top`, from Student's t on its logit; None with fewer than two
    documents, or if the statistic is 0 or `top`.

    Scores near 0 are skewed; their logits are less so, and the interval stays within the range of scores. With 8
    documents it covers about 93 in 100, the percentile bootstrap about 86. influence: [documents], the effect of each
    document on the statistic (mean 0). mean: the statistic.
    """
    n = len(influence)
    if n < 2 or not 0 < mean < top:
        return None
    error = float(np.std(influence, ddof=1)) / math.sqrt(n)
    half = float(special.stdtrit(n - 1, 0.5 + LEVEL / 2)) * error * top / (mean * (top - mean))
    at = special.logit(mean / top)
    return top * float(special.expit(at - half)), top * float(special.expit(at + half))


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values of a family of tests, adjusted by Holm's method. A test rejects if its adjusted value is at most
    1 - LEVEL; then the family rejects wrongly in at most that share of repetitions."""
    order, adjusted = np.argsort(p_values, kind="stable"), np.empty(len(p_values))
    raised = np.arange(len(p_values), 0, -1) * np.asarray(p_values)[order]
    adjusted[order] = np.minimum(1.0, np.maximum.accumulate(raised))
    found: list[float] = adjusted.tolist()
    return found


def p_value(p: float) -> str:
    """A p-value as printed: two significant digits, never 0; more where it would seem to be on the limit of a test."""
    if not 0.0001 <= p < 0.995:
        return "1" if p > 0.5 else "< 0.0001"
    limit = 1 - LEVEL
    digits = next((n for n in (2, 3, 4, 5) if abs(float(f"{p:.{n}g}") - limit) > 1e-9), 6)
    return f"{p:.{digits}g}"
