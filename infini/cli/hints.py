"""Suggestions for words that cannot be read."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from infini.commands import Verb
from infini.config.schema import OPTIONAL_GROUPS, groups, root_defaults
from infini.errors import InputError, nearest


def without_dashes(word: str, words: Sequence[str]) -> str:
    """`; did you mean task=pg19?` for `--task pg19` and for `--task=pg19`."""
    key, separator, value = word.lstrip("-").partition("=")
    following = words[words.index(word) + 1 :][:1]
    if not separator and following and "=" not in following[0] and not following[0].startswith("-"):
        value = following[0]
    known = (*groups(), *OPTIONAL_GROUPS, *root_defaults())
    if value and key in known:
        return f"; did you mean {key}={value}?"
    return "; keys are written without dashes, as task=pg19" if separator or key in known else ""


def refuse_bare_words(verb: Verb, words: Sequence[str]) -> None:
    """Raise InputError, with a suggestion, for a word that is not a setting where only settings are allowed."""
    for place, word in enumerate(words):
        # Keys contain no spaces: a word with a space before its first `=` is text.
        if word.startswith("~") or ("=" in word and not re.search(r"\S\s", word.partition("=")[0])):
            continue
        meant = _meant(verb, word, words[place + 1 :])
        if verb.takes_words and not (meant and "report" in verb.groups):
            continue
        hint = f"; did you mean {meant}?" if meant else ""
        raise InputError(f"{word!r}: not a setting; write key=value{hint}")


def _meant(verb: Verb, word: str, following: Sequence[str]) -> str:
    """The setting that a word without `=` suggests: `report=table3_passkey` for `table3`. "" if none is similar."""
    if "prompt" in verb.keys:
        return f"prompt={shlex.quote(word)}"
    choices = groups()
    if word in (*choices, *OPTIONAL_GROUPS, *root_defaults()) and following and "=" not in following[0]:
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
    near = None if verb.takes_words else nearest(word, choices[first[0]])
    return f"{first[0]}={near}" if near else ""
