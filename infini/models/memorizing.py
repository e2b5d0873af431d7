"""Memorizing Transformers (Wu et al. 2022): one layer attends to the nearest of many past keys.

Every layer is a Transformer-XL layer with T5's position biases, queries and keys of length 1, and a learned scale per
head. One layer also keeps the keys and values of past tokens, per head and without gradient, first in, first out. Each
query attends to the `neighbours` keys with the highest scores, and a learned gate per head mixes the result with the
layer's own attention. The memory is read before the segment is added to it. It is empty at the start of a document;
while it is empty, the gate is bypassed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infini.models import register
from infini.models.transformer_xl import XLAttention
from infini.nn.attention import AttentionLeaves, Window, at_least_one
from infini.nn.decoder import Decoder, DecoderConfig, attention_sizes
from infini.nn.grid import Grid, Piece, keep
from infini.nn.host import take, to_device, to_numpy
from infini.nn.ops.dtypes import for_products, state_dtype
from infini.nn.ops.nearest import Search, nearest
from infini.nn.protocols import Dimensions
from infini.nn.state import state_class


@state_class
class LargeMemory(NamedTuple):
    """The previous segment, and keys [B, M, G, K] and values [B, M, G, V] of the last M tokens, the newest last."""

    cache: Window
    entries: Window


class NormalisedAttention(XLAttention):
    """XLAttention with scores scale_h (q k + bias), where q and k have length 1 (Wu et al.; Henry et al. 2020)."""

    def __init__(self, *sizes: Any, **options: Any) -> None:
        super().__init__(*sizes, positions="t5", **options)
        self.head_scale = nn.Parameter(torch.ones(self.n_heads))
        self.scale = 1.0

    def project_keys_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        k, v = super().project_keys_values(x)
        return F.normalize(k.to(state_dtype(k.dtype)), dim=-1).to(k.dtype), v

    def queries(self, x_BSQD: Tensor, n_keys: int) -> tuple[Tensor, Tensor]:
        q, bias = super().queries(x_BSQD, n_keys)
        # Only the product is rounded to the queries' dtype: rounding a scale would err equally for every token.
        unit = F.normalize(q.to(state_dtype(q.dtype)), dim=-1)
        return (unit * self.head_scale[:, None]).to(q.dtype), bias * self.head_scale[:, None, None]


class MemorizingAttention(NormalisedAttention):
    """The layer with a memory of M = memory_segments N tokens. neighbours: keys that a query attends to.

    beta: [H]; sigmoid(beta) is the weight of the memory, initially 0.5.
    """

    def __init__(
        self, *sizes: Any, memory_segments: int, neighbours: int = 32, search: Search = "exact", **options: Any
    ) -> None:
        super().__init__(*sizes, **options)
        at_least_one(memory_segments=memory_segments, neighbours=neighbours)
        if search not in get_args(Search):
            raise ValueError(f"search={search!r}: must be one of {', '.join(get_args(Search))}")
        self.memory_segments, self.neighbours, self.search = memory_segments, neighbours, search
        self.look_back = max(1, memory_segments)
        self.beta = nn.Parameter(torch.zeros(self.n_heads, dtype=torch.float32))

    def memory_floats(self) -> int:
        """d_key + d_value per key-value head and token, for M + N tokens: the memory and the previous segment."""
        each = (self.d_key + self.d_value) * self.n_kv_heads
        return each * self.segment_length * (self.memory_segments + 1)

    def init_leaves(self, batch_size: int, device: torch.device) -> Any:
        window, cache = super().init_leaves(batch_size, device)
        entries = Window(*(x.repeat(1, self.memory_segments, 1, 1) for x in cache))
        return AttentionLeaves(window, LargeMemory(cache, entries))

    def attend(self, x_BTD: Tensor, leaves: Any, grid: Grid) -> tuple[Tensor, Any]:
        x_BTD = for_products(x_BTD)
        new = self.project_keys_values(x_BTD)
        line, kept = self._line(new, leaves, grid)
        first = 0

        def mix(a_BSQHV: Tensor, q_BSQHK: Tensor, piece: Piece) -> Tensor:
            nonlocal first
            found, any_BS = self._read_memory(q_BSQHK, line, first, piece)
            first += piece.n_segments * piece.commits
            g = torch.sigmoid(self.beta)[:, None]
            mixed = (g * found + (1 - g) * a_BSQHV).to(a_BSQHV.dtype)
            return torch.where(any_BS[:, :, None, None, None], mixed, a_BSQHV)

        y, after = self.attend_and_mix(x_BTD, new, AttentionLeaves(leaves.window, leaves.memory.cache), grid, mix)
        return y, AttentionLeaves(after.window, LargeMemory(after.memory, kept))

    def prefill(self, x_BTD: Tensor, leaves: Any, grid: Grid) -> Any:
        new = self.project_keys_values(for_products(x_BTD))
        after = self._leaves_after(AttentionLeaves(leaves.window, leaves.memory.cache), new, grid)
        return AttentionLeaves(after.window, LargeMemory(after.memory, self._line(new, leaves, grid)[1]))

    @torch.no_grad()
    def _line(self, new: tuple[Tensor, Tensor], leaves: AttentionLeaves, grid: Grid) -> tuple[Window, Window]:
        """Keys and values of the memory and of all segments that the call completes, and the memory after the call.

        new: keys and values of the call's tokens.
        """
        N, M = self.segment_length, self.memory_segments * self.segment_length
        complete = sum(piece.n_segments for piece in grid.pieces if piece.commits) * N
        place, done_B = np.arange(M), grid.window_B // N * N
        filled = place >= M - np.minimum(to_numpy(grid.clock.position_B) // N * N, M)[:, None]
        lines, kept = [], []
        for old, window, own in zip(leaves.memory.entries, leaves.window, new, strict=True):
            tokens = torch.cat([window[:, : grid.offset], own.to(window.dtype)], 1)[:, :complete]
            line = torch.cat([old, tokens], 1)
            lines.append(line)
            kept.append(keep(take(line, done_B[:, None] + place), filled))
        return Window(*lines), Window(*kept)

    def _read_memory(self, q: Tensor, line: Window, first: int, piece: Piece) -> tuple[Tensor, Tensor]:
        """Attention of q [B, S, Q, H, K] to the nearest entries [B, S, Q, H, V], and which segments have entries [B,
        S].

        first: segments that the call completes before the piece.
        """
        N, M = self.segment_length, self.memory_segments * self.segment_length
        B, S, Q, H, _ = q.shape
        high_S = M + (first + np.arange(S)) * N
        low_BS = high_S - np.minimum(piece.index_BS * N, M)
        seen = torch.from_numpy(low_BS), torch.from_numpy(high_S)
        index = nearest(q.detach(), line.k_BNGK, *seen, self.neighbours, self.search)
        k, v = (self._entries(x, index, q.dtype) for x in line)
        scores = torch.einsum("bsqhk,bsqhrk->bsqhr", q, k).masked_fill(index < 0, -math.inf)
        any_BS = to_device((piece.index_BS > 0) & (high_S > low_BS), q.device)
        # Without entries all scores are -inf; their result is not used.
        scores = scores.where(any_BS[:, :, None, None, None], torch.zeros_like(scores))
        return torch.einsum("bsqhr,bsqhrv->bsqhv", scores.softmax(-1), v), any_BS

    def _entries(self, x_BLGX: Tensor, index_BSQHR: Tensor, dtype: torch.dtype) -> Tensor:
        """Keys or values of the line at these indices [B, S, Q, H, R, X]; for index -1, those of entry 0."""
        B, L, G, _ = x_BLGX.shape
        H, device = index_BSQHR.shape[3], index_BSQHR.device
        row = torch.arange(B, device=device).view(-1, 1, 1, 1, 1)
        group = (torch.arange(H, device=device) // (H // G)).view(1, 1, 1, -1, 1)
        place = (row * L + index_BSQHR.clamp(min=0)) * G + group
        # Usually the result is much larger than the memory; only for single tokens it is smaller.
        few = place.numel() < B * L * G
        table = x_BLGX if few else x_BLGX.to(dtype)
        found = table.flatten(0, 2).index_select(0, place.flatten()).unflatten(0, place.shape)
        return found.to(dtype) if few else found


@dataclass
class MemorizingConfig(DecoderConfig):
    """Options of memorizing. memory_layer: relative height of the layer with the memory, 0 to 1 (0.75: the 9th of 12).
    The memory has memory_multiple * memory_segments segments."""

    memory_layer: float = 0.75
    memory_segments: int = 16
    memory_multiple: int = 2
    neighbours: int = 32
    search: Literal["exact", "approximate"] = "exact"


@register("memorizing", MemorizingConfig)
def build(config: MemorizingConfig, dims: Dimensions, vocab_size: int) -> Decoder:
    """A decoder with one MemorizingAttention layer; the others are NormalisedAttention."""
    if not 0 <= config.memory_layer <= 1:
        raise ValueError(f"memory_layer={config.memory_layer}: must be from 0 to 1")
    chosen = max(1, math.ceil(config.memory_layer * dims.n_layers)) - 1

    sizes = attention_sizes(dims)

    def attention(layer: int) -> NormalisedAttention:
        if layer != chosen:
            return NormalisedAttention(**sizes)
        segments = config.memory_segments * config.memory_multiple
        return MemorizingAttention(
            **sizes, memory_segments=segments, neighbours=config.neighbours, search=config.search
        )

    return Decoder(dims, vocab_size, attention, activation=config.activation, tie_embeddings=config.tie_embeddings)
