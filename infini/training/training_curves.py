"""Curves that loggers draw of a training beside its loss: rates, gradients, gates, speed, memory and validation.

Values are read from the device in the steps that are logged and in no other. Weights, states and random numbers stay as
they are without a logger.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback

from infini.nn.protocols import optional
from infini.system.devices import peak_memory_bytes
from infini.training.resume import random_states, set_random_states

LOW, HIGH = 0.1, 0.9
"""Gates below read the local attention almost alone, gates above the memory."""


class TrainingCurves(Callback):
    """Logs every `trainer.log_every_n_steps` steps. validate_every: steps between validations; None: no validation."""

    def __init__(self, validate_every: int | None = None) -> None:
        self.validate_every = validate_every
        self.gradient_norm: torch.Tensor | None = None
        self.tokens, self.seconds = 0, 0.0

    def on_train_start(self, trainer: lightning.Trainer, module: Any) -> None:
        self.tokens, self.seconds = module.tokens_seen, module.seconds

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        if (trainer.global_step + 1) % trainer.log_every_n_steps == 0:
            gradients = [p.grad for p in module.parameters() if p.grad is not None]
            self.gradient_norm = torch.nn.utils.get_total_norm(gradients)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        step = trainer.global_step
        if step % trainer.log_every_n_steps == 0:
            module.log_dict(self._values(trainer, module))
        # The validation at the end of a training is that of its record.
        if self.validate_every is not None and step % self.validate_every == 0 and step < trainer.max_steps:
            log_results(trainer.loggers, _validated(trainer, module), step)

    def _values(self, trainer: lightning.Trainer, module: Any) -> dict[str, float]:
        tokens, seconds = module.tokens_seen - self.tokens, module.seconds - self.seconds
        self.tokens, self.seconds = module.tokens_seen, module.seconds
        step = trainer.global_step
        values = {
            f"learning_rate/{group['name']}": group["initial_lr"] * module.recipe.rate_factor(step)
            for group in trainer.optimizers[0].param_groups
        }
        values |= {
            "tokens_per_second": tokens / max(seconds, 1e-9),
            "peak_memory_gb": peak_memory_bytes(module.device) / 1e9,
            **gate_values(optional(module.model, "gates")()),
        }
        if self.gradient_norm is not None:
            # The norm before clipping.
            values["gradient_norm"] = float(self.gradient_norm)
        return values


def gate_values(gates: Sequence[Sequence[float]] | None) -> dict[str, float]:
    """Mean of the gates of each layer, and the shares of its heads below LOW and above HIGH; empty without gates.
    gates: sigmoid(beta) of each layer and head."""
    values: dict[str, float] = {}
    for number, layer in enumerate(gates or (), 1):
        values[f"gate_mean/layer_{number}"] = sum(layer) / len(layer)
        values[f"gate_share_below_{LOW}/layer_{number}"] = sum(gate < LOW for gate in layer) / len(layer)
        values[f"gate_share_above_{HIGH}/layer_{number}"] = sum(gate > HIGH for gate in layer) / len(layer)
    return values


def log_results(loggers: Iterable[Any], results: Mapping[str, Mapping[str, Any]], step: int) -> None:
    """Log results of a record, as of the optimizer step `step`, counted from 1."""
    values = {name: float(entry["value"]) for name, entry in results.items() if entry["value"] is not None}
    for logger in loggers:
        # Lightning counts logged steps from 0.
        logger.log_metrics(values, step=step - 1)
        logger.save()


def _validated(trainer: lightning.Trainer, module: Any) -> dict[str, dict[str, Any]]:
    """The validation result of the model as it is now."""
    started, states = time.perf_counter(), random_states(module.device)
    modes = {part: part.training for part in module.modules()}
    datamodule: Any = trainer.datamodule  # type: ignore[attr-defined]
    with torch.no_grad():
        results: dict[str, dict[str, Any]] = datamodule.validate(module.model.eval(), module.device)
    for part, training in modes.items():
        part.training = training
    set_random_states(states, module.device)
    module.leave_out(time.perf_counter() - started)
    return results
