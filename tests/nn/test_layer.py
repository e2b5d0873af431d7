"""InfiniAttention's surface: signature, parameters, dtypes, errors that say the fix, padding, gates, states on disk."""

from __future__ import annotations

import inspect
import math
import re
from typing import Any, get_args

import pytest
import torch
from helpers import (
    SEGMENT,
    TOLERANCE,
    assert_close,
    assert_on,
    assert_same_state,
    bools,
    computing_in,
    make_layer,
    marks,
    tiny_dims,
)

from infini import InfiniAttention
from infini.errors import InputError
from infini.models import build_model
from infini.nn.attention import GateInit, LocalAttention
from infini.nn.ops import attention
from infini.nn.state import detach, fork, leaves, move, place_rows, select_rows


def inputs(n_rows: int, n_tokens: int, d_model: int = 12, seed: int = 0) -> torch.Tensor:
    return torch.randn(n_rows, n_tokens, d_model, generator=torch.Generator().manual_seed(seed)).double()


def test_signature() -> None:
    parameters = inspect.signature(InfiniAttention).parameters
    required = ["d_model", "n_heads", "d_key", "segment_length"]
    assert list(parameters)[:5] == [*required, "update_rule"]
    assert all(parameters[name].default is inspect.Parameter.empty for name in required)
    defaults = {"update_rule": "linear", "d_value": None, "n_kv_heads": None, "first_segment": "local"}
    assert {name: parameters[name].default for name in defaults} == defaults


def test_parameters() -> None:
    layer = InfiniAttention(12, 4, 6, 8, d_value=5, n_kv_heads=2)
    shapes = {name: tuple(p.shape) for name, p in layer.named_parameters()}
    assert shapes == {
        "beta": (4,),
        "q_proj.weight": (24, 12),
        "k_proj.weight": (12, 12),
        "v_proj.weight": (10, 12),
        "o_proj.weight": (12, 20),
    }
    assert layer.beta.dtype == torch.float32
    assert not list(layer.buffers())


@pytest.mark.parametrize("rule", ["linear", "delta"])
def test_an_input_gate_begins_without_effect(rule: str) -> None:
    layer, gated = (make_layer(update_rule=rule, n_kv_heads=2, input_gate=gate) for gate in (None, "sigmoid"))
    shapes = {name: tuple(p.shape) for name, p in gated.named_parameters() if name.startswith("input")}
    assert shapes == {"input_weight": (2, 6), "input_bias": (2,)}
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            gated.get_parameter(name).copy_(parameter)
    gated.reset_gate()
    gated.beta.data.copy_(layer.beta)
    x = inputs(1, 3 * layer.segment_length)
    (y, state), (expected, before) = gated(x), layer(x)
    assert_close(y, expected, TOLERANCE[torch.float64], "outputs: one factor for all tokens")
    assert_close(state.layers[0].memory.m_BGKV, before.layers[0].memory.m_BGKV / 2, TOLERANCE[torch.float64], "M")


@pytest.mark.parametrize("rule", ["linear", "delta"])
def test_an_input_gate_gives_keys_of_zeros_no_gradient(rule: str) -> None:
    """They have no direction. Divided by almost 0 instead, the gradient was 10^9 times that without a gate."""
    x = inputs(1, 3 * SEGMENT).float()
    x[:, 2:5] = 0
    found = []
    for gate in (None, "sigmoid"):
        layer = make_layer(update_rule=rule, input_gate=gate).float()
        given = x.clone().requires_grad_()
        layer(given)[0].square().sum().backward()
        found.append(given.grad.abs().max().item())
        assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())
    assert found[1] < 100 * found[0]
    zeros = torch.zeros(1, 1, 2, layer.d_key)
    assert torch.equal(layer.write_weights(zeros)[0, 0], torch.sigmoid(layer.input_bias))


@pytest.mark.parametrize("half", ["autocast", "weights"])
def test_state_is_float32_beside_bfloat16(half: str) -> None:
    """This holds under autocast, and with bfloat16 weights for all but the gate."""
    layer = make_layer().float()
    x = inputs(1, 29).float()
    expected, _ = layer(x)
    if half == "weights":
        beta = layer.beta.data
        layer.bfloat16().beta.data = beta
        x = x.bfloat16()
    with computing_in(torch.bfloat16 if half == "autocast" else torch.float32):
        y, state = layer(x)
        y2, state = layer(x, state)
    assert y.dtype == torch.bfloat16
    assert {leaf.dtype for path, leaf in leaves(state.layers) if "memory" in path} == {torch.float32}
    assert_close(y, expected, TOLERANCE[torch.bfloat16], "y")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"update_rule": "quadratic"}, ("update_rule='quadratic'", "linear, delta")),
        ({"first_segment": "none"}, ("first_segment='none'", "local, zero")),
        ({"gate_init": "ones"}, ("gate_init='ones'", *get_args(GateInit))),
        ({"delta_normaliser": "next"}, ("delta_normaliser='next'", "previous, current")),
        *(({"memory_decay": wrong}, (f"memory_decay={wrong!r}", "at least 1")) for wrong in (0.5, math.inf, "x", True)),
        ({"input_gate": "relu"}, ("input_gate='relu'", "None, sigmoid")),
        ({"attention_scale": "d"}, ("attention_scale='d'", "d_key", "d_model")),
        ({"n_kv_heads": 3}, ("n_kv_heads=3", "divide n_heads=4")),
        ({"n_kv_heads": 0}, ("n_kv_heads=0",)),
        ({"d_key": 5}, ("d_key=5", "even")),
        *(({name: 0}, (f"{name}=0", "at least 1")) for name in ("segment_length", "d_model", "n_heads", "d_key")),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as error:
        InfiniAttention(**{"d_model": 12, "n_heads": 4, "d_key": 6, "segment_length": 8, **options})
    assert all(word in str(error.value) for word in words), error.value


def test_a_wrong_batch_size_names_the_fix() -> None:
    layer = make_layer()
    state = layer.init_state(2)
    with pytest.raises(ValueError, match=r"batch size 4, state has 2: pass a fresh init_state\(4\)"):
        layer(inputs(4, 3), state)
    with pytest.raises(ValueError, match="at least one token"):
        layer(inputs(2, 0), state)
    with pytest.raises(ValueError, match=r"mask_BT has shape \(2, 4\), the call \(2, 3\)"):
        layer(inputs(2, 3), state, mask_BT=bools([[1] * 4] * 2))


@pytest.mark.parametrize("shape", [(7, 16), (2, 7, 8), (16,), (1, 2, 7, 16)])
def test_an_input_of_another_shape_names_the_right_one(shape: tuple[int, ...]) -> None:
    for layer in (InfiniAttention(16, 2, 8, 4), LocalAttention(16, 2, 8, 4)):
        with pytest.raises(ValueError, match=re.escape(f"x must be [B, T, d_model=16], got {list(shape)}")):
            layer(torch.randn(shape))


def test_a_reset_off_the_grid_names_row_and_column() -> None:
    layer = make_layer()
    with pytest.raises(ValueError, match="row 1, column 9: .*8 tokens"):
        layer(inputs(2, 20), reset_BT=bools([[0] * 20, [0] * 9 + [1] + [0] * 10]))


def test_a_hole_in_the_mask_names_row_and_column() -> None:
    layer = make_layer()
    with pytest.raises(ValueError, match="row 0, column 4: .*padding"):
        layer(inputs(2, 6), mask_BT=bools([[1, 1, 1, 0, 1, 1], [1] * 6]))
    with pytest.raises(ValueError, match="row 1, column 2: .*padding"):
        layer(inputs(2, 6), mask_BT=bools([[1] * 6, [1, 1, 0, 0, 0, 0]]), reset_BT=bools([[0] * 6, [0, 0, 1, 0, 0, 0]]))


def test_errors_name_the_callers_row_and_column() -> None:
    """This includes rows that were rolled for left padding, and rows in groups because their slots differ."""
    layer = make_layer()
    with pytest.raises(ValueError, match="row 1, column 5"):
        layer(inputs(2, 8), mask_BT=bools([[1] * 8, [0, 0, 1, 1, 0, 1, 1, 1]]))
    _, state = layer(inputs(2, 5), mask_BT=bools([[1, 1, 1, 0, 0], [1] * 5]))
    for row in (0, 1):
        reset = torch.zeros(2, 4, dtype=torch.bool)
        reset[row, 1] = True
        with pytest.raises(ValueError, match=f"row {row}, column 1"):
            layer(inputs(2, 4), state, reset_BT=reset)


@pytest.mark.parametrize("rule", ["linear", "delta"])
def test_training_with_left_padding_is_training_without(rule: str) -> None:
    layer = make_layer(update_rule=rule)
    T, pads = 21, [0, 4, 11]
    x, probe = inputs(3, T), inputs(3, T, seed=1)
    mask = torch.arange(T) >= torch.tensor(pads)[:, None]
    y, _ = layer(x, mask_BT=mask)
    together = torch.autograd.grad((y * probe * mask[..., None]).sum(), list(layer.parameters()))
    apart = []
    for row, pad in enumerate(pads):
        y, _ = layer(x[row : row + 1, pad:])
        apart.append(torch.autograd.grad((y * probe[row : row + 1, pad:]).sum(), list(layer.parameters())))
    for grad, *rows in zip(together, *apart, strict=True):
        assert_close(grad, sum(rows), TOLERANCE[torch.float64], "gradient")


@pytest.mark.parametrize("rule", ["linear", "delta"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_padding_that_is_no_number_reaches_nothing(rule: str, value: float) -> None:
    """Beside a column that is masked by a weight of 0 a product would still be no number."""
    layer = make_layer(update_rule=rule)
    mask = torch.ones(3, 21, dtype=torch.bool)
    mask[0, :5] = mask[1, 18:] = False
    results = []
    for padding in (0.0, value):
        x = inputs(3, 21).masked_fill(~mask[..., None], padding).requires_grad_()
        y, state = layer(x, mask_BT=mask)
        grads = torch.autograd.grad(y[mask].square().sum(), [x, *layer.parameters()])
        results.append([y[mask], *grads, *dict(leaves(state)).values()])
    for finite, other in zip(*results, strict=True):
        assert torch.equal(finite, other)


@pytest.mark.parametrize("extra", ["none", "mask", "reset", "both"])
def test_a_batch_without_rows_gives_no_rows(extra: str) -> None:
    layer, marked = make_layer(), torch.ones(0, 9, dtype=torch.bool)
    y, state = layer(
        inputs(0, 9),
        mask_BT=marked if extra in ("mask", "both") else None,
        reset_BT=~marked if extra in ("reset", "both") else None,
    )
    assert y.shape == (0, 9, 12) and all(len(leaf) == 0 for _, leaf in leaves(state))


@pytest.mark.parametrize("gate_init", get_args(GateInit))
def test_every_gate_receives_a_gradient(gate_init: Any) -> None:
    layer = InfiniAttention(12, 4, 6, 8, gate_init=gate_init)
    layer(inputs(1, 16).float())[0].square().sum().backward()
    assert layer.beta.grad is not None and bool((layer.beta.grad.abs() > 1e-6).all())


def test_gate_initialisations() -> None:
    assert InfiniAttention(12, 4, 6, 8, gate_init="zeros").beta.tolist() == [0.0] * 4
    assert InfiniAttention(12, 4, 6, 8, gate_init="local").beta.tolist() == [-2.0] * 4
    assert torch.allclose(InfiniAttention(12, 5, 6, 8, gate_init="spread").beta, torch.tensor([-2.0, -1, 0, 1, 2]))
    assert InfiniAttention(12, 4, 6, 8, gate_init="normal").beta.unique().numel() == 4


@pytest.mark.parametrize("scale", ["d_key", "d_model"])
def test_attention_scale(scale: Any) -> None:
    """1 / sqrt(d_key) by default, what the paper prints by name: the score of slot 1 on slot 0, by hand."""
    layer = LocalAttention(4, 1, 2, 8, attention_scale=scale, rope_base=10.0).double()
    x = inputs(1, 2, 4)
    q, k, v = (projection(x)[0] for projection in (layer.q_proj, layer.k_proj, layer.v_proj))
    one = torch.tensor(1.0).double()
    turn = torch.stack([torch.stack([one.cos(), -one.sin()]), torch.stack([one.sin(), one.cos()])])
    score = torch.stack([turn @ q[1] @ k[0], q[1] @ k[1]]) / {"d_key": 2, "d_model": 4}[scale] ** 0.5
    assert_close(layer(x)[0][0, 1], layer.o_proj(torch.softmax(score, 0) @ v), 1e-12, "y")


def test_state_is_forked_selected_and_detached() -> None:
    layer = make_layer()
    x = inputs(3, 21).requires_grad_()
    _, state = layer(x)
    assert any(leaf.requires_grad for _, leaf in leaves(state))
    assert not any(leaf.requires_grad for _, leaf in leaves(detach(state)))
    copied = fork(detach(state))
    for _, leaf in leaves(copied):
        leaf.zero_()
    assert all(leaf.any() for path, leaf in leaves(state) if "memory" in path)
    rows = torch.tensor([2, 0])
    chosen = select_rows(state, rows)
    assert_same_state(select_rows(place_rows(copied, rows, chosen), rows), chosen, 0.0)
    more = inputs(3, 5, seed=1)
    assert_close(layer(more[rows], chosen)[0], layer(more, state)[0][rows], TOLERANCE[torch.float64], "chosen rows")
    assert_on(move(state, "meta"), "meta")


def test_a_fresh_state_is_no_state() -> None:
    layer = make_layer()
    x = inputs(2, 11)
    (y, state), (y2, state2) = layer(x), layer(x, layer.init_state(2))
    assert torch.equal(y, y2)
    assert_same_state(state, state2, 0.0)
    with pytest.raises(ValueError, match="column 3"):
        layer(x, reset_BT=marks(2, 11, 3))


@pytest.mark.parametrize("name", ["local", "full", "infini_linear", "infini_delta", "rmt", "autocompressor"])
@pytest.mark.parametrize("base", [0, -3.0, float("nan"), float("inf")])
def test_a_base_that_gives_no_rotary_positions_is_refused(name: str, base: float) -> None:
    with pytest.raises(InputError, match=f"^model.rope_base={base}: must be a finite number, at least 1$"):
        build_model({"name": name, "rope_base": base}, tiny_dims(), 31)


def test_unknown_model_options_are_named() -> None:
    for options, words in (
        ({"name": "infini"}, ("model=infini", "infini_linear")),
        ({"name": "local", "gate_init": "zeros"}, ("model.gate_init='zeros'", "rope_base")),
        ({"name": "infini_linear", "first_segment": "no"}, ("model.first_segment='no'", "local, zero")),
        ({"name": "full", "window_segments": 0}, ("window_segments=0", "at least 1")),
        ({"name": "local", "tie_embeddings": "yes"}, ("model.tie_embeddings='yes'", "true or false")),
    ):
        with pytest.raises(ValueError) as error:
            build_model(options, tiny_dims(), 31)
        assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize("amx", [True, False])
@pytest.mark.parametrize(
    ("length", "trained"), [(16, True), (32, True), (128, True), (128, False), (256, True), (512, True)]
)
def test_short_segments_are_not_attended_in_bfloat16_by_the_fused_kernel(
    amx: bool, length: int, trained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fused backward pass of short segments is several times slower in bfloat16 on a processor."""
    taken: list[torch.dtype] = []
    fused = attention.F.scaled_dot_product_attention

    def spy(q: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        taken.append(q.dtype)
        return fused(q, *args, **options)

    monkeypatch.setattr(attention, "HAS_AMX", amx)
    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", spy)
    q, k, v = (torch.randn(1, 2, length, 2, 8).bfloat16() for _ in range(3))
    q.requires_grad_(trained)
    with torch.autocast("cpu", torch.bfloat16):
        a = attention.local_attention(q, k, v, scale=0.3, rope_base=10000.0)
    short = length <= 128 and trained if amx else length <= 256
    own = short and trained and length >= 32
    assert taken == ([] if own else [torch.float32 if short else torch.bfloat16])
    assert a.dtype == torch.bfloat16
    with torch.no_grad():
        assert_close(a, attention.local_attention(q, k, v, scale=0.3, rope_base=10000.0), 0.02, "output")


def grouped_inputs(length: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Queries of four heads, keys and values of two, values wider than keys, and a gradient of the output."""
    generator = torch.Generator().manual_seed(length)
    shapes = ((2, 3, length, 4, 8), (2, 3, length, 2, 8), (2, 3, length, 2, 12), (2, 3, length, 4, 12))
    # Numbers that bfloat16 holds, in any dtype.
    return [torch.randn(shape, generator=generator).bfloat16().to(dtype) for shape in shapes]


@pytest.mark.parametrize("length", [32, 128])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.bfloat16, 0.02)])
def test_attention_of_short_segments_in_training_is_the_fused_kernels(
    length: int, dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs and gradients, in the dtype that it is for to that dtype's rounding, and in float64 to float64's."""

    def run(dtype: torch.dtype) -> list[torch.Tensor]:
        *operands, gradient = grouped_inputs(length, dtype)
        leaves = [x.requires_grad_() for x in operands]
        a = attention.local_attention(*leaves, scale=0.3, rope_base=10000.0)
        return [a, *torch.autograd.grad(a, leaves, gradient)]

    expected = run(torch.float64)
    monkeypatch.setattr(attention, "SLOW_DTYPE", dtype)
    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", None)
    for given, wanted in zip(run(dtype), expected, strict=True):
        assert given.dtype == dtype
        assert_close(given.double(), wanted, tolerance, "output or gradient")
