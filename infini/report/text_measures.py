"""Perplexity per word and bits per byte. Records from before 2026-11-25 estimate the numbers of words and bytes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from infini.records import RunRecord

Counts = Mapping[tuple[Any, ...], tuple[int, int]]
"""Document, as `_key` names it -> words and bytes of its scored text."""


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
    """Words and bytes of all documents; None if the run counted them itself, or if nobody did."""
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
