"""Turns the words of a command line into a checked configuration. Errors say what the user may have meant."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from infini.cli.completion import keys_of_verb
from infini.commands import Arguments, Verb, verbs
from infini.config.lengths import parse_length
from infini.config.schema import LISTS, groups, key_of, root_defaults
from infini.config.typed import OTHER_NAMES, NoSuchKeyError
from infini.errors import InputError, did_you_mean, nearest
from infini.report.kind import ReportKind
from infini.system.devices import check_accelerator, check_made_for

if TYPE_CHECKING:
    from infini.config.schema import Config

LENGTHS = ("length", "task.input_length")
"""Keys whose values are lengths in tokens."""
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


def prepare(verb: Verb, words: Sequence[str], elsewhere: bool = False) -> tuple[Config, list[str], dict[str, Any]]:
    """The checked input of a verb: configuration, overrides, and the values that the verb itself read of its words.

    elsewhere: see check.
    """
    from infini.config.compose import compose

    words = [bracketed(word) for word in words]
    taken = Arguments(words) if verb.read is None else verb.read(words)
    overrides, extra = [*verb.fixed_settings, *taken.overrides], dict(taken.extra)
    try:
        cfg = compose([*overrides, *taken.first])
    except NoSuchKeyError as error:
        raise with_keys_of(verb, error) from error
    check(verb, cfg, overrides, elsewhere)
    if "seeds" in extra and not extra["seeds"]:
        extra["seeds"] = [cfg.seed]
    note_replaced(taken.overrides)
    return cfg, overrides, extra


def refuse_unread(verb: str, words: Iterable[str]) -> None:
    """Raise InputError for the first setting that a verb never reads, or that renames the choice of a group.

    Keys that do not exist are accepted here; compose refuses them.
    """
    known = {*groups(), *root_defaults()}
    for word in words:
        key = key_of(word)
        group, _, field = key.partition(".")
        if field == "name" and group in known:
            # A choice with another name would be taken for that other choice, for example a CPU scale for scale=gpu.
            value = word.partition("=")[2]
            meant = "logger.run_name" if group == "logger" and value not in groups()["logger"] else group
            raise InputError(f"{word}: the choice of {group} sets its name; write {meant}={value}")
        if group not in known or verbs()[verb].reads(key):
            continue
        reading = ", ".join(other.name for other in verbs().values() if other.reads(key))
        also = f"; verbs that do: {reading}" if reading else ""
        raise InputError(f"{word}: infini {verb} does not read {key}{also}")


def refuse_unread_of_report(verb: Verb, report: ReportKind, words: Iterable[str]) -> None:
    """Raise InputError for the first setting that a verb does not read with this report."""
    for word in words:
        key = key_of(word)
        if key and not key.startswith("hydra") and not verb.reads(key, report):
            why = f"; {_WHY[key]}" if key in _WHY else ""
            raise InputError(f"{word}: infini {verb.name} does not read {key} for report={report.name}{why}")


def check(verb: Verb, cfg: Config, overrides: Sequence[str], elsewhere: bool = False) -> None:
    """Raise InputError for a command that cannot work. elsewhere: it runs on another machine, which looks for its own
    GPU."""
    name = verb.name
    if "report" in verb.groups:
        from infini.report.load import load_report

        report = load_report(cfg.report)
        # A report with which the verb does nothing is refused by the verb itself.
        if name in report.verbs or name == "table" or (name != "reproduce" and "reproduce" in report.verbs):
            refuse_unread_of_report(verb, report, overrides)
        elif name == "reproduce":
            return
        if cfg.scale.name not in (getattr(report, "settings", None) or [cfg.scale.name]):
            # A search that has no such scale reports that itself.
            return
    if verb.check is not None:
        verb.check(cfg, overrides)
    if "parallel" in verb.groups and not verb.reads("parallel.devices") and cfg.parallel.name != "single":
        raise InputError(f"parallel={cfg.parallel.name}: infini {name} takes one device; leave it out")
    if not cfg.task.reads_data and verb.computes:
        setting = f"task.filler={cfg.task.filler}" if hasattr(cfg.task, "filler") else f"task={cfg.task.name}"
        for word in overrides:
            if key_of(word) == "task.data_dir":
                print(f"{word}: has no effect with {setting}, which reads no documents", file=sys.stderr)
    if elsewhere or cfg.plan:
        return
    if verb.reads("parallel.accelerator"):
        check_accelerator(cfg.parallel.accelerator)
    if verb.computes and getattr(cfg.task, "reference", None) is None:
        for group in ("scale", "suite"):
            if group in verb.groups or group in verb.choices:
                check_made_for(group, cfg.scale.name if group == "scale" else cfg.suite.name, cfg.parallel.accelerator)


def with_keys_of(verb: Verb, error: NoSuchKeyError) -> InputError:
    """The error of an unknown root key, with the keys that the verb reads; that of another key as it is."""
    if not re.fullmatch(r"\w+", error.key):
        return error
    allowed = sorted({*verb.groups, *verb.choices, *verb.keys, *verb.aliases} - verb.chosen)
    whole = _whole_key(verb, OTHER_NAMES.get(error.key, error.key))
    hint = f"; did you mean {whole!r}?" if whole else did_you_mean(error.key, allowed)
    return InputError(f"{error.shown}: no such key; allowed: {', '.join(allowed)}{hint}")


def _whole_key(verb: Verb, last: str) -> str | None:
    """The first key of a verb's groups that ends like this: optimizer.lr for lr."""
    return next((key for key in keys_of_verb(verb) if key.partition(".")[2] == last), None)


def note_replaced(words: Sequence[str]) -> None:
    """Print which settings are replaced by a later setting of the same key."""
    last = {key: word for word in words if (key := key_of(word))}
    for word in dict.fromkeys(words):
        if (key := key_of(word)) and last[key] != word and not word.startswith("~"):
            print(f"{word}: given again as {last[key]}, which holds", file=sys.stderr)


def without_dashes(verb: Verb, word: str, words: Sequence[str]) -> str:
    """`; did you mean task=pg19?` for `--task pg19` and `--task=pg19`; `; write recipe.steps=10` for `--steps 10`."""
    key, separator, value = word.lstrip("-").partition("=")
    following = words[words.index(word) + 1 :][:1]
    if not separator and following and "=" not in following[0] and not following[0].startswith("-"):
        value = following[0]
    known = (*groups(), *root_defaults())
    if value and key in known:
        return f"; did you mean {key}={value}?"
    if value and (whole := _whole_key(verb, key.replace("-", "_"))):
        return f"; write {whole}={value}"
    return "; keys are written without dashes, for example task=pg19" if separator or key in known else ""


def bracketed(word: str) -> str:
    """`length=32K,1M` with brackets: without -m, several lengths or depths are one run."""
    key, _, value = word.partition("=")
    return f"{key}=[{value}]" if key in LISTS and "," in value and not value.startswith("[") else word


def check_lengths(words: Sequence[str]) -> None:
    """Raise InputError for a malformed length as typed, because Hydra turns 1e6 into 1000000.0."""
    for word in words:
        key, _, value = word.partition("=")
        if key in LENGTHS and re.fullmatch(r"[\[\]\w.,+ -]+", value) and value != "null":
            for text in re.sub(r"[\[\]]", "", value).split(","):
                parse_length(text.strip(), key)


def refuse_bare_words(verb: Verb, words: Sequence[str]) -> None:
    """Raise InputError, with a suggestion, for a word that is not a setting where only settings are allowed."""
    for place, word in enumerate(words):
        # Keys contain no spaces: a word with a space before its first `=` is text.
        if word.startswith("~") or ("=" in word and not re.search(r"\S\s", word.partition("=")[0])):
            continue
        if place and (meant := _unquoted(words[place - 1], words[place:])):
            raise InputError(f"{word!r}: a value with spaces needs quotes: {shlex.quote(meant)}")
        meant = _meant(verb, word, words[place + 1 :])
        if verb.takes_words and not (meant and "report" in verb.groups):
            continue
        hint = f"; did you mean {meant}?" if meant else ""
        raise InputError(f"{word!r}: not a setting; write key=value{hint}")


def _unquoted(setting: str, following: Sequence[str]) -> str:
    """A setting with the words behind it that are the rest of its path; "" where no such path exists."""
    key, _, path = setting.partition("=")
    if path and key.endswith(("dir", "checkpoint", "init_from", "base", "out")):
        for word in following:
            path += f" {word}"
            if os.path.exists(path):
                return f"{key}={path}"
    return ""


def _meant(verb: Verb, word: str, following: Sequence[str]) -> str:
    """The setting that a word without `=` suggests: `report=table3_passkey` for `table3`. "" if none is similar."""
    if "prompt" in verb.keys:
        return f"prompt={shlex.quote(word)}"
    if "key" in verb.keys and word.isdecimal():
        return f"key={word}"
    choices = groups()
    if word in (*choices, *root_defaults()) and following and "=" not in following[0]:
        return f"{word}={following[0]}"
    if verb.takes_words:
        first, others = ["report", "experiment"], []
    else:
        known = ("report", "experiment", "suite", "task", "model", "scale")
        # Training and evaluation also read a report, but users do not type it there.
        shown = (*verb.groups, *verb.choices, *(["experiment"] if "report" in verb.groups else []))
        first = [group for group in known if group in shown]
        others = list(choices)
    for group in (*first, *others):
        begins = [option for option in choices.get(group, []) if len(word) > 2 and option.startswith(word)]
        if verb.reads(group) and (word in begins or len(begins) == 1):
            return f"{group}={word if word in begins else begins[0]}"
    near = None if verb.takes_words or not first else nearest(word, choices[first[0]])
    return f"{first[0]}={near}" if near else ""
