"""Continual pre-training: documents of several corpora, read as running text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from infini.config.schema import Config
from infini.tasks.continual.config import ContinualConfig
from infini.tasks.text.document_data import DocumentDataModule
from infini.tasks.text.document_evaluation import evaluate
from infini.tasks.text.mixture import at_least, sources_of
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
        return [(documents, self.task.share_of(name)) for name, documents in sources_of(self.train).items()]

    def data_record(self, split: str) -> dict[str, Any]:
        opened: TokenisedSplit = getattr(self, split)
        tokens = {name: int(opened.n_tokens[found].sum()) for name, found in sources_of(opened).items()}
        return super().data_record(split) | {"sources": tokens}
