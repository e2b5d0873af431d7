"""Answering passkey prompts: every prompt streamed through the model, greedy decoding, shared beginnings read once.

Prompts of one evaluation begin alike: the same sentences, then filler, until the key comes; and prompts of the same
example at several lengths go on alike until the shorter one asks. Each such beginning is read once and its state is
forked; nothing else is saved, no repetition is folded into a formula. `answer_alone` reads one prompt from its first
token to its last, and the tests hold the two equal. A reading that was stopped goes on from its last point (`points`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from infini.evaluation.result_cache import Points, Tensors
from infini.nn.ops.dtypes import state_dtype
from infini.nn.state import State, filled, fork, select_rows, stored_leaves
from infini.tasks.passkey.plan import Lane, Question, plan_reading

Advance = Callable[[int], None]


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
    points: Points | None = None,
) -> Iterator[Answer]:
    """Answer every question, each as soon as its prompt has been read.

    tokens_per_call: tokens of a row that a call reads; rows_per_call: rows side by side. Neither decides an answer.
    knock_out: every segment starts from an empty memory. advance is told of tokens as they are read,
    counting shared ones once. points: where the reading is put down after a call, and gone on with; `questions` are
    then those of the same evaluation that have no answer yet.
    """
    if not questions:
        return
    trunk_question, lanes = plan_reading(questions, rows_per_call)
    reader = _Reader(model, bos_id, tokens_per_call, advance, knock_out, points)
    stands = reader.taken_up()
    rows, trunk_stand = stands.get("rows"), stands.get("trunk")
    begun = [lane for lane in lanes if rows and rows.can_resume([q.name for q in lane.longest], lane.forks)]
    ahead = [lane for lane in lanes if lane not in begun]
    cursor = _Cursor([trunk_question])
    trunk = None
    if trunk_stand and trunk_stand.can_resume(cursor.names, [lane.branch for lane in ahead]):
        reader.stands["trunk"] = trunk_stand
        trunk, cursor.position = trunk_stand.run, trunk_stand.position
        advance(cursor.position)
    for lane in begun:
        assert rows
        advance((rows.position - lane.branch) * len(lane.rows))
        yield from _answer_lane(reader, rows.of(lane), rows.position, lane)
    trunk = trunk or reader.begin(1)
    for lane in ahead:
        trunk = reader.read(trunk, cursor, lane.branch, kept_as="trunk")
        yield from _answer_lane(reader, trunk.rows(len(lane.rows)), lane.branch, lane)
    # Those that were begun did not ask for the trunk again.
    advance(lanes[-1].branch - cursor.position)


def answer_alone(model: Any, question: Question, bos_id: int, *, tokens_per_call: int) -> Answer:
    """The plain way: one prompt, from its first token to its last, nothing shared."""
    reader = _Reader(model, bos_id, tokens_per_call, lambda tokens: None)
    with torch.no_grad():
        run = reader.read(reader.begin(1), _Cursor([question]), len(question.prompt), True)
        return reader.decode(run, [question])[0]


class _Cursor:
    """Several questions' prompts of equal length read side by side."""

    def __init__(self, questions: Sequence[Question], start: int = 0) -> None:
        self.questions, self.position = questions, start

    @property
    def names(self) -> list[str]:
        return [question.name for question in self.questions]

    def take(self, stop: int, most: int) -> np.ndarray:
        """The next tokens [B, T] up to `stop`, at most `most`."""
        count = min(most, stop - self.position)
        rows = [question.prompt.read(self.position, count) for question in self.questions]
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


@dataclass(frozen=True)
class _Progress:
    """How far rows have come. names: of the questions whose prompts they read; position: in these, in tokens."""

    names: list[str]
    position: int
    run: _Run

    def can_resume(self, names: Sequence[str], stops: Sequence[int]) -> bool:
        """Whether rows that read these can go on from here: they are among its own, and none stops before."""
        return set(names) <= set(self.names) and all(self.position <= stop for stop in stops)

    def of(self, lane: Lane) -> _Run:
        """The rows of a lane alone."""
        rows = torch.tensor([self.names.index(question.name) for question in lane.longest])
        return replace(self.run, state=select_rows(self.run.state, rows))


def _snapshot(stands: dict[str, _Progress]) -> Tensors:
    """What `_Reader.taken_up` takes up."""
    about: dict[str, Any] = {}
    tensors: Tensors = {}
    for role, stand in stands.items():
        run = stand.run
        spent = {"seconds": run.seconds, "generator_seconds": run.generator_seconds, "tokens": run.tokens}
        about[role] = {"names": stand.names, "position": stand.position, "spent": spent}
        tensors |= stored_leaves(run.state, f"{role}/")
    text = json.dumps(about).encode()
    return {"about": torch.tensor(list(text), dtype=torch.uint8), **tensors}


class _Reader:
    """Feeds tokens to a model and keeps count of time and tokens.

    stands: where the rows that others begin from (`trunk`) and those of the lane being read (`rows`) are.
    """

    def __init__(
        self,
        model: Any,
        bos_id: int,
        tokens_per_call: int,
        advance: Advance,
        knock_out: bool = False,
        points: Points | None = None,
    ) -> None:
        self.model, self.bos_id, self.tokens_per_call, self.advance = model, bos_id, tokens_per_call, advance
        self.device = next(model.parameters()).device
        self.knock_out, self.points = knock_out, points
        self.stands: dict[str, _Progress] = {}

    def taken_up(self) -> dict[str, _Progress]:
        """The stands of the last point, where there is one."""
        found = None if self.points is None else self.points.found()
        if found is None:
            return {}
        stands = {}
        for role, about in json.loads(bytes(found["about"].tolist())).items():
            state = filled(self.model.init_state(len(about["names"]), self.device), found, f"{role}/")
            run = _Run(state, torch.empty(0), **about["spent"])
            stands[role] = _Progress(about["names"], about["position"], run)
        return stands

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
            state, hidden_BD = self.model.prefill(ids_BT, run.state, reset_BT), torch.empty(len(ids), 0)
        seconds = run.seconds + self._clock() - started
        return _Run(state, hidden_BD, seconds, run.generator_seconds, run.tokens + ids.shape[1])

    def read(self, run: _Run, cursor: _Cursor, stop: int, to_answer: bool = False, kept_as: str | None = None) -> _Run:
        """Go on to token `stop` of the cursor's prompts; calls end on the model's segment grid.

        to_answer: the answer follows, so the last call's output is wanted. kept_as: which of the stands it moves.
        """
        while cursor.position < stop:
            # One token, the mark, stands before the prompt.
            most = self.tokens_per_call - (cursor.position + 1) % self.tokens_per_call
            started = time.perf_counter()
            ids = cursor.take(stop, most)
            making = time.perf_counter() - started
            run = replace(run, seconds=run.seconds + making, generator_seconds=run.generator_seconds + making)
            last = to_answer and cursor.position == stop
            run = self._call(run, ids, last)
            self.advance(ids.size)
            # The last call's output, which a point has not, is what the answer begins from.
            if kept_as and not last:
                self.stands[kept_as] = _Progress(cursor.names, cursor.position, run)
                if self.points is not None and self.points.due():
                    self.points.put(_snapshot(self.stands))
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


def _answer_lane(reader: _Reader, run: _Run, position: int, lane: Lane) -> Iterator[Answer]:
    """Read on from token `position` of a lane's prompts, which `run` has read up to there."""
    cursor = _Cursor(lane.longest, position)
    for column, stop in enumerate(lane.forks):
        run = reader.read(run, cursor, stop, kept_as="rows")
        asked = [row[column] for row in lane.rows]
        aside = replace(run, state=fork(run.state))
        yield from reader.decode(reader.read(aside, _Cursor(asked, stop), len(asked[0].prompt), True), asked)
    yield from reader.decode(reader.read(run, cursor, len(lane.longest[0].prompt), True, "rows"), lane.longest)
    reader.stands.pop("rows", None)
