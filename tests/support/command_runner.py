"""Command lines run in this process on tiny models; the fixtures that hand it out are in conftest.py."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_runs import SUMMARIES, TINY

from infini import records
from infini.cli import main as cli
from infini.commands import verbs
from infini.config.compose import compose
from infini.config.schema import key_of
from infini.records import RunRecord
from infini.report.load import load_report


def read_by(words: Sequence[str], settings: Sequence[str]) -> list[str]:
    """Those of the settings that the verb, words[0], reads with the report that is named: it refuses all others."""
    found = [text for text in settings if verbs()[words[0]].reads(key_of(text))]
    if words[0] not in ("table", "figure", "publish", "reproduce"):
        return found
    report = load_report(compose([text for text in words if text.startswith(("report=", "experiment="))]).report)
    return [text for text in found if verbs()[words[0]].reads(key_of(text), report)]


class Runner:
    """Runs command lines on a corpus and a results folder; `error` is for those that must fail with one line.

    Settings that tests share between verbs go to those that read them.
    """

    def __init__(self, corpus: Path, results: Path, capfd: pytest.CaptureFixture[str]) -> None:
        self.results, self.capfd = results, capfd
        self.settings = [*TINY, "logger=none", f"task.data_dir={corpus}", f"results_dir={results}"]
        self.out = self.err = ""

    def __call__(self, *words: str, code: int = 0) -> str:
        self.capfd.readouterr()
        settings = self.settings
        if words[0] in ("generate", "summarize"):
            # A checkpoint was trained with what it was trained with.
            settings = [text for text in settings if not text.startswith(("dims.", "recipe.", "scale.", "task."))]
        shared = [text for text in words[1:] if text in SUMMARIES or text.startswith("task.data_dir=")]
        unread = set(shared) - set(read_by(words, shared))
        own = [text for text in words[1:] if text not in unread]
        returned = cli.main([words[0], *read_by(words, settings), *own])
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
