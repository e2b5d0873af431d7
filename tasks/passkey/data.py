"""Training batches of the passkey task, made on demand from the seed and the batch number alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from infini.config.lengths import HISTORY_SEGMENTS
from infini.errors import InputError
from infini.nn.ops.cross_entropy import IGNORE
from infini.tasks.passkey.prompt import PasskeyTemplate, Prompt
from infini.tasks.text.batches import batch_of

TRAINING_STREAM, VALIDATION_STREAM, EVALUATION_STREAM = range(3)
"""Independent streams of a seed's random numbers."""
BOUNDARY_SHARE, BOUNDARY_TRIES = 0.4, 64
"""Fraction of the last stage's keys, except those at the start, that are resampled until a segment ends inside their
sentence; and the maximum number of samples (also for an answer that no segment end cuts)."""


def input_ids(prompt: Prompt, bos_id: int) -> np.ndarray:
    """Input for a prompt and its answer: bos_id, the prompt, and the answer without its last token."""
    return np.concatenate([[bos_id], *prompt.chunks(1 << 16), prompt.answer[:-1]]).astype(np.int64)


class PasskeyBatches:
    """Batch number i at a stage of the curriculum, always the same.

    stages: [(segment length, tokens per sequence)], the last one the main training. batch_size: rows of the last stage;
    stages of shorter sequences have proportionally more. short: (tokens per sequence, share): in this share of the last
    stage's batches sequences have so many tokens, in more rows. lm_loss_weight: above 0, all other tokens are targets,
    too.
    few_digit_share: fraction of the last stage's keys with at most two, three or four distinct digits; the first stage
    would take longer with them. history: (pieces, number of the first batch): from that batch on, rows of the last
    stage may start after this much filler. Raises InputError where a stage has no room for a prompt.

    The key can be anywhere. A prompt is up to one segment shorter than the sequence, so that key and question take
    every position relative to segment boundaries.
    """

    def __init__(
        self,
        template: PasskeyTemplate,
        bos_id: int,
        stages: Sequence[tuple[int, int]],
        batch_size: int,
        seed: int,
        lm_loss_weight: float = 0.0,
        few_digit_share: float = 0.0,
        history: tuple[int, int] | None = None,
        short: tuple[int, float] | None = None,
    ) -> None:
        self.template, self.bos_id, self.stages = template, bos_id, list(stages)
        self.seed, self.lm_loss_weight, self.few_digit_share = seed, lm_loss_weight, few_digit_share
        self.history, self.short = history, short
        self.tokens = batch_size * self.stages[-1][1]
        lengths = [length for _, length in self.stages] + ([short[0]] if short else [])
        if (shortest := min(lengths)) < template.shortest(training=True):
            raise InputError(
                "recipe.curriculum, recipe.short_sequences, or recipe.segments_per_sequence x dims.segment_length: "
                f"{shortest} tokens are too few for a passkey prompt, which needs {template.shortest(training=True)}"
            )

    def batch(self, index: int, stage: int) -> dict[str, Any]:
        """ids_BT, targets_BT (the key; IGNORE elsewhere), mask_BT, reset_BT and segment_length of a stage's batch, and
        with a history history_PT, the tokens of its pieces."""
        segment_length, length = self.stages[stage]
        last = stage == len(self.stages) - 1
        rng = np.random.default_rng([self.seed, TRAINING_STREAM, index])
        if last and self.short and rng.random() < self.short[1]:
            length = self.short[0]
        shortest = max(length - segment_length + 1, self.template.shortest(training=True))
        share = self.few_digit_share if last else 0.0
        rows = []
        for _ in range(max(1, self.tokens // length)):
            prompt = self._prompt(rng, shortest, length, segment_length if last else None, share)
            rows.append((input_ids(prompt, self.bos_id), prompt.answer))
        arrays = batch_of(rows, length, self.bos_id)
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

    def _prompt(
        self, rng: np.random.Generator, shortest: int, longest: int, segment_length: int | None, few_digit_share: float
    ) -> Prompt:
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
            prompt = self._last_stage_prompt(rng, shortest, longest, segment_length, few_digit_share)
            # bos_id is the first token of the first segment, and the answer's last token is not fed.
            if (len(prompt) + len(prompt.answer) - 1) // segment_length == len(prompt) // segment_length:
                break
        return prompt

    def _last_stage_prompt(
        self, rng: np.random.Generator, shortest: int, longest: int, segment_length: int, few_digit_share: float
    ) -> Prompt:
        """A prompt of the last stage, whether a segment ends before its answer or not."""
        few = few_digit_share > 0 and bool(rng.random() < few_digit_share)
        key = self.template.draw_key(rng, training=True, few_digits=few)
        depth = float(np.clip(rng.uniform(-0.1, 1.3), 0.0, 1.0))
        for _ in range(BOUNDARY_TRIES if depth > 0 and rng.random() < BOUNDARY_SHARE else 1):
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
