"""Answers to passkey prompts: each prompt is streamed through the model, and its answer is decoded greedily.

The prompts of one evaluation begin alike: the same sentences, then filler until the key. The prompts of one example at
several lengths stay alike until the shorter one asks its question. A shared beginning is read once and its state is
forked. Nothing else is shared, and repeated filler is read token by token. `answer_alone` reads one prompt from its
first token to its last; the tests hold the two equal.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from infini.nn.host import to_device, to_numpy
from infini.nn.ops.dtypes import state_dtype
from infini.nn.state import State, fork, is_memory, leaves, select_rows
from infini.tasks.passkey.plan import Question, plan_reading

Advance = Callable[[int], None]


@dataclass(frozen=True)
class Answer:
    """A model's answer. seconds, tokens_read: of the whole prompt, whether shared with other prompts or not."""

    question: Question
    given: np.ndarray
    """Token ids, as many as the key has."""
    log_probability: float
    """Log-probability of this answer under the model, in nats."""
    seconds: float
    generator_seconds: float
    """Part of `seconds` in which the tokens of the prompt were made."""
    tokens_read: int
    memory_bytes: int
    """Size of the memory after the prompt."""
    state_bytes: int
    """Size of all that is carried there: the memory, and what else the model keeps of the last segments."""

    @property
    def expected(self) -> np.ndarray:
        return self.question.prompt.answer

    @property
    def n_tokens(self) -> int:
        return len(self.expected)

    @property
    def n_right(self) -> int:
        """Tokens of the key that are right at their place."""
        return int((self.given == self.expected).sum())

    @property
    def exact(self) -> bool:
        return self.n_right == len(self.expected)


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
    before_reading: Callable[[], None] = lambda: None,
) -> Iterator[Answer]:
    """Answer every question, each as soon as its prompt has been read.

    tokens_per_call: tokens of a row in one call. rows_per_call: rows of a call. Neither changes an answer.
    knock_out: every segment starts from an empty memory. advance is called with the number of tokens read; shared
    tokens count once. before_reading is called before what is read for the next answers, which are of one length.
    """
    if not questions:
        return
    trunk_question, lanes = plan_reading(questions, rows_per_call)
    reader = _Reader(model, bos_id, tokens_per_call, advance, knock_out)
    trunk, trunk_cursor = reader.begin(1), _Cursor([trunk_question])
    for lane in lanes:
        before_reading()
        trunk = reader.read(trunk, trunk_cursor, lane.branch)
        run, cursor = trunk.repeat(len(lane.rows)), _Cursor(lane.longest, lane.branch)
        for column, stop in enumerate(lane.forks):
            run = reader.read(run, cursor, stop)
            shorter = [row[column] for row in lane.rows]
            forked = replace(run, state=fork(run.state))
            yield from reader.decode(reader.read(forked, _Cursor(shorter, stop), to_answer=True), shorter)
            before_reading()
        yield from reader.decode(reader.read(run, cursor, to_answer=True), lane.longest)


def answer_alone(model: Any, question: Question, bos_id: int, *, tokens_per_call: int) -> Answer:
    """The plain way: one prompt from its first token to its last, nothing shared."""
    reader = _Reader(model, bos_id, tokens_per_call, lambda tokens: None)
    with torch.no_grad():
        run = reader.read(reader.begin(1), _Cursor([question]), to_answer=True)
        return reader.decode(run, [question])[0]


class _Cursor:
    """A position in prompts of equal length that are read as one batch."""

    def __init__(self, questions: Sequence[Question], start: int = 0) -> None:
        self.questions, self.position = questions, start

    @property
    def end(self) -> int:
        return len(self.questions[0].prompt)

    def take(self, stop: int, most: int) -> np.ndarray:
        """The next tokens [B, T] up to `stop`, at most `most`."""
        count = min(most, stop - self.position)
        rows = [question.prompt.read(self.position, count) for question in self.questions]
        self.position += count
        return np.stack(rows)


@dataclass(frozen=True)
class _Run:
    """A state, the hidden states [B, D] after its last token, and the cost so far."""

    state: State
    hidden_BD: torch.Tensor
    """Empty where no output was computed."""
    seconds: float = 0.0
    generator_seconds: float = 0.0
    tokens: int = 0

    def repeat(self, count: int) -> _Run:
        """`count` rows, each a copy of row 0."""
        state = select_rows(self.state, torch.zeros(count, dtype=torch.long))
        return replace(self, state=state, hidden_BD=torch.empty(count, 0))


class _Reader:
    """Feeds tokens to a model and counts time and tokens."""

    def __init__(
        self, model: Any, bos_id: int, tokens_per_call: int, advance: Advance, knock_out: bool = False
    ) -> None:
        self.model, self.bos_id, self.tokens_per_call, self.advance = model, bos_id, tokens_per_call, advance
        self.device = next(model.parameters()).device
        self.knock_out = knock_out

    def _clock(self) -> float:
        # On a GPU a call returns before its work is done.
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def begin(self, n_rows: int) -> _Run:
        """Rows that have read the beginning-of-document token."""
        ids = np.full((n_rows, 1), self.bos_id)
        return self._call(_Run(self.model.init_state(n_rows, self.device), torch.empty(0)), ids)

    def _call(self, run: _Run, ids: np.ndarray, with_output: bool = True) -> _Run:
        started = self._clock()
        ids_BT = to_device(ids.astype(np.int64), self.device)
        reset_BT = None
        if self.knock_out:
            column = torch.arange(run.tokens, run.tokens + ids.shape[1])
            reset_BT = ((column % self.model.segment_length == 0) & (column > 0)).expand(ids_BT.shape)
        if with_output:
            out = self.model(ids_BT, run.state, reset_BT=reset_BT)
            state, hidden_BD = out.state, out.hidden_BTD[:, -1]
        else:
            state, hidden_BD = self.model.prefill(ids_BT, run.state, reset_BT), torch.empty(len(ids), 0)
        seconds = run.seconds + self._clock() - started
        return _Run(state, hidden_BD, seconds, run.generator_seconds, run.tokens + ids.shape[1])

    def read(self, run: _Run, cursor: _Cursor, stop: int | None = None, to_answer: bool = False) -> _Run:
        """Read the cursor's prompts up to token `stop`, None for their end; calls end on the model's segment grid.

        to_answer: the last call computes the output from which the answer is decoded.
        """
        stop = cursor.end if stop is None else stop
        while cursor.position < stop:
            # The beginning-of-document token precedes the prompt.
            most = self.tokens_per_call - (cursor.position + 1) % self.tokens_per_call
            started = time.perf_counter()
            ids = cursor.take(stop, most)
            spent = time.perf_counter() - started
            run = replace(run, seconds=run.seconds + spent, generator_seconds=run.generator_seconds + spent)
            run = self._call(run, ids, with_output=to_answer and cursor.position == stop)
            self.advance(ids.size)
        return run

    def _log_probabilities(self, hidden_BD: torch.Tensor) -> torch.Tensor:
        # In float32 or better: in bfloat16 two tokens may tie.
        with torch.autocast(self.device.type, enabled=False):
            weight = self.model.output_weight.to(state_dtype(self.model.output_weight.dtype))
            return (hidden_BD.to(weight.dtype) @ weight.T).log_softmax(-1)

    def decode(self, run: _Run, questions: Sequence[Question]) -> list[Answer]:
        """Greedy decoding of as many tokens as each row's key has."""
        longest = max(len(question.prompt.answer) for question in questions)
        sizes = [(path, leaf.nbytes // len(questions)) for path, leaf in leaves(run.state) if path[:5] != "clock"]
        carried = sum(size for path, size in sizes if is_memory(path)), sum(size for _, size in sizes)
        given: list[np.ndarray] = []
        likely: list[torch.Tensor] = []
        for step in range(longest):
            value_B, token_B = self._log_probabilities(run.hidden_BD).max(-1)
            given.append(to_numpy(token_B))
            likely.append(value_B)
            if step + 1 < longest:
                run = self._call(run, given[-1][:, None])
        answers = []
        likely_BT = to_numpy(torch.stack(likely, 1).double())
        for question, row_given, row_likely in zip(questions, np.stack(given, 1), likely_BT, strict=True):
            count = len(question.prompt.answer)
            value = float(row_likely[:count].sum())
            cost = (run.seconds, run.generator_seconds, run.tokens, *carried)
            answers.append(Answer(question, row_given[:count], value, *cost))
        return answers
