"""`infini figure`: draw figures from run records."""

from infini.commands import Verb
from infini.config.keys import OF_REPORTS

VERB = Verb(
    "figure",
    "draw the figures of all reports, or of one, from the records",
    "infini figure",
    "infini.runs.figure",
    groups=("report",),
    choices=("scale",),
    all_of=("report",),
    keys=("results_dir",),
    also=(*OF_REPORTS, "seed"),
    order=6,
    if_stopped="figures that were drawn are whole, and the same command draws all of them again",
)
