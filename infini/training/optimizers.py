"""Optimizers. The gates have their own group: at the model's rate, or under decay, they do not move (so a well-known
reproduction failed), and Adafactor scales a step by the size of the parameter, which for a gate at 0 is nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from infini.schema import OptimizerConfig

GATE = "beta"


def parameter_groups(model: nn.Module, config: OptimizerConfig) -> list[dict[str, Any]]:
    """Matrices (decayed), embeddings and norms (not), gates (own rate, not decayed). No parameter is in two."""
    groups: dict[str, list[nn.Parameter]] = {"matrices": [], "others": [], "gates": []}
    for name, parameter in model.named_parameters():
        if name.split(".")[-1] == GATE:
            groups["gates"].append(parameter)
        elif parameter.dim() < 2 or "embedding" in name:
            groups["others"].append(parameter)
        else:
            groups["matrices"].append(parameter)
    decay = {"matrices": config.weight_decay}
    return [
        {
            "params": parameters,
            "name": name,
            "lr": config.gate_lr if name == "gates" else config.lr,
            "weight_decay": decay.get(name, 0.0),
        }
        for name, parameters in groups.items()
        if parameters
    ]


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW or torch's Adafactor over the groups above."""
    groups = parameter_groups(model, config)
    if config.name == "adamw":
        return torch.optim.AdamW(groups, betas=(config.betas[0], config.betas[1]), eps=1e-8)
    for group in groups:
        if group["name"] == "gates":
            # Steps of gate_lr times max(1, size of the gate), not times max(1e-3, size of the gate).
            group["eps"] = (None, 1.0)
    return torch.optim.Adafactor(groups, eps=(None, 1e-3))
