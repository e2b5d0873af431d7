"""Measures of a table of running text beside perplexity: perplexity per word, bits per byte, tokens of trainings, and
the size of what a model carries from segment to segment, as in the paper's Table 2."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from infini.records import RunRecord
from infini.report.selection import Selection

Counts = Mapping[tuple[Any, ...], tuple[int, int]]
"""Document, as `_key` names it -> words and bytes of its scored text. Records from before 2026-11-25 estimate them."""
TOLERANCE = 0.001
"""Relative difference up to which token counts of one seed are equal. Sequences of different lengths end with different
padding."""


def counted(runs: Iterable[RunRecord]) -> Counts:
    """Words and bytes of the documents whose scored text a run counted."""
    return {
        _key(run, document): (document["words"], document["bytes"])
        for run in runs
        if run.verb == "eval"
        for document in run.documents
        if {"name", "tokens", "words", "bytes"} <= document.keys() and not _estimated(document)
    }


def word_perplexity(run: RunRecord, counts: Counts) -> float | None:
    """Perplexity per word, by the words that were counted if the run estimated them; None if it has none."""
    value, sizes = run.metric("word_perplexity"), _sizes(run, counts)
    return value if value is None or sizes is None else math.exp(_nll(run) / sizes[0])


def bits_per_byte(run: RunRecord, counts: Counts) -> float | None:
    """Bits per byte, by the bytes that were counted if the run estimated them; None if it has none."""
    value, sizes = run.metric("bits_per_byte"), _sizes(run, counts)
    return value if value is None or sizes is None else _nll(run) / math.log(2) / sizes[1]


def _nll(run: RunRecord) -> float:
    return math.fsum(document["nll"] for document in run.documents)


def _sizes(run: RunRecord, counts: Counts) -> tuple[int, int] | None:
    """Words and bytes of all documents; None if the run counted them itself, or if no run did."""
    keys = [_key(run, document) for document in run.documents]
    if not any(map(_estimated, run.documents)) or not counts.keys() >= set(keys):
        return None
    words, sizes = zip(*(counts[key] for key in keys), strict=True)
    return sum(words), sum(sizes)


def _estimated(document: Mapping[str, Any]) -> bool:
    """Whether words and bytes are a share of the whole document's. A share is a fraction."""
    return any((document.get(key) or 0) % 1 for key in ("words", "bytes"))


def _key(run: RunRecord, document: Mapping[str, Any]) -> tuple[Any, ...]:
    return (*(run.data.get(key) for key in ("revision", "split", "tokenizer")), document["name"], document["tokens"])


def equal_tokens(selection: Selection, rows: Iterable[Sequence[RunRecord]]) -> bool:
    """Whether at every seed all runs of the rows were trained on equal numbers of tokens, up to TOLERANCE. An unknown
    number equals no other.

    How much padding a training reads, and so its number of tokens, differs between seeds if documents are short
    (Arxiv-math), but hardly within one.
    """
    by_seed: dict[int, list[int | None]] = {}
    for run in (run for runs in rows for run in runs):
        by_seed.setdefault(run.seed, []).append(selection.spent(run, "tokens_seen"))
    for counts in by_seed.values():
        known = [count for count in counts if count is not None]
        if known and (len(known) < len(counts) or max(known) > min(known) * (1 + TOLERANCE)):
            return False
    return True


def described_tokens(selection: Selection, rows: Mapping[str, Sequence[RunRecord]]) -> str:
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
    runs = list(runs)
    counts = {selection.spent(run, "tokens_seen") for run in runs if run.parent}
    known = sorted(count for count in counts if count is not None)
    parts = [" to ".join(f"{count:,}" for count in dict.fromkeys((known[0], known[-1])))] if known else []
    untrained = ["none"] if any(not run.parent for run in runs) else []
    return " and ".join([*parts, *(["unknown"] if None in counts else []), *untrained])


def compression(floats: float, reference: float | None) -> str:
    """ " (3.7x)" for a model with 3.7 times less memory than the reference; nothing without one."""
    if not reference or not floats:
        return ""
    ratio = reference / floats
    return f" ({ratio:,.0f}x)" if ratio >= 100 else f" ({ratio:.3g}x)"
