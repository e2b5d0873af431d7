"""`infini bench`: measure what a memory costs in time and space."""

from infini.commands import Verb

VERB = Verb(
    "bench",
    "measure what the memory costs in time and space",
    "infini bench",
    "infini.runs.bench",
    groups=("suite", "dims", "recipe", "parallel"),
    keys=("seed", "results_dir"),
    # `model` says which options there are to set.
    also=("task", "task.positions", "scale", "model.*"),
    order=9,
    sweeps=True,
    if_stopped="nothing is recorded of what was being measured, and the same command measures it again",
    computes=True,
)
