"""A corpus of a few pages and the overrides of a training that takes a moment, for tests that run commands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from infini import records
from infini.config.compose import cache_folder
from infini.config.schema import Config
from infini.tasks.text.documents import TextTokenizer
from infini.tasks.text.token_cache import TokenisedSplit, documents_of, open_tokenizer, tokenise

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

SUMMARIES = (*TINY, "recipe.segments_per_sequence=4", "task.summary_tokens=8", "decoding.max_new_tokens=6")
"""The same for summaries of books."""


def write_corpus(folder: Path) -> Path:
    """Documents of made-up words, {train,validation,test}/*.txt below `folder`: about 3 KB, those of the test split
    a third of that, because many tests evaluate."""
    rng = np.random.default_rng(0)
    words = ["".join(rng.choice(list("abcdefghijklmnop"), size=rng.integers(1, 8))) for _ in range(60)]
    for split, count in DOCUMENTS.items():
        (folder / split).mkdir(parents=True)
        for number in range(count):
            text = " ".join(rng.choice(words, size=(160 if split == "test" else 500) + 40 * number))
            (folder / split / f"{split}{number}.txt").write_text(text, encoding="utf-8")
    return folder


STEPS = 7
"""Steps of the trainings below."""


def words(corpus: Path, results: Path, task: str = "pg19") -> list[str]:
    """A training that leaves a point every two steps, as words of the command line."""
    made = [*TINY, "logger=none", f"recipe.steps={STEPS}", "recipe.save_every=2", f"results_dir={results}"]
    if task == "pg19":
        return [*made, f"task.data_dir={corpus}", "model=infini_linear"]
    stages = ["recipe.curriculum=[[32,192]]", "recipe.advance_below=100", "recipe.segments_per_sequence=8"]
    lengthened = ["recipe.length_extension=50", "recipe.length_extension_share=0.5"]
    lengthened.append("recipe.long_history=[2,20]")
    return [*made, "task=passkey", "model=infini_delta", "dims.segment_length=32", *stages, *lengthened]


def outcome(results: Path) -> tuple[Any, bytes]:
    """Loss curve and weights of the one finished run below `results`."""
    (run,) = (run for run in records.load_records(results) if run.verb == "train")
    weights = results / "checkpoints" / run.run_id / "model.safetensors"
    return run.series["loss_curve"], weights.read_bytes()


def open_split(cfg: Config, split: str, tokenizer: TextTokenizer | None = None) -> tuple[TokenisedSplit, TextTokenizer]:
    """A split of the task of a configuration as tokens, with its tokenizer; None: that of the configuration."""
    tokenizer = tokenizer or open_tokenizer(cfg)
    return tokenise(documents_of(cfg, split), tokenizer, cache_folder(cfg), progress=False), tokenizer
