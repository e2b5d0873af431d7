"""The device to run on, the precision of its matrix products, and the peak of its memory in use.

torch is imported where it is used: what is checked before a run takes no seconds for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from infini.errors import InputError

if TYPE_CHECKING:
    import torch


def pick_device(accelerator: str) -> torch.device:
    """The device of parallel.accelerator. "auto" is the GPU if there is one, otherwise the CPU."""
    import torch

    check_accelerator(accelerator)
    # NVIDIA's containers set TORCH_ALLOW_TF32_CUBLAS_OVERRIDE, with which products have 10 bits of the 23.
    torch.set_float32_matmul_precision("highest")
    return torch.device("cuda" if accelerator != "cpu" and has_gpu() else "cpu")


def check_accelerator(accelerator: str) -> None:
    """Raise InputError where parallel.accelerator asks for a GPU and there is none."""
    if accelerator == "gpu" and not has_gpu():
        raise InputError(f"parallel.accelerator={accelerator!r}: no GPU found; use auto or cpu")


def may_have_gpu() -> bool:
    """Whether there may be a GPU, without torch: False where Linux has no device file of one, elsewhere True."""
    # Device files of NVIDIA, of its boards, of AMD, and of Windows Subsystem for Linux.
    devices = ("nvidia*", "nvhost*", "nvmap", "kfd", "dxg")
    return sys.platform != "linux" or any(found for name in devices for found in Path("/dev").glob(name))


def has_gpu() -> bool:
    """Whether torch can use a GPU. Where the system has none, torch is not imported to ask it."""
    if "torch" not in sys.modules and not may_have_gpu():
        return False
    import torch

    return torch.cuda.is_available()


def has_fast_bfloat16(device: torch.device) -> bool:
    """Whether the hardware multiplies bfloat16 (tensor cores on a GPU, AMX or AVX-512 BF16 on a CPU)."""
    import torch

    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    checks = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    return any(getattr(torch.cpu, check, bool)() for check in checks)


def uses_bfloat16(precision: str, device: torch.device) -> bool:
    """Whether `parallel.precision` (auto, bf16 or fp32) means bfloat16 on this device."""
    return precision == "bf16" or (precision == "auto" and has_fast_bfloat16(device))


def emulated_bfloat16(precision: str, device: torch.device) -> str | None:
    """A warning if bfloat16 is requested on a device without bfloat16 products, otherwise None."""
    if precision != "bf16" or has_fast_bfloat16(device):
        return None
    return (
        "parallel.precision=bf16: this device has no bfloat16 products and emulates them, up to hundreds of times "
        "slower; auto takes float32 here"
    )


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """A context with bfloat16 matrix products, and float32 parameters and memory. No effect in fp32."""
    if uses_bfloat16(precision, device):
        import torch

        return torch.autocast(device.type, torch.bfloat16)
    return contextlib.nullcontext()


MADE_FOR_A_GPU = {"scale": ("gpu", "paper"), "suite": ("paper", "paper_models")}
"""Group -> choices that take days, and much memory, on a CPU."""


def check_made_for(group: str, choice: str, accelerator: str) -> None:
    """Raise InputError for a choice made for a GPU if there is none and parallel.accelerator is not cpu."""
    if choice in MADE_FOR_A_GPU[group] and accelerator == "auto" and not has_gpu():
        other = "scale=laptop is made for a processor, and " if group == "scale" else ""
        raise InputError(
            f"{group}={choice}: is made for a GPU, and there is none; {other}parallel.accelerator=cpu runs this "
            "on the processor all the same"
        )


def reset_peak_memory(device: torch.device) -> int:
    """Reset the peak, and return the memory in use. Raises OSError for a CPU's memory outside Linux."""
    import torch

    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    # Freed buffers that glibc keeps would hide later allocations.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return peak_memory_bytes(device)


def begin_peak_memory(device: torch.device) -> None:
    """Reset the peak where a run begins. Where the system refuses, it stays that of the process so far."""
    import torch

    # Before the first use of the GPU there is no peak, and torch raises an error.
    if device.type == "cuda" and not torch.cuda.is_initialized():
        return
    with contextlib.suppress(OSError):
        reset_peak_memory(device)


def peak_memory_bytes(device: torch.device) -> int:
    """Peak use since the last reset: of the GPU's memory, or the resident memory of the process on a CPU."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "linux":
        # The peak of getrusage cannot be reset. Some sandboxes have no VmHWM.
        status = Path("/proc/self/status").read_text(encoding="ascii")
        found = [int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM")]
        if found:
            return found[0]
    # Windows has no such module.
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
