"""Large layers on a processor are computed in blocks (infini/nn/ops/blocks.py), with the same outputs, states and
gradients, and without holding what the memory adds for a whole sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import SEGMENT, assert_close, assert_same_state, bools, make_layer

from infini.nn.attention import LocalAttention
from infini.nn.ops import attention, blocks

SHAPES: list[dict[str, Any]] = [
    {"update_rule": "linear"},
    {"update_rule": "linear", "n_heads": 4, "n_kv_heads": 2, "d_value": 5, "first_segment": "zero"},
    {"update_rule": "delta", "n_heads": 4, "n_kv_heads": 1},
    {"update_rule": "delta", "delta_normaliser": "current", "d_value": 3, "qk_norm": True},
    {"update_rule": "linear", "memory_decay": 100.0},
    {"update_rule": "linear", "n_heads": 4, "n_kv_heads": 2, "input_gate": "sigmoid"},
    {"update_rule": "delta", "n_heads": 4, "n_kv_heads": 2, "input_gate": "sigmoid"},
]
ROW_LENGTH = 4 * SEGMENT + 1
WEIGHTS = torch.linspace(0, 2, 2 * ROW_LENGTH, dtype=torch.float64).view(2, -1)
RESETS = bools([[int(column == at) for column in range(ROW_LENGTH)] for at in (SEGMENT, 2 * SEGMENT)])
EXTRAS: list[dict[str, Any]] = [{}, {"write_weight_BT": WEIGHTS}, {"reset_BT": RESETS}]


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for module, name, value in ((blocks, "SMALLEST_BLOCK", 1), (blocks, "SMALLEST_TENSOR", 1), (attention, "LARGE", 1)):
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(attention, "ROWS", 3)
    return monkeypatch


def read(layer: Any, x: torch.Tensor, **extras: Any) -> tuple[torch.Tensor, Any, list[torch.Tensor]]:
    """Outputs, state, and gradients of the input and all parameters, of which the state has a part."""
    x = x.clone().requires_grad_()
    first, state = layer(x[:, : SEGMENT + 1], **{name: value[:, : SEGMENT + 1] for name, value in extras.items()})
    rest, state = layer(x[:, SEGMENT + 1 :], state, **{name: value[:, SEGMENT + 1 :] for name, value in extras.items()})
    y = torch.cat([first, rest], 1)
    loss = (y * torch.arange(y.numel()).view(y.shape).sin()).sum() + state.layers[0].memory.m_BGKV.sin().sum()
    return y, state, list(torch.autograd.grad(loss, [x, *layer.parameters()]))


@pytest.mark.parametrize("extras", EXTRAS, ids=lambda extras: next(iter(extras), "plain"))
@pytest.mark.parametrize("options", SHAPES, ids=lambda options: " ".join(map(str, options.values())))
def test_blocks_change_nothing(
    small_blocks: pytest.MonkeyPatch, options: dict[str, Any], extras: dict[str, Any]
) -> None:
    layer = make_layer(**options).double()
    x = torch.randn(2, ROW_LENGTH, layer.d_model, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    y, state, gradients = read(layer, x, **extras)
    small_blocks.undo()
    wanted, wanted_state, wanted_gradients = read(layer, x, **extras)
    assert_close(y, wanted, 1e-12, "outputs")
    assert_same_state(state, wanted_state, 1e-12)
    for name, got, expected in zip(["x", *dict(layer.named_parameters())], gradients, wanted_gradients, strict=True):
        assert_close(got, expected, 1e-10, f"gradient of {name}")


def test_write_weights_have_a_gradient(small_blocks: pytest.MonkeyPatch) -> None:
    layer = make_layer(update_rule="delta").double()
    x = torch.randn(2, ROW_LENGTH, layer.d_model, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    weights = WEIGHTS.clone().requires_grad_()

    def gradient() -> torch.Tensor:
        y, _ = layer(x, write_weight_BT=weights)
        return torch.autograd.grad(y.sin().sum(), weights)[0]

    got = gradient()
    small_blocks.undo()
    assert_close(got, gradient(), 1e-10, "gradient of the write weights")


@pytest.mark.parametrize("rule", ["linear", "delta"])
def test_blocks_under_autocast(small_blocks: pytest.MonkeyPatch, rule: str) -> None:
    # Against float64, blocks are not further away than the whole tensor at once.
    layer = make_layer(update_rule=rule).double()
    x = torch.randn(2, ROW_LENGTH, layer.d_model, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    exact, _, exact_gradients = read(layer, x)
    layer.float()

    def errors() -> tuple[torch.Tensor, torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            y, _, gradients = read(layer, x.float())
        return (y - exact).norm() / exact.norm(), (gradients[0] - exact_gradients[0]).norm() / exact_gradients[0].norm()

    in_blocks = errors()
    small_blocks.undo()
    for ours, whole in zip(in_blocks, errors(), strict=True):
        assert ours < 1.1 * whole < 0.1


@pytest.mark.parametrize("rule", ["linear", "delta"])
def test_no_sigma_is_held_for_the_backward_pass(small_blocks: pytest.MonkeyPatch, rule: str) -> None:
    def held(layer: Any) -> int:
        """Bytes that a call leaves for the backward pass, besides its parameters."""
        own = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}
        found: dict[int, int] = {}

        def note(x: torch.Tensor) -> torch.Tensor:
            storage = x.untyped_storage()
            if storage.data_ptr() not in own:
                found[storage.data_ptr()] = storage.nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            outputs = layer(torch.ones(1, 4 * 256, 32))
        assert outputs[0].requires_grad
        return sum(found.values())

    sizes: dict[str, Any] = {"d_model": 32, "n_heads": 2, "d_key": 16, "segment": 256}
    local = held(LocalAttention(32, 2, 16, 256))
    ours = held(make_layer(**sizes, update_rule=rule).float())
    one, memories = 1024 * 32 * 4, 4 * 2 * 16 * 17 * 4
    # Queries and keys before the rotary embedding, A_dot, and what is as small as the memories that are read.
    assert ours <= local + 3 * one + 12 * memories
    small_blocks.undo()
    assert held(make_layer(**sizes, update_rule=rule).float()) >= ours + 2 * one
