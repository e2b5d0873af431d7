"""Table 3 from made-up records: whose row a run is, what a cell shows, and what never stands side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from report_runs import make_train

from infini.config import compose
from infini.errors import InputError
from infini.records import RunRecord
from infini.report.load import draw, load_report, render
from infini.report.passkey import PasskeyReport
from infini.report.selection import select_runs


def report(**changes: Any) -> PasskeyReport:
    loaded = load_report({**compose(["report=table3_passkey"]).report, **changes})
    assert isinstance(loaded, PasskeyReport)
    return loaded


def pair(
    model: str = "infini_linear",
    recipe: str = "passkey_laptop",
    seed: int = 1,
    accuracy: float = 1.0,
    lengths: Any = (2**15, 2**17, 2**18, 2**19, 2**20),
    init_from: str | None = None,
    gate_lr: float = 0.03,
    name: str = "",
    **task: Any,
) -> list[RunRecord]:
    """A training run and an evaluation of it."""
    config = {
        "task": {"digits": 5, "distractors": 0, "filler": "block", "knockout": "none", **task},
        "model": {"name": model},
        "dims": {"segment_length": 128},
        "recipe": {"name": recipe, "segments_per_sequence": 5, "curriculum": [[128, 256]]},
        "optimizer": {"gate_lr": gate_lr},
        "init_from": init_from,
        "seed": seed,
    }
    stem = f"{name}{model}-{recipe}-{seed}"
    trained = make_train(model, seed, run_id=f"train-{stem}", config=config, task="passkey")
    cells = [
        {"length": length, "depth": depth, "token_accuracy": accuracy, "examples": 50, "same_segment": depth == "end"}
        for length in lengths
        for depth in ("start", "middle", "end")
    ]
    changes = {"run_id": f"eval-{stem}", "verb": "eval", "parent": trained.run_id, "task": "passkey", "config": config}
    results = {"exact_match": {"value": accuracy, "n": 1}, "token_accuracy": {"value": accuracy, "n": 1}}
    return [trained, make_train(model, seed, **changes, series={"cells": cells}, results=results)]


def rows_of(runs: list[RunRecord]) -> dict[str, list[str]]:
    chosen = select_runs(report(), "laptop", runs)
    return {name: [run.run_id for run in of_row] for name, of_row in chosen.runs.items()}


def test_how_a_model_was_trained_decides_its_row() -> None:
    runs = [
        *pair(),
        *pair(recipe="passkey_laptop_extended"),
        *pair("infini_delta", "passkey_laptop_finetune", init_from="some-run"),
        *pair("infini_delta", "pg19_laptop"),
        *pair("local"),
        *pair(recipe="passkey_laptop_extended", knockout="reset", name="reset-"),
        *pair(recipe="passkey_laptop_extended", gate_lr=0.0, name="frozen-"),
    ]
    assert {name: len(ids) for name, ids in rows_of(runs).items()} == {
        "linear": 1,
        "linear_extended": 1,
        "delta_finetuned": 1,
        "delta_zero_shot": 1,
        "local": 1,
        "linear_reset": 1,
        "linear_frozen": 1,
    }


@pytest.mark.parametrize("task", [{"digits": 8}, {"distractors": 3}, {"filler": "book"}], ids=str)
def test_harder_prompts_do_not_enter_the_papers_table(task: dict[str, Any]) -> None:
    assert rows_of(pair(**task)) == {}


def test_an_extended_run_never_stands_beside_the_papers_numbers() -> None:
    table = render(report(), "laptop", [], pair(recipe="passkey_laptop_extended")).tables[0]
    names = [row.model for row in table.rows]
    assert "linear_extended/yours" in names and "linear_extended/paper" not in names
    assert "linear/paper" in names and "linear/yours" not in names
    for row in report().rows.values():
        assert not (row.paper and row.recipe.endswith("_extended"))


def test_cells_show_all_places_and_mark_those_that_need_no_memory() -> None:
    runs = [*pair(seed=1), *pair(seed=2, accuracy=0.98)]
    table = render(report(), "laptop", [], runs).tables[0]
    row = next(row for row in table.rows if row.model == "linear/yours")
    assert row.cells[1].text == "99/99/99*"
    assert set(row.cells[1].run_ids) == {"eval-infini_linear-passkey_laptop-1", "eval-infini_linear-passkey_laptop-2"}


@pytest.mark.parametrize(
    ("accuracy", "text"),
    [(1.0, "100/100/100*"), (0.9996, "99.9/99.9/99.9*"), (0.5, "50/50/50*"), (0.984, "98.4/98.4/98.4*")],
)
def test_less_than_all_is_never_printed_as_100(accuracy: float, text: str) -> None:
    table = render(report(), "laptop", [], pair(accuracy=accuracy)).tables[0]
    assert next(row for row in table.rows if row.model == "linear/yours").cells[1].text == text


def test_a_length_nobody_measured_is_a_dash() -> None:
    table = render(report(), "laptop", [], pair(lengths=[2**15])).tables[0]
    row = next(row for row in table.rows if row.model == "linear/yours")
    assert [cell.text for cell in row.cells[1:]] == ["100/100/100*", *["\N{EM DASH}"] * 4]


def test_two_runs_for_one_cell_are_an_error_and_other_lengths_are_not() -> None:
    one, other = pair(lengths=[2**15]), pair(lengths=[2**20])
    other[1].run_id = "another"
    assert len(rows_of([*one, other[1]])["linear"]) == 2
    other[1].series = one[1].series
    with pytest.raises(InputError, match="two runs for seed 1"):
        rows_of([*one, other[1]])


def test_what_stands_behind_a_row() -> None:
    table = render(report(), "laptop", [], pair(accuracy=0.5)).tables[1]
    row = next(row for row in table.rows if row.model == "linear/yours")
    shown = dict(zip(table.columns, (cell.text for cell in row.cells), strict=True))
    assert (shown["Examples a cell"], shown["Worst cell"], shown["Exact match"]) == ("50", "50.0", "50.0")
    assert shown["Longest"] == "640"


def test_rows_to_run_are_checked() -> None:
    assert report(run="all").to_run == list(report().rows)
    assert report(run=["delta", "linear"]).to_run == ["linear", "delta"]
    with pytest.raises(InputError, match="^report.run='linaer': all, or names of .* did you mean 'linear'"):
        report(run="linaer")
    with pytest.raises(InputError, match="^report.rows.one: "):
        report(rows={"one": {"titel": "x"}})


def test_rows_may_differ_in_a_setting() -> None:
    updates = load_report(compose(["report=passkey_updates"]).report)
    runs = []
    for segment in (128, 512):
        made = pair(recipe="passkey_laptop_updates", lengths=[2**17], name=f"{segment}-")
        for run in made:
            run.config["dims"] = {"segment_length": segment}
            run.config["recipe"] = {**run.config["recipe"], "segments_per_sequence": 5120 // segment}
        runs += made
    chosen = select_runs(updates, "laptop", runs)
    assert {name: run.run_id.split("-")[1] for name, (run,) in chosen.runs.items()} == {
        "linear_128": "128",
        "linear_512": "512",
    }


def test_figures_are_drawn_and_are_the_same_bytes_twice(tmp_path: Path) -> None:
    updates = load_report(compose(["report=passkey_updates"]).report)
    runs = pair(recipe="passkey_laptop_updates", lengths=[2**17])
    for run in runs:
        run.config["recipe"] = {**run.config["recipe"], "segments_per_sequence": 40}
    for made, of in ((runs, updates), (pair(), report())):
        selection = select_runs(of, "laptop", made)
        assert selection.runs
        first = draw(of, "laptop", selection, tmp_path / "first")
        second = draw(of, "laptop", selection, tmp_path / "second")
        assert [path.suffix for path in first] == [".png", ".svg"]
        assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
