"""`infini bench`: measure what a memory costs in time and space."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from infini.commands import Verb
from infini.config.keys import DEVICES_OF_TRAINING, key_of
from infini.errors import InputError


def check(cfg: Any, overrides: Sequence[str]) -> None:
    """A model is named by its suite; `model=` alone would change nothing."""
    named = [word for word in overrides if key_of(word) == "model"]
    if named and not any(key_of(word).startswith("model.") for word in overrides):
        raise InputError(f"{named[-1]}: infini bench measures suite.models; set that, as suite.models=[local,full]")


VERB = Verb(
    "bench",
    "measure what the memory costs in time and space",
    "infini bench",
    "infini.runs.bench",
    groups=("suite", "dims", "recipe", "parallel"),
    keys=("seed", "results_dir"),
    choices=("scale",),
    # `model` says which options there are to set.
    also=("task", "task.positions", "model.*"),
    never=DEVICES_OF_TRAINING,
    order=9,
    sweeps=True,
    if_stopped="nothing is recorded of what was being measured, and the same command measures it again",
    computes=True,
    check=check,
)
