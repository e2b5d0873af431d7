"""Finds the first module whose output is not finite."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch


def first_not_finite(model: torch.nn.Module, call: Callable[[], Any]) -> str | None:
    """A description of the first value that is not finite: a weight, else a module's output during `call`; None when
    there is none. The innermost of nested modules is named. A value that is computed between submodules, such as the
    memory, is reported as input of the next submodule."""
    for name, weight in model.named_parameters():
        if not bool(torch.isfinite(weight).all()):
            return f"the weights {name} are not finite"
    found: list[str] = []

    def watch(name: str) -> Callable[..., None]:
        def hook(module: torch.nn.Module, inputs: Any, output: Any) -> None:
            if found or _finite(output):
                return
            outer = name.rpartition(".")[0]
            found.append(name if _finite(inputs) or not outer else f"{outer}, before its {name.rpartition('.')[2]}")

        return hook

    handles = [module.register_forward_hook(watch(name)) for name, module in model.named_modules() if name]
    try:
        with torch.no_grad():
            call()
    finally:
        for handle in handles:
            handle.remove()
    return f"the first value that is not finite comes out of {found[0]}" if found else None


def _finite(value: Any) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in _tensors(value))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for entry in value:
            yield from _tensors(entry)
