"""The data module of running text: documents, read from beginning to end."""

import sys
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from infini.config.compose import cache_folder
from infini.errors import require
from infini.evaluation.perplexity import (
    DocumentSubset,
    Streamed,
    metrics,
    stream_documents,
    stream_in_batches,
    tokens_of_a_call,
)
from infini.system.devices import autocast
from infini.system.progress import progress_bar
from infini.tasks.text.data_module import ResumableDataModule
from infini.tasks.text.documents import TextTokenizer
from infini.tasks.text.stream import DocumentStream
from infini.tasks.text.token_cache import TokenisedSplit, documents_of, open_tokenizer, tokenise


def _opened(split: str) -> cached_property[TokenisedSplit]:
    return cached_property(lambda module: module._open(split))


class DocumentDataModule(ResumableDataModule):
    """Documents as token streams.

    A split is tokenized on first use, so that a training never reads the test documents.
    """

    validation_tokens = 16384
    """Tokens of each validation document that the validation at the end of a training scores."""

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        """The tokenizer of the scale; a BPE is always trained on the train split."""
        return open_tokenizer(self.cfg)

    train, validation, test = _opened("train"), _opened("validation"), _opened("test")
    """The splits. Choices are made on validation; test is for final configurations only."""

    def _open(self, split: str) -> TokenisedSplit:
        return tokenise(documents_of(self.cfg, split), self.tokenizer, cache_folder(self.cfg))

    def setup(self, stage: str | None = None) -> None:
        """Prepare the splits of a Lightning stage: train and validation for "fit", test for "test".

        Raises InputError (one line) when the data cannot be loaded, or for a curriculum that a stream cannot follow.
        """
        N = self.cfg.dims.segment_length
        for segment, tokens, *_ in self.cfg.recipe.curriculum or ():
            allowed = f"stages of task={self.cfg.task.name} are [dims.segment_length={N}, a multiple of it]"
            require(segment == N and tokens % N == 0, "recipe.curriculum", self.cfg.recipe.curriculum, allowed)
        needed = {"fit": ("train", "validation"), "validate": ("validation",), "test": ("test",)}
        for split in needed.get(stage or "fit", ()):
            getattr(self, split)

    def train_dataloader(self) -> DataLoader[dict[str, Any]]:
        """Whole batches of a `DocumentStream`, which are not collated or copied."""
        cfg = self.cfg
        stream = DocumentStream(
            self.train,
            cfg.recipe.batch_size,
            cfg.recipe.segments_per_sequence,
            cfg.dims.segment_length,
            self.tokenizer.bos_id,
            cfg.seed,
            cfg.recipe.excerpt_tokens,
            self.parts(),
        )
        stream.seek(self._first_batch)
        return DataLoader(stream, batch_size=None, num_workers=0)

    def parts(self) -> Sequence[tuple[Sequence[int], float]] | None:
        """The sources of the train split; see DocumentStream. None: one."""
        return None

    def revision(self, split: str) -> str:
        return documents_of(self.cfg, split).revision

    def validate(self, model: Any, device: torch.device) -> dict[str, dict[str, Any]]:
        """Loss over the beginning of every validation document, by which configurations are chosen."""
        cfg = self.cfg
        total = int(np.minimum(self.validation.n_tokens, self.validation_tokens).sum())
        bar = progress_bar("validating", total, sys.stderr.isatty())
        with autocast(cfg.parallel.precision, device), bar as advance:

            def read(first: int, documents: DocumentSubset, edges: list[int]) -> list[Streamed]:
                streamed = stream_documents(
                    model,
                    documents,
                    self.tokenizer.bos_id,
                    tokens_per_call=tokens_of_a_call(
                        cfg.scale.eval_segments_per_call, cfg.dims.segment_length, "base" in cfg.model
                    ),
                    max_tokens=self.validation_tokens,
                    edges=edges,
                    segment_length=cfg.dims.segment_length,
                    advance=advance,
                )
                return [streamed]

            streamed = stream_in_batches(self.validation, self.validation_tokens, cfg.dims.segment_length, read)
        found = metrics(streamed, self.validation.n_words, self.validation.n_bytes)["nll_per_token"]
        return {"validation_nll_per_token": found}

    def data_record(self, split: str) -> dict[str, Any]:
        """The description of a split for run records."""
        return getattr(self, split).data_record()
