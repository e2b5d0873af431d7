"""Peak memory, started anew."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from command_runner import Runner

from infini.system import devices
from infini.system.devices import peak_memory_bytes, reset_peak_memory

CPU = torch.device("cpu")
SIZE = 64 * 2**20


RESETS = pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="the peak cannot be started anew here"
)


@RESETS
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


@RESETS
@pytest.mark.parametrize("verb", ["train", "eval"])
def test_the_peak_of_a_run_is_not_that_of_the_process(with_model: Runner, verb: str) -> None:
    """A small run follows a large one, as in a sweep."""
    torch.ones(4 * SIZE // 4)
    high = peak_memory_bytes(CPU)
    with_model(verb)
    assert with_model.records(verb)[-1].cost["peak_memory_bytes"] < high - 2 * SIZE


def test_a_run_begins_before_the_gpu_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: pytest.fail("torch raises an error"))
    devices.begin_peak_memory(torch.device("cuda"))


@pytest.mark.parametrize("verb", ["train", "eval"])
def test_a_run_ends_where_the_peak_cannot_be_started_anew(
    with_model: Runner, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    def refuse(device: torch.device) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(devices, "reset_peak_memory", refuse)
    with_model(verb)
    assert with_model.records(verb)[-1].cost["peak_memory_bytes"] > 0
