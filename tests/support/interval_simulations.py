"""Simulates how often intervals contain the true value; `python tests/support/interval_simulations.py` prints the table
of results/LOG.md.

Every case draws data with a known true value, makes the interval as the product does, and counts. Beside it stands what
the product had before: the percentile bootstrap, and 2.5 times the larger of two one-way standard errors.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from infini.report.book_scores import mean_with_interval
from infini.report.intervals import clustered, effective_trials, minimum_interval, proportion_interval, two_way

TOKENS = 5
Lengths = tuple[str, tuple[float, ...]]
EVEN: Lengths = ("", ())
UNEVEN: tuple[Lengths, ...] = (
    (", one of them twenty times as long", (1.0, *[0.05] * 9)),
    (", two of them twenty times as long", (1.0, 1.0, *[0.05] * 8)),
    (" as long as whole books", (0.4, 0.5, 0.5, 0.6, 0.8, 0.9, 1.1, 1.4, 2.2, 4.0)),
)
Interval = tuple[float, float]
Draw = Callable[[np.random.Generator], tuple[Interval, Interval | None]]
"""One repetition: the product's interval, and that of the method before it."""


@dataclass(frozen=True)
class Case:
    """An estimate, its data, and its true value."""

    method: str
    data: str
    seeds: str
    truth: float
    draw: Draw


def prompts(rng: np.random.Generator, accuracy: float, alike: float, n: int) -> np.ndarray:
    """Shares of right tokens of n prompts. alike: correlation of the tokens of a prompt, 0 to 1."""
    if alike >= 1 or accuracy >= 1:
        return (rng.random(n) < accuracy).astype(float)
    if alike > 0:
        spread = (1 - alike) / alike
        return rng.binomial(TOKENS, rng.beta(accuracy * spread, (1 - accuracy) * spread, n)) / TOKENS
    return rng.binomial(TOKENS, accuracy, n) / TOKENS


def bootstrap(values: np.ndarray, rng: np.random.Generator) -> Interval:
    """The percentile bootstrap of a mean."""
    drawn = values[rng.integers(0, len(values), (500, len(values)))].mean(1)
    low, high = np.quantile(drawn, [0.025, 0.975])
    return float(low), float(high)


def accuracy_case(accuracy: float, alike: float, n: int) -> Case:
    def draw(rng: np.random.Generator) -> tuple[Interval, Interval]:
        shares = prompts(rng, accuracy, alike, n)
        return proportion_interval(float(shares.sum()), n), bootstrap(shares, rng)

    kind = "exact match" if alike >= 1 else f"token accuracy, correlation {alike:g} within a prompt"
    return Case("Clopper-Pearson on prompts", f"{kind}, {n} prompts", "1", accuracy, draw)


def worst_case(accuracies: tuple[float, ...], n: int) -> Case:
    def draw(rng: np.random.Generator) -> tuple[Interval, Interval]:
        cells = [prompts(rng, accuracy, 0.6, n) for accuracy in accuracies]
        worst = min(cells, key=lambda shares: float(shares.mean()))
        return minimum_interval([(float(shares.sum()), n) for shares in cells]), bootstrap(worst, rng)

    data = f"lowest of {len(accuracies)} cells, {n} prompts each"
    return Case("Bonferroni over cells", data, "1", min(accuracies), draw)


def seeds_case(accuracy: float, spread: float, n_seeds: int) -> Case:
    def draw(rng: np.random.Generator) -> tuple[Interval, None]:
        of_seeds = accuracy + spread * math.sqrt(3) * rng.uniform(-1, 1, n_seeds)
        shares = [float(prompts(rng, value, 0.6, 50).mean()) for value in of_seeds]
        trials = effective_trials(shares, 50 * n_seeds)
        return proportion_interval(float(np.mean(shares)) * trials, trials), None

    data = f"mean accuracy, seeds differ by {spread:g}, 50 prompts"
    return Case("Clopper-Pearson, effective number", data, str(n_seeds), accuracy, draw)


def failing_case(share: float, accuracy: float, n_seeds: int) -> Case:
    def draw(rng: np.random.Generator) -> tuple[Interval, None]:
        of_seeds = np.where(rng.random(n_seeds) < share, accuracy, 1.0)
        shares = [float(prompts(rng, value, 1.0, 50).mean()) for value in of_seeds]
        trials = effective_trials(shares, 50 * n_seeds)
        return proportion_interval(float(np.mean(shares)) * trials, trials), None

    data = f"mean accuracy, of {share:g} of all seeds {accuracy:g} and of the others 1, 50 prompts"
    return Case("Clopper-Pearson, effective number", data, str(n_seeds), 1 - share * (1 - accuracy), draw)


def difference_case(
    of_documents: float, of_seeds: float, of_pairs: float, n_documents: int, n_seeds: int, lengths: Lengths = EVEN
) -> Case:
    """lengths: what they are called, and the tokens of each document; even ones are drawn anew each time."""
    documents = [book for _ in range(n_seeds) for book in range(n_documents)]
    seeds = [seed for seed in range(n_seeds) for _ in range(n_documents)]
    called, tokens = lengths

    def draw(rng: np.random.Generator) -> tuple[Interval, Interval]:
        weights = np.tile(tokens or rng.uniform(0.5, 1.5, n_documents), n_seeds)
        values = of_documents * np.tile(rng.normal(size=n_documents), n_seeds)
        values += of_seeds * np.repeat(rng.normal(size=n_seeds), n_documents)
        values += of_pairs * rng.normal(size=len(values))
        total = (values * weights).tolist()
        mean, by_document, _ = clustered(total, weights.tolist(), documents)
        half = 2.5 * math.sqrt(max(by_document, clustered(total, weights.tolist(), seeds)[1]))
        return two_way(total, weights.tolist(), documents, seeds).interval, (mean - half, mean + half)

    spreads = f"spread of documents {of_documents:g}, seeds {of_seeds:g}, pairs {of_pairs:g}"
    data = f"difference, {spreads}; {n_documents} documents{called}"
    return Case("two-way, Student's t", data, str(n_seeds), 0.0, draw)


def overall_case(skew: float, n_documents: int) -> Case:
    scale = np.array([20.0, 4.0, 12.0])
    truth = float(np.prod(scale) ** (1 / 3)) * math.exp(skew**2 / 2)

    def draw(rng: np.random.Generator) -> tuple[Interval, Interval]:
        book = rng.normal(size=(n_documents, 1))
        scores = scale * np.exp(skew * (0.7 * book + math.sqrt(0.51) * rng.normal(size=(n_documents, 3))))
        _, interval = mean_with_interval(scores[None])
        assert interval is not None
        drawn = np.prod(scores[rng.integers(0, n_documents, (500, n_documents))].mean(1), axis=-1) ** (1 / 3)
        low, high = np.quantile(drawn, [0.025, 0.975])
        return interval, (float(low), float(high))

    return Case("Student's t on the logit", f"Overall, {n_documents} books, skew {skew:g}", "1", truth, draw)


SPREADS: list[tuple[float, float, float]] = [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 1), (0.3, 1, 0.3)]
CASES = [
    *(accuracy_case(accuracy, 1.0, 50) for accuracy in (0.5, 0.9, 0.98, 0.99, 0.999)),
    *(accuracy_case(accuracy, alike, 50) for alike in (0.0, 0.6) for accuracy in (0.5, 0.9, 0.99)),
    *(accuracy_case(0.99, 1.0, n) for n in (10, 150)),
    worst_case((0.98,) * 15, 50),
    worst_case((0.9, *[1.0] * 14), 50),
    *(seeds_case(accuracy, spread, 3) for accuracy, spread in ((0.9, 0.0), (0.9, 0.05), (0.6, 0.2))),
    *(difference_case(*spreads, documents, seeds) for documents, seeds in ((10, 3), (8, 5)) for spreads in SPREADS),
    *(difference_case(1, 0, 0, 10, seeds, lengths) for lengths in UNEVEN for seeds in (1, 3)),
    *(overall_case(skew, n) for n in (8, 17) for skew in (0.25, 0.5)),
]

LIMITS = [failing_case(0.2, 0.5, n_seeds) for n_seeds in (3, 5)]
"""Cases that no interval over a few seeds covers: a failure that most seeds do not show."""


def covered(case: Case, repetitions: int, rng: np.random.Generator) -> tuple[float, float | None]:
    """The share of repetitions in which the interval of the product contains the true value, and the one before it."""
    ours = before = 0
    known = False
    for _ in range(repetitions):
        now, then = case.draw(rng)
        ours += now[0] - 1e-12 <= case.truth <= now[1] + 1e-12
        if then is not None:
            known = True
            before += then[0] - 1e-12 <= case.truth <= then[1] + 1e-12
    return ours / repetitions, before / repetitions if known else None


def main(repetitions: int = 4000) -> None:
    print("| method | data | seeds | true value | nominal | measured | method before |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: |")
    for case in (*CASES, *LIMITS):
        ours, before = covered(case, repetitions, np.random.default_rng(0))
        then = "" if before is None else f"{100 * before:.1f}"
        print(f"| {case.method} | {case.data} | {case.seeds} | {case.truth:.4g} | 95 | {100 * ours:.1f} | {then} |")


if __name__ == "__main__":
    main()
