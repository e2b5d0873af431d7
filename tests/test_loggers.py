"""Where a training's curves go."""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import TINY, write_corpus

import cli
from infini import records
from infini.errors import InputError
from infini.training import loggers
from infini.training.module import LanguageModelModule


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def train(corpus: Path, results: Path, *words: str) -> int:
    settings = [f"task.data_dir={corpus}", f"results_dir={results}", "recipe.steps=30", "recipe.save_every=10"]
    return cli.main(["train", *TINY, *settings, *words])


def test_curves_go_to_a_csv_file_by_default_and_every_sitting_keeps_its_own(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = LanguageModelModule.training_step

    def stopping(self: LanguageModelModule, batch: Any, index: int) -> Any:
        if self.global_step == 25:
            raise KeyboardInterrupt
        return real(self, batch, index)

    with monkeypatch.context() as patch:
        patch.setattr(LanguageModelModule, "training_step", stopping)
        assert train(corpus, tmp_path) == cli.INTERRUPTED
    assert train(corpus, tmp_path) == 0
    (run,) = records.load_records(tmp_path)
    steps = []
    for folder in (run.run_id, f"{run.run_id}-2"):
        with open(tmp_path / "logs" / folder / "metrics.csv", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        steps.append([int(row["step"]) for row in rows])
        known = dict(run.series["loss_curve"])
        assert all(float(row["loss"]) == pytest.approx(known[int(row["step"]) + 1], abs=1e-4) for row in rows)
    assert steps == [[9, 19], [29]]


@pytest.mark.parametrize(("key", "mode"), [("", "offline"), ("0" * 40, None)])
def test_wandb_asks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, mode: str | None) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "")
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setattr(type(wandb.api), "api_key", property(lambda self: key))
    made = loggers.make_logger("wandb", tmp_path / "logs", "run-1")
    assert os.environ.get("WANDB_MODE") == mode
    assert made._wandb_init["id"] == "run-1" and made._wandb_init["project"] == "infini"


def test_wandb_goes_offline_where_nobody_is_logged_in(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("HOME", str(tmp_path))
    # Set and taken away, so that what the logger sets is gone after the test.
    monkeypatch.setenv("WANDB_MODE", "")
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    for seed in (1, 2):
        assert train(corpus, tmp_path / "results", "logger=wandb", f"seed={seed}") == 0
    # A run each, though both are trained in one process.
    kept = [path.name for path in (tmp_path / "results" / "logs").glob("wandb/offline-run-*")]
    ids = [run.run_id for run in records.load_records(tmp_path / "results")]
    assert len(kept) == 2 and all(any(name.endswith(run_id) for name in kept) for run_id in ids)


def test_tensorboard_is_given_the_curve(corpus: Path, tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    assert train(corpus, tmp_path, "logger=tensorboard") == 0
    (run,) = records.load_records(tmp_path)
    read = accumulator.EventAccumulator(str(tmp_path / "logs" / run.run_id))
    read.Reload()
    known = dict(run.series["loss_curve"])
    points = read.Scalars("loss")
    assert [point.step for point in points] == [9, 19, 29]
    assert all(point.value == pytest.approx(known[point.step + 1], abs=1e-4) for point in points)


def test_a_package_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.fabric.loggers import tensorboard

    # What Lightning asks before it makes one.
    monkeypatch.setattr(tensorboard, "_TENSORBOARD_AVAILABLE", False)
    monkeypatch.setattr(tensorboard, "_TENSORBOARDX_AVAILABLE", False)
    with pytest.raises(InputError, match="^logger=tensorboard: needs a package .* pip install tensorboard"):
        loggers.make_logger("tensorboard", tmp_path, "run-1")
    assert loggers.make_logger("none", tmp_path, "run-1") is False
