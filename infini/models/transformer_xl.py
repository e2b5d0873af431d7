"""Transformer-XL (Dai et al. 2019): each layer also attends to the previous segment, without gradient.

positions="dai2019" is the paper's own: sinusoids of the distance with their own key projection, and two learned biases
u and v. The cache holds the layer's (normalised) inputs, so that its keys and values follow the weights. positions="t5"
is the variant of Memorizing Transformers, which the baseline of the Infini-attention paper follows: T5's learned biases
by bucket of the distance. The cache holds keys and values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from infini.models import register
from infini.nn.attention import AttentionLeaves, LocalAttention
from infini.nn.decoder import Decoder, DecoderConfig
from infini.nn.grid import Grid, Piece
from infini.nn.ops.dtypes import for_products, state_dtype
from infini.nn.ops.relative import biased_attention, distances, relative_shift, sinusoids, t5_bias
from infini.nn.protocols import Dimensions
from infini.nn.state import state_class


@state_class
class Hidden(NamedTuple):
    """A segment's layer inputs [B, N, D]."""

    x_BND: Tensor


Mix = Callable[[Tensor, Tensor, Piece], Tensor]


class XLAttention(LocalAttention):
    """Causal attention over a segment and the one before it; see the module's docstring for `positions`."""

    inner_resets = False
    look_back: int | None = 1
    cached_segments = 1

    def __init__(self, *sizes: Any, positions: Literal["dai2019", "t5"] = "dai2019", **options: Any) -> None:
        super().__init__(*sizes, positions="t5" if positions == "t5" else "rotary", **options)
        self.positions = positions
        if positions == "dai2019":
            self.r_proj = nn.Linear(self.d_model, self.n_heads * self.d_key, bias=False)
            self.u = nn.Parameter(torch.zeros(self.n_heads * self.d_key))
            self.v = nn.Parameter(torch.zeros(self.n_heads * self.d_key))

    def memory_floats(self) -> int:
        """d_model N (layer inputs), or (d_key + d_value) N for each key-value head, as the paper counts."""
        each = self.d_model if self.positions == "dai2019" else (self.d_key + self.d_value) * self.n_kv_heads
        return each * self.segment_length

    def init_leaves(self, batch_size: int, device: torch.device) -> Any:
        if self.positions == "t5":
            window, cache = (super(XLAttention, self).init_leaves(batch_size, device).window for _ in range(2))
            return AttentionLeaves(window, cache)
        shape = (batch_size, self.segment_length, self.d_model)
        dtype = state_dtype(self.q_proj.weight.dtype)
        return AttentionLeaves(*(Hidden(torch.zeros(shape, dtype=dtype, device=device)) for _ in range(2)))

    def attend(self, x_BTD: Tensor, leaves: Any, grid: Grid) -> tuple[Tensor, Any]:
        x_BTD = for_products(x_BTD)
        return self.attend_and_mix(x_BTD, self._kept(x_BTD), leaves, grid, lambda a, q, piece: a)

    def attend_and_mix(
        self, x_BTD: Tensor, new: tuple[Tensor, ...], leaves: AttentionLeaves, grid: Grid, mix: Mix
    ) -> tuple[Tensor, AttentionLeaves]:
        """attend(), with each piece's attention [B, S, Q, H, V] replaced by mix(attention, queries [B, S, Q, H, K],
        piece).

        new: _kept(x_BTD).
        """
        outputs = []
        before = leaves.memory
        for piece in grid.pieces:
            x_BSQD = x_BTD[:, piece.start : piece.stop].unflatten(1, (piece.n_segments, -1))
            own = tuple(piece.segments(w, n) for w, n in zip(leaves.window, new, strict=True))
            # The previous segment of each segment: the cache, then the call's own segments.
            firsts = [b[:, None].to(o.dtype) for b, o in zip(before, own, strict=True)]
            if piece.n_segments > 1:
                firsts = [torch.cat([b, o[:, :-1]], 1) for b, o in zip(firsts, own, strict=True)]
            both = tuple(torch.cat([past.detach(), o], 2) for past, o in zip(firsts, own, strict=True))
            a, q = self.read(x_BSQD, both, self._seen(piece, both[0].shape[2]))
            outputs.append(mix(a, q, piece).flatten(-2).flatten(1, 2))
            if piece.commits:
                before = type(before)(*(o[:, -1] for o in own))
        return self.o_proj(torch.cat(outputs, 1)), self._leaves_after(leaves, new, grid)

    def prefill(self, x_BTD: Tensor, leaves: Any, grid: Grid) -> Any:
        return self._leaves_after(leaves, self._kept(for_products(x_BTD)), grid)

    def _kept(self, x_BTD: Tensor) -> tuple[Tensor, ...]:
        """The tensors of each token that the state keeps."""
        return (x_BTD,) if self.positions == "dai2019" else self.project_keys_values(x_BTD)

    @staticmethod
    def _leaves_after(leaves: AttentionLeaves, new: tuple[Tensor, ...], grid: Grid) -> AttentionLeaves:
        kind = type(leaves.window)
        triples = list(zip(leaves.memory, leaves.window, new, strict=True))
        window = kind(*(grid.new_window(w, n) for _, w, n in triples))
        return AttentionLeaves(window, kind(*(grid.last_segment(c, w, n).detach() for c, w, n in triples)))

    def _seen(self, piece: Piece, n_keys: int) -> Tensor | None:
        """Keys that each segment may read [B, S, L]; None: all. A document's first segment has no previous one."""
        if piece.first_BS is None:
            return None
        seen = torch.ones(*piece.first_BS.shape, n_keys, dtype=torch.bool, device=piece.first_BS.device)
        seen[:, :, : self.segment_length] = ~piece.first_BS[..., None]
        return seen

    def read(self, x_BSQD: Tensor, both: tuple[Tensor, ...], seen_BSL: Tensor | None) -> tuple[Tensor, Tensor]:
        """Attention [B, S, Q, H, V] of each segment's new tokens over the L tokens up to them, and the queries
        [B, S, Q, H, K].

        both: the kept tensors of these L tokens. seen_BSL: which of them a segment may read; None: all.
        """
        # dai2019: the cached inputs have no gradient; the weights that project them have one.
        k, v = self.project_keys_values(both[0]) if self.positions == "dai2019" else both
        q, bias = self.queries(x_BSQD, k.shape[2])
        return biased_attention(q, k.to(q.dtype), v.to(q.dtype), bias, seen_BSL, self.scale), q

    def queries(self, x_BSQD: Tensor, n_keys: int) -> tuple[Tensor, Tensor]:
        """Queries [B, S, Q, H, K], and the biases [B, S, H, Q, L] of the distances, broadcastable in B and S."""
        heads = (self.n_heads, self.d_key)
        q = self.project_queries(x_BSQD)
        if self.positions == "dai2019":
            r = self.r_proj(sinusoids(n_keys, self.d_model, q.device, q.dtype)).unflatten(-1, heads)
            with_u, with_v = ((q + bias.view(heads)).to(q.dtype) for bias in (self.u, self.v))
            by_distance = torch.einsum("bsqhk,lhk->bshql", with_v, r)
            return with_u, relative_shift(by_distance) * self.scale
        return q, t5_bias(self.bucket_bias, distances(q.shape[2], n_keys, q.device))[None, None]


@dataclass
class TransformerXLConfig(DecoderConfig):
    """Options of transformer_xl. See the module's docstring."""

    positions: Literal["dai2019", "t5"] = "t5"
    attention_scale: Literal["d_key", "d_model"] = "d_key"


@register("transformer_xl", TransformerXLConfig)
def build(config: TransformerXLConfig, dims: Dimensions, vocab_size: int) -> Decoder:
    """A decoder with XLAttention in every layer."""
    return config.decoder(dims, vocab_size, XLAttention)
