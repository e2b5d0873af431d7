"""One LightningModule for every language model."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import lightning
import numpy as np
import torch

from infini.config.schema import OptimizerConfig, RecipeConfig
from infini.errors import DivergedError
from infini.nn.host import to_device, to_numpy
from infini.nn.ops.cross_entropy import IGNORE, summed_cross_entropy
from infini.nn.projections import recorded
from infini.nn.protocols import ModelOutput, optional
from infini.nn.state import State, detach, leaves, map_state
from infini.training.activation_checkpointing import cut, grouped
from infini.training.additions import length_extension, long_history
from infini.training.additions.sparse_writes import penalty
from infini.training.non_finite import first_not_finite
from infini.training.optimizers import build_optimizer
from infini.training.resume import random_states, set_random_states

SMOOTHING = 0.98
SOURCE = ("source_BS", "source_mask_BS", "at_random")
"""Inputs of a batch for an encoder-decoder; see infini.pretrained.seq2seq."""
ON_HOST = ("mask_BT", "reset_BT", "targets_BT", "lm_targets_BT")
"""Entries of a batch that stay on the host, where calls are planned and targets are counted."""
_EXTENSION_STREAM, _HISTORY_STREAM = 3, 4
"""Streams of the seed's random numbers for length extension and long histories."""


class LanguageModelModule(lightning.LightningModule):
    """Trains a model on batches of ids_BT, targets_BT, mask_BT, reset_BT (see infini.tasks.text.stream).

    carry_state: the detached state of each row is carried into its next sequence; otherwise every sequence starts from
    an empty state. Gradients flow through all segments of a sequence.

    A batch may also hold segment_length, that of its stage of the curriculum; lm_targets_BT and lm_weight, targets and
    weight of a second loss; history_PT, the pieces of a long history (see infini.training.additions.long_history); and
    the source of an encoder-decoder (SOURCE).
    """

    def __init__(
        self, model: Any, optimizer: OptimizerConfig, recipe: RecipeConfig, carry_state: bool, seed: int = 0
    ) -> None:
        super().__init__()
        self.model = model
        self.optimizer_config, self.recipe, self.carry_state, self.seed = optimizer, recipe, carry_state, seed
        self.stage = 0
        """Stage of the curriculum from 0; the main training follows the last stage."""
        self.stage_loss: float | None = None
        """Smoothed loss since the start of the stage."""
        self.stage_steps: list[int] = []
        """The last step of each completed stage."""
        self.carried: State | None = None
        self.histories: State | None = None
        """States after the long histories, when they were last read."""
        self.loss_curve: list[list[float]] = []
        self.tokens_seen = 0
        self._pending: list[tuple[int, torch.Tensor]] = []
        self._seconds_before = 0.0
        self._started: float | None = None
        self._random_states: dict[str, Any] | None = None

    @property
    def seconds(self) -> float:
        """Seconds of training behind the weights, with those of earlier processes up to the checkpoint."""
        return self._seconds_before + (0.0 if self._started is None else time.perf_counter() - self._started)

    def leave_out(self, seconds: float) -> None:
        """Do not count these seconds, which were not spent on training."""
        self._seconds_before -= seconds

    def on_train_start(self) -> None:
        self._started = time.perf_counter()
        # A checkpoint is loaded before the model is moved to its device.
        self.carried, self.histories = (
            None if state is None else state.to(self.device) for state in (self.carried, self.histories)
        )

    def transfer_batch_to_device(
        self, batch: dict[str, Any], device: torch.device, dataloader_idx: int
    ) -> dict[str, Any]:
        """The batch on the device, except for ON_HOST."""
        kept = {name: batch[name] for name in ON_HOST if name in batch}
        moved = {name: value for name, value in batch.items() if name not in kept}
        return super().transfer_batch_to_device(moved, device, dataloader_idx) | kept

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        # Not on loading the checkpoint: creating the loader's iterator uses a random number, as it did the first time.
        if self._random_states is not None:
            set_random_states(self._random_states, self.device)
            self._random_states = None

    def training_step(self, batch: dict[str, Any], batch_index: int) -> torch.Tensor:
        if batch.get("segment_length", self.model.segment_length) != self.model.segment_length:
            self.model.resize_segments(batch["segment_length"])
        state = self.carried if self.carry_state else self._after_history(batch)
        writes = bool(optional(self.model, "memory_layers")) and self.in_last_stage
        sparse_writes = self.recipe.sparse_writes if writes else None
        if sparse_writes:
            # Tokens that are read a second time for the carried state only are not counted.
            with recorded(self.model, "k_proj") as keys:
                out = self._call(batch, state)
        else:
            out = self._call(batch, state)
        self.carried = detach(out.state) if self.carry_state else None
        temperature = (self.recipe.loss_temperature or 1.0) if self.in_last_stage else 1.0
        # Logits are linear in the hidden states.
        loss = self._loss(out.hidden_BTD if temperature == 1.0 else out.hidden_BTD / temperature, batch["targets_BT"])
        self.tokens_seen += int(to_numpy(batch["mask_BT"]).sum())
        if "source_BS" in batch:
            read = self.model.source_tokens(batch["source_BS"].shape[1])
            self.tokens_seen += int(batch["source_mask_BS"][:, :read].sum())
        self._pending.append((self.global_step + 1, loss.detach()))
        if len(self._pending) >= 10 or loss.device.type == "cpu":
            # Reading costs nothing on a CPU, and the weights are still those of a loss that is not finite.
            self.read_losses(lambda: self._call(batch, state))
        self.log("loss", loss.detach(), prog_bar=True)
        self._advance(loss)
        if "lm_targets_BT" in batch:
            loss = loss + batch["lm_weight"] * self._loss(out.hidden_BTD, batch["lm_targets_BT"])
        if sparse_writes:
            loss = loss + sparse_writes * penalty(self.model, keys, batch["mask_BT"])
        return loss + out.aux_loss

    def _after_history(self, batch: dict[str, Any]) -> State | None:
        """The initial state of a batch: with a history in it, some rows start after that."""
        if "history_PT" not in batch or not self.in_last_stage or not optional(self.model, "memory_is_a_sum"):
            return None
        if self.histories is None or self.global_step % long_history.EVERY == 0:
            self.histories = long_history.read_histories(self.model, batch["history_PT"])
        rng = np.random.default_rng([self.seed, _HISTORY_STREAM, self.global_step])
        return long_history.sample_initial_states(
            self.model.init_state(batch["ids_BT"].shape[0], self.device), self.histories, rng
        )

    def _call(self, batch: dict[str, Any], state: State | None) -> ModelOutput:
        ids_BT = batch["ids_BT"]
        if "source_BS" in batch:
            told: ModelOutput = self.model(ids_BT, **{key: batch[key] for key in SOURCE if key in batch})
            return told
        mask_BT = None if to_numpy(batch["mask_BT"]).all() else batch["mask_BT"]
        reset_BT = batch["reset_BT"] if to_numpy(batch["reset_BT"]).any() else None
        N = self.model.segment_length
        segments = -(-ids_BT.shape[1] // N)
        group = self.recipe.checkpoint_segments
        model = self.model if group is None or group >= segments else grouped(self.model, group * N)
        # Other models have memories that are not sums and cannot be scaled.
        extended = self.recipe.length_extension is not None and optional(self.model, "memory_is_a_sum")
        if extended and self.in_last_stage and segments > 1:
            assert self.recipe.length_extension is not None
            rng = np.random.default_rng([self.seed, _EXTENSION_STREAM, self.global_step])
            if rng.random() < self.recipe.length_extension_share:
                boundary, factor_B = length_extension.draw(rng, ids_BT.shape[0], segments, self.recipe.length_extension)
                call = length_extension.carried_call if self.carry_state else length_extension.extended_call
                return call(model, ids_BT, state, mask_BT, reset_BT, boundary * N, factor_B)
        if not self.in_last_stage and "segment_length" not in batch:
            # The stream stays the same; a stage is easier because gradients cross fewer segments.
            model = cut(model, (self.recipe.curriculum or [])[self.stage][1])
        out: ModelOutput = model(ids_BT, state, mask_BT=mask_BT, reset_BT=reset_BT)
        return out

    def _loss(self, hidden_BTD: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
        """Mean loss in nats over the targets."""
        place_P = np.flatnonzero(to_numpy(targets_BT) != IGNORE)
        if 2 * len(place_P) < targets_BT.numel():
            # Only the logits at targets, not those of the whole sequence.
            hidden_BTD = hidden_BTD.flatten(0, 1).index_select(0, to_device(place_P, hidden_BTD.device))[None]
            targets_BT = targets_BT.flatten()[torch.from_numpy(place_P)][None]
        total, count = summed_cross_entropy(hidden_BTD, self.model.output_weight, targets_BT, self.recipe.loss_chunk)
        return total / max(count, 1)

    @property
    def in_last_stage(self) -> bool:
        """Whether this is the main training, after all stages of the curriculum."""
        return self.stage == len(self.recipe.curriculum or ())

    def _advance(self, loss: torch.Tensor) -> None:
        """Start the next stage of the curriculum when the smoothed loss is low enough or the stage had its steps."""
        if self.in_last_stage:
            return
        value = float(loss.detach())
        kept = SMOOTHING if self.stage_loss is not None else 0.0
        self.stage_loss = kept * (self.stage_loss or 0.0) + (1 - kept) * value
        steps = (self.recipe.curriculum or [])[self.stage][2:]
        since = self.stage_steps[-1] if self.stage_steps else 0
        done = bool(steps) and self.global_step + 1 - since >= steps[0]
        if done or self.stage_loss < self.recipe.advance_below:
            self.stage, self.stage_loss = self.stage + 1, None
            self.stage_steps.append(self.global_step + 1)

    @property
    def last_loss(self) -> float:
        """Loss of the newest step in nats per token, without penalties and second losses."""
        return float(self._pending[-1][1]) if self._pending else self.loss_curve[-1][1]

    def read_losses(self, again: Callable[[], Any] = lambda: None) -> None:
        """Move pending losses to `loss_curve` as [step, nats per token]; in groups, to synchronize a GPU rarely.

        again: repeats the last forward pass. Raises DivergedError for a loss that is not finite, with the step and the
        first value that is not finite.
        """
        for step, loss in self._pending:
            value = float(loss)
            if not math.isfinite(value):
                where = first_not_finite(self.model, again)
                raise DivergedError(f"the loss at step {step} is {value}" + (f", {where}" if where else ""), step)
            # Nine digits identify a float32 exactly.
            self.loss_curve.append([step, float(f"{value:.9g}")])
        self._pending.clear()

    def configure_optimizers(self) -> Any:
        optimizer = build_optimizer(self.model, self.optimizer_config)
        # LambdaLR counts steps from 0, the recipe from 1.
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: self.recipe.rate_factor(done + 1))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.read_losses()
        if where := first_not_finite(self.model, lambda: None):
            raise DivergedError(f"after step {self.global_step} {where}", self.global_step)
        checkpoint["infini"] = {
            "carried": _stored(self.carried),
            "histories": _stored(self.histories),
            "loss_curve": self.loss_curve,
            "tokens_seen": self.tokens_seen,
            "stage": self.stage,
            "stage_loss": self.stage_loss,
            "stage_steps": self.stage_steps,
            "seconds": self.seconds,
            "random_states": random_states(self.device),
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        kept = checkpoint["infini"]
        self.loss_curve, self.tokens_seen = kept["loss_curve"], kept["tokens_seen"]
        self.stage, self.stage_loss, self.stage_steps = kept["stage"], kept["stage_loss"], kept["stage_steps"]
        self._seconds_before, self._random_states = kept["seconds"], kept["random_states"]
        self.carried, self.histories = (self._filled(kept[name]) for name in ("carried", "histories"))

    def _filled(self, stored: dict[str, torch.Tensor]) -> State | None:
        """The state of _stored tensors."""
        if not stored:
            return None
        found = iter(stored.values())
        fresh = self.model.init_state(next(iter(stored.values())).shape[0], self.device)
        return map_state(lambda leaf: next(found).to(leaf.device, leaf.dtype), fresh)


def _stored(state: State | None) -> dict[str, torch.Tensor]:
    return {} if state is None else dict(leaves(state))
