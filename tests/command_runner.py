"""Command lines run in this process on tiny models; the fixtures that hand it out are in conftest.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_runs import TINY

import cli
from infini import records
from infini.records import RunRecord


class Runner:
    """Runs command lines on a corpus and a results folder; `error` is for those that must fail with one line."""

    def __init__(self, corpus: Path, results: Path, capfd: pytest.CaptureFixture[str]) -> None:
        self.results, self.capfd = results, capfd
        self.settings = [*TINY, "logger=none", f"task.data_dir={corpus}", f"results_dir={results}"]
        self.out = self.err = ""

    def __call__(self, *words: str, code: int = 0) -> str:
        self.capfd.readouterr()
        returned = cli.main([words[0], *self.settings, *words[1:]])
        self.out, self.err = self.capfd.readouterr()
        assert returned == code, self.err
        return self.out

    def error(self, *words: str) -> str:
        self(*words, code=2)
        lines = [line for line in self.err.splitlines() if line.startswith("infini: error: ")]
        assert len(lines) == 1 and "Traceback" not in self.err
        assert self.err.splitlines()[-1] == lines[0]
        return lines[0].removeprefix("infini: error: ")

    def records(self, verb: str | None = None) -> list[RunRecord]:
        return [run for run in records.load_records(self.results) if verb in (None, run.verb)]

    def checkpoint(self, run: RunRecord) -> Path:
        return self.results / "checkpoints" / run.run_id

    def weights(self, run: RunRecord) -> dict[str, torch.Tensor]:
        return load_file(self.checkpoint(run) / "model.safetensors")
