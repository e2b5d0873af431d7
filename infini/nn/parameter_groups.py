"""Parameter groups of an optimizer. The gates have one of their own.

At the model's learning rate, or under weight decay, gates do not move; a well-known reproduction failed on that. Adam
moves a beta by about 0.03 in a whole training at such a rate, and it must be able to move by 4.
"""

from __future__ import annotations

from typing import Any

from torch import nn

GATE = "beta"
POSITION_BIAS = "bucket_bias"


def parameter_groups(
    model: nn.Module, lr: float, gate_lr: float = 1e-2, weight_decay: float = 0.0, bias_factor: float = 1.0
) -> list[dict[str, Any]]:
    """Groups of the parameters that are trained, each with its name, learning rate and weight decay.

    Matrices have `lr` and `weight_decay`; embeddings and norms have `lr`; T5's position biases have `bias_factor * lr`;
    gates have `gate_lr`. Only matrices are decayed. Each parameter is in one group, and frozen ones are in none.
    """
    groups: dict[str, list[nn.Parameter]] = {"matrices": [], "others": [], "biases": [], "gates": []}
    # By type too: pretrained models give embeddings other names.
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if name.split(".")[-1] == GATE or ".infini_gate." in name:
            groups["gates"].append(parameter)
        elif name.split(".")[-1] == POSITION_BIAS:
            groups["biases"].append(parameter)
        elif parameter.dim() < 2 or "embedding" in name or id(parameter) in tables:
            groups["others"].append(parameter)
        else:
            groups["matrices"].append(parameter)
    rates = {"gates": gate_lr, "biases": lr * bias_factor}
    decay = {"matrices": weight_decay}
    return [
        {"params": found, "name": name, "lr": rates.get(name, lr), "weight_decay": decay.get(name, 0.0)}
        for name, found in groups.items()
        if found
    ]
