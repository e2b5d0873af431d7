"""Whether the models of a table were trained on as many tokens.

What is padding, and so how many tokens a training of so many steps reads, differs from seed to seed where documents are
short (Arxiv-math), and hardly within one: models of one seed are compared with each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from infini.records import RunRecord
from infini.report.selection import Selection

APART = 0.001
"""Share by which tokens may differ within a seed and still count as equal: sequences of another length end with other
padding."""


def trained_tokens(selection: Selection, run: RunRecord) -> int | None:
    """Tokens that the model of an evaluation was trained on; None where its training is not known."""
    training = selection.training(run)
    return None if training is None else training.cost.get("tokens_seen")


def equal_tokens(selection: Selection, rows: Iterable[Sequence[RunRecord]]) -> bool:
    """Whether at every seed all runs of the rows were trained on as many tokens, up to APART. A number that is not
    known equals no other."""
    by_seed: dict[int, list[int | None]] = {}
    for run in (run for runs in rows for run in runs):
        by_seed.setdefault(run.seed, []).append(trained_tokens(selection, run))
    return all(_equal(counts) for counts in by_seed.values())


def _equal(counts: Sequence[int | None]) -> bool:
    known = [count for count in counts if count is not None]
    if not known or len(known) < len(counts):
        return not known
    return max(known) <= min(known) * (1 + APART)


def described(selection: Selection, rows: dict[str, Sequence[RunRecord]]) -> str:
    """The training tokens behind a table, for its provenance. rows: title -> runs."""
    if equal_tokens(selection, rows.values()):
        span = _span(selection, [run for runs in rows.values() for run in runs])
        return f"{span}, equal to {APART:.1%} within each seed" if " to " in span else span
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
