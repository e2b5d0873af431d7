"""The prompts of a configuration."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from infini.config.compose import cache_folder
from infini.config.schema import Config
from infini.errors import InputError
from infini.tasks.passkey.config import PasskeyConfig
from infini.tasks.passkey.prompt import PasskeyTemplate
from infini.tasks.passkey.tokenizer import word_tokenizer
from infini.tasks.text.documents import TextTokenizer
from infini.tasks.text.token_cache import documents_of, tokenise

LONGEST_TRAINING = 8192
"""Up to this length, training and evaluation never have the same filler counts, however long training prompts are."""
BOOK_TOKENS = 1 << 24
"""Most tokens of books that serve as filler."""


def stages(cfg: Config) -> list[tuple[int, int]]:
    """(segment length, tokens per sequence) of every stage of the training, the main training last."""
    N = cfg.dims.segment_length
    early = [(segment, tokens) for segment, tokens, *_ in cfg.recipe.curriculum or ()]
    return [*early, (N, N * cfg.recipe.segments_per_sequence)]


APPENDIX = "appendix"
"""Revision of prompts with the sentences of the paper's appendix as filler."""


def revision_of(cfg: Config, split: str) -> str:
    """Content hash of the books whose text is the filler of a split."""
    filler = cast(PasskeyConfig, cfg.task).filler
    return documents_of(cfg, split).revision if filler == "book" else APPENDIX


def make_template(cfg: Config, tokenizer: TextTokenizer, split: str) -> tuple[PasskeyTemplate, dict[str, Any]]:
    """The prompts of `cfg.task` in the tokens of `tokenizer`, and the description of their text for records.

    split: the split of books for filler, so that training and evaluation share none. Training prompts always fill their
    length exactly: with whole blocks, questions would fall on few positions relative to segment boundaries.
    """
    task = cast(PasskeyConfig, cfg.task)
    book, data = None, {"name": cfg.task.name, "source": "generated", "revision": APPENDIX, "split": split}
    if task.filler == "book":
        if tokenizer.hash == word_tokenizer().hash:
            raise InputError(
                "task.filler='book': this tokenizer has only the words of the prompt; train with task.tokenizer=scale"
            )
        books = tokenise(documents_of(cfg, split), tokenizer, cache_folder(cfg))
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
        # At least that of the paper, because an evaluation may change the segment length.
        longest_training=max(LONGEST_TRAINING, *(tokens for _, tokens in stages(cfg))),
    )
    return template, data | {"tokenizer": tokenizer.name}
