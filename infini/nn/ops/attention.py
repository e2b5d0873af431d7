"""Causal attention inside segments, with rotary positions counted from the segment's start.

Letters: B rows, S segments, Q query tokens a segment, N key tokens a segment (N >= Q, the queries are the last Q),
H query heads, G key-value heads, K d_key, V d_value.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F


@lru_cache(maxsize=64)
def rotary_table(
    length: int, heads: int, d_key: int, base: float, device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and signed sines of position x frequency, [length, heads x d_key], the frequencies base^(-2i / d_key).

    Pair i is dimensions i and i + d_key / 2, so the sine is negative for the first half. The table is repeated for each
    head: products with it then run over one long contiguous axis.
    """
    if d_key % 2:
        raise ValueError(f"d_key={d_key}: rotary positions need an even number")
    with torch.inference_mode(False), torch.no_grad():
        frequency = base ** (-torch.arange(0, d_key, 2, dtype=torch.float64) / d_key)
        angle = torch.outer(torch.arange(length, dtype=torch.float64), frequency)
        cos, sin = angle.cos().repeat(1, 2 * heads), torch.cat([-angle.sin(), angle.sin()], 1).repeat(1, heads)
        return cos.to(device, dtype), sin.to(device, dtype)


class _Rotate(torch.autograd.Function):
    """A rotation's gradient is the rotation back, so nothing but the small table is kept for it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, -sin), None, None


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    swapped = x.roll(x.shape[-1] // 2, -1).flatten(-2)
    return (x.flatten(-2) * cos).addcmul_(swapped, sin).view(x.shape)


def rotate(x: torch.Tensor, first_position: int, base: float) -> torch.Tensor:
    """Rotary embedding of x [..., n, heads, d_key]; its tokens stand at first_position, first_position + 1, ..."""
    n, heads, d_key = x.shape[-3:]
    stop = first_position + n
    # Rounded up, so that decoding token by token reads one table and does not make a new one a token.
    cos, sin = rotary_table(1 << (stop - 1).bit_length(), heads, d_key, base, x.device, x.dtype)
    return _Rotate.apply(x, cos[first_position:stop], sin[first_position:stop])


@lru_cache(maxsize=1)
def _has_amx() -> bool:
    return torch.cpu._is_amx_tile_supported()


SHORT_SEGMENT = 64
"""Up to so many tokens the plain products are as fast as a fused kernel on a processor."""
SLOW_DTYPE = torch.bfloat16
"""In which the fused kernel's backward pass is slow on a processor."""
SHORTEST = 32
"""From so many on `_ShortAttention` is worth its calls."""


def _is_short(length: int, trained: bool) -> bool:
    """Whether bfloat16 in the fused kernel is slow on a processor: its backward pass then takes several times as long
    as float32's (results/LOG.md 86). With AMX that holds to 128 tokens, and not where nothing is trained."""
    return length <= 128 and trained if _has_amx() else length <= 256


class _ShortAttention(torch.autograd.Function):
    """Causal attention of whole short segments on a processor, keys and values [X, N, ...] to X queries [X, N, K].

    Scores and softmax are float32's (float64's in float64), their products with values and gradients of the operands'
    dtype, as in the fused kernels of GPUs; two thirds of the time that the fused kernel takes in float32 (LOG.md 101).
    """

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        exact = torch.promote_types(q.dtype, torch.float32)
        future = torch.full((q.shape[1], k.shape[1]), -torch.inf, dtype=exact, device=q.device).triu(1)
        p = torch.baddbmm(future, q.to(exact), k.to(exact).transpose(1, 2), alpha=scale).softmax(-1).to(v.dtype)
        a = p @ v
        ctx.save_for_backward(q, k, v, p, a)
        ctx.scale = scale
        return a

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, p, a = ctx.saved_tensors
        # The softmax takes from every gradient their mean, which is that of the output.
        mean = (grad * a).sum(-1, keepdim=True)
        g_scores = (grad @ v.transpose(1, 2)).sub_(mean).mul_(p)
        g_q, g_k = (g_scores @ k).mul_(ctx.scale), (g_scores.transpose(1, 2) @ q).mul_(ctx.scale)
        return g_q, g_k, p.transpose(1, 2) @ grad, None


def local_attention(
    q_BSQHK: torch.Tensor,
    k_BSNGK: torch.Tensor,
    v_BSNGV: torch.Tensor,
    *,
    scale: float,
    rope_base: float,
) -> torch.Tensor:
    """A_dot of Eq. 2: causal softmax attention inside each segment -> [B, S, Q, H, V].

    The Q queries are the last Q of the segment's N tokens (Q < N when a call continues an unfinished segment).
    """
    B, S, Q, H, K = q_BSQHK.shape
    N, G = k_BSNGK.shape[2], k_BSNGK.shape[3]
    V = v_BSNGV.shape[-1]
    trained = torch.is_grad_enabled() and (q_BSQHK.requires_grad or k_BSNGK.requires_grad or v_BSNGV.requires_grad)
    slow = q_BSQHK.dtype == SLOW_DTYPE and q_BSQHK.device.type == "cpu" and _is_short(N, trained)
    if slow and trained and Q == N >= SHORTEST:
        q, k, v = (
            (x if x.shape[3] == H else x.repeat_interleave(H // G, 3)).transpose(2, 3).reshape(-1, N, x.shape[-1])
            for x in (rotate(q_BSQHK, 0, rope_base), rotate(k_BSNGK, 0, rope_base), v_BSNGV)
        )
        with torch.autocast(q.device.type, enabled=False):
            return _ShortAttention.apply(q, k, v, scale).view(B, S, H, N, V).transpose(2, 3)
    # Fused kernels want keys as wide as values. Zeros change no score, and the values' zeros are cut off again.
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
    # Autocast would turn the chosen dtype back into bfloat16.
    with torch.autocast(q.device.type, enabled=False):
        a = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None and Q == N and Q > 1, scale=scale, enable_gqa=H != G
        )
    return a[..., :V].transpose(1, 2).unflatten(0, (B, S)).to(q_BSQHK.dtype)
