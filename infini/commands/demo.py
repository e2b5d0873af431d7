"""`infini demo`: which texts it reads, and where it hides which number in them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from infini.commands import Arguments, Verb, read_texts
from infini.config.lengths import NAMED_DEPTHS, format_length, parse_length
from infini.config.schema import root_defaults
from infini.errors import InputError, require

DEMO_DIGITS = 5
"""Digits of the numbers that the model was trained on."""
DEMO_SHORTEST = 221
"""Tokens of the shortest text that has room for every number and place; the template's own, without its tokenizer."""
DEMO_LONGEST = 2**30
"""The longest text in tokens, which takes hours to read."""


def _read_demo(words: Sequence[str]) -> Arguments:
    """Number and place are taken as they are typed: 01234 begins with a zero."""
    taken = read_texts(words)
    given = root_defaults() | taken.extra["texts"]
    key, place = given["key"], given["place"]
    fits = key is None or re.fullmatch(f"[0-9]{{{DEMO_DIGITS}}}", key) is not None
    require(fits, "key", key, f"must have {DEMO_DIGITS} digits, for example 12345, or null for a random key")
    return Arguments(taken.overrides, {"key": key, "depth": _depth(place)})


def _depth(place: str | None) -> float:
    """The part of the text before the number, 0 to 1."""
    if place in NAMED_DEPTHS:
        return NAMED_DEPTHS[place]
    # Plain decimals alone: float() also reads nan, 1_0 and digits of other scripts.
    if place is None or not re.fullmatch(r"[01]|[01]?\.[0-9]{1,9}", place) or float(place) > 1:
        raise InputError(f"place={place!r}: must be start, middle, end, or a number from 0 to 1, for example 0.1")
    return float(place)


def _check_demo(cfg: Any, overrides: Sequence[str]) -> None:
    """One text is read, of a length that is possible."""
    require(
        len(cfg.length) == 1, "length", cfg.length, "must be one length, for example 4M: infini demo reads one text"
    )
    tokens, longest = parse_length(cfg.length[0]), format_length(DEMO_LONGEST)
    require(
        tokens >= DEMO_SHORTEST, "length", cfg.length[0], f"must be at least {DEMO_SHORTEST} tokens, for example 1K"
    )
    require(tokens <= DEMO_LONGEST, "length", cfg.length[0], f"infini demo reads at most {longest} tokens")


VERB = Verb(
    "demo",
    "find a number hidden in a million tokens, with a model that is part of the package",
    "infini demo",
    "infini.runs.demo",
    keys=("key", "length", "place"),
    also_reads=("parallel.accelerator", "parallel.precision"),
    read=_read_demo,
    # The demo's own default.
    fixed_settings=("length=1M",),
    needs_reader=True,
    check=_check_demo,
)
