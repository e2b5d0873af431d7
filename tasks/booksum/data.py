"""Training examples of the summarization task: the beginning of a book, a separator, and the summary as target."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any

import numpy as np
import torch

from infini.errors import InputError
from infini.models import base_of
from infini.tasks.text.documents import TextTokenizer
from infini.tasks.text.stream import batch_of

SEPARATOR = "\n\nSummary of the whole book:\n\n"
"""The text between a book and its summary."""
QUESTION = "\n\nSummarize the whole book above."
"""The text after a book that is a message of a chat template."""
_DAY = datetime(2024, 7, 26)
"""Today, in a chat template that writes a date: what Llama 3's own write where they have no clock."""
Summaries = Sequence[Sequence[np.ndarray]]
_ORDER_STREAM = 5
"""The stream of a seed's random numbers that orders the examples."""


@dataclass(frozen=True)
class Frame:
    """Token ids around a book that a language model summarizes."""

    begin: np.ndarray
    """Tokens before the book; at least one, with which a text begins."""
    middle: np.ndarray
    """Tokens between the book and its summary."""
    end: int
    """Token after the summary."""

    def __len__(self) -> int:
        return len(self.begin) + len(self.middle)


def frame_of(tokenizer: TextTokenizer, chat: bool | None, model: Mapping[str, Any]) -> Frame:
    """The frame of a model whose options are `model`. chat: see BooksumConfig.chat.

    Raises InputError where `chat` is set and the model has no chat template.
    """
    if not chat:
        return Frame(np.array([tokenizer.bos_id]), tokenizer.encode(SEPARATOR), tokenizer.end_id)
    if (base := base_of(model)) is None:
        raise InputError("task.chat=true: takes a pretrained language model, model=llm")
    if not base.tokenizer.chat_template:
        raise InputError(f"task.chat=true: the tokenizer of {base.where} has no chat template; use task.chat=null")
    # Texts that a template neither changes nor contains.
    book, summary = "<the book>", "<the summary>"
    messages = [{"role": "user", "content": book + QUESTION}]
    fixed = _of_one_day(base.tokenizer.get_chat_template())
    template = partial(base.tokenizer.apply_chat_template, chat_template=fixed, tokenize=False)
    begin, _, middle = template(messages, add_generation_prompt=True).partition(book)
    # The families end a turn with tokens of their own, which the template alone knows.
    _, _, after = template([*messages, {"role": "assistant", "content": summary}]).partition(summary)
    before, between, ends = (
        np.array(base.tokenizer.encode(part, add_special_tokens=False), dtype=np.int64)
        for part in (begin, middle, after)
    )
    if not len(before):
        # A template may begin with the message; a text begins with a token all the same.
        before = np.array([tokenizer.bos_id], dtype=np.int64)
    special = {index for index, token in base.tokenizer.added_tokens_decoder.items() if token.special}
    return Frame(before, between, next((int(token) for token in ends[:1] if token in special), tokenizer.end_id))


def _of_one_day(template: str) -> str:
    """A chat template that writes the same date every day: an evaluation is to read what the training read.

    transformers takes no other clock for a template, so that the template gets its own, a macro.
    """
    codes = ((f"%{code}", _DAY.strftime(f"%{code}")) for code in "aAbBdmyYjHIMSp")
    date = "format" + "".join(f".replace('{code}', '{value}')" for code, value in (("%-", "%"), *codes))
    return f"{{% macro strftime_now(format) %}}{{{{ {date} }}}}{{% endmacro %}}\n{template}"


class Examples(ABC):
    """Batch number i of examples in a random order, each once per epoch.

    books: token ids of each book. summaries: token ids of each book's summaries, cut after `summary_tokens`; a book
    with two makes two examples. marks: ids of the tokens that begin and end a text; a summary that is cut has no end.
    """

    def __init__(
        self,
        books: Sequence[np.ndarray],
        summaries: Summaries,
        marks: tuple[int, int],
        summary_tokens: int,
        batch_size: int,
        seed: int,
    ) -> None:
        self.books, self.batch_size, self.seed = books, batch_size, seed
        self.bos_id, self.end_id = marks
        pairs = [(book, ids) for book, found in enumerate(summaries) for ids in found]
        self.pairs = [(book, np.asarray(ids[:summary_tokens], dtype=np.int64)) for book, ids in pairs]
        """Index of the book, and the cut summary."""
        end = np.array([self.end_id], dtype=np.int64)
        self.ends = [end if len(ids) <= summary_tokens else end[:0] for _, ids in pairs]
        """The end token of each summary; empty where it is cut."""

    def batch(self, index: int) -> dict[str, Any]:
        """ids_BT, targets_BT (the summary and its end; IGNORE elsewhere), mask_BT, reset_BT, and more in subclasses."""
        first = index * self.batch_size
        return self._tensors([self._pair(number) for number in range(first, first + self.batch_size)])

    def all_once(self) -> Iterator[dict[str, Any]]:
        """Every example once, in the order of the books."""
        for first in range(0, len(self.pairs), self.batch_size):
            yield self._tensors(range(first, min(first + self.batch_size, len(self.pairs))))

    def _tensors(self, pairs: Sequence[int]) -> dict[str, Any]:
        return {name: torch.from_numpy(array) for name, array in self._of(pairs).items()}

    def _pair(self, number: int) -> int:
        epoch, place = divmod(number, len(self.pairs))
        return int(np.random.default_rng([self.seed, _ORDER_STREAM, epoch]).permutation(len(self.pairs))[place])

    @abstractmethod
    def _of(self, pairs: Sequence[int]) -> dict[str, np.ndarray]:
        """The batch of these examples."""


class SummaryBatches(Examples):
    """Examples for a language model: a book in its frame, the summary, and the frame's end if it is not cut.

    length: tokens of a whole example; the book is cut to fit. rest: as of Examples. Raises InputError where an example
    has no room for a book.
    """

    def __init__(
        self, books: Sequence[np.ndarray], summaries: Summaries, frame: Frame, length: int, *rest: int
    ) -> None:
        super().__init__(books, summaries, (int(frame.begin[0]), frame.end), *rest)
        self.frame, self.length = frame, length
        longest = max(len(summary) for _, summary in self.pairs)
        if (room := length - len(frame) - longest) < 1:
            raise InputError(
                f"recipe.segments_per_sequence x dims.segment_length: {length} tokens leave no room for a book next to "
                f"a summary of {longest}; use {1 - room} more, or fewer task.summary_tokens"
            )

    def example(self, pair: int) -> tuple[np.ndarray, int]:
        """Token ids of an example, and the position of its summary."""
        book, summary = self.pairs[pair]
        room = self.length - len(self.frame) - len(summary)
        parts = (self.frame.begin, self.books[book][:room], self.frame.middle, summary, self.ends[pair])
        ids = np.concatenate([np.asarray(part, dtype=np.int64) for part in parts])
        return ids, len(ids) - len(self.ends[pair]) - len(summary)

    def _of(self, pairs: Sequence[int]) -> dict[str, np.ndarray]:
        return batch_of([(ids[:-1], ids[begin:]) for ids, begin in map(self.example, pairs)], self.length, self.bos_id)


class SourceBatches(Examples):
    """Examples for an encoder-decoder: the source is the book's first `source_tokens`, the target the summary between
    begin and end token, without the end token if it is cut. Odd batches use random encoder states (see
    infini.pretrained.seq2seq). rest: as of Examples."""

    def __init__(
        self, books: Sequence[np.ndarray], summaries: Summaries, marks: tuple[int, int], source_tokens: int, *rest: int
    ) -> None:
        super().__init__(books, summaries, marks, *rest)
        self.source_tokens = source_tokens

    def batch(self, index: int) -> dict[str, Any]:
        return super().batch(index) | {"at_random": index % 2 == 1}

    def _of(self, pairs: Sequence[int]) -> dict[str, np.ndarray]:
        books = [self.books[self.pairs[pair][0]][: self.source_tokens] for pair in pairs]
        targets = [np.concatenate([[self.bos_id], self.pairs[pair][1], self.ends[pair]]) for pair in pairs]
        source_BS = np.full((len(pairs), max(map(len, books))), self.bos_id, dtype=np.int64)
        source_mask_BS = np.zeros(source_BS.shape, dtype=bool)
        for row, book in enumerate(books):
            source_BS[row, : len(book)], source_mask_BS[row, : len(book)] = book, True
        rows = [(target[:-1], target[1:]) for target in targets]
        arrays = batch_of(rows, max(map(len, targets)) - 1, self.bos_id)
        return arrays | {"source_BS": source_BS, "source_mask_BS": source_mask_BS}
