"""The prompts that a configuration asks for."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from infini.config.schema import Config
from infini.errors import InputError
from infini.tasks.passkey.config import PasskeyConfig
from infini.tasks.passkey.prompt import PasskeyTemplate
from infini.tasks.passkey.tokenizer import word_tokenizer
from infini.tasks.text.documents import TextTokenizer
from infini.tasks.text.token_cache import documents_of, open_split

LONGEST_TRAINING = 8192
"""Prompts up to this length keep the filler counts of training and evaluation apart, whatever the training's were."""
BOOK_TOKENS = 1 << 24
"""Most tokens of books that a filler is taken from."""


def stages(cfg: Config) -> list[tuple[int, int]]:
    """(segment length, tokens a sequence) of every stage of the training, the training proper last."""
    N = cfg.dims.segment_length
    early = [(segment, tokens) for segment, tokens, *_ in cfg.recipe.curriculum or ()]
    return [*early, (N, N * cfg.recipe.segments_per_sequence)]


APPENDIX = "appendix"
"""Revision of prompts that hold the sentences of the paper's appendix and no text of books."""


def revision_of(cfg: Config, split: str) -> str:
    """Content hash of the books that the filler of a split is taken from."""
    filler = cast(PasskeyConfig, cfg.task).filler
    return documents_of(cfg, split).revision if filler == "book" else APPENDIX


def make_template(cfg: Config, tokenizer: TextTokenizer, split: str) -> tuple[PasskeyTemplate, dict[str, Any]]:
    """The prompts of `cfg.task` in the tokens of `tokenizer`, and what a record says about their text.

    split: the books that a filler of book text is taken from, so that training and evaluation share none. Prompts of
    the training always fill their length exactly: whole blocks would put questions on few places of the segment grid.
    """
    task = cast(PasskeyConfig, cfg.task)
    book, data = None, {"name": cfg.task.name, "source": "generated", "revision": APPENDIX, "split": split}
    if task.filler == "book":
        if tokenizer.hash == word_tokenizer().hash:
            raise InputError(
                "task.filler='book': this tokenizer knows the prompt's words only; train with task.tokenizer=scale"
            )
        books = open_split(cfg, split, tokenizer)[0]
        taken, total = [], 0
        for index in range(len(books)):
            taken.append(books.ids(index))
            total += len(taken[-1])
            if total >= BOOK_TOKENS:
                break
        book = np.concatenate(taken)[:BOOK_TOKENS]
        data |= {"source": books.source, "revision": books.revision}
    template = PasskeyTemplate(
        tokenizer.encode,
        digits=task.digits,
        as_printed=task.as_printed,
        distractors=task.distractors,
        fill="exact" if split == "train" else task.fill,
        book=book,
        # Never below what the paper trains on: an evaluation may have changed the segment length.
        longest_training=max(LONGEST_TRAINING, *(tokens for _, tokens in stages(cfg))),
    )
    return template, data | {"tokenizer": tokenizer.name}
