"""Sparse writes, an addition to the paper's training: what tokens write to memory is made small unless it is needed.

A memory's read divides by a sum over all that was written (Eq. 3), so at length L what is looked for shares it with L
other tokens. A loss on short inputs stops asking for less of them once its answers are right. Here every token pays for
the logarithm of what it writes: a token that no answer needs goes on being pushed down at the same rate however little
it writes, and one that is needed is held by the loss. Inputs, model and what it computes stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from infini.nn.ops.memory import sigma
from infini.nn.protocols import optional

FLOOR = math.exp(-18.0)
"""What writes less than this pays no less: even ten million such tokens weigh less than one that counts."""


def penalty(model: Any, keys: Sequence[torch.Tensor], mask_BT: torch.Tensor) -> torch.Tensor:
    """Mean over tokens and heads of log(mean of sigma(k) over d_key), in nats; a head counts as its gate opens.

    keys: outputs [B, T, G K] of the key projections of model.memory_layers (infini.nn.projections). mask_BT: false is
    padding, at the end of a row. A gate has no gradient as a weight: closing it would be the cheapest way to pay less.
    """
    total = weight = torch.zeros((), device=mask_BT.device)
    for attention, k_BTX in zip(optional(model, "memory_layers"), keys, strict=True):
        k_BTGK = k_BTX.to(torch.promote_types(k_BTX.dtype, torch.float32)).unflatten(-1, (attention.n_kv_heads, -1))
        written_BTG = sigma(k_BTGK).mean(-1).clamp(min=FLOOR).log()
        # A key-value head is read by all the query heads that share it.
        gate_G = torch.sigmoid(attention.beta.detach()).unflatten(0, (attention.n_kv_heads, -1)).sum(-1)
        total = total + (written_BTG[mask_BT].mean(0) * gate_G).sum()
        weight = weight + gate_G.sum()
    return total / weight
