"""The typed configuration: one dataclass a group of `conf/`, each field explained under it, checked when built.

Here is what is learned; how it runs, is measured and shown is in `infini.config.schema_running`.

No dependency beyond the standard library and PyYAML, so that help and error messages are quick.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib import resources
from typing import Any

import yaml

from infini.config.lengths import parse_depths, parse_lengths
from infini.config.schema_running import DecodingConfig, LoggerConfig, ParallelConfig, SuiteConfig
from infini.errors import at_least, one_of, require

MOST_ROWS = 2**20
"""Of a batch, examples of a cell and words of a vocabulary: more fill any memory before anything is said of it."""
LISTS = ("length", "depth")
"""Root keys that are lists; one value is a list of one."""
TEXTS = ("prompt", "save_state", "load_state", "output")
"""Root keys of `infini generate` whose values are taken as they are typed, without the grammar of the others."""
OPTIONAL_GROUPS = ("tuned", "experiment")
"""Groups that may be absent and have no dataclass: their files set values of the other groups."""


@dataclass
class TaskConfig:
    """What is learned and measured."""

    name: str
    """Task name; also the name of its folder below the data directory."""
    kind: str
    """Kind of models that it takes: `language_model`; or `any`, encoder-decoders too."""
    data_dir: str | None
    """Folder of the data; None means $INFINI_DATA_DIR/<name> when that variable is set, else the hub."""
    hub_id: str
    """Data set on the Hugging Face hub, used when there is no folder."""
    carry_state: bool
    """Whether a training row's state lives on into its next sequence while the document lasts."""
    positions: str
    """What models whose attention can have either take (model.positions): rotary, or t5."""

    @property
    def corpus(self) -> str:
        """Name of the task whose documents are read."""
        return self.name

    def __post_init__(self) -> None:
        one_of("task.kind", self.kind, ("language_model", "any"))
        one_of("task.positions", self.positions, ("rotary", "t5"))


@dataclass
class PasskeyConfig(TaskConfig):
    """A number hidden in a long text and asked for at its end."""

    tokenizer: str
    """`words`, the word-level tokenizer of the prompt; or `scale`, the one that the scale names. A training that starts
    from another model takes that model's."""
    digits: int
    """Digits of a key."""
    fill: str
    """blocks: whole blocks of filler, a little less than `length`; exact: the first is trimmed. In evaluation only."""
    as_printed: bool
    """Whether the filler after the key has the misprint of the paper's appendix."""
    distractors: int
    """Other keys ("The green key is ...") in the filler of a prompt."""
    filler: str
    """block: the paper's five sentences, repeated; book: text of PG19 books, of its own split."""
    lm_loss_weight: float
    """Weight of the loss on all other tokens beside the loss on the key; 0 asks for the key only."""
    few_digit_share: float
    """Share of the last stage's training keys that have two, three or four different digits at most, where looking up
    what follows a digit is not enough. Keys of the evaluation are always uniform."""
    knockout: str
    """none; or reset: evaluated with the memory emptied before every segment, which must leave chance
    where key and question lie in different segments."""
    examples: int
    """Prompts a cell of the evaluation (one length and depth)."""
    rows_per_call: int
    """Prompts read side by side in the evaluation; decides memory and speed, not the result."""

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


REFERENCES = ("lead", "random", "oracle", "human")
"""Summaries that need no model; see BooksumConfig.reference."""


@dataclass
class BooksumConfig(TaskConfig):
    """A summary of a whole book."""

    split: str
    """Books that an evaluation summarises: test, or validation, on which choices are made."""
    input_length: str | int
    """Tokens of a book that an evaluation reads, as 500K, where no `length` is given; the rest of it is left out."""
    summary_tokens: int
    """Tokens of a summary at most in training; longer ones are cut."""
    references: str
    """Of several summaries of a book: mean, the mean of the scores against each; or max."""
    reference: str | None
    """An evaluation of summaries without a model: lead, the book's first words; random, sentences of it; oracle,
    sentences picked with a person's summary at hand; human, a second person's summary against the first's. None: a
    model's."""
    reference_words: int
    """Words of such a summary (but for human) at most."""

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


TASK_CONFIGS: dict[str, type[TaskConfig]] = {
    "pg19": TaskConfig,
    "arxiv_math": TaskConfig,
    "passkey": PasskeyConfig,
    "booksum": BooksumConfig,
}
"""Task name -> the dataclass of its keys."""


@dataclass
class DimsConfig:
    """Sizes shared by all models of a table."""

    name: str
    """Name of these sizes."""
    d_model: int
    """Width of the residual stream."""
    n_layers: int
    """Number of blocks."""
    n_heads: int
    """Query heads a layer."""
    n_kv_heads: int | None
    """Key-value heads a layer, a divisor of n_heads; None means n_heads."""
    d_key: int
    """Size of a head's keys and queries; even, for the rotary embedding."""
    d_value: int | None
    """Size of a head's values; None means d_key."""
    d_ff: int
    """Width of the feed-forward layer."""
    segment_length: int
    """Tokens a segment."""

    def __post_init__(self) -> None:
        positive = ("d_model", "n_layers", "n_heads", "n_kv_heads", "d_key", "d_value", "d_ff", "segment_length")
        at_least("dims", self, 1, *positive)
        require(self.d_key % 2 == 0, "dims.d_key", self.d_key, "must be even (rotary embedding turns pairs)")
        if self.n_kv_heads is not None:
            divides = self.n_heads % self.n_kv_heads == 0
            require(divides, "dims.n_kv_heads", self.n_kv_heads, f"must divide dims.n_heads={self.n_heads}")


@dataclass
class ScaleConfig:
    """How large a vocabulary and how much evaluation this machine can take."""

    name: str
    """laptop (two processor cores, minutes), gpu (one GPU, minutes) or paper (as printed)."""
    tokenizer: str
    """`bpe`, trained on the train split, or the id of a tokenizer on the hub."""
    vocab_size: int
    """Entries of the vocabulary; for `bpe`, the size to train."""
    hub_train_documents: int | None
    """Documents of the hub's train split that are used; None means all. A folder is always used whole."""
    eval_max_tokens: int | None
    """Tokens evaluated a document; None means all."""
    eval_segments_per_call: int
    """Segments a call of the streamed evaluation; decides memory and speed, not the result."""
    knockouts: bool
    """Whether an evaluation also measures what memory is worth by resetting and by exchanging it."""
    knockout_max_tokens: int
    """Tokens of each document that the knock-outs read."""

    def __post_init__(self) -> None:
        require(bool(self.tokenizer), "scale.tokenizer", self.tokenizer, "must be bpe or a tokenizer id on the hub")
        # A byte-level vocabulary holds every byte and the end-of-document token.
        require(258 <= self.vocab_size <= MOST_ROWS, "scale.vocab_size", self.vocab_size, f"must be 258 to {MOST_ROWS}")
        positive = ("hub_train_documents", "eval_max_tokens", "eval_segments_per_call", "knockout_max_tokens")
        at_least("scale", self, 1, *positive)


@dataclass
class OptimizerConfig:
    """The rule that changes the weights."""

    name: str
    """adamw, adafactor, or muon (matrices; the rest by AdamW)."""
    lr: float
    """Highest learning rate of the schedule."""
    betas: list[float]
    """AdamW's two averaging coefficients."""
    weight_decay: float
    """Decay of matrices; gates, norms and embeddings have none."""
    gate_lr: float
    """Highest learning rate of the gates, which need their own to move at all; 0 freezes them."""
    clip_norm: float | None
    """Global gradient norm above which gradients are scaled down; None means never."""

    def __post_init__(self) -> None:
        one_of("optimizer.name", self.name, ("adamw", "adafactor", "muon"))
        require(self.lr > 0, "optimizer.lr", self.lr, "must be above 0")
        at_least("optimizer", self, 0, "gate_lr")
        in_range = len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas)
        require(in_range, "optimizer.betas", self.betas, "must be two numbers, at least 0 and below 1")
        at_least("optimizer", self, 0, "weight_decay")
        if self.clip_norm is not None:
            require(self.clip_norm > 0, "optimizer.clip_norm", self.clip_norm, "must be above 0, or null")


@dataclass
class RecipeConfig:
    """How a training runs."""

    name: str
    """`<task>_<scale>`."""
    batch_size: int
    """Documents side by side."""
    segments_per_sequence: int
    """Segments a training sequence; gradients flow through all of them."""
    excerpt_tokens: int | None
    """Documents longer than this are read in excerpts, so that a short training meets many; None reads them whole."""
    steps: int
    """Optimizer steps."""
    warmup_steps: int
    """Steps of linear warm-up."""
    schedule: str
    """After the warm-up: cosine or constant."""
    final_lr_fraction: float
    """Where the cosine ends, as a fraction of the highest rate."""
    checkpoint_activations: bool
    """Whether activations are computed again in the backward pass instead of kept: less memory, same gradients."""
    checkpoint_segments: int | None
    """The same, this many segments at a time: memory then grows with them instead of with the sequence. None: never."""
    loss_chunk: int
    """Tokens whose logits exist at the same time."""
    save_every: int | None
    """Steps between the points from which a stopped training goes on; None means about a minute between them."""
    curriculum: list[list[int]] | None
    """Easier stages before the training proper, each [segment length, tokens a sequence] or [segment length, tokens a
    sequence, steps]: of so many steps at most. Passkey: a batch keeps its number of tokens by having more rows. Books
    and mathematics: all segments are dims.segment_length long, and no gradient goes from one sequence of so many tokens
    into the one before. None means none."""
    advance_below: float
    """Smoothed loss, nats a token, below which the next stage begins (text never gets there: its stages need steps)."""
    length_extension: float | None
    """Not the paper's: at a random segment boundary of a sequence the memory is multiplied by a random factor between 1
    and this, as if that much more had been read. None means never."""
    length_extension_share: float
    """Share of the training steps in which that happens."""
    long_history: list[int] | None
    """Passkey, and a part of length extension: [pieces, steps]: in so many last steps half of the rows begin after a
    history of filler alone, in so many pieces at most (see infini.training.additions.long_history). None means none."""
    loss_temperature: float | None
    """Not the paper's: divides the logits in the last stage's loss. Above 1 the loss goes on asking for larger margins
    when every answer is right. None means 1."""
    sparse_writes: float | None
    """Not the paper's: weight in the last stage's loss of what tokens write to memory, the mean logarithm in nats (see
    infini.training.additions.sparse_writes). None means 0."""

    def __post_init__(self) -> None:
        names = ("batch_size", "segments_per_sequence", "excerpt_tokens", "steps", "loss_chunk", "save_every")
        at_least("recipe", self, 1, *names, "checkpoint_segments")
        at_least("recipe", self, 0, "warmup_steps")
        require(self.batch_size <= MOST_ROWS, "recipe.batch_size", self.batch_size, f"must be at most {MOST_ROWS}")
        within = self.warmup_steps <= self.steps
        require(within, "recipe.warmup_steps", self.warmup_steps, f"must be at most recipe.steps={self.steps}")
        one_of("recipe.schedule", self.schedule, ("cosine", "constant"))
        for name in ("final_lr_fraction", "length_extension_share"):
            require(0 <= getattr(self, name) <= 1, f"recipe.{name}", getattr(self, name), "must be between 0 and 1")
        if self.length_extension is not None:
            above = self.length_extension > 1
            require(above, "recipe.length_extension", self.length_extension, "must be above 1, or null")
        if self.loss_temperature is not None:
            require(self.loss_temperature > 0, "recipe.loss_temperature", self.loss_temperature, "must be above 0")
        at_least("recipe", self, 0, "sparse_writes")
        for stage in self.curriculum or ():
            whole = len(stage) in (2, 3) and 1 <= stage[0] <= stage[1] and min(stage) >= 1
            allowed = "stages must be [segment length, tokens a sequence(, steps)], the second at least the first"
            require(whole, "recipe.curriculum", self.curriculum, allowed)
        pair = self.long_history
        whole = pair is None or (len(pair) == 2 and min(pair) >= 1)
        require(whole, "recipe.long_history", pair, "must be [pieces, steps], or null")
        alone = pair is not None and self.length_extension is None
        require(not alone, "recipe.long_history", pair, "needs recipe.length_extension; or null")

    def rate_factor(self, step: int) -> float:
        """Fraction of the highest learning rate at optimizer step `step` (1 is the first, `steps` the last)."""
        if step < self.warmup_steps:
            return step / self.warmup_steps
        if self.schedule == "constant":
            return 1.0
        progress = min(1.0, (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps))
        cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.final_lr_fraction + (1.0 - self.final_lr_fraction) * cosine


@dataclass
class Config:
    """Everything a command needs to know."""

    task: TaskConfig
    """What is learned and measured."""
    model: dict[str, Any]
    """The system, by name, and its options: the fields of its own dataclass, which validates them."""
    dims: DimsConfig
    """Sizes."""
    scale: ScaleConfig
    """Vocabulary and evaluation."""
    optimizer: OptimizerConfig
    """Optimizer and rates."""
    parallel: ParallelConfig
    """Devices and precision."""
    recipe: RecipeConfig
    """Batch, steps and schedule."""
    report: dict[str, Any]
    """Rows and columns of a table, read by the report."""
    logger: LoggerConfig
    """Training curves."""
    suite: SuiteConfig
    """What `infini bench` measures."""
    decoding: DecodingConfig
    """How `infini generate` draws."""
    variant: str | None
    """Name of the report whose variant of a model this is: the run fills that report's cells and no other's. None: a
    run of the model as it is."""
    seed: int
    """Decides initial values, data order and what is drawn."""
    checkpoint: str | None
    """Run id or folder of a trained model; None means the newest matching run."""
    init_from: str | None
    """Run id or folder whose weights a training starts from; None means fresh weights."""
    length: list[str | int]
    """Tokens that an evaluation covers, as 32K or 1M: of prompts of the passkey task; of a book to sum up, where it is
    given (otherwise task.input_length)."""
    depth: list[str | float]
    """Places of the key in the prompt: start, middle, end, or a number from 0 to 1; `grid` means 0, 0.05, ... 1."""
    prompt: str | None
    """What `infini generate` goes on from: a text, @ and the name of a file, or - for standard input."""
    save_state: str | None
    """File that takes the state of a prompt that was read, to go on from as often as one likes."""
    load_state: str | None
    """File of such a state; a prompt is read after it."""
    output: str | None
    """File that takes what `infini summarize` says; None prints it."""
    results_dir: str
    """Where records and checkpoints go. Here and in every other name of a file or a folder ~ at the beginning is the
    home folder."""
    cache_dir: str | None
    """Where tokenised data goes; None means $INFINI_CACHE_DIR, else ~/.cache/infini."""

    def __post_init__(self) -> None:
        require("name" in self.model, "model", self.model, "must have a name")
        one_of("model.name", self.model["name"], groups()["model"])
        require(0 <= self.seed < 2**32, "seed", self.seed, "must be at least 0 and below 2**32")
        parse_lengths(self.length)
        parse_depths(self.depth)
        history, asks = self.recipe.long_history, self.task.name == "passkey"
        require(asks or history is None, "recipe.long_history", history, f"must be null for task={self.task.name}")
        require(bool(self.results_dir), "results_dir", self.results_dir, "must be a folder")


def groups() -> dict[str, list[str]]:
    """Config groups and the names each can take, as the files of the `conf` package give them."""
    folders = sorted((f for f in resources.files("infini.conf").iterdir() if f.is_dir()), key=lambda f: f.name)
    found = {f.name: sorted(p.name[:-5] for p in f.iterdir() if p.name.endswith(".yaml")) for f in folders}
    return {name: choices for name, choices in found.items() if choices}


def root_defaults() -> dict[str, Any]:
    """The root keys that are no group, with their defaults."""
    text = resources.files("infini.conf").joinpath("config.yaml").read_text(encoding="utf-8")
    return {key: value for key, value in yaml.safe_load(text).items() if key not in ("defaults", "hydra")}
