"""Records the outputs of projections during a call, for measures and penalties."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from infini.nn.protocols import optional


@contextmanager
def recorded(model: Any, name: str) -> Iterator[list[torch.Tensor]]:
    """Outputs [B, T, X] of the projection `name` ("q_proj", "k_proj" or "v_proj") of every layer in memory_layers, from
    the bottom.

    The list is filled at the end of the `with` block; several calls inside it are joined along T. Only calls with the
    same gradient mode as the block are recorded: others read tokens a second time.
    """
    layers = optional(model, "memory_layers")
    with_gradients = torch.is_grad_enabled()
    parts: list[list[torch.Tensor]] = [[] for _ in layers]

    def keep(kept: list[torch.Tensor], output: torch.Tensor) -> None:
        if torch.is_grad_enabled() == with_gradients:
            # Some layers project by segment, [B, S, Q, X].
            kept.append(output.flatten(1, -2))

    hooks = [
        getattr(layer, name).register_forward_hook(lambda module, inputs, output, kept=kept: keep(kept, output))
        for kept, layer in zip(parts, layers, strict=True)
    ]
    outputs: list[torch.Tensor] = []
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()
    outputs.extend(torch.cat(kept, 1) if len(kept) > 1 else kept[0] for kept in parts)
