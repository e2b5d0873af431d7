"""ROUGE of summaries: by rouge-score, against every reference of a book, with intervals over books.

F-measures in per cent, words stemmed. R-Lsum compares sentence by sentence. rouge-score expects a sentence per line, so
a line ends after every full stop, question mark or exclamation mark before white space, and nowhere else.

rouge-score's words consist of a-z and 0-9. A reference without such words, as one in Chinese, cannot score a summary
and is left out. A summary without such words scores 0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from infini.report.book_scores import METRICS, OVERALL, mean_with_interval

TYPES = (*METRICS, "rougeLsum")
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


def sentences(text: str) -> list[str]:
    """The sentences of a text, each on one line; see the module's rule."""
    joined = " ".join(text.split())
    return [sentence for sentence in _SENTENCE_END.split(joined) if sentence]


def words(text: str) -> list[str]:
    """The words that ROUGE counts: lower case, without punctuation, stemmed."""
    return _scorer()._tokenizer.tokenize(text)


def scorable(references: Sequence[str]) -> list[str]:
    """The references that can score a summary: those with a word that ROUGE counts."""
    return [reference for reference in references if words(reference)]


@cache
def _scorer() -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(list(TYPES), use_stemmer=True)


def rouge(summary: str, references: Sequence[str], of: str = "mean") -> dict[str, float]:
    """R-1, R-2, R-L and R-Lsum of a summary in per cent: the mean over its scorable references, or of each the maximum.

    A summary without a word scores 0. Raises ValueError without a scorable reference, and for another `of`.
    """
    references = scorable(references)
    if not references or of not in ("mean", "max"):
        raise ValueError("there must be references with words, and of must be mean or max")
    lines = "\n".join(sentences(summary))
    scored = [_scorer().score("\n".join(sentences(reference)), lines) for reference in references]
    values = {name: [100 * float(found[name].fmeasure) for found in scored] for name in TYPES}
    return {name: max(found) if of == "max" else sum(found) / len(found) for name, found in values.items()}


def over_books(scores: Sequence[Mapping[str, float]]) -> dict[str, tuple[float, float | None, float | None]]:
    """Metric -> (mean over books, lower and upper bound of its interval over books), also for the overall value.

    The overall value is the geometric mean of the means, as the paper's is of its columns. Bounds are None where there
    is no interval: of one book, or of scores that are all 0. Raises ValueError without scores.
    """
    if not scores:
        raise ValueError("no book has scores")
    found = {}
    for name in (*TYPES, OVERALL):
        wanted = METRICS if name == OVERALL else (name,)
        table = np.array([[[book[metric] for metric in wanted] for book in scores]])
        mean, interval = mean_with_interval(table)
        found[name] = (mean, *(interval or (None, None)))
    return found
