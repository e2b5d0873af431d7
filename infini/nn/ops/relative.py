"""Attention with relative positions. Keys may begin before the queries' segment.

Letters: B rows, S segments, X segments of all rows, Q query tokens per segment, L key tokens (L >= Q; the queries are
the last Q of them), H query heads, G key-value heads, K d_key, V d_value. The distance of a key from a query is the
number of tokens from the key to the query, 0 to L - 1.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from infini.nn.host import to_device
from infini.nn.ops.dtypes import no_second_derivative, without_autocast

T5_BUCKETS = 32
T5_LONGEST = 128
"""Distances from this one on share the last bucket."""
MAX_QUERIES = 2048
"""Queries of a window whose biases exist at the same time."""
MIN_BIASED_SCORES = 1 << 15
"""Number of scores below which `_Biased` costs more than it saves, and below which plain operations are faster without
gradients: a single segment of sixteen tokens."""


def sinusoids(length: int, d_model: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """R of Dai et al. 2019, [length, d_model]: sines, then cosines, of distances length - 1, ..., 0."""
    # The length is rounded up, so that decoding does not make a new table for every token.
    # torch.compile traces through a cache, with a warning.
    table = _sinusoid_table if torch.compiler.is_compiling() else _kept_table
    return table(1 << (length - 1).bit_length(), d_model, device, dtype)[-length:]


def _sinusoid_table(length: int, d_model: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    with torch.inference_mode(False), torch.no_grad():
        frequency = 10000.0 ** (-torch.arange(0, d_model, 2, dtype=torch.float64) / d_model)
        angle = torch.outer(torch.arange(length - 1, -1, -1, dtype=torch.float64), frequency)
        return to_device(torch.cat([angle.sin(), angle.cos()], 1)[:, :d_model].to(dtype), device)


_kept_table = lru_cache(maxsize=16)(_sinusoid_table)


def relative_shift(x: Tensor) -> Tensor:
    """Scores by distance [..., Q, L] (distances L - 1, ..., 0) -> scores by key [..., Q, L].

    Entry (i, j) of the result is the score of key j for query i, which is at the position of key L - Q + i. Entries of
    keys after the query are meaningless (Dai et al. 2019, appendix B).
    """
    *lead, Q, L = x.shape
    padded = F.pad(x, (1, 0)).reshape(*lead, L + 1, Q)
    return padded[..., 1:, :].reshape(*lead, Q, L)


def t5_bucket(distance: Tensor, buckets: int = T5_BUCKETS, longest: int = T5_LONGEST) -> Tensor:
    """The bucket of a distance >= 0: one distance each for half of the buckets, then logarithmic ones (Raffel et al.
    2020)."""
    exact = buckets // 2
    far = distance.clamp(min=1).double() / exact
    wide = exact + (far.log() / math.log(longest / exact) * (buckets - exact)).long()
    return torch.where(distance < exact, distance, wide.clamp(max=buckets - 1))


def t5_bias(bias: Tensor, distance: Tensor) -> Tensor:
    """The bias that each head adds to the scores, [H, Q, L], for distances [Q, L]. Keys after the query count as
    distance 0.

    bias: one number for each bucket and head, [T5_BUCKETS x H].
    """
    return bias.view(T5_BUCKETS, -1)[t5_bucket(distance.clamp(min=0))].permute(2, 0, 1)


def distances(n_queries: int, n_keys: int, device: torch.device) -> Tensor:
    """The distance of each key from each query [Q, L], negative for keys after the query."""
    query = torch.arange(n_keys - n_queries, n_keys, device=device)
    return query[:, None] - torch.arange(n_keys, device=device)


def _attended(q: Tensor, k: Tensor, bias: Tensor, scale: float) -> Tensor:
    """softmax(q k scale + bias) in the bias's dtype."""
    return ((q.to(bias.dtype) * scale) @ k.to(bias.dtype).transpose(-1, -2)).add_(bias).softmax(-1)


class _Biased(torch.autograd.Function):
    """Softmax attention of (q k scale + bias) of queries [X, H, Q, K] to keys and values [X, H, L, ...].

    bias: [X or 1, H, Q, L] in float32 (float64 in float64), minus infinity at masked keys; every query has an unmasked
    key. Scores, softmax and the gradient of the bias have this dtype, products with values and other gradients the
    operands' dtype. On a CPU no fused kernel has a gradient for the bias; the plain operations that torch uses instead
    convert every score several times and take twice as long (results/LOG.md 122).
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> Tensor:
        p = _attended(q, k, bias, scale).to(v.dtype)
        a = p @ v
        ctx.save_for_backward(q, k, v, p, a)
        ctx.scale, ctx.bias = scale, (bias.shape[0], bias.dtype)
        return a

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        no_second_derivative("attention with a position bias")
        q, k, v, p, a = ctx.saved_tensors
        rows, exact = ctx.bias
        # The gradient of the softmax subtracts the weighted mean, which the output and its gradient give.
        mean = (grad * a).sum(-1, keepdim=True)
        g_scores = (grad @ v.transpose(-1, -2)).sub_(mean).mul_(p)
        g_bias = None
        if ctx.needs_input_grad[3]:
            g_bias = g_scores.to(exact) if rows > 1 else g_scores.sum(0, keepdim=True, dtype=exact)
        g_q, g_k = (g_scores @ k).mul_(ctx.scale), (g_scores.transpose(-1, -2) @ q).mul_(ctx.scale)
        return g_q, g_k, p.transpose(-1, -2) @ grad, g_bias, None


def masked_attention(q_XQHK: Tensor, k_XLGK: Tensor, v_XLGV: Tensor, bias_XHQL: Tensor, scale: float) -> Tensor:
    """Softmax attention of (q k scale + bias) -> [X, Q, H, V].

    bias: [X or 1, H, Q, L], minus infinity at masked keys; every query has an unmasked key.
    """
    H, G = q_XQHK.shape[2], k_XLGK.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q_XQHK, k_XLGK, v_XLGV))
    wants_gradient = torch.is_grad_enabled() and bias_XHQL.requires_grad
    few = q.shape[0] * H * q.shape[2] * k.shape[2] < MIN_BIASED_SCORES
    # No fused kernel takes values of another size than keys: torch then runs many small operations.
    plain = few and not torch.is_grad_enabled() and q.shape[3] != v.shape[3]
    if q.device.type == "cpu" and (plain or (wants_gradient and not few)):
        if H != G:
            k, v = (x.repeat_interleave(H // G, 1) for x in (k, v))
        bias = bias_XHQL.to(torch.promote_types(q.dtype, torch.float32))
        with torch.autocast("cpu", enabled=False):
            a = _attended(q, k, bias, scale).to(v.dtype) @ v if plain else _Biased.apply(q, k, v, bias, scale)
    else:
        # A GPU's kernels need a mask of the queries' dtype. Elsewhere biases are not rounded, because the error would
        # be the same for every token.
        mask = bias_XHQL.to(q.dtype if q.device.type == "cuda" else torch.promote_types(q.dtype, torch.float32))
        with without_autocast(q):
            a = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=H != G)
    return a.transpose(1, 2)


def biased_attention(
    q_BSQHK: Tensor, k_BSLGK: Tensor, v_BSLGV: Tensor, bias_BSHQL: Tensor, seen_BSL: Tensor | None, scale: float
) -> Tensor:
    """Causal softmax attention of (q k scale + bias) -> [B, S, Q, H, V].

    bias: broadcastable to [B, S, H, Q, L]. seen_BSL: keys that a segment may read, its own included; None: all.
    """
    B, S, Q, H, _ = q_BSQHK.shape
    L = k_BSLGK.shape[2]
    allowed = (distances(Q, L, q_BSQHK.device) >= 0)[None, None]
    if seen_BSL is not None:
        allowed = allowed & seen_BSL.flatten(0, 1)[:, None, None]
    bias = bias_BSHQL.expand(B if seen_BSL is not None else bias_BSHQL.shape[0], -1, -1, -1, -1)
    bias = bias.expand(-1, S if bias.shape[0] > 1 or seen_BSL is not None else bias.shape[1], -1, -1, -1).flatten(0, 1)
    q, k, v = (x.flatten(0, 1) for x in (q_BSQHK, k_BSLGK, v_BSLGV))
    return masked_attention(q, k, v, bias.masked_fill(~allowed, -math.inf), scale).unflatten(0, (B, S))


def t5_attention(q_BSQHK: Tensor, k_BSLGK: Tensor, v_BSLGV: Tensor, bias: Tensor, scale: float) -> Tensor:
    """biased_attention with T5's biases (see t5_bias).

    There is one bias per pair of tokens and head: eight billion in a window of 32,768. Windows longer than MAX_QUERIES
    are therefore read in parts, and the backward pass computes the biases of a part again.
    """
    Q, L = q_BSQHK.shape[2], k_BSLGK.shape[2]

    def part(begin: int, stop: int) -> Tensor:
        seen = L - Q + stop
        added = t5_bias(bias, distances(stop - begin, seen, q_BSQHK.device))[None, None]
        return biased_attention(
            q_BSQHK[:, :, begin:stop], k_BSLGK[:, :, :seen], v_BSLGV[:, :, :seen], added, None, scale
        )

    if Q <= MAX_QUERIES:
        return part(0, Q)
    bounds = [(begin, min(begin + MAX_QUERIES, Q)) for begin in range(0, Q, MAX_QUERIES)]
    return torch.cat([checkpoint(part, *bound, use_reentrant=False) for bound in bounds], 2)
