"""Words of a command line: `key=value`, texts as they are typed, lists, lengths."""

from __future__ import annotations

import re
from collections.abc import Sequence

from infini.config.lengths import parse_length
from infini.config.schema import LISTS, TEXTS

LENGTHS = ("length", "task.input_length")
"""Keys whose values are lengths in tokens."""


def key_of(word: str) -> str:
    """The key of `key=value`, `+key=value` or `~key`; an empty string for a word that is none of them."""
    return word.lstrip("+~").partition("=")[0] if "=" in word or word.startswith("~") else ""


def bracketed(word: str) -> str:
    """`length=32K,1M` as the list it means; without -m several lengths or depths are one run."""
    key, _, value = word.partition("=")
    return f"{key}=[{value}]" if key in LISTS and "," in value and not value.startswith("[") else word


def check_lengths(words: Sequence[str]) -> None:
    """Raise InputError for a malformed length as it was typed: in Hydra's grammar 1e6 becomes 1000000.0."""
    for word in words:
        key, _, value = word.partition("=")
        if key in LENGTHS and re.fullmatch(r"[\[\]\w.,+ -]+", value) and value != "null":
            for text in re.sub(r"[\[\]]", "", value).split(","):
                parse_length(text.strip(), key)


def take_texts(words: Sequence[str]) -> tuple[dict[str, str | None], list[str]]:
    """Prompt and names of files as they were typed, and the other words: Hydra's grammar does not apply to a text."""
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
