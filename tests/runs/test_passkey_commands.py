"""The passkey task from end to end: tiny models, real files, an evaluation that is stopped and resumed."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from command_runner import read_by
from safetensors.torch import load_file
from tiny_runs import TINY, write_corpus

from infini import records
from infini.cli import main as cli
from infini.evaluation import result_cache as kept
from infini.records import RunRecord
from infini.runs import evaluate, reproduce_passkey
from infini.tasks.passkey import evaluation
from infini.tasks.passkey.answers import _Reader
from infini.training.module import LanguageModelModule

SETTINGS = [
    *(text for text in TINY if not text.startswith(("recipe.batch", "recipe.segments"))),
    "dims.segment_length=64",
    "recipe.batch_size=1",
    "recipe.segments_per_sequence=3",
    "logger=none",
]
PASSKEY = [*SETTINGS, "task=passkey", "recipe.curriculum=null", "task.examples=2", "length=256,512"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(records, "published_dir", lambda: tmp_path / "published")
    minutes = itertools.count()
    monkeypatch.setattr(records, "utc_now", lambda: f"2100-01-01T00:{next(minutes):02d}:00Z")


def infini(capfd: pytest.CaptureFixture[str], verb: str, *words: str, code: int = 0) -> tuple[str, str]:
    """The output of a command, on both streams. Settings go to verbs that read them; the others refuse them."""
    capfd.readouterr()
    returned = cli.main([verb, *read_by([verb, *words], words)])
    out, err = capfd.readouterr()
    assert returned == code, err
    return out, err


def runs(verb: str, folder: str = "outputs/results") -> list[RunRecord]:
    return [run for run in records.load_records(folder) if run.verb == verb]


def test_train_then_eval_by_length_and_depth(capfd: pytest.CaptureFixture[str]) -> None:
    infini(capfd, "train", *PASSKEY)
    (trained,) = runs("train")
    assert set(trained.results) == {"validation_token_accuracy", "validation_exact_match"}
    assert trained.data["tokenizer"].startswith("wordlevel") and trained.cost["tokens_seen"] > 0
    out, err = infini(capfd, "eval", *PASSKEY, "depth=start,0.3,end")
    (evaluated,) = runs("eval")
    cells = evaluated.series["cells"]
    assert [(cell["length"], cell["depth"]) for cell in cells] == [
        (length, depth) for length in (256, 512) for depth in ("start", "0.3", "end")
    ]
    for cell in cells:
        assert cell["examples"] == 2 and cell["tokens"] == 10
        assert 0 <= cell["low"] <= cell["token_accuracy"] <= cell["high"] <= 1
        assert cell["seconds"] > 0 and cell["tokens_per_second"] > 0 and cell["peak_memory_bytes"] > 0
    assert err.count("token accuracy") == 6 and "n = 2" in err
    examples = [
        json.loads(line)
        for line in records.record_path("outputs/results", evaluated.run_id)
        .with_suffix(".jsonl")
        .read_text()
        .splitlines()
    ]
    assert len(examples) == 12
    right = sum(entry["right"] for entry in examples)
    assert evaluated.metric("token_accuracy") == pytest.approx(right / 60)
    assert "token_accuracy" in out
    assert "half_dilution: as many tokens of filler together weigh as much as the key's sentence" in out
    assert all(cell["same_segment"] == 0 for cell in cells if cell["depth"] != "end")


def test_a_length_without_room_is_refused_before_the_weights_are_read(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    infini(capfd, "train", *PASSKEY)
    monkeypatch.setattr(evaluate, "load_model", lambda *_: pytest.fail("the weights are read"))
    _, err = infini(capfd, "eval", *PASSKEY[:-1], "length=512,40", code=2)
    assert "infini: error: length=40: too short for a passkey prompt" in err


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the peak cannot be started anew here")
def test_a_cell_has_a_peak_of_its_own(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    infini(capfd, "train", *PASSKEY)
    decode, size = _Reader.decode, 2**28

    def large(self: Any, run: Any, questions: Any) -> Any:
        if (questions[0].length, questions[0].depth) == (512, "start"):
            torch.ones(size // 4)
        return decode(self, run, questions)

    monkeypatch.setattr(_Reader, "decode", large)
    infini(capfd, "eval", *PASSKEY, "depth=start,0.3,end")
    (run,) = runs("eval")
    peaks = {(cell["length"], cell["depth"]): cell["peak_memory_bytes"] for cell in run.series["cells"]}
    highest = peaks.pop((512, "start"))
    assert max(peaks.values()) < highest - size // 2
    assert run.cost["peak_memory_bytes"] >= highest


def test_an_evaluation_that_was_stopped_asks_only_what_is_missing(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    infini(capfd, "train", *PASSKEY)
    infini(capfd, "eval", *PASSKEY)
    (straight,) = runs("eval")
    real = kept.ResultCache.add
    added: list[str] = []

    def add(self: Any, name: str, entry: dict[str, Any]) -> None:
        if len(added) == 5:
            raise KeyboardInterrupt
        added.append(name)
        real(self, name, entry)

    with monkeypatch.context() as patch:
        patch.setattr(kept.ResultCache, "add", add)
        infini(capfd, "eval", *PASSKEY, code=cli.INTERRUPTED)
    assert len(runs("eval")) == 1
    _, err = infini(capfd, "eval", *PASSKEY)
    assert "7 questions (5 were answered before)" in err
    resumed = runs("eval")[-1]
    assert resumed.cost["resumed"] and not straight.cost["resumed"]
    for cell, expected in zip(resumed.series["cells"], straight.series["cells"], strict=True):
        assert cell["token_accuracy"] == expected["token_accuracy"] and cell["examples"] == expected["examples"]
    assert not list(Path("outputs/results/unfinished").glob("*.jsonl"))


def test_examples_of_a_larger_evaluation_that_was_stopped_do_not_count(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    infini(capfd, "train", *PASSKEY)
    with monkeypatch.context() as patch:
        patch.setattr(evaluation, "_results", lambda entries: (_ for _ in ()).throw(KeyboardInterrupt))
        infini(capfd, "eval", *PASSKEY, "task.examples=3", code=cli.INTERRUPTED)
    asked: list[Any] = []

    def answered(model: Any, questions: list[Any], *_: Any, **__: Any) -> tuple[()]:
        asked.extend(questions)
        return ()

    monkeypatch.setattr(evaluation, "answer_questions", answered)
    infini(capfd, "eval", *PASSKEY)
    evaluated = runs("eval")[-1]
    assert {cell["examples"] for cell in evaluated.series["cells"]} == {2}
    beside = records.record_path("outputs/results", evaluated.run_id).with_suffix(".jsonl")
    assert len(beside.read_text().splitlines()) == 12
    # All of them were answered before, and the record counts what they read.
    assert not asked and evaluated.cost["resumed"] and evaluated.cost["tokens_seen"] > 1000


def test_a_model_is_asked_for_as_many_digits_as_it_learned(capfd: pytest.CaptureFixture[str]) -> None:
    infini(capfd, "train", *PASSKEY, "task.digits=6")
    for words, digits in (([], 6), (["task.digits=4"], 4)):
        infini(capfd, "eval", *PASSKEY, "depth=start", *words)
        run = runs("eval")[-1]
        assert run.results["token_accuracy"]["n"] == 4 * digits and run.config["task"]["digits"] == digits


def test_the_record_of_an_evaluation_has_the_settings_of_its_training(capfd: pytest.CaptureFixture[str]) -> None:
    """It had the defaults of those that only trainings read."""
    infini(capfd, "train", *PASSKEY, "task.few_digit_share=0.25", "task.cut_key_share=0.5")
    infini(capfd, "eval", "task=passkey", "length=256", "task.examples=1", *SETTINGS[-1:])
    task = runs("eval")[-1].config["task"]
    assert (task["few_digit_share"], task["cut_key_share"]) == (0.25, 0.5)


def test_a_training_stopped_after_a_change_of_stage_ends_as_if_it_had_not_been(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Every step's loss is low enough, so that the stages are left one step after the other.
    words = ["train", *SETTINGS, "task=passkey", "recipe.curriculum=[[32,192],[64,256]]", "recipe.advance_below=100"]
    words += ["recipe.steps=8", "recipe.save_every=1", "recipe.length_extension=50", "recipe.length_extension_share=1"]
    words += ["recipe.long_history=[2,20]"]
    infini(capfd, *words, "results_dir=straight")
    real = LanguageModelModule.training_step
    for stop in (1, 2, 5):
        with monkeypatch.context() as patch:

            def step(self: Any, batch: Any, index: int, stop: int = stop) -> Any:
                if self.global_step == stop:
                    raise KeyboardInterrupt
                return real(self, batch, index)

            patch.setattr(LanguageModelModule, "training_step", step)
            infini(capfd, *words, "results_dir=stopped", code=cli.INTERRUPTED)
    infini(capfd, *words, "results_dir=stopped")
    (straight,), (stopped,) = runs("train", "straight"), runs("train", "stopped")
    assert straight.series["stage_steps"] == [1, 2] and straight.series["in_last_stage"]
    assert straight.series["recall_curve"]
    assert stopped.cost["resumed"] and stopped.series == straight.series and stopped.results == straight.results
    weights = [
        load_file(Path(folder) / "checkpoints" / run.run_id / "model.safetensors")
        for folder, run in (("straight", straight), ("stopped", stopped))
    ]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_another_segment_length_can_be_asked_for(capfd: pytest.CaptureFixture[str]) -> None:
    infini(capfd, "train", *PASSKEY)
    infini(capfd, "eval", *PASSKEY, "dims.segment_length=32", "length=256", "depth=start")
    assert runs("eval")[-1].config["dims"]["segment_length"] == 32
    _, err = infini(capfd, "eval", *PASSKEY, "dims.d_ff=64", "length=256", code=2)
    assert "dims.d_ff=64: the checkpoint was trained with 32" in err


@pytest.fixture
def small_table(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Overrides that make the rows of table 3 small."""
    recipe = ["recipe.steps=2", "recipe.warmup_steps=1", "recipe.batch_size=1", "recipe.segments_per_sequence=3"]
    dims = ["dims.d_model=16", "dims.n_layers=1", "dims.n_heads=2", "dims.d_key=8", "dims.d_ff=32"]
    return [
        "report=table3_passkey",
        "report.lengths=[512]",
        "length=512",
        "task.examples=1",
        "dims.segment_length=64",
        "recipe.curriculum=null",
        *recipe,
        *dims,
        "logger=none",
        "parallel.accelerator=cpu",
        "parallel.precision=fp32",
    ]


def test_reproduce_makes_the_rows_that_are_missing_and_only_those(
    capfd: pytest.CaptureFixture[str], small_table: list[str]
) -> None:
    rows = "report.run=[linear_extended,linear_reset,linear_frozen,local]"
    out, _ = infini(capfd, "reproduce", *small_table, rows)
    # The knocked-out memory is that of the model of the row above it.
    assert len(runs("train")) == 3 and len(runs("eval")) == 4
    frozen = next(run for run in runs("train") if run.config["optimizer"]["gate_lr"] == 0)
    assert {value for layer in frozen.series["gates"] for value in layer} == {0.5}
    for title in ("Linear, scratch, length extension", "Control: local attention", "Ablation: Linear, gates fixed"):
        assert title in out
    assert "96/94/100" not in out and "yours" in out
    infini(capfd, "reproduce", *small_table, rows)
    assert len(runs("train")) == 3 and len(runs("eval")) == 4
    out, _ = infini(capfd, "figure", *small_table)
    assert "laptop_accuracy.png" in out and "laptop_gates.png" in out


@pytest.mark.slow
def test_a_row_beyond_the_paper_asks_its_own_questions(
    capfd: pytest.CaptureFixture[str], small_table: list[str]
) -> None:
    # These rows have a batch and a length of their own.
    given = [text for text in small_table if not text.startswith(("recipe.batch_size", "recipe.segments"))]
    settings = [text.replace("table3_passkey", "passkey_beyond") for text in given]
    rows = "report.run=[linear,linear_unwarned,linear_digits]"
    out, _ = infini(capfd, "reproduce", *settings, rows)
    # False keys are asked of the model that never met one; longer keys have a model of their own.
    assert sorted(run.config["task"]["digits"] for run in runs("train")) == [5, 8]
    asked = sorted((run.config["task"]["digits"], run.config["task"]["distractors"]) for run in runs("eval"))
    assert asked == [(5, 0), (5, 3), (8, 0)]
    assert {run.parent for run in runs("eval")} == {run.run_id for run in runs("train")}
    for title in ("Linear, 3 false keys, never seen in training", "Linear, 8 digits"):
        assert title in out
    infini(capfd, "reproduce", *settings, rows)
    assert len(runs("train")) == 2 and len(runs("eval")) == 3


@pytest.mark.slow
def test_rows_from_a_pretrained_model(
    capfd: pytest.CaptureFixture[str], small_table: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_corpus(tmp_path / "data" / "pg19")
    monkeypatch.setenv("INFINI_DATA_DIR", str(tmp_path / "data"))
    settings = [*small_table, "scale.vocab_size=300", "length=1K", "report.lengths=[1K]"]
    settings = [text for text in settings if not text.startswith("recipe.segments")]
    settings += ["recipe.segments_per_sequence=16"]
    real = reproduce_passkey._Job.pretraining
    quick = ["recipe.steps=2", "recipe.warmup_steps=1"]
    monkeypatch.setattr(reproduce_passkey._Job, "pretraining", lambda self: [*real(self), *quick])
    out, err = infini(capfd, "reproduce", *settings, "report.run=[linear_finetuned,linear_zero_shot]")
    # Rows say it in their titles.
    assert "its answers" not in err
    books, tuned = sorted(runs("train"), key=lambda run: run.task, reverse=True)
    assert (books.task, tuned.task) == ("pg19", "passkey")
    assert tuned.config["init_from"] == books.run_id
    assert tuned.data["tokenizer"] == books.data["tokenizer"]
    assert {run.parent for run in runs("eval")} == {books.run_id, tuned.run_id}
    lines = [line for line in out.splitlines() if "PG19," in line and "yours" in line]
    assert len(lines) >= 2
    for run, zero_shot in ((books, True), (tuned, False)):
        _, err = infini(capfd, "eval", "task=passkey", f"checkpoint={run.run_id}", "length=1K", "task.examples=1")
        assert ("checkpoint: was trained on task=pg19, so its answers are zero-shot\n" in err) is zero_shot


def test_rows_that_start_from_another_row(capfd: pytest.CaptureFixture[str], small_table: list[str]) -> None:
    settings = [text.replace("table3_passkey", "passkey_updates") for text in small_table]
    settings += [
        "report.rows.linear_512.overrides=['dims.segment_length=32','recipe.segments_per_sequence=6']",
        "report.run=[linear_512]",
    ]
    settings += ["length=1K", "report.lengths=[1K]"]
    infini(capfd, "reproduce", *settings)
    base, tuned = sorted(runs("train"), key=lambda run: run.config["dims"]["segment_length"], reverse=True)
    assert (base.config["init_from"], tuned.config["init_from"]) == (None, base.run_id)
    assert tuned.config["dims"]["segment_length"] == 32
    assert [run.parent for run in runs("eval")] == [tuned.run_id]
    out, _ = infini(capfd, "reproduce", *settings)
    assert len(runs("train")) == 2 and len(runs("eval")) == 1
    assert "Linear, segments of 512" in out


def test_fine_tuning_of_nothing_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    tiny = [*PASSKEY, "recipe.steps=1", "recipe.warmup_steps=1"]
    for recipe, said in (("passkey_laptop", False), ("passkey_laptop_finetune", True)):
        _, err = infini(capfd, "train", *tiny, f"recipe={recipe}")
        assert ("init_from is not set" in err) is said


def test_publish_takes_the_examples_along(
    capfd: pytest.CaptureFixture[str], small_table: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "git_state", lambda root: ("a" * 40, False))
    infini(capfd, "reproduce", *small_table, "report.run=linear_extended")
    (evaluated,) = runs("eval")
    assert cli.main(["publish", evaluated.run_id, "report=table3_passkey"]) == 0
    assert runs("eval", str(tmp_path / "published")) == [evaluated]
    assert records.record_path(tmp_path / "published", evaluated.run_id).with_suffix(".jsonl").is_file()
    # The published table is the project's, not one of the command line.
    _, error = infini(capfd, "publish", "report=table3_passkey", "report.lengths=[512]", code=2)
    said = "report.lengths=[512]: the published table is as the project declares it; leave it out"
    assert error.splitlines() == [f"infini: error: {said}"]


def test_an_option_with_which_a_run_would_fill_no_cell_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    for option, has in (("model.memory_decay=16", "null"), ("model.input_gate=sigmoid", "null")):
        _, error = infini(capfd, "reproduce", "report=table3_passkey", "seed=1", option, "plan=true", code=2)
        assert error.splitlines() == [
            f"infini: error: {option}: row 'Linear, scratch, length extension' of report=table3_passkey has {has}; "
            "leave it out, or take infini train and infini eval"
        ]
    frozen = ["report=table3_passkey", "report.run=[linear_frozen]", "seed=1", "plan=true"]
    infini(capfd, "reproduce", *frozen, "model.gate_init=zeros", "model.memory_decay=null")
