"""Layers of decoders that are recurrent over segments (infini/nn/recurrent.py): attention over [prefix; tokens; write
tokens] of one segment.

Letters: B rows, L vectors of a segment, P prefix vectors, Q queries, N tokens of a segment, H query heads, G key-value
heads, K d_key, V d_value, D d_model.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from infini.nn.attention import LocalAttention, Window
from infini.nn.ops.attention import rotate
from infini.nn.ops.dtypes import for_products
from infini.nn.ops.relative import masked_attention, t5_bias


class SegmentShape(NamedTuple):
    """What all layers share for a segment: the number of prefix vectors, the index of the first write token, the
    attention mask (None: causal), and the index from which the last layer's outputs are wanted."""

    n_prefix: int
    write_from: int
    mask: torch.Tensor | None
    wanted_from: int


class PrefixAttention(LocalAttention):
    """Causal attention over [prefix; tokens; write tokens] of a segment; positions count from the prefix."""

    inner_resets = False
    plain_projections = True

    def projections(self) -> torch.Tensor:
        """The projection matrices of queries, keys and values, joined: for many short segments one product is faster
        than three small ones."""
        return torch.cat([self.q_proj.weight, self.k_proj.weight, self.v_proj.weight])

    def attend_segment(
        self,
        x_BLD: torch.Tensor,
        projections: torch.Tensor | None,
        old: Window | None,
        shape: SegmentShape,
        bias_HQL: torch.Tensor | None,
    ) -> tuple[torch.Tensor, Window]:
        """The concatenated outputs of the heads, before o_proj, and keys and values of the new tokens.

        x_BLD: the prefix, the new tokens, the write tokens. projections: the joined matrices; None: the layer's own.
        old: keys and values of the segment's earlier tokens, if any. bias_HQL: T5's biases, minus infinity where
        masked; None: rotary positions.
        """
        H, G, P = self.n_heads, self.n_kv_heads, shape.n_prefix
        offset = 0 if old is None else old.k_BNGK.shape[1]
        x_BLD = for_products(x_BLD)
        if projections is None:
            qkv = torch.cat([self.q_proj(x_BLD), self.k_proj(x_BLD), self.v_proj(x_BLD)], -1)
        else:
            qkv = F.linear(x_BLD, projections)
        qk, v = qkv.split([(H + G) * self.d_key, G * self.d_value], -1)
        qk, v = qk.unflatten(-1, (H + G, self.d_key)), v.unflatten(-1, (G, self.d_value))
        new = Window(qk[:, P : shape.write_from, H:], v[:, P : shape.write_from])
        # Positions of tokens follow the prefix; those of write tokens follow the segment's last token.
        if bias_HQL is None and offset:
            turned = rotate(qk[:, :P], 0, self.rope_base), rotate(qk[:, P:], P + offset, self.rope_base)
            qk = torch.cat(turned, 1)
        elif bias_HQL is None:
            qk = rotate(qk, 0, self.rope_base)
        (q, k), mask = qk.split([H, G], 2), shape.mask
        if old is not None:
            before = old.k_BNGK.to(v.dtype)
            before = rotate(before, P, self.rope_base) if bias_HQL is None else before
            k = torch.cat([k[:, :P], before, k[:, P:]], 1)
            v = torch.cat([v[:, :P], old.v_BNGV.to(v.dtype), v[:, P:]], 1)
        if bias_HQL is not None:
            bias_XHQL = bias_HQL[None] if mask is None else bias_HQL.masked_fill(~mask, -math.inf)
            return masked_attention(q, k, v, bias_XHQL, self.scale).flatten(-2), new
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        a = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=H != G
        )
        return a.transpose(1, 2).flatten(-2), new

    def bias(self, distance_QL: torch.Tensor, mask_QL: torch.Tensor) -> torch.Tensor | None:
        """T5's biases [H, Q, L], minus infinity where masked; None for rotary positions."""
        if self.positions != "t5":
            return None
        return t5_bias(self.bucket_bias, distance_QL).masked_fill(~mask_QL, -math.inf)


def read_layers(
    blocks: list[Any],
    norm: nn.Module,
    x_BLD: torch.Tensor,
    projections: list[torch.Tensor | None],
    old: list[Window] | None,
    biases: list[torch.Tensor | None],
    shape: SegmentShape,
) -> tuple[torch.Tensor, list[Window]]:
    """The normalised outputs of the last layer from shape.wanted_from on, and keys and values of the new tokens by
    layer. See PrefixAttention.attend_segment."""
    new: list[Window] = []
    windows = [None] * len(blocks) if old is None else old
    for block, projection, window, bias in zip(blocks, projections, windows, biases, strict=True):
        h_BLD = block.attention_norm(x_BLD)
        a, made = block.attention.attend_segment(h_BLD, projection, window, shape, bias)
        if block is blocks[-1]:
            x_BLD, a = x_BLD[:, shape.wanted_from :], a[:, shape.wanted_from :]
        x_BLD = x_BLD + block.attention.o_proj(a)
        x_BLD = x_BLD + block.feed_forward(block.feed_forward_norm(x_BLD))
        new.append(made)
    return norm(x_BLD), new
