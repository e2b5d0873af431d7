"""Which evaluations on record fill a cell of a reproduction: those that asked the same of the same model."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from report_runs import make_train

from infini import records
from infini.config.compose import compose
from infini.config.schema import Config
from infini.records import RunRecord
from infini.runs import reproduce, reproduce_long_context, reproduce_passkey, reproduce_text

UNTRAINED = ["task=passkey", "model=llm", "parallel.precision=bf16", "length=[1K]", "depth=[start]"]


@pytest.fixture(autouse=True)
def same_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """All records are of the current texts."""
    monkeypatch.setattr(reproduce, "on_the_data", lambda cfg, runs, split: reversed(runs))


def recorded(cfg: Config, verb: str = "eval", parent: str | None = None, **changes: Any) -> RunRecord:
    """A record of a run of this configuration."""
    model = str(cfg.model["name"])
    stated = {"task": cfg.task.name, "scale": cfg.scale.name, "parent": parent, "config": asdict(cfg)}
    run = make_train(model, cfg.seed, run_id=f"{verb}-{cfg.seed}", verb=verb, **{**stated, **changes})
    records.write_record(run, cfg.results_dir)
    return run


@pytest.mark.parametrize(
    ("other", "found"),
    [
        ("seed=1", True),
        # How fast it is read.
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


def test_of_an_untrained_model_too(tmp_path: Path) -> None:
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
