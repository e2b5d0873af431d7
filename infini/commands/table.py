"""`infini table`: print a table from run records."""

from infini.commands import Verb
from infini.config.keys import OF_REPORTS, TRAINED

VERB = Verb(
    "table",
    "print a table from the records, the paper's numbers beside ours",
    "infini table",
    "infini.runs.table",
    groups=("report", "scale"),
    keys=("results_dir",),
    also=(*OF_REPORTS, *TRAINED, "seed", "cache_dir"),
    order=5,
)
