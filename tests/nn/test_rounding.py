"""Factors shared by many numbers keep their precision beside bfloat16: only results are rounded.

A factor that is rounded first errs in the same direction for all of them. So beside the error, which rounding of the
result explains, the slope of the result over the right one is held to 1: rounding errors of results cancel in it.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import SEGMENT, TOLERANCE, assert_close, make_layer, oracle_layer, relative_error

from infini.models.memorizing import NormalisedAttention
from infini.models.transformer_xl import XLAttention
from infini.nn.attention import InfiniAttention
from infini.nn.ops import memory, reference
from infini.nn.ops.cross_entropy import IGNORE, summed_cross_entropy
from infini.nn.ops.relative import MIN_BIASED_SCORES, masked_attention
from infini.nn.state import scale_memory

BF16 = torch.bfloat16
ROUNDING = 2.0**-8
"""The largest relative error of a number rounded to bfloat16; a norm of many, rounded up to three times, errs less."""
SLOPE = 1e-4
ON_GRID = 4e-4
"""The limit if every multiplied number is a bfloat16 itself: there are 128 of these between two powers of two, and
rounding errors of products with one factor cancel in so many."""


def slope(a: torch.Tensor, right: torch.Tensor) -> float:
    """<a, right> / <right, right> - 1."""
    a, right = a.detach().double(), right.detach().double()
    return (((a * right).sum() / (right * right).sum()) - 1).item()


def assert_unbiased(a: torch.Tensor, right: torch.Tensor, what: str, by: float = SLOPE) -> None:
    assert a.dtype == BF16 or right.dtype != BF16
    assert relative_error(a, right) < ROUNDING, f"{what}: error {relative_error(a, right):.1e}"
    assert abs(slope(a, right)) < by, f"{what}: slope {1 + slope(a, right):.5f}"


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("spread", [0.03, 1.0], ids=["targets-unlikely", "targets-mixed"])
@pytest.mark.parametrize("ignored", [0, 250])
@pytest.mark.parametrize("weights", [torch.float32, BF16], ids=["weights-float32", "weights-bfloat16"])
@pytest.mark.parametrize("count", [3, 7, 333, 1000])
def test_gradients_of_a_mean_loss(count: int, weights: torch.dtype, ignored: int, spread: float) -> None:
    """1 / count is one factor for all, and so is the -1 of targets that the model finds unlikely."""
    hidden = normal(1, 1000, 64).mul(spread).to(BF16).requires_grad_()
    weight = normal(300, 64, seed=1).div(8).to(weights).requires_grad_()
    target = torch.randint(300, (1, 1000), generator=torch.Generator().manual_seed(2))
    target[:, :ignored] = IGNORE
    total, n = summed_cross_entropy(hidden, weight, target, 128)
    assert n == 1000 - ignored
    ours = torch.autograd.grad(total / count, (hidden, weight))
    wide, rounded = (x.detach().to(BF16).float().requires_grad_() for x in (hidden, weight))
    loss = F.cross_entropy((wide @ rounded.T)[0], target[0], ignore_index=IGNORE, reduction="sum") / count
    theirs = torch.autograd.grad(loss, (wide, rounded))
    assert_unbiased(ours[0], theirs[0], "hidden")
    # A sum of many tokens in float32.
    assert ours[1].dtype == weights
    assert relative_error(ours[1], theirs[1]) < ROUNDING and abs(slope(ours[1], theirs[1])) < SLOPE
    if ignored:
        assert not ours[0][:, :ignored].any()


BETAS = (-2.82, -0.47, 0.47, 2.82)
"""bfloat16 holds neither sigmoid(beta) nor 1 - sigmoid(beta) of any of these exactly."""


@pytest.mark.parametrize("first", [None, torch.tensor([True, False]).view(1, 2, 1, 1, 1)], ids=["later", "first"])
@pytest.mark.parametrize("beta", BETAS)
def test_gates(beta: float, first: torch.Tensor | None) -> None:
    """Each gate is one factor for all tokens, and both sides are multiplied with it, gradients too."""
    a, numerator = (normal(2, 2, 64, 3, 16, seed=seed).to(BF16).requires_grad_() for seed in (0, 1))
    denominator = normal(2, 2, 64, 3, 1, seed=2).square() + 0.1
    g = torch.sigmoid(torch.full((3, 1), beta))
    ours = memory.gate(a, numerator, denominator, g, first, "zero")
    assert ours.dtype == BF16
    wide = [x.detach().double().requires_grad_() for x in (a, numerator)]
    share = g.double() if first is None else g.double().masked_fill(first, 0)
    theirs = (1 - g.double()) * wide[0] + share * wide[1] / denominator.double()
    assert_unbiased(ours, theirs, "output", ON_GRID)
    probe = normal(*ours.shape, seed=3).to(BF16)
    found = torch.autograd.grad((ours.float() * probe.float()).sum(), (a, numerator))
    right = torch.autograd.grad((theirs * probe.double()).sum(), wide)
    for name, x, y in zip(("local", "memory"), found, right, strict=True):
        assert_unbiased(x, y, name, ON_GRID)


@pytest.mark.parametrize("rule", ["linear", "delta"])
@pytest.mark.parametrize("weight", [1.3477, 3.025, 3256.0, 1e6 / 3])
def test_write_weights(rule: Any, weight: float) -> None:
    """z is the sum of what tokens write, each so many times: exact in z, which is a sum of rounded numbers."""
    sk = memory.sigma(normal(2, 3, 2, 64, 8)).to(BF16)
    v = normal(2, 3, 2, 64, 4, seed=1).to(BF16)
    factor = torch.full((2, 3, 64), weight)
    empty = memory.Memory(torch.zeros(2, 2, 8, 4), torch.zeros(2, 2, 8))
    _, ours = memory.scan_sums(memory.TokenSums(sk, v, factor[:, :, None]), empty, rule=rule)
    wide = memory.Memory(*(leaf.double() for leaf in empty))
    _, theirs = memory.scan_sums(
        memory.TokenSums(sk.double(), v.double(), factor.double()[:, :, None]), wide, rule=rule
    )
    assert abs(slope(ours.z_BGK, theirs.z_BGK)) < ON_GRID
    assert relative_error(ours.m_BGKV, theirs.m_BGKV) < 2 * ROUNDING


def test_scaling_before_and_weights_of_tokens_are_one_factor() -> None:
    """The length extension multiplies a state begun before, and makes tokens write more, in one call."""
    layer = make_layer(segment=64, d_model=32, d_key=16).float()
    x, factor = normal(1, 256, 32), torch.tensor([1.3477])
    with torch.no_grad(), torch.autocast("cpu", BF16):
        begun = layer(x[:, :64])[1]
        whole = layer(x[:, 64:192], begun)[1].layers[0].memory
        made = layer(x[:, 64:192], scale_memory(begun, factor), write_weight_BT=factor.expand(1, 128))[1]
    assert abs(slope(made.layers[0].memory.z_BGK, whole.z_BGK * factor)) < ON_GRID


@pytest.mark.parametrize("scale", [1.003, 7.01])
def test_learned_scales_of_unit_queries(scale: float) -> None:
    torch.manual_seed(0)
    layer = NormalisedAttention(32, 4, 16, SEGMENT)
    with torch.no_grad():
        layer.head_scale.fill_(scale)
    x = normal(4, 8, SEGMENT, 32).to(BF16)
    with torch.autocast("cpu", BF16):
        q, _ = layer.queries(x, SEGMENT)
        k, _ = layer.project_keys_values(x)
        raw_q, raw_k = layer.q_proj(x).unflatten(-1, (4, 16)), layer.k_proj(x).unflatten(-1, (4, 16))
    assert q.dtype == k.dtype == BF16
    assert_unbiased(q, scale * F.normalize(raw_q.double(), dim=-1), "queries")
    assert_unbiased(k, F.normalize(raw_k.double(), dim=-1), "keys")


def test_biases_of_positions() -> None:
    """u and v of Dai et al. 2019 are one vector for all tokens: only the sum with a query is rounded."""
    torch.manual_seed(0)
    layer = XLAttention(32, 4, 16, SEGMENT)
    with torch.no_grad():
        layer.u.fill_(1.003)
        layer.v.fill_(1.003)
        layer.q_proj.weight.mul_(0.01)
    x = normal(4, 8, SEGMENT, 32).to(BF16)
    with torch.autocast("cpu", BF16):
        with_u, _ = layer.queries(x, SEGMENT)
        right = layer.q_proj(x).unflatten(-1, (4, 16)).double() + layer.u.detach().double().view(4, 16)
    assert with_u.dtype == BF16 and abs((with_u.double() - right).mean().item()) < ON_GRID


@pytest.mark.parametrize("trained", [False, True], ids=["read", "trained"])
@pytest.mark.parametrize("n_kv_heads", [4, 2])
@pytest.mark.parametrize("length", [16, 128], ids=["few", "many"])
def test_attention_biases(length: int, n_kv_heads: int, trained: bool) -> None:
    """Only the differences between large biases count; training and evaluation read the same."""
    q = normal(4, length, 4, 16).to(BF16)
    k, v = (normal(4, length, n_kv_heads, 16, seed=seed).to(BF16) for seed in (1, 2))
    bias = 20 + 0.05 * normal(1, 4, length, length, seed=3)
    assert (4 * 4 * length * length < MIN_BIASED_SCORES) == (length == 16)
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    masked = bias.masked_fill(future, -math.inf).requires_grad_(trained)
    with torch.set_grad_enabled(trained), torch.autocast("cpu", BF16):
        ours = masked_attention(q, k, v, masked, 0.25)
    shared = 4 // n_kv_heads
    wide_q, wide_k, wide_v = (
        x.double().transpose(1, 2) for x in (q, k.repeat_interleave(shared, 2), v.repeat_interleave(shared, 2))
    )
    score = (0.25 * wide_q @ wide_k.transpose(-1, -2) + masked.detach().double()).softmax(-1)
    theirs = (score @ wide_v).transpose(1, 2)
    # Few scores of training are plain products, which bfloat16 rounds.
    plain = trained and length == 16
    assert relative_error(ours, theirs) < (4 if plain else 1) * ROUNDING


@pytest.mark.parametrize("rule", ["linear", "delta"])
@pytest.mark.parametrize("weight", [0.1, 1 / 3])
def test_write_weights_of_a_float64_layer_are_float64(rule: str, weight: float) -> None:
    """However the calls are cut: the state keeps the weights of an unfinished segment."""
    layer = make_layer(update_rule=rule)
    x = normal(2, 3 * SEGMENT + 2, 12).double()
    weights = torch.full(x.shape[:2], weight, dtype=torch.float64)
    weights[:, ::3] = 0.7
    y, m, z = oracle_layer(layer, x, write_weight_BT=weights)
    for cuts in ([999], [5, 7, 1]):
        state: Any = None
        parts: list[torch.Tensor] = []
        start = 0
        while start < x.shape[1]:
            columns = slice(start, start + cuts[min(len(parts), len(cuts) - 1)])
            part, state = layer(x[:, columns], state, write_weight_BT=weights[:, columns])
            parts.append(part)
            start = columns.stop
        for name, got, right in zip(("y", "M", "z"), (torch.cat(parts, 1), *state.layers[0].memory), (y, m, z)):  # noqa: B905
            assert_close(got, right, 1e-13, name)


# float16, which ends at 65,504 and begins at 6e-8.


@pytest.mark.parametrize("rule", ["linear", "delta"])
@pytest.mark.parametrize("values", [1.0, 1e3])
def test_memory_under_float16_autocast(rule: str, values: float) -> None:
    """A sum over tokens passes the largest float16; the state, and what is read of it, does not overflow."""
    layer = make_layer(segment=64, update_rule=rule)
    with torch.no_grad():
        layer.v_proj.weight.mul_(values)
    x = normal(1, 8 * 64, 12).double()
    expected, m, z = oracle_layer(layer, x)
    assert values == 1.0 or m.abs().max() > 65_504
    layer, narrow = layer.float(), x.float().requires_grad_()
    with torch.autocast("cpu", torch.float16):
        y, state = layer(narrow)
    mem = state.layers[0].memory
    assert mem.m_BGKV.dtype == mem.z_BGK.dtype == torch.float32
    for name, got, right in (("y", y, expected), ("M", mem.m_BGKV, m), ("z", mem.z_BGK, z)):
        assert_close(got, right, 5e-3, name)
    (y.float() / values).square().mean().backward()
    assert all(p.grad.isfinite().all() for p in (narrow, *layer.parameters()))


@pytest.mark.parametrize("rule", ["linear", "delta"])
def test_a_long_past_is_read_under_float16_autocast(rule: Any) -> None:
    """After a million tokens 1 / (sigma(q) z) is below the smallest float16, and write weights may be above it."""
    layer = make_layer(segment=64, update_rule=rule).float()
    x = normal(1, 192, 12)
    weights = torch.full((1, 192), 1e5)
    with torch.no_grad():
        right, right_state = layer(x, write_weight_BT=weights)
        with torch.autocast("cpu", torch.float16):
            y, state = layer(x, write_weight_BT=weights)
    assert_close(state.layers[0].memory.z_BGK, right_state.layers[0].memory.z_BGK, 5e-3, "z")
    assert_close(y, right, 5e-3, "y")


@pytest.mark.parametrize("dtype", [torch.float16, BF16, torch.float32])
def test_tokens_unlike_anything_written_read_their_share(dtype: torch.dtype) -> None:
    """1 / (sigma(q) z) is then far above the largest float16; the quotient is an ordinary number."""
    k, q = normal(1, 1, 1, 16, 8) - 8.5, normal(1, 1, 1, 4, 8, seed=1) - 8.5
    v = normal(1, 1, 1, 16, 4, seed=2)
    sk, sq = (memory.sigma(x.to(dtype)) for x in (k, q))
    empty = memory.Memory(torch.zeros(1, 1, 8, 4), torch.zeros(1, 1, 8))
    _, mem = memory.scan_sums(memory.TokenSums(sk, v.to(dtype), None), empty, rule="linear")
    numerator, denominator = memory.retrieve(sq, mem.m_BGKV[:, None], mem.z_BGK[:, None])
    a_dot, g = torch.zeros(1, 1, 1, 4, 4, dtype=dtype), torch.ones(1)
    got = memory.gate(a_dot, numerator, denominator, g, None, "local")
    m, z = reference.update_linear(
        torch.zeros(8, 4).double(),
        torch.zeros(8).double(),
        k[0, 0, 0].double(),
        v[0, 0, 0].double(),
        torch.ones(16).double(),
    )
    expected = reference.retrieve(q[0, 0, 0].double(), m, z)
    assert_close(got[0, 0, 0], expected, TOLERANCE.get(dtype, 2e-2), "read")


def test_the_gate_of_a_layer_is_one_factor() -> None:
    """The whole layer: of local attention alone, seen through a gate that bfloat16 cannot hold."""
    torch.manual_seed(0)
    layer = InfiniAttention(32, 2, 16, SEGMENT, first_segment="zero")
    with torch.no_grad():
        layer.o_proj.weight.copy_(torch.eye(32))
        layer.beta.fill_(-3.0)
    x = normal(64, SEGMENT, 32).to(BF16)
    with torch.no_grad(), torch.autocast("cpu", BF16):
        gated = layer(x)[0]
        layer.beta.fill_(-800.0)
        alone = layer(x)[0]
    assert_unbiased(gated, alone.double() * torch.sigmoid(torch.tensor(3.0)).double(), "output")


@pytest.mark.parametrize("rule", ["linear", "delta"])
@pytest.mark.parametrize("shift", [0.0, 15.0, 25.0, 32.0])
def test_gradients_of_small_denominators(shift: float, rule: Any) -> None:
    """Keys and queries far below 0: sigma(q) z is down to 1e-27, its square below what float32 holds; what is read of
    the memory, and its gradients, are ordinary numbers."""
    found = []
    for dtype in (torch.float64, torch.float32):
        q, k = ((normal(1, 3, 1, 16, 8, seed=seed) - shift).to(dtype).requires_grad_() for seed in (0, 1))
        v = normal(1, 3, 1, 16, 4, seed=2).to(dtype).requires_grad_()
        empty = memory.Memory(torch.zeros(1, 1, 8, 4, dtype=dtype), torch.zeros(1, 1, 8, dtype=dtype))
        read, _ = memory.scan_sums(memory.TokenSums(memory.sigma(k), v, None), empty, rule=rule)
        numerator, denominator = memory.retrieve(memory.sigma(q), *read)
        first = torch.tensor([True, False, False]).view(1, 3, 1, 1, 1)
        g = torch.full((1,), 0.9, dtype=dtype)
        a = memory.gate(torch.zeros_like(numerator), numerator, denominator, g, first, "local")
        loss = (a * torch.arange(4.0, dtype=dtype)).square().sum()
        found.append((a, *torch.autograd.grad(loss, (q, k, v))))
    for name, right, got in zip(("read", "q", "k", "v"), *found, strict=True):
        assert right.norm() > 1
        assert_close(got, right, TOLERANCE[torch.float32], name)
