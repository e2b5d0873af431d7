"""Infini-attention with Transformer-XL's cache (not in the paper): measures what a compressive memory adds to a cache.

Each layer attends to its segment and to the previous one, like Transformer-XL with T5's position biases. The
compressive memory of all earlier segments (Eq. 3 to 5) and the gate (Eq. 6) are those of Infini-attention; the memory
contains the cached segment too. Gradients flow through the memory, not through the cache. Both are in the state's
`memory`, so that the knock-outs `reset` and `foreign` remove both.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from infini.models import register
from infini.models.infini import MemoryConfig
from infini.models.transformer_xl import XLAttention
from infini.nn.attention import AttentionLeaves, InfiniAttention, Window
from infini.nn.decoder import Decoder
from infini.nn.grid import Grid, Piece
from infini.nn.ops.dtypes import for_products
from infini.nn.ops.memory import Memory
from infini.nn.protocols import Dimensions
from infini.nn.state import state_class


@state_class
class CachedMemory(NamedTuple):
    """The previous segment, and the compressive memory of all earlier segments."""

    cache: Window
    compressive: Memory


class InfiniXLAttention(XLAttention, InfiniAttention):
    """XLAttention with T5's biases, and a gate that mixes its output with reads of a compressive memory.

    It has the arguments of InfiniAttention except `positions` and `rope_base`.
    """

    # The cache is not a sum.
    memory_is_a_sum = False
    look_back = None
    gradient_horizon = None

    def __init__(self, *sizes: Any, **options: Any) -> None:
        super().__init__(*sizes, positions="t5", **options)

    def memory_floats(self) -> int:
        """d_key (d_value + 1) of the memory and (d_key + d_value) N of the cache, for each key-value head."""
        return XLAttention.memory_floats(self) + InfiniAttention.memory_floats(self)

    def init_leaves(self, batch_size: int, device: torch.device) -> Any:
        window, cache = XLAttention.init_leaves(self, batch_size, device)
        compressive = InfiniAttention.init_leaves(self, batch_size, device).memory
        return AttentionLeaves(window, CachedMemory(cache, compressive))

    def attend(self, x_BTD: Tensor, leaves: Any, grid: Grid) -> tuple[Tensor, Any]:
        x_BTD = for_products(x_BTD)
        new = self.project_keys_values(x_BTD)
        mem: Any = leaves.memory.compressive

        def mix(a_BSQHV: Tensor, q_BSQHK: Tensor, piece: Piece) -> Tensor:
            nonlocal mem
            k, v = (piece.segments(w, n) for w, n in zip(leaves.window, new, strict=True))
            a_BSQHV, mem = self.mix_memory(a_BSQHV, q_BSQHK, k, v, mem, piece)
            return a_BSQHV

        y, after = self.attend_and_mix(x_BTD, new, AttentionLeaves(leaves.window, leaves.memory.cache), grid, mix)
        return y, AttentionLeaves(after.window, CachedMemory(after.memory, mem))

    def prefill(self, x_BTD: Tensor, leaves: Any, grid: Grid) -> Any:
        new = self.project_keys_values(for_products(x_BTD))
        mem: Any = leaves.memory.compressive
        for piece in grid.pieces:
            k, v = (piece.segments(w, n) for w, n in zip(leaves.window, new, strict=True))
            _, mem = self.write_memory(k, v, mem, piece)
        after = self._leaves_after(AttentionLeaves(leaves.window, leaves.memory.cache), new, grid)
        return AttentionLeaves(after.window, CachedMemory(after.memory, mem))


@register("infini_xl", MemoryConfig)
def build(config: MemoryConfig, dims: Dimensions, vocab_size: int) -> Decoder:
    """A decoder with InfiniXLAttention in every layer."""
    return config.decoder(dims, vocab_size, InfiniXLAttention)
