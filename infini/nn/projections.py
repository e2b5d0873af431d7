"""Records the queries or keys of a model's memories during a call, for measures and penalties."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, Protocol

import torch

from infini.nn.protocols import optional

Projection = Literal["queries", "keys"]
Keep = Callable[[torch.Tensor], None]


class MemoryLayer(Protocol):
    """What a layer in memory_layers has: H = n_heads query heads, G = n_kv_heads key-value heads, each of H / G query
    heads, with keys of d_key entries, and gates beta [H] (Eq. 6)."""

    n_heads: int
    n_kv_heads: int
    d_key: int

    @property
    def beta(self) -> torch.Tensor: ...

    def write_weights(self, k_BTGK: torch.Tensor) -> torch.Tensor | None:
        """The factors [B, T, G] on what tokens with these keys add to the memory; None: 1 (the paper)."""
        ...

    def watch(self, projection: Projection, keep: Keep) -> Callable[[], None]:
        """Pass the queries [B, T, H K] or keys [B, T, G K] of every call to `keep`, before positions and before sigma,
        as the memory reads with them and is written with them. The result ends that."""
        ...


@contextmanager
def recorded(model: Any, projection: Projection) -> Iterator[list[torch.Tensor]]:
    """What every layer in model.memory_layers passes to MemoryLayer.watch [B, T, X], from the bottom.

    The list is filled at the end of the `with` block; several calls inside it are joined along T. Only calls with the
    same gradient mode as the block are recorded: others read tokens a second time.
    """
    layers = optional(model, "memory_layers")
    with_gradients = torch.is_grad_enabled()
    parts: list[list[torch.Tensor]] = [[] for _ in layers]

    def keep(kept: list[torch.Tensor], output: torch.Tensor) -> None:
        if torch.is_grad_enabled() == with_gradients:
            kept.append(output)

    ends = [
        layer.watch(projection, lambda output, kept=kept: keep(kept, output))
        for kept, layer in zip(parts, layers, strict=True)
    ]
    outputs: list[torch.Tensor] = []
    try:
        yield outputs
    finally:
        for end in ends:
            end()
    if not all(parts):
        raise RuntimeError(f"no {projection} were recorded: the model was not called with gradients {with_gradients}")
    outputs.extend(torch.cat(kept, 1) if len(kept) > 1 else kept[0] for kept in parts)
