"""Sets of keys that several verbs read, and words of a command line: `key=value`, literal texts, lists, lengths.

A pattern is a key, the name of a group (its choice), or `group.*` (its choice and all of its keys).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from infini.config.lengths import parse_length
from infini.config.schema import LISTS, TEXTS

TRAINING_GROUPS = ("task", "model", "dims", "scale", "optimizer", "recipe", "parallel")
"""Groups that decide a training."""
TRAINED = (*(f"{group}.*" for group in TRAINING_GROUPS), "tuned", "init_from")
"""What decides a training; a search identifies its trainings by these."""
OF_REPORTS = ("report.*", "experiment")
"""What selects a report and changes it."""
SHOWN = ("full", "logger.*")
"""What decides where a report's table is shown, and how much of it."""
PLACES = ("results_dir", "cache_dir")
"""Root keys that say where files go."""


def reads(patterns: Sequence[str], key: str) -> bool:
    """Whether one of the patterns covers this key."""
    group = key.partition(".")[0]
    return key in patterns or f"{group}.*" in patterns


LENGTHS = ("length", "task.input_length")
"""Keys whose values are lengths in tokens."""


def key_of(word: str) -> str:
    """The key of `key=value`, `+key=value` or `~key`; an empty string for other words."""
    return word.lstrip("+~").partition("=")[0] if "=" in word or word.startswith("~") else ""


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


def take_texts(words: Sequence[str]) -> tuple[dict[str, str | None], list[str]]:
    """Texts and file names as typed, without Hydra's grammar, and the other words."""
    texts: dict[str, str | None] = {}
    others = []
    for word in words:
        key, separator, value = word.partition("=")
        if key not in TEXTS or not separator:
            others.append(word)
            continue
        quoted = len(value) >= 2 and value[0] == value[-1] and value[0] in "'\""
        texts[key] = None if value == "null" else value[1:-1] if quoted else value
    return texts, others
