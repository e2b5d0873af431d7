"""Sets of keys that several verbs read.

A pattern is a key, the name of a group (its choice), or `group.*` (its choice and all of its keys).
"""

from __future__ import annotations

from collections.abc import Sequence

from infini.config.schema import evaluation_keys

TRAINING_GROUPS = ("task", "model", "dims", "scale", "optimizer", "recipe", "parallel")
"""Groups that decide a training."""
TRAINED = (*(f"{group}.*" for group in TRAINING_GROUPS), "tuned", "init_from")
"""What decides a training; a search identifies its trainings by these."""
COMPARED = ("dims.*", "optimizer.*", "recipe.*")
"""Settings that select a trained model, and must agree with it."""
OF_REPORTS = ("report.*", "experiment")
"""What selects a report and changes it."""
PLACES = ("results_dir", "cache_dir")
"""Root keys that say where files go."""
IN_VALIDATION = ("scale.eval_segments_per_call",)
"""Keys of evaluations that the validation at the end of a training reads too."""
EVALUATION_ONLY = tuple(
    f"{group}.{key}"
    for group in ("scale", "task")
    for key in sorted(evaluation_keys(group))
    if f"{group}.{key}" not in IN_VALIDATION
)
"""Keys that only evaluations read; see `evaluation=True` in the fields of the configuration."""


def reads(patterns: Sequence[str], key: str) -> bool:
    """Whether one of the patterns covers this key."""
    group = key.partition(".")[0]
    return key in patterns or f"{group}.*" in patterns
