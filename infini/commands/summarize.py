"""`infini summarize`: summarize a book of the user's own."""

from __future__ import annotations

from collections.abc import Sequence

from infini.commands import Arguments, Verb
from infini.config.keys import COMPARED, DEVICES_OF_TRAINING, EVALUATION_ONLY, take_texts
from infini.config.schema import groups, root_defaults
from infini.system.paths import is_file


def read(words: Sequence[str]) -> Arguments:
    """Books are words that are no settings; `output` is taken as it is typed."""
    texts, settings = take_texts([word for word in words if not _is_book(word)])
    return Arguments(settings, {"texts": texts, "paths": [word for word in words if _is_book(word)]})


def _is_book(word: str) -> bool:
    """Whether a word is a book: it has no `=`, has a folder before it, or names a file and begins with no key."""
    key, separator, _ = word.partition("=")
    if not separator or ("/" in key and not key.startswith("hydra/")):
        return True
    known = {*groups(), *root_defaults(), "hydra"}
    return key.lstrip("+~").partition(".")[0] not in known and is_file(word)


VERB = Verb(
    "summarize",
    "summarize a book of any length, text or EPUB",
    "infini summarize book.txt output=summary.txt",
    "infini.runs.summarize",
    groups=("decoding", "model", "scale", "parallel"),
    keys=("checkpoint", "output", "seed", "results_dir"),
    also=(*COMPARED, "cache_dir"),
    never=(*EVALUATION_ONLY, *DEVICES_OF_TRAINING),
    order=4,
    read=read,
    takes_words=True,
    # What the model was trained for, and how summaries are sampled.
    fixed=("task=booksum",),
)
