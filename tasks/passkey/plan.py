"""The prompts of an evaluation, and the order in which they are read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from infini.tasks.passkey.data import EVALUATION_STREAM
from infini.tasks.passkey.prompt import PasskeyTemplate, Prompt, shared_prefix


@dataclass(frozen=True)
class Question:
    """One prompt of an evaluation. index: its number in the cell."""

    length: int
    depth: str
    index: int
    prompt: Prompt

    @property
    def name(self) -> str:
        """Unique among all questions to one model."""
        return f"{self.length}/{self.depth}/{self.index}"


def make_questions(
    template: PasskeyTemplate, lengths: Sequence[int], depths: dict[str, float], examples: int, seed: int
) -> Iterator[Question]:
    """Every example of every cell. Every depth and example has its own key, which no training prompt has.

    Example i of a depth has the same key at all lengths, so that long lengths differ in nothing else. At a few thousand
    tokens the key's place in its segment differs, too.
    """
    for name, depth in depths.items():
        for index in range(examples):
            for length in lengths:
                rng = np.random.default_rng([seed, EVALUATION_STREAM, round(depth * 10**6), index])
                yield Question(length, name, index, template.example(length, depth, rng, training=False))


@dataclass(frozen=True)
class Lane:
    """Prompts that are read as one batch. A row is one example at its lengths, the shortest first.

    branch: position at which the rows leave the trunk, the beginning that all lanes share. forks: positions at which
    the prompts of each length leave the longest.
    """

    branch: int
    forks: tuple[int, ...]
    rows: list[list[Question]]

    @property
    def longest(self) -> list[Question]:
        """The question of each row that is read to its end."""
        return [row[-1] for row in self.rows]


def tokens_to_read(questions: Sequence[Question], rows_per_call: int = 64) -> int:
    """Number of tokens that `answer_questions` reports to `advance`."""
    _, lanes = plan_reading(questions, rows_per_call)
    total = max(lane.branch for lane in lanes)
    for lane in lanes:
        for row in lane.rows:
            stops = [*lane.forks, len(row[-1].prompt)]
            total += stops[-1] - lane.branch
            total += sum(len(question.prompt) - stop for question, stop in zip(row[:-1], stops, strict=False))
    return total


def plan_reading(questions: Sequence[Question], rows_per_call: int) -> tuple[Question, list[Lane]]:
    """The question whose prompt is the trunk, and the lanes in the order of their branches."""
    examples: dict[tuple[str, int], list[Question]] = defaultdict(list)
    for question in questions:
        examples[question.depth, question.index].append(question)
    rows = [row for example in examples.values() for row in _rows(example)]
    # The last of those whose key comes last.
    trunk = max((row[-1] for row in reversed(rows)), key=lambda question: question.prompt.key_position)
    cells: dict[tuple[Any, ...], list[list[Question]]] = defaultdict(list)
    for row in rows:
        cells[row[0].depth, *((question.length, len(question.prompt)) for question in row)].append(row)
    lanes = []
    for rows in cells.values():
        for start in range(0, len(rows), rows_per_call):
            some = rows[start : start + rows_per_call]
            forks = [[_fork(question.prompt, row[-1].prompt) for question in row[:-1]] for row in some]
            # Keys may begin with the same digits, so a lane leaves the trunk before the sentences of its keys.
            places = [min(row[-1].prompt.key_position, shared_prefix([row[-1].prompt, trunk.prompt])) for row in some]
            first = [min(column) for column in zip(*forks, strict=True)]
            lanes.append(Lane(min([*places, *first]), tuple(first), some))
    return trunk, sorted(lanes, key=lambda lane: lane.branch)


def _fork(prompt: Prompt, longest: Prompt) -> int:
    """Where a prompt leaves the longest one, at the latest before its last token."""
    return min(shared_prefix([prompt, longest]), len(prompt) - 1)


def _rows(example: list[Question]) -> Iterator[list[Question]]:
    """The lengths of one example in rows of prompts with the same key position."""
    by_place: dict[int, list[Question]] = defaultdict(list)
    for question in sorted(example, key=lambda question: len(question.prompt)):
        by_place[question.prompt.key_position].append(question)
    yield from by_place.values()
