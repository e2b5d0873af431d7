"""Peak memory, started anew."""

from __future__ import annotations

import sys

import pytest
import torch

from infini.memory_use import peak_memory_bytes, reset_peak_memory

CPU = torch.device("cpu")
SIZE = 64 * 2**20


@pytest.mark.skipif(sys.platform != "linux", reason="the peak can be started anew on Linux only")
def test_a_peak_started_anew_forgets_what_was_before_and_sees_what_comes() -> None:
    before = torch.ones(SIZE // 4)
    high = peak_memory_bytes(CPU)
    del before
    base = reset_peak_memory(CPU)
    assert base < high - SIZE // 2
    after = torch.ones(SIZE // 4)
    del after
    assert peak_memory_bytes(CPU) - base == pytest.approx(SIZE, rel=0.1)
