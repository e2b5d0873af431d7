"""The dtypes of products and of the state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def for_products(x: Tensor) -> Tensor:
    """x in autocast's dtype if autocast converts it. One cast serves all products of x."""
    return x.to(torch.get_autocast_dtype(_autocast_device(x))) if autocasts(x) else x


def autocasts(x: Tensor) -> bool:
    """Whether products of x are in autocast's dtype: autocast is on for x's device, and x is not float64, which torch
    leaves as it is."""
    return x.dtype != torch.float64 and torch.is_autocast_enabled(_autocast_device(x))


def check_dtype(x: Tensor, weight: Tensor) -> None:
    """Raise ValueError where x has another dtype than the weights, and autocast does not convert it."""
    if x.dtype != weight.dtype and not (x.is_floating_point() and autocasts(x)):
        raise ValueError(f"x is {x.dtype}, the layer {weight.dtype}: convert one of them, or use torch.autocast")


def without_autocast(x: Tensor) -> torch.autocast:
    """A context in which products on x's device are in the dtype of their operands."""
    return torch.autocast(_autocast_device(x), enabled=False)


def _autocast_device(x: Tensor) -> str:
    # The device `meta`, which has shapes only, has no autocast of its own.
    return "cpu" if x.device.type == "meta" else x.device.type


def no_second_derivative(what: str) -> None:
    """For a backward pass that takes numbers of its forward pass for constants: raise RuntimeError if it is to be
    differentiated itself (create_graph=True), which would silently give wrong numbers."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(f"create_graph=True: {what} has no second derivatives")


def scaled(x: Tensor, factor: Tensor) -> Tensor:
    """x times a factor that many numbers share, in x's dtype. Only the result is rounded: the error of a rounded factor
    would have the same sign for all of them. factor: broadcastable to x, with as many dimensions."""
    return _Scaled.apply(x, factor)


class _Scaled(torch.autograd.Function):
    """The product and its gradient, with one pass less over numbers of the wider dtype than autograd's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(x, factor)
        return (x * factor).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        x, factor = ctx.saved_tensors
        g_factor = None
        if ctx.needs_input_grad[1]:
            g_factor = (grad * x).sum(-1, keepdim=True, dtype=factor.dtype).sum_to_size(factor.shape)
        return (grad * factor).to(x.dtype), g_factor


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of state and sums for activations of `dtype`: float64 for float64, otherwise float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
