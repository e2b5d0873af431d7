"""The keys of the passkey task."""

from __future__ import annotations

from dataclasses import dataclass

from infini.config.fields import setting
from infini.config.schema import TaskConfig
from infini.errors import at_least, one_of, require


@dataclass
class PasskeyConfig(TaskConfig):
    """Retrieve a number that is hidden in a long text."""

    evaluation_reads = ("length", "depth", "part")
    # Generalization to other segment lengths is measured.
    evaluation_changes = ("dims.segment_length",)
    # With fewer digits than it was trained on, a model would be scored on half an answer.
    evaluation_inherits = ("digits",)
    # Any language model can answer a prompt; a model of prompts cannot read books.
    evaluates_any_model = True
    has_documents = False
    has_prompts = True

    tokenizer: str = setting(
        "`words`, the word-level tokenizer of the prompt, or `scale`, the tokenizer of the scale. A training that "
        "starts from another model uses that model's.",
        training=True,
    )
    digits: int = setting("Digits of the key.")
    fill: str = setting(
        "Evaluation prompts: blocks, whole blocks of filler and slightly fewer tokens than `length`; or exact, with "
        "the first block trimmed."
    )
    as_printed: bool = setting("Whether the filler after the key has the misprint of the paper's appendix.")
    distractors: int = setting('Other keys ("The green key is ...") in the filler of a prompt.')
    filler: str = setting("block, the paper's five sentences repeated; or book, text of PG19 books of the same split.")
    lm_loss_weight: float = setting(
        "Weight of the loss on all other tokens, added to the loss on the key; 0: the key only.", training=True
    )
    few_digit_share: float = setting(
        "Fraction of the last stage's training keys with at most two, three or four distinct digits, for which it is "
        "not enough to look up what follows a digit. Evaluation keys are always uniform.",
        training=True,
    )
    cut_key_share: float | None = setting(
        "Fraction of the last stage's training keys that are placed so that a segment ends inside their sentence, "
        "beside those where it does by chance; null: 0.4.",
        training=True,
    )
    knockout: str = setting(
        "none, or reset: the evaluation empties the memory before every segment. Accuracy must then be at chance where "
        "key and question are in different segments.",
        evaluation=True,
    )
    examples: int = setting("Evaluation prompts per cell, one length and depth.", evaluation=True)
    rows_per_call: int = setting(
        "Prompts per batch of the evaluation; changes memory use and speed, not the result.", evaluation=True
    )

    @property
    def corpus(self) -> str:
        return "pg19"

    @property
    def reads_data(self) -> bool:
        return self.filler == "book"

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("task.tokenizer", self.tokenizer, ("words", "scale"))
        one_of("task.fill", self.fill, ("blocks", "exact"))
        one_of("task.knockout", self.knockout, ("none", "reset"))
        one_of("task.filler", self.filler, ("block", "book"))
        at_least("task", self, 2, "digits")
        at_least("task", self, 1, "examples", "rows_per_call")
        at_least("task", self, 0, "distractors", "lm_loss_weight")
        require(0 <= self.few_digit_share <= 1, "task.few_digit_share", self.few_digit_share, "must be between 0 and 1")
        cut = self.cut_key_share
        require(cut is None or 0 <= cut <= 1, "task.cut_key_share", cut, "must be between 0 and 1, or null")
        require(not self.carry_state, "task.carry_state", self.carry_state, "must be false: prompts are independent")


Config = PasskeyConfig
