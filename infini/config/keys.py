"""Sets of keys that several verbs read.

A pattern is a key, a group by its name (its choice alone), or `group.*` (its choice and all of its keys).
"""

from __future__ import annotations

from collections.abc import Sequence

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
EVALUATION_ONLY = (
    *("scale.eval_max_tokens", "scale.knockouts", "scale.knockout_max_tokens"),
    *("task.knockout", "task.examples", "task.rows_per_call", "task.split", "task.input_length"),
    *("task.references", "task.reference", "task.reference_words"),
)
"""Keys that verbs which evaluate nothing do not read."""


def reads(patterns: Sequence[str], key: str) -> bool:
    """Whether one of the patterns covers this key."""
    group = key.partition(".")[0]
    return key in patterns or f"{group}.*" in patterns
