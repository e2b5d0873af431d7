"""The penalty on what tokens write, against a loop over tokens and heads; and what it does to a memory."""

import math
from typing import Any

import pytest
import torch
from helpers import SEGMENT, make_model, random_ids

from infini.config.compose import compose
from infini.nn.ops.reference import input_gate as input_gate_by_oracle
from infini.nn.ops.reference import sigma
from infini.nn.protocols import recorded
from infini.training.additions.length_extension import extended_call, extended_in_two_calls
from infini.training.additions.sparse_writes import MIN_WRITE, penalty
from infini.training.module import LanguageModelModule


def recorded_penalty(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    with recorded(model, "keys") as keys:
        model(ids)
    return penalty(model, keys, mask)


@pytest.mark.parametrize("input_gate", [None, "sigmoid"])
@pytest.mark.parametrize("n_kv_heads", [None, 1])
def test_the_penalty_is_the_mean_log_of_what_is_written_weighted_by_gates(
    n_kv_heads: int | None, input_gate: str | None
) -> None:
    model = make_model({"name": "infini_linear", "input_gate": input_gate}, n_kv_heads=n_kv_heads).double()
    ids = random_ids(2, 2 * SEGMENT)
    mask = torch.ones(ids.shape, dtype=torch.bool)
    mask[1, -3:] = False
    found = recorded_penalty(model, ids, mask)
    total = weight = 0.0
    inputs: list[torch.Tensor] = []
    hooks = [
        block.attention_norm.register_forward_hook(lambda *call: inputs.append(call[-1])) for block in model.blocks
    ]
    model(ids)
    for hook in hooks:
        hook.remove()
    for block, normed in zip(model.blocks, inputs, strict=True):
        attention = block.attention
        k = attention.k_proj(normed).unflatten(-1, (attention.n_kv_heads, attention.d_key))
        for head in range(attention.n_heads):
            g = 1 / (1 + math.exp(-attention.beta[head].item()))
            shared = head // (attention.n_heads // attention.n_kv_heads)
            logs = []
            for row in range(2):
                written = sigma(k[row, :, shared]).mean(-1)
                if input_gate:
                    gate = (attention.input_weight[shared], attention.input_bias[shared])
                    written = written * input_gate_by_oracle(k[row, :, shared], *gate)
                logs += [math.log(written[token].item()) for token in range(ids.shape[1]) if mask[row, token]]
            total += g * sum(logs) / len(logs)
            weight += g
    assert found.item() == pytest.approx(total / weight, rel=1e-6)


def test_gates_are_no_way_to_pay_less_and_keys_one_that_writes_less() -> None:
    model = make_model({"name": "infini_delta"}).double()
    ids = random_ids(2, 2 * SEGMENT)
    mask = torch.ones(ids.shape, dtype=torch.bool)
    before = recorded_penalty(model, ids, mask)
    before.backward()
    assert model.blocks[-1].attention.beta.grad is None
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 0.01 * parameter.grad / parameter.grad.norm()
    assert recorded_penalty(model, ids, mask) < before


def test_what_weighs_nothing_costs_no_less() -> None:
    model = make_model({"name": "infini_linear"}).double()
    ids = random_ids(1, SEGMENT)
    keys = [torch.full((1, SEGMENT, block.attention.k_proj.out_features), -1000.0) for block in model.blocks]
    keys[0].requires_grad_(True)
    lowest = penalty(model, keys, torch.ones(ids.shape, dtype=torch.bool))
    assert lowest.item() == pytest.approx(math.log(MIN_WRITE), rel=1e-6)
    assert torch.autograd.grad(lowest, keys[0])[0].abs().max() == 0


def test_several_calls_are_recorded_as_one() -> None:
    model = make_model({"name": "infini_linear"})
    ids = random_ids(2, 2 * SEGMENT)
    with recorded(model, "keys") as whole:
        model(ids)
    with recorded(model, "keys") as parts:
        state = model(ids[:, :SEGMENT]).state
        model(ids[:, SEGMENT:], state)
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(one, other)
    # Nothing is recorded, and nothing kept alive, after the block.
    model(ids)
    assert len(parts) == len(model.blocks) and not any(block.attention.k_proj._forward_hooks for block in model.blocks)


def test_the_penalty_reaches_the_weights_through_recomputed_activations() -> None:
    gradients = []
    for recompute in (False, True):
        model = make_model({"name": "infini_linear"}).train()
        model.checkpoint_activations = recompute
        ids = random_ids(2, 2 * SEGMENT)
        recorded_penalty(model, ids, torch.ones(ids.shape, dtype=torch.bool)).backward()
        gradients.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
    assert any(gradient is not None and gradient.abs().max() > 0 for gradient in gradients[0])
    for one, other in zip(*gradients, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other)


def test_a_carried_length_extension_pays_once_for_every_token() -> None:
    """It reads what follows the boundary a second time, for the state: that writes nothing more."""
    model = make_model({"name": "infini_linear"}, torch.float64)
    ids, factor = random_ids(2, 3 * SEGMENT), torch.tensor([50.0, 400.0], dtype=torch.float64)
    mask = torch.ones(ids.shape, dtype=torch.bool)
    with recorded(model, "keys") as keys:
        extended_in_two_calls(model, ids, None, None, None, SEGMENT, factor, carry=True)
    with recorded(model, "keys") as expected:
        extended_call(model, ids, None, None, None, SEGMENT, factor)
    assert penalty(model, keys, mask).item() == pytest.approx(penalty(model, expected, mask).item(), rel=1e-12)
    assert penalty(model, keys, mask).requires_grad


def test_the_weight_of_the_penalty_is_one_number_whether_the_loss_was_read_or_not() -> None:
    """A checkpoint on a GPU reads it early; the steps after that are those of a training without the checkpoint."""
    cfg = compose(["task=passkey", "recipe.sparse_writes=0.03", "recipe.sparse_loss_scale=0.7"])
    module = LanguageModelModule(
        make_model({"name": "infini_linear"}).float(), cfg.optimizer, cfg.recipe, False, cfg.seed
    )
    for loss in torch.linspace(0.01, 0.9, 50):
        module._pending = [(1, loss)]
        pending = module._penalty_weight
        module.read_losses()
        assert torch.equal(torch.as_tensor(module._penalty_weight), torch.as_tensor(pending))
