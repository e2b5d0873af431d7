"""`infini publish`: copy finished records into the published results."""

from __future__ import annotations

from collections.abc import Sequence

from infini.commands import Arguments, Verb
from infini.config.keys import OF_REPORTS, TRAINED


def read(words: Sequence[str]) -> Arguments:
    """Words without `=` are ids of runs."""
    return Arguments([word for word in words if "=" in word], {"ids": [word for word in words if "=" not in word]})


VERB = Verb(
    "publish",
    "copy finished records into results/, for others to see",
    "infini publish report=table2_lm",
    "infini.runs.publish",
    groups=("report", "scale"),
    keys=("results_dir",),
    also=(*OF_REPORTS, *TRAINED, "seed", "cache_dir"),
    order=8,
    read=read,
    takes_words=True,
)
