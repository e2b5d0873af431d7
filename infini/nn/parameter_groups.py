"""Parameter groups of an optimizer. The gates have one of their own.

At the model's learning rate, or under weight decay, gates do not move; a well-known reproduction failed on that. Adam
moves a beta by about 0.03 in a whole training at such a rate, and it must be able to move by 4.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from infini.errors import InputError

GATES = ("beta", "input_weight", "input_bias")
POSITION_BIAS = "bucket_bias"
GATE_LR = 1e-2
"""Default learning rate of the gates."""


def parameter_groups(
    model: nn.Module, lr: float, gate_lr: float | None = None, weight_decay: float = 0.0, bias_factor: float = 1.0
) -> list[dict[str, Any]]:
    """Groups of the parameters that are trained, each with its name, learning rate and weight decay.

    Matrices have `lr` and `weight_decay`; embeddings and norms have `lr`; T5's position biases have `bias_factor * lr`;
    gates have `gate_lr`, None: GATE_LR. Only matrices are decayed. Each parameter is in one group, and frozen ones are
    in none. Raises InputError for a `gate_lr` of gates that are all frozen.
    """
    groups: dict[str, list[nn.Parameter]] = {"matrices": [], "others": [], "biases": [], "gates": []}
    # Embeddings are also found by type, because pretrained models give them other names, and so is their head.
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for module in model.modules():
        find = getattr(module, "get_output_embeddings", None)
        head = find() if callable(find) else None
        tables |= {id(head.weight)} if isinstance(head, nn.Linear) else set()
    has_gates = False
    for name, parameter in model.named_parameters():
        is_gate = name.split(".")[-1] in GATES or ".infini_gate." in name
        has_gates = has_gates or is_gate
        if not parameter.requires_grad:
            continue
        if is_gate:
            groups["gates"].append(parameter)
        elif name.split(".")[-1] == POSITION_BIAS:
            groups["biases"].append(parameter)
        elif parameter.dim() < 2 or "embedding" in name or id(parameter) in tables:
            groups["others"].append(parameter)
        else:
            groups["matrices"].append(parameter)
    if gate_lr and has_gates and not groups["gates"]:
        raise InputError(
            f"gate_lr={gate_lr}: all gates of the model are frozen; with peft pass "
            "LoraConfig(modules_to_save=GATE_MODULES), else set requires_grad of every beta, or leave gate_lr out"
        )
    rates = {"gates": GATE_LR if gate_lr is None else gate_lr, "biases": lr * bias_factor}
    decay = {"matrices": weight_decay}
    return [
        {"params": found, "name": name, "lr": rates.get(name, lr), "weight_decay": decay.get(name, 0.0)}
        for name, found in groups.items()
        if found
    ]
