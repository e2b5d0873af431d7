"""Peak memory of this process or of the GPU, for run records."""

from __future__ import annotations

import ctypes
import gc
import resource
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


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
    with suppress(OSError):
        reset_peak_memory(device)


class PeakMemory:
    """Peak memory of a run that has begun, see begin_peak_memory, and of its parts."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._earlier = device, 0

    def begin_part(self) -> None:
        """From here on `of_part` is counted."""
        self._earlier = self.of_run()
        begin_peak_memory(self._device)

    def of_part(self) -> int:
        """Peak bytes since the part began; see peak_memory_bytes."""
        return peak_memory_bytes(self._device)

    def of_run(self) -> int:
        """Peak bytes since the run began."""
        return max(self._earlier, self.of_part())


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
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
