"""A cell of a model that was trained otherwise than its row declares is marked, and proves nothing."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest
from report_runs import make_eval, make_train

from infini.config.compose import compose
from infini.records import RunRecord
from infini.report import declared
from infini.report.declared import declared_at, expected, mismatches
from infini.report.load import load_report
from infini.report.tables import RenderedReport
from infini.report.text_report import Report


def report_named(name: str) -> Report:
    report = load_report(compose([f"report={name}"]).report)
    assert isinstance(report, Report)
    return report


def with_trainings(runs: list[RunRecord], **changes: dict[str, Any]) -> list[RunRecord]:
    """The runs and what they were trained by; of infini_linear's trainings groups of the configuration are changed."""
    trainings = [make_train(run.model, run.seed) for run in runs]
    for training in trainings:
        if training.model == "infini_linear":
            for group, values in changes.items():
                training.config[group] = {**training.config.get(group, {}), **values}
    return [*runs, *trainings]


def rendered(runs: list[RunRecord]) -> RenderedReport:
    return report_named("table2_lm").render("laptop", [], runs)


def test_a_training_of_three_steps_is_marked_beside_the_others() -> None:
    runs = [make_eval(model, 1) for model in ("infini_linear", "local")]
    report = rendered(with_trainings(runs, recipe={"steps": 3}, dims={"d_model": 16}))
    main, _, measures = report.tables[:3]
    assert main.cell("infini_linear", "PG19 yours").text.endswith(" †")
    assert "†" not in main.cell("local", "PG19 yours").text
    assert [row.title for row in measures.rows] == ["Infini-Transformer (Linear) †", "Local attention only"]
    (note,) = [note for note in report.notes if note.startswith("†")]
    assert note == (
        "† PG19, yours: not as the row is declared at scale laptop: Infini-Transformer (Linear) "
        "(dims.d_model 16 instead of 128, recipe.steps 3 instead of 1200)"
    )


@pytest.mark.parametrize(
    "changes",
    [{}, {"recipe": {"loss_chunk": 7, "save_every": 10, "checkpoint_segments": 6}}, {"optimizer": {"lr": 0.5}}],
    ids=["as declared", "how it runs", "a rate where there was no search"],
)
def test_what_changes_no_result_and_a_rate_without_a_search_mark_nothing(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(declared, "tuned_rate", lambda *_: None)
    report = rendered(with_trainings([make_eval("infini_linear", 1)], **changes))
    assert not [note for note in report.notes if "†" in note]
    assert "†" not in report.tables[0].cell("infini_linear", "PG19 yours").text


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"gate_init": "zeros"}},
        # Trained before there was a choice: rotary.
        {"model": {"rope_base": 10000.0}},
        {"optimizer": {"name": "adamw"}},
        {"dims": {"segment_length": 64}},
    ],
)
def test_other_options_optimizers_and_sizes_are_apart_too(changes: dict[str, Any]) -> None:
    report = rendered(with_trainings([make_eval("infini_linear", 1)], **changes))
    assert report.tables[0].cell("infini_linear", "PG19 yours").text.endswith(" †")


@pytest.mark.parametrize(
    ("changes", "source", "way"),
    [
        ({"init_from": "elsewhere/train-other"}, "folder", "init_from train-other instead of null"),
        ({"task": {"name": "continual"}}, "folder", "task.name continual instead of pg19"),
        ({"task": {"carry_state": False}}, "folder", "task.carry_state False instead of True"),
        ({"scale": {"hub_train_documents": 1}}, "hub", "scale.hub_train_documents 1 instead of 128"),
        ({"task": {"hub_id": "a/b"}}, "hub", "task.hub_id a/b instead of emozilla/pg19"),
        # A folder is always used whole; where it is, decides nothing, and neither does what evaluations read.
        ({"scale": {"hub_train_documents": 1}, "task": {"hub_id": "a/b", "data_dir": "/c"}}, "folder", ""),
        ({"scale": {"knockouts": False, "eval_max_tokens": 9}, "task": {"positions": "rotary"}}, "hub", ""),
        ({"task": {"name": "pg19"}, "init_from": None}, "hub", ""),
    ],
)
def test_a_training_from_other_weights_or_on_other_data_is_marked(
    changes: dict[str, Any], source: str, way: str
) -> None:
    evaluation, training = make_eval("infini_linear", 1), make_train("infini_linear", 1)
    for key, value in changes.items():
        own = training.config.get(key)
        training.config[key] = {**(own or {}), **value} if isinstance(value, dict) else value
    training.data["source"] = source
    notes = [note for note in rendered([evaluation, training]).notes if note.startswith("†")]
    assert [note.partition("(Linear) ")[2] for note in notes] == [f"({way})"] * bool(way)


def test_the_weights_it_began_with_are_named_by_their_run() -> None:
    evaluation, training = make_eval("infini_linear", 1), make_train("infini_linear", 1)
    training.config["init_from"] = "elsewhere/best"
    training.environment = {**training.environment, "started_from": "train-other"}
    notes = [note for note in rendered([evaluation, training]).notes if note.startswith("†")]
    assert [note.partition("(Linear) ")[2] for note in notes] == ["(init_from train-other instead of null)"]


def test_the_task_of_an_unrecorded_training_is_unknown() -> None:
    evaluation = make_eval("infini_linear", 1)
    evaluation.config["task"] = {"name": "pg19", "carry_state": False}
    assert not [note for note in rendered([evaluation]).notes if "†" in note]


@pytest.mark.parametrize(
    "name",
    [
        "table2_lm",
        "table2_100k",
        "lm_gates",
        "lm_history_scaling",
        "rmt_sweep",
        "segment_lengths",
        "table2_budget",
        "memory_sizes",
        "drawn_segments",
        "table2_decay",
    ],
)
def test_every_row_is_as_it_declares_itself(name: str) -> None:
    """A row is compared with the training that `infini reproduce` would run: no row from it is marked."""
    report = report_named(name)
    for row in [*report.models][-3:] + [*report.models][:3]:
        settings = report.settings_of(row, "laptop")
        assert settings is not None
        cfg = compose([f"task={report.task}", f"model={report.model_of(row)}", *settings])
        assert mismatches(asdict(cfg), expected(report, row, "laptop", declared_at(report.task, "laptop"))) == []


def test_a_model_that_was_trained_on_made_up_text_is_marked() -> None:
    runs = with_trainings([make_eval("infini_linear", 1), make_eval("local", 1)])
    runs[2].data["source"] = "synthetic"
    report = rendered(runs)
    assert report.tables[0].cell("infini_linear", "PG19 yours").text.endswith(" †")
    assert "†" not in report.tables[0].cell("local", "PG19 yours").text
    (note,) = [note for note in report.notes if note.startswith("†")]
    assert note.endswith("Infini-Transformer (Linear) (trained on made-up text)")
    # If the evaluated text is made up, too, the title says so.
    for run in runs[:2]:
        run.data["source"] = "synthetic"
    assert "SYNTHETIC" in rendered(runs).title and not [note for note in rendered(runs).notes if "†" in note]


@pytest.mark.parametrize(("rate", "marked"), [(0.02, False), (0.01, True)])
def test_a_rate_that_is_not_the_searchs_is_marked(rate: float, marked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each model has a rate of its own: what was trained before the search is not what its row declares."""
    asked = []

    def found(*cell: str) -> float:
        asked.append(cell)
        return 0.02

    monkeypatch.setattr(declared, "tuned_rate", found)
    report = rendered(with_trainings([make_eval("infini_linear", 1)], optimizer={"lr": rate}))
    assert ("pg19", "laptop", "infini_linear", "muon") in asked
    notes = [note for note in report.notes if "†" in note]
    assert bool(notes) == marked and (not marked or "optimizer.lr 0.01 instead of 0.02" in notes[0])


def test_a_training_with_other_options_steps_back_for_one_as_declared() -> None:
    """A trial is no rival of the row's own model of that seed; without that model it fills the cell, marked."""
    usual, other = make_eval("infini_linear", 1, loss=4.0), make_eval("infini_linear", 1, loss=3.0)
    other.run_id, other.parent = "eval-other", "train-other"
    tried = make_train("infini_linear", 1)
    tried.run_id, tried.config["model"] = "train-other", {"name": "infini_linear", "gate_init": "zeros"}
    both = rendered([usual, make_train("infini_linear", 1), other, tried]).tables[0]
    one = rendered([usual, make_train("infini_linear", 1)]).tables[0]
    assert both.cell("infini_linear", "PG19 yours") == one.cell("infini_linear", "PG19 yours")
    alone = rendered([other, tried]).tables[0].cell("infini_linear", "PG19 yours")
    assert alone.text.endswith(" †") and alone != one.cell("infini_linear", "PG19 yours")


def test_a_training_steps_back_for_none_of_another_seed() -> None:
    runs = with_trainings([make_eval("infini_linear", seed) for seed in (1, 2)])
    runs[3].data["source"] = "synthetic"
    cell = rendered(runs).tables[0].cell("infini_linear", "PG19 yours")
    assert cell.text.endswith(" †") and cell.n_seeds == 2


def test_what_steps_back_is_named_and_a_choice_of_the_users_stands() -> None:
    """report.aggregate=newest makes the newest run decide, however it was trained."""
    usual, other = make_eval("infini_linear", 1, loss=4.0), make_eval("infini_linear", 1, loss=3.0)
    other.run_id, other.parent, other.started = "eval-other", "train-other", "2024-05-02T00:00:00+00:00"
    tried = make_train("infini_linear", 1)
    tried.run_id, tried.config["model"] = "train-other", {"name": "infini_linear", "gate_init": "zeros"}
    runs = [usual, make_train("infini_linear", 1), other, tried]
    notes = [note for note in rendered(runs).notes if "left out" in note]
    why = "model.gate_init zeros instead of specialised"
    wanted = f"left out, trained otherwise than the row declares: Infini-Transformer (Linear) ({why}: eval-other)"
    assert notes == [f"PG19, yours: {wanted}"]
    newest = replace(report_named("table2_lm"), aggregate="newest").render("laptop", [], runs)
    assert not [note for note in newest.notes if "left out" in note]
    alone = rendered([other, tried]).tables[0].cell("infini_linear", "PG19 yours")
    assert newest.tables[0].cell("infini_linear", "PG19 yours") == alone


def test_an_evaluation_that_reads_less_than_its_row_declares_is_marked() -> None:
    short = make_eval("infini_linear", 1)
    assert short.config["scale"]["eval_max_tokens"] == 65536
    short.config["scale"] = {**short.config["scale"], "eval_max_tokens": 1000}
    report = rendered(with_trainings([short]))
    assert report.tables[0].cell("infini_linear", "PG19 yours").text.endswith(" †")
    (note,) = [note for note in report.notes if note.startswith("†")]
    assert "(reads up to 1000 tokens of a document instead of 65536)" in note


def test_a_trial_of_another_length_leaves_the_column_of_the_others() -> None:
    """The data must agree in the whole column, but a trial that a run as declared replaces is no part of it."""
    usual = with_trainings([make_eval("infini_linear", 1), make_eval("local", 1)])
    trial = make_eval("infini_linear", 1, run_id="trial", started="2024-06-01T00:00:00+00:00")
    trial.config["scale"] = {**trial.config["scale"], "eval_max_tokens": 1000}
    before, after = rendered(usual), rendered([*usual, trial])
    assert before.tables[0] == after.tables[0] and "‡" not in str(after.notes)
    assert ["trial" in note for note in after.notes if "left out" in note] == [True]
    # Without one as declared the two rows read different texts, and neither is shown.
    lone = with_trainings([trial, make_eval("local", 1)])
    assert rendered(lone).tables[0].cell("local", "PG19 yours").text == "runs differ ‡"
