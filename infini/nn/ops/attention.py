"""Causal attention inside segments, with rotary positions counted from the segment's start.

Letters: B rows, S segments, Q query tokens a segment, N key tokens a segment (N >= Q, the queries are the last Q),
H query heads, G key-value heads, K d_key, V d_value.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from infini.nn.host import to_device
from infini.nn.ops.dtypes import no_second_derivative, without_autocast


def rotary_table(
    length: int, heads: int, d_key: int, base: float, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines of position x frequency, [length, heads x d_key], the frequencies base^(-2i / d_key).

    Pair i consists of dimensions i and i + d_key / 2, so that the sine is negative in the first half. The table is
    repeated for each head, so that products with it run over one long contiguous axis.
    """
    if d_key % 2:
        raise ValueError(f"d_key={d_key}: rotary positions need an even number")
    with torch.inference_mode(False), torch.no_grad():
        frequency = base ** (-torch.arange(0, d_key, 2, dtype=torch.float64) / d_key)
        angle = torch.outer(torch.arange(length, dtype=torch.float64), frequency)
        cos, sin = angle.cos().repeat(1, 2 * heads), torch.cat([-angle.sin(), angle.sin()], 1).repeat(1, heads)
        return to_device(cos.to(dtype), device), to_device(sin.to(dtype), device)


_kept_table = lru_cache(maxsize=64)(rotary_table)


class _Rotate(torch.autograd.Function):
    """Rotation. Its gradient is the inverse rotation, which needs only the small table."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, -sin), None, None


LARGE, ROWS = 2**22, 256
"""Numbers of a tensor that a processor rotates some rows at a time, in its cache, and how many rows."""


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    if x.numel() < LARGE or x.device.type != "cpu" or torch.compiler.is_compiling():
        return _rotate_rows(x, cos, sin)
    out = x.new_empty(x.shape)
    for segment, to in zip(x.flatten(0, -4), out.flatten(0, -4), strict=True):
        for part in zip(segment.split(ROWS), to.split(ROWS), cos.split(ROWS), sin.split(ROWS), strict=True):
            part[1].copy_(_rotate_rows(part[0], *part[2:]))
    return out


def _rotate_rows(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    swapped = x.roll(x.shape[-1] // 2, -1).flatten(-2)
    return (x.flatten(-2) * cos).addcmul_(swapped, sin).view(x.shape)


def rotate(x: Tensor, first_position: int, base: float) -> Tensor:
    """Rotary embedding of x [..., n, heads, d_key] at positions first_position, first_position + 1, ..."""
    n, heads, d_key = x.shape[-3:]
    stop = first_position + n
    # The length is rounded up, so that decoding does not make a new table for every token.
    # torch.compile traces through a cache, with a warning.
    table = rotary_table if torch.compiler.is_compiling() else _kept_table
    cos, sin = table(1 << (stop - 1).bit_length(), heads, d_key, base, x.device, x.dtype)
    return _Rotate.apply(x, cos[first_position:stop], sin[first_position:stop])


# Asked here, because torch.compile cannot trace the question. A decorator of torch.compiler for this would import the
# compiler, which takes a second.
HAS_AMX: bool = torch.cpu._is_amx_tile_supported()
"""Whether this processor multiplies matrices of bfloat16 in tiles."""
SHORT_SEGMENT = 64
"""Tokens of a segment up to which plain products are as fast as a fused kernel on a CPU."""
SLOW_DTYPE = torch.bfloat16
"""The dtype in which the fused kernel's backward pass is slow on a CPU."""
MIN_SHORT_ATTENTION = 32
"""Tokens of a segment from which `_ShortAttention` is faster."""


class _ShortAttention(torch.autograd.Function):
    """Causal attention of whole short segments on a CPU: queries and keys [X, N, K], values [X, N, V].

    Scores and softmax are in float32 (float64 in float64), products with values and gradients in the operands' dtype,
    as in the fused kernels of GPUs. It takes two thirds of the time of the fused kernel in float32 (LOG.md 101).
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        exact = torch.promote_types(q.dtype, torch.float32)
        future = torch.full((q.shape[1], k.shape[1]), -torch.inf, dtype=exact, device=q.device).triu(1)
        p = torch.baddbmm(future, q.to(exact), k.to(exact).transpose(1, 2), alpha=scale).softmax(-1).to(v.dtype)
        a = p @ v
        ctx.save_for_backward(q, k, v, p, a)
        ctx.scale = scale
        return a

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        no_second_derivative("attention over short segments")
        q, k, v, p, a = ctx.saved_tensors
        # The gradient of the softmax subtracts the weighted mean, which the output and its gradient give.
        mean = (grad * a).sum(-1, keepdim=True)
        g_scores = (grad @ v.transpose(1, 2)).sub_(mean).mul_(p)
        g_q, g_k = (g_scores @ k).mul_(ctx.scale), (g_scores.transpose(1, 2) @ q).mul_(ctx.scale)
        return g_q, g_k, p.transpose(1, 2) @ grad, None


def local_attention(q_BSQHK: Tensor, k_BSNGK: Tensor, v_BSNGV: Tensor, *, scale: float, rope_base: float) -> Tensor:
    """A_dot of Eq. 2: causal softmax attention inside each segment -> [B, S, Q, H, V].

    The Q queries are the last Q of the segment's N tokens (Q < N when a call continues an unfinished segment).
    """
    B, S, Q, H, K = q_BSQHK.shape
    N, G = k_BSNGK.shape[2], k_BSNGK.shape[3]
    V = v_BSNGV.shape[-1]
    trained = torch.is_grad_enabled() and (q_BSQHK.requires_grad or k_BSNGK.requires_grad or v_BSNGV.requires_grad)
    # In a CPU's fused kernel the backward pass takes several times as long in bfloat16 as in float32 (results/LOG.md
    # 86). With AMX this holds up to 128 tokens, and only in training.
    short = N <= 128 and trained if HAS_AMX else N <= 256
    slow = q_BSQHK.dtype == SLOW_DTYPE and q_BSQHK.device.type == "cpu" and short
    if slow and trained and Q == N >= MIN_SHORT_ATTENTION:
        q, k, v = (
            (x if x.shape[3] == H else x.repeat_interleave(H // G, 3)).transpose(2, 3).reshape(-1, N, x.shape[-1])
            for x in (rotate(q_BSQHK, 0, rope_base), rotate(k_BSNGK, 0, rope_base), v_BSNGV)
        )
        with without_autocast(q):
            return _ShortAttention.apply(q, k, v, scale).view(B, S, H, N, V).transpose(2, 3)
    # Fused kernels need keys and values of one size. Padding with zeros changes no score; it is cut off the output.
    padded = K != V and (N > SHORT_SEGMENT or q_BSQHK.device.type != "cpu")
    dtype = torch.float32 if slow and (K == V or padded) else q_BSQHK.dtype
    q = rotate(q_BSQHK, N - Q, rope_base).to(dtype).flatten(0, 1).transpose(1, 2)
    k = rotate(k_BSNGK, 0, rope_base).to(dtype).flatten(0, 1).transpose(1, 2)
    v = v_BSNGV.to(dtype).flatten(0, 1).transpose(1, 2)
    if padded:
        q, k, v = (F.pad(x, (0, max(K, V) - x.shape[-1])) for x in (q, k, v))
    mask = None
    if 1 < Q < N:
        mask = torch.ones(Q, N, dtype=torch.bool, device=q.device).tril(N - Q)
    # Autocast would cast the operands back to bfloat16.
    with without_autocast(q):
        a = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None and Q == N and Q > 1, scale=scale, enable_gqa=H != G
        )
    return a[..., :V].transpose(1, 2).unflatten(0, (B, S)).to(q_BSQHK.dtype)
