"""Optimizers. The gates have their own group: at the model's rate, or under decay, they do not move (so a well-known
reproduction failed), and Adafactor scales a step by the size of the parameter, which for a gate at 0 is nothing."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from infini.config.schema import OptimizerConfig
from infini.system.devices import has_fast_bfloat16
from infini.training.adafactor import Adafactor

GATE = "beta"
POSITION_BIAS = "bucket_bias"
BIAS_FACTOR = 10.0
"""How much faster T5's position biases learn than embeddings do with Muon and AdamW. They are added to scores and begin
at 0; at the model's rate Transformer-XL was worse than local attention after 300 steps (results/LOG.md, 105)."""


def parameter_groups(model: nn.Module, config: OptimizerConfig) -> list[dict[str, Any]]:
    """Matrices (decayed), embeddings and norms (not), T5's position biases (faster, not decayed), gates (own rate, not
    decayed). No parameter is in two."""
    groups: dict[str, list[nn.Parameter]] = {"matrices": [], "others": [], "biases": [], "gates": []}
    # Also where the library that a model is of calls them otherwise.
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for name, parameter in model.named_parameters():
        if name.split(".")[-1] == GATE:
            groups["gates"].append(parameter)
        elif name.split(".")[-1] == POSITION_BIAS:
            groups["biases"].append(parameter)
        elif parameter.dim() < 2 or "embedding" in name or id(parameter) in tables:
            groups["others"].append(parameter)
        else:
            groups["matrices"].append(parameter)
    decay = {"matrices": config.weight_decay}
    # Adafactor's steps are fractions of the parameter: see build_optimizer.
    rates = {"gates": config.gate_lr, "biases": config.lr * (1.0 if config.name == "adafactor" else BIAS_FACTOR)}
    return [
        {
            "params": parameters,
            "name": name,
            "lr": rates.get(name, config.lr),
            "weight_decay": decay.get(name, 0.0),
        }
        for name, parameters in groups.items()
        if parameters
    ]


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW, Adafactor, or Muon (matrices) beside AdamW (the rest) over the groups above."""
    groups = parameter_groups(model, config)
    if config.name == "muon":
        return MuonBesideAdamW(groups, (config.betas[0], config.betas[1]))
    if config.name == "adamw":
        return torch.optim.AdamW(groups, betas=(config.betas[0], config.betas[1]), eps=1e-8)
    for group in groups:
        if group["name"] in ("gates", "biases"):
            # Steps of the rate times max(1, size of the parameter), not times max(1e-3, size of the parameter).
            group["smallest_scale"] = 1.0
    return Adafactor(groups)


class MuonBesideAdamW(torch.optim.Optimizer):
    """torch's Muon for the group "matrices", AdamW for the others, stepped and scheduled as one.

    Muon makes all singular values of a matrix's step equal. A memory is read as a mean over a long past, large in the
    direction all books share and small in those that tell books apart; Adam's step goes by the large one.
    """

    def __init__(self, groups: list[dict[str, Any]], betas: tuple[float, float]) -> None:
        matrices = [group for group in groups if group["name"] == "matrices"]
        others = [group for group in groups if group["name"] != "matrices"]
        muon = torch.optim.Muon(matrices, momentum=0.95, adjust_lr_fn="match_rms_adamw")
        self.parts: list[torch.optim.Optimizer] = [muon, torch.optim.AdamW(others, betas=betas, eps=1e-8)]
        super().__init__([group for part in self.parts for group in part.param_groups], {})
        # The same dictionaries, so that what a schedule or a checkpoint sets here is set there.
        self._share()

    def _share(self) -> None:
        rest = list(self.param_groups)
        for part in self.parts:
            part.param_groups, rest = rest[: len(part.param_groups)], rest[len(part.param_groups) :]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One step of both."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        device = self.param_groups[0]["params"][0].device
        with contextlib.nullcontext() if has_fast_bfloat16(device) else _Float32Iterations():
            for part in self.parts:
                part.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Both states."""
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """What state_dict gave."""
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self.param_groups = [group for part in self.parts for group in part.param_groups]


class _Float32Iterations(TorchFunctionMode):
    """What torch's Muon turns into bfloat16, its Newton-Schulz iterations, is done in float32.

    A processor that does not multiply bfloat16 itself takes more than fifty times as long over a product of such
    matrices: a quarter of a training step of the passkey models (results/LOG.md, 67).
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.bfloat16:
            # A copy, as the conversion would be: the iterations begin in place.
            return args[0].to(torch.float32, copy=True)
        return func(*args, **(kwargs or {}))
