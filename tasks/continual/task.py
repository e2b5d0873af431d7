"""Continual pre-training: documents of several corpora, read as running text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from infini.config.schema import Config
from infini.errors import InputError
from infini.tasks.continual.config import ContinualConfig
from infini.tasks.text.document_data import DocumentDataModule
from infini.tasks.text.document_evaluation import evaluate
from infini.tasks.text.token_cache import TokenisedSplit

__all__ = ["DataModule", "evaluate"]


class DataModule(DocumentDataModule):
    """The mixture of `task.sources`. Documents of fewer than task.min_tokens tokens are not trained on."""

    # Models are large and trainings short.
    validation_tokens = 4096

    def __init__(self, cfg: Config) -> None:
        super().__init__(cfg)
        self.task = cast(ContinualConfig, cfg.task)

    def _open(self, split: str) -> TokenisedSplit:
        found = super()._open(split)
        return at_least(found, self.task.min_tokens) if split == "train" else found

    def parts(self) -> Sequence[tuple[Sequence[int], float]]:
        # Shares may have any sum.
        shares = dict(zip(self.task.sources, self.task.shares or [1.0] * len(self.task.sources), strict=True))
        return [(documents, shares[name]) for name, documents in sources_of(self.train).items()]

    def data_record(self, split: str) -> dict[str, Any]:
        opened: TokenisedSplit = getattr(self, split)
        tokens = {name: int(opened.n_tokens[found].sum()) for name, found in sources_of(opened).items()}
        return super().data_record(split) | {"sources": tokens}


def sources_of(split: TokenisedSplit) -> dict[str, list[int]]:
    """Source -> the numbers of its documents, of a split of `mixture`."""
    found: dict[str, list[int]] = {}
    for index, name in enumerate(split.names):
        found.setdefault(name.partition("/")[0], []).append(index)
    return found


def at_least(split: TokenisedSplit, n_tokens: int) -> TokenisedSplit:
    """The documents of at least n_tokens tokens. Raises InputError where a source has none."""
    for source, documents in sources_of(split).items():
        longest = max(split.n_tokens[index] for index in documents)
        if longest < n_tokens:
            said = f"the longest document of {source} to train on has {longest} tokens"
            raise InputError(f"task.min_tokens={n_tokens}: {said}; leave it out of task.sources, or take fewer")
    kept = [index for index, length in enumerate(split.n_tokens) if length >= n_tokens]
    return replace(
        split,
        names=[split.names[index] for index in kept],
        tokens=[split.tokens[index] for index in kept],
        n_words=split.n_words[kept],
        n_bytes=split.n_bytes[kept],
    )
