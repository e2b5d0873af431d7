"""The passkey task: retrieve a number hidden in up to millions of tokens of irrelevant text."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import DataLoader

from infini.models import base_of
from infini.system.devices import autocast
from infini.tasks.passkey.answers import answer_questions
from infini.tasks.passkey.config import PasskeyConfig
from infini.tasks.passkey.data import VALIDATION_STREAM, PasskeyBatches
from infini.tasks.passkey.evaluation import evaluate
from infini.tasks.passkey.plan import Question
from infini.tasks.passkey.template import make_template, revision_of, stages
from infini.tasks.passkey.tokenizer import word_tokenizer
from infini.tasks.text.data_module import NumberedDataset, ResumableDataModule
from infini.tasks.text.documents import TextTokenizer
from infini.tasks.text.token_cache import open_tokenizer
from infini.training.checkpoint import TOKENIZER, named_folder

__all__ = ["DataModule", "PasskeyDataModule", "evaluate"]

VALIDATION_PROMPTS = 32
"""Held-out prompts of the training length for the validation at the end of a training."""


class PasskeyDataModule(ResumableDataModule):
    """Prompts made on demand, for the current stage of the curriculum.

    The loader yields numbers. A number becomes a batch right before its step, when the stage is known.
    """

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        """The tokenizer of the model from which the training starts, else that of a pretrained model, of the task or of
        the scale."""
        if self.cfg.init_from is not None:
            return TextTokenizer.load(named_folder("init_from", self.cfg.init_from, self.cfg.results_dir) / TOKENIZER)
        task = cast(PasskeyConfig, self.cfg.task)
        of_words = task.tokenizer == "words" and base_of(self.cfg.model) is None
        return word_tokenizer() if of_words else open_tokenizer(self.cfg)

    def setup(self, stage: str | None = None) -> None:
        """Prepare the prompts. Raises InputError (one line) when the data cannot be loaded or a stage has no room."""
        cfg, task = self.cfg, cast(PasskeyConfig, self.cfg.task)
        history = cfg.recipe.long_history
        self.template, self._data = make_template(cfg, self.tokenizer, "train")
        self.batches = PasskeyBatches(
            self.template,
            self.tokenizer.bos_id,
            stages(self.cfg),
            cfg.recipe.batch_size,
            cfg.seed,
            task.lm_loss_weight,
            task.few_digit_share,
            (history[0], cfg.recipe.steps - history[1]) if history else None,
            (int(short[0]) * cfg.dims.segment_length, short[1]) if (short := cfg.recipe.short_sequences) else None,
        )

    def revision(self, split: str) -> str:
        return revision_of(self.cfg, split)

    def has_read(self, data: Mapping[str, Any], split: str) -> bool:
        task = cast(PasskeyConfig, self.cfg.task)
        # Prompts without book text still depend on books through a tokenizer that was trained on them.
        of_books = split == "train" and task.tokenizer == "scale" and self.cfg.scale.tokenizer == "bpe"
        if of_books and self.cfg.init_from is None and data.get("tokenizer") != self.tokenizer.name:
            return False
        return super().has_read(data, split)

    def train_dataloader(self) -> DataLoader[int]:
        """The numbers of the batches."""
        return DataLoader(NumberedDataset(int, self._first_batch), batch_size=None, num_workers=0)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> dict[str, Any]:
        """The batch of a number, for the current stage."""
        stage = cast(Any, self.trainer).lightning_module.stage
        return self.batches.batch(int(batch), stage)

    def data_record(self, split: str) -> dict[str, Any]:
        """The description of the data for run records."""
        return {**self._data, "split": split}

    def validate(self, model: Any, device: torch.device) -> dict[str, dict[str, Any]]:
        """Accuracy on held-out prompts of the training length, by which configurations are chosen."""
        N, length = stages(self.cfg)[-1]
        length = max(length, self.template.shortest(training=False))
        rng = np.random.default_rng([self.cfg.seed, VALIDATION_STREAM])
        questions = [
            Question(length, "random", number, self.template.example(length, float(rng.random()), rng, training=False))
            for number in range(VALIDATION_PROMPTS)
        ]
        model.resize_segments(N)
        right = tokens = whole = 0
        with autocast(self.cfg.parallel.precision, device):
            for answer in answer_questions(model, questions, self.tokenizer.bos_id, tokens_per_call=length):
                right, tokens = right + answer.n_right, tokens + answer.n_tokens
                whole += answer.exact
        entry = {"unit": "fraction", "higher_is_better": True}
        return {
            "validation_token_accuracy": {"value": right / tokens, "n": tokens, **entry},
            "validation_exact_match": {"value": whole / len(questions), "n": len(questions), **entry},
        }


DataModule = PasskeyDataModule
