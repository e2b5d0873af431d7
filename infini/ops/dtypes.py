"""Which number format a product, and which the state, is computed in."""

from __future__ import annotations

import torch


def for_products(x: torch.Tensor) -> torch.Tensor:
    """x in autocast's dtype where autocast is on. Casting once serves all the products that x goes into."""
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


def scaled(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """x times a factor that is shared by many numbers, in x's dtype: only the result is rounded to it. A factor that is
    rounded first errs in the same direction for all of them."""
    if factor.dim() == 0:
        # A number without dimensions would take x's dtype.
        factor = factor.expand(1)
    return (x * factor).to(x.dtype)


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of state and sums beside activations of `dtype`: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
