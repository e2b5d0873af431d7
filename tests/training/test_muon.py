"""Muon for the matrices and AdamW for the rest behave as one optimizer."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny_dims
from tiny_runs import words
from torch.utils._python_dispatch import TorchDispatchMode

from infini.cli import main as cli
from infini.config.schema import OptimizerConfig
from infini.models import build_model
from infini.system import devices
from infini.training import optimizers
from infini.training.optimizers import MuonBesideAdamW, build_optimizer

CONFIG = OptimizerConfig("muon", lr=0.01, betas=[0.9, 0.95], weight_decay=0.1, gate_lr=0.03, clip_norm=None)


def make(products: torch.dtype = torch.float32) -> tuple[torch.nn.Module, MuonBesideAdamW]:
    torch.manual_seed(0)
    model = build_model({"name": "infini_linear", "tie_embeddings": False}, tiny_dims(), 31)
    optimizer = build_optimizer(model, CONFIG, products)
    assert isinstance(optimizer, MuonBesideAdamW)
    return model, optimizer


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()


def test_muon_takes_the_matrices_and_nothing_else() -> None:
    model, optimizer = make()
    muon, adamw = optimizer.parts
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    of = [{names[id(p)] for group in part.param_groups for p in group["params"]} for part in (muon, adamw)]
    assert of[0] and all("proj" in name for name in of[0])
    assert of[0].isdisjoint(of[1]) and of[0] | of[1] == set(names.values())
    assert {"embedding.weight", "unembedding.weight"} <= of[1]


def test_a_schedule_reaches_both_parts() -> None:
    model, optimizer = make()
    before = copy.deepcopy(model.state_dict())
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: 0.0)
    assert all(group["lr"] == 0 for part in optimizer.parts for group in part.param_groups)
    step(model, optimizer, 1)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_muons_step_has_equal_singular_values_where_the_gradients_differ() -> None:
    model, optimizer = make()
    weight = model.blocks[0].attention.q_proj.weight  # type: ignore[union-attr, index]
    before = weight.detach().clone()
    left, _, right = torch.linalg.svd(torch.randn(weight.shape), full_matrices=False)
    gradient = left @ torch.diag(torch.logspace(0, -2, left.shape[1])) @ right
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    weight.grad = gradient
    optimizer.step()
    moved = torch.linalg.svdvals(before * (1 - 0.01 * 0.1) - weight.detach())
    assert moved.max() / moved.median() < 2, "AdamW's step would keep the spread of 100 to 1"


@pytest.mark.parametrize("steps_before", [1, 3])
def test_a_restored_optimizer_goes_on_exactly(steps_before: int) -> None:
    model, optimizer = make()
    for seed in range(steps_before):
        step(model, optimizer, seed)
    other, restored = make()
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    restored.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    step(model, optimizer, 9)
    step(other, restored, 9)
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in model.state_dict().items())
    restored.param_groups[0]["lr"] = 0.5
    assert restored.parts[0].param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("shape", [(6, 6), (12, 5), (5, 12)])
def test_in_bfloat16_the_steps_are_those_of_torch(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    ours = torch.nn.Parameter(torch.randn(shape, generator=generator))
    theirs = torch.nn.Parameter(ours.detach().clone())
    options: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1}
    both = (
        optimizers.Muon([ours], products=torch.bfloat16, **options),
        torch.optim.Muon([theirs], adjust_lr_fn="match_rms_adamw", **options),
    )
    for _ in range(3):
        ours.grad = torch.randn(shape, generator=generator)
        theirs.grad = ours.grad.clone()
        for optimizer in both:
            optimizer.step()
    assert torch.equal(ours, theirs)


def test_in_float32_the_step_is_the_same_but_for_rounding() -> None:
    moved = {}
    for products in (torch.bfloat16, torch.float32):
        model, optimizer = make(products)
        before = copy.deepcopy(model.state_dict())
        with _Products() as used:
            step(model, optimizer, 1)
        assert used.formats == {products}
        moved[products] = {name: value - before[name] for name, value in model.state_dict().items()}
    for name, step_taken in moved[torch.bfloat16].items():
        other = moved[torch.float32][name]
        assert (step_taken - other).norm() <= 0.05 * other.norm(), name


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_iterations_take_the_format_of_the_training(
    precision: str, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A processor that multiplies bfloat16 trains in float32 where it is asked to, the optimizer included."""
    monkeypatch.setattr(devices, "has_fast_bfloat16", lambda device: True)
    formats = []
    step_of = optimizers.Muon.step

    def watched(muon: optimizers.Muon, closure: Any = None) -> Any:
        with _Products() as used:
            loss = step_of(muon, closure)
        formats.append(used.formats)
        return loss

    monkeypatch.setattr(optimizers.Muon, "step", watched)
    settings = {text.partition("=")[0]: text for text in words(corpus, tmp_path, "pg19")}
    settings |= {"recipe.steps": "recipe.steps=2", "parallel.precision": f"parallel.precision={precision}"}
    assert cli.main(["train", *settings.values()]) == 0
    assert formats == [{torch.float32 if precision == "fp32" else torch.bfloat16}] * 2


class _Products(TorchDispatchMode):
    """Notes in which formats matrices are multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.formats: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.formats.add(args[0].dtype)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["gates", "matrices"])
def test_a_model_with_one_kind_of_parameters_trains_and_resumes(name: str) -> None:
    """model.train=gates leaves no matrices."""
    shape = (4, 3) if name == "matrices" else (4,)

    def make_one() -> tuple[torch.nn.Parameter, MuonBesideAdamW]:
        weight = torch.nn.Parameter(torch.ones(shape))
        group = {"params": [weight], "name": name, "lr": 0.1, "weight_decay": 0.0}
        return weight, MuonBesideAdamW([group], (0.9, 0.95))

    (first, optimizer), (second, resumed) = make_one(), make_one()
    for _ in range(2):
        first.grad = torch.arange(first.numel()).view(shape).float()
        optimizer.step()
        with torch.no_grad():
            second.copy_(first)
        resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert not torch.equal(first, torch.ones(shape))
    for weight, made in ((first, optimizer), (second, resumed)):
        weight.grad = torch.ones(shape)
        made.step()
    assert torch.equal(first, second)
