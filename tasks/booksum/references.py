"""Summaries without a model, to compare a model's scores with: the beginning of the book, random sentences, and the
sentences closest to a human summary."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

import numpy as np

from infini.tasks.booksum.metrics import sentences, words

Words = Counter[str]
Pairs = Counter[tuple[str, str]]
CANDIDATES = 2000
"""Sentences from which the oracle chooses: those that share most word pairs with the summary."""


def lead(text: str, n_words: int) -> str:
    """The first words of a book."""
    return " ".join(text.split()[:n_words])


def random_sentences(text: str, n_words: int, seed: int) -> str:
    """Random sentences without repetition, in the order of the book, cut to n_words."""
    found = sentences(text)
    order = np.random.default_rng(seed).permutation(len(found))
    chosen, total = [], 0
    for index in order:
        if total >= n_words:
            break
        chosen.append(int(index))
        total += len(found[index].split())
    return " ".join(" ".join(found[index] for index in sorted(chosen)).split()[:n_words])


def oracle(text: str, reference: str, n_words: int) -> str:
    """Sentences chosen greedily: in each step the one that raises R-1 plus R-2 against the reference most, as long as
    one raises it and fits into n_words."""
    wanted = _Wanted(reference)
    found = sentences(text)
    counted = [(index, *_counts(sentence)) for index, sentence in enumerate(found)]
    counted.sort(key=lambda entry: (-sum((entry[2] & wanted.pairs).values()), entry[0]))
    candidates, left = counted[:CANDIDATES], n_words
    chosen: list[int] = []
    while True:
        best, score = None, wanted.score()
        for place, (_, single, pairs) in enumerate(candidates):
            if sum(single.values()) <= left and (value := wanted.score(single, pairs)) > score:
                best, score = place, value
        if best is None:
            return " ".join(found[index] for index in sorted(chosen))
        index, single, pairs = candidates.pop(best)
        wanted.take(single, pairs)
        chosen.append(index)
        left -= sum(single.values())


class _Wanted:
    """Words and word pairs of a reference that no chosen sentence has yet, and the numbers of matches so far."""

    def __init__(self, reference: str) -> None:
        self.single, self.pairs = _counts(reference)
        self.size = sum(self.single.values())
        self.words = self.right_words = self.right_pairs = 0

    def score(self, single: Words | None = None, pairs: Pairs | None = None) -> float:
        """R-1 plus R-2, as fractions, of the chosen sentences and these words; pairs across sentences do not match."""
        single, pairs = single or Counter(), pairs or Counter()
        words = self.words + sum(single.values())
        right = self.right_words + sum((single & self.single).values())
        right_pairs = self.right_pairs + sum((pairs & self.pairs).values())
        return 2 * right / max(words + self.size, 1) + 2 * right_pairs / max(words + self.size - 2, 1)

    def take(self, single: Words, pairs: Pairs) -> None:
        """Choose a sentence."""
        self.words += sum(single.values())
        self.right_words += sum((single & self.single).values())
        self.right_pairs += sum((pairs & self.pairs).values())
        self.single = self.single - single
        self.pairs = self.pairs - pairs


def _counts(text: str) -> tuple[Words, Pairs]:
    found: Sequence[str] = words(text)
    return Counter(found), Counter(itertools.pairwise(found))
