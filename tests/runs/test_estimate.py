"""A reproduction of the passkey table says at once how long it will take, by published records and a short prompt."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from report_runs import make_train
from rich.console import Console

from infini import records
from infini.config.compose import compose
from infini.demo import FOLDER
from infini.runs import estimate, reproduce_passkey
from infini.runs.demo import reading_speed
from infini.runs.workers import Worker
from infini.training.checkpoint import read_description

EXTENDED = ["task=passkey", "recipe=passkey_laptop_extended"]
REFERENCE = next(
    run
    # Reading all records takes seconds, in every process of the tests.
    for run in map(records.read_record, sorted((records.published_dir() / "runs").glob("*-eval-passkey-*.json")))
    if run.parent == read_description(FOLDER)["run_id"]
)
PUBLISHED = REFERENCE.series["cells"][0]["tokens_per_second"]
"""Tokens a second at which the packaged model read the prompt of its published evaluation."""


def configurations(*words: str) -> list[object]:
    return [compose([*EXTENDED, f"model={model}", *words]) for model in ("infini_linear", "infini_delta")]


@pytest.mark.slow
def test_the_seconds_of_records_are_scaled_by_the_speed_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    cfgs = configurations()
    monkeypatch.setattr("infini.runs.demo.reading_speed", lambda length: PUBLISHED)
    said = estimate.describe_time(cfgs, cfgs)  # type: ignore[arg-type]
    assert said == (
        "2 trainings and 2 evaluations to run, about 18 minutes here (published runs on AMD EPYC: 18 minutes; this "
        "machine now reads a prompt at 1 times its speed)"
    )
    monkeypatch.setattr("infini.runs.demo.reading_speed", lambda length: PUBLISHED / 2)
    assert "about 35 minutes here" in str(estimate.describe_time(cfgs, cfgs))  # type: ignore[arg-type]
    one = estimate.describe_time([], cfgs[:1])  # type: ignore[arg-type]
    assert str(one).startswith("0 trainings and 1 evaluation to run, about 4 minutes here")
    shorter = estimate.describe_time(configurations("recipe.steps=1800"), [])  # type: ignore[arg-type]
    assert "about 14 minutes here" in str(shorter)


def test_the_time_of_a_pretrained_model_is_that_of_its_training() -> None:
    """Its sizes are the base's, which a plan does not read."""
    trained = next(
        run
        for run in records.load_records(records.published_dir())
        if run.verb == "train" and run.model == "llm" and not run.cost.get("resumed")
    )
    cfg = compose([*trained.overrides, "parallel.accelerator=cpu"])
    assert estimate.training_seconds(cfg, [trained]) == pytest.approx(trained.cost["wall_seconds"])
    for other in ("model.train=all", "model.memory=full", "dims.segment_length=256"):
        assert estimate.training_seconds(compose([*trained.overrides, other]), [trained]) is None, other


def trained(*words: str, seconds: float) -> records.RunRecord:
    """The record of a training of these settings."""
    cfg = compose(["task=pg19", "recipe.steps=10", *words])
    return make_train(cfg.model["name"], 1, config=asdict(cfg), cost={"wall_seconds": seconds})


@pytest.mark.parametrize(
    "words",
    [
        ("task=booksum", "model=bart", "model.unlimiformer=alternating"),
        ("task=booksum", "model=primera", "model.k=512"),
        ("model=rmt", "model.memory_tokens=3"),
        ("model=infini_linear", "model.memory_decay=16"),
        ("model=full", "model.window_segments=4"),
        ("model=local", "model.positions=rotary"),
        ("model=compressive", "model.compressed_segments=4"),
        ("model=memorizing", "model.memory_segments=6"),
        ("model=autocompressor", "model.accumulated=32"),
    ],
)
def test_a_time_is_that_of_a_model_with_these_options(words: tuple[str, ...]) -> None:
    """If there is no such run, there is no estimate, however fast the model is without the option."""
    *usual, option = words
    known = [trained(*usual, seconds=1), trained(*words, seconds=20)]
    seconds = [
        estimate.training_seconds(compose(["task=pg19", "recipe.steps=20", *given]), known) for given in (usual, words)
    ]
    assert seconds == [2, 40]
    assert estimate.training_seconds(compose(["task=pg19", *words]), known[:1]) is None, option


def test_an_option_that_is_off_or_changes_no_work_has_the_time_of_the_model() -> None:
    """Records older than an option lack it."""
    run = trained("model=infini_linear", "model.positions=rotary", seconds=1)
    for key in ("memory_decay", "positions"):
        del run.config["model"][key]
    words = ["task=pg19", "recipe.steps=10", "model=infini_linear", "model.positions=rotary", "model.gate_init=zeros"]
    assert estimate.training_seconds(compose(words), [run]) == 1


def test_a_time_of_yours_is_of_such_devices_as_this_machine_would_use() -> None:
    """A results folder is shared by machines with and without a GPU, and copied from one to the next."""
    words = ["recipe.steps=10", "model=infini_linear", "parallel.accelerator=cpu", "parallel.precision=fp32"]
    cfg = compose(["task=pg19", *words, "recipe.steps=20"])
    training, evaluation = trained(*words, seconds=3), trained(*words, seconds=3)
    evaluation.verb = "eval"
    cases = (estimate.training_seconds, training, 6), (estimate.evaluation_seconds, evaluation, 3)
    for seconds_of, run, seconds in cases:
        # Older records do not say where they were.
        assert seconds_of(cfg, [run], here=True) == seconds
        for environment, like in (
            ({"device": "cpu", "bfloat16": False}, True),
            ({"device": "cuda", "bfloat16": False}, False),
            ({"device": "cpu", "bfloat16": True}, False),
        ):
            run.environment |= environment
            assert seconds_of(cfg, [run], here=True) == (seconds if like else None), environment
            assert seconds_of(cfg, [run]) == seconds, "of a published run, which is marked"


def test_a_time_is_that_of_a_training_on_as_many_devices_by_the_same_optimizer() -> None:
    words = ["task=pg19", "recipe.steps=10", "model=infini_linear", "parallel.accelerator=cpu"]
    ways = [
        [],
        ["parallel=ddp", "parallel.devices=2"],
        ["parallel=ddp", "parallel.devices=8"],
        ["parallel=ddp", "parallel.devices=2", "parallel.nodes=2"],
        ["parallel=fsdp2", "parallel.devices=2"],
        ["optimizer=adamw"],
    ]
    known = [trained(*words, *way, seconds=number) for number, way in enumerate(ways, 1)]
    for number, way in enumerate(ways, 1):
        cfg = compose([*words, *way])
        assert estimate.training_seconds(cfg, known, here=True) == number
        others = [run for run in known if run.cost["wall_seconds"] != number]
        assert estimate.training_seconds(cfg, others, here=True) is None
    assert estimate.training_seconds(compose([*words, "optimizer=adafactor"]), known) is None


@pytest.mark.parametrize("more", [(), ("recipe.sparse_loss_scale=null",), ("recipe.sparse_loss_scale=1",)])
def test_the_passkey_recipe_has_an_estimate(more: tuple[str, ...]) -> None:
    """Numbers that change no step's work make no other recipe of it."""
    cfg = compose(["task=passkey", "parallel.accelerator=cpu", *more])
    known = records.load_records(records.published_dir())
    assert estimate.training_seconds(cfg, known) is not None


def test_nothing_is_said_where_nothing_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cfgs = configurations()
    assert estimate.describe_time([], []) is None
    assert estimate.describe_time(configurations("dims.d_model=32"), []) is None  # type: ignore[arg-type]
    monkeypatch.setattr("infini.records.published_dir", lambda: tmp_path)
    assert estimate.describe_time(cfgs, cfgs) is None  # type: ignore[arg-type]


def test_what_is_evaluated_only_in_part_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infini.runs.demo.reading_speed", lambda length: PUBLISHED)
    cfgs = configurations("length=[64K]")
    said = str(estimate.describe_time(cfgs, cfgs))  # type: ignore[arg-type]
    assert re.search(r"about \d+ minutes here, not counting 2 runs without a comparable published run \(", said)


def test_the_speed_is_measured_as_it_was_published() -> None:
    """The speed is that of one thread, whatever this process uses, and of a prompt that no table asks for."""
    assert REFERENCE.environment["threads"] == 1 and REFERENCE.config["task"]["examples"] == 1
    assert len(REFERENCE.series["cells"]) == 1 and REFERENCE.series["cells"][0]["token_accuracy"] == 1
    before = torch.get_num_threads()
    assert 1_000 < reading_speed(4096) < 1e9 and torch.get_num_threads() == before


def test_it_is_the_first_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from infini.report.load import load_report

    words = ["report=table3_passkey", f"results_dir={tmp_path}"]
    cfg = compose(words)
    monkeypatch.setattr("infini.runs.demo.reading_speed", lambda length: PUBLISHED)
    monkeypatch.setattr(reproduce_passkey, "_fill", lambda report, job, console: "filled")
    worker = Worker(Console(width=200))
    reproduce_passkey.reproduce(load_report(cfg.report), cfg, words, [1], worker, ())  # type: ignore[arg-type]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("2 trainings and 2 evaluations to run, about 18 minutes here")
    assert lines.count("filled") == 2 and "not counted" not in lines[0]


def test_a_training_of_two_rows_counts_once_and_what_is_left_out_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from infini.report.load import load_report

    words = ["report=table3_passkey", f"results_dir={tmp_path}"]
    words += ["report.run=[linear_extended,linear_reset,linear_finetuned]"]
    cfg = compose(words)
    monkeypatch.setattr("infini.runs.demo.reading_speed", lambda length: PUBLISHED)
    monkeypatch.setattr(reproduce_passkey, "_fill", lambda report, job, console: "filled")
    monkeypatch.setattr(reproduce_passkey, "check_data", lambda cfg: None)
    worker = Worker(Console(width=400))
    reproduce_passkey.reproduce(load_report(cfg.report), cfg, words, [1, 2], worker, ())  # type: ignore[arg-type]
    line = capsys.readouterr().out.splitlines()[0]
    assert line.startswith("2 trainings and 4 evaluations to run")
    assert line.endswith("; not counted, done or not: 1 row with another start or questions")
