"""Summaries of whole books: a model reads up to 500K tokens of a book and generates a summary."""

from __future__ import annotations

import sys
from functools import cached_property
from typing import Any, cast

import torch
from torch.utils.data import DataLoader

from infini.config.compose import cache_folder
from infini.errors import require
from infini.models import kind_of
from infini.nn.ops.cross_entropy import summed_cross_entropy
from infini.system.devices import autocast
from infini.system.progress import progress_bar
from infini.tasks.booksum.books import BookSplit, open_books
from infini.tasks.booksum.config import BooksumConfig
from infini.tasks.booksum.data import Examples, SourceBatches, SummaryBatches, frame_of
from infini.tasks.booksum.evaluation import details, evaluate, evaluate_reference
from infini.tasks.text.data_module import NumberedDataset, ResumableDataModule
from infini.tasks.text.documents import TextTokenizer
from infini.tasks.text.hub import hub_tokenizer
from infini.tasks.text.token_cache import TokenisedSplit, open_tokenizer, tokenise
from infini.training.checkpoint import TOKENIZER, named_folder
from infini.training.module import SOURCE

__all__ = ["DataModule", "details", "evaluate", "evaluate_reference"]


class DataModule(ResumableDataModule):
    """Beginnings of books with their summaries."""

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        """The tokenizer of the model from which the training starts, else that of the hub's weights, else that of
        open_tokenizer for the books of the train split."""
        if self.cfg.init_from is not None:
            return TextTokenizer.load(named_folder("init_from", self.cfg.init_from, self.cfg.results_dir) / TOKENIZER)
        if (weights := self.cfg.model.get("weights")) is not None:
            return hub_tokenizer(weights, "model.weights", "model.weights=null")
        return open_tokenizer(self.cfg, lambda: open_books(self.cfg, "train").documents)

    def _tokens(self, books: BookSplit) -> TokenisedSplit:
        return tokenise(books.documents, self.tokenizer, cache_folder(self.cfg))

    def setup(self, stage: str | None = None) -> None:
        """Read books and summaries. Raises InputError when they cannot be loaded or an example has no room."""
        curriculum = self.cfg.recipe.curriculum
        require(not curriculum, "recipe.curriculum", curriculum, "booksum has no stages")
        self._train = open_books(self.cfg, "train")
        # Read now, so that errors come before the training and not after it.
        validation = open_books(self.cfg, "validation")
        self._opened = self._tokens(self._train)
        self.batches = self._batches(self._train, self._opened)
        self._validation = self._batches(validation, self._tokens(validation))
        cfg = self.cfg
        length = cfg.recipe.segments_per_sequence * cfg.dims.segment_length
        if cfg.model.get("unlimiformer") == "alternating" and cfg.model["k"] >= length:
            print(
                f"model.k={cfg.model['k']}: training sources have {length} tokens, so model.unlimiformer=alternating "
                "retrieves all of them and learns no selection; set recipe.segments_per_sequence for longer ones",
                file=sys.stderr,
            )

    def _batches(self, books: BookSplit, opened: TokenisedSplit) -> Examples:
        cfg, marks = self.cfg, (self.tokenizer.bos_id, self.tokenizer.end_id)
        length = cfg.recipe.segments_per_sequence * cfg.dims.segment_length
        summaries = [[self.tokenizer.encode(text) for text in texts] for texts in books.summaries]
        task = cast(BooksumConfig, cfg.task)
        rest = (task.summary_tokens, cfg.recipe.batch_size, cfg.seed)
        # An encoder-decoder reads no frame, but task.chat is refused for it here.
        frame = frame_of(self.tokenizer, task.chat, cfg.model)
        if kind_of(cfg.model["name"]) == "seq2seq":
            alternating = cfg.model["unlimiformer"] == "alternating"
            source_tokens = length if alternating else min(length, cfg.model["window"])
            return SourceBatches(opened.tokens, summaries, marks, source_tokens, *rest)
        return SummaryBatches(opened.tokens, summaries, frame, length, *rest)

    def revision(self, split: str) -> str:
        return open_books(self.cfg, split).revision

    def train_dataloader(self) -> DataLoader[dict[str, Any]]:
        """Whole batches."""
        return DataLoader(NumberedDataset(self.batches.batch, self._first_batch), batch_size=None, num_workers=0)

    def data_record(self, split: str) -> dict[str, Any]:
        """The description of the data for run records."""
        return {**self._opened.data_record(), "revision": self._train.revision, "examples": len(self.batches.pairs)}

    @torch.no_grad()
    def validate(self, model: Any, device: torch.device) -> dict[str, dict[str, Any]]:
        """Loss on the summaries of the validation books, with inputs as in training."""
        total = count = 0.0
        batches = self._validation
        bar = progress_bar("validating", len(batches.pairs), sys.stderr.isatty())
        with autocast(self.cfg.parallel.precision, device), bar as advance:
            for batch in batches.all_once():
                given = {name: value.to(device) for name, value in batch.items() if name in ("mask_BT", *SOURCE)}
                hidden_BTD = model(batch["ids_BT"].to(device), None, **given).hidden_BTD
                targets_BT = batch["targets_BT"].to(device)
                loss, n = summed_cross_entropy(hidden_BTD, model.output_weight, targets_BT, self.cfg.recipe.loss_chunk)
                total, count = total + float(loss), count + n
                advance(len(targets_BT))
        entry = {"value": total / count, "n": int(count), "unit": "nats a token", "higher_is_better": False}
        return {"validation_summary_nll": entry}
