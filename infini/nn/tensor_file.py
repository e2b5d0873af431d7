"""Tensors by name in one safetensors file with a checksum: written whole or not at all, read without unpickling."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from infini.records import write_atomically


def write_tensors(path: Path, tensors: dict[str, torch.Tensor], about: dict[str, str]) -> None:
    """Write tensors and what is to be known about them, replacing what was there.

    tensors: contiguous and on the CPU, none sharing memory with another. OSError as of any writing.
    """
    from safetensors.torch import save

    write_atomically(path, save(tensors, metadata={**about, "sha256": _digest(tensors)}))


def read_tensors(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """What write_tensors wrote: (tensors, about).

    Raises ValueError, saying what is wrong, for a file that is missing, is no such file, or is damaged.
    """
    from safetensors import safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            about = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"cannot be read as a saved state ({reason})") from error
    if about.pop("sha256", None) != _digest(tensors):
        raise ValueError("damaged, its checksum is another")
    return tensors, about


def _digest(tensors: dict[str, torch.Tensor]) -> str:
    """SHA-256 over names, types, shapes and bytes."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        total.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()
