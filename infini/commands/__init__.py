"""The verbs of the command line: what each reads, and how its words are taken apart. `infini.runs` does the work.

A verb is an entry of `_VERBS`, or `VERB` in a module of this package.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from infini.config.schema import (
    FOLDER_KEYS,
    RAW_TEXT_KEYS,
    REPORT_KEYS,
    TRAINING_GROUPS,
    TRAINING_KEYS,
    evaluation_keys,
    groups,
    key_of,
    root_defaults,
)
from infini.errors import InputError, one_of, require
from infini.pretrained.base_names import SEGMENT
from infini.report.kind import FINISHED_RUNS, OwnVerb, ReportKind
from infini.system.modules import import_all
from infini.system.paths import is_file

MODEL_SELECTION_KEYS = ("dims.*", "optimizer.*", "recipe.*")
"""Settings that select a trained model, and must agree with it."""
EVALUATION_ONLY = tuple(
    f"{group}.{key}"
    for group in ("scale", "task")
    for key in sorted(evaluation_keys(group))
    # The validation at the end of a training reads it too.
    if key != "eval_segments_per_call"
)
"""Keys that only evaluations read; see `evaluation=True` in the fields of the configuration."""
DEVICES_OF_TRAINING = tuple(
    f"parallel.{key}" for key in ("devices", "nodes", "accumulate", "sequence", "strategy", "compile")
)
"""Keys of the devices that share a training. Other commands take one device, of parallel.accelerator."""
INJECT_SHORT = {
    "segment_length": "dims.segment_length",
    **{
        name: f"model.{name}"
        for name in ("update_rule", "gate_init", "window", "sinks", "memory_decay", "input_gate", "layers", "dtype")
    },
}
"""Keys that `infini inject` takes without their group, too."""


@dataclass(frozen=True)
class Arguments:
    """The words behind a verb, taken apart."""

    overrides: list[str]
    """Settings in Hydra's grammar."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Arguments of the verb's function beside the configuration and the overrides."""
    first: list[str] = field(default_factory=list)
    """Settings to compose with where a key was given several values: the first of each."""


@dataclass(frozen=True)
class Verb:
    """One command: what it does, which keys it reads, and the function that does it."""

    name: str
    summary: str
    example: str
    """One command line that runs as it stands."""
    module: str
    """Module whose `run(cfg, overrides, **extra)` does the work; it returns an exit code, or None for success."""
    groups: tuple[str, ...] = ()
    """Groups that it reads with all of their keys."""
    keys: tuple[str, ...] = ()
    """Keys that it reads: root keys, or single keys of groups, as scale.vocab_size."""
    choices: tuple[str, ...] = ()
    """Groups of which it reads the choice alone."""
    default_all: tuple[str, ...] = ()
    """Groups of which it takes every choice where none is named."""
    also_reads: tuple[str, ...] = ()
    """Settings that it reads but its help omits: keys, groups by name (the choice alone) or `group.*` (all keys)."""
    excludes: tuple[str, ...] = ()
    """Keys of `groups` that it does not read."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Keys that it also takes without their group -> the whole key."""
    read: Callable[[Sequence[str]], Arguments] | None = None
    """Takes the words of the command line apart, and raises InputError for words that cannot be; None: every word is a
    setting."""
    takes_words: bool = False
    """Whether words without `=` mean something to it."""
    fixed_settings: tuple[str, ...] = ()
    """Settings that it always has."""
    sweeps: bool = False
    """Whether `-m` runs one job for each combination of values."""
    shares_runs: bool = False
    """Whether `-m` runs the command in several processes, which share its runs."""
    if_stopped: str = "the same command starts from the beginning"
    """The message after an interruption that left the command no time for its own message."""
    needs_reader: bool = False
    """Whether it only prints: it stops when nobody reads its output."""
    computes: bool = False
    """Whether a scale that is made for a GPU needs one here."""
    preflight: str = ""
    """`module:function` of the configuration and the overrides, called before the slow imports of `module`; empty:
    nothing."""
    check: Callable[[Any, Sequence[str]], None] | None = None
    """Raises InputError for what is wrong with a configuration and its overrides, before any work; None: nothing."""

    @property
    def patterns(self) -> tuple[str, ...]:
        """Patterns of the settings that it reads; see infini.config.schema."""
        return (*(f"{group}.*" for group in self.groups), *self.choices, *self.keys, *self.also_reads)

    @property
    def chosen(self) -> set[str]:
        """Groups whose choice is always the same."""
        return {word.partition("=")[0] for word in self.fixed_settings}.intersection(self.groups)

    def run(self, cfg: Any, overrides: Sequence[str], **extra: Any) -> int | None:
        """Do the work: an exit code, or None for success."""
        if self.preflight:
            module, _, function = self.preflight.partition(":")
            getattr(importlib.import_module(module), function)(cfg, overrides)
        waiting: AbstractContextManager[object] = nullcontext()
        if self.computes and sys.stderr.isatty():
            # It takes some seconds.
            from rich.console import Console

            waiting = Console(stderr=True).status("loading torch and lightning")
        with waiting:
            work = importlib.import_module(self.module)
        code: int | None = work.run(cfg, overrides, **extra)
        return code

    def reads(self, key: str, report: ReportKind | None = None) -> bool:
        """Whether it reads a key with this report, whose kind declares its keys; None: with some kind of report."""
        patterns, excludes = self.patterns, self.excludes
        if report is not None:
            own = report.verbs.get(self.name, OwnVerb(FINISHED_RUNS))
            patterns, excludes = (patterns if own.patterns is None else own.patterns), own.excludes
        return (key in patterns or f"{key.partition('.')[0]}.*" in patterns) and key not in excludes


def read_texts(words: Sequence[str]) -> Arguments:
    """Texts and file names, as a prompt or base and out, are taken as they are typed, without Hydra's grammar."""
    texts: dict[str, str | None] = {}
    others = []
    for word in words:
        key, separator, value = word.partition("=")
        if key not in RAW_TEXT_KEYS or not separator:
            others.append(word)
            continue
        quoted = len(value) >= 2 and value[0] == value[-1] and value[0] in "'\""
        texts[key] = None if value == "null" else value[1:-1] if quoted else value
    return Arguments(others, {"texts": texts})


def _read_summarize(words: Sequence[str]) -> Arguments:
    """Books are words that are no settings; `output` is taken as it is typed."""
    taken = read_texts([word for word in words if not _is_book(word)])
    taken.extra["paths"] = [word for word in words if _is_book(word)]
    return taken


def _is_book(word: str) -> bool:
    """Whether a word is a book: it has no `=`, has a folder before it, or names a file and begins with no key."""
    key, separator, _ = word.partition("=")
    if not separator or ("/" in key and not key.startswith("hydra/")):
        return True
    known = {*groups(), *root_defaults(), "hydra"}
    return key.lstrip("+~").partition(".")[0] not in known and is_file(word)


def _check_table(cfg: Any, overrides: Sequence[str]) -> None:
    """A table is a file already; a logger of files would change nothing."""
    if any(key_of(word) == "logger" for word in overrides) and cfg.logger.name not in ("wandb", "none"):
        raise InputError(f"logger={cfg.logger.name}: infini table logs to wandb alone; leave it out")


def _read_reproduce(words: Sequence[str]) -> Arguments:
    """`seed=1,2,3` and `model=local,full` are lists here: one command makes all of these rows."""
    texts, words = _split_list(words, "seed")
    for text in texts:
        # All of them now: the last may otherwise fail after hours.
        if not re.fullmatch(r"[0-9]{1,10}", text) or int(text) >= 2**32:
            raise InputError(
                f"seed={text!r}: must be an integer, at least 0 and below 2**32, or several separated by commas"
            )
    seeds = list(dict.fromkeys(map(int, texts)))
    models, words = _split_list(words, "model")
    for model in models:
        one_of("model", model, groups()["model"])
    first = [*(f"model={model}" for model in models[:1]), *(f"seed={seed}" for seed in seeds[:1])]
    return Arguments(list(words), {"seeds": seeds, **({"models": models} if models else {})}, first)


def _split_list(words: Sequence[str], key: str) -> tuple[list[str], list[str]]:
    """The values of the last `key=a,b` or `key=[a,b]`, and the words of other keys; no values where there is none."""
    texts = [word.removeprefix(f"{key}=") for word in words if word.startswith(f"{key}=")]
    others = [word for word in words if not word.startswith(f"{key}=")]
    values = [text.strip() for text in texts[-1].strip("[]").split(",")] if texts else []
    return list(dict.fromkeys(values)), others


def _read_publish(words: Sequence[str]) -> Arguments:
    """Words without `=` are ids of runs."""
    return Arguments([word for word in words if "=" in word], {"ids": [word for word in words if "=" not in word]})


def _check_bench(cfg: Any, overrides: Sequence[str]) -> None:
    """Refuse settings that would change nothing: `model=` alone, because the suite names its models, and sizes that the
    layer of suite.layer_tokens does not have."""
    named = [word for word in overrides if key_of(word) == "model"]
    if named and not any(key_of(word).startswith("model.") for word in overrides):
        raise InputError(
            f"{named[-1]}: infini bench measures suite.models; set that, for example suite.models=[local,full]"
        )
    if cfg.suite.layer_tokens:
        for key, usual in (("n_kv_heads", cfg.dims.n_heads), ("d_value", cfg.dims.d_key)):
            value = getattr(cfg.dims, key)
            allowed = f"must be null or {usual}: other layers are not measured by suite.layer_tokens"
            require(value in (None, usual), f"dims.{key}", value, allowed)


def _read_inject(words: Sequence[str]) -> Arguments:
    """base and out are taken as they are typed; options may be written without their group."""
    keys = [word.partition("=")[0] for word in words]
    whole = [INJECT_SHORT.get(key, key) + word.removeprefix(key) for word, key in zip(words, keys, strict=True)]
    return read_texts(whole)


_VERBS = (
    Verb(
        "train",
        "train a model and write its record",
        "infini train task=pg19 model=infini_linear",
        "infini.runs.train",
        groups=(*TRAINING_GROUPS, "logger"),
        keys=("seed", "init_from", *FOLDER_KEYS),
        # A report chooses its task; `variant` is how `infini reproduce` says whose row a training is.
        also_reads=("tuned", "report", "experiment", "variant"),
        excludes=EVALUATION_ONLY,
        sweeps=True,
        if_stopped=(
            "the same command resumes from the last checkpoint of this training, or starts it where there is none"
        ),
        computes=True,
        preflight="infini.runs.preflight:begin_training",
    ),
    Verb(
        "eval",
        "evaluate a trained model: ask for pass keys, or read the test documents",
        "infini eval task=pg19",
        "infini.runs.evaluate",
        groups=("task", "model", "scale", "parallel"),
        keys=("checkpoint", "length", "depth", "part", "seed", *FOLDER_KEYS),
        also_reads=(
            *MODEL_SELECTION_KEYS,
            *("decoding.*", "tuned", "init_from", "report", "report.split", "experiment", "variant"),
        ),
        excludes=DEVICES_OF_TRAINING,
        sweeps=True,
        if_stopped="results so far are kept, and the same command resumes after them",
        computes=True,
    ),
    Verb(
        "generate",
        "continue a prompt of any length",
        "infini generate prompt=@book.txt decoding.temperature=0",
        "infini.runs.generate",
        groups=("decoding", "task", "model", "scale", "parallel"),
        keys=("prompt", "checkpoint", "save_state", "load_state", "seed", "results_dir"),
        also_reads=(*MODEL_SELECTION_KEYS, "cache_dir"),
        excludes=(*EVALUATION_ONLY, *DEVICES_OF_TRAINING),
        read=read_texts,
        needs_reader=True,
    ),
    Verb(
        "summarize",
        "summarize a book of any length, text or EPUB",
        "infini summarize book.txt output=summary.txt",
        "infini.runs.summarize",
        groups=("decoding", "model", "scale", "parallel"),
        keys=("checkpoint", "output", "seed", "results_dir"),
        also_reads=(*MODEL_SELECTION_KEYS, "cache_dir"),
        excludes=(*EVALUATION_ONLY, *DEVICES_OF_TRAINING),
        read=_read_summarize,
        takes_words=True,
        # The task of the model's training, which also sets how summaries are sampled.
        fixed_settings=("task=booksum",),
    ),
    Verb(
        "table",
        "print a table from the records, the paper's numbers beside ours",
        "infini table",
        "infini.runs.table",
        groups=("report", "scale", "logger"),
        keys=("full", "results_dir"),
        also_reads=(*REPORT_KEYS, *TRAINING_KEYS, "seed", "cache_dir"),
        excludes=("logger.validate_every",),
        check=_check_table,
    ),
    Verb(
        "figure",
        "draw the figures of all reports, or of one, from the records",
        "infini figure",
        "infini.runs.figure",
        groups=("report",),
        choices=("scale",),
        default_all=("report",),
        keys=("results_dir",),
        also_reads=(*REPORT_KEYS, "seed"),
        if_stopped="figures drawn so far are complete, and the same command draws all of them again",
    ),
    Verb(
        "reproduce",
        "run what a table still needs, then print it",
        "infini reproduce seed=1,2,3",
        "infini.runs.reproduce",
        groups=("report", *TRAINING_GROUPS, "logger"),
        keys=("seed", "length", "depth", "full", "plan", "workers", *FOLDER_KEYS),
        also_reads=(*REPORT_KEYS, *TRAINING_KEYS, "decoding.*"),
        # A name for all of its runs would tell none of them from the others.
        excludes=("init_from", "logger.run_name"),
        read=_read_reproduce,
        if_stopped="finished runs are recorded, and the same command resumes after them",
        computes=True,
        shares_runs=True,
    ),
    Verb(
        "publish",
        "copy finished records into results/, for others to see",
        "infini publish report=table2_lm",
        "infini.runs.publish",
        groups=("report", "scale"),
        keys=("results_dir",),
        also_reads=(*REPORT_KEYS, *TRAINING_KEYS, "seed", "cache_dir"),
        read=_read_publish,
        takes_words=True,
    ),
    Verb(
        "bench",
        "measure what the memory costs in time and space",
        "infini bench",
        "infini.runs.bench",
        groups=("suite", "dims", "recipe", "parallel"),
        keys=("seed", "results_dir"),
        choices=("scale",),
        # `model` says which options there are to set.
        also_reads=("task", "task.positions", "model.*"),
        excludes=DEVICES_OF_TRAINING,
        sweeps=True,
        if_stopped="nothing is recorded of the interrupted measurement, and the same command repeats it",
        computes=True,
        check=_check_bench,
    ),
    Verb(
        "inject",
        "put the memory into a pretrained language model, and write a folder for transformers",
        "infini inject base=smollm2 out=smollm2-infini",
        "infini.runs.inject",
        groups=("model",),
        keys=("base", "out", "checkpoint", "results_dir"),
        also_reads=("dims.segment_length",),
        excludes=("model.base", "model.memory", "model.train", "model.lora_rank"),
        aliases=INJECT_SHORT,
        read=_read_inject,
        # The verb's own defaults.
        fixed_settings=("model=llm", f"dims.segment_length={SEGMENT}", "model.dtype=null"),
    ),
)


@cache
def verbs() -> dict[str, Verb]:
    """Name -> verb, in the order of the help.

    Raises InputError for a module of this package that cannot be imported, or whose VERB has the name of another, or
    reads what does not exist.
    """
    found = {verb.name: verb for verb in _VERBS}
    for module in import_all(__name__, __path__):
        if (verb := getattr(module, "VERB", None)) is None:
            continue
        at = f"{module.__file__}: VERB"
        require(verb.name not in found, f"{at}.name", verb.name, "is the name of another verb")
        for group in (*verb.groups, *verb.choices):
            one_of(f"{at}.groups", group, list(groups()))
        for key in verb.keys:
            # The other part of group.key depends on the choice of the group.
            known = list(groups() if "." in key else root_defaults())
            one_of(f"{at}.keys", key.partition(".")[0], known)
        found[verb.name] = verb
    return found
