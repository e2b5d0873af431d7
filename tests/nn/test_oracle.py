"""The fast path is held to the oracle, and the oracle to definitions written out here a second time."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from device_reads import Calls
from helpers import TOLERANCE, assert_close, computing_in, layer_in_calls, make_layer, oracle_layer, set_gates

from infini.nn.ops import attention, memory, reference, relative
from infini.nn.ops.dtypes import state_dtype

DTYPES = [torch.float64, torch.float32, torch.bfloat16]
RULES = ["linear", "delta"]
PROBES = 4
CASES: dict[str, dict[str, Any]] = {
    **{str(n): {"length": n} for n in (1, 7, 63, 64, 65, 100)},
    "2000": {"length": 2000, "rows": 1, "heads": 2, "groups": 2, "d_key": 4, "d_value": 4},
    "all-heads": {"length": 50, "segment": 16, "heads": 3, "groups": 3},
    "one-group": {"length": 50, "segment": 16, "heads": 6, "groups": 1},
    "wide-values": {"length": 50, "segment": 16, "d_key": 4, "d_value": 10},
    "wide-values-long-segments": {"length": 180, "segment": 80, "d_key": 4, "d_value": 10},
    "narrow-values-long-segments": {"length": 180, "segment": 80, "d_key": 8, "d_value": 6},
    "weights": {"length": 60, "segment": 16, "weights": True},
    "resets": {"length": 90, "segment": 16, "resets": True},
    "weights-and-resets": {"length": 90, "segment": 16, "weights": True, "resets": True},
    "t5": {"length": 60, "segment": 16, "positions": "t5"},
    "t5-weights-and-resets": {"length": 90, "segment": 16, "weights": True, "resets": True, "positions": "t5"},
    "t5-long-segments": {"length": 330, "segment": 160, "rows": 1, "heads": 2, "groups": 1, "positions": "t5"},
    "decay": {"length": 90, "segment": 16, "decay": 100.0},
    "decay-weights-and-resets": {"length": 90, "segment": 16, "weights": True, "resets": True, "decay": 100.0},
    "input": {"length": 90, "segment": 16, "input": True},
    "input-weights-and-resets": {"length": 90, "segment": 16, "weights": True, "resets": True, "input": True},
    "topic": {"length": 6 * 16, "segment": 16, "topic": 5.0},
}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """The oracle is many thousand tiny products: a second thread only waits for the first."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def case(
    rule: str,
    first: str,
    *,
    length: int,
    segment: int = 64,
    rows: int = 2,
    heads: int = 4,
    groups: int = 2,
    d_key: int = 8,
    d_value: int = 6,
    weights: bool = False,
    resets: bool = False,
    topic: float = 0.0,
    positions: str = "rotary",
    decay: float | None = None,
    input: bool = False,
) -> tuple[Any, torch.Tensor, dict[str, torch.Tensor]]:
    """A layer, its input and the extras of its call, all exact in float32."""
    sizes: dict[str, Any] = {"n_kv_heads": groups, "d_value": d_value, "memory_decay": decay}
    generator = torch.Generator().manual_seed(length)
    if input:
        sizes["input_gate"] = "sigmoid"
    layer = make_layer(16, heads, d_key, segment, update_rule=rule, first_segment=first, positions=positions, **sizes)
    if input:
        # The second head's logits reach below their bound.
        with torch.no_grad():
            layer.input_weight.normal_(generator=generator).mul_(3)
            layer.input_bias.copy_(torch.tensor([0.5, -19.0]))
    x = torch.randn(rows, length, 16, generator=generator)
    if input:
        # Keys of zeros have no direction.
        x[:, 3:5] = 0
    if topic:
        # The first feature says the topic; it lifts half of the key dimensions and sinks the others.
        x[:, :, 0] = torch.where(torch.arange(length) < length // 2, 1.0, -1.0)
        with torch.no_grad():
            shift = torch.where(torch.arange(d_key) < d_key // 2, topic, -topic)
            layer.k_proj.weight[:, 0] = shift.repeat(groups)
    extras = {}
    if weights:
        extras["write_weight_BT"] = 2 * torch.rand(rows, length, generator=generator)
    if resets:
        extras["reset_BT"] = torch.zeros(rows, length, dtype=torch.bool)
        extras["reset_BT"][0, 2 * segment] = extras["reset_BT"][1, [segment, 3 * segment, 5 * segment]] = True
    return layer, x, extras


def measured(layer: Any, x: torch.Tensor, y: torch.Tensor, m: torch.Tensor, z: torch.Tensor) -> dict[str, torch.Tensor]:
    """Outputs, final state, and the gradients of several fixed random projections of them, stacked.

    One projection alone can leave the gradient of a gate, a sum over all tokens, near 0 by chance.
    """
    generator = torch.Generator().manual_seed(7)
    inputs = {"x": x, **dict(layer.named_parameters())}
    probes = []
    for _ in range(PROBES):
        weights = [torch.randn(t.shape, generator=generator).to(t.dtype) for t in (y, m, z)]
        loss = torch.stack([(t * w).sum() for t, w in zip((y, m, z), weights, strict=True)]).sum()
        grads = torch.autograd.grad(loss, list(inputs.values()), retain_graph=True, allow_unused=True)
        # Inside a bypassed first segment a gate has no gradient at all.
        probes.append([torch.zeros_like(i) if g is None else g for i, g in zip(inputs.values(), grads, strict=True)])
    stacked = [torch.stack(grads) for grads in zip(*probes, strict=True)]
    return {"y": y, "M": m, "z": z, **{f"grad {name}": g for name, g in zip(inputs, stacked, strict=True)}}


@functools.cache
def truth(rule: str, first: str, name: str) -> dict[str, torch.Tensor]:
    """The oracle's numbers for a case, in float64."""
    layer, x, extras = case(rule, first, **CASES[name])
    x = x.double().requires_grad_()
    if "write_weight_BT" in extras:
        extras["write_weight_BT"] = extras["write_weight_BT"].double()
    return {n: t.detach() for n, t in measured(layer, x, *oracle_layer(layer, x, **extras)).items()}


def combinations() -> list[Any]:
    """Every case, rule and first segment; the oracle of the longest takes many seconds, so three of four are slow."""
    found = []
    for name in CASES:
        for rule, first in (("linear", "local"), ("delta", "zero"), ("linear", "zero"), ("delta", "local")):
            marks = [pytest.mark.slow] if name == "2000" and (rule, first) != ("delta", "local") else []
            found.append(pytest.param(name, rule, first, marks=marks))
    return found


def in_dtypes() -> list[Any]:
    """Every combination in float64, by default every second one in each of the other formats."""
    found = []
    for number, case in enumerate(combinations()):
        for place, dtype in enumerate(DTYPES):
            slow = case.marks or (place and (number + place) % 2)
            name = f"{'-'.join(case.values)}-{str(dtype).removeprefix('torch.')}"
            found.append(pytest.param(*case.values, dtype, id=name, marks=[pytest.mark.slow] if slow else []))
    return found


@pytest.mark.parametrize("cuts", [[330], [7, 90, 233]], ids=["one-call", "cut"])
def test_a_long_window_is_read_in_parts(cuts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs, state and gradients, of calls that begin inside a segment too; each part is read again for gradients."""
    read, whole = [], relative.biased_attention

    def counting(q: torch.Tensor, k: torch.Tensor, *others: Any) -> torch.Tensor:
        read.append((q.shape[2], k.shape[2]))
        return whole(q, k, *others)

    monkeypatch.setattr(relative, "MAX_QUERIES", 64)
    monkeypatch.setattr(relative, "biased_attention", counting)
    layer, x, _ = case("delta", "local", **CASES["t5-long-segments"])
    layer, x = layer.double(), x.double().requires_grad_()
    y, state = layer_in_calls(layer, x[0], cuts)
    assert max(queries for queries, _ in read) == 64 < max(keys for _, keys in read)
    memory_after = state.layers[0].memory
    got = measured(layer, x, y[None], memory_after.m_BGKV, memory_after.z_BGK)
    for name, right in truth("delta", "local", "t5-long-segments").items():
        assert_close(got[name], right, TOLERANCE[torch.float64], name)


def compare_with_oracle(name: str, rule: str, first: str, dtype: torch.dtype) -> None:
    """Outputs, final state and gradients of a layer in one call."""
    layer, x, extras = case(rule, first, **CASES[name])
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    layer, x = layer.to(wide), x.to(wide).requires_grad_()
    with computing_in(dtype):
        y, state = layer(x, **extras)
        mem = state.layers[0].memory
        found = measured(layer, x, y.to(wide), *mem)
    assert mem.m_BGKV.dtype == mem.z_BGK.dtype == wide
    for what, expected in truth(rule, first, name).items():
        assert_close(found[what], expected, TOLERANCE[dtype], what)


@pytest.mark.parametrize(("name", "rule", "first", "dtype"), in_dtypes())
def test_fast_path_is_the_oracle(name: str, rule: str, first: str, dtype: torch.dtype) -> None:
    compare_with_oracle(name, rule, first, dtype)


def test_the_change_of_topic_amplifies() -> None:
    """The `topic` case tests Delta only if dz / z is far above 1."""
    layer, x, _ = case("delta", "local", **CASES["topic"])
    s = reference.sigma(layer.k_proj(x.double())).unflatten(1, (-1, layer.segment_length)).sum(2)
    ratio = (s[:, 1:] / s.cumsum(1)[:, :-1]).amax((0, 2))
    assert ratio[:2].max() < 10 and ratio[2] > 100, ratio.tolist()


def per_token(rule: str, first: str, q: Any, k: Any, v: Any, beta: Any, N: int, base: float) -> tuple[Any, Any]:
    """One row and head [T, K], token by token: relative rotary phases, explicit sums over past tokens."""
    T, K = q.shape
    half = K // 2
    frequency = base ** (-torch.arange(half, dtype=torch.float64) / half)
    qc, kc = torch.complex(q[:, :half], q[:, half:]), torch.complex(k[:, :half], k[:, half:])
    sq, sk = (torch.nn.functional.elu(x) + 1 for x in (q, k))
    written: list[torch.Tensor] = []  # what each past token bound to its key: v, or what Delta left of it
    out = []
    for t in range(T):
        start = t // N * N
        if t == start and t > 0:
            fresh = []
            for j in range(start - N, start):
                known = torch.zeros_like(v[j])
                if rule == "delta" and start > N:
                    share = torch.stack([sk[j] @ sk[i] for i in range(start - N)])
                    known = sum(w * b for w, b in zip(share, written, strict=True)) / share.sum()
                fresh.append(v[j] - known)
            written += fresh
        phase = [torch.polar(torch.ones(half).double(), (t - j) * frequency) for j in range(start, t + 1)]
        score = torch.stack([(qc[t] * kc[j].conj() * phase[j - start]).real.sum() for j in range(start, t + 1)])
        a_dot = torch.softmax(score / math.sqrt(K), 0) @ v[start : t + 1]
        if start == 0:
            out.append(a_dot if first == "local" else torch.sigmoid(-beta) * a_dot)
            continue
        share = torch.stack([sq[t] @ sk[i] for i in range(start)])
        a_mem = sum(w * b for w, b in zip(share, written, strict=True)) / share.sum()
        out.append(torch.sigmoid(beta) * a_mem + torch.sigmoid(-beta) * a_dot)
    return torch.stack(out), sum(torch.outer(sk[i], b) for i, b in enumerate(written))


@pytest.mark.parametrize("first", ["local", "zero"])
@pytest.mark.parametrize("rule", RULES)
def test_oracle_is_linear_attention_over_past_segments(rule: str, first: str) -> None:
    torch.manual_seed(0)
    N, T, K, V = 5, 23, 4, 3
    q, k, v = torch.randn(1, T, 1, K).double(), torch.randn(1, T, 1, K).double(), torch.randn(1, T, 1, V).double()
    beta = torch.tensor([0.7]).double()
    a, m, z = reference.infini_attention(
        q, k, v, beta, segment_length=N, update_rule=rule, first_segment=first, rope_base=100.0
    )
    expected, written = per_token(rule, first, q[0, :, 0], k[0, :, 0], v[0, :, 0], beta[0], N, 100.0)
    assert_close(a[0, :, 0], expected, 1e-12, "A")
    assert_close(m[0, 0], written, 1e-12, "M")
    assert_close(z[0, 0], (torch.nn.functional.elu(k[0, :20, 0]) + 1).sum(0), 1e-12, "z")


def random_memory(K: int, V: int, N: int = 7, sunk: float = 0.0) -> tuple[torch.Tensor, memory.Memory]:
    """sigma(K) of one segment [1, 1, 1, N, K] and a memory that earlier keys made; `sunk` moves the new keys away."""
    torch.manual_seed(0)
    shift = torch.where(torch.arange(K) < K // 2, sunk, -sunk)
    z = memory.sigma(torch.randn(1, 1, 20, K).double() + shift).sum(2)
    return memory.sigma(torch.randn(1, 1, 1, N, K).double() - shift), memory.Memory(torch.zeros(1, 1, K, V).double(), z)


@pytest.mark.parametrize("sunk", [0.0, 6.0])
def test_delta_takes_z_to_dz_exactly(sunk: float) -> None:
    """A_s z_{s-1} = dz_s: a memory that holds z as its values reads 1 under every key."""
    sk, mem = random_memory(6, 1, sunk=sunk)
    mem = mem._replace(m_BGKV=mem.z_BGK[..., None])
    _, last = memory.scan_sums(memory.TokenSums(sk, torch.zeros(1, 1, 1, 7, 1).double(), None), mem, rule="delta")
    assert_close(mem.m_BGKV - last.m_BGKV, sk[:, 0].sum(2)[..., None], 1e-12, "A z")


@pytest.mark.parametrize("segments", [1, 2, 7, 64])
def test_running_sums_at_once_are_those_one_after_the_other(segments: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values and gradients against additions that autograd differentiates; on a CPU only a test takes this path."""
    torch.manual_seed(0)
    x, probe = (torch.randn(2, segments, 3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    state = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    read, last = [], state
    for each in x.unbind(1):
        read.append(last)
        last = last + each
    expected = torch.stack(read, 1), last
    loss = (expected[0] * probe).sum() + (last * probe[:, 0]).sum()
    gradients = torch.autograd.grad(loss, (x, state))
    for at_once in (False, True):
        monkeypatch.setattr(memory, "_at_once", lambda x, kept, at_once=at_once: at_once and kept is None)
        got = memory._RunningSum.apply(x, state, None)
        for mine, theirs in zip(got, expected, strict=True):
            assert_close(mine, theirs, 1e-14, "sums")
        loss = (got[0] * probe).sum() + (got[1] * probe[:, 0]).sum()
        for mine, theirs in zip(torch.autograd.grad(loss, (x, state)), gradients, strict=True):
            assert_close(mine, theirs, 1e-14, "gradients")


@pytest.mark.parametrize("name", ["100", "weights", "resets"])
@pytest.mark.parametrize("rule", RULES)
def test_a_layer_with_running_sums_at_once_is_the_oracle(rule: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_at_once", lambda x, kept: kept is None)
    compare_with_oracle(name, rule, "local", torch.float64)


def test_running_sums_are_few_operators_on_other_devices() -> None:
    """Forward and backward over 64 segments: the host starts each operator of a GPU."""
    x = torch.empty(1, 64, 2, 3, device="meta", requires_grad=True)
    state = torch.empty(1, 2, 3, device="meta", requires_grad=True)
    with Calls() as calls:
        read, last = memory._RunningSum.apply(x, state, None)
        (read.sum() + last.sum()).backward()
    assert calls.operators < 30


@pytest.mark.parametrize("normaliser", ["previous", "current"])
def test_spectral_radius_after_a_change_of_topic(normaliser: Any) -> None:
    sk, mem = random_memory(6, 6, sunk=6.0)
    mem = mem._replace(m_BGKV=torch.eye(6).double()[None, None])
    zero = torch.zeros(1, 1, 1, 7, 6).double()
    _, last = memory.scan_sums(memory.TokenSums(sk, zero, None), mem, rule="delta", delta_normaliser=normaliser)
    radius = torch.linalg.eigvals(mem.m_BGKV - last.m_BGKV).abs().max().item()
    if normaliser == "current":
        assert radius <= 1 + 1e-12
    else:
        growth = sk[0, 0, 0].sum(0) / mem.z_BGK[0, 0]
        assert 100 < radius <= growth.max() * (1 + 1e-12)


@pytest.mark.parametrize("rule", RULES)
def test_a_repeated_binding_reads_back(rule: Any) -> None:
    """Linear reads v, however often it is written; Delta leaves M alone the second time, but z grows: v / 2."""
    torch.manual_seed(0)
    k, v = memory.sigma(torch.randn(1, 1, 1, 1, 4).double()), torch.randn(1, 1, 1, 1, 3).double()
    empty = memory.Memory(torch.zeros(1, 1, 4, 3).double(), torch.zeros(1, 1, 4).double())
    read, last = memory.scan_sums(
        memory.TokenSums(k.expand(1, 7, 1, 1, 4), v.expand(1, 7, 1, 1, 3), None), empty, rule=rule
    )
    m = torch.cat([read.m_BGKV[:, 1:], last.m_BGKV[:, None]], 1)
    z = torch.cat([read.z_BGK[:, 1:], last.z_BGK[:, None]], 1)
    numerator, denominator = memory.retrieve(k.expand(1, 7, 1, 1, 4), m, z)
    share = [1.0] + [1.0 if rule == "linear" else 0.5] * 6
    for n, part in enumerate(share):
        assert_close((numerator / denominator)[:, n], part * v[:, 0], 1e-14, f"after {n + 1} segments")
    if rule == "delta":
        assert_close(m[:, 1], m[:, 0], 1e-14, "M after the second segment")


@pytest.mark.parametrize("dtype", DTYPES)
def test_sigma_is_exact(dtype: torch.dtype) -> None:
    x = torch.tensor([-100.0, -40.0, -17.0, -5.0, -1e-3, 0.0, 1e-3, 5.0], dtype=dtype, requires_grad=True)
    wide = x.detach().to(state_dtype(dtype))
    y = memory.sigma(x)
    below = wide <= 0
    assert y.dtype == dtype
    assert torch.equal(y[below], wide.exp().to(dtype)[below])
    assert torch.equal(y[~below], (wide + 1).to(dtype)[~below])
    assert y[1] > 0
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(grad, torch.where(below, wide.exp(), torch.ones_like(wide)).to(dtype))


@pytest.mark.parametrize("first", [None, torch.tensor([True, False, False]).view(1, 3, 1, 1, 1)])
def test_gradients_of_the_normaliser_and_the_gate(first: Any) -> None:
    """Finite differences check first and second derivatives; a gradient penalty needs the second ones."""

    def draw(*shape: int) -> torch.Tensor:
        return (torch.rand(*shape, dtype=torch.float64) + 0.5).requires_grad_()

    torch.manual_seed(0)
    for function, inputs in (
        (memory.normaliser, (draw(1, 3, 2, 4, 5), draw(1, 3, 2, 5))),
        (
            lambda a, n, d, g: memory.gate(a, n, d, g, first, "zero"),
            (draw(1, 3, 4, 2, 5), draw(1, 3, 4, 2, 5), draw(1, 3, 4, 2, 1), draw(2, 1)),
        ),
    ):
        assert torch.autograd.gradcheck(function, inputs)
        assert torch.autograd.gradgradcheck(function, inputs)


def test_gradients_in_half_precision_survive_a_long_past() -> None:
    """After 100,000 tokens z is beyond float16, and the gradients are below it."""
    s = torch.rand(1, 1, 1, 4, 8, dtype=torch.float16, requires_grad=True)
    z = torch.full((1, 1, 1, 8), 1e5)
    (1.0 / memory.normaliser(s, z)).sum().backward()
    assert s.grad is not None and s.grad.isfinite().all()


def test_denominators_keep_the_precision_of_the_state_under_autocast() -> None:
    torch.manual_seed(0)
    sq, m, z = torch.rand(1, 1, 1, 5, 64).bfloat16(), torch.rand(1, 1, 1, 64, 4), torch.rand(1, 1, 1, 64)
    with computing_in(torch.bfloat16):
        _, denominator = memory.retrieve(sq, m, z)
    assert denominator.dtype == torch.float32
    assert_close(denominator.squeeze(), sq.double().squeeze() @ z.double().squeeze(), 1e-6, "denominator")


def test_rotary_is_a_complex_rotation() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 9, 3, 8).double()
    phase = torch.outer(torch.arange(5, 14).double(), 50.0 ** (-torch.arange(4).double() / 4))
    turned = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(phase), phase)[:, None]
    expected = torch.cat([turned.real, turned.imag], -1)
    assert_close(attention.rotate(x, 5, 50.0), expected, 1e-14, "fast")
    assert_close(reference.rotary(x[0, :, 0], 5, 50.0), expected[0, :, 0], 1e-14, "oracle")


@pytest.mark.parametrize("rule", RULES)
def test_memory_knows_no_positions(rule: str) -> None:
    """A wide open gate makes the output past the first segment independent of the rotary base; a shut one does not."""
    layer = make_layer(update_rule=rule)
    other = copy.deepcopy(layer)
    other.rope_base = 3.0
    x = torch.randn(2, 30, 12, generator=torch.Generator().manual_seed(0)).double()
    (_, a), (_, b) = set_gates(layer, 40)(x), set_gates(other, 40)(x)
    assert torch.equal(a.layers[0].memory.m_BGKV, b.layers[0].memory.m_BGKV)
    assert torch.equal(layer(x)[0][:, 8:], other(x)[0][:, 8:])
    assert not torch.allclose(set_gates(layer, -1)(x)[0][:, 8:], set_gates(other, -1)(x)[0][:, 8:])
