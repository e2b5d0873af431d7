"""Peak memory, started anew."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from infini.system.memory_use import peak_memory_bytes, reset_peak_memory

CPU = torch.device("cpu")
SIZE = 64 * 2**20


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the peak cannot be started anew here")
def test_a_peak_started_anew_forgets_what_was_before_and_sees_what_comes() -> None:
    before = torch.ones(SIZE // 4)
    high = peak_memory_bytes(CPU)
    del before
    base = reset_peak_memory(CPU)
    assert base < high - SIZE // 2
    after = torch.ones(SIZE // 4)
    del after
    assert peak_memory_bytes(CPU) - base == pytest.approx(SIZE, rel=0.1)


def test_where_the_system_has_no_resettable_peak_the_other_one_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A finished training must not end in an error for want of this number."""
    monkeypatch.setattr(Path, "read_text", lambda self, **options: "Name:\tpython\nVmRSS:\t1 kB\n")
    assert peak_memory_bytes(CPU) > SIZE
