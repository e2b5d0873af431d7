"""Copies between host and device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from infini.config.compose import compose
from infini.nn.host import on_each_device, to_device
from infini.training.module import LanguageModelModule


@pytest.mark.parametrize("values", [np.arange(3), torch.arange(3)], ids=["array", "tensor"])
@pytest.mark.parametrize("device", ["cuda:0", "meta", "cpu"])
def test_what_moves_to_a_gpu_is_pinned(device: str, values: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU copies pageable memory, too, but the host may wait for that."""
    pinned, copied = [], []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(tensor.clone())
        return pinned[-1]

    def to(tensor: torch.Tensor, where: torch.device, non_blocking: bool = False) -> torch.Tensor:
        copied.append((tensor, where, non_blocking))
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.Tensor, "to", to)
    place = torch.device(device)
    assert to_device(values, place).tolist() == [0, 1, 2]
    assert len(pinned) == (1 if device == "cuda:0" else 0)
    if device == "cpu":
        assert not copied
        return
    ((tensor, where, non_blocking),) = copied
    assert where == place and non_blocking
    assert device == "meta" or tensor is pinned[0]


def test_values_are_copied_once_to_each_device() -> None:
    copy_to = on_each_device(torch.arange(3))
    meta = torch.device("meta")
    assert copy_to(meta) is copy_to(meta)


def test_the_last_loss_moves_as_other_values_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weight of the penalty on writes follows the last loss, which may be a number on the host."""
    moved: list[torch.Tensor] = []

    def to(values: torch.Tensor, device: torch.device) -> torch.Tensor:
        moved.append(values)
        return values

    monkeypatch.setattr("infini.training.module.to_device", to)
    cfg = compose(["task=passkey", "recipe.sparse_writes=0.5", "recipe.sparse_loss_scale=4"])
    module = LanguageModelModule(torch.nn.Linear(1, 1), cfg.optimizer, cfg.recipe, carry_state=True)
    module.loss_curve.append([1, 3.0])
    assert float(module._penalty_weight) == 0.5 * 3 / 4
    assert len(moved) == 1
