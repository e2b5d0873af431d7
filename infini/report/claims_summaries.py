"""Claims about summaries of books: Table 4, and the figure by length of the input."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from infini.lengths import parse_lengths
from infini.records import RunRecord
from infini.report.book_scores import METRICS, RESAMPLES, overall
from infini.report.selection import Selection
from infini.report.summaries import SummaryReport, cells_at
from infini.report.tables import PLUS_MINUS
from infini.report.verdicts import FEWEST_DOCUMENTS, FEWEST_SEEDS, SURE, Claim, Evidence, Finding, counted

SUMMARIES, LENGTHS = "table4_booksum", "booksum_lengths"
"""Reports of the systems at one length, and of ours at several."""
OURS = ("infini_linear", "infini_delta")
OTHERS = ("bart", "bart_unlimiformer", "primera", "primera_unlimiformer")
TEST = (
    f"by more than {SURE:g} standard errors (the larger of a bootstrap over books and of that over seeds), the same "
    f"books, {FEWEST_SEEDS} seeds (what that says of models this small: below)"
)

Scores = dict[int, np.ndarray]
"""Seed -> R-1, R-2 and R-L of every book, [lengths or systems, books, 3]."""


def summary_claims(summaries: Mapping[str, tuple[SummaryReport, Selection]]) -> list[Claim]:
    """Table 4 and its figure, as far as their reports are among those that are judged."""
    if SUMMARIES not in summaries or LENGTHS not in summaries:
        return []
    titles = summaries[SUMMARIES][0].titles
    pairs = [(a, b) for a in OURS for b in OTHERS] + [("infini_delta", "infini_linear")]
    better = [
        Claim(
            f"booksum_{a}_{b}",
            f"BookSum: {titles[a]} has a higher Overall than {titles[b]}",
            "Section 3.2, Table 4",
            f"Overall higher {TEST}",
            _higher(a, b),
        )
        for a, b in pairs
    ]
    trend = [
        Claim(
            f"booksum_lengths_{row}",
            f"BookSum: the more of a book {titles[row]} reads, the better its summary",
            "Section 3.2, figure by length of the input",
            f"slope of Overall over the logarithm of the input's length, on the validation books, above 0 {TEST}",
            _rising(row),
        )
        for row in OURS
    ]
    return [*better, *trend]


def _higher(a: str, b: str) -> Callable[[Evidence], Finding]:
    def judge(evidence: Evidence) -> Finding:
        report, selection = evidence.summaries[SUMMARIES]
        (length,) = parse_lengths(report.input_lengths)
        return _surely_above_0(selection, [(a, length), (b, length)], lambda found: found[0] - found[1], "points")

    return judge


def _rising(row: str) -> Callable[[Evidence], Finding]:
    def judge(evidence: Evidence) -> Finding:
        report, selection = evidence.summaries[LENGTHS]
        lengths = parse_lengths(report.input_lengths)
        doublings = np.log2(lengths)
        weights = (doublings - doublings.mean()) / ((doublings - doublings.mean()) ** 2).sum()
        wanted = [(row, length) for length in lengths]
        return _surely_above_0(selection, wanted, lambda found: weights @ found, "points a doubling")

    return judge


def _surely_above_0(
    selection: Selection, wanted: Sequence[tuple[str, int]], value: Callable[[np.ndarray], Any], unit: str
) -> Finding:
    """Whether a number made of the Overall of every (row, length) is surely above 0, mean over seeds.

    value: of an array whose first axis is that of `wanted`; linear in it.
    """
    if other := next((row for row, _ in wanted if row in selection.apart), None):
        return Finding("not measured yet", f"{other} is not as declared: {selection.apart[other][0]}")
    scores, used = _scores(selection, wanted)
    if not scores:
        return Finding("not measured yet")
    by_seed = [float(value(overall(found.mean(1)))) for found in scores.values()]
    mean = statistics.fmean(by_seed)
    of_seeds = statistics.stdev(by_seed) / math.sqrt(len(by_seed)) if len(by_seed) > 1 else 0.0
    n_books = next(iter(scores.values())).shape[1]
    drawn = np.random.default_rng(0).integers(n_books, size=(RESAMPLES, n_books))
    # Of each seed the resampled means over books, [wanted, resamples, 3].
    resampled = np.mean([value(overall(found[:, drawn].mean(2))) for found in scores.values()], axis=0)
    error = max(of_seeds, float(resampled.std(ddof=1)))
    measured = (
        f"{mean:+.2f} {PLUS_MINUS} {error:.2f} {unit} ({counted(n_books, 'book')}; {counted(len(scores), 'seed')})"
    )
    if len(scores) < FEWEST_SEEDS or n_books < FEWEST_DOCUMENTS:
        return Finding("not measured yet", measured, used)
    return Finding("holds" if mean > SURE * error else "does not hold", measured, used)


def _scores(selection: Selection, wanted: Sequence[tuple[str, int]]) -> tuple[Scores, tuple[str, ...]]:
    """The scores of the seeds that all of `wanted` have, on the books that all have; and the runs that they are of."""
    found = [_books(selection.runs.get(row, ()), length) for row, length in wanted]
    seeds = sorted(set.intersection(*(set(of) for of in found))) if found else []
    names = [set(books) for of in found for seed in seeds for _, books in [of[seed]]]
    shared = sorted(set.intersection(*names)) if names else []
    if not shared:
        return {}, ()
    scores = {seed: np.array([[of[seed][1][name] for name in shared] for of in found]) for seed in seeds}
    return scores, tuple(dict.fromkeys(of[seed][0] for seed in seeds for of in found))


def _books(runs: Sequence[RunRecord], length: int) -> dict[int, tuple[str, dict[str, list[float]]]]:
    """Seed -> run id, and book -> its R-1, R-2 and R-L at an input length."""
    return {
        run.seed: (run.run_id, {book["name"]: [float(book[metric]) for metric in METRICS] for book in cell["books"]})
        for run, cell in cells_at(runs, length)
    }
