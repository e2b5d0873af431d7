"""One LightningModule for every language model."""

from __future__ import annotations

from typing import Any

import lightning
import torch

from infini.ops.cross_entropy import summed_cross_entropy
from infini.schema import OptimizerConfig, RecipeConfig
from infini.state import State, detach, leaves, map_state
from infini.training.optimizers import build_optimizer


class LanguageModelModule(lightning.LightningModule):
    """Trains a model on batches of ids_BT, targets_BT, mask_BT, reset_BT (see tasks.stream).

    carry_state: each row's state, without its history, goes on into the row's next sequence; otherwise every sequence
    starts from an empty state. Gradients flow through all segments of a sequence.
    """

    def __init__(self, model: Any, optimizer: OptimizerConfig, recipe: RecipeConfig, carry_state: bool) -> None:
        super().__init__()
        self.model = model
        self.optimizer_config, self.recipe, self.carry_state = optimizer, recipe, carry_state
        self.carried: State | None = None
        self.loss_curve: list[list[float]] = []
        self.tokens_seen = 0
        self._pending: list[tuple[int, torch.Tensor, int]] = []

    def training_step(self, batch: dict[str, torch.Tensor], batch_index: int) -> torch.Tensor:
        padded = not bool(batch["mask_BT"].all())
        state = self.carried if self.carry_state else None
        out = self.model(
            batch["ids_BT"],
            state,
            mask_BT=batch["mask_BT"] if padded else None,
            reset_BT=batch["reset_BT"] if bool(batch["reset_BT"].any()) else None,
        )
        self.carried = detach(out.state) if self.carry_state else None
        total, count = summed_cross_entropy(
            out.hidden_BTD, self.model.output_weight, batch["targets_BT"], self.recipe.loss_chunk
        )
        loss = total / max(count, 1)
        self._pending.append((self.global_step + 1, loss.detach(), count))
        if len(self._pending) >= 10:
            self.read_losses()
        self.log("loss", loss.detach(), prog_bar=True)
        return loss + out.aux_loss

    def read_losses(self) -> None:
        """Move the last losses to `loss_curve` as [step, nats a token]; in groups, so that a GPU need not wait."""
        for step, loss, count in self._pending:
            value = float(loss)
            if value != value or value in (float("inf"), float("-inf")):
                raise FloatingPointError(f"the loss at step {step} is {value}: lower optimizer.lr")
            self.loss_curve.append([step, round(value, 5)])
            self.tokens_seen += count
        self._pending.clear()

    def configure_optimizers(self) -> Any:
        optimizer = build_optimizer(self.model, self.optimizer_config)
        # LambdaLR counts from 0, the recipe's steps from 1.
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: self.recipe.rate_factor(done + 1))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.read_losses()
        carried = {} if self.carried is None else dict(leaves(self.carried))
        rows = 0 if self.carried is None else self.carried.clock.slot_B.shape[0]
        checkpoint["infini"] = {
            "carried": carried,
            "rows": rows,
            "loss_curve": self.loss_curve,
            "tokens_seen": self.tokens_seen,
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        kept = checkpoint["infini"]
        self.loss_curve, self.tokens_seen = kept["loss_curve"], kept["tokens_seen"]
        if kept["rows"]:
            stored = iter(kept["carried"].values())
            fresh = self.model.init_state(kept["rows"], self.device)
            self.carried = map_state(lambda leaf: next(stored).to(leaf.device, leaf.dtype), fresh)
