"""Transformer-XL against loops over tokens and heads, written from the equations of Dai et al. 2019."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers import SEGMENT, assert_close, assert_same_gradients, bucket_of, layer_in_calls, relative_error

from infini.models.transformer_xl import XLAttention
from infini.nn.ops.relative import T5_BUCKETS, distances, relative_shift, t5_bucket

D, H, K, V = 12, 4, 6, 4
POSITIONS = pytest.mark.parametrize("positions", ["dai2019", "t5"])
GROUPS = pytest.mark.parametrize("groups", [4, 2])


def make(positions: Any, groups: int = H, scale: Any = "d_key") -> Any:
    torch.manual_seed(0)
    layer = XLAttention(
        D, H, K, SEGMENT, d_value=V, n_kv_heads=groups, positions=positions, attention_scale=scale
    ).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=parameter.shape[1] ** -0.5 if parameter.dim() == 2 else 1.0)
    return layer


def position_term(layer: Any, head: int, q: torch.Tensor, distance: int) -> torch.Tensor:
    """The term that a key's distance adds to the unscaled score."""
    if layer.positions == "t5":
        return layer.bucket_bias.view(T5_BUCKETS, H)[bucket_of(distance), head] / layer.scale
    angles = [distance * 10000 ** (-2 * i / D) for i in range(D // 2)]
    R = torch.tensor([math.sin(a) for a in angles] + [math.cos(a) for a in angles], dtype=torch.float64)
    r = (layer.r_proj.weight @ R).view(H, K)[head]
    return (q + layer.v.view(H, K)[head]) @ r


def oracle(layer: Any, x_TD: torch.Tensor, width: int = K) -> torch.Tensor:
    """One token and one head at a time over a whole document; what lies in the segment before has no gradient.

    width: the scores are divided by its root.
    """
    G, N = layer.n_kv_heads, layer.segment_length
    outputs = []
    for t in range(len(x_TD)):
        begin = t // N * N
        heads = []
        for h in range(H):
            q = (layer.q_proj.weight @ x_TD[t]).view(H, K)[h]
            scores, values = [], []
            for j in range(max(0, begin - N), t + 1):
                cached = j < begin
                x = x_TD[j].detach() if cached else x_TD[j]
                k = (layer.k_proj.weight @ x).view(G, K)[h // (H // G)]
                v = (layer.v_proj.weight @ x).view(G, V)[h // (H // G)]
                if cached and layer.positions == "t5":
                    k, v = k.detach(), v.detach()
                u = layer.u.view(H, K)[h] if layer.positions == "dai2019" else 0.0
                scores.append(((q + u) @ k + position_term(layer, h, q, t - j)) / math.sqrt(width))
                values.append(v)
            heads.append(torch.softmax(torch.stack(scores), 0) @ torch.stack(values))
        outputs.append(layer.o_proj.weight @ torch.cat(heads))
    return torch.stack(outputs)


@GROUPS
@POSITIONS
@pytest.mark.parametrize("cuts", [[999], [5, 7, 1, 9]], ids=["one-call", "cut"])
@pytest.mark.parametrize("scale", ["d_key", "d_model"])
def test_the_layer_is_the_equations(positions: str, groups: int, cuts: list[int], scale: str) -> None:
    """Outputs, gradients of inputs and of every weight, over three segments and a bit."""
    layer = make(positions, groups, scale)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3 * SEGMENT + 3, D, dtype=torch.float64, generator=generator, requires_grad=True)
    expected = oracle(layer, x, {"d_key": K, "d_model": D}[scale])
    got, _ = layer_in_calls(layer, x, cuts)
    assert_close(got, expected, 1e-12, "output")
    assert_same_gradients(got, expected, {"x": x, **dict(layer.named_parameters())})


@POSITIONS
def test_the_segment_before_is_read_and_the_one_before_it_is_not(positions: str) -> None:
    layer = make(positions)
    x = torch.randn(1, 3 * SEGMENT, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    last = layer(x)[0][:, -SEGMENT:]
    for segment, read in ((0, False), (1, True)):
        other = x.clone()
        other[:, segment * SEGMENT : (segment + 1) * SEGMENT] += 1
        assert (relative_error(layer(other)[0][:, -SEGMENT:], last) > 0) is read


def test_the_cache_follows_the_weights_where_layer_inputs_are_cached() -> None:
    """If keys and values are cached, as t5 does, another W_k between two calls does not change the cache."""
    x = torch.randn(1, 2 * SEGMENT, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for positions, follows in (("dai2019", True), ("t5", False)):
        layer = make(positions)
        _, state = layer(x[:, :SEGMENT])
        with torch.no_grad():
            layer.k_proj.weight.mul_(2)
        changed = layer(x[:, SEGMENT:], state)[0]
        assert (relative_error(changed, layer(x)[0][:, SEGMENT:]) < 1e-12) is follows


def test_relative_shift_puts_scores_by_distance_to_their_keys() -> None:
    Q, L = 3, 7
    by_distance = torch.randn(2, Q, L, generator=torch.Generator().manual_seed(1))
    shifted = relative_shift(by_distance)
    for query in range(Q):
        for key in range(L - Q + query + 1):
            distance = L - Q + query - key
            assert torch.equal(shifted[:, query, key], by_distance[:, query, L - 1 - distance])


def test_buckets_are_t5s() -> None:
    found = t5_bucket(torch.arange(400)).tolist()
    assert found == [bucket_of(d) for d in range(400)]
    assert found[:17] == list(range(17)) and found[-1] == 31 and sorted(found) == found
    assert distances(2, 3, torch.device("cpu")).tolist() == [[1, 0, -1], [2, 1, 0]]


def test_the_papers_footprint_counts_keys_and_values() -> None:
    """(128 + 128) x 8 x 2048 a layer; layer inputs are half of it at d_model = 8 x 128."""
    sizes = {positions: XLAttention(1024, 8, 128, 2048, positions=positions) for positions in ("t5", "dai2019")}
    assert sizes["t5"].memory_floats() == (128 + 128) * 8 * 2048
    assert 12 * sizes["t5"].memory_floats() == 50_331_648
    assert 2 * sizes["dai2019"].memory_floats() == sizes["t5"].memory_floats()
