"""Trainings that diverge: one line, a record that says so, and nothing that is made again or crashes after it."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_runner import Runner
from report_runs import make_train
from rich.console import Console

from infini import records
from infini.cli import main as cli
from infini.config.compose import compose
from infini.errors import DivergedError, InputError
from infini.evaluation.decoding import sample_token
from infini.evaluation.perplexity import Binned, Streamed, metrics
from infini.records import RunRecord
from infini.report.load import load_report
from infini.report.search import SearchReport, build_search
from infini.runs import reproduce, reproduce_booksum, reproduce_passkey, reproduce_text
from infini.runs.common import find_training
from infini.runs.workers import Worker
from infini.training.checkpoint import load_model, save_model
from infini.training.module import LanguageModelModule

HUGE = ("optimizer=adamw", "optimizer.lr=30", "optimizer.weight_decay=0", "recipe.schedule=constant", "recipe.steps=6")
"""A rate at which the loss is of some thousands of nats, and finite."""


def no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def training_step(*_: Any) -> torch.Tensor:
        raise AssertionError("a step was made")

    monkeypatch.setattr(LanguageModelModule, "training_step", training_step)


def test_a_loss_too_high_for_a_perplexity_is_on_record_and_not_made_again(
    infini: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = infini.error("train", *HUGE, "recipe.save_every=2")
    (record,) = infini.records()
    path = records.record_path(infini.results, record.run_id)
    assert said.startswith("optimizer.lr=30.0: after the last step, 6, the validation nll per token is ")
    assert said.endswith(f"To rerun with this rate, remove {path}")
    assert record.diverged is not None and record.diverged["step"] == 6 and record.diverged["reason"] in said
    assert record.results == {} and len(record.series["loss_curve"]) == 6
    assert not (infini.results / "checkpoints").exists()
    with monkeypatch.context() as patch:
        no_training(patch)
        assert path.name in infini.error("train", *HUGE, "recipe.save_every=2")
        assert len(infini.records()) == 1
        path.unlink()
        # The command resumes at the last step's checkpoint: it makes no step, and prints one line again.
        assert infini.error("train", *HUGE, "recipe.save_every=2") == said
        assert infini.records() == [records.read_record(path)]
    # A lower rate is another training.
    infini("train", *HUGE, "optimizer.lr=0.01")


def test_a_divergence_without_a_checkpoint_leaves_no_folder(infini: Runner) -> None:
    said = infini.error("train", "optimizer=adamw", "optimizer.lr=1e30", "recipe.steps=6")
    assert "There is no checkpoint yet. To rerun with this rate, remove" in said
    assert not list((infini.results / "unfinished").iterdir())


def test_a_training_that_diverged_is_no_training_of_a_cell(infini: Runner) -> None:
    infini.error("train", *HUGE)
    (record,) = infini.records()
    assert find_training(compose([*infini.settings, *HUGE]), with_model=False) is None
    assert "no trained model for" in infini.error("eval")
    assert record.run_id in infini.error("eval", f"checkpoint={record.run_id}")


def test_on_other_texts_it_may_go_right(infini: Runner, corpus: Path, tmp_path: Path) -> None:
    other = shutil.copytree(corpus, tmp_path / "other")
    infini.settings.append(f"task.data_dir={other}")
    infini.error("train", *HUGE)
    (other / "train" / "train0.txt").write_text("Another book.")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(AssertionError, match="a step was made"):
        no_training(patch)
        infini("train", *HUGE)


def test_a_damaged_record_of_another_training_stops_none(infini: Runner) -> None:
    (infini.results / "runs").mkdir(parents=True)
    (infini.results / "runs" / "2020-train-x.json").write_text("{")
    infini("train")


def test_the_field_of_a_record_is_there_for_trainings_that_diverged_alone() -> None:
    made = make_train("rmt", 1)
    assert "diverged" not in json.loads(made.to_json())
    assert RunRecord.from_json(made.to_json()) == made
    made.diverged = {"step": 7, "reason": "the loss at step 7 is nan"}
    assert RunRecord.from_json(made.to_json()) == made
    content = json.loads(made.to_json()) | {"diverged": 7}
    with pytest.raises(ValueError, match="'diverged' is not an object"):
        RunRecord.from_json(json.dumps(content))


def streamed(nll: float) -> Streamed:
    binned = Binned([0, 64], np.array([[nll]]), np.array([[10]]))
    return Streamed(binned, binned)


@pytest.mark.parametrize(
    ("nll", "perplexity", "by_word"),
    [(20.0, math.exp(2.0), math.exp(4.0)), (5000.0, math.exp(500.0), None), (1e6, None, None), (math.nan, None, None)],
)
def test_a_perplexity_that_no_float_holds_has_no_value(
    nll: float, perplexity: float | None, by_word: float | None
) -> None:
    found = metrics(streamed(nll), np.array([5]), np.array([50]))
    assert found["perplexity"]["value"] == (None if perplexity is None else pytest.approx(perplexity))
    assert found["word_perplexity"]["value"] == (None if by_word is None else pytest.approx(by_word))


@pytest.mark.parametrize("factor", [1e5, 1e38], ids=["finite", "not finite"])
def test_a_model_whose_loss_is_huge_is_evaluated(with_model: Runner, factor: float) -> None:
    (trained,) = with_model.records("train")
    folder = with_model.checkpoint(trained)
    model, description = load_model(folder, torch.device("cpu"))
    with torch.no_grad():
        for weights in model.parameters() if factor > 1e30 else (model.output_weight,):
            weights.mul_(factor)
    save_model(folder, model, {key: value for key, value in description.items() if key != "weights_sha256"})
    words = ["scale.eval_max_tokens=256", "scale.knockout_max_tokens=128"]
    out = with_model("eval", *words)
    (record,) = with_model.records("eval")
    (path,) = with_model.results.glob("runs/*-eval-*.json")
    stored = json.loads(path.read_text(encoding="utf-8"))["results"]
    for name in ("perplexity", "word_perplexity"):
        assert stored[name]["value"] is None
        (line,) = [line for line in out.splitlines() if line.startswith(f"{name} ")]
        assert line.split()[1] == "—"
    assert (record.metric("nll_per_token") is None) is (factor > 1e30)
    assert "—" in with_model("table")


def test_no_token_is_drawn_from_outputs_that_are_not_finite() -> None:
    for wrong in (math.nan, math.inf):
        for temperature in (0.0, 1.0):
            with pytest.raises(InputError, match="outputs are not finite"):
                sample_token(torch.tensor([0.0, wrong, 1.0]), temperature, 0.9, torch.Generator())
    # One that is never to be drawn is no fault.
    assert sample_token(torch.tensor([0.0, -math.inf, 9.0]), 0.0, 0.9, torch.Generator()) == 2


@pytest.mark.parametrize(
    ("name", "module", "job"),
    [
        ("table3_passkey", reproduce_passkey, "_fill"),
        ("table4_booksum", reproduce_booksum, "_system"),
    ],
)
def test_a_job_that_diverges_leaves_the_others_to_be_made(
    name: str, module: Any, job: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    asked: list[int] = []

    def made(*_: Any) -> RunRecord:
        asked.append(len(asked))
        if len(asked) == 1:
            raise DivergedError("optimizer.lr=0.02: the loss at step 7 is nan")
        return make_train("rmt", 1)

    monkeypatch.setattr(module, job, made)
    monkeypatch.setattr(module, "_reference", lambda *_: make_train("lead", 1), raising=False)
    monkeypatch.setattr(reproduce.table, "show", lambda *_: print("the table") or 0)
    assert cli.main(["reproduce", f"report={name}", f"results_dir={tmp_path}", "seed=1,2"]) == cli.USAGE_ERROR
    out, err = capfd.readouterr()
    assert len(asked) > 2 and "the table" in out
    assert "optimizer.lr=0.02: the loss at step 7 is nan" in err
    last = err.splitlines()[-1]
    assert last.startswith("infini: error: optimizer.lr: too high for ") and last.endswith(
        "seed 1; the other cells are filled"
    )


def test_a_cell_of_a_report_does_not_repeat_a_training_that_diverged(
    infini: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*infini.settings, *HUGE]
    with pytest.raises(DivergedError, match="optimizer.lr=30"):
        reproduce_text._fill(compose(words), words, Worker(Console()))
    (record,) = infini.records()
    no_training(monkeypatch)
    with pytest.raises(DivergedError, match=record.run_id):
        reproduce_text._fill(compose(words), words, Worker(Console()))
    assert infini.records() == [record]


def test_the_table_of_a_search_names_the_record_of_what_diverged() -> None:
    report = load_report(compose(["report=lr_search"]).report)
    assert isinstance(report, SearchReport)
    failed = make_train("rmt", 1, run_id="rmt-failed", diverged={"step": 7, "reason": "the loss at step 7 is nan"})
    found = {"pg19": {"rmt": {0.01: failed, 0.02: None}}}
    (table,) = build_search(report, "laptop", found, {"rmt-failed"}).tables
    cell = table.cell("rmt", "0.01")
    assert (cell.text, cell.run_ids, cell.source, cell.value) == ("failed", ("rmt-failed",), "published", None)
