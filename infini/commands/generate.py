"""`infini generate`: continue a prompt of any length."""

from __future__ import annotations

from collections.abc import Sequence

from infini.commands import Arguments, Verb
from infini.config.keys import COMPARED, DEVICES_OF_TRAINING, EVALUATION_ONLY, take_texts


def read(words: Sequence[str]) -> Arguments:
    """Prompt and names of state files are taken as they are typed."""
    texts, settings = take_texts(words)
    return Arguments(settings, {"texts": texts})


VERB = Verb(
    "generate",
    "continue a prompt of any length",
    "infini generate prompt=@book.txt decoding.temperature=0",
    "infini.runs.generate",
    groups=("decoding", "task", "model", "scale", "parallel"),
    keys=("prompt", "checkpoint", "save_state", "load_state", "seed", "results_dir"),
    also=(*COMPARED, "cache_dir"),
    never=(*EVALUATION_ONLY, *DEVICES_OF_TRAINING),
    order=3,
    read=read,
    needs_reader=True,
)
