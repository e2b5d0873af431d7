"""One LightningModule for every language model."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import lightning
import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from infini.config.schema import OptimizerConfig, RecipeConfig
from infini.errors import DivergedError, InputError
from infini.nn.host import to_device, to_numpy
from infini.nn.ops.cross_entropy import IGNORE, count_most_likely, summed_cross_entropy
from infini.nn.ops.dtypes import state_dtype
from infini.nn.protocols import ModelOutput, optional, recorded
from infini.nn.sequence_parallel import SequenceParallel
from infini.nn.state import State, detach, join_rows, map_state, select_rows, stored_leaves
from infini.training.activation_checkpointing import cut, grouped
from infini.training.additions import length_extension, long_history
from infini.training.additions.sparse_writes import penalty
from infini.training.optimizers import build_optimizer
from infini.training.ranks import SINGLE_RANK, Ranks
from infini.training.resume import random_states, set_random_states
from infini.training.strategies import ShardedModel, release, shard

SMOOTHING = 0.98
SOURCE = ("source_BS", "source_mask_BS", "at_random")
"""Inputs of a batch for an encoder-decoder; see infini.pretrained.seq2seq."""
ON_HOST = ("mask_BT", "reset_BT", "targets_BT", "lm_targets_BT", "recalled_BT")
"""Entries of a batch that stay on the host, where calls are planned and targets are counted."""
_EXTENSION_STREAM, _HISTORY_STREAM, _SEGMENT_STREAM = 3, 4, 5
"""Streams of the seed's random numbers for length extension and long histories."""


class Whole(NamedTuple):
    """Totals over all rows of a step's batch, of which a rank reads some: rows, tokens that are read, targets, targets
    of the second loss, and targets of answers in an earlier segment. first: the first row of this rank, or of its
    part."""

    rows: int
    tokens: int
    targets: int
    lm_targets: int
    recalled: int
    first: int = 0


class LanguageModelModule(lightning.LightningModule):
    """Trains a model on batches of ids_BT, targets_BT, mask_BT, reset_BT (see infini.tasks.text.stream).

    carry_state: the detached state of each row is carried into its next sequence; otherwise every sequence starts from
    an empty state. Gradients flow through all segments of a sequence.

    A batch may also hold segment_length, that of its stage of the curriculum; lm_targets_BT and lm_weight, targets and
    weight of a second loss; recalled_BT, bool, targets of answers that lie in an earlier segment; history_PT, the
    pieces of a long history (see infini.training.additions.long_history); and the source of an encoder-decoder
    (SOURCE).

    ranks: each reads its own rows of a batch. sequence_group: the group of the ranks that share sequences; each reads
    its own segments. accumulate: parts of a rank's rows, read one after the other. Losses are sums over targets divided
    by the number of targets in the whole batch, so that none of these changes the gradients. products: the
    format in which the trainer multiplies matrices, which the optimizer takes, too.
    """

    def __init__(
        self,
        model: Any,
        optimizer: OptimizerConfig,
        recipe: RecipeConfig,
        carry_state: bool,
        seed: int = 0,
        ranks: Ranks = SINGLE_RANK,
        accumulate: int = 1,
        sequence_group: Any = None,
        products: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.ranks, self.accumulate, self.products = ranks, accumulate, products
        self.sharded = False
        self.model = model
        # It is no submodule, because its parameters are the model's.
        self._sequence_parallel = () if sequence_group is None else (SequenceParallel(model, sequence_group),)
        self.optimizer_config, self.recipe, self.carry_state, self.seed = optimizer, recipe, carry_state, seed
        self.stage = 0
        """Stage of the curriculum from 0; the main training follows the last stage."""
        self.stage_loss: float | None = None
        """Smoothed loss since the start of the stage."""
        self.stage_steps: list[int] = []
        """The last step of each completed stage."""
        self.carried: State | None = None
        """The state of this rank's rows."""
        self.histories: State | None = None
        """States after the long histories, when they were last read."""
        self.loss_curve: list[list[float]] = []
        self.recall_curve: list[list[int]] = []
        """[step, right, targets] of answers that lie in an earlier segment, with the true tokens before each; for the
        steps that have some."""
        self.tokens_seen = 0
        self._pending: list[tuple[int, torch.Tensor]] = []
        self._pending_recall: list[tuple[int, torch.Tensor, int]] = []
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
        """This rank's rows of the batch on the device, except for ON_HOST, and what the whole batch has."""
        whole = self._whole(batch)
        first, last = self.ranks.bounds(whole.rows)
        if last - first < self.accumulate:
            n_parts = self.ranks.size // self.ranks.sequence * self.accumulate
            raise InputError(
                f"recipe.curriculum: a stage has {whole.rows} rows for {n_parts} devices or parts of a step"
            )
        batch = _rows(batch, first, last)
        if self._sequence_parallel:
            batch = self._own_segments(batch)
        kept = {name: batch[name] for name in ON_HOST if name in batch}
        moved = {name: value for name, value in batch.items() if name not in kept}
        kept["whole"] = whole._replace(first=first)
        if device.type == "cuda":
            # Lightning copies without waiting, but only from pinned memory: the host, which reads losses rarely, goes
            # on to the next batch while the GPU computes.
            moved = {name: value.pin_memory() if torch.is_tensor(value) else value for name, value in moved.items()}
        return super().transfer_batch_to_device(moved, device, dataloader_idx) | kept

    def _own_segments(self, batch: dict[str, Any]) -> dict[str, Any]:
        """This rank's columns of a batch, whole segments and at least one. Only ends of documents are padded, and what
        their padding adds to a memory is never read."""
        N, T = self.model.segment_length, batch["ids_BT"].shape[1]
        n_segments = max(-(-T // N), self.ranks.sequence)
        first, last = self.ranks.segments(n_segments)
        own = {}
        for name, value in batch.items():
            if name.endswith("_BT"):
                filler = IGNORE if "targets" in name else 0
                value = torch.nn.functional.pad(torch.as_tensor(value), (0, n_segments * N - T), value=filler)
                value = value[:, first * N : last * N]
            own[name] = value
        return own

    def _whole(self, batch: dict[str, Any]) -> Whole:
        tokens = int(to_numpy(batch["mask_BT"]).sum())
        if "source_BS" in batch:
            read = self.model.source_tokens(batch["source_BS"].shape[1])
            tokens += int(batch["source_mask_BS"][:, :read].sum())
        targets, lm_targets = (
            int((to_numpy(batch[name]) != IGNORE).sum()) if name in batch else 0
            for name in ("targets_BT", "lm_targets_BT")
        )
        recalled = int(to_numpy(batch["recalled_BT"]).sum()) if "recalled_BT" in batch else 0
        return Whole(batch["ids_BT"].shape[0], tokens, targets, lm_targets, recalled)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        # Set here and not when the checkpoint is loaded, because creating the loader's iterator draws a random number.
        if self._random_states is not None:
            set_random_states(self._random_states, self.device)
            self._random_states = None
        self.zero_grad()

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        # Lightning's comes after training_step, which has accumulated the gradients of all parts but the last.
        pass

    def training_step(self, batch: dict[str, Any], batch_index: int) -> torch.Tensor:
        if batch.get("segment_length", self.model.segment_length) != self.model.segment_length:
            self.model.resize_segments(batch["segment_length"])
        whole: Whole = batch.get("whole") or self._whole(batch)
        n_rows = batch["ids_BT"].shape[0]
        bounds = [n_rows * part // self.accumulate for part in range(self.accumulate + 1)]
        losses, rights, calls = [], [], []
        states: list[State] = []
        for first, last in itertools.pairwise(bounds):
            part = _rows(batch, first, last)
            of_part = whole._replace(first=whole.first + first)
            before = _rows_of(self.carried, first, last) if self.carry_state else self._after_history(part, of_part)
            with self._same_segments():
                objective, loss, right, after = self._read(part, before, of_part)
            losses.append(loss)
            rights.append(right)
            calls.append((part, before, of_part))
            if after is not None:
                states.append(after)
            if last < n_rows:
                with torch.autocast(self.device.type, enabled=False):
                    objective.backward()
                # It holds casts of the weights whose graph is gone.
                torch.clear_autocast_cache()
        self.carried = _joined(states) if states else None
        loss = self.ranks.summed(losses[0] if len(losses) == 1 else torch.stack(losses).sum())
        self.tokens_seen += whole.tokens
        self._pending.append((self.global_step + 1, loss))
        if whole.recalled:
            right = self.ranks.summed(torch.stack(rights).sum())
            self._pending_recall.append((self.global_step + 1, right, whole.recalled))
        if len(self._pending) >= 10 or loss.device.type == "cpu":
            # Reading costs nothing on a CPU, and the weights are still those of a loss that is not finite.
            self.read_losses(lambda: [self._call(*call) for call in calls])
        self.log("loss", loss, prog_bar=True)
        self._advance(loss)
        return objective

    @contextlib.contextmanager
    def _same_segments(self) -> Iterator[None]:
        """Inside, a model that draws where segments end draws alike in every part of a step and on every rank."""
        if not optional(self.model, "random_segments"):
            yield
            return
        (seed,) = np.random.SeedSequence([self.seed, _SEGMENT_STREAM, self.global_step]).generate_state(1)
        # Not a generator of the model's: a checkpointed call draws again in the backward pass, from torch's.
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(int(seed))
            yield

    def _read(
        self, batch: dict[str, Any], state: State | None, whole: Whole
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, State | None]:
        """Read rows of a batch. Returns the minimized value, whose gradients DDP and FSDP average over ranks; the loss
        in nats over the targets of the whole batch, detached; how many targets of answers in an earlier segment
        are most likely; and the detached state after them, if it is carried."""
        writes = bool(optional(self.model, "memory_layers")) and self.in_last_stage
        penalised = writes and bool(self.recipe.sparse_writes)
        # Tokens that are read a second time for the carried state only are not counted.
        kept: contextlib.AbstractContextManager[Any] = (
            recorded(self.model, "keys") if penalised else contextlib.nullcontext()
        )
        with kept as keys:
            out = self._call(batch, state, whole)
        loss = objective = self._loss(out.hidden_BTD, batch["targets_BT"], whole.targets)
        if "lm_targets_BT" in batch:
            second = self._loss(out.hidden_BTD, batch["lm_targets_BT"], whole.lm_targets)
            objective = objective + batch["lm_weight"] * second
        if penalised:
            # The penalty is a mean over the tokens of these rows.
            part = int(to_numpy(batch["mask_BT"]).sum()) / whole.tokens
            objective = objective + self._penalty_weight * part * penalty(self.model, keys, batch["mask_BT"])
        objective = objective + out.aux_loss * (batch["ids_BT"].shape[0] / whole.rows)
        after = None
        if self.carry_state:
            after = self._sequence_parallel[0].state_after(out.state) if self._sequence_parallel else detach(out.state)
        return objective * self.ranks.size, loss.detach(), self._n_recalled(out.hidden_BTD, batch), after

    @property
    def _penalty_weight(self) -> float | torch.Tensor:
        """Weight of the penalty on writes in this step. It follows the loss of the step before, which all ranks and all
        parts of a step know."""
        weight, scale = self.recipe.sparse_writes or 0.0, self.recipe.sparse_loss_scale
        if scale is None or not (self._pending or self.loss_curve):
            return weight
        # One number whether the loss was read or not, because that depends on when a checkpoint was written. It is not
        # read here: a GPU would have to finish the step before.
        exact = state_dtype(next(self.model.parameters()).dtype)
        loss = self._pending[-1][1] if self._pending else torch.tensor(self.loss_curve[-1][1], dtype=exact)
        return weight * (to_device(loss, self.device).double() / scale).clamp(max=1.0)

    def _after_history(self, batch: dict[str, Any], whole: Whole | None = None) -> State | None:
        """The initial state of rows of a batch: with a history in it, some rows start after that."""
        weighted = optional(self.model, "memory_is_a_sum") and optional(self.model, "takes_write_weights")
        if "history_PT" not in batch or not self.in_last_stage or not weighted:
            return None
        if self.histories is None or self.global_step % long_history.REFRESH_STEPS == 0:
            self.histories = long_history.read_histories(self.model, batch["history_PT"])
        whole = whole or self._whole(batch)
        rng = np.random.default_rng([self.seed, _HISTORY_STREAM, self.global_step])
        started = long_history.sample_initial_states(
            self.model.init_state(whole.rows, self.device), self.histories, rng
        )
        return _rows_of(started, whole.first, whole.first + batch["ids_BT"].shape[0])

    def _call(self, batch: dict[str, Any], state: State | None, whole: Whole | None = None) -> ModelOutput:
        ids_BT = batch["ids_BT"]
        whole = whole or self._whole(batch)
        if "source_BS" in batch:
            return self.model(ids_BT, **{key: batch[key] for key in SOURCE if key in batch})
        mask_BT = None if to_numpy(batch["mask_BT"]).all() else batch["mask_BT"]
        reset_BT = batch["reset_BT"] if to_numpy(batch["reset_BT"]).any() else None
        if self._sequence_parallel:
            return self._sequence_parallel[0](ids_BT, state, reset_BT)
        N = self.model.segment_length
        segments = -(-ids_BT.shape[1] // N)
        group = self.recipe.checkpoint_segments
        model = self.model if group is None or group >= segments else grouped(self.model, group * N)
        # Other models have memories that are not sums and cannot be scaled.
        extended = self.recipe.length_extension is not None and optional(self.model, "memory_is_a_sum")
        if extended and self.in_last_stage and segments >= length_extension.MIN_SEGMENTS:
            assert self.recipe.length_extension is not None
            rng = np.random.default_rng([self.seed, _EXTENSION_STREAM, self.global_step])
            if rng.random() < self.recipe.length_extension_share:
                boundary, factor_B = length_extension.draw(rng, whole.rows, segments, self.recipe.length_extension)
                factor_B = factor_B[whole.first : whole.first + ids_BT.shape[0]]
                call = (model, ids_BT, state, mask_BT, reset_BT, boundary * N, factor_B)
                if self.carry_state or not optional(self.model, "takes_write_weights"):
                    return length_extension.extended_in_two_calls(*call, carry=self.carry_state)
                return length_extension.extended_call(*call)
        if not self.in_last_stage and "segment_length" not in batch:
            # The stream stays the same; a stage is easier because gradients cross fewer segments.
            model = cut(model, (self.recipe.curriculum or [])[self.stage][1])
        return model(ids_BT, state, mask_BT=mask_BT, reset_BT=reset_BT)

    def _loss(self, hidden_BTD: torch.Tensor, targets_BT: torch.Tensor, n_targets: int | None = None) -> torch.Tensor:
        """Sum of the losses in nats over the targets, divided by n_targets; None: their number."""
        place_P = np.flatnonzero(to_numpy(targets_BT) != IGNORE)
        if 2 * len(place_P) < targets_BT.numel():
            # Only the logits at targets, not those of the whole sequence.
            hidden_BTD = hidden_BTD.flatten(0, 1).index_select(0, to_device(place_P, hidden_BTD.device))[None]
            targets_BT = targets_BT.flatten()[torch.from_numpy(place_P)][None]
        total, count = summed_cross_entropy(hidden_BTD, self.model.output_weight, targets_BT, self.recipe.loss_chunk)
        return total / max(count if n_targets is None else n_targets, 1)

    def _n_recalled(self, hidden_BTD: torch.Tensor, batch: dict[str, Any]) -> torch.Tensor:
        """How many of the batch's recalled_BT are most likely, an int64 on the device."""
        place_P = np.flatnonzero(to_numpy(batch["recalled_BT"])) if "recalled_BT" in batch else np.zeros(0, np.int64)
        if not len(place_P):
            return torch.zeros((), dtype=torch.int64, device=hidden_BTD.device)
        hidden_PD = hidden_BTD.flatten(0, 1).index_select(0, to_device(place_P, hidden_BTD.device))
        target_P = batch["targets_BT"].flatten()[torch.from_numpy(place_P)]
        return count_most_likely(hidden_PD, self.model.output_weight, target_P)

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
        """Move pending losses to `loss_curve` as [step, nats per token], and pending numbers of right targets to
        `recall_curve`; in groups, to synchronize a GPU rarely.

        again: repeats the last forward pass. Raises DivergedError for a loss that is not finite, with the step and the
        first value that is not finite.
        """
        for step, loss in self._pending:
            value = float(loss)
            if not math.isfinite(value):
                where = first_not_finite(self.model, again)
                raise DivergedError(f"loss is {value} at step {step}" + (f" ({where})" if where else ""), step)
            # Nine digits identify a float32 exactly.
            self.loss_curve.append([step, float(f"{value:.9g}")])
        self.recall_curve += [[step, int(right), targets] for step, right, targets in self._pending_recall]
        self._pending.clear()
        self._pending_recall.clear()

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ShardedModel) and not self.sharded:
            # The parameters are replaced: this comes before the optimizer.
            unit = self._sequence_parallel[0] if self._sequence_parallel else self.model
            mesh = self.trainer.strategy.device_mesh["data_parallel"]
            shard(unit, mesh, optional(self.model, "called_layers"), optional(self.model, "hides_states"))
            self.sharded = True

    def on_after_backward(self) -> None:
        if self.sharded and optional(self.model, "hides_states"):
            # The optimizer changes shards; what is gathered would be the weights before its step.
            release(optional(self.model, "called_layers"))

    def configure_optimizers(self) -> Any:
        optimizer = build_optimizer(self.model, self.optimizer_config, self.products)
        # LambdaLR counts steps from 0, the recipe from 1.
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: self.recipe.rate_factor(done + 1))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.read_losses()
        if where := first_not_finite(self.model, lambda: None):
            raise DivergedError(f"after step {self.global_step} {where}", self.global_step)
        checkpoint["infini"] = {
            # The states of all ranks' rows, so that any number of ranks can resume.
            "carried": self.ranks.gathered(stored_leaves(self.carried)),
            "histories": stored_leaves(self.histories),
            "loss_curve": self.loss_curve,
            "recall_curve": self.recall_curve,
            "tokens_seen": self.tokens_seen,
            "stage": self.stage,
            "stage_loss": self.stage_loss,
            "stage_steps": self.stage_steps,
            "seconds": self.seconds,
            "random_states": random_states(self.device),
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        kept = checkpoint["infini"]
        # Checkpoints of before 2026-11-30 have no such curve.
        self.loss_curve, self.recall_curve = kept["loss_curve"], kept.get("recall_curve", [])
        self.tokens_seen = kept["tokens_seen"]
        self.stage, self.stage_loss, self.stage_steps = kept["stage"], kept["stage_loss"], kept["stage_steps"]
        self._seconds_before, self._random_states = kept["seconds"], kept["random_states"]
        self.carried, self.histories = (self._filled(kept[name]) for name in ("carried", "histories"))
        if self.carried is not None:
            self.carried = _rows_of(self.carried, *self.ranks.bounds(self.carried.clock.slot_B.shape[0]))

    def _filled(self, stored: dict[str, torch.Tensor]) -> State | None:
        """The state of stored_leaves."""
        if not stored:
            return None
        found = iter(stored.values())
        fresh = self.model.init_state(next(iter(stored.values())).shape[0], self.device)
        return map_state(lambda leaf: next(found).to(leaf.device, leaf.dtype), fresh)


def _rows(batch: dict[str, Any], first: int, last: int) -> dict[str, Any]:
    """These rows of a batch: of the tensors whose name says that they have rows."""
    if (first, last) == (0, batch["ids_BT"].shape[0]):
        return batch
    return {name: value[first:last] if "_B" in name else value for name, value in batch.items()}


def _rows_of(state: State | None, first: int, last: int) -> State | None:
    if state is None or (first, last) == (0, state.clock.slot_B.shape[0]):
        return state
    return select_rows(state, torch.arange(first, last))


def _joined(states: list[State]) -> State:
    """The state of all rows of the parts of a batch."""
    return states[0] if len(states) == 1 else map_state(join_rows, *states)


def first_not_finite(model: torch.nn.Module, call: Callable[[], Any]) -> str | None:
    """A description of the first value that is not finite: a weight, else a module's output during `call`; None when
    there is none. The innermost of nested modules is named. A value that is computed between submodules, such as the
    memory, is reported as input of the next submodule."""
    for name, weight in model.named_parameters():
        if not bool(torch.isfinite(weight).all()):
            return f"the weights {name} are not finite"
    found: list[str] = []

    def watch(name: str) -> Callable[..., None]:
        def hook(module: torch.nn.Module, inputs: Any, output: Any) -> None:
            if found or _finite(output):
                return
            outer = name.rpartition(".")[0]
            found.append(name if _finite(inputs) or not outer else f"{outer}, before its {name.rpartition('.')[2]}")

        return hook

    handles = [module.register_forward_hook(watch(name)) for name, module in model.named_modules() if name]
    try:
        with torch.no_grad():
            call()
    finally:
        for handle in handles:
            handle.remove()
    return f"first non-finite output: {found[0]}" if found else None


def _finite(value: Any) -> bool:
    return all(bool(torch.isfinite(leaf).all()) for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))
