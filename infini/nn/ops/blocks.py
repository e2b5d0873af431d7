"""The reads, the gate and the sums of infini.nn.ops.memory, computed one head of one segment at a time.

A processor reads a large tensor from main memory in every operation; one head of one segment fits its cache. sigma(q),
sigma(k) and the values read are recomputed in the backward pass, so that none of them is held for a whole sequence.
Seconds and memory with blocks and without: results/LOG.md 160.

Letters as in infini.nn.ops.memory. Products have the dtype of queries and keys, everything else that of the state.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor

from infini.nn.ops.dtypes import without_autocast
from infini.nn.ops.memory import MIN_NORMALISER, Memory

SMALLEST_BLOCK = 2**17
"""Numbers of one head of one segment from which blocks are used; for fewer, the calls cost more than they save."""
SMALLEST_TENSOR = 2**22
"""Numbers of a whole tensor from which blocks are used: smaller ones stay in the cache."""


def in_blocks(x_BSNHK: Tensor) -> bool:
    """Whether these queries or keys are large enough for blocks, on a device that gains by them."""
    if x_BSNHK.device.type != "cpu" or x_BSNHK.dtype == torch.float16 or torch.compiler.is_compiling():
        # A compiler joins the operations itself. In float16 the products of a memory overflow.
        return False
    return x_BSNHK.shape[2] * x_BSNHK.shape[4] >= SMALLEST_BLOCK and x_BSNHK.numel() >= SMALLEST_TENSOR


def read_and_mix(q_BSQHK: Tensor, a_BSQHV: Tensor, read: Memory, g_mem_BSH: Tensor, g_dot_BSH: Tensor) -> Tensor:
    """Eq. 3 and 6: g_mem sigma(Q) M / (sigma(Q) z) + g_dot A_dot [B, S, Q, H, V], in the dtype of A_dot.

    a_BSQHV: A_dot. read: the memory that each segment reads, stacked over S. g_mem_BSH: weight of the memory, 0 where
    it is empty. g_dot_BSH: weight of attention.
    """
    return _ReadAndMix.apply(q_BSQHK, a_BSQHV, *read, g_mem_BSH, g_dot_BSH)


class BlockSums:
    """infini.nn.ops.memory.Sums of keys [B, S, N, G, K] (before sigma), values [B, S, N, G, V] and write weights,
    broadcastable to [B, S, N, G]."""

    def __init__(self, k_BSNGK: Tensor, v_BSNGV: Tensor, weight_BSNG: Tensor | None) -> None:
        self.operands = k_BSNGK, v_BSNGV, None if weight_BSNG is None else weight_BSNG.expand(k_BSNGK.shape[:4])

    def added(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """See infini.nn.ops.memory.Sums."""
        return _Added.apply(*self.operands, dtype)

    def erased(self, z_divisor_BSGK: Tensor, written_BSG: Tensor) -> Tensor:
        """See infini.nn.ops.memory.Sums."""
        k, _, weight = self.operands
        return _Erased.apply(k, weight, z_divisor_BSGK, written_BSG)


def _heads(x_BSNHK: Tensor) -> Iterator[tuple[int, int, int]]:
    """Indices of row, segment and head."""
    B, S, _, H, _ = x_BSNHK.shape
    return product(range(B), range(S), range(H))


def _sigma(x_NK: Tensor) -> Tensor:
    """sigma of one head's queries or keys, contiguous: the same sum as infini.nn.ops.memory.sigma. Rows that are far
    apart in memory are read once."""
    y = x_NK.clone(memory_format=torch.contiguous_format)
    above = y.relu()
    return y.clamp_(max=0).exp_().add_(above)


def _normaliser(s_NK: Tensor, z_K: Tensor) -> Tensor:
    """sigma(.) z [N, 1] in the dtype of z."""
    return (s_NK.to(z_K.dtype) @ z_K).clamp_(min=MIN_NORMALISER)[:, None]


class _ReadAndMix(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, a: Tensor, m: Tensor, z: Tensor, g_mem: Tensor, g_dot: Tensor) -> Tensor:
        ctx.save_for_backward(q, a, m, z, g_mem, g_dot)
        group = q.shape[3] // m.shape[2]
        out = a.new_empty(a.shape)
        with without_autocast(q):
            for b, s, h in _heads(q):
                sq = _sigma(q[b, s, :, h])
                share = g_mem[b, s, h] / _normaliser(sq, z[b, s, h // group])
                numerator = sq @ m[b, s, h // group].to(sq.dtype)
                out[b, s, :, h] = (a[b, s, :, h] * g_dot[b, s, h, None]).addcmul_(numerator, share)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        q, a, m, z, g_mem, g_dot = ctx.saved_tensors
        group, exact = q.shape[3] // m.shape[2], m.dtype
        d_q, d_a, d_m, d_z = q.new_empty(q.shape), a.new_empty(a.shape), torch.zeros_like(m), torch.zeros_like(z)
        d_g_mem, d_g_dot = torch.empty_like(g_mem), torch.empty_like(g_dot)
        with without_autocast(q):
            for b, s, h in _heads(q):
                at = b, s, h // group
                sq, d_out = _sigma(q[b, s, :, h]), grad[b, s, :, h].contiguous()
                n = _normaliser(sq, z[at])
                share = g_mem[b, s, h] / n
                d_a[b, s, :, h] = d_out * g_dot[b, s, h, None]
                d_g_dot[b, s, h] = (d_out * a[b, s, :, h]).sum(dtype=exact)
                # The gradient in the numerator, before its factor share: share also has a gradient of its own,
                # sum_v d_out numerator = sum_k sq (d_out M^T).
                d_sq = (d_out.to(sq.dtype) @ m[at].to(sq.dtype).T).to(exact)
                d_share = (d_sq * sq).sum(-1, keepdim=True)
                d_g_mem[b, s, h] = (d_share / n).sum()
                # In this order every factor has ordinary size; see _Quotient. A clamped normaliser has no gradient.
                d_n = (-(d_share * share) / n).masked_fill_(n <= MIN_NORMALISER, 0)
                d_m[at] += sq.T @ (d_out * share).to(sq.dtype)
                d_z[at] += d_n[:, 0] @ sq.to(exact)
                d_sq.mul_(share).addcmul_(d_n, z[at])
                d_q[b, s, :, h] = d_sq.mul_(sq.clamp_(max=1))
        return d_q, d_a, d_m, d_z, d_g_mem, d_g_dot


class _Added(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, k: Tensor, v: Tensor, weight: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(k, v, weight)
        B, S, _, G, K = k.shape
        d_m, d_z = (k.new_empty(shape, dtype=dtype) for shape in ((B, S, G, K, v.shape[4]), (B, S, G, K)))
        with without_autocast(k):
            for b, s, g in _heads(k):
                written = _written(_sigma(k[b, s, :, g]), weight, (b, s, g))
                d_m[b, s, g] = written.T @ v[b, s, :, g]
                d_z[b, s, g] = written.sum(0, dtype=dtype)
        return d_m, d_z

    @staticmethod
    def backward(ctx: Any, g_m: Tensor, g_z: Tensor) -> tuple[Tensor | None, ...]:
        k, v, weight = ctx.saved_tensors
        d_k, d_v = k.new_empty(k.shape), v.new_empty(v.shape)
        d_weight = None if weight is None else weight.new_empty(weight.shape)
        with without_autocast(k):
            for b, s, g in _heads(k):
                sk = _sigma(k[b, s, :, g])
                of_m = g_m[b, s, g].to(sk.dtype)
                d_v[b, s, :, g] = _written(sk, weight, (b, s, g)) @ of_m
                d_written = (v[b, s, :, g] @ of_m.T).to(g_m.dtype).add_(g_z[b, s, g])
                if weight is not None and d_weight is not None:
                    d_weight[b, s, :, g] = (d_written * sk).sum(-1)
                    d_written.mul_(weight[b, s, :, g, None])
                d_k[b, s, :, g] = d_written.mul_(sk.clamp_(max=1))
        return d_k, d_v, d_weight, None


class _Erased(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, k: Tensor, weight: Tensor | None, z: Tensor, written: Tensor) -> Tensor:
        ctx.save_for_backward(k, weight, z, written)
        B, S, _, G, K = k.shape
        a = z.new_empty(B, S, G, K, K)
        with without_autocast(k):
            for b, s, g in _heads(k):
                sk = _sigma(k[b, s, :, g])
                share = written[b, s, g] / _normaliser(sk, z[b, s, g])
                a[b, s, g] = _written(sk, weight, (b, s, g)).T @ (sk * share).to(sk.dtype)
        return a

    @staticmethod
    def backward(ctx: Any, g_a: Tensor) -> tuple[Tensor | None, ...]:
        k, weight, z, written = ctx.saved_tensors
        d_k, d_z = k.new_empty(k.shape), torch.empty_like(z)
        d_weight = None if weight is None else weight.new_empty(weight.shape)
        with without_autocast(k):
            for b, s, g in _heads(k):
                sk = _sigma(k[b, s, :, g])
                n = _normaliser(sk, z[b, s, g])
                share = written[b, s, g] / n
                # A = sum over tokens of weight share sk^T sk has sk on both sides: one product serves both.
                of_a = g_a[b, s, g]
                d_sk = (sk @ (of_a + of_a.T).to(sk.dtype)).to(z.dtype)
                of_share = (d_sk * sk).sum(-1, keepdim=True) / 2
                factor = share
                if weight is not None and d_weight is not None:
                    d_weight[b, s, :, g] = (of_share * share)[:, 0]
                    factor, of_share = share * weight[b, s, :, g, None], of_share * weight[b, s, :, g, None]
                d_n = (-(of_share * share) / n).masked_fill_(n <= MIN_NORMALISER, 0)
                d_z[b, s, g] = d_n[:, 0] @ sk.to(z.dtype)
                d_sk.mul_(factor).addcmul_(d_n, z[b, s, g])
                d_k[b, s, :, g] = d_sk.mul_(sk.clamp_(max=1))
        return d_k, d_weight, d_z, None


def _written(sk_NK: Tensor, weight_BSNG: Tensor | None, at: tuple[int, int, int]) -> Tensor:
    """sigma(k) of a head of a segment times the write weights of its tokens. at: row, segment, head."""
    b, s, g = at
    return sk_NK if weight_BSNG is None else (sk_NK * weight_BSNG[b, s, :, g, None]).to(sk_NK.dtype)
