"""The keys of the summarization task."""

from __future__ import annotations

from dataclasses import dataclass

from infini.config.fields import setting
from infini.config.lengths import parse_lengths
from infini.config.schema import TaskConfig
from infini.errors import at_least, one_of, require

REFERENCES = ("lead", "random", "oracle", "human")
"""Summaries that need no model; see BooksumConfig.reference."""


@dataclass
class BooksumConfig(TaskConfig):
    """A summary of a whole book."""

    evaluation_reads = ("length", "decoding")

    split: str = setting(
        "Books that an evaluation summarises: test, or validation, on which choices are made.",
        evaluation=True,
    )
    input_length: str | int = setting(
        "Tokens of a book that an evaluation reads, as 500K, where no `length` is given; the rest of it is left out.",
        evaluation=True,
    )
    summary_tokens: int = setting("Tokens of a summary at most in training; longer ones are cut.")
    references: str = setting(
        "Of several summaries of a book: mean, the mean of the scores against each; or max.",
        evaluation=True,
    )
    reference: str | None = setting(
        "An evaluation of summaries without a model: lead, the book's first words; random, sentences of it; "
        "oracle, sentences picked with a person's summary at hand; human, a second person's summary against the "
        "first's. None: a model's.",
        evaluation=True,
    )
    reference_words: int = setting("Words of such a summary (but for human) at most.", evaluation=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("task.split", self.split, ("validation", "test"))
        one_of("task.references", self.references, ("mean", "max"))
        if self.reference is not None:
            one_of("task.reference", self.reference, REFERENCES)
        at_least("task", self, 1, "reference_words")
        parse_lengths([self.input_length], "task.input_length")
        at_least("task", self, 1, "summary_tokens")
        require(not self.carry_state, "task.carry_state", self.carry_state, "must be false: every book stands alone")


Config = BooksumConfig
