"""The word-level tokenizer of the passkey prompt, for models trained on nothing else."""

from __future__ import annotations

import re
from functools import cache

from infini.tasks.passkey.prompt import BLOCK, BLOCK_AS_PRINTED, COLOURS, DISTRACTOR, HEAD, KEY, QUESTION
from infini.tasks.text.documents import BOS, PAD, TextTokenizer

UNKNOWN = "<unk>"


@cache
def word_tokenizer() -> TextTokenizer:
    """All words of the prompt and its variants, full stop and question mark, ten digits, and three special tokens."""
    import tokenizers
    from tokenizers import models, pre_tokenizers

    distractors = [DISTRACTOR.format(colour=colour, key="") for colour in COLOURS]
    text = " ".join([HEAD, BLOCK, BLOCK_AS_PRINTED, KEY.format(key=""), *distractors, QUESTION])
    words = list(dict.fromkeys(re.findall(r"\w+|[^\w\s]", text)))
    vocabulary = [BOS, PAD, UNKNOWN, *"0123456789", *words]
    tokenizer = tokenizers.Tokenizer(
        models.WordLevel({word: index for index, word in enumerate(vocabulary)}, unk_token=UNKNOWN)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Whitespace(), pre_tokenizers.Digits(individual_digits=True)]
    )
    return TextTokenizer(tokenizer)
