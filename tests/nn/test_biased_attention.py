"""Attention with a bias that is trained: on a processor an operation of our own, held to the definition."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers import assert_close, relative_error

from infini.nn.ops import relative

X, Q, L, H, K, V = 3, 5, 8, 4, 6, 7


def inputs(groups: int, rows: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = (X, Q, H, K), (X, L, groups, K), (X, L, groups, V), (rows, H, Q, L)
    return [torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_() for shape in shapes]


def unseen() -> torch.Tensor:
    """The keys that a query does not see: later ones, and in the second row the first three."""
    blocked = (relative.distances(Q, L, torch.device("cpu")) < 0).expand(X, 1, Q, L).clone()
    blocked[1, ..., :3] = True
    return blocked


def by_definition(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, blocked: torch.Tensor, scale: float
) -> torch.Tensor:
    out = torch.zeros(X, Q, H, V, dtype=q.dtype)
    for x in range(X):
        for i in range(Q):
            for h in range(H):
                g = h // (H // k.shape[2])
                seen = [j for j in range(L) if not blocked[x, 0, i, j]]
                scores = [q[x, i, h] @ k[x, j, g] * scale + bias[x % len(bias), h, i, j] for j in seen]
                out[x, i, h] = torch.stack(scores).softmax(0) @ v[x, seen, g]
    return out


@pytest.mark.parametrize("few", [0, relative.MIN_BIASED_SCORES], ids=["own", "fused"])
@pytest.mark.parametrize("rows", [1, X], ids=["one-bias", "a-bias-a-row"])
@pytest.mark.parametrize("groups", [H, 2, 1])
def test_it_is_the_definition(groups: int, rows: int, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and gradients, each of several random projections of the output."""
    monkeypatch.setattr(relative, "MIN_BIASED_SCORES", few)
    tensors, blocked = inputs(groups, rows), unseen()
    q, k, v, bias = tensors
    got = relative.masked_attention(q, k, v, bias.masked_fill(blocked, -math.inf), 0.3)
    right = by_definition(q, k, v, bias, blocked, 0.3)
    assert_close(got, right, 1e-12, "output")
    generator = torch.Generator().manual_seed(2)
    for _ in range(3):
        weight = torch.randn(right.shape, dtype=torch.float64, generator=generator)
        grads = (torch.autograd.grad((y * weight).sum(), tensors, retain_graph=True) for y in (got, right))
        for name, a, b in zip("qkvb", *grads, strict=True):
            assert_close(a, b, 1e-11, f"gradient of {name}")
    with torch.no_grad():
        assert_close(
            relative.masked_attention(q, k, v, bias.masked_fill(blocked, -math.inf), 0.3), right, 1e-12, "plain"
        )


@pytest.mark.parametrize("trained", ["bias", "none"])
def test_the_own_operation_is_for_biases_that_are_trained(trained: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counting(*args: Any) -> Any:
        calls.append(args)
        return apply(*args)

    apply = relative._Biased.apply
    monkeypatch.setattr(relative, "MIN_BIASED_SCORES", 0)
    monkeypatch.setattr(relative._Biased, "apply", counting)
    q, k, v, bias = (x.detach() for x in inputs(H, 1))
    relative.masked_attention(q, k, v, bias.requires_grad_(trained == "bias"), 0.3)
    assert len(calls) == (trained == "bias")


def test_in_bfloat16_it_is_as_exact_as_attention_with_rotary_positions() -> None:
    """A bias's gradient is a sum over many rows; relative errors against float64, 0.004 being bfloat16's own."""
    generator = torch.Generator().manual_seed(3)
    shapes = (24, 64, 4, 16), (24, 64, 4, 16), (24, 64, 4, 16), (1, 4, 64, 64)
    tensors = [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]
    blocked = relative.distances(64, 64, torch.device("cpu")) < 0
    weight = torch.randn(24, 64, 4, 16, generator=generator).bfloat16()

    def measured(dtype: torch.dtype) -> list[torch.Tensor]:
        q, k, v = (x.to(dtype).requires_grad_() for x in tensors[:3])
        bias = tensors[3].to(torch.promote_types(dtype, torch.float32)).requires_grad_()
        y = relative.masked_attention(q, k, v, bias.masked_fill(blocked, -math.inf), 0.25)
        return [y.detach(), *torch.autograd.grad((y * weight.to(dtype)).sum(), (q, k, v, bias))]

    found, exact = measured(torch.bfloat16), measured(torch.float64)
    for name, got, right in zip(("output", *"qkvb"), found, exact, strict=True):
        assert relative_error(got.double(), right) < 0.006, name
