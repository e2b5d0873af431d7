"""Optimizers over the parameter groups of infini.nn.parameter_groups.

Adafactor scales a step by the size of the parameter, so that a gate at 0 would never move.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from infini.config.schema import OptimizerConfig
from infini.nn.parameter_groups import parameter_groups

BIAS_FACTOR = 10.0
"""Learning rate of T5's position biases over the model's, with Muon and AdamW. They are added to scores and start at 0;
at the model's rate Transformer-XL was worse than local attention after 300 steps (results/LOG.md, 105)."""


def configured_groups(model: nn.Module, config: OptimizerConfig) -> list[dict[str, Any]]:
    """The parameter groups of a model at the rates of a configuration."""
    # Adafactor's steps are fractions of the parameter; see build_optimizer.
    factor = 1.0 if config.name == "adafactor" else BIAS_FACTOR
    return parameter_groups(model, config.lr, config.gate_lr, config.weight_decay, factor)


def build_optimizer(
    model: nn.Module, config: OptimizerConfig, products: torch.dtype = torch.float32
) -> torch.optim.Optimizer:
    """AdamW, Adafactor, or Muon (matrices) beside AdamW (the rest) over the groups above.

    products: the format in which the training multiplies matrices, which Muon takes, too.
    """
    groups = configured_groups(model, config)
    if config.name == "muon":
        return MuonBesideAdamW(groups, (config.betas[0], config.betas[1]), products)
    if config.name == "adamw":
        return torch.optim.AdamW(groups, betas=(config.betas[0], config.betas[1]), eps=1e-8)
    for group in groups:
        if group["name"] in ("gates", "biases"):
            # A step is the rate times max(1, size of the parameter) instead of max(1e-3, size of the parameter).
            group["smallest_scale"] = 1.0
    return Adafactor(groups)


def _evaluated(closure: Any) -> Any:
    """The loss that an optimizer's step returns."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


class _PerParameter(torch.optim.Optimizer, ABC):
    """Moves each parameter that has a gradient, one after the other."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = _evaluated(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.move(parameter, parameter.grad, group)
        return loss

    @abstractmethod
    def move(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        """Move one parameter."""


class Muon(_PerParameter):
    """torch.optim.Muon with Nesterov momentum 0.95 and AdamW's step size, in the format of the training's products.

    torch's always runs the Newton-Schulz iterations in bfloat16. A processor without bfloat16 arithmetic takes more
    than fifty times as long for such a product: a quarter of a training step of the passkey models (results/LOG.md,
    67). And bfloat16 turns the last bit of a gradient, which depends on the order of a sum, into a hundredth of a step:
    a training in float32 on two devices would not be that of one. With bfloat16 both take the same steps bit for bit (a
    test checks it).

    params: matrices, or groups of them. products: torch.float32 or torch.bfloat16, the format of the iterations.
    """

    COEFFICIENTS = (3.4445, -4.7750, 2.0315)
    ITERATIONS = 5
    MOMENTUM = 0.95

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, weight_decay: float = 0.1, products: torch.dtype = torch.float32
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.products = products

    def move(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        momentum = state["momentum_buffer"].lerp_(gradient, 1 - self.MOMENTUM)
        update = self._orthogonal(gradient.lerp(momentum, self.MOMENTUM))
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        # The factor gives the update the root mean square of AdamW's.
        parameter.add_(update, alpha=-group["lr"] * 0.2 * math.sqrt(max(parameter.shape)))

    def _orthogonal(self, matrix: torch.Tensor) -> torch.Tensor:
        """The matrix with all singular values moved close to 1, by Newton-Schulz iterations."""
        if isinstance(matrix, DTensor):
            # Singular values are those of the whole matrix: every rank computes them, and keeps its own rows.
            made = self._orthogonal(matrix.full_tensor())
            replicated = DTensor.from_local(made, matrix.device_mesh, [Replicate()] * matrix.device_mesh.ndim)
            return replicated.redistribute(placements=matrix.placements)
        a, b, c = self.COEFFICIENTS
        x = matrix.to(self.products)
        tall = x.shape[0] > x.shape[1]
        x = x.T if tall else x
        x = x / x.norm().clamp(min=1e-7)
        for _ in range(self.ITERATIONS):
            gram = x @ x.T
            x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        return x.T if tall else x


class MuonBesideAdamW(torch.optim.Optimizer):
    """Muon for the group "matrices", AdamW for the others, stepped and scheduled as one.

    Muon makes all singular values of a matrix's step equal. A memory read averages over a long past: that average is
    large in the direction that all books share and small in the directions that tell books apart, and Adam's step
    follows the large one.
    """

    def __init__(
        self, groups: list[dict[str, Any]], betas: tuple[float, float], products: torch.dtype = torch.float32
    ) -> None:
        matrices = [group for group in groups if group["name"] == "matrices"]
        others = [group for group in groups if group["name"] != "matrices"]
        # A model of which the gates alone are trained has no matrices.
        self.parts: list[torch.optim.Optimizer] = [Muon(matrices, products=products)] if matrices else []
        if others:
            self.parts.append(torch.optim.AdamW(others, betas=betas, eps=1e-8))
        super().__init__([group for part in self.parts for group in part.param_groups], {})
        # The parts hold the same dictionaries, so that a schedule or a checkpoint sets their rates.
        shared = iter(self.param_groups)
        for part in self.parts:
            part.param_groups = list(itertools.islice(shared, len(part.param_groups)))

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = _evaluated(closure)
        for part in self.parts:
            part.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self.param_groups = [group for part in self.parts for group in part.param_groups]


SQUARES_DECAY = 0.8
"""After t steps the newest squares have weight t^-0.8 in the average."""
SMALLEST_SQUARE = 1e-30
"""Added to each square, as by Shazeer and Stern."""


class Adafactor(_PerParameter):
    """Shazeer and Stern's Adafactor (2018) without momentum, at the learning rate of the schedule.

    torch's uses min(lr, 1 / sqrt(step)), so that rates of the paper's search would have no effect. Below that bound the
    two are equal up to rounding (a test checks it). Running averages of the squared gradients G are kept by row, R, and
    by column, C, for a matrix, and in full, V, for a vector. A step is

        lr * max(smallest_scale, RMS(parameter)) * U / max(1, RMS(U)),   U = G / sqrt(V),   V = R C / mean(R).

    params: parameters, or groups of them with their own options. smallest_scale: lower bound of the RMS that scales a
    step. weight_decay: each step multiplies the parameter by 1 - lr * weight_decay.
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 0.01, smallest_scale: float = 1e-3, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "smallest_scale": smallest_scale, "weight_decay": weight_decay})

    def move(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        update = self._update(parameter, gradient)
        size = _rms(parameter).clamp(min=group["smallest_scale"])
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.sub_(update.mul_(group["lr"] * size))

    def _update(self, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """U / max(1, RMS(U)); updates the averages."""
        # A bound on the squares, not on their averages: steps do not depend on the scale of the loss.
        state, squares = self.state[parameter], gradient.square() + SMALLEST_SQUARE
        state["step"] = state.get("step", 0) + 1
        newest = state["step"] ** -SQUARES_DECAY
        if parameter.dim() > 1:
            rows = _averaged(state, "rows", squares.mean(-1, keepdim=True), newest)
            columns = _averaged(state, "columns", squares.mean(-2, keepdim=True), newest)
            # In this order no product of two squares leaves the range of float32.
            estimate = rows / rows.mean(-2, keepdim=True) * columns
        else:
            estimate = _averaged(state, "squares", squares, newest)
        update = gradient * estimate.rsqrt()
        return update.div_(_rms(update).clamp(min=1.0))


def _averaged(state: dict[str, Any], name: str, value: torch.Tensor, newest: float) -> torch.Tensor:
    """The running average with `value` added at weight `newest`."""
    state[name] = value if name not in state else state[name].lerp(value, newest)
    return state[name]


def _rms(values: torch.Tensor) -> torch.Tensor:
    return values.square().mean().sqrt()
