"""Answering passkey prompts: every prompt streamed through the model, greedy decoding, shared beginnings read once.

Prompts of one evaluation begin alike: the same sentences, then filler, until the key comes; and prompts of the same
example at several lengths go on alike until the shorter one asks. Each such beginning is read once and its state is
forked; nothing else is saved, no repetition is folded into a formula. `answer_alone` reads one prompt from its first
token to its last, and the tests hold the two equal.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from infini.ops.dtypes import state_dtype
from infini.state import State, fork, select_rows
from tasks.passkey.data import EVALUATION_STREAM
from tasks.passkey.prompt import PasskeyTemplate, Prompt, shared_prefix

Advance = Callable[[int], None]


@dataclass(frozen=True)
class Question:
    """One prompt of an evaluation. index: which of its cell's examples."""

    length: int
    depth: str
    index: int
    prompt: Prompt


@dataclass(frozen=True)
class Answer:
    """What a model answered. seconds, tokens_read: of all that was read for this prompt, shared or not."""

    question: Question
    given: np.ndarray
    """Token ids, as many as the key has."""
    log_probability: float
    """What the model gives its own answer, in nats."""
    seconds: float
    generator_seconds: float
    """Of that, making the tokens."""
    tokens_read: int

    @property
    def expected(self) -> np.ndarray:
        return self.question.prompt.answer

    @property
    def n_tokens(self) -> int:
        return len(self.expected)

    @property
    def n_right(self) -> int:
        """Tokens of the key that are right where they stand."""
        return int((self.given == self.expected).sum())

    @property
    def exact(self) -> bool:
        return self.n_right == len(self.expected)


def make_questions(
    template: PasskeyTemplate, lengths: Sequence[int], depths: dict[str, float], examples: int, seed: int
) -> Iterator[Question]:
    """Every example of every cell. A key is fresh for every depth and example, and never one of the training's.

    Example i of a depth has the same key at all lengths, so that lengths differ in nothing else.
    """
    for name, depth in depths.items():
        for index in range(examples):
            for length in lengths:
                rng = np.random.default_rng([seed, EVALUATION_STREAM, round(depth * 10**6), index])
                yield Question(length, name, index, template.example(length, depth, rng, training=False))


@dataclass(frozen=True)
class _Lane:
    """Prompts that are read together: rows side by side, each row one example at its lengths, the shortest first.

    branch: where the rows leave the trunk. forks: where the prompts of each length but the last leave the last one's.
    """

    branch: int
    forks: tuple[int, ...]
    rows: list[list[Question]]


@torch.no_grad()
def answer_questions(
    model: Any,
    questions: Sequence[Question],
    bos_id: int,
    *,
    tokens_per_call: int,
    rows_per_call: int = 64,
    knock_out: bool = False,
    advance: Advance = lambda tokens: None,
) -> Iterator[Answer]:
    """Answer every question, each as soon as its prompt has been read.

    tokens_per_call: tokens of a row that a call reads; rows_per_call: rows side by side. Neither decides an answer.
    knock_out: every segment starts from an empty memory. advance is told of tokens as they are read,
    counting shared ones once.
    """
    if not questions:
        return
    reader = _Reader(model, bos_id, tokens_per_call, advance, knock_out)
    trunk_prompt, lanes = _plan(questions, rows_per_call)
    trunk = reader.begin(1)
    trunk_spans = _Cursor([trunk_prompt])
    for lane in sorted(lanes, key=lambda lane: lane.branch):
        trunk = reader.read(trunk, trunk_spans, lane.branch)
        yield from _answer_lane(reader, trunk, lane)


def answer_alone(model: Any, question: Question, bos_id: int, *, tokens_per_call: int) -> Answer:
    """The plain way: one prompt, from its first token to its last, nothing shared."""
    reader = _Reader(model, bos_id, tokens_per_call, lambda tokens: None)
    with torch.no_grad():
        prompt = question.prompt
        run = reader.read(reader.begin(1), _Cursor([prompt]), len(prompt), True)
        return reader.decode(run, [question])[0]


def tokens_to_read(questions: Sequence[Question], rows_per_call: int = 64) -> int:
    """What `answer_questions` will tell `advance`, in all."""
    _, lanes = _plan(questions, rows_per_call)
    total = max(lane.branch for lane in lanes)
    for lane in lanes:
        for row in lane.rows:
            stops = [*lane.forks, len(row[-1].prompt)]
            total += stops[-1] - lane.branch
            total += sum(len(question.prompt) - stop for question, stop in zip(row[:-1], stops, strict=False))
    return total


def _plan(questions: Sequence[Question], rows_per_call: int) -> tuple[Prompt, list[_Lane]]:
    """The prompt whose beginning the others branch off, and the lanes."""
    examples: dict[tuple[str, int], list[Question]] = defaultdict(list)
    for question in questions:
        examples[question.depth, question.index].append(question)
    rows = [row for example in examples.values() for row in _rows(example)]
    trunk = max((row[-1].prompt for row in rows), key=lambda prompt: prompt.key_position)
    cells: dict[tuple[Any, ...], list[list[Question]]] = defaultdict(list)
    for row in rows:
        cells[row[0].depth, *((question.length, len(question.prompt)) for question in row)].append(row)
    lanes = []
    for rows in cells.values():
        for start in range(0, len(rows), rows_per_call):
            some = rows[start : start + rows_per_call]
            forks = [[_fork(question.prompt, row[-1].prompt) for question in row[:-1]] for row in some]
            # Keys may begin with the same digits: a lane leaves the trunk where its keys' sentences begin.
            places = [min(row[-1].prompt.key_position, shared_prefix([row[-1].prompt, trunk])) for row in some]
            first = [min(column) for column in zip(*forks, strict=True)]
            lanes.append(_Lane(min([*places, *first]), tuple(first), some))
    return trunk, lanes


def _fork(prompt: Prompt, longest: Prompt) -> int:
    """Where a prompt leaves the longest one; it always has a token of its own left to read before it answers."""
    return min(shared_prefix([prompt, longest]), len(prompt) - 1)


def _rows(example: list[Question]) -> Iterator[list[Question]]:
    """The lengths of one example in rows whose shorter prompts share their key's place with the longest."""
    by_place: dict[int, list[Question]] = defaultdict(list)
    for question in sorted(example, key=lambda question: len(question.prompt)):
        by_place[question.prompt.key_position].append(question)
    yield from by_place.values()


class _Cursor:
    """Several prompts of equal length read side by side."""

    def __init__(self, prompts: Sequence[Prompt], start: int = 0) -> None:
        self.prompts, self.position = prompts, start

    def take(self, stop: int, most: int) -> np.ndarray:
        """The next tokens [B, T] up to `stop`, at most `most`."""
        count = min(most, stop - self.position)
        rows = [prompt.read(self.position, count) for prompt in self.prompts]
        self.position += count
        return np.stack(rows)


@dataclass(frozen=True)
class _Run:
    """A state, the hidden states [B, D] after its last token, and what it cost so far."""

    state: State
    hidden_BD: torch.Tensor
    """Empty where it was not wanted."""
    seconds: float
    generator_seconds: float
    tokens: int

    def rows(self, count: int) -> _Run:
        """The same for `count` rows, each a copy of row 0."""
        index = torch.zeros(count, dtype=torch.long)
        return _Run(
            select_rows(self.state, index), torch.empty(count, 0), self.seconds, self.generator_seconds, self.tokens
        )


class _Reader:
    """Feeds tokens to a model and keeps count of time and tokens."""

    def __init__(
        self, model: Any, bos_id: int, tokens_per_call: int, advance: Advance, knock_out: bool = False
    ) -> None:
        self.model, self.bos_id, self.tokens_per_call, self.advance = model, bos_id, tokens_per_call, advance
        self.device = next(model.parameters()).device
        self.knock_out = knock_out

    def _clock(self) -> float:
        # A GPU goes on working after a call has returned.
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def begin(self, n_rows: int) -> _Run:
        """Rows that have read the mark before the first token."""
        ids = np.full((n_rows, 1), self.bos_id)
        return self._call(_Run(self.model.init_state(n_rows, self.device), torch.empty(0), 0.0, 0.0, 0), ids)

    def _call(self, run: _Run, ids: np.ndarray, wanted: bool = True) -> _Run:
        """One call; its output only where it is wanted."""
        started = self._clock()
        ids_BT = torch.from_numpy(ids.astype(np.int64)).to(self.device)
        reset_BT = None
        if self.knock_out:
            column = torch.arange(run.tokens, run.tokens + ids.shape[1], device=self.device)
            reset_BT = ((column % self.model.segment_length == 0) & (column > 0)).expand(ids_BT.shape)
        if wanted:
            out = self.model(ids_BT, run.state, reset_BT=reset_BT)
            state, hidden_BD = out.state, out.hidden_BTD[:, -1]
        else:
            state, hidden_BD = self.model.absorb(ids_BT, run.state, reset_BT), torch.empty(len(ids), 0)
        seconds = run.seconds + self._clock() - started
        return _Run(state, hidden_BD, seconds, run.generator_seconds, run.tokens + ids.shape[1])

    def read(self, run: _Run, cursor: _Cursor, stop: int, to_answer: bool = False) -> _Run:
        """Go on to token `stop` of the cursor's prompts; calls end on the model's segment grid.

        to_answer: the answer follows, so the last call's output is wanted.
        """
        while cursor.position < stop:
            # One token, the mark, stands before the prompt.
            most = self.tokens_per_call - (cursor.position + 1) % self.tokens_per_call
            started = time.perf_counter()
            ids = cursor.take(stop, most)
            making = time.perf_counter() - started
            run = replace(run, seconds=run.seconds + making, generator_seconds=run.generator_seconds + making)
            run = self._call(run, ids, to_answer and cursor.position == stop)
            self.advance(ids.size)
        return run

    def _log_probabilities(self, hidden_BD: torch.Tensor) -> torch.Tensor:
        # In float32 or better: in bfloat16 two tokens may tie.
        with torch.autocast(self.device.type, enabled=False):
            weight = self.model.output_weight.to(state_dtype(self.model.output_weight.dtype))
            return (hidden_BD.to(weight.dtype) @ weight.T).log_softmax(-1)

    def decode(self, run: _Run, questions: Sequence[Question]) -> list[Answer]:
        """The most likely token, again and again, as many as the key has; each row its own key."""
        longest = max(len(question.prompt.answer) for question in questions)
        given: list[np.ndarray] = []
        likely: list[np.ndarray] = []
        for step in range(longest):
            value_B, token_B = self._log_probabilities(run.hidden_BD).max(-1)
            given.append(token_B.cpu().numpy())
            likely.append(value_B.cpu().double().numpy())
            if step + 1 < longest:
                run = self._call(run, given[-1][:, None])
        given_BT, likely_BT = np.stack(given, 1), np.stack(likely, 1)
        answers = []
        for row, question in enumerate(questions):
            count = len(question.prompt.answer)
            value = float(likely_BT[row, :count].sum())
            answers.append(
                Answer(question, given_BT[row, :count], value, run.seconds, run.generator_seconds, run.tokens)
            )
        return answers


def _answer_lane(reader: _Reader, trunk: _Run, lane: _Lane) -> Iterator[Answer]:
    run = trunk.rows(len(lane.rows))
    cursor = _Cursor([row[-1].prompt for row in lane.rows], lane.branch)
    for column, stop in enumerate(lane.forks):
        run = reader.read(run, cursor, stop)
        asked = [row[column] for row in lane.rows]
        prompts = [question.prompt for question in asked]
        aside = replace(run, state=fork(run.state))
        yield from reader.decode(reader.read(aside, _Cursor(prompts, stop), len(prompts[0]), True), asked)
    asked = [row[-1] for row in lane.rows]
    yield from reader.decode(reader.read(run, cursor, len(asked[0].prompt), True), asked)
