"""Sparse writes, an addition to the paper's training: a penalty makes the memory writes of irrelevant tokens small.

A memory read divides by a sum over all writes (Eq. 3), so at length L the relevant tokens compete with L others. A loss
on short inputs no longer reduces the writes of those once its answers are right. The penalty is the logarithm of each
token's write: it pushes a token that no answer needs down at the same rate however little it writes, while the loss
holds a token that is needed. Inputs, model and outputs are unchanged.

Once every answer is right the loss hardly holds the needed tokens either, and a penalty of constant weight pushes them
down, too, to just above the rest. So its weight falls with the loss (recipe.sparse_loss_scale): neither outweighs the
other. See results/LOG.md, 182 to 187, which also has what was tried instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from infini.nn.host import to_device, to_numpy
from infini.nn.ops.memory import sigma
from infini.nn.protocols import optional

MIN_WRITE = math.exp(-18.0)
"""Lower bound of writes in the penalty, at which it no longer pushes. Ten million tokens that write this much weigh as
much as a sixth of one token that writes 1."""


def penalty(model: Any, keys: Sequence[torch.Tensor], mask_BT: torch.Tensor) -> torch.Tensor:
    """Mean over tokens and heads of the logarithm of a token's write, in nats; heads are weighted by their gates.

    A write is the mean of sigma(k) over d_key, times the token's write weight if the memory has such weights.

    keys: what model.memory_layers were written with [B, T, G K] (infini.nn.protocols.recorded). mask_BT: False is
    padding; best on the host, because it is read. Gates are detached here: closing them would be the easiest way to
    reduce the penalty.
    """
    device = keys[0].device
    total = weight = torch.zeros((), device=device)
    written = to_numpy(mask_BT)
    if written.shape != keys[0].shape[:2]:
        raise ValueError(f"mask of {list(written.shape)} tokens, keys of {list(keys[0].shape[:2])}")
    place_P = to_device(np.flatnonzero(written), device)
    for attention, k_BTX in zip(optional(model, "memory_layers"), keys, strict=True):
        k_BTGK = k_BTX.to(torch.promote_types(k_BTX.dtype, torch.float32)).unflatten(-1, (attention.n_kv_heads, -1))
        written_BTG = sigma(k_BTGK).mean(-1)
        weight_BTG = attention.write_weights(k_BTGK)
        written_BTG = (written_BTG if weight_BTG is None else weight_BTG * written_BTG).clamp(min=MIN_WRITE).log()
        # A key-value head is read by all query heads that share it.
        beta = attention.beta.detach()
        # Outside its call a layer has its shard alone (parallel=fsdp2).
        beta = beta.full_tensor() if isinstance(beta, DTensor) else beta
        gate_G = torch.sigmoid(beta).unflatten(0, (attention.n_kv_heads, -1)).sum(-1)
        total = total + (written_BTG.flatten(0, 1).index_select(0, place_P).mean(0) * gate_G).sum()
        weight = weight + gate_G.sum()
    return total / weight
