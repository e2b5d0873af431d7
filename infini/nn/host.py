"""Values on the host, which plans calls, and on the device, which computes them.

Reading a value of a GPU's tensor makes the host wait until everything queued there is done. What the host has to know
(clocks, padding, resets) is therefore kept on the host, as NumPy arrays and CPU tensors, and copied to the device where
it takes part in computations. To a GPU it is copied from pinned memory: only such a copy never makes the host wait
("API synchronization behavior" in NVIDIA's documentation of the CUDA runtime).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor


def to_numpy(values: Tensor | np.ndarray) -> np.ndarray:
    """The values on the host. A CPU tensor is not copied; a tensor on another device is read back."""
    if isinstance(values, np.ndarray):
        return values
    values = values.detach() if values.requires_grad else values
    return values.cpu().numpy()


def to_device(values: Tensor | np.ndarray, device: torch.device) -> Tensor:
    """The values on a device. Copying there from the host waits for nothing; copying to the host is a read."""
    tensor = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
    if device.type == "cuda" and tensor.device.type == "cpu":
        # The pinned copy is kept by torch's allocator until the GPU has read it.
        return tensor.pin_memory().to(device, non_blocking=True)
    # A copy to the host is waited for: otherwise it would be used before it is complete.
    return tensor if tensor.device == device else tensor.to(device, non_blocking=tensor.device.type == "cpu")


def on_each_device(values: Tensor) -> Callable[[torch.device], Tensor]:
    """to_device of these values that copies them once to each device, for all leaves of a state."""
    return functools.cache(functools.partial(to_device, values))


def take(x_BL: Tensor, index_BN: np.ndarray) -> Tensor:
    """x[b, index[b, n]], [B, N, ...], of x [B, L, ...]. Differentiable."""
    B, L = x_BL.shape[:2]
    place = (np.arange(B)[:, None] * L + index_BN).ravel()
    return x_BL.flatten(0, 1).index_select(0, to_device(place, x_BL.device)).unflatten(0, index_BN.shape)
