"""The oracle: Infini-attention as the paper writes it, one row, one head, one segment at a time.

It is slow and follows the order of the equations. Tests compare every fast path with it in float64: outputs, gradients
and final state. Query head h reads the memory of key-value head h // (H / G). It checks no inputs: torch raises an
error for shapes that do not fit.

Letters: B rows, T tokens of a document, N tokens of a segment, H query heads, G key-value heads, K d_key, V d_value.
All tensors of a call have one dtype and one device; so have the results. Equations: arXiv 2404.07143, numbered as in
docs/explanation/paper.md.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def sigma(x: Tensor) -> Tensor:
    """The paper's activation ELU + 1, elementwise; any shape."""
    return torch.where(x > 0, x + 1, torch.exp(torch.clamp(x, max=0)))


def rotary(x_NK: Tensor, first_position: int, base: float) -> Tensor:
    """Rotary position embedding [N, K] of one head's queries or keys, K even, by complex numbers.

    Pair i is dimensions i and i + K / 2. It is rotated by the angle position x base^(-2i / K), in radians.
    first_position: that of the first of the N tokens.
    """
    n, width = x_NK.shape
    half = width // 2
    frequency = torch.tensor([base ** (-2 * i / width) for i in range(half)], dtype=x_NK.dtype, device=x_NK.device)
    position = torch.arange(first_position, first_position + n, dtype=x_NK.dtype, device=x_NK.device)
    angle = torch.outer(position, frequency)
    turned = torch.complex(x_NK[:, :half], x_NK[:, half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([turned.real, turned.imag], 1)


def dot_product_attention(
    q_NK: Tensor, k_NK: Tensor, v_NV: Tensor, scale: float, base: float, bias_N: Tensor | None = None
) -> Tensor:
    """A_dot [N, V] of one head in one segment: Eq. 2 with the causal mask.

    Positions count from the segment's start. scale: factor on the scores, 1 / sqrt(K) in Infini-attention. base: of
    the rotary wavelengths. bias_N: added to the scores in place of rotary positions; entry d belongs to the distance
    of d tokens.
    """
    n = q_NK.shape[0]
    if bias_N is None:
        score = rotary(q_NK, 0, base) @ rotary(k_NK, 0, base).T * scale
    else:
        score = q_NK @ k_NK.T * scale
        place = torch.arange(n, device=q_NK.device)
        score = score + bias_N[(place[:, None] - place).clamp(min=0)]
    future = torch.ones(n, n, dtype=torch.bool, device=q_NK.device).triu(1)
    return torch.softmax(score.masked_fill(future, -math.inf), dim=-1) @ v_NV


def retrieve(x_NK: Tensor, m_KV: Tensor, z_K: Tensor) -> Tensor:
    """A_mem [N, V] of one head: Eq. 3, sigma(X) M / (sigma(X) z).

    x_NK: queries, or for Eq. 5 keys, without positions. m_KV, z_K: memory and normaliser. With an empty memory (z = 0)
    it is NaN; callers do not read one.
    """
    s = sigma(x_NK)
    return (s @ m_KV) / (s @ z_K)[:, None]


def update_linear(m_KV: Tensor, z_K: Tensor, k_NK: Tensor, v_NV: Tensor, weight_N: Tensor) -> tuple[Tensor, Tensor]:
    """M [K, V] and z [K] after a segment of N tokens: Eq. 4 (Linear).

    m_KV, z_K: before the segment. k_NK: keys without positions. weight_N: factor on what each token adds, 1 in the
    paper.
    """
    s = sigma(k_NK) * weight_N[:, None]
    return m_KV + s.T @ v_NV, z_K + s.sum(0)


def update_delta(
    m_KV: Tensor, z_K: Tensor, k_NK: Tensor, v_NV: Tensor, weight_N: Tensor, empty: bool
) -> tuple[Tensor, Tensor]:
    """M [K, V] and z [K] after a segment of N tokens: Eq. 5 (Linear + Delta).

    empty: whether nothing was written before; then nothing is subtracted. The other arguments are those of
    update_linear.
    """
    known = torch.zeros_like(v_NV) if empty else retrieve(k_NK, m_KV, z_K)
    s = sigma(k_NK) * weight_N[:, None]
    return m_KV + s.T @ (v_NV - known), z_K + s.sum(0)


def input_gate(k_NK: Tensor, weight_K: Tensor, bias: Tensor) -> Tensor:
    """sigmoid(a . k / |k| + b) of each token [N], whose logit is at least -20 (not in the paper).

    k_NK: keys of one key-value head without positions. A key of zeros has no direction: its logit is b. weight_K: a.
    bias: b, a scalar tensor.
    """
    logits = [torch.dot(weight_K, k / k.square().sum().sqrt()) + bias if bool(k.any()) else bias for k in k_NK]
    return torch.stack([1 / (1 + torch.exp(-x if x > -20 else k_NK.new_tensor(20.0))) for x in logits])


def infini_attention(
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    v_BTGV: Tensor,
    beta_H: Tensor,
    *,
    segment_length: int,
    update_rule: str,
    first_segment: str = "local",
    scale: float | None = None,
    rope_base: float = 10000.0,
    bias_HN: Tensor | None = None,
    write_weight_BT: Tensor | None = None,
    reset_BT: Tensor | None = None,
    decay_G: Tensor | None = None,
    input_weight_GK: Tensor | None = None,
    input_bias_G: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """A [B, T, H, V] (Eq. 6) of whole documents, and M [B, G, K, V], z [B, G, K] after the last complete segment.

    The memory is empty at first.

    Args:
        q_BTHK, k_BTGK, v_BTGV: queries, keys and values of whole documents, without positions.
        beta_H: the gates; sigmoid(beta) is the weight of the memory.
        segment_length: tokens N in a segment.
        update_rule: "linear" (Eq. 4) or "delta" (Eq. 5).
        first_segment: output while the memory is empty. "local": A_dot. "zero": (1 - sigmoid(beta)) A_dot.
        scale: factor on the scores of Eq. 2. Default: 1 / sqrt(K).
        rope_base: base of the rotary wavelengths.
        bias_HN: bias of each head and distance, added to the scores in place of rotary positions.
        write_weight_BT: factor on what each token adds to the memory. Default: 1.
        reset_BT: bool; the memory is emptied before a token where it is true. Only at segment starts.
        decay_G: share of M and z of each key-value head that remains after a segment, 0 to 1 (not in the paper).
            Default: all of it.
        input_weight_GK, input_bias_G: of the input gate (not in the paper), which multiplies the write weights.
            Default: none.
    """
    B, T, H, K = q_BTHK.shape
    G, V = k_BTGK.shape[2], v_BTGV.shape[3]
    scale = 1 / math.sqrt(K) if scale is None else scale
    rows, row_m, row_z = [], [], []
    for b in range(B):
        m = [q_BTHK.new_zeros(K, V) for _ in range(G)]
        z = [q_BTHK.new_zeros(K) for _ in range(G)]
        empty = True
        segments = []
        for start in range(0, T, segment_length):
            if reset_BT is not None and bool(reset_BT[b, start]):
                m = [torch.zeros_like(x) for x in m]
                z = [torch.zeros_like(x) for x in z]
                empty = True
            stop = min(start + segment_length, T)
            heads = []
            for h in range(H):
                g = int(h / (H / G))
                q, k, v = q_BTHK[b, start:stop, h], k_BTGK[b, start:stop, g], v_BTGV[b, start:stop, g]
                a_dot = dot_product_attention(q, k, v, scale, rope_base, None if bias_HN is None else bias_HN[h])
                share = torch.sigmoid(beta_H[h])
                if not empty:
                    heads.append(share * retrieve(q, m[g], z[g]) + (1 - share) * a_dot)
                elif first_segment == "zero":
                    heads.append((1 - share) * a_dot)
                else:
                    heads.append(a_dot)
            segments.append(torch.stack(heads, 1))
            if stop - start < segment_length:
                break
            weight = q_BTHK.new_ones(segment_length) if write_weight_BT is None else write_weight_BT[b, start:stop]
            for g in range(G):
                k, v, own = k_BTGK[b, start:stop, g], v_BTGV[b, start:stop, g], weight
                if input_weight_GK is not None and input_bias_G is not None:
                    own = weight * input_gate(k, input_weight_GK[g], input_bias_G[g])
                if update_rule == "linear":
                    m[g], z[g] = update_linear(m[g], z[g], k, v, own)
                else:
                    m[g], z[g] = update_delta(m[g], z[g], k, v, own, empty)
                if decay_G is not None:
                    m[g], z[g] = decay_G[g] * m[g], decay_G[g] * z[g]
            empty = False
        rows.append(torch.cat(segments))
        row_m.append(torch.stack(m))
        row_z.append(torch.stack(z))
    return torch.stack(rows), torch.stack(row_m), torch.stack(row_z)
