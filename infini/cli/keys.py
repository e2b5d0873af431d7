"""Refuse keys that a verb does not read: they would silently change nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from infini.commands import PLACES, verbs
from infini.config.keys import OF_REPORTS, TRAINED, reads
from infini.config.schema import OPTIONAL_GROUPS, groups, root_defaults
from infini.config.words import key_of
from infini.errors import InputError

_RUNS = (*OF_REPORTS, "scale", "seed", "results_dir")
_REPRODUCED = (*OF_REPORTS, *TRAINED, "logger.*", "seed", *PLACES)
OF_KIND: dict[tuple[str, str], tuple[tuple[str, ...], tuple[str, ...]]] = {
    ("table", "MemoryReport"): (
        (*OF_REPORTS, "task", "task.positions", "model.*", "dims.*", "recipe.*", "scale", "results_dir"),
        ("model", "model.name"),
    ),
    ("table", "SearchReport"): (verbs()["table"].patterns, ("optimizer.lr",)),
    ("publish", "SearchReport"): (verbs()["publish"].patterns, ("optimizer.lr",)),
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


def refuse_unread(verb: str, words: Iterable[str]) -> None:
    """Raise InputError for the first setting that the verb does not read, or that renames the choice of a group.

    Unknown keys pass: infini.config.compose reports them.
    """
    known = {*groups(), *OPTIONAL_GROUPS, *root_defaults()}
    for word in words:
        key = key_of(word)
        group, _, field = key.partition(".")
        if field == "name" and group in known:
            # Under another name, a choice would be taken for one that it is not.
            raise InputError(f"{word}: the choice of {group} sets its name; write {group}={word.partition('=')[2]}")
        if group not in known or verbs()[verb].reads(key):
            continue
        reading = ", ".join(other.name for other in verbs().values() if other.reads(key))
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
