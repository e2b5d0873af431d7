"""Adafactor with exactly the given learning rate."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

FORGETTING = 0.8
"""After t steps the newest squares have weight t^-0.8 in the average."""


class Adafactor(torch.optim.Optimizer):
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

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One step of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    update = self._update(parameter, parameter.grad)
                    size = _rms(parameter).clamp(min=group["smallest_scale"])
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.sub_(update.mul_(group["lr"] * size))
        return loss

    def _update(self, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """U / max(1, RMS(U)); updates the averages."""
        state, squares = self.state[parameter], gradient.square()
        # Divisors have a lower bound: estimates of the size of rounding errors are meaningless.
        smallest = torch.finfo(parameter.dtype).eps
        state["step"] = state.get("step", 0) + 1
        newest = state["step"] ** -FORGETTING
        if parameter.dim() > 1:
            rows = _averaged(state, "rows", squares.mean(-1, keepdim=True), newest)
            columns = _averaged(state, "columns", squares.mean(-2, keepdim=True), newest)
            estimate = rows * columns / rows.mean(-2, keepdim=True).clamp(min=smallest)
        else:
            estimate = _averaged(state, "squares", squares, newest)
        update = gradient * estimate.clamp(min=smallest**2).rsqrt()
        return update.div_(_rms(update).clamp(min=1.0))


def _averaged(state: dict[str, Any], name: str, value: torch.Tensor, newest: float) -> torch.Tensor:
    """The running average with `value` added at weight `newest`."""
    state[name] = value if name not in state else state[name].lerp(value, newest)
    kept: torch.Tensor = state[name]
    return kept


def _rms(values: torch.Tensor) -> torch.Tensor:
    return values.square().mean().sqrt()
