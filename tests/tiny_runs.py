"""A corpus of a few pages and the overrides of a training that takes a moment, for tests that run commands."""

from __future__ import annotations

from pathlib import Path

import numpy as np

DOCUMENTS = {"train": 4, "validation": 2, "test": 3}
TINY = (
    "dims.d_model=16",
    "dims.n_layers=1",
    "dims.n_heads=2",
    "dims.d_key=8",
    "dims.d_value=null",
    "dims.d_ff=32",
    "dims.segment_length=16",
    "scale.vocab_size=300",
    "recipe.steps=3",
    "recipe.warmup_steps=1",
    "recipe.batch_size=2",
    "recipe.segments_per_sequence=2",
    "recipe.loss_chunk=32",
    "parallel.accelerator=cpu",
    "parallel.precision=fp32",
)


def write_corpus(folder: Path) -> Path:
    """Documents of about 3 KB of made-up words, {train,validation,test}/*.txt below `folder`."""
    rng = np.random.default_rng(0)
    words = ["".join(rng.choice(list("abcdefghijklmnop"), size=rng.integers(1, 8))) for _ in range(60)]
    for split, count in DOCUMENTS.items():
        (folder / split).mkdir(parents=True)
        for number in range(count):
            text = " ".join(rng.choice(words, size=500 + 40 * number))
            (folder / split / f"{split}{number}.txt").write_text(text, encoding="utf-8")
    return folder
