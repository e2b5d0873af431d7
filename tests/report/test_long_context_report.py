"""The table of long-context benchmarks: which run fills a row, what is pooled, and what a reproduction makes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from report_runs import make_train
from tiny_llms import write_tiny_base

from infini.cli import main as cli
from infini.config.compose import compose
from infini.records import RunRecord, load_records
from infini.report.intervals import effective_trials, proportion_interval
from infini.report.load import load_report
from infini.report.long_context import LongContextReport
from infini.report.passkey import percent

pytestmark = pytest.mark.usefixtures("few_words")
MEMORY = {"name": "llm", "base": "smollm2", "memory": "infini"}
ROWS = {
    "base": {"title": "Base", "model": "llm", "settings": ["model.memory=full"]},
    "linear": {"title": "Linear", "model": "llm", "settings": ["model.memory=infini"]},
    "trained": {
        "title": "Linear, trained",
        "model": "llm",
        "settings": ["model.memory=infini"],
        "trained_on": "continual",
        "training": ["recipe.steps=32"],
    },
}


def report_of(**changes: Any) -> LongContextReport:
    keys = {
        "name": "long_context",
        "title": "Long context",
        "task": "long_context",
        "subtasks": {"niah_single_1": "a number", "babilong_qa1": "a place"},
        "lengths": ["1K", "2K"],
        "rows": ROWS,
        "aggregate": "largest",
    }
    report = load_report({**keys, **changes})
    assert isinstance(report, LongContextReport)
    return report


def answered(right: int, asked: int, distant: tuple[int, int] = (0, 0), **place: Any) -> dict[str, Any]:
    counted: dict[str, Any] = {"examples": distant[1]} | ({"accuracy": distant[0] / distant[1]} if distant[1] else {})
    cell = {"subtask": "niah_single_1", "length": 1024, "examples": asked, "accuracy": right / asked}
    return cell | {"distant": counted} | place


def evaluation(number: int, *cells: dict[str, Any], model: dict[str, Any] = MEMORY, **changes: Any) -> RunRecord:
    run = make_train("llm", 1)
    config = {**run.config, "model": model, "task": {"name": "long_context"}}
    content = {"run_id": f"eval-{number}", "verb": "eval", "task": "long_context", "config": config}
    content |= {"series": {"cells": list(cells)}, "started": f"2026-11-27T1{number}:00:00+00:00"}
    content |= {"data": {"revision": "lm-eval 0.4.13", "source": "generated"}}
    return make_train(**{"model": "llm", "seed": 1, **content, **changes})


def shown(report: LongContextReport, runs: list[RunRecord], table: int = 0) -> dict[str, list[str]]:
    rendered = report.render("laptop", runs)
    return {row.title: [cell.text for cell in row.cells[1:]] for row in rendered.tables[table].rows}


def test_lengths_that_no_row_was_asked_have_no_column() -> None:
    """Three of seven columns were dashes. The table shows all lengths before the first run."""
    runs = [evaluation(1, answered(1, 10), answered(1, 10, length=4096))]
    report = report_of(lengths=["1K", "2K", "4K", "8K"])
    rendered = report.render("laptop", runs)
    assert {table.columns[1:] for table in rendered.tables[:2]} == {("1K", "4K")}
    assert "lengths without a run, not shown: 2K, 8K." in rendered.notes
    empty = report.render("laptop", [])
    assert empty.tables[0].columns[1:] == ("1K", "2K", "4K", "8K") and not any("not shown" in n for n in empty.notes)


def test_the_number_of_questions_is_said_of_each_row_where_rows_differ() -> None:
    full = {**MEMORY, "memory": "full"}
    few, many = evaluation(1, answered(1, 10), model=full), evaluation(2, answered(1, 20))
    (note,) = (note for note in report_of().render("laptop", [few, many]).notes if "a cell" in note)
    assert '; questions a cell: 10 ("Base"), 20 ("Linear"); ' in note
    (note,) = (note for note in report_of().render("laptop", [many]).notes if "a cell" in note)
    assert "; 20 questions a cell; " in note


def test_a_model_as_it_is_and_a_trained_one_are_two_rows() -> None:
    training = make_train("llm", 1, task="continual", run_id="t", config={"model": MEMORY, "recipe": {"steps": 32}})
    runs = [
        training,
        evaluation(1, answered(1, 10)),
        evaluation(2, answered(2, 10), parent="t"),
        evaluation(3, answered(3, 10), model={**MEMORY, "memory": "full"}),
        # These fill no row: another training, one whose record is missing, other settings, another task.
        make_train("llm", 1, task="continual", run_id="u", config={"model": MEMORY, "recipe": {"steps": 64}}),
        evaluation(4, answered(4, 10), parent="u"),
        evaluation(5, answered(5, 10), parent="missing"),
        evaluation(6, answered(6, 10), model={**MEMORY, "memory": "none"}),
        evaluation(7, answered(7, 10), task="passkey"),
        # These have an addition to the memory that no row has.
        evaluation(8, answered(8, 10), model={**MEMORY, "memory_decay": 4, "input_gate": None}),
        evaluation(9, answered(9, 10), model={**MEMORY, "memory_decay": None, "input_gate": "sigmoid"}),
    ]
    assert {title: cells[0][:2] for title, cells in shown(report_of(), runs).items()} == {
        "Base": "30",
        "Linear": "10",
        "Linear, trained": "20",
    }


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"model": {**MEMORY, "memory": "none"}}, "it is not 'Base': model.memory=none, the row has full"),
        ({"model": {**MEMORY, "memory_decay": 4}}, "it is not 'Linear': model.memory_decay=4, the row has None"),
        ({"parent": "missing"}, "it is not 'Base': the record of its training is missing"),
        ({"parent": "p"}, "it is not 'Linear': it was trained on passkey, the row on nothing"),
    ],
)
def test_a_run_without_a_cell_is_named_with_what_differs_from_the_nearest_row(
    changes: dict[str, Any], why: str
) -> None:
    training = make_train("llm", 1, task="passkey", run_id="p", config={"model": MEMORY})
    rendered = report_of().render("laptop", [], [training, evaluation(1, answered(1, 10), **changes)])
    (line,) = [note for note in rendered.notes if "without a cell" in note]
    assert line in rendered.short().notes and line.endswith(f"the last is eval-1: {why}")


def test_a_run_of_another_training_is_named_with_what_differs_from_it() -> None:
    training = make_train("llm", 1, task="continual", run_id="t", config={"model": MEMORY, "recipe": {"steps": 64}})
    runs = [training, evaluation(1, answered(1, 10), parent="t")]
    notes = report_of(rows={"trained": ROWS["trained"]}).render("laptop", [], runs).notes
    assert any(note.endswith("'Linear, trained': recipe.steps=64, the row's training has 32") for note in notes)


def test_a_row_sets_an_addition_itself_or_its_base_was_injected_with_it() -> None:
    added = {**MEMORY, "memory_decay": 4, "input_gate": None}
    training = make_train("llm", 1, task="continual", run_id="t", config={"model": added, "recipe": {"steps": 32}})
    of_training = {**ROWS["trained"], "training": ["recipe.steps=32", "model.memory_decay=4"]}
    runs = [
        training,
        evaluation(1, answered(1, 10), model=added, parent="t"),
        evaluation(2, answered(2, 10), model={**added, "base": "a folder"}),
    ]
    report = report_of(rows={**ROWS, "trained": of_training})
    assert {title: cells[0][:2] for title, cells in shown(report, runs).items() if title != "Base"} == {
        "Linear": "20",
        "Linear, trained": "10",
    }


def test_a_cell_is_that_of_the_largest_run_of_a_seed_and_seeds_are_pooled() -> None:
    runs = [
        evaluation(1, answered(10, 10)),
        evaluation(2, answered(10, 20, distant=(1, 11))),
        evaluation(3, answered(0, 5)),
        evaluation(4, answered(15, 20, distant=(6, 11)), seed=2),
        evaluation(5, answered(1, 4, length=2048), seed=2),
    ]
    # 25 of 40, and 7 of 22 whose answer lies in an earlier segment; Clopper-Pearson.
    assert shown(report_of(), runs)["Linear"] == ["62.5 [45.8, 77.3]", "25 [0.6, 80.6]"]
    assert shown(report_of(), runs, 1)["Linear"] == ["31.8 [13.9, 54.9], 22", "—"]


@pytest.mark.parametrize(
    ("right", "text"),
    [(0, "0 [0, 1.5]"), (1, "0.4 [0.0, 2.2]"), (249, "99.6 [97.8, 99.9]"), (250, "100 [98.5, 100]")],
)
def test_less_than_all_is_never_printed_as_100_nor_more_than_none_as_0(right: int, text: str) -> None:
    assert shown(report_of(), [evaluation(1, answered(right, 250))])["Linear"][0] == text


def test_two_trainings_of_one_seed_are_named_where_they_fill_one_row() -> None:
    config = {"model": MEMORY, "recipe": {"steps": 32}}
    trainings = [make_train("llm", 1, task="continual", run_id=name, config=config) for name in ("first", "again")]
    runs = [evaluation(1, answered(1, 10), parent="first"), evaluation(2, answered(1, 4, length=2048), parent="again")]
    rendered = report_of().render("laptop", [*trainings, *runs])
    assert "Linear, trained ¶" in [row.title for row in rendered.tables[0].rows]
    assert "¶ published: Linear, trained: seed 1 has 2 trainings: first (1K); again (2K)" in rendered.notes


@pytest.mark.parametrize(("table", "asked"), [(0, 50), (1, 20)])
def test_seeds_of_a_trained_row_are_models_that_differ(table: int, asked: int) -> None:
    """The interval is that of the passkey claims. An untrained model has as many seeds as it was asked questions."""
    training = make_train("llm", 1, run_id="parent", task="continual")
    training.config["recipe"]["steps"] = 32

    def interval(parent: str | None, *rights: int) -> str:
        runs = [
            evaluation(seed, answered(right, asked, distant=(right, asked)), seed=seed, parent=parent)
            for seed, right in enumerate(rights, 1)
        ]
        return shown(report_of(), [training, *runs], table)["Linear" if parent is None else "Linear, trained"][0]

    trials = effective_trials([0.0, 1.0, 0.0], 3 * asked)
    low, high = proportion_interval(trials / 3, trials)
    assert trials < 3 and interval("parent", 0, asked, 0).startswith(
        f"33.3 [{percent(100 * low)}, {percent(100 * high)}]"
    )
    low, high = proportion_interval(asked, 3 * asked)
    assert interval(None, 0, asked, 0).startswith(f"33.3 [{percent(100 * low)}, {percent(100 * high)}]")
    # Seeds that do not differ, and a single one, are as sure as their questions.
    assert interval("parent", 10, 10, 10) == interval(None, 10, 10, 10)
    assert interval("parent", 10) == interval(None, 10)


def test_a_subtask_that_nobody_asked_has_no_table() -> None:
    def headings(*runs: RunRecord) -> list[str]:
        return [table.title.split(" (")[0] for table in report_of().render("laptop", runs).tables]

    assert headings() == ["niah_single_1"] * 2
    assert headings(evaluation(1, answered(1, 2, subtask="babilong_qa1"))) == ["babilong_qa1"] * 2
    both = evaluation(1, answered(1, 2), answered(1, 2, subtask="babilong_qa1"))
    assert headings(both) == ["niah_single_1"] * 2 + ["babilong_qa1"] * 2


def test_the_report_that_ships_has_rows_that_can_be_composed() -> None:
    cfg = compose(["report=long_context"])
    report = load_report(cfg.report)
    assert isinstance(report, LongContextReport) and cfg.task.name == report.task
    for row in report.rows.values():
        composed = compose(
            [f"task={row.trained_on or report.task}", f"model={row.model}", *row.settings, *row.training]
        )
        assert composed.model["name"] == row.model


@pytest.mark.slow
@pytest.mark.parametrize("trained_on", ["", "pg19"])
def test_a_reproduction_makes_what_is_missing_and_nothing_twice(
    trained_on: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = write_tiny_base(tmp_path / "base")
    own = [f"model.base={base}", "model.memory=infini", "model.train=gates", "dims.segment_length=64"]
    training = [f"recipe.{text}" for text in ("steps=1", "warmup_steps=0", "segments_per_sequence=2", "batch_size=1")]
    words = ["report=long_context", f"results_dir={tmp_path / 'results'}", "report.run=[local]", "task.examples=1"]
    words += [f"report.rows.local.settings={own}", "length=1K", "logger=none", "full=true"]
    if trained_on:
        words += [f"+report.rows.local.trained_on={trained_on}", "task.data_dir=synthetic"]
        words += [f"+report.rows.local.training={training}"]
    for _ in range(2):
        assert cli.main(["reproduce", *words]) == 0
        found = load_records(tmp_path / "results")
        assert [run.verb for run in found] == ["train"] * bool(trained_on) + ["eval"]
        assert found[-1].parent == (found[0].run_id if trained_on else None)
        assert "SmolLM2, segments of 512 tokens" in capsys.readouterr().out
    # More questions than were asked.
    assert cli.main(["reproduce", *words, "task.examples=2"]) == 0
    assert [run.verb for run in load_records(tmp_path / "results")] == ["train"] * bool(trained_on) + ["eval"] * 2


def test_the_model_that_learned_passkeys_is_that_of_its_own_table() -> None:
    rows = {name: load_report(compose([f"report={name}"]).report).rows for name in ("long_context", "llm_passkey")}  # type: ignore[attr-defined]
    own, of_keys = (rows[name]["delta_input_gate"] for name in ("long_context", "llm_passkey"))
    recipe = f"recipe={of_keys.recipe.format(scale='laptop')}"
    assert own.trained_on == "passkey" and own.model == of_keys.model
    assert sorted([*own.settings, *own.training]) == sorted([*of_keys.overrides, recipe])
