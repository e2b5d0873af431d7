"""Options and surface of the layer: biases and norms against the oracle, help, repr, states and torch.compile."""

from __future__ import annotations

import inspect
import math
import pydoc
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import SEGMENT, TOLERANCE, assert_close, assert_on, assert_same_state, layer_in_calls, make_layer
from torch import nn

import infini
from infini import InfiniAttention, LocalAttention, load_state, save_state
from infini.nn.ops import reference
from infini.nn.recurrent import PrefixAttention
from infini.nn.state import leaves, state_bytes

EXACT = TOLERANCE[torch.float64]


def inputs(n_rows: int, n_tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n_rows, n_tokens, 12, generator=torch.Generator().manual_seed(seed)).double()


def oracle(layer: Any, x_BTD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """y, M and z by the oracle, with biases and norms written out."""

    def heads(projection: nn.Linear, size: int, norm: nn.RMSNorm | None = None) -> torch.Tensor:
        x = x_BTD @ projection.weight.T
        x = (x if projection.bias is None else x + projection.bias).unflatten(-1, (-1, size))
        return x if norm is None else x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight

    a_BTHV, m, z = reference.infini_attention(
        heads(layer.q_proj, layer.d_key, layer.q_norm),
        heads(layer.k_proj, layer.d_key, layer.k_norm),
        heads(layer.v_proj, layer.d_value),
        layer.beta,
        segment_length=layer.segment_length,
        update_rule=layer.update_rule,
    )
    y = a_BTHV.flatten(2) @ layer.o_proj.weight.T
    return (y if layer.o_proj.bias is None else y + layer.o_proj.bias), m, z


@pytest.mark.parametrize("rule", ["linear", "delta"])
@pytest.mark.parametrize(
    "options",
    [{"qkv_bias": True}, {"out_bias": True}, {"qk_norm": True}, {"qkv_bias": True, "out_bias": True, "qk_norm": True}],
    ids=lambda options: "-".join(options),
)
def test_biases_and_norms_are_those_of_the_oracle(options: dict[str, bool], rule: str) -> None:
    """Outputs, gradients of inputs and parameters, and state, in one call and in several."""
    layer = make_layer(update_rule=rule, n_kv_heads=1, d_value=5, **options)
    x = inputs(1, 29).requires_grad_()
    y, m, z = oracle(layer, x)
    parameters = [x, *layer.parameters()]
    assert len(parameters) == 6 + 3 * ("qkv_bias" in options) + ("out_bias" in options) + 2 * ("qk_norm" in options)
    probes = [inputs(1, 29, seed=1), *(torch.randn(t.shape).double() for t in (m, z))]
    wanted = torch.autograd.grad([y, m, z], parameters, probes)
    for lengths in ([29], [3, 11, 1]):
        got_TD, state = layer_in_calls(layer, x[0], lengths)
        memory = state.layers[0].memory
        for name, got, right in (("y", got_TD[None], y), ("M", memory.m_BGKV, m), ("z", memory.z_BGK, z)):
            assert_close(got, right, EXACT, name)
        grads = torch.autograd.grad([got_TD[None], *memory], parameters, probes, retain_graph=True)
        for number, (got, right) in enumerate(zip(grads, wanted, strict=True)):
            assert_close(got, right, EXACT, f"gradient {number}")


def test_a_layer_that_uses_plain_matrices_refuses_biases_and_norms() -> None:
    with pytest.raises(ValueError, match="qkv_bias=True, qk_norm=False: PrefixAttention has neither"):
        PrefixAttention(12, 2, 6, 8, qkv_bias=True)


@pytest.mark.parametrize("kind", [InfiniAttention, LocalAttention])
def test_help_explains_every_argument(kind: type) -> None:
    text = pydoc.render_doc(kind, renderer=pydoc.plaintext)
    arguments = text.split("Args:")[1]
    for name in inspect.signature(kind).parameters:
        assert re.search(rf"^ \|\s+{name}: \S", arguments, re.MULTILINE), name
    assert "[B, T, D]" in text and "state: the state that the previous call returned" in text


def test_repr_shows_sizes_and_options() -> None:
    first, *_ = repr(InfiniAttention(12, 4, 6, 8, "delta", n_kv_heads=2)).splitlines()[1:]
    assert first.strip() == (
        "d_model=12, n_heads=4, n_kv_heads=2, d_key=6, d_value=6, segment_length=8, positions='rotary', "
        "update_rule='delta', first_segment='local'"
    )
    assert "update_rule" not in repr(LocalAttention(12, 4, 6, 8))
    added = InfiniAttention(12, 4, 6, 8, memory_decay=9, input_gate="sigmoid")
    assert repr(added).splitlines()[1].endswith(", memory_decay=9, input_gate='sigmoid'")
    other = InfiniAttention(
        12, 4, 6, 8, "delta", delta_normaliser="current", rope_base=5e5, attention_scale="d_model"
    ).extra_repr()
    assert "positions='rotary', rope_base=500000.0, attention_scale='d_model', update_rule" in other
    assert other.endswith(", delta_normaliser='current'")


def test_half_lives_are_spread_from_one_segment_to_the_longest() -> None:
    """A model with one key-value head, as small Gemmas are, has the longest."""
    for heads, expected in ((1, [64.0]), (2, [1.0, 64.0]), (4, [1.0, 4.0, 16.0, 64.0])):
        layer = InfiniAttention(24, 4, 6, 8, n_kv_heads=heads, memory_decay=64.0).double()
        half_lives = math.log(0.5) / torch.log(torch.sigmoid(layer.decay))
        assert half_lives.tolist() == pytest.approx(expected, rel=1e-4)


def test_public_names_are_loaded_when_they_are_used() -> None:
    assert {"InfiniAttention", "State", "load_state", "save_state"} <= set(infini.__all__) <= set(dir(infini))
    for name in infini.__all__:
        assert getattr(infini, name).__doc__, name


def test_a_detached_state_cuts_gradients_and_keeps_values() -> None:
    """Training over chunks: each chunk's gradient is that of a call from a state without history."""
    layer = make_layer(update_rule="delta")
    x = inputs(2, 40).requires_grad_()
    _, state = layer(x[:, :21])
    cut = state.detach()
    assert_same_state(cut, state, 0.0)
    assert any(leaf.requires_grad for _, leaf in leaves(state))
    assert not any(leaf.requires_grad for _, leaf in leaves(cut))
    assert cut.clock.slot == state.clock.slot == 21 % layer.segment_length
    y, _ = layer(x[:, 21:], cut)
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert not grad[:, :21].any() and bool(grad[:, 21:].any())
    moved = state.to("meta")
    assert_on(moved, "meta")
    assert moved.clock.slot == state.clock.slot


@pytest.mark.parametrize("rule", ["linear", "delta"])
def test_state_is_saved_and_loaded(rule: str, tmp_path: Path) -> None:
    layer, path = make_layer(update_rule=rule), tmp_path / "state.pt"
    # A whole number of segments leaves the windows as they were made.
    for rows, n_tokens in ((1, 21), (2, 21), (1, 2 * layer.segment_length)):
        _, state = layer(inputs(rows, n_tokens))
        save_state(state, path)
        more = inputs(rows, 13, seed=1)
        wanted = layer(more, state)[0]
        torch.save(state, tmp_path / "tree.pt")
        for loaded in (load_state(layer.init_state(rows), path), torch.load(tmp_path / "tree.pt", weights_only=True)):
            assert_same_state(loaded, state, 0.0)
            assert torch.equal(layer(more, loaded)[0], wanted)
    with pytest.raises(ValueError, match=r"state.pt: not a state of this batch size: it has 1 rows, here are 3$"):
        load_state(layer.init_state(3), path)
    with pytest.raises(ValueError, match=r"state.pt: not a state .*: clock.weight_BN is \[1, 8\], here \[1, 4\]$"):
        load_state(make_layer(update_rule=rule, segment=4).init_state(1), path)
    allowed = r"it must be a state, for example layer\.init_state\(batch_size\)$"
    with pytest.raises(ValueError, match=f"^like is a str: {allowed}"):
        load_state(str(path), layer.init_state(1))  # type: ignore[arg-type]
    torch.save([1, 2], path)
    with pytest.raises(ValueError, match=r"state.pt: was not written by save_state"):
        load_state(layer.init_state(1), path)


def test_a_slot_that_rows_may_not_share_is_not_kept() -> None:
    """It is None if rows differ or may differ, and the tensor is read."""
    layer = make_layer()
    _, state = layer(inputs(2, 21))
    assert state.clock.slot == 5 and layer(inputs(2, 11), state)[1].clock.slot == 0
    mask = torch.ones(2, 21, dtype=torch.bool)
    mask[1, 19:] = False
    _, ragged = layer(inputs(2, 21), mask_BT=mask)
    assert ragged.clock.slot is None and ragged.clock.slot_B.tolist() == [5, 3]
    reset = torch.zeros(2, 9, dtype=torch.bool)
    reset[1, 0] = True
    assert layer(inputs(2, 9), state, reset_BT=reset)[1].clock.slot is None


COMPILED = [
    pytest.param({"update_rule": "linear"}, 16, "eager", marks=pytest.mark.slow),
    pytest.param({"update_rule": "linear"}, 16, "aot_eager", marks=pytest.mark.slow),
    ({"update_rule": "delta", "qkv_bias": True, "qk_norm": True}, 16, "eager"),
    pytest.param({"update_rule": "delta"}, 11, "eager", marks=pytest.mark.slow),
    pytest.param({"memory_decay": 100.0, "input_gate": "sigmoid"}, 16, "eager", marks=pytest.mark.slow),
    pytest.param({"positions": "t5"}, 8, "eager", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("rule", [pytest.param("linear", marks=pytest.mark.slow), "delta"])
def test_the_layer_compiles_to_one_graph_in_bfloat16(rule: str) -> None:
    """Autocast makes the layer ask which products the processor has, which a graph cannot do."""
    torch._dynamo.reset()
    layer = make_layer(update_rule=rule).float()
    compiled = torch.compile(layer, fullgraph=True, dynamic=False, backend="eager")
    x = inputs(2, 16).float()
    with torch.autocast("cpu", torch.bfloat16), warnings.catch_warnings():
        # A cached table of rotary positions would cause this warning.
        warnings.filterwarnings("error", message="Dynamo detected")
        assert torch.equal(compiled(x)[0], layer(x)[0])


@pytest.mark.parametrize(("options", "n_tokens", "backend"), COMPILED)
def test_the_layer_compiles_to_one_graph(options: dict[str, Any], n_tokens: int, backend: str) -> None:
    """fullgraph=True, from no state and from a carried one: outputs, state and gradients of the plain layer. Chunks of
    11 tokens leave segments of 8 unfinished: each slot gets a graph of its own."""
    torch._dynamo.reset()
    layer = make_layer(**options)
    compiled = torch.compile(layer, fullgraph=True, dynamic=False, backend=backend)
    x, probe = inputs(2, 2 * n_tokens), inputs(2, 2 * n_tokens, seed=1)

    def run(call: Any) -> tuple[torch.Tensor, Any, list[torch.Tensor]]:
        outputs, state = [], None
        for chunk in x.split(n_tokens, 1):
            y, state = call(chunk, state)
            outputs.append(y)
        y = torch.cat(outputs, 1)
        return y, state, list(torch.autograd.grad((y * probe).sum(), list(layer.parameters())))

    (y, state, grads), (wanted, wanted_state, wanted_grads) = run(compiled), run(layer)
    assert_close(y, wanted, EXACT, "y")
    assert_same_state(state, wanted_state, EXACT)
    for number, (got, right) in enumerate(zip(grads, wanted_grads, strict=True)):
        assert_close(got, right, EXACT, f"gradient {number}")


@pytest.mark.parametrize("sizes", [{"segment": 2 * SEGMENT}, {"segment": SEGMENT // 2}, {"n_heads": 4}, {"d_key": 8}])
def test_a_state_of_another_layer_is_refused(sizes: dict[str, int]) -> None:
    """Another segment length would give wrong outputs without an error."""
    layer = make_layer()
    x = torch.randn(2, 5, layer.d_model, dtype=torch.float64)
    _, state = make_layer(**sizes)(x)
    with pytest.raises(
        ValueError, match=r"^state of another layer: for one row, .* is \[.*\], here \[.*\]; pass one of this layer"
    ):
        layer(x, state)
    local = LocalAttention(layer.d_model, 2, 6, SEGMENT).double()
    with pytest.raises(ValueError, match="state of another layer: .* here missing"):
        local(x, layer(x)[1])


@pytest.mark.parametrize("wrong", [torch.zeros(1), None], ids=["a tensor", "a call's outputs"])
def test_what_is_no_state_is_refused(wrong: Any) -> None:
    layer = make_layer()
    x = torch.randn(2, 5, layer.d_model, dtype=torch.float64)
    with pytest.raises(ValueError, match="it must be the second value that a call returned"):
        layer(x, layer(x) if wrong is None else wrong)


def test_a_state_that_is_printed_says_how_much_it_has_read() -> None:
    layer = make_layer()
    _, state = layer(inputs(2, 21))
    assert repr(state) == f"State(rows that have read [21, 21] tokens, 1 layer, {state_bytes(state):,} bytes)"
    assert state.nbytes() == state_bytes(state)
    assert repr(state.to("meta")) == repr(state)


@pytest.mark.parametrize("wrong", [None, 3.5, "state", (), torch.nn.Linear(1, 1)])
def test_what_is_no_state_is_not_saved(wrong: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"^state is a {type(wrong).__name__}: it must be the second value that a"):
        save_state(wrong, tmp_path / "state.pt")
    assert not list(tmp_path.iterdir())


def test_inputs_of_another_dtype_are_refused_by_name() -> None:
    layer = make_layer()
    with pytest.raises(ValueError, match=r"^x is torch.float32, the layer torch.float64: convert one of them, or use"):
        layer(inputs(1, 5).float())
    with pytest.raises(ValueError, match=r"^x is torch.int64, the layer"), torch.autocast("cpu", torch.bfloat16):
        layer(inputs(1, 5).long())
    for name in ("mask_BT", "reset_BT"):
        with pytest.raises(ValueError, match=rf"^{name} is torch.float64: it must be torch.bool"):
            layer(inputs(1, 5), **{name: torch.ones(1, 5).double()})


@pytest.mark.parametrize("tokens", [6, 8, 12])
def test_every_parameter_has_a_gradient_whatever_the_length(tokens: int) -> None:
    """0 where nothing read depends on it: DistributedDataParallel takes None for an error."""
    layer = make_layer(memory_decay=4.0, input_gate="sigmoid")
    layer(inputs(2, tokens))[0].square().sum().backward()
    assert [name for name, parameter in layer.named_parameters() if parameter.grad is None] == []


@pytest.mark.parametrize("size", [2.5, 0, "8"])
def test_sizes_are_whole_numbers(size: Any) -> None:
    with pytest.raises(ValueError, match=f"^segment_length={size!r}: must be a whole number, at least 1"):
        InfiniAttention(12, 2, 6, size)
