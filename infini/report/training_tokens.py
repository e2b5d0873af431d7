"""Checks that the models of a table were trained on equal numbers of tokens.

The amount of padding, and so the number of tokens that a training reads, differs between seeds if documents are short
(Arxiv-math), but hardly within one. So models of one seed are compared with each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from infini.records import RunRecord
from infini.report.selection import Selection

TOLERANCE = 0.001
"""Relative difference up to which token counts of one seed are equal. Sequences of different lengths end with different
padding."""


def trained_tokens(selection: Selection, run: RunRecord) -> int | None:
    """Tokens that the model of an evaluation was trained on, or None if its training is unknown."""
    training = selection.training(run)
    return None if training is None else training.cost.get("tokens_seen")


def equal_tokens(selection: Selection, rows: Iterable[Sequence[RunRecord]]) -> bool:
    """Whether at every seed all runs of the rows were trained on equal numbers of tokens, up to TOLERANCE. An unknown
    number equals no other."""
    by_seed: dict[int, list[int | None]] = {}
    for run in (run for runs in rows for run in runs):
        by_seed.setdefault(run.seed, []).append(trained_tokens(selection, run))
    for counts in by_seed.values():
        known = [count for count in counts if count is not None]
        if known and (len(known) < len(counts) or max(known) > min(known) * (1 + TOLERANCE)):
            return False
    return True


def described(selection: Selection, rows: dict[str, Sequence[RunRecord]]) -> str:
    """The training tokens of a table, as text for its provenance. rows: title -> runs."""
    if equal_tokens(selection, rows.values()):
        span = _span(selection, [run for runs in rows.values() for run in runs])
        return f"{span}, equal to {TOLERANCE:.1%} within each seed" if " to " in span else span
    titles: dict[str, list[str]] = {}
    for title, runs in rows.items():
        titles.setdefault(_span(selection, runs), []).append(title)
    listed = "; ".join(f"{span} for {', '.join(having)}" for span, having in titles.items())
    return f"NOT equal between runs ({listed})"


def _span(selection: Selection, runs: Iterable[RunRecord]) -> str:
    counts = {trained_tokens(selection, run) for run in runs}
    known = sorted(count for count in counts if count is not None)
    parts = [" to ".join(f"{count:,}" for count in dict.fromkeys((known[0], known[-1])))] if known else []
    return " and ".join([*parts, *(["unknown"] if None in counts else [])])
