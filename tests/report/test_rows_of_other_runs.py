"""A published run with one setting changed fills no row of its table, unless another row declares that setting."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from infini import records
from infini.config.compose import compose
from infini.records import RunRecord
from infini.report.load import load_report
from infini.report.passkey import PasskeyReport
from infini.report.selection import RowMatchingReport, Selection, select_runs
from infini.report.text_report import Report
from infini.runs.claims import declared_report

ROOT = Path(__file__).resolve().parents[2]
WINDOW = {"model": {"window": "previous", "sinks": 1}}
Change = Callable[[RunRecord], RunRecord]


@cache
def published() -> list[RunRecord]:
    return records.load_records(ROOT / "results")


def changed(run: RunRecord, values: dict[str, dict[str, Any]]) -> RunRecord:
    config = copy.deepcopy(run.config)
    for group, of_group in values.items():
        assert set(of_group) <= set(config[group])
        config[group] |= of_group
    return replace(run, config=config)


def row_of(report: str, row: str, of_run: Change, of_training: Change | None = None) -> str | None:
    """The row that a published run of `row` fills after these changes."""
    declared = declared_report(report)
    assert isinstance(declared, RowMatchingReport)
    run = select_runs(declared, "laptop", published()).runs[row][0]
    parents = {each.run_id: each for each in published() if each.verb == "train"}
    assert declared.row_of(run, Selection({}, parents))[0] == row
    if of_training is not None:
        assert run.parent is not None
        parents[run.parent] = of_training(parents[run.parent])
    return declared.row_of(of_run(run), Selection({}, parents))[0]


def unchanged(run: RunRecord) -> RunRecord:
    return run


@pytest.mark.parametrize("values", [{"fill": "exact"}, {"as_printed": True}], ids=["exact", "as_printed"])
def test_a_passkey_table_has_its_own_prompts(values: dict[str, Any]) -> None:
    def asked(run: RunRecord) -> RunRecord:
        return changed(run, {"task": values})

    assert row_of("table3_passkey", "linear_extended", asked) is None


def test_a_passkey_table_has_models_that_learned_its_prompts() -> None:
    def learned(run: RunRecord) -> RunRecord:
        return changed(run, {"task": {"as_printed": True}})

    assert row_of("table3_passkey", "linear_extended", unchanged, learned) is None


@pytest.mark.parametrize(
    ("report", "row"),
    [
        ("llm_passkey", "local"),
        ("llm_passkey", "linear_zero_shot"),
        ("llm_passkey", "linear_finetuned"),
        ("llm_passkey", "linear_input_gate"),
        ("long_context", "local"),
        ("long_context", "linear"),
        ("long_context", "delta_input_gate"),
    ],
)
def test_a_pretrained_model_that_sees_the_segment_before_fills_no_row_without_it(report: str, row: str) -> None:
    def wider(run: RunRecord) -> RunRecord:
        return changed(run, WINDOW)

    trained = None if row in ("local", "linear") else wider
    assert row_of(report, row, wider, trained) is None


@pytest.mark.parametrize(
    "other",
    [
        lambda run: replace(run, config={**run.config, "init_from": "20261130T072622Z-train-continual-llm-s1-073fd9"}),
        lambda run: replace(run, data={**run.data, "source": "synthetic"}),
        lambda run: replace(run, series={**run.series, "in_last_stage": False}),
    ],
    ids=["start", "made_up", "last_stage"],
)
def test_the_trained_row_of_the_needles_is_of_its_own_training(other: Change) -> None:
    assert row_of("long_context", "delta_input_gate", unchanged, other) is None


def test_a_base_with_other_gates_is_not_as_its_row_declares() -> None:
    report = declared_report("llm_continual")
    assert isinstance(report, Report)
    parents = {each.run_id: each for each in published() if each.verb == "train"}
    run = select_runs(report, "laptop", published()).runs["linear_untrained"][0]
    for values, reasons in (({}, []), ({"gate_init": 0.0}, ["model.gate_init 0.0 instead of -4.0"])):
        other = changed(run, {"model": values})
        found = report.find_mismatches("linear_untrained", [other], Selection({}, parents))
        assert found.get(run.run_id, []) == reasons


def test_keys_between_sentences_of_made_up_books_are_marked() -> None:
    report = declared_report("llm_passkey")
    assert isinstance(report, PasskeyReport)
    selection = select_runs(report, "laptop", published())
    (run,) = selection.runs["delta_input_gate_books"]
    data = {key: value for key, value in run.data.items() if key != "beside"}
    made_up = replace(run, data={**data, "source": "synthetic"})
    rendered = report.render("laptop", [], [selection.parents[str(run.parent)], made_up])
    (row,) = (row for row in rendered.tables[0].rows if row.title == report.titles["delta_input_gate_books"])
    assert row.cells[0].text == "yours (books: SYNTHETIC)"


def test_the_notes_of_a_short_table_explain_the_marks_that_it_shows() -> None:
    """One note explained all marks, and was shown with the first of them only."""
    declared = compose(["report=llm_passkey", "report.depths=[start]", "report.lengths=[32K,128K,1M]"]).report
    short = load_report(declared).render("laptop", published()).short()
    cells = "".join(cell.text for row in short.tables[0].rows for cell in row.cells)
    assert "°" in cells and "(1)" in cells and "*" not in cells
    assert [note[0] for note in short.notes if not note[0].isalnum()] == ["—", "(", "°"]
