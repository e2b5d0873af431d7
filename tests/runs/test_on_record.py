"""Recorded evaluations that fill a cell of a reproduction: those that asked the same of the same model."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from report_runs import make_train
from rich.console import Console

from infini import records
from infini.cli import main as cli
from infini.config.compose import compose
from infini.config.schema import Config
from infini.records import RunRecord
from infini.report.load import load_report
from infini.runs import (
    common,
    reproduce,
    reproduce_booksum,
    reproduce_long_context,
    reproduce_passkey,
    reproduce_text,
)
from infini.runs.workers import Worker

UNTRAINED = ["task=passkey", "model=llm", "parallel.precision=bf16", "length=[1K]", "depth=[start]"]


@pytest.fixture(autouse=True)
def same_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """All records are of the current texts."""
    for module in (common, reproduce):
        monkeypatch.setattr(module, "on_the_data", lambda cfg, runs, split: reversed(runs))


def recorded(cfg: Config, verb: str = "eval", parent: str | None = None, **changes: Any) -> RunRecord:
    """A record of a run of this configuration."""
    model = str(cfg.model["name"])
    stated = {"run_id": f"{verb}-{cfg.seed}", "task": cfg.task.name, "scale": cfg.scale.name, "config": asdict(cfg)}
    run = make_train(model, cfg.seed, **{**stated, "verb": verb, "parent": parent, **changes})
    records.write_record(run, cfg.results_dir)
    return run


def rows_of(report: str) -> Any:
    """The rows that a report declares."""
    declared: Any = load_report(compose([f"report={report}"]).report)
    return declared.rows


@pytest.mark.parametrize(
    ("other", "found"),
    [
        ("seed=1", True),
        # This changes only the speed of reading.
        ("task.rows_per_call=1", True),
        # It has an effect through the model's positions alone.
        ("task.positions=t5", True),
        # No training, no recipe.
        ("recipe.steps=7", True),
        ("seed=2", False),
        ("scale=gpu", False),
        ("parallel.precision=fp32", False),
        ("model.memory=none", False),
        ("dims.segment_length=64", False),
        ("task.examples=3", False),
        ("task.knockout=reset", False),
        ("length=[1K,2K]", False),
    ],
)
def test_an_untrained_models_answers_are_those_of_its_seed_scale_and_precision(
    other: str, found: bool, tmp_path: Path
) -> None:
    words = [*UNTRAINED, f"results_dir={tmp_path}"]
    run = recorded(compose([*words, "dims.segment_length=512"]))
    asked = [*words, "dims.segment_length=512", other]
    known = reproduce_passkey._evaluated(compose(asked), asked, None)
    assert (known is not None and known.run_id == run.run_id) == found


def test_an_option_that_did_not_exist_yet_equals_one_that_is_off(tmp_path: Path) -> None:
    """The model, the task and the sizes got options since that run."""
    words = ["task=booksum", "model=infini_linear", f"results_dir={tmp_path}"]
    cfg = compose(words)
    assert cfg.dims.n_kv_heads is None and getattr(cfg.task, "chat", "") is None
    new = {key for key, value in cfg.model.items() if value is None}
    assert new
    training = recorded(cfg, "train")
    run = recorded(cfg, parent=training.run_id)
    for key in new:
        del run.config["model"][key]
    del run.config["dims"]["n_kv_heads"], run.config["task"]["chat"], run.config["task"]["positions"]
    records.write_record(run, tmp_path)
    assert reproduce.evaluations(cfg, words, training, "test") == [run]
    run.config["model"]["gate_init"] = "zeros"
    records.write_record(run, tmp_path)
    assert reproduce.evaluations(cfg, words, training, "test") == []


def test_evaluations_of_an_untrained_model_are_found(tmp_path: Path) -> None:
    words = ["task=long_context", "model=llm", "length=[1K]", "dims.segment_length=512", f"results_dir={tmp_path}"]
    cfg = compose(words)
    cells = [{"subtask": name, "length": 1024, "examples": 100} for name in cfg.task.subtasks]  # type: ignore[attr-defined]
    run = recorded(cfg, series={"cells": cells})
    for key in [key for key, value in cfg.model.items() if value is None]:
        del run.config["model"][key]
    records.write_record(run, tmp_path)
    for other, found in (("seed=1", True), ("seed=2", False), ("parallel.precision=fp32", False)):
        asked = [*words, other]
        assert (reproduce_long_context._evaluated(compose(asked), asked, None) is not None) == found, other


@pytest.mark.parametrize(
    ("was", "asked", "found"),
    [
        ([], "scale.eval_segments_per_call=2", True),
        ([], "scale.knockouts=false", True),
        ([], "scale.knockout_max_tokens=9", False),
        (["scale.knockouts=false"], "scale.knockouts=false", True),
        (["scale.knockouts=false"], "scale.knockouts=true", False),
        ([], "scale.eval_max_tokens=9", False),
        (["scale.eval_max_tokens=9"], "seed=1", False),
        ([], "scale.vocab_size=300", False),
    ],
)
def test_a_record_with_all_that_is_asked_fills_a_cell_of_a_text_table(
    was: list[str], asked: str, found: bool, tmp_path: Path
) -> None:
    words = ["report=table2_lm", "task=pg19", "model=local", f"results_dir={tmp_path}"]
    training = recorded(compose(words), "train")
    recorded(compose([*words, *was]), parent=training.run_id)
    cell = [*words, asked]
    assert (reproduce_text._evaluated(compose(cell), cell, training) is not None) == found


def planned(words: list[str], fill: str, tmp_path: Path) -> list[tuple[str, str]]:
    """Verb and task of the runs that a cell of a passkey table misses."""
    cfg = compose([*words, f"results_dir={tmp_path}"])
    report: Any = load_report(cfg.report)
    worker = Worker(Console(quiet=True), planning=True)
    job = reproduce_passkey._Job("passkey", report.rows[fill], "laptop", (f"results_dir={tmp_path}",), 1)
    reproduce_passkey._fill(report, job, worker)
    return [(run.record.verb, run.record.task) for run in worker.planned.values()]


@pytest.mark.parametrize("row", ["linear", "linear_finetuned", "linear_zero_shot"])
def test_a_filled_cell_of_prompts_needs_no_model(row: str, tmp_path: Path) -> None:
    words = ["report=table3_passkey"]
    report: Any = load_report(compose(words).report)
    job = reproduce_passkey._Job("passkey", report.rows[row], "laptop", (f"results_dir={tmp_path}",), 1)
    parent = None
    if job.row.start:
        parent = recorded(compose(job.pretraining()), "train", run_id="train-start").run_id
        assert planned(words, row, tmp_path)[0] == ("train", "pg19")
    if job.row.recipe:
        parent = recorded(compose(job.overrides(parent)), "train").run_id
    trained = records.read_record(records.record_path(tmp_path, str(parent))).config
    questions = asdict(compose(reproduce_passkey._questions(job)))
    held = {group: trained[group] for group in ("model", "dims", "recipe", "optimizer", "init_from")}
    recorded(compose(reproduce_passkey._questions(job)), parent=parent, config={**questions, **held})
    assert planned(words, row, tmp_path) == []


def test_a_model_that_is_there_is_asked_without_what_it_started_from(tmp_path: Path) -> None:
    words = ["report=table3_passkey"]
    report: Any = load_report(compose(words).report)
    row = report.rows["linear_finetuned"]
    job = reproduce_passkey._Job("passkey", row, "laptop", (f"results_dir={tmp_path}",), 1)
    start = recorded(compose(job.pretraining()), "train", run_id="train-start")
    tuned = recorded(compose(job.overrides(start.run_id)), "train")
    (tmp_path / "checkpoints" / tuned.run_id).mkdir(parents=True)
    assert planned(words, "linear_finetuned", tmp_path) == [("eval", "passkey")]


def test_a_filled_cell_of_summaries_needs_no_model(tmp_path: Path) -> None:
    words = ["task=booksum", "model=infini_linear", "length=[1K]", f"results_dir={tmp_path}"]
    training = recorded(compose(words), "train")
    run = recorded(compose(words), parent=training.run_id, series={"cells": [{"length": 1024}]})
    worker = Worker(Console(quiet=True), planning=True)
    assert reproduce_booksum._system(words, worker, untrained=False) == run and not worker.planned
    longer = [text.replace("1K", "1K,2K") for text in words]
    reproduce_booksum._system(longer, worker, untrained=False)
    assert [made.record.verb for made in worker.planned.values()] == ["train", "eval"]


def test_a_filled_cell_of_long_contexts_needs_no_model(tmp_path: Path) -> None:
    rows = {"tried": {"title": "Tried", "model": "llm", "trained_on": "pg19", "settings": ["dims.segment_length=64"]}}
    report: Any = load_report({**compose(["report=long_context"]).report, "rows": rows, "run": "all"})
    worker = Worker(Console(quiet=True), planning=True)
    asked = [f"results_dir={tmp_path}", "length=[1K]", "task.subtasks=[niah_single_1]"]
    own = ["model=llm", "dims.segment_length=64", "seed=1"]
    training = recorded(compose([asked[0], "task=pg19", *own]), "train")
    cells = [{"subtask": "niah_single_1", "length": 1024, "examples": 500}]
    run = recorded(compose([*asked, "task=long_context", *own]), parent=training.run_id, series={"cells": cells})
    line = reproduce_long_context._fill(report, report.rows["tried"], asked, 1, worker)
    assert line.startswith(f"{run.run_id}:") and not worker.planned


def test_a_plan_does_not_repeat_what_diverged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = reproduce_passkey._Job("passkey", rows_of("table3_passkey")["linear"], "laptop", (), 1)
    words = [*job.overrides(None), f"results_dir={tmp_path}"]
    how = {"step": 5, "reason": "the loss at step 5 is nan"}
    run = recorded(compose(words), "train", run_id="2026-train-1", diverged=how)
    asked = ["reproduce", "report=table3_passkey", "report.run=[linear,delta]", f"results_dir={tmp_path}", "plan=true"]
    assert cli.main(asked) == 0
    *runs, failed, last = capsys.readouterr().out.splitlines()[:4]
    assert [line.split("  ")[-1].split(",")[0] for line in runs] == ["train passkey", "eval passkey"]
    assert all("infini_delta" in line for line in runs)
    assert failed.lstrip().startswith("diverged  Linear, scratch, penalty on writes, seed 1: optimizer.lr=")
    assert "the loss at step 5 is nan" in failed and str(records.record_path(tmp_path, run.run_id)) in failed
    assert last == "1 training and 1 evaluation to run; 0 cells filled; 1 cell diverged"
