"""Named tensors in a safetensors file with a checksum. Files are written atomically and read without unpickling."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from torch import Tensor

from infini.records import write_atomically


def write_tensors(path: Path, tensors: dict[str, Tensor], about: dict[str, str]) -> None:
    """Write tensors and metadata to a file, and replace an existing one.

    tensors: contiguous, on the CPU. about: metadata. Raises OSError if writing fails.
    """
    from safetensors.torch import save

    # safetensors refuses tensors that share memory, as `memory` and `pending` of a state at a segment's end do.
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    write_atomically(path, save(tensors, metadata={**about, "sha256": _digest(tensors)}))


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and the metadata that write_tensors wrote.

    Raises ValueError, with the reason, for a file that is missing, damaged or of another kind.
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
        raise ValueError("checksum mismatch: the file is damaged")
    return tensors, about


def _digest(tensors: dict[str, Tensor]) -> str:
    """SHA-256 over names, types, shapes and bytes."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        total.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()
