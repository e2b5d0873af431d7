"""The typed configuration: one dataclass for each group of `conf/`, checked when it is built.

Each field carries its documentation, which `infini <verb> --help` prints. The keys of a task are in the folder of that
task; see task_schema.

This module imports only the standard library and PyYAML, so that help and error messages are fast.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import math
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, get_type_hints

import yaml

from infini.config.data_files import TEXT_LAYOUT, text_files
from infini.config.fields import setting
from infini.config.lengths import parse_depths, parse_lengths, parse_part
from infini.errors import InputError, at_least, first_line, one_of, require

MAX_ROWS = 2**20
"""Maximum rows of a batch, and entries of a vocabulary: more could exhaust the memory without an error message."""
LISTS = ("length", "depth")
"""Root keys that are lists; a single value is a list of one."""
RAW_TEXT_KEYS = ("prompt", "save_state", "load_state", "output", "base", "out", "key", "place")
"""Root keys whose values are taken as they are typed, without Hydra's grammar."""
OPTIONAL_GROUPS = ("tuned", "experiment")
"""Groups that may be null. They have no dataclass: their files set values of other groups."""

TRAINING_GROUPS = ("task", "model", "dims", "scale", "optimizer", "recipe", "parallel")
"""Groups that decide a training. In these sets of keys, a pattern is a key, the name of a group (its choice), or
`group.*` (its choice and all of its keys)."""
TRAINING_KEYS = (*(f"{group}.*" for group in TRAINING_GROUPS), "tuned", "init_from")
"""Settings that decide a training; a search identifies its trainings by these."""
REPORT_KEYS = ("report.*", "experiment")
"""Settings that select a report and change it."""
SHOWN = ("full", "logger.*")
"""Settings that decide where a report's table is shown, and how much of it."""
FOLDER_KEYS = ("results_dir", "cache_dir")
"""Root keys that say where files go."""


@dataclass
class TaskConfig:
    """A task: data to learn and measures to report. The class variables declare what commands need to know of it."""

    evaluation_reads: ClassVar[tuple[str, ...]] = (
        "scale.eval_max_tokens",
        "scale.eval_segments_per_call",
        "scale.knockouts",
        "scale.knockout_max_tokens",
        "report.split",
        "part",
    )
    """Keys and groups outside `task` that its evaluation reads and those of some other tasks do not."""
    evaluation_changes: ClassVar[tuple[str, ...]] = ()
    """Keys that a training reads and an evaluation may still change: no weight depends on their value."""
    evaluation_inherits: ClassVar[tuple[str, ...]] = ()
    """Keys of `task` whose values an evaluation takes from the training, unless they are set."""
    evaluates_any_model: ClassVar[bool] = False
    """Whether models that were trained on other tasks can be evaluated."""
    measured_by_any_task: ClassVar[bool] = False
    """Whether other tasks evaluate models that were trained on this one."""
    is_trained_on: ClassVar[bool] = True
    """Whether it has training data. A task without is a benchmark for models that were trained on others."""
    has_documents: ClassVar[bool] = True
    """Whether its training batches are documents, which recipe.excerpt_tokens cuts."""
    has_prompts: ClassVar[bool] = False
    """Whether its training batches are prompts, which can follow a history (recipe.long_history) and differ in length
    (recipe.short_sequences)."""
    data_layout: ClassVar[str] = TEXT_LAYOUT
    """Describes the contents of a folder of its data, in messages."""

    name: str = setting("Task name; also the name of its folder below the data directory.")
    kind: str = setting("Kind of model: `language_model`, or `any` for encoder-decoders too.")
    data_dir: str | None = setting(
        "Folder of the data; null: $INFINI_DATA_DIR/<name> where that variable is set, else the hub."
    )
    hub_id: str = setting("Data set on the Hugging Face hub, used where there is no folder.")
    carry_state: bool = setting(
        "Whether a row's state is carried into its next training sequence, as long as the document lasts.",
        training=True,
    )
    positions: str = setting(
        "Position encoding of models that have both (model.positions): rotary or t5.", training=True
    )

    @property
    def corpus(self) -> str:
        """Name of the task whose documents this one reads."""
        return self.name

    @property
    def corpora(self) -> tuple[str, ...]:
        """The corpora of a mixture, each in a folder of its own; empty where the task reads `corpus` alone."""
        return ()

    @property
    def reads_data(self) -> bool:
        """Whether its trainings and evaluations always read documents."""
        return True

    def data_files(self, data_dir: Path, split: str, setting: str) -> list[Path]:
        """The files of a split in a folder, by their names alone; see text_files."""
        return text_files(data_dir, split, setting)

    def __post_init__(self) -> None:
        if self.data_dir and (folder := str(Path(self.data_dir))) != "synthetic":
            # `books/`, as completion writes it, is `books`: the same training. `synthetic/` is a folder.
            self.data_dir = folder
        one_of("task.kind", self.kind, ("language_model", "any"))
        one_of("task.positions", self.positions, ("rotary", "t5"))


@cache
def task_schema(name: str) -> type[TaskConfig]:
    """The dataclass of a task's keys: `Config` of `infini.tasks.<name>.config`, or TaskConfig where there is none.

    A task belongs to a higher layer. It is imported by its name, because nothing lists tasks, and its configuration
    imports nothing above infini.config.
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


def schema_of(group: str, choice: str) -> Any:
    """The dataclass of a group's keys at one of its choices; a type that is no dataclass where there is none."""
    if group == "task":
        return task_schema(choice)
    return WandbConfig if (group, choice) == ("logger", "wandb") else get_type_hints(Config)[group]


def evaluation_keys(group: str) -> frozenset[str]:
    """The keys of a group that only evaluations read; for `task`, those of all tasks."""
    return _keys_of("evaluation", group)


def training_keys(group: str) -> frozenset[str]:
    """The keys of a group that only trainings read; for `task`, those of all tasks."""
    return _keys_of("training", group)


@cache
def _keys_of(verb: str, group: str) -> frozenset[str]:
    schemas = [task_schema(name) for name in groups()["task"]] if group == "task" else [ScaleConfig]
    fields = (field for schema in schemas for field in dataclasses.fields(schema))
    return frozenset(field.name for field in fields if field.metadata.get(verb))


@dataclass
class DimsConfig:
    """Sizes shared by all models of a table."""

    name: str = setting("Name of these sizes.")
    d_model: int = setting("Width of the residual stream.")
    n_layers: int = setting("Number of blocks.")
    n_heads: int = setting("Query heads per layer.")
    n_kv_heads: int | None = setting("Key-value heads per layer, a divisor of n_heads; null: n_heads.")
    d_key: int = setting("Size of a head's keys and queries; even, for the rotary embedding.")
    d_value: int | None = setting("Size of a head's values; null: d_key.")
    d_ff: int = setting("Width of the feed-forward layer.")
    segment_length: int = setting("Tokens per segment.")

    def __post_init__(self) -> None:
        positive = ("d_model", "n_layers", "n_heads", "n_kv_heads", "d_key", "d_value", "d_ff", "segment_length")
        at_least("dims", self, 1, *positive)
        require(self.d_key % 2 == 0, "dims.d_key", self.d_key, "must be even (the rotary embedding rotates pairs)")
        if self.n_kv_heads is not None:
            divides = self.n_heads % self.n_kv_heads == 0
            require(divides, "dims.n_kv_heads", self.n_kv_heads, f"must divide dims.n_heads={self.n_heads}")


@dataclass
class ScaleConfig:
    """Size of the vocabulary and of evaluations, by the machine."""

    name: str = setting("laptop (two processor cores, minutes to hours), gpu (one GPU, hours) or paper (as printed).")
    tokenizer: str = setting("`bpe`, trained on the train split, or the id of a tokenizer on the hub.")
    vocab_size: int = setting("Entries of the vocabulary; for `bpe`, the size to train.")
    hub_train_documents: int | None = setting(
        "Documents of the hub's train split to use; null: all. A folder is always used whole."
    )
    eval_max_tokens: int | None = setting("Tokens to evaluate per document; null: all.", evaluation=True)
    eval_segments_per_call: int = setting(
        "Segments per call of the streamed evaluation; changes memory use and speed, not the result. A call of a "
        "pretrained language model reads at most 2,048 tokens of a document, or one segment.",
        evaluation=True,
    )
    knockouts: bool = setting(
        "Whether an evaluation also measures the loss with the memory reset and with another document's memory.",
        evaluation=True,
    )
    knockout_max_tokens: int = setting("Tokens per document that these knock-outs read.", evaluation=True)

    def __post_init__(self) -> None:
        require(bool(self.tokenizer), "scale.tokenizer", self.tokenizer, "must be bpe or a tokenizer id on the hub")
        # A byte-level vocabulary holds all 256 bytes and two special tokens.
        require(258 <= self.vocab_size <= MAX_ROWS, "scale.vocab_size", self.vocab_size, f"must be 258 to {MAX_ROWS}")
        positive = ("hub_train_documents", "eval_max_tokens", "eval_segments_per_call", "knockout_max_tokens")
        at_least("scale", self, 1, *positive)


@dataclass
class OptimizerConfig:
    """Optimizer and learning rates."""

    name: str = setting("adamw, adafactor, or muon (for matrices; AdamW for all else).")
    lr: float = setting("Peak learning rate of the schedule.")
    betas: list[float] = setting("AdamW's two coefficients of its running averages.")
    weight_decay: float = setting("Weight decay of matrices; gates, norms and embeddings have none.")
    gate_lr: float = setting("Peak learning rate of the gates, which hardly move at lr; 0 freezes them.")
    clip_norm: float | None = setting("Global gradient norm to which gradients are clipped; null: never.")

    def __post_init__(self) -> None:
        one_of("optimizer.name", self.name, ("adamw", "adafactor", "muon"))
        require(self.lr > 0, "optimizer.lr", self.lr, "must be above 0")
        in_range = len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas)
        require(in_range, "optimizer.betas", self.betas, "must be two numbers, at least 0 and below 1")
        at_least("optimizer", self, 0, "gate_lr", "weight_decay")
        if self.clip_norm is not None:
            require(self.clip_norm > 0, "optimizer.clip_norm", self.clip_norm, "must be above 0, or null")


@dataclass
class RecipeConfig:
    """Batch size, sequence length, number of steps, and schedule."""

    name: str = setting("`<task>_<scale>`.")
    batch_size: int = setting("Sequences per optimizer step.")
    segments_per_sequence: int = setting("Segments per training sequence; gradients flow through all of them.")
    excerpt_tokens: int | None = setting(
        "Length in tokens of the excerpts that longer documents are cut into, so that a short training sees many "
        "documents; null: whole documents."
    )
    steps: int = setting("Optimizer steps.")
    warmup_steps: int = setting(
        "Steps of linear learning-rate warm-up. If only recipe.steps is set, at most a tenth of them."
    )
    schedule: str = setting("Learning rate after the warm-up: cosine or constant.")
    final_lr_fraction: float = setting("Final learning rate of the cosine, as a fraction of the peak.")
    checkpoint_activations: bool = setting(
        "Activation checkpointing: recompute activations in the backward pass; less memory, same gradients."
    )
    checkpoint_segments: int | None = setting(
        "Activation checkpointing by groups of this many segments: memory grows with the group instead of the "
        "sequence. null: never."
    )
    loss_chunk: int = setting("Tokens whose logits are computed at a time.")
    save_every: int | None = setting(
        "Steps between the checkpoints from which a stopped training resumes; they are at most ten minutes apart. "
        "null: a checkpoint about every minute."
    )
    curriculum: list[list[int]] | None = setting(
        "Easier stages before the main training, each [segment length, tokens per sequence] or [segment length, "
        "tokens per sequence, maximum steps]. Prompts: a batch has the same number of tokens in more rows. Running "
        "text: every segment has dims.segment_length tokens, and gradients stop at the boundaries of these "
        "sequences. null: no stages."
    )
    advance_below: float = setting(
        "Smoothed loss in nats per token below which the next stage begins. On running text the loss never falls so "
        "low: stages need maximum steps."
    )
    length_extension: float | None = setting(
        "Not in the paper: at a random segment boundary of a sequence, multiply the memory by a random factor between "
        "1 and this, as if that many times as much had been read. null: never."
    )
    length_extension_share: float = setting("Fraction of training steps with length extension.")
    long_history: list[int] | None = setting(
        "Not in the paper, prompts with length extension only: [pieces, steps]. In the last `steps` training steps "
        "half of the rows start after a history of filler, of at most `pieces` pieces (see "
        "infini.training.additions.long_history). null: no histories."
    )
    short_sequences: list[float] | None = setting(
        "Prompts only, [segments, share]: in this share of the last stage's batches sequences have only this many "
        "segments, and there are more rows, if segments_per_sequence is larger. null: in none."
    )
    sparse_writes: float | None = setting(
        "Not in the paper: weight of a penalty on memory writes in the loss of the last stage, their mean logarithm in "
        "nats (see infini.training.additions.sparse_writes). null: 0."
    )
    sparse_loss_scale: float | None = setting(
        "Loss in nats per token from which on the penalty has the weight sparse_writes. Below it the weight is "
        "proportional to the loss of the previous step. null, or without sparse_writes: the weight is constant."
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
            require(
                self.segments_per_sequence >= 3,
                "recipe.segments_per_sequence",
                self.segments_per_sequence,
                f"must be at least 3 with recipe.length_extension={self.length_extension}: what is written after a "
                "boundary must be read",
            )
        at_least("recipe", self, 0, "sparse_writes")
        above = self.sparse_loss_scale is None or self.sparse_loss_scale > 0
        require(above, "recipe.sparse_loss_scale", self.sparse_loss_scale, "must be above 0, or null")
        if not self.sparse_writes:
            # Otherwise equal trainings would count as different ones.
            self.sparse_loss_scale = None
        for stage in self.curriculum or ():
            whole = len(stage) in (2, 3) and 1 <= stage[0] <= stage[1] and min(stage) >= 1
            allowed = "stages must be [segment length, tokens a sequence(, steps)], the second at least the first"
            require(whole, "recipe.curriculum", self.curriculum, allowed)
        short = self.short_sequences
        whole = short is None or (len(short) == 2 and short[0] >= 1 and short[0] % 1 == 0 and 0 <= short[1] <= 1)
        require(whole, "recipe.short_sequences", short, "must be [segments, share between 0 and 1], or null")
        if short is not None and short[0] >= self.segments_per_sequence:
            # No sequence is longer. Otherwise equal trainings would count as different ones.
            self.short_sequences = None
        pair = self.long_history
        whole = pair is None or (len(pair) == 2 and min(pair) >= 1)
        require(whole, "recipe.long_history", pair, "must be [pieces, steps], or null")
        alone = pair is not None and self.length_extension is None
        require(not alone, "recipe.long_history", pair, "needs recipe.length_extension; or null")

    def rate_factor(self, step: int) -> float:
        """Fraction of the peak learning rate at optimizer step `step`, counted from 1."""
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

    name: str = setting("single (one device), ddp (rows over devices) or fsdp2 (weights over devices too).")
    accelerator: str = setting("auto, cpu or gpu.")
    devices: int | None = setting(
        "Devices of each node, one process each; null: as many as torchrun started processes, else all GPUs."
    )
    nodes: int | None = setting(
        "Nodes; more than one needs torchrun on each. null: as many as torchrun was started on."
    )
    accumulate: int = setting(
        "Parts into which the rows of a step are split, whose gradients are accumulated: less memory, equal losses."
    )
    sequence: int = setting(
        "Devices that share each sequence: the first reads its first segments, the next those after them. Groups of "
        "such devices share the rows."
    )
    strategy: str = setting("Name of a Lightning strategy for parallel=single.")
    precision: str = setting("Format of matrix products: fp32, bf16, or auto (bf16 where the hardware is fast at it).")
    compile: str = setting(
        "Whether to compile the layers of models that read segments one after the other with gradients through all "
        "of them (rmt): always, never, or auto (long trainings on a CPU)."
    )

    def __post_init__(self) -> None:
        one_of("parallel.compile", self.compile, ("auto", "always", "never"))
        one_of("parallel.accelerator", self.accelerator, ("auto", "cpu", "gpu"))
        one_of("parallel.precision", self.precision, ("auto", "bf16", "fp32"))
        one_of("parallel.name", self.name, ("single", "ddp", "fsdp2"))
        at_least("parallel", self, 1, "devices", "nodes", "accumulate", "sequence")


@dataclass
class LoggerConfig:
    """The logger of training curves."""

    name: str = setting("csv, wandb (offline unless logged in), tensorboard, or none.")
    validate_every: int | None = setting(
        "Steps between validations during the training, which are logged as a curve; null: only at its end. Changes no "
        "weight."
    )

    def __post_init__(self) -> None:
        one_of("logger.name", self.name, ("csv", "wandb", "tensorboard", "none"))
        at_least("logger", self, 1, "validate_every")
        drawn = self.name != "none" or self.validate_every is None
        require(drawn, "logger.validate_every", self.validate_every, "must be null: logger=none draws no curve")


@dataclass
class WandbConfig(LoggerConfig):
    """The place and the names of runs in Weights & Biases. Environment variables do not change them."""

    project: str = setting("Project of the runs.")
    entity: str | None = setting("User or team that the project belongs to; null: that of the login.")
    group: str | None = setting(
        "Group of runs; null: the report, if one is named or the run is of its task, otherwise the task."
    )
    run_name: str | None = setting("Name of the run; null: its run id.")
    tags: list[str] = setting("Tags in addition to task, model, scale and seed.")

    def __post_init__(self) -> None:
        super().__post_init__()
        named = bool(self.project) and not set(self.project) & set(_FORBIDDEN_IN_PROJECT)
        require(named, "logger.project", self.project, f"must be a name without {' '.join(_FORBIDDEN_IN_PROJECT)}")
        for tag in self.tags:
            require(1 <= len(tag) <= 64, "logger.tags", tag, "must have 1 to 64 characters")


_FORBIDDEN_IN_PROJECT = "/\\#?%:"
"""Characters that a project of Weights & Biases cannot have."""


@dataclass
class SuiteConfig:
    """The measurements of `infini bench`."""

    name: str = setting(
        "train, models, stream, decode, sources, lengths, layer, llm_generate, all, paper or paper_models."
    )
    models: list[str] = setting("Models whose training step is measured. They include `local`, the baseline.")
    repeats: int = setting("Interleaved repeats of each model's training step; 0: not measured.")
    stream_short_tokens: int = setting("Tokens of the short stream that the long one is compared with.")
    stream_tokens: int = setting("Tokens of the long stream, a multiple of the short one; 0: not measured.")
    checkpointing: bool = setting("Whether training steps are also measured with activation checkpointing.")
    oracle_tokens: int = setting(
        "Tokens on which one layer is compared with the slow reference in float64; 0: not compared."
    )
    agreement_tokens: int = setting(
        "Tokens on which every model on this device is compared with itself on the CPU; 0: not compared."
    )
    decode_tokens: int = setting("Tokens decoded after a short and after a long text; 0: not measured.")
    decode_short_tokens: int = setting("Tokens of the short text.")
    decode_long_tokens: int = setting("Tokens of the long text.")
    source_tokens: list[int] = setting("Source lengths in tokens that an encoder-decoder reads; empty: not measured.")
    training_segments: list[int] = setting(
        "Training sequence lengths in segments whose peak memory is measured; empty: not measured."
    )
    training_group: int = setting(
        "Group size of activation checkpointing that these are also measured with, in segments."
    )
    prompt_tokens: list[int] = setting(
        "Prompt lengths in tokens that a pretrained language model reads with a memory and with its own cache; empty: "
        "not measured."
    )
    prompt_segments: list[int] = setting("Segment lengths in tokens of the memories that read them.")
    layer_tokens: list[int] = setting("Sequence lengths in tokens that one attention layer reads; empty: not measured.")
    layer_backward_tokens: int = setting("Longest of these that are measured with a backward pass; 0: none.")
    layer_full_tokens: int = setting("Longest of these that full attention reads; 0: none.")

    def __post_init__(self) -> None:
        at_least("suite", self, 0, "repeats", "stream_tokens", "oracle_tokens", "agreement_tokens", "decode_tokens")
        at_least("suite", self, 0, "layer_backward_tokens", "layer_full_tokens")
        at_least("suite", self, 1, "stream_short_tokens", "decode_short_tokens", "training_group")
        at_least("suite", self, self.decode_short_tokens, "decode_long_tokens")
        for key in ("source_tokens", "training_segments", "prompt_tokens", "prompt_segments", "layer_tokens"):
            values = getattr(self, key)
            require(min(values, default=1) >= 1, f"suite.{key}", values, "must be whole numbers of at least 1")
        measured = (self.repeats, self.stream_tokens, self.oracle_tokens, self.agreement_tokens, self.decode_tokens)
        lengths = (self.source_tokens, self.training_segments, self.prompt_tokens, self.layer_tokens)
        require(any((*measured, *lengths)), "suite.repeats", self.repeats, "must be above 0: nothing else is measured")
        if self.prompt_tokens:
            require(bool(self.prompt_segments), "suite.prompt_segments", self.prompt_segments, "must name at least one")
        require("local" in self.models, "suite.models", self.models, "must include local and at least one other model")
        fits = self.stream_tokens % self.stream_short_tokens == 0 and self.stream_tokens != self.stream_short_tokens
        allowed = f"0, or a multiple of suite.stream_short_tokens={self.stream_short_tokens}, at least twice it"
        require(fits, "suite.stream_tokens", self.stream_tokens, allowed)


@dataclass
class DecodingConfig:
    """The sampling of tokens."""

    name: str
    max_new_tokens: int = setting("Most tokens to generate; the model may end the text before.")
    temperature: float = setting("Divides the logits; 0: greedy decoding.")
    top_p: float = setting(
        "Nucleus sampling: only the likeliest tokens whose probabilities first add up to this; 1: all tokens."
    )

    def __post_init__(self) -> None:
        at_least("decoding", self, 0, "max_new_tokens", "temperature")
        require(0 < self.top_p <= 1, "decoding.top_p", self.top_p, "must be above 0 and at most 1")


@dataclass
class Config:
    """The configuration of a command."""

    task: TaskConfig = setting("What is learned and measured.")
    model: dict[str, Any] = setting("The model, by name, and its options, the fields of the model's own dataclass.")
    dims: DimsConfig = setting("Sizes.")
    scale: ScaleConfig = setting("Vocabulary and evaluation.")
    optimizer: OptimizerConfig = setting("Optimizer and rates.")
    parallel: ParallelConfig = setting("Devices and precision.")
    recipe: RecipeConfig = setting("Batch, steps and schedule.")
    report: dict[str, Any] = setting("Rows and columns of a table.")
    logger: LoggerConfig = setting("Training curves.")
    suite: SuiteConfig = setting("What `infini bench` measures.")
    decoding: DecodingConfig = setting("How tokens are sampled.")
    variant: str | None = setting(
        "Report whose variant of a model this run is: it fills cells of that report only. null: the model as it is."
    )
    seed: int = setting("Seed of initial weights, data order and sampling.")
    checkpoint: str | None = setting(
        "Run id or folder of a trained model; null: the newest training of this model and task; `infini inject` then "
        "takes the base as it is."
    )
    init_from: str | None = setting(
        "Run id or folder whose weights a training starts from; null: training from scratch."
    )
    length: list[str | int] = setting(
        "Lengths in tokens, for example 32K or 1M: of the text that `infini demo` reads (one length); of the prompts "
        "of an evaluation; of books to summarize, where it is set (otherwise task.input_length)."
    )
    depth: list[str | float] = setting(
        "Positions of the key in the prompt: start, middle, end, a number from 0 to 1, or `grid` (0, 0.05, ... 1)."
    )
    part: str | int | None = setting(
        "Part of an evaluation, for example 2/4: this job evaluates that part of the documents, prompts or books. "
        "null: all of them, merged with the results of parts that were evaluated before."
    )
    prompt: str | None = setting(
        "Text that `infini generate` continues: the text itself, @ and the name of a file, or - for standard input."
    )
    save_state: str | None = setting(
        "File to save the state after the prompt in; load_state continues from it as often as wanted."
    )
    load_state: str | None = setting("File of a saved state; the prompt is read after it.")
    output: str | None = setting("File for the summary of `infini summarize`; null: print it.")
    base: str | None = setting(
        "Pretrained language model that `infini inject` reads: a hub id, a folder, a .gguf file, or smollm2."
    )
    out: str | None = setting("Folder that `infini inject` writes.")
    key: str | None = setting("Five-digit number that `infini demo` hides; null: a random one.")
    place: str = setting("Where `infini demo` hides it: start, middle, end, or a number from 0 (start) to 1 (end).")
    full: bool = setting(
        "Whether every table and note of a report is printed, not only its main table. Its files have everything."
    )
    plan: bool = setting(
        "Whether `infini reproduce` only lists the missing runs: what each needs first, and how long such runs took."
    )
    workers: int = setting("Processes among which `infini reproduce -m` shares the runs of a table.")
    results_dir: str = setting(
        "Folder of records and checkpoints. Here and in all other names of files and folders, ~ at the beginning is "
        "the home folder."
    )
    cache_dir: str | None = setting("Folder of tokenized data; null: $INFINI_CACHE_DIR, else ~/.cache/infini.")

    def __post_init__(self) -> None:
        require("name" in self.model, "model", self.model, "must have a name")
        one_of("model.name", self.model["name"], groups()["model"])
        require(0 <= self.seed < 2**32, "seed", self.seed, "must be at least 0 and below 2**32")
        parse_lengths(self.length)
        parse_depths(self.depth)
        parse_part(self.part)
        for name in ("long_history", "short_sequences"):
            value, fits = getattr(self.recipe, name), self.task.has_prompts
            require(fits or value is None, f"recipe.{name}", value, f"must be null for task={self.task.name}")
        # The penalty reads an input gate outside of its layer, where a process has a part of it.
        divided = self.parallel.name == "fsdp2" and self.model.get("input_gate") is not None
        allowed = "must be null with model.input_gate and parallel=fsdp2; or set parallel=ddp"
        require(not (divided and self.recipe.sparse_writes), "recipe.sparse_writes", self.recipe.sparse_writes, allowed)
        require(bool(self.results_dir), "results_dir", self.results_dir, "must be a folder")
        require(self.workers >= 1, "workers", self.workers, "must be at least 1")


@cache
def groups() -> Mapping[str, list[str]]:
    """Configuration groups and their choices, from the files of the `conf` package."""
    folders = sorted((f for f in resources.files("infini.conf").iterdir() if f.is_dir()), key=lambda f: f.name)
    found = {f.name: sorted(p.name[:-5] for p in f.iterdir() if p.name.endswith(".yaml")) for f in folders}
    return MappingProxyType({name: choices for name, choices in found.items() if choices})


def key_of(word: str) -> str:
    """The key of `key=value`, `+key=value` or `~key`; an empty string for other words."""
    return word.lstrip("+~").partition("=")[0] if "=" in word or word.startswith("~") else ""


def given_keys(words: Iterable[str]) -> set[str]:
    """The keys and groups that a command line sets, itself or by the experiment that it names. A key whose value is the
    default counts, too."""
    given = {key_of(word) for word in words} - {""}
    for word in words:
        if key_of(word) == "experiment":
            given |= _keys_of_experiment(word.partition("=")[2])
    return given


def _keys_of_experiment(name: str) -> set[str]:
    own = settings_in("experiment", name)
    keys = {f"{group}.{key}" for group, values in own.items() if isinstance(values, dict) for key in values}
    for entry in own.get("defaults", ()):
        if isinstance(entry, dict):
            keys |= {group.removeprefix("override /") for group in entry}
        elif entry != "_self_":
            keys |= _keys_of_experiment(entry)
    return keys


def root_defaults() -> dict[str, Any]:
    """The root keys that are not groups, with their defaults."""
    return {key: value for key, value in settings_in("config").items() if key not in ("defaults", "hydra")}


def settings_in(*names: str) -> dict[str, Any]:
    """The settings in the file of a choice, named by group and choice; empty if there is none. A reference to another
    key is its text."""
    path = resources.files("infini.conf").joinpath(*names[:-1], f"{names[-1]}.yaml")
    if not path.is_file():
        return {}
    found: dict[str, Any] = pickle.loads(_read_yaml(path.read_text(encoding="utf-8"), str(path)))
    return found


@cache
def _read_yaml(text: str, path: str) -> bytes:
    """The mapping in a YAML, pickled: a copy takes less than a tenth of the time of parsing it again."""
    # The loader in C, where PyYAML has it, takes a tenth of the time; every command reads a few files.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        return pickle.dumps(yaml.load(text, Loader=loader) or {})
    except yaml.YAMLError as error:
        raise no_yaml(error, path) from error


def no_yaml(error: yaml.YAMLError, path: str = "") -> InputError:
    """One line for a file that is not YAML, with the place at which it was noticed. path: default, the error's own."""
    mark = getattr(error, "problem_mark", None)
    place = f"{path or mark.name}, line {mark.line + 1}" if mark else path
    return InputError(f"{place}: not YAML: {getattr(error, 'problem', None) or first_line(error)}")
