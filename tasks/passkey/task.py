"""The passkey task: retrieve a number hidden in up to millions of tokens of irrelevant text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import DataLoader

from infini.config.lengths import HISTORY_SEGMENTS
from infini.errors import InputError
from infini.models import base_of
from infini.nn.ops.cross_entropy import IGNORE
from infini.system.devices import autocast
from infini.tasks.passkey import prompt as prompts
from infini.tasks.passkey.answers import Question, answer_questions
from infini.tasks.passkey.config import PasskeyConfig
from infini.tasks.passkey.evaluation import check_evaluation, evaluate
from infini.tasks.passkey.prompt import PasskeyTemplate, Prompt
from infini.tasks.text.data_module import NumberedDataset, ResumableDataModule
from infini.tasks.text.documents import TextTokenizer
from infini.tasks.text.stream import batch_of
from infini.tasks.text.token_cache import documents_of, open_tokenizer
from infini.training.checkpoint import TOKENIZER, named_folder

__all__ = ["DataModule", "check_evaluation", "evaluate"]

VALIDATION_PROMPTS = 32
"""Held-out prompts of the training length for the validation at the end of a training."""
CUT_KEY_SHARE = 0.4
"""task.cut_key_share where it is null, as in all records that do not name it."""
BOUNDARY_TRIES = 64
"""The maximum number of samples for a key that a segment's end cuts, and for an answer that none cuts."""


@dataclass(frozen=True)
class PasskeyBatches:
    """Batch number i at a stage of the curriculum, made on demand from the seed and this number alone.

    stages: [(segment length, tokens per sequence)], the last one the main training. batch_size: rows of the last stage;
    stages of shorter sequences have proportionally more. short: (tokens per sequence, share): in this share of the last
    stage's batches sequences have this many tokens, in more rows. lm_loss_weight: above 0, all other tokens are
    targets, too.
    few_digit_share: fraction of the last stage's keys with at most two, three or four distinct digits; the first stage
    would take longer with them. cut_key_share: fraction of the last stage's keys, except those at the start, that are
    sampled until a segment ends inside their sentence. history: (pieces, number of the first batch): from that batch
    on, rows of the last stage may start after this much filler. Raises InputError where a stage has no room for a
    prompt.

    The key can be anywhere. A prompt is up to one segment shorter than the sequence, so that key and question take
    every position relative to segment boundaries.
    """

    template: PasskeyTemplate
    bos_id: int
    stages: Sequence[tuple[int, int]]
    batch_size: int
    seed: int
    lm_loss_weight: float = 0.0
    few_digit_share: float = 0.0
    cut_key_share: float = CUT_KEY_SHARE
    history: tuple[int, int] | None = None
    short: tuple[int, float] | None = None

    def __post_init__(self) -> None:
        lengths = [length for _, length in self.stages] + ([self.short[0]] if self.short else [])
        enough = self.template.shortest(training=True)
        if (shortest := min(lengths)) < enough:
            raise InputError(
                "recipe.curriculum, recipe.short_sequences, or recipe.segments_per_sequence x dims.segment_length: "
                f"{shortest} tokens are too few for a passkey prompt, which needs {enough}"
            )

    def batch(self, index: int, stage: int) -> dict[str, Any]:
        """ids_BT, targets_BT (the key; IGNORE elsewhere), mask_BT, reset_BT and segment_length of a stage's batch;
        recalled_BT, the targets of prompts that need a memory; and with a history history_PT, the tokens of its
        pieces."""
        segment_length, length = self.stages[stage]
        last = stage == len(self.stages) - 1
        rng = np.random.default_rng([self.seed, prompts.TRAINING_STREAM, index])
        if last and self.short and rng.random() < self.short[1]:
            length = self.short[0]
        shortest = max(length - segment_length + 1, self.template.shortest(training=True))
        rows, needs_memory = [], []
        for _ in range(max(1, self.batch_size * self.stages[-1][1] // length)):
            prompt = self._prompt(rng, shortest, length, segment_length if last else None)
            rows.append((prompts.input_ids(prompt, self.bos_id), prompt.answer))
            needs_memory.append(not prompt.in_one_segment(segment_length))
        arrays = batch_of(rows, length, self.bos_id)
        arrays["recalled_BT"] = (arrays["targets_BT"] != IGNORE) & np.array(needs_memory)[:, None]
        if self.lm_loss_weight:
            arrays["lm_targets_BT"] = np.full_like(arrays["ids_BT"], IGNORE)
            for row, (ids, answer) in enumerate(rows):
                n_prompt = len(ids) - len(answer)
                arrays["lm_targets_BT"][row, :n_prompt] = ids[1 : n_prompt + 1]
        if last and self.history and index >= self.history[1]:
            size = HISTORY_SEGMENTS * segment_length
            arrays["history_PT"] = self.template.filler(rng, self.history[0] * size).reshape(-1, size)
        batch: dict[str, Any] = {name: torch.from_numpy(array) for name, array in arrays.items()}
        return batch | {"segment_length": segment_length, "lm_weight": self.lm_loss_weight}

    def _prompt(self, rng: np.random.Generator, shortest: int, longest: int, segment_length: int | None) -> Prompt:
        """A prompt of `shortest` to `longest` tokens with its answer; segment_length: None before the last stage.

        The last stage adds the following, with which the first stage would take twice as long. One key in fourteen is
        at the very start, and three in fourteen at the very end, where the question follows and no memory is needed.
        Half of those at the start directly follow the head, with the trimmed block after them, because evaluations have
        such prompts. Two keys in five are placed so that a segment ends inside their sentence. Prompts in which a
        segment ends between question and answer are left out: they are three in a hundred, seven in ten of them were
        answered wrong, and they were most of the loss. See results/LOG.md 49, 61, 65 and 86 to 99.
        """
        if segment_length is None:
            asked, depth = int(rng.integers(shortest, longest + 1)), float(rng.random())
            return self.template.example(asked, depth, rng, training=True)
        for _ in range(BOUNDARY_TRIES):
            prompt = self._last_stage_prompt(rng, shortest, longest, segment_length)
            # bos_id is the first token of the first segment, and the answer's last token is not fed.
            if (len(prompt) + len(prompt.answer) - 1) // segment_length == len(prompt) // segment_length:
                break
        return prompt

    def _last_stage_prompt(self, rng: np.random.Generator, shortest: int, longest: int, segment_length: int) -> Prompt:
        """A prompt of the last stage, whether a segment ends before its answer or not."""
        few = self.few_digit_share > 0 and bool(rng.random() < self.few_digit_share)
        key = self.template.draw_key(rng, training=True, few_digits=few)
        depth = float(np.clip(rng.uniform(-0.1, 1.3), 0.0, 1.0))
        for _ in range(BOUNDARY_TRIES if depth > 0 and rng.random() < self.cut_key_share else 1):
            prompt = self.template.example(
                int(rng.integers(shortest, longest + 1)),
                depth,
                rng,
                training=True,
                few_digits=few,
                trim_after_key=0.5 if depth == 0 else 0.0,
                key=key,
            )
            begin, last = prompt.key_position + 1, prompt.key_end
            if last // segment_length > begin // segment_length:
                break
            depth = depth if depth == 1 else float(rng.random())
        return prompt


class DataModule(ResumableDataModule):
    """Prompts made on demand, for the current stage of the curriculum.

    The loader yields numbers. A number becomes a batch right before its step, when the stage is known.
    """

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        """The tokenizer of the model that init_from names. Without one, that of the pretrained model. Without a
        pretrained model, the one that task.tokenizer chooses: the prompt's words, or the tokenizer of the scale."""
        if self.cfg.init_from is not None:
            return TextTokenizer.load(named_folder("init_from", self.cfg.init_from, self.cfg.results_dir) / TOKENIZER)
        task = cast(PasskeyConfig, self.cfg.task)
        of_words = task.tokenizer == "words" and base_of(self.cfg.model) is None
        return prompts.word_tokenizer() if of_words else open_tokenizer(self.cfg)

    def setup(self, stage: str | None = None) -> None:
        """Prepare the prompts. Raises InputError (one line) when the data cannot be loaded or a stage has no room."""
        cfg, task = self.cfg, cast(PasskeyConfig, self.cfg.task)
        history = cfg.recipe.long_history
        self.template, self._data = prompts.make_template(cfg, self.tokenizer, "train")
        # Other books, and an error at the end of the training if there are none would come late.
        of_books = task.filler == "book"
        self.held_out = prompts.make_template(cfg, self.tokenizer, "validation")[0] if of_books else self.template
        self.batches = PasskeyBatches(
            self.template,
            self.tokenizer.bos_id,
            prompts.stages(self.cfg),
            cfg.recipe.batch_size,
            cfg.seed,
            task.lm_loss_weight,
            task.few_digit_share,
            CUT_KEY_SHARE if task.cut_key_share is None else task.cut_key_share,
            (history[0], cfg.recipe.steps - history[1]) if history else None,
            (int(short[0]) * cfg.dims.segment_length, short[1]) if (short := cfg.recipe.short_sequences) else None,
        )

    def revision(self, split: str) -> str:
        filler = cast(PasskeyConfig, self.cfg.task).filler
        return documents_of(self.cfg, split).revision if filler == "book" else prompts.APPENDIX

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
        N, length = prompts.stages(self.cfg)[-1]
        length = max(length, self.held_out.shortest(training=False))
        rng = np.random.default_rng([self.cfg.seed, prompts.VALIDATION_STREAM])
        questions = [
            Question(length, "random", number, self.held_out.example(length, float(rng.random()), rng, training=False))
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
