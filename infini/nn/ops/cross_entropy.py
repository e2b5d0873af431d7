"""Next-token loss in chunks: logits exist for `chunk` tokens at a time, not for a whole long sequence."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from infini.nn.host import to_device, to_numpy
from infini.nn.ops.dtypes import for_products, no_second_derivative, state_dtype, without_autocast

IGNORE = -100


class _ChunkedCrossEntropy(torch.autograd.Function):
    """The sum of the losses. Gradients are computed in the forward pass, chunk by chunk, while the logits exist."""

    @staticmethod
    def forward(ctx: Any, hidden_PD: Tensor, weight_WD: Tensor, target_P: Tensor, chunk: int) -> Tensor:
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        kept = target_P != IGNORE
        weight = weight_WD.to(hidden_PD.dtype)
        total = hidden_PD.new_zeros((), dtype=state_dtype(hidden_PD.dtype))
        # Rounded only after backward() multiplies them.
        grad_hidden = torch.empty_like(hidden_PD, dtype=total.dtype) if need_hidden else None
        grad_weight = torch.zeros_like(weight_WD, dtype=total.dtype) if need_weight else None
        # All chunks share these buffers: new ones would cost more time than the products.
        n, width = hidden_PD.shape[0], weight.shape[0]
        products = hidden_PD.new_empty(min(chunk, n), width)
        wide = torch.empty_like(products, dtype=total.dtype)
        for start in range(0, n, chunk):
            hidden = hidden_PD[start : start + chunk]
            keep = kept[start : start + chunk, None]
            target = target_P[start : start + chunk].clamp(min=0)[:, None]
            product, logits = products[: hidden.shape[0]], wide[: hidden.shape[0]]
            logits.copy_(torch.mm(hidden, weight.T, out=product))
            top = logits.amax(-1, keepdim=True)
            right = logits.gather(1, target)
            weights = logits.sub_(top).exp_()
            norm = weights.sum(-1, keepdim=True)
            total += ((norm.log() + top - right) * keep).sum()
            if grad_hidden is not None or grad_weight is not None:
                weights.mul_(keep / norm)
                # The target's weight, p - 1, is most of a token's gradient. In bfloat16 it would round to -1 for every
                # small p, so that it is multiplied separately, in the wider dtype.
                of_target = weights.gather(1, target) - keep.to(weights.dtype)
                others = product.copy_(weights.scatter_(1, target, 0.0))
                if grad_hidden is not None:
                    part = grad_hidden[start : start + chunk].copy_(others @ weight)
                    part.addcmul_(weight.index_select(0, target.flatten()), of_target)
                if grad_weight is not None:
                    grad_weight += (others.T @ hidden).to(grad_weight.dtype)
                    added = (hidden * of_target).to(grad_weight.dtype)
                    # Deterministic on a GPU, unlike index_add_.
                    grad_weight.index_put_((target.flatten(),), added, accumulate=True)
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.dtypes = hidden_PD.dtype, weight_WD.dtype
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        no_second_derivative("the cross-entropy in chunks")
        # The weight of a mean, 1 / count, keeps its dtype: rounded to bfloat16, it would scale every gradient by the
        # same wrong factor, up to 1.004.
        hidden, weight = (
            None if g is None else (g * grad).to(dtype) for g, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return hidden, weight, None, None


def summed_cross_entropy(hidden_BTD: Tensor, weight_WD: Tensor, target_BT: Tensor, chunk: int) -> tuple[Tensor, int]:
    """Sum of the negative log-likelihoods, in nats, of all targets except IGNORE, and the number of these targets.

    weight_WD: the output embedding [vocabulary, D]. target_BT: best on the host, where counting them waits for no
    device. Logits are products in hidden's dtype (autocast's where it is on),
    their normaliser is float32 (float64 in float64).
    """
    hidden_BTD = for_products(hidden_BTD)
    with without_autocast(hidden_BTD):
        target_P = to_device(target_BT, hidden_BTD.device).flatten()
        total = _ChunkedCrossEntropy.apply(hidden_BTD.flatten(0, 1), weight_WD, target_P, chunk)
    return total, int(np.count_nonzero(to_numpy(target_BT) != IGNORE))


@torch.no_grad()
def count_most_likely(hidden_PD: Tensor, weight_WD: Tensor, target_P: Tensor) -> Tensor:
    """How many of the targets have the largest logit, an int64 on hidden's device."""
    hidden_PD = for_products(hidden_PD)
    with without_autocast(hidden_PD):
        likeliest_P = (hidden_PD @ weight_WD.to(hidden_PD.dtype).T).argmax(-1)
    return (likeliest_P == to_device(target_P, hidden_PD.device)).sum()


@torch.no_grad()
def token_nll(hidden_BTD: Tensor, weight_WD: Tensor, target_BT: Tensor, chunk: int) -> Tensor:
    """Negative log-likelihood of every target in nats [B, T], float32 (float64 in float64); 0 where IGNORE."""
    flat, target = for_products(hidden_BTD).flatten(0, 1), to_device(target_BT, hidden_BTD.device).flatten()
    dtype = state_dtype(flat.dtype)
    out = torch.empty(flat.shape[0], dtype=dtype, device=flat.device)
    with without_autocast(flat):
        weight = weight_WD.to(flat.dtype)
        for start in range(0, flat.shape[0], chunk):
            piece = slice(start, start + chunk)
            logits = (flat[piece] @ weight.T).to(dtype)
            out[piece] = logits.logsumexp(-1) - logits.gather(1, target[piece].clamp(min=0)[:, None]).squeeze(1)
    return out.masked_fill_(target == IGNORE, 0).view_as(target_BT)
