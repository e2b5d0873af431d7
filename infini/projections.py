"""What the projections of a model's layers give in a call, recorded for measures and penalties."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from infini.decoder import Decoder


@contextmanager
def recorded(model: Decoder, name: str) -> Iterator[list[torch.Tensor]]:
    """Outputs [B, T, X] of every layer's projection `name` ("q_proj", "k_proj", "v_proj"), layer by layer.

    Filled when the block is left; several calls inside it are joined along T.
    """
    parts: list[list[torch.Tensor]] = [[] for _ in model.blocks]
    hooks = [
        getattr(block.attention, name).register_forward_hook(
            lambda module, inputs, output, kept=kept: kept.append(output)
        )
        for kept, block in zip(parts, model.blocks, strict=True)
    ]
    outputs: list[torch.Tensor] = []
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()
    outputs.extend(torch.cat(kept, 1) if len(kept) > 1 else kept[0] for kept in parts)
