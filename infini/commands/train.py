"""`infini train`: train a model and write its record."""

from infini.commands import Verb
from infini.config.keys import EVALUATION_ONLY, PLACES, TRAINING_GROUPS

VERB = Verb(
    "train",
    "train a model and write its record",
    "infini train task=pg19 model=infini_linear",
    "infini.runs.train",
    groups=(*TRAINING_GROUPS, "logger"),
    keys=("seed", "init_from", *PLACES),
    # A report chooses its task; `variant` is how `infini reproduce` says whose row a training is.
    also=("tuned", "report", "experiment", "variant"),
    never=EVALUATION_ONLY,
    order=1,
    sweeps=True,
    if_stopped="the same command resumes from the last checkpoint of this training, or starts it where there is none",
    computes=True,
    begins_with="infini.runs.preflight:begin_training",
)
