"""Sets of keys that several verbs read.

A pattern is a key, a group by its name (its choice alone), or `group.*` (its choice and all of its keys).
"""

from __future__ import annotations

from collections.abc import Sequence

from infini.config.schema import evaluation_keys

TRAINING_GROUPS = ("task", "model", "dims", "scale", "optimizer", "recipe", "parallel")
"""Groups that decide a training."""
TRAINED = (*(f"{group}.*" for group in TRAINING_GROUPS), "tuned", "init_from")
"""What decides a training; a search finds its trainings by it."""
COMPARED = ("dims.*", "optimizer.*", "recipe.*")
"""Settings of a trained model that are compared with what was asked, and choose among several models."""
OF_REPORTS = ("report.*", "experiment")
"""What chooses a report and changes it."""
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
