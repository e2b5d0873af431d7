"""Infini-attention with Transformer-XL's cache: the two layers it is made of, mixed head by head."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import SEGMENT, assert_close, assert_same_gradients, layer_in_calls, make_model, set_gates

from infini.models.infini_xl import InfiniXLAttention
from infini.models.transformer_xl import XLAttention
from infini.nn.attention import InfiniAttention

D, H, K, V = 12, 4, 6, 3
RULES = pytest.mark.parametrize("rule", ["linear", "delta"])


def make(rule: Any, groups: int, first_segment: Any = "local") -> InfiniXLAttention:
    """A layer whose o_proj is the identity, so that its output is its heads side by side."""
    torch.manual_seed(0)
    options = {"d_value": V, "n_kv_heads": groups, "update_rule": rule, "first_segment": first_segment}
    layer = InfiniXLAttention(D, H, K, SEGMENT, **options).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=parameter.shape[1] ** -0.5 if parameter.dim() == 2 else 1.0)
        layer.o_proj.weight.copy_(torch.eye(D))
    return layer


def same_weights(layer: InfiniXLAttention, other: Any) -> Any:
    """The other layer, with the tensors of this one that it has."""
    weights = dict(layer.named_parameters())
    for name, parameter in other.double().named_parameters():
        parameter.data = weights[name].data
    return other


def expected(layer: InfiniXLAttention, x_TD: torch.Tensor, rule: Any, first_segment: str) -> torch.Tensor:
    """Eq. 6 by hand: what Transformer-XL and a memory by itself give for these weights, and the gates."""
    options: dict[str, Any] = {"d_value": V, "n_kv_heads": layer.n_kv_heads, "positions": "t5"}
    cached = same_weights(layer, XLAttention(D, H, K, SEGMENT, **options))
    remembering = same_weights(layer, InfiniAttention(D, H, K, SEGMENT, rule, first_segment="zero", **options))
    remembering.beta = torch.nn.Parameter(torch.empty(H, dtype=torch.float64))
    (a_dot, _), (a_mem, _) = (layer_in_calls(of, x_TD, [999]) for of in (cached, set_gates(remembering, 40.0)))
    g = torch.sigmoid(layer.beta).repeat_interleave(V)
    mixed = g * a_mem + (1 - g) * a_dot
    nothing_yet = a_dot if first_segment == "local" else (1 - g) * a_dot
    return torch.cat([nothing_yet[:SEGMENT], mixed[SEGMENT:]])


@RULES
@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("first_segment", ["local", "zero"])
@pytest.mark.parametrize("cuts", [[999], [5, 7, 1, 9]], ids=["one-call", "cut"])
def test_the_layer_mixes_a_cache_and_a_memory(rule: str, groups: int, first_segment: str, cuts: list[int]) -> None:
    """Outputs over three segments and a bit."""
    layer = make(rule, groups, first_segment)
    x = torch.randn(3 * SEGMENT + 3, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    got, state = layer_in_calls(layer, x, cuts)
    assert_close(got, expected(layer, x, rule, first_segment), 1e-12, "output")
    assert not state.layers[0].memory.cache.k_BNGK.requires_grad
    assert state.layers[0].memory.compressive.m_BGKV.requires_grad


@RULES
def test_gradients_are_those_of_the_two(rule: str) -> None:
    """Inputs, weights and gates get no gradient through the cache, and all of it through the memory."""
    layer = make(rule, H)
    x = torch.randn(3 * SEGMENT, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    got, _ = layer_in_calls(layer, x, [999])
    weights = {name: parameter for name, parameter in layer.named_parameters() if name != "o_proj.weight"}
    functional = torch.func.functional_call
    cached = XLAttention(D, H, K, SEGMENT, d_value=V, positions="t5").double()
    remembering = InfiniAttention(D, H, K, SEGMENT, rule, d_value=V, positions="t5").double()  # type: ignore[arg-type]
    kept = {**weights, "o_proj.weight": layer.o_proj.weight}
    without_gates = {name: weight for name, weight in kept.items() if name != "beta"}
    a_dot = functional(cached, without_gates, (x[None],))[0][0]
    gates = {"beta": torch.full((H,), 40.0, dtype=torch.float64)}
    a_mem = functional(remembering, {**without_gates, **gates}, (x[None],))[0][0]
    g = torch.sigmoid(layer.beta).repeat_interleave(V)
    by_hand = torch.cat([a_dot[:SEGMENT], (g * a_mem + (1 - g) * a_dot)[SEGMENT:]])
    assert_close(got, by_hand, 1e-12, "output")
    assert_same_gradients(got, by_hand, {**weights, "x": x}, 1e-10)


def test_a_closed_gate_is_transformer_xl() -> None:
    layer = set_gates(make("linear", H), -800.0)
    x = torch.randn(2 * SEGMENT + 3, D, dtype=torch.float64)
    cached = same_weights(layer, XLAttention(D, H, K, SEGMENT, d_value=V, positions="t5"))
    assert_close(layer_in_calls(layer, x, [7])[0], layer_in_calls(cached, x, [7])[0], 1e-14, "output")


def test_a_cache_is_not_scaled() -> None:
    """Length extension multiplies the memories of models that say so."""
    with_cache, without = (
        make_model({"name": name, "update_rule": "linear"}) for name in ("infini_xl", "infini_linear")
    )
    assert with_cache.memory_layers and not with_cache.memory_is_a_sum
    assert without.memory_layers and without.memory_is_a_sum


def test_what_is_carried_is_both() -> None:
    assert make("linear", 2).memory_floats() == 2 * (SEGMENT * (K + V) + K * (V + 1))
