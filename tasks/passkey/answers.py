"""Questions of an evaluation and their answers: prompts are streamed through the model, answers decoded greedily.

The prompts of one evaluation begin alike: the same sentences, then filler until the key. The prompts of one example at
several lengths stay alike until the shorter one asks its question. A shared beginning is read once and its state is
forked. Nothing else is shared, and repeated filler is read token by token. The tests hold the answers equal to those of
prompts that are read alone, from the first token to the last.
"""

from __future__ import annotations

import hashlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from infini.evaluation.saved_reading import Reading, SavedReadings
from infini.nn.host import to_device, to_numpy
from infini.nn.ops.dtypes import state_dtype
from infini.nn.state import State, fork, is_memory, leaves, move, select_rows
from infini.tasks.passkey.prompt import EVALUATION_STREAM, PasskeyTemplate, Prompt, shared_prefix

Advance = Callable[[int], None]


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
    """Every example of every cell. A key that no training prompt has is drawn for every depth and example.

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
    rows: list[list[Question]] = []
    for example in examples.values():
        by_place: dict[int, list[Question]] = defaultdict(list)
        for question in sorted(example, key=lambda question: len(question.prompt)):
            by_place[question.prompt.key_position].append(question)
        rows += by_place.values()
    # The last of those whose key comes last.
    trunk = max((row[-1] for row in reversed(rows)), key=lambda question: question.prompt.key_position)
    cells: dict[tuple[Any, ...], list[list[Question]]] = defaultdict(list)
    for row in rows:
        cells[row[0].depth, *((question.length, len(question.prompt)) for question in row)].append(row)
    lanes = []
    for rows in cells.values():
        for start in range(0, len(rows), rows_per_call):
            some = rows[start : start + rows_per_call]
            # A prompt forks where it differs from the longest one, at the latest before its last token.
            forks = [
                [min(shared_prefix([each.prompt, row[-1].prompt]), len(each.prompt) - 1) for each in row[:-1]]
                for row in some
            ]
            # Keys may begin with the same digits, so a lane leaves the trunk before the sentences of its keys.
            places = [min(row[-1].prompt.key_position, shared_prefix([row[-1].prompt, trunk.prompt])) for row in some]
            first = [min(column) for column in zip(*forks, strict=True)]
            lanes.append(Lane(min([*places, *first]), tuple(first), some))
    return trunk, sorted(lanes, key=lambda lane: lane.branch)


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
    def n_tokens(self) -> int:
        return len(self.question.prompt.answer)

    @property
    def n_right(self) -> int:
        """Tokens of the key that are right at their place."""
        return int((self.given == self.question.prompt.answer).sum())

    @property
    def exact(self) -> bool:
        return self.n_right == self.n_tokens


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
    skip: Advance = lambda tokens: None,
    saved: SavedReadings | None = None,
    before_reading: Callable[[], None] = lambda: None,
) -> Iterator[Answer]:
    """Answer every question, each as soon as its prompt has been read.

    tokens_per_call: tokens of a row in one call. rows_per_call: rows of a call. Neither changes an answer.
    knock_out: every segment starts from an empty memory. advance is called with the number of tokens read; shared
    tokens count once. saved: states of an earlier call, which was stopped, and of this one; skip is called with the
    number of tokens that need not be read again. before_reading is called before what is read for the next answers,
    which are of one length.
    """
    if not questions:
        return
    trunk_question, lanes = plan_reading(questions, rows_per_call)
    reader = _Reader(model, bos_id, tokens_per_call, advance, knock_out, skip, saved)
    trunk = reader.begin()
    for lane in lanes:
        before_reading()
        trunk = reader.read(trunk, [trunk_question], lane.branch, "trunk")
        state = select_rows(trunk.state, torch.zeros(len(lane.rows), dtype=torch.long))
        run, longest = replace(trunk, state=state), [row[-1] for row in lane.rows]
        for column, stop in enumerate(lane.forks):
            run = reader.read(run, longest, stop, "rows")
            shorter = [row[column] for row in lane.rows]
            yield from reader.decode(reader.read(replace(run, state=fork(run.state)), shorter), shorter)
            before_reading()
        yield from reader.decode(reader.read(run, longest, name="rows"), longest)


def _digests(questions: Sequence[Question], count: int) -> list[str]:
    """The SHA-256 of the first `count` tokens of each prompt."""
    digests = []
    for question in questions:
        digest, left = hashlib.sha256(), count
        for chunk in question.prompt.chunks(1 << 16):
            if left <= 0:
                break
            digest.update(chunk[:left].astype(np.int64).tobytes())
            left -= len(chunk)
        digests.append(digest.hexdigest())
    return digests


@dataclass(frozen=True)
class _Run:
    """A state, the hidden states [B, D] after its last token, and the cost so far."""

    state: State
    hidden_BD: torch.Tensor
    """Last hidden state; its size differs where no output was computed."""
    tokens: int = 0
    """Tokens read of a row: the beginning-of-document token, which precedes the prompt, and the prompt's so far."""
    seconds: float = 0.0
    generator_seconds: float = 0.0


class _Reader:
    """Feeds tokens to a model and counts time and tokens."""

    def __init__(
        self,
        model: Any,
        bos_id: int,
        tokens_per_call: int,
        advance: Advance,
        knock_out: bool,
        skip: Advance = lambda tokens: None,
        saved: SavedReadings | None = None,
    ) -> None:
        self.model, self.bos_id, self.tokens_per_call = model, bos_id, tokens_per_call
        self.advance, self.knock_out, self.skip, self.saved = advance, knock_out, skip, saved
        self.device = next(model.parameters()).device

    def _clock(self) -> float:
        # On a GPU a call returns before its work is done.
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def begin(self) -> _Run:
        """A row that has read the beginning-of-document token."""
        return self._call(_Run(self.model.init_state(1, self.device), torch.empty(0)), np.array([[self.bos_id]]))

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
            state, hidden_BD = self.model.prefill(ids_BT, run.state, reset_BT), torch.empty(0)
        seconds = run.seconds + self._clock() - started
        return replace(run, state=state, hidden_BD=hidden_BD, tokens=run.tokens + ids.shape[1], seconds=seconds)

    def read(self, run: _Run, questions: Sequence[Question], stop: int | None = None, name: str | None = None) -> _Run:
        """Read on in these prompts of equal length, a row each, up to token `stop`; None: up to their end, with the
        output from which the answer is decoded. Calls end on the model's segment grid. name: that of the reading, whose
        states are saved; None: not saved."""
        end = len(questions[0].prompt) if stop is None else stop
        run = self._saved(run, questions, end if stop is None else end + 1, name)
        while (position := run.tokens - 1) < end:
            count = min(self.tokens_per_call - run.tokens % self.tokens_per_call, end - position)
            started = time.perf_counter()
            ids = np.stack([next(question.prompt.chunks(count, position)) for question in questions])
            spent = time.perf_counter() - started
            run = replace(run, seconds=run.seconds + spent, generator_seconds=run.generator_seconds + spent)
            run = self._call(run, ids, with_output=stop is None and position + count == end)
            self.advance(ids.size)
            if name is not None and self.saved is not None and self.saved.due():
                measured = {"seconds": run.seconds, "generator_seconds": run.generator_seconds}
                texts = _digests(questions, run.tokens - 1)
                self.saved.save(name, texts, Reading(run.tokens, run.state, measured))
        return run

    def _saved(self, run: _Run, questions: Sequence[Question], last: int, name: str | None) -> _Run:
        """The state of an earlier process that has read more of these prompts, but at most `last` tokens with the
        beginning-of-document token; else `run`."""
        if name is None or self.saved is None:
            return run
        found = self.saved.take(name, len(questions), run.tokens, last, lambda tokens: _digests(questions, tokens - 1))
        if found is None:
            return run
        self.skip((found.tokens - run.tokens) * len(questions))
        return _Run(move(found.state, self.device), torch.empty(0), found.tokens, **found.measured)

    def decode(self, run: _Run, questions: Sequence[Question]) -> list[Answer]:
        """Greedy decoding of as many tokens as each row's key has."""
        longest = max(len(question.prompt.answer) for question in questions)
        sizes = [(path, leaf.nbytes // len(questions)) for path, leaf in leaves(run.state) if path[:5] != "clock"]
        carried = sum(size for path, size in sizes if is_memory(path)), sum(size for _, size in sizes)
        given: list[np.ndarray] = []
        likely: list[torch.Tensor] = []
        for step in range(longest):
            with torch.autocast(self.device.type, enabled=False):
                # In float32 or better: in bfloat16 two tokens may tie. A copy for this product alone, because that of a
                # large vocabulary would count in the peak of memory of the next call.
                weight = self.model.output_weight.to(state_dtype(self.model.output_weight.dtype))
                value_B, token_B = (run.hidden_BD.to(weight.dtype) @ weight.T).log_softmax(-1).max(-1)
                del weight
            given.append(to_numpy(token_B))
            likely.append(value_B)
            if step + 1 < longest:
                run = self._call(run, given[-1][:, None])
        cost = (run.seconds, run.generator_seconds, run.tokens, *carried)
        answers = []
        likely_BT = to_numpy(torch.stack(likely, 1).double())
        for question, row_given, row_likely in zip(questions, np.stack(given, 1), likely_BT, strict=True):
            count = len(question.prompt.answer)
            answers.append(Answer(question, row_given[:count], float(row_likely[:count].sum()), *cost))
        return answers
