"""`infini bench`: measure what a memory costs in time and space."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from infini.commands import Verb
from infini.config.keys import DEVICES_OF_TRAINING, key_of
from infini.errors import InputError, require


def check(cfg: Any, overrides: Sequence[str]) -> None:
    """A model is named by its suite; `model=` alone would change nothing. Neither would sizes that one layer, measured
    against others, does not have."""
    named = [word for word in overrides if key_of(word) == "model"]
    if named and not any(key_of(word).startswith("model.") for word in overrides):
        raise InputError(f"{named[-1]}: infini bench measures suite.models; set that, as suite.models=[local,full]")
    if cfg.suite.layer_tokens:
        for key, usual in (("n_kv_heads", cfg.dims.n_heads), ("d_value", cfg.dims.d_key)):
            value = getattr(cfg.dims, key)
            allowed = f"must be null or {usual}: suite.layer_tokens measures layers without other ones"
            require(value in (None, usual), f"dims.{key}", value, allowed)


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
