"""The typed configuration: one dataclass for each group of `conf/`, checked when it is built.

Each field carries its documentation, which `infini <verb> --help` prints. The keys of a task are in the task's own
folder: see task_schema.

This module needs only the standard library and PyYAML, so that help and error messages are quick.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import math
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, ClassVar

import yaml

from infini.config.fields import setting
from infini.config.lengths import parse_depths, parse_lengths
from infini.errors import at_least, one_of, require

MAX_ROWS = 2**20
"""Of a batch, examples of a cell and words of a vocabulary: more fill any memory before anything is said of it."""
LISTS = ("length", "depth")
"""Root keys that are lists; one value is a list of one."""
TEXTS = ("prompt", "save_state", "load_state", "output")
"""Root keys of `infini generate` whose values are taken as they are typed, without the grammar of the others."""
OPTIONAL_GROUPS = ("tuned", "experiment")
"""Groups that may be absent and have no dataclass: their files set values of the other groups."""


@dataclass
class TaskConfig:
    """What is learned and measured. The class variables declare what commands need to know of a task."""

    evaluation_reads: ClassVar[tuple[str, ...]] = ("scale.eval_max_tokens",)
    """Keys and groups outside `task` that its evaluation reads and those of some other tasks do not."""
    evaluation_changes: ClassVar[tuple[str, ...]] = ()
    """Keys that a training reads and an evaluation may still change: no weight depends on their value."""
    evaluation_inherits: ClassVar[tuple[str, ...]] = ()
    """Keys of `task` whose values an evaluation takes from the training, unless they are set."""
    evaluates_any_model: ClassVar[bool] = False
    """Whether models that were trained on other tasks can be evaluated."""
    has_long_history: ClassVar[bool] = False
    """Whether its training batches can hold a history (recipe.long_history)."""

    name: str = setting("Task name; also the name of its folder below the data directory.")
    kind: str = setting("Kind of models that it takes: `language_model`; or `any`, encoder-decoders too.")
    data_dir: str | None = setting(
        "Folder of the data; None means $INFINI_DATA_DIR/<name> when that variable is set, else the hub."
    )
    hub_id: str = setting("Data set on the Hugging Face hub, used when there is no folder.")
    carry_state: bool = setting(
        "Whether a training row's state lives on into its next sequence while the document lasts."
    )
    positions: str = setting("What models whose attention can have either take (model.positions): rotary, or t5.")

    @property
    def corpus(self) -> str:
        """Name of the task whose documents are read."""
        return self.name

    def __post_init__(self) -> None:
        one_of("task.kind", self.kind, ("language_model", "any"))
        one_of("task.positions", self.positions, ("rotary", "t5"))


@cache
def task_schema(name: str) -> type[TaskConfig]:
    """The dataclass of a task's keys: `Config` of `infini.tasks.<name>.config`; TaskConfig where that module is absent.

    A name that is no task gives TaskConfig, too.
    """
    module = f"infini.tasks.{name}.config"
    try:
        found = importlib.util.find_spec(module)
    except (ModuleNotFoundError, ValueError):
        found = None
    if found is None:
        return TaskConfig
    schema: type[TaskConfig] = importlib.import_module(module).Config
    return schema


@cache
def evaluation_keys(group: str) -> frozenset[str]:
    """The keys of a group that only evaluations read; of `task`, those of every task."""
    schemas = [task_schema(name) for name in groups()["task"]] if group == "task" else [ScaleConfig]
    fields = (field for schema in schemas for field in dataclasses.fields(schema))
    return frozenset(field.name for field in fields if field.metadata.get("evaluation"))


@dataclass
class DimsConfig:
    """Sizes shared by all models of a table."""

    name: str = setting("Name of these sizes.")
    d_model: int = setting("Width of the residual stream.")
    n_layers: int = setting("Number of blocks.")
    n_heads: int = setting("Query heads a layer.")
    n_kv_heads: int | None = setting("Key-value heads a layer, a divisor of n_heads; None means n_heads.")
    d_key: int = setting("Size of a head's keys and queries; even, for the rotary embedding.")
    d_value: int | None = setting("Size of a head's values; None means d_key.")
    d_ff: int = setting("Width of the feed-forward layer.")
    segment_length: int = setting("Tokens a segment.")

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

    name: str = setting("laptop (two processor cores, minutes), gpu (one GPU, minutes) or paper (as printed).")
    tokenizer: str = setting("`bpe`, trained on the train split, or the id of a tokenizer on the hub.")
    vocab_size: int = setting("Entries of the vocabulary; for `bpe`, the size to train.")
    hub_train_documents: int | None = setting(
        "Documents of the hub's train split that are used; None means all. A folder is always used whole."
    )
    eval_max_tokens: int | None = setting("Tokens evaluated a document; None means all.", evaluation=True)
    eval_segments_per_call: int = setting(
        "Segments a call of the streamed evaluation; decides memory and speed, not the result.",
        evaluation=True,
    )
    knockouts: bool = setting(
        "Whether an evaluation also measures what memory is worth by resetting and by exchanging it.",
        evaluation=True,
    )
    knockout_max_tokens: int = setting("Tokens of each document that the knock-outs read.", evaluation=True)

    def __post_init__(self) -> None:
        require(bool(self.tokenizer), "scale.tokenizer", self.tokenizer, "must be bpe or a tokenizer id on the hub")
        # A byte-level vocabulary holds every byte and the end-of-document token.
        require(258 <= self.vocab_size <= MAX_ROWS, "scale.vocab_size", self.vocab_size, f"must be 258 to {MAX_ROWS}")
        positive = ("hub_train_documents", "eval_max_tokens", "eval_segments_per_call", "knockout_max_tokens")
        at_least("scale", self, 1, *positive)


@dataclass
class OptimizerConfig:
    """The rule that changes the weights."""

    name: str = setting("adamw, adafactor, or muon (matrices; the rest by AdamW).")
    lr: float = setting("Highest learning rate of the schedule.")
    betas: list[float] = setting("AdamW's two averaging coefficients.")
    weight_decay: float = setting("Decay of matrices; gates, norms and embeddings have none.")
    gate_lr: float = setting("Highest learning rate of the gates, which need their own to move at all; 0 freezes them.")
    clip_norm: float | None = setting("Global gradient norm above which gradients are scaled down; None means never.")

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

    name: str = setting("`<task>_<scale>`.")
    batch_size: int = setting("Documents side by side.")
    segments_per_sequence: int = setting("Segments a training sequence; gradients flow through all of them.")
    excerpt_tokens: int | None = setting(
        "Documents longer than this are read in excerpts, so that a short training meets many; None reads them whole."
    )
    steps: int = setting("Optimizer steps.")
    warmup_steps: int = setting("Steps of linear warm-up.")
    schedule: str = setting("After the warm-up: cosine or constant.")
    final_lr_fraction: float = setting("Where the cosine ends, as a fraction of the highest rate.")
    checkpoint_activations: bool = setting(
        "Whether activations are computed again in the backward pass instead of kept: less memory, same gradients."
    )
    checkpoint_segments: int | None = setting(
        "The same, this many segments at a time: memory then grows with them instead of with the sequence. None: never."
    )
    loss_chunk: int = setting("Tokens whose logits exist at the same time.")
    save_every: int | None = setting(
        "Steps between the points from which a stopped training goes on; None means about a minute between them."
    )
    curriculum: list[list[int]] | None = setting(
        "Easier stages before the training proper, each [segment length, tokens a sequence] or [segment length, "
        "tokens a sequence, steps]: of so many steps at most. Passkey: a batch keeps its number of tokens by "
        "having more rows. Books and mathematics: all segments are dims.segment_length long, and no gradient goes "
        "from one sequence of so many tokens into the one before. None means none."
    )
    advance_below: float = setting(
        "Smoothed loss, nats a token, below which the next stage begins (text never gets there: its stages need steps)."
    )
    length_extension: float | None = setting(
        "Not the paper's: at a random segment boundary of a sequence the memory is multiplied by a random factor "
        "between 1 and this, as if that much more had been read. None means never."
    )
    length_extension_share: float = setting("Share of the training steps in which that happens.")
    long_history: list[int] | None = setting(
        "Passkey, and a part of length extension: [pieces, steps]: in so many last steps half of the rows begin "
        "after a history of filler alone, in so many pieces at most (see infini.training.additions.long_history). "
        "None means none."
    )
    loss_temperature: float | None = setting(
        "Not the paper's: divides the logits in the last stage's loss. Above 1 the loss goes on asking for larger "
        "margins when every answer is right. None means 1."
    )
    sparse_writes: float | None = setting(
        "Not the paper's: weight in the last stage's loss of what tokens write to memory, the mean logarithm in "
        "nats (see infini.training.additions.sparse_writes). None means 0."
    )

    def __post_init__(self) -> None:
        names = ("batch_size", "segments_per_sequence", "excerpt_tokens", "steps", "loss_chunk", "save_every")
        at_least("recipe", self, 1, *names, "checkpoint_segments")
        at_least("recipe", self, 0, "warmup_steps")
        require(self.batch_size <= MAX_ROWS, "recipe.batch_size", self.batch_size, f"must be at most {MAX_ROWS}")
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
class ParallelConfig:
    """Devices and precision."""

    name: str = setting("Name of this arrangement.")
    accelerator: str = setting("auto, cpu or gpu.")
    devices: int = setting("Number of devices.")
    strategy: str = setting("Lightning's name of the strategy.")
    precision: str = setting(
        "Compute type of matrix products: fp32, bf16, or auto (bf16 where the hardware multiplies it fast)."
    )
    compile: str = setting(
        "Whether models that read segments one after the other with gradients through all of them (rmt) train by "
        "compiled code: always, never, or auto (long trainings on a processor)."
    )

    def __post_init__(self) -> None:
        one_of("parallel.compile", self.compile, ("auto", "always", "never"))
        one_of("parallel.accelerator", self.accelerator, ("auto", "cpu", "gpu"))
        one_of("parallel.precision", self.precision, ("auto", "bf16", "fp32"))
        at_least("parallel", self, 1, "devices")


@dataclass
class LoggerConfig:
    """Where training curves go."""

    name: str = setting("csv, wandb (offline where nobody is logged in), tensorboard, or none.")

    def __post_init__(self) -> None:
        one_of("logger.name", self.name, ("csv", "wandb", "tensorboard", "none"))


@dataclass
class SuiteConfig:
    """What `infini bench` measures."""

    name: str = setting("train, models, stream, decode, sources, lengths, all, paper or paper_models.")
    models: list[str] = setting(
        "Models whose training step is measured; `local`, with which the others are compared, is one."
    )
    repeats: int = setting("Interleaved repeats of a training step of each model; 0 leaves the training step out.")
    stream_short_tokens: int = setting("Length of the short stream that the long one is compared with.")
    stream_tokens: int = setting("Length of the long stream, a multiple of the short one; 0 leaves streaming out.")
    checkpointing: bool = setting(
        "Whether training steps are also measured with activations computed again in the backward pass."
    )
    oracle_tokens: int = setting(
        "Tokens on which one layer is compared with the slow reference in float64; 0 leaves the comparison out."
    )
    agreement_tokens: int = setting(
        "Tokens on which every model on this device is compared with itself on the processor; 0 leaves that out."
    )
    decode_tokens: int = setting("Tokens read one by one after a short and after a long text; 0 leaves decoding out.")
    decode_short_tokens: int = setting("Length of the short text.")
    decode_long_tokens: int = setting("Length of the long one.")
    source_tokens: list[int] = setting("Lengths of sources that an encoder-decoder reads; none leaves that out.")
    training_segments: list[int] = setting(
        "Lengths of training sequences, in segments, whose step's peak memory is measured; none leaves that out."
    )
    training_group: int = setting("Segments whose activations are kept at a time, beside all of them.")

    def __post_init__(self) -> None:
        at_least("suite", self, 0, "repeats", "stream_tokens", "oracle_tokens", "agreement_tokens", "decode_tokens")
        at_least("suite", self, 1, "stream_short_tokens", "decode_short_tokens", "training_group")
        at_least("suite", self, self.decode_short_tokens, "decode_long_tokens")
        for key in ("source_tokens", "training_segments"):
            lengths = getattr(self, key)
            whole = all(isinstance(length, int) and not isinstance(length, bool) and length > 0 for length in lengths)
            require(whole, f"suite.{key}", lengths, "whole numbers of at least 1")
        measured = (self.repeats, self.stream_tokens, self.oracle_tokens, self.agreement_tokens, self.decode_tokens)
        require(
            any(measured) or bool(self.source_tokens) or bool(self.training_segments),
            "suite.repeats",
            self.repeats,
            "must be above 0: nothing else is measured",
        )
        require("local" in self.models, "suite.models", self.models, "local and others to compare with it")
        fits = self.stream_tokens % self.stream_short_tokens == 0 and self.stream_tokens != self.stream_short_tokens
        allowed = f"0, or a multiple of suite.stream_short_tokens={self.stream_short_tokens}, at least twice it"
        require(fits, "suite.stream_tokens", self.stream_tokens, allowed)


@dataclass
class DecodingConfig:
    """How `infini generate` draws tokens."""

    name: str
    max_new_tokens: int = setting("Tokens that are drawn, unless the model ends the text before.")
    temperature: float = setting("Logits are divided by it; 0 takes the likeliest token each time.")
    top_p: float = setting(
        "Only the likeliest tokens whose probabilities first reach this sum can be drawn; 1 is all of them."
    )

    def __post_init__(self) -> None:
        at_least("decoding", self, 0, "max_new_tokens", "temperature")
        require(0 < self.top_p <= 1, "decoding.top_p", self.top_p, "must be above 0 and at most 1")


@dataclass
class Config:
    """Everything a command needs to know."""

    task: TaskConfig = setting("What is learned and measured.")
    model: dict[str, Any] = setting(
        "The system, by name, and its options: the fields of its own dataclass, which validates them."
    )
    dims: DimsConfig = setting("Sizes.")
    scale: ScaleConfig = setting("Vocabulary and evaluation.")
    optimizer: OptimizerConfig = setting("Optimizer and rates.")
    parallel: ParallelConfig = setting("Devices and precision.")
    recipe: RecipeConfig = setting("Batch, steps and schedule.")
    report: dict[str, Any] = setting("Rows and columns of a table, read by the report.")
    logger: LoggerConfig = setting("Training curves.")
    suite: SuiteConfig = setting("What `infini bench` measures.")
    decoding: DecodingConfig = setting("How `infini generate` draws.")
    variant: str | None = setting(
        "Name of the report whose variant of a model this is: the run fills that report's cells and no other's. "
        "None: a run of the model as it is."
    )
    seed: int = setting("Decides initial values, data order and what is drawn.")
    checkpoint: str | None = setting("Run id or folder of a trained model; None means the newest matching run.")
    init_from: str | None = setting("Run id or folder whose weights a training starts from; None means fresh weights.")
    length: list[str | int] = setting(
        "Tokens that an evaluation covers, as 32K or 1M: of prompts of the passkey task; of a book to sum up, "
        "where it is given (otherwise task.input_length)."
    )
    depth: list[str | float] = setting(
        "Places of the key in the prompt: start, middle, end, or a number from 0 to 1; `grid` means 0, 0.05, ... 1."
    )
    prompt: str | None = setting(
        "What `infini generate` goes on from: a text, @ and the name of a file, or - for standard input."
    )
    save_state: str | None = setting(
        "File that takes the state of a prompt that was read, to go on from as often as one likes."
    )
    load_state: str | None = setting("File of such a state; a prompt is read after it.")
    output: str | None = setting("File that takes what `infini summarize` says; None prints it.")
    results_dir: str = setting(
        "Where records and checkpoints go. Here and in every other name of a file or a folder ~ at the beginning "
        "is the home folder."
    )
    cache_dir: str | None = setting("Where tokenised data goes; None means $INFINI_CACHE_DIR, else ~/.cache/infini.")

    def __post_init__(self) -> None:
        require("name" in self.model, "model", self.model, "must have a name")
        one_of("model.name", self.model["name"], groups()["model"])
        require(0 <= self.seed < 2**32, "seed", self.seed, "must be at least 0 and below 2**32")
        parse_lengths(self.length)
        parse_depths(self.depth)
        history, allowed = self.recipe.long_history, self.task.has_long_history
        require(allowed or history is None, "recipe.long_history", history, f"must be null for task={self.task.name}")
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
