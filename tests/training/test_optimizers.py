"""Optimizers: the gates' own group, decay, and what each step does to a gate at zero."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import VOCABULARY, assert_close, make_model, one_in, tiny_dims, with_memory
from torch import nn

from infini.config.compose import compose
from infini.config.schema import OptimizerConfig, groups
from infini.models import build_model, registered
from infini.nn.parameter_groups import parameter_groups
from infini.training.module import LanguageModelModule
from infini.training.optimizers import BIAS_FACTOR, Adafactor, build_optimizer, configured_groups

MODELS = sorted(set(registered("language_model")) - {"llm"})
"""Those that are trained from scratch."""
WITH_MEMORY = with_memory()


def optimizer_config(**changes: Any) -> OptimizerConfig:
    """AdamW as the laptop scale has it, with changes."""
    return compose([f"optimizer.{key}={value}" for key, value in changes.items()]).optimizer


def gates_of(model: Any) -> list[nn.Parameter]:
    return [parameter for name, parameter in model.named_parameters() if name.endswith("beta")]


def moved_by(
    optimizer: torch.optim.Optimizer, gate: nn.Parameter, steps: int, after: Callable[[], None] | None = None
) -> float:
    """The movement of the slowest head's gate, on gradients of one sign and of sizes that differ by orders."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        gate.grad = -1e-4 * torch.rand(gate.shape, generator=generator).pow(4)
        optimizer.step()
        if after is not None:
            after()
    return float(gate.detach().min())


@pytest.mark.parametrize(
    ("recipe", "optimizer"), one_in(4, itertools.product(groups()["recipe"], groups()["optimizer"]))
)
def test_hugging_face_failure_gates_move(recipe: str, optimizer: str) -> None:
    """Theirs moved by 0.03 in a whole training; 1,000 equal-sign gradients must move beta by more than 1.

    Adafactor fails in another way, too: its step is as large as the parameter, which is nothing for a gate at 0.
    """
    task = next(task for task in groups()["task"] if recipe.startswith(f"{task}_"))
    cfg = compose([f"task={task}", f"recipe={recipe}", f"optimizer={optimizer}"])
    assert moved_by_a_thousand(repr(cfg.optimizer), cfg.optimizer) > 1


MOVED: dict[str, float] = {}


def moved_by_a_thousand(text: str, optimizer: OptimizerConfig) -> float:
    """The movement of a model's first gate; recipes whose optimizer is the same in every setting share one run."""
    if text not in MOVED:
        model = build_model({"name": "infini_linear"}, tiny_dims(), VOCABULARY)
        MOVED[text] = moved_by(build_optimizer(model, optimizer), gates_of(model)[0], 1000)
    return MOVED[text]


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
    """There are no remedies: gates have the model's rate and decay, and Adafactor scales by the parameter's size."""
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


def stepped(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], steps: int, rate: Any) -> None:
    """So many steps on the same random gradients, at the rate that `rate` gives for each (1 is the first)."""
    generator = torch.Generator().manual_seed(1)
    for step in range(1, steps + 1):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator) * 10.0 ** (step % 3)
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        optimizer.step()


def two_parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((5, 7), (6,))]


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adafactor_is_torchs_below_its_cap(decay: float) -> None:
    ours, theirs = two_parameters(), two_parameters()
    stepped(Adafactor(ours, weight_decay=decay), ours, 20, lambda step: 0.2 * step**-0.5)
    built = torch.optim.Adafactor(theirs, lr=0.1, eps=(None, 1e-3), weight_decay=decay)
    stepped(built, theirs, 20, lambda step: 0.2 * step**-0.5)
    for a, b in zip(ours, theirs, strict=True):
        assert_close(a, b, 1e-5, "parameter")


@pytest.mark.parametrize("scale", [1e-3, 1e-6])
def test_adafactors_steps_do_not_depend_on_the_scale_of_the_loss(scale: float) -> None:
    """A bound on the averages of squares, as torch has it, made every step of small gradients as large as allowed."""
    found = []
    for factor in (1.0, scale):
        parameters = two_parameters()
        optimizer = Adafactor(parameters, lr=0.1)
        for step in range(1, 21):
            generator = torch.Generator().manual_seed(step)
            for parameter in parameters:
                # From step 10 on ten times smaller: steps are, too, until the averages have followed.
                size = factor * (0.1 if step >= 10 else 1.0)
                parameter.grad = size * torch.randn(parameter.shape, generator=generator)
            optimizer.step()
        found.append(parameters)
    for a, b in zip(*found, strict=True):
        assert_close(a, b, 1e-5, "parameter")


@pytest.mark.parametrize("parameter", range(2), ids=["matrix", "vector"])
def test_adafactors_rate_is_the_one_it_is_given(parameter: int) -> None:
    """torch's takes 0.1 at most at step 100; here a step is proportional to the rate."""
    moved = []
    for rate in (0.05, 0.5):
        found = two_parameters()
        optimizer = Adafactor(found)
        stepped(optimizer, found, 99, lambda step: 0.0)
        before = found[parameter].detach().clone()
        stepped(optimizer, found, 1, lambda step, rate=rate: rate)
        moved.append(found[parameter].detach() - before)
    assert_close(moved[1], 10 * moved[0], 1e-4, "step")
    assert 0 < moved[1].abs().max() < 5


def test_adafactor_goes_on_from_what_was_saved() -> None:
    through, stopped = two_parameters(), two_parameters()
    whole = Adafactor(through)
    stepped(whole, through, 3, lambda step: 0.1)
    first = Adafactor(stopped)
    stepped(first, stopped, 3, lambda step: 0.1)
    again = Adafactor(stopped)
    again.load_state_dict(first.state_dict())
    for optimizer, parameters in ((whole, through), (again, stopped)):
        stepped(optimizer, parameters, 2, lambda step: 0.1)
    assert all(torch.equal(a, b) for a, b in zip(through, stopped, strict=True))


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("name", [*MODELS, "infini_delta with an input gate"])
def test_every_parameter_is_in_exactly_one_group(name: str, tied: bool) -> None:
    name, _, gate = name.partition(" with ")
    options = {"input_gate": "sigmoid"} if gate else {}
    model = build_model({"name": name, "tie_embeddings": tied, **options}, tiny_dims(), VOCABULARY)
    config = optimizer_config()
    by_name = {group["name"]: group for group in configured_groups(model, config)}
    grouped = [id(parameter) for group in by_name.values() for parameter in group["params"]]
    assert sorted(grouped) == sorted(id(parameter) for parameter in model.parameters())

    def members(group: str) -> set[str]:
        ids = {id(parameter) for parameter in by_name[group]["params"]} if group in by_name else set()
        return {key for key, parameter in model.named_parameters() if id(parameter) in ids}

    names = {key for key, _ in model.named_parameters()}
    flat = {key for key, parameter in model.named_parameters() if parameter.dim() == 1}
    flat -= members("gates") | members("biases")
    assert members("biases") == {key for key in names if key.endswith(".bucket_bias")}
    assert members("gates") == {key for key in names if key.endswith((".beta", ".input_weight", ".input_bias"))}
    assert any("input" in key for key in members("gates")) == bool(gate)
    assert members("others") == flat | {key for key in names if "embedding" in key}
    assert {key for key in names if "norm" in key} <= flat
    assert members("matrices") == {key for key in names if key.endswith("_proj.weight")}
    decays = {key: group["weight_decay"] for key, group in by_name.items()}
    assert decays == {key: config.weight_decay if key == "matrices" else 0.0 for key in by_name}
    rates = {key: group["lr"] for key, group in by_name.items()}
    own = {"gates": config.gate_lr, "biases": BIAS_FACTOR * config.lr}
    assert rates == {key: own.get(key, config.lr) for key in by_name}


@pytest.mark.parametrize("name", groups()["optimizer"])
@pytest.mark.parametrize("model", ["transformer_xl", "memorizing"])
def test_position_biases_come_to_where_they_tell_tokens_apart(name: str, model: str) -> None:
    """They begin at 0 and are added to scores: at the rate of embeddings, or scaled by their own size, they hardly tell
    a token from the one before it when a short training ends. 100 equal-sign gradients must move them by 1."""
    config = compose([f"optimizer={name}"]).optimizer
    built = build_model({"name": model}, tiny_dims(), VOCABULARY)
    biases = [p for key, p in built.named_parameters() if key.endswith("bucket_bias")]
    optimizer = build_optimizer(built, config)
    for _ in range(100):
        for bias in biases:
            bias.grad = -torch.ones_like(bias)
        optimizer.step()
    assert biases and all(float(bias.detach().min()) >= 0.999 for bias in biases)


@pytest.mark.parametrize("name", groups()["optimizer"])
def test_averages_and_rates_are_those_of_the_configuration(name: str) -> None:
    """Adafactor has no betas, and its steps of position biases are not larger: their scale is at least 1 already."""
    config = optimizer_config(name=name, betas=[0.8, 0.9])
    optimizer = build_optimizer(build_model({"name": "transformer_xl"}, tiny_dims(), VOCABULARY), config)
    averaged = {group["name"]: tuple(group["betas"]) for group in optimizer.param_groups if "betas" in group}
    others = {"adamw": ("matrices", "others", "biases"), "muon": ("others", "biases"), "adafactor": ()}
    assert averaged == dict.fromkeys(others[name], (0.8, 0.9))
    (biases,) = [group for group in optimizer.param_groups if group["name"] == "biases"]
    assert biases["lr"] == config.lr * (1 if name == "adafactor" else BIAS_FACTOR)


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


def test_an_output_embedding_of_its_own_is_no_matrix() -> None:
    """It is not decayed, and Muon does not orthogonalise its steps."""

    class WithHead(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed_tokens, self.proj, self.lm_head = (
                nn.Embedding(7, 4),
                nn.Linear(4, 4),
                nn.Linear(4, 7, bias=False),
            )

        def get_output_embeddings(self) -> nn.Module:
            return self.lm_head

    model = WithHead()
    groups = {group["name"]: group["params"] for group in parameter_groups(model, 0.1, weight_decay=0.1)}
    assert [id(each) for each in groups["matrices"]] == [id(model.proj.weight)]
    assert id(model.lm_head.weight) in map(id, groups["others"])
