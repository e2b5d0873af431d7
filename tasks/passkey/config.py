"""The keys of the passkey task."""

from __future__ import annotations

from dataclasses import dataclass

from infini.config.fields import setting
from infini.config.schema import TaskConfig
from infini.errors import at_least, one_of, require


@dataclass
class PasskeyConfig(TaskConfig):
    """A number hidden in a long text and asked for at its end."""

    evaluation_reads = ("length", "depth")
    # Generalization to other segment lengths is measured.
    evaluation_changes = ("dims.segment_length",)
    # With fewer digits than it was trained on, a model would be scored on half an answer.
    evaluation_inherits = ("digits",)
    # Any language model can answer a prompt; a model of prompts cannot read books.
    evaluates_any_model = True
    has_long_history = True

    tokenizer: str = setting(
        "`words`, the word-level tokenizer of the prompt; or `scale`, the one that the scale names. A training "
        "that starts from another model takes that model's."
    )
    digits: int = setting("Digits of a key.")
    fill: str = setting(
        "blocks: whole blocks of filler, a little less than `length`; exact: the first is trimmed. In evaluation only."
    )
    as_printed: bool = setting("Whether the filler after the key has the misprint of the paper's appendix.")
    distractors: int = setting('Other keys ("The green key is ...") in the filler of a prompt.')
    filler: str = setting("block: the paper's five sentences, repeated; book: text of PG19 books, of its own split.")
    lm_loss_weight: float = setting(
        "Weight of the loss on all other tokens beside the loss on the key; 0 asks for the key only."
    )
    few_digit_share: float = setting(
        "Share of the last stage's training keys that have two, three or four different digits at most, where "
        "looking up what follows a digit is not enough. Keys of the evaluation are always uniform."
    )
    knockout: str = setting(
        "none; or reset: evaluated with the memory emptied before every segment, which must leave chance where key"
        " and question lie in different segments.",
        evaluation=True,
    )
    examples: int = setting("Prompts a cell of the evaluation (one length and depth).", evaluation=True)
    rows_per_call: int = setting(
        "Prompts read side by side in the evaluation; decides memory and speed, not the result.",
        evaluation=True,
    )

    @property
    def corpus(self) -> str:
        return "pg19"

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
        require(not self.carry_state, "task.carry_state", self.carry_state, "must be false: every prompt stands alone")


Config = PasskeyConfig
