"""`infini eval`: measure a trained model on its task."""

from infini.commands import Verb
from infini.config.keys import COMPARED, DEVICES_OF_TRAINING, PLACES

VERB = Verb(
    "eval",
    "evaluate a trained model: ask for pass keys, or read the test documents",
    "infini eval task=pg19",
    "infini.runs.evaluate",
    groups=("task", "model", "scale", "parallel"),
    keys=("checkpoint", "length", "depth", "part", "seed", *PLACES),
    also=(*COMPARED, "decoding.*", "tuned", "init_from", "report", "report.split", "experiment", "variant"),
    never=DEVICES_OF_TRAINING,
    order=2,
    sweeps=True,
    if_stopped="results so far are kept, and the same command resumes behind them",
    computes=True,
)
