"""The keys of the summarization task."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from infini.config.data_files import BOOK_LAYOUT, book_file
from infini.config.fields import setting
from infini.config.lengths import parse_lengths
from infini.config.schema import TaskConfig
from infini.errors import at_least, one_of, require

REFERENCES = ("lead", "random", "oracle", "human")
"""Summaries that need no model; see BooksumConfig.reference."""


@dataclass
class BooksumConfig(TaskConfig):
    """A summary of a whole book."""

    evaluation_reads = ("length", "decoding", "part")
    evaluation_inherits = ("chat",)
    has_documents = False
    data_layout = BOOK_LAYOUT

    split: str = setting(
        "Books that an evaluation summarizes: test, or validation, on which choices are made.", evaluation=True
    )
    input_length: str | int = setting(
        "Tokens of a book that an evaluation reads, as 500K, where `length` is not set; the rest is left out.",
        evaluation=True,
    )
    summary_tokens: int = setting("Most tokens of a training summary; longer ones are cut.", training=True)
    chat: bool | None = setting(
        "true: a pretrained language model gets the book as a message in its tokenizer's chat template, and answers "
        "with the summary; null: a line of text stands between book and summary."
    )
    references: str = setting(
        "Score of a book with several human summaries: mean or max of the scores against each.", evaluation=True
    )
    reference: str | None = setting(
        "Evaluate summaries without a model: lead, the first words of the book; random, random sentences; oracle, "
        "the sentences closest to a human summary; human, a second human summary against the first. null: evaluate a "
        "model.",
        evaluation=True,
    )
    reference_words: int = setting("Most words of such a summary; human ones are not cut.", evaluation=True)

    def data_files(self, data_dir: Path, split: str, setting: str) -> list[Path]:
        return [book_file(data_dir, split, setting)]

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("task.split", self.split, ("validation", "test"))
        one_of("task.references", self.references, ("mean", "max"))
        if self.reference is not None:
            one_of("task.reference", self.reference, REFERENCES)
        at_least("task", self, 1, "reference_words")
        parse_lengths([self.input_length], "task.input_length")
        at_least("task", self, 1, "summary_tokens")
        require(not self.carry_state, "task.carry_state", self.carry_state, "must be false: books are independent")


Config = BooksumConfig
