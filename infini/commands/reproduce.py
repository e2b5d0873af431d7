"""`infini reproduce`: run what a table still needs, then print it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from infini.commands import Arguments, Verb
from infini.config.keys import OF_REPORTS, PLACES, TRAINED, TRAINING_GROUPS
from infini.config.schema import groups
from infini.errors import InputError, one_of


def read(words: Sequence[str]) -> Arguments:
    """`seed=1,2,3` and `model=local,full` are lists here: one command makes all of these rows."""
    texts, words = _several(words, "seed")
    for text in texts:
        # All of them now: the last may otherwise fail after hours.
        if not re.fullmatch(r"[0-9]{1,10}", text) or int(text) >= 2**32:
            raise InputError(
                f"seed={text!r}: must be an integer, at least 0 and below 2**32, or several separated by commas"
            )
    seeds = list(dict.fromkeys(map(int, texts)))
    models, words = _several(words, "model")
    for model in models:
        one_of("model", model, groups()["model"])
    first = [*(f"model={model}" for model in models[:1]), *(f"seed={seed}" for seed in seeds[:1])]
    return Arguments(list(words), {"seeds": seeds, **({"models": models} if models else {})}, first)


def _several(words: Sequence[str], key: str) -> tuple[list[str], list[str]]:
    """The values of the last `key=a,b` or `key=[a,b]`, and the words of other keys; no values where there is none."""
    texts = [word.removeprefix(f"{key}=") for word in words if word.startswith(f"{key}=")]
    others = [word for word in words if not word.startswith(f"{key}=")]
    values = [text.strip() for text in texts[-1].strip("[]").split(",")] if texts else []
    return list(dict.fromkeys(values)), others


VERB = Verb(
    "reproduce",
    "run what a table still needs, then print it",
    "infini reproduce seed=1,2,3",
    "infini.runs.reproduce",
    groups=("report", *TRAINING_GROUPS, "logger"),
    keys=("seed", "length", "depth", "full", "plan", "workers", *PLACES),
    also=(*OF_REPORTS, *TRAINED, "decoding.*"),
    # A name for all of its runs would tell none of them from the others.
    never=("init_from", "logger.run_name"),
    order=7,
    read=read,
    if_stopped="runs that had finished kept their records, and the same command resumes behind them",
    computes=True,
    shares=True,
)
