"""How long a context may grow until what a head looks for is drowned: the half-dilution length.

A memory's read divides by sigma(q) z with z the sum of sigma(k) over all tokens written (Eq. 3), so what is looked for
has a share of it, and every other token has one too. The half-dilution length of a head is the number of ordinary
tokens that together weigh as much as what is looked for: beyond it, most of what is read is something else.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from infini.decoder import Decoder
from infini.ops.memory import sigma


@torch.no_grad()
def half_dilution(
    model: Decoder, ids_BT: torch.Tensor, needle_BT: torch.Tensor, filler_BT: torch.Tensor, query_BT: torch.Tensor
) -> list[list[float]]:
    """Half-dilution lengths in tokens, [layers][heads]: the median over rows and queries.

    ids_BT: whole prompts, read in one call. needle_BT, filler_BT, query_BT: which tokens are looked for, which are
    ordinary, and which ask; at least one of each a row, needle and filler in segments before the queries'. Empty for a
    model without a memory.
    """
    if not model.has_memory:
        return []
    lengths = []
    with _projections(model) as seen:
        model(ids_BT)
    for attention, (q_BTX, k_BTX) in zip(_attentions(model), seen, strict=True):
        q_BTHK = sigma(q_BTX.float()).unflatten(-1, (attention.n_heads, attention.d_key))
        k_BTGK = sigma(k_BTX.float()).unflatten(-1, (attention.n_kv_heads, attention.d_key))
        k_BTHK = k_BTGK.repeat_interleave(attention.n_heads // attention.n_kv_heads, 2)
        per_row = []
        for q, k, needle, filler, query in zip(q_BTHK, k_BTHK, needle_BT, filler_BT, query_BT, strict=True):
            looked_for = torch.einsum("qhk,hk->qh", q[query], k[needle].sum(0))
            ordinary = torch.einsum("qhk,hk->qh", q[query], k[filler].mean(0))
            per_row.append(looked_for / ordinary)
        lengths.append(torch.cat(per_row).median(0).values.tolist())
    return lengths


def _attentions(model: Decoder) -> list[Any]:
    return [block.attention for block in model.blocks]


@contextmanager
def _projections(model: Decoder) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Queries and keys of every layer as the projections give them, once the model was called."""
    seen: list[list[torch.Tensor]] = [[] for _ in model.blocks]
    hooks = []
    for kept, attention in zip(seen, _attentions(model), strict=True):
        for projection in (attention.q_proj, attention.k_proj):
            hooks.append(
                projection.register_forward_hook(lambda module, inputs, output, kept=kept: kept.append(output))
            )
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    try:
        yield pairs
    finally:
        for hook in hooks:
            hook.remove()
        pairs.extend((kept[0], kept[1]) for kept in seen if len(kept) == 2)
