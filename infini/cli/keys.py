"""Refuses keys that a verb does not read: such a setting would silently change nothing."""

from __future__ import annotations

from collections.abc import Iterable

from infini.commands import verbs
from infini.config.keys import reads
from infini.config.schema import OPTIONAL_GROUPS, groups, root_defaults
from infini.config.words import key_of
from infini.errors import InputError
from infini.report.kind import FINISHED_RUNS, OwnVerb, ReportKind

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
    """Raise InputError for the first setting that a verb never reads, or that renames the choice of a group.

    Keys that do not exist are accepted here; compose refuses them.
    """
    known = {*groups(), *OPTIONAL_GROUPS, *root_defaults()}
    for word in words:
        key = key_of(word)
        group, _, field = key.partition(".")
        if field == "name" and group in known:
            # A choice with another name would be taken for that other choice, for example a CPU scale for scale=gpu.
            raise InputError(f"{word}: the choice of {group} sets its name; write {group}={word.partition('=')[2]}")
        if group not in known or verbs()[verb].reads(key):
            continue
        reading = ", ".join(other.name for other in verbs().values() if other.reads(key))
        also = f"; verbs that do: {reading}" if reading else ""
        raise InputError(f"{word}: infini {verb} does not read {key}{also}")


def is_read_by(verb: str, report: ReportKind) -> bool:
    """Whether a verb does anything with a report of this kind; if not, the verb itself refuses the report."""
    return verb in report.verbs or verb == "table" or (verb != "reproduce" and "reproduce" in report.verbs)


def read_of_report(verb: str, report: ReportKind, key: str) -> bool:
    """Whether a verb reads a key with this report. Each kind of report declares its keys."""
    own = report.verbs.get(verb, OwnVerb(FINISHED_RUNS))
    patterns = verbs()[verb].patterns if own.patterns is None else own.patterns
    return reads(patterns, key) and key not in own.never


def refuse_unread_of_report(verb: str, report: ReportKind, words: Iterable[str]) -> None:
    """Raise InputError for the first setting that a verb does not read with this report."""
    for word in words:
        key = key_of(word)
        if key and not key.startswith("hydra") and not read_of_report(verb, report, key):
            why = f"; {_WHY[key]}" if key in _WHY else ""
            raise InputError(f"{word}: infini {verb} does not read {key} for report={report.name}{why}")
