"""The half-dilution length: how long a context may grow before filler outweighs what a head looks for.

A memory's read divides by sigma(q) z with z the sum of sigma(k) over all tokens written (Eq. 3), so what is looked for
has a share of it, and every other token has one too. The half-dilution length of a head is the number of ordinary
tokens that together weigh as much as what is looked for: beyond it, most of what is read is something else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from infini.nn.ops.memory import sigma
from infini.nn.protocols import optional, recorded

TOKENS_PER_CALL = 8192
"""Maximum tokens whose queries and keys are held at once, but at least one row."""


@torch.no_grad()
def half_dilution(
    model: Any,
    ids_BT: torch.Tensor,
    needle_BT: torch.Tensor,
    filler_BT: torch.Tensor,
    query_BT: torch.Tensor,
    advance: Callable[[float], None] = lambda rows: None,
) -> list[list[float]]:
    """Half-dilution lengths in tokens, [layers][heads], of the layers with a compressive memory: the median over rows
    and queries.

    ids_BT: whole prompts, a row in one call. needle_BT, filler_BT, query_BT: which tokens are looked for, which are
    ordinary, and which ask; at least one of each a row, needle and filler in segments before the queries'. Empty for a
    model that has no such layer. advance is called with the number of rows that were just read.
    """
    layers = optional(model, "memory_layers")
    if not layers:
        return []
    ratios: list[list[torch.Tensor]] = [[] for _ in layers]
    for rows in torch.arange(len(ids_BT)).split(max(1, TOKENS_PER_CALL // ids_BT.shape[1])):
        with recorded(model, "queries") as queries, recorded(model, "keys") as keys:
            model(ids_BT[rows])
        for attention, found, q_BTX, k_BTX in zip(layers, ratios, queries, keys, strict=True):
            q_BTHK = sigma(q_BTX.float()).unflatten(-1, (attention.n_heads, attention.d_key))
            k_BTGK = k_BTX.float().unflatten(-1, (attention.n_kv_heads, attention.d_key))
            weight_BTG = attention.write_weights(k_BTGK)
            k_BTGK = sigma(k_BTGK) if weight_BTG is None else sigma(k_BTGK) * weight_BTG[..., None]
            k_BTHK = k_BTGK.repeat_interleave(attention.n_heads // attention.n_kv_heads, 2)
            masks = (mask_BT[rows] for mask_BT in (needle_BT, filler_BT, query_BT))
            for q, k, needle, filler, query in zip(q_BTHK, k_BTHK, *masks, strict=True):
                looked_for = torch.einsum("qhk,hk->qh", q[query], k[needle].sum(0))
                ordinary = torch.einsum("qhk,hk->qh", q[query], k[filler].mean(0))
                found.append(looked_for / ordinary)
        advance(len(rows))
    return [torch.cat(found).median(0).values.tolist() for found in ratios]
