"""Which keys a verb reads. One that it does not read is refused: it would change nothing, without a word.

`dims.*` stands for the choice of a group and all of its keys, `dims` for the choice alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from infini.config.schema import OPTIONAL_GROUPS, groups, root_defaults
from infini.errors import InputError

_PLACES = ("results_dir", "cache_dir")
# What decides a training; a search finds its trainings by it.
_TRAINED = ("task.*", "model.*", "dims.*", "scale.*", "optimizer.*", "recipe.*", "tuned", "init_from", "parallel.*")
_REPORT = ("report.*", "experiment")
_CHECKED = ("dims.*", "optimizer.*", "recipe.*")
"""Of a model that was trained these are compared with what is asked, and choose among several models."""
READS: dict[str, tuple[str, ...]] = {
    # A report chooses its task; `variant` is how `infini reproduce` says whose row a training is.
    "train": (*_TRAINED, "logger.*", "seed", "report", "experiment", "variant", *_PLACES),
    "eval": (
        *("task.*", "model.*", "scale.*", "parallel.*", "decoding.*", *_CHECKED, "tuned", "init_from"),
        *("checkpoint", "length", "depth", "seed", "report", "report.split", "experiment", "variant", *_PLACES),
    ),
    "generate": (
        *("decoding.*", "task.*", "model.*", "scale.*", "parallel.*", *_CHECKED),
        *("prompt", "checkpoint", "save_state", "load_state", "seed", *_PLACES),
    ),
    "summarize": (
        *("decoding.*", "model.*", "scale.*", "parallel.*", *_CHECKED),
        *("checkpoint", "output", "seed", *_PLACES),
    ),
    "table": (*_REPORT, *_TRAINED, "seed", *_PLACES),
    "figure": (*_REPORT, "scale", "seed", "results_dir"),
    "reproduce": (*_REPORT, *_TRAINED, "decoding.*", "logger.*", "seed", "length", "depth", *_PLACES),
    "publish": (*_REPORT, *_TRAINED, "seed", *_PLACES),
    "bench": (
        # `model` says which options there are to set.
        *("suite.*", "dims.*", "recipe.*", "parallel.*", "task", "task.positions", "scale", "model.*"),
        *("seed", "results_dir"),
    ),
}
"""Verb -> what it reads, whatever the report. A report's `seed` has a message of its own."""
_NOT_OF_A_TRAINING = (
    *("scale.eval_max_tokens", "scale.knockouts", "scale.knockout_max_tokens"),
    *("task.knockout", "task.examples", "task.rows_per_call", "task.split", "task.input_length"),
    *("task.references", "task.reference", "task.reference_words"),
)
_EXCEPT: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("train", "generate", "summarize"), _NOT_OF_A_TRAINING),
    "reproduce": ("init_from",),
}
"""What a verb does not read of that."""

_RUNS = (*_REPORT, "scale", "seed", "results_dir")
_REPRODUCED = (*_REPORT, *_TRAINED, "logger.*", "seed", *_PLACES)
OF_KIND: dict[tuple[str, str], tuple[tuple[str, ...], tuple[str, ...]]] = {
    ("table", "MemoryReport"): (
        (*_REPORT, "task", "task.positions", "model.*", "dims.*", "recipe.*", "scale", "results_dir"),
        ("model", "model.name"),
    ),
    ("table", "SearchReport"): (READS["table"], ("optimizer.lr",)),
    ("publish", "SearchReport"): (READS["publish"], ("optimizer.lr",)),
    ("reproduce", "Report"): (_REPRODUCED, ("init_from",)),
    ("reproduce", "SearchReport"): (_REPRODUCED, ("optimizer.lr",)),
    ("reproduce", "PasskeyReport"): (
        (*_REPRODUCED, "length", "depth"),
        ("init_from", "recipe", "recipe.name", "task.knockout"),
    ),
    ("reproduce", "SummaryReport"): (
        (*_REPRODUCED, "length", "decoding.*"),
        ("init_from", "task.split", "task.reference", "task.input_length"),
    ),
}
"""Verb and kind of report -> what is read, and what is not read of that; other kinds are as `_RUNS` for verbs that take
finished runs, and have no other verbs."""
_WHY = {
    "model": "report.models has the models",
    "recipe": "each row has its own; report.run chooses rows",
    "init_from": "each row starts as the report says; report.run chooses rows",
    "task.knockout": "rows with a memory that is knocked out have it; report.run chooses rows",
    "task.reference": "each row has its own; report.run chooses rows",
    "task.split": "the report has it: report.split",
    "task.input_length": "length has the lengths",
    "optimizer.lr": "report.rates has the rates",
    "variant": "a report sets it for its rows",
}


def key_of(word: str) -> str:
    """The key of `key=value`, `+key=value` or `~key`; an empty string for what is none of them."""
    return word.lstrip("+~").partition("=")[0] if "=" in word or word.startswith("~") else ""


def reads(patterns: Sequence[str], key: str) -> bool:
    """Whether one of the patterns is for this key."""
    group = key.partition(".")[0]
    return key in patterns or f"{group}.*" in patterns


def reads_key(verb: str, key: str) -> bool:
    """Whether a verb reads a key, at least with some kind of report."""
    return reads(READS[verb], key) and key not in _EXCEPT.get(verb, ())


def refuse_unread(verb: str, words: Iterable[str]) -> None:
    """Raises InputError for the first setting that a verb never looks at, or that renames the choice of a group. Keys
    that do not exist pass: see compose."""
    known = {*groups(), *OPTIONAL_GROUPS, *root_defaults()}
    for word in words:
        key = key_of(word)
        group, _, field = key.partition(".")
        if field == "name" and group in known:
            # With another name a choice passes for one that it is not, as scale=gpu for a scale of a processor.
            raise InputError(f"{word}: the choice of {group} sets its name; write {group}={word.partition('=')[2]}")
        if group not in known or reads_key(verb, key):
            continue
        reading = ", ".join(other for other in READS if reads_key(other, key))
        also = f"; verbs that do: {reading}" if reading else ""
        raise InputError(f"{word}: infini {verb} does not read {key}{also}")


def is_read_by(verb: str, report: Any) -> bool:
    """Whether a verb has something to do with a report of this kind; where not, the verb says so."""
    kind = type(report).__name__
    return (verb, kind) in OF_KIND or verb == "table" or (verb != "reproduce" and ("reproduce", kind) in OF_KIND)


def read_of_report(verb: str, report: Any, key: str) -> bool:
    """Whether a verb reads a key with this report, which is loaded: each kind of report has other keys."""
    patterns, never = OF_KIND.get((verb, type(report).__name__), (_RUNS, ()))
    return reads(patterns, key) and key not in never


def refuse_unread_of_report(verb: str, report: Any, words: Iterable[str]) -> None:
    """As refuse_unread, for a verb with a report."""
    for word in words:
        key = key_of(word)
        if key and not key.startswith("hydra") and not read_of_report(verb, report, key):
            why = f"; {_WHY[key]}" if key in _WHY else ""
            raise InputError(f"{word}: infini {verb} does not read {key} for report={report.name}{why}")
