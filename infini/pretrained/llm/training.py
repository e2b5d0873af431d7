"""What training an injected model needs beside transformers' own: gates in groups of their own."""

from __future__ import annotations

from typing import Any

from torch import nn

GATE_MODULES = ["infini_gate"]
"""What peft trains whole: LoraConfig(..., modules_to_save=GATE_MODULES); add the norms' names to train them, too."""


def parameter_groups(
    model: nn.Module, lr: float, gate_lr: float = 1e-2, weight_decay: float = 0.0
) -> list[dict[str, Any]]:
    """Groups for an optimizer: matrices (decayed), embeddings and norms (not), gates (rate of their own, no decay).

    At the model's rate Adam moves a beta by about 0.03 in a whole training, and it must be able to move by 4. For
    transformers' Trainer: `optimizers=(torch.optim.AdamW(parameter_groups(model, lr=3e-4)), None)`. Frozen parameters
    are in no group.
    """
    from infini.config.schema import OptimizerConfig
    from infini.training.optimizers import parameter_groups as house_groups

    betas = [0.9, 0.999]
    config = OptimizerConfig("adamw", lr, betas, weight_decay, gate_lr, None)
    groups = house_groups(model, config)
    for group in groups:
        group["params"] = [parameter for parameter in group["params"] if parameter.requires_grad]
    return [group for group in groups if group["params"]]
