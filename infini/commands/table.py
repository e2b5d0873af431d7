"""`infini table`: print a table from run records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from infini.commands import Verb
from infini.config.keys import OF_REPORTS, TRAINED, key_of
from infini.errors import InputError


def check(cfg: Any, overrides: Sequence[str]) -> None:
    """A table is a file already; a logger of files would change nothing."""
    if any(key_of(word) == "logger" for word in overrides) and cfg.logger.name not in ("wandb", "none"):
        raise InputError(f"logger={cfg.logger.name}: infini table logs to wandb alone; leave it out")


VERB = Verb(
    "table",
    "print a table from the records, the paper's numbers beside ours",
    "infini table",
    "infini.runs.table",
    groups=("report", "scale", "logger"),
    keys=("full", "results_dir"),
    also=(*OF_REPORTS, *TRAINED, "seed", "cache_dir"),
    never=("logger.validate_every",),
    order=5,
    check=check,
)
