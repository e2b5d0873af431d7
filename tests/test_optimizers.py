"""Optimizers: the gates' own group, decay, and what each step does to a gate at zero."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import VOCABULARY, make_model, tiny_dims, variants
from torch import nn

from infini.config import compose
from infini.models import build_model, registered
from infini.schema import OptimizerConfig, groups
from infini.training.module import LanguageModelModule
from infini.training.optimizers import build_optimizer, parameter_groups

MODELS = sorted(registered("language_model"))
WITH_MEMORY = [options for options in variants() if "update_rule" in options]


def optimizer_config(**changes: Any) -> OptimizerConfig:
    """AdamW as the laptop scale has it, with changes."""
    return compose([f"optimizer.{key}={value}" for key, value in changes.items()]).optimizer


def gates_of(model: Any) -> list[nn.Parameter]:
    return [parameter for name, parameter in model.named_parameters() if name.endswith("beta")]


def moved_by(
    optimizer: torch.optim.Optimizer, gate: nn.Parameter, steps: int, after: Callable[[], None] | None = None
) -> float:
    """How far the slowest head's gate gets on gradients of one sign and of sizes that differ by orders."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        gate.grad = -1e-4 * torch.rand(gate.shape, generator=generator).pow(4)
        optimizer.step()
        if after is not None:
            after()
    return float(gate.detach().min())


@pytest.mark.parametrize("optimizer", groups()["optimizer"])
@pytest.mark.parametrize("recipe", groups()["recipe"])
def test_hugging_face_failure_gates_move(recipe: str, optimizer: str) -> None:
    """Theirs moved by 0.03 in a whole training; 1,000 equal-sign gradients must move beta by more than 1.

    With Adafactor this is its gate failure too: a step as large as the parameter, which for a gate at 0 is nothing.
    """
    task = next(task for task in groups()["task"] if recipe.startswith(f"{task}_"))
    cfg = compose([f"task={task}", f"recipe={recipe}", f"optimizer={optimizer}"])
    model = build_model({"name": "infini_linear"}, tiny_dims(), VOCABULARY)
    assert moved_by(build_optimizer(model, cfg.optimizer), gates_of(model)[0], 1000) > 1


@pytest.mark.parametrize("scale", groups()["scale"])
def test_hugging_face_failure_gates_move_within_the_schedule(scale: str) -> None:
    """The same with the optimizer each scale ships, warm-up and decay included, in no more steps than it has."""
    cfg = compose([f"scale={scale}"])
    model = build_model({"name": "infini_linear"}, tiny_dims(), VOCABULARY)
    configured = LanguageModelModule(model, cfg.optimizer, cfg.recipe, True).configure_optimizers()
    steps = min(1000, cfg.recipe.steps)
    after = configured["lr_scheduler"]["scheduler"].step
    assert moved_by(configured["optimizer"], gates_of(model)[0], steps, after) > 1


def test_the_failures_are_real() -> None:
    """Without the remedies: the model's rate and decay, and Adafactor's scaling by the parameter's size."""
    gate = nn.Parameter(torch.zeros(2))
    assert moved_by(torch.optim.AdamW([gate], lr=3e-4, weight_decay=0.1), gate, 1000) < 0.3
    gate = nn.Parameter(torch.zeros(2))
    assert moved_by(torch.optim.Adafactor([gate], lr=0.01), gate, 1000) < 0.1


def test_adafactor_failure_a_gate_at_zero_moves_by_its_whole_rate() -> None:
    model = build_model({"name": "infini_delta", "gate_init": "zeros"}, tiny_dims(), VOCABULARY)
    optimizer = build_optimizer(model, optimizer_config(name="adafactor", gate_lr=0.01))
    gate = gates_of(model)[0]
    gate.grad = torch.full_like(gate, 1e-5)
    optimizer.step()
    torch.testing.assert_close(gate.detach(), torch.full_like(gate, -0.01), rtol=1e-4, atol=0)


def test_adafactor_scales_the_other_steps_by_the_parameter() -> None:
    model = build_model({"name": "infini_delta"}, tiny_dims(), VOCABULARY)
    optimizer = build_optimizer(model, optimizer_config(name="adafactor", lr=0.01, weight_decay=0.0))
    weight = model.blocks[0].attention.q_proj.weight
    before = weight.detach().clone()
    weight.grad = torch.full_like(weight, 1e-3)
    optimizer.step()
    size = before.pow(2).mean().sqrt()
    torch.testing.assert_close(before - weight.detach(), (0.01 * size).expand_as(weight), rtol=1e-3, atol=0)


def test_adafactors_own_decay_never_undercuts_the_papers_schedule() -> None:
    """torch's takes min(rate, 1 / sqrt(step)): the paper's warm-up and cosine must be below that throughout."""
    cfg = compose(["scale=paper"])
    assert cfg.optimizer.name == "adafactor"
    highest = max(cfg.optimizer.lr, cfg.optimizer.gate_lr)
    steps = range(1, cfg.recipe.steps + 1)
    assert all(highest * cfg.recipe.rate_factor(step) <= step**-0.5 for step in steps)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_is_in_exactly_one_group(name: str, tied: bool) -> None:
    model = build_model({"name": name, "tie_embeddings": tied}, tiny_dims(), VOCABULARY)
    config = optimizer_config()
    by_name = {group["name"]: group for group in parameter_groups(model, config)}
    grouped = [id(parameter) for group in by_name.values() for parameter in group["params"]]
    assert sorted(grouped) == sorted(id(parameter) for parameter in model.parameters())

    def members(group: str) -> set[str]:
        ids = {id(parameter) for parameter in by_name[group]["params"]} if group in by_name else set()
        return {key for key, parameter in model.named_parameters() if id(parameter) in ids}

    names = {key for key, _ in model.named_parameters()}
    flat = {key for key, parameter in model.named_parameters() if parameter.dim() == 1} - members("gates")
    assert members("gates") == {key for key in names if key.endswith(".beta")}
    assert members("others") == flat | {key for key in names if "embedding" in key}
    assert {key for key in names if "norm" in key} <= flat
    assert members("matrices") == {key for key in names if key.endswith("_proj.weight")}
    decays = {key: group["weight_decay"] for key, group in by_name.items()}
    assert decays == {key: config.weight_decay if key == "matrices" else 0.0 for key in by_name}
    rates = {key: group["lr"] for key, group in by_name.items()}
    assert rates == {key: config.gate_lr if key == "gates" else config.lr for key in by_name}


@pytest.mark.parametrize("name", groups()["optimizer"])
def test_only_matrices_decay(name: str) -> None:
    model = make_model(WITH_MEMORY[0], torch.float32)
    optimizer = build_optimizer(model, optimizer_config(name=name, weight_decay=0.5))
    before = {key: parameter.detach().clone() for key, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    decayed = {key for key, parameter in model.named_parameters() if not torch.equal(parameter, before[key])}
    assert decayed == {key for key in before if key.endswith("_proj.weight")}
