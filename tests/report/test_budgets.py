"""Differences between models as functions of the number of training tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from report_runs import make_eval, make_train, report_settings

from infini.errors import InputError
from infini.records import RunRecord
from infini.report import budgets
from infini.report.budgets import growth_table, growths
from infini.report.load import draw
from infini.report.selection import Selection, select_runs
from infini.report.stats import paired_difference
from infini.report.text_report import Report

BUDGETS = {
    "local": ["local", "local_4x", "local_16x"],
    "infini_linear": ["infini_linear", "linear_4x", "linear_16x"],
    "rmt": ["rmt", "rmt_4x"],
}
LOSSES = {
    "local": (4.0, 3.5, 3.2),
    "infini_linear": (3.99, 3.45, 3.05),
    "rmt": (3.8, 3.3),
}


def report(**changes: Any) -> Report:
    rows = [row for own in BUDGETS.values() for row in own]
    settings = report_settings() | {"models": dict(zip(rows, rows, strict=True)), "paper": {}, "baseline": "local"}
    settings |= {"memory_baseline": None, "budgets": BUDGETS, "budgets_over": ["local", "rmt"]}
    settings["variants"] = {
        row: {"model": model, "settings": {"laptop": [f"recipe.steps={100 * 4**budget}"]}}
        for model, own in BUDGETS.items()
        for budget, row in enumerate(own)
        if budget
    }
    return Report.from_config(settings | changes)


def selection(seeds: dict[str, tuple[int, ...]] | None = None) -> Selection:
    """Runs of all rows, of seeds 1 and 2 unless others are named, each document with its own difference."""
    runs: dict[str, list[RunRecord]] = {}
    trainings: dict[str, RunRecord] = {}
    for model, own in BUDGETS.items():
        for budget, row in enumerate(own):
            for seed in (seeds or {}).get(row, (1, 2)):
                names = {"run_id": f"eval-{row}-{seed}", "parent": f"train-{row}-{seed}"}
                run = make_eval(model, seed, LOSSES[model][budget], **names)
                for index, document in enumerate(run.documents):
                    document["nll"] += len(row) * (index + seed)
                runs.setdefault(row, []).append(run)
                cost = {"tokens_seen": 2_300_000 * 4**budget}
                trainings[names["parent"]] = make_train(model, seed, run_id=names["parent"], cost=cost)
    empty = select_runs(report(), "laptop", [])
    return replace(empty, runs=runs, parents=trainings)


def test_a_change_is_the_later_difference_minus_the_earlier() -> None:
    """The documents' losses give it by hand: sums over documents and seeds, over the tokens."""
    chosen = selection()
    found = {(growth.row, growth.other): growth for growth in growths(report(), chosen)}
    assert found.keys() == {("infini_linear", "local"), ("rmt", "local"), ("infini_linear", "rmt")}

    def loss(row: str) -> float:
        documents = [document for run in chosen.runs[row] for document in run.documents]
        return sum(document["nll"] for document in documents) / sum(document["tokens"] for document in documents)

    linear = found["infini_linear", "local"]
    by_hand = [
        loss(mine) - loss(theirs) for mine, theirs in zip(BUDGETS["infini_linear"], BUDGETS["local"], strict=True)
    ]
    assert [effect.mean for effect in linear.differences] == pytest.approx(by_hand, abs=1e-12)
    changes = [by_hand[1] - by_hand[0], by_hand[2] - by_hand[1], by_hand[2] - by_hand[0]]
    assert [effect.mean for effect in linear.changes] == pytest.approx(changes, abs=1e-12)
    assert linear.tokens == (2_300_000, 9_200_000, 36_800_000)
    # Two budgets have one change.
    assert [len(found["rmt", "local"].differences), len(found["rmt", "local"].changes)] == [2, 1]


def test_all_budgets_are_compared_by_the_same_seeds() -> None:
    """Seed 3 of the last budget would move a change although no model changed."""
    chosen = selection({"linear_16x": (1, 2, 3), "local_4x": (1,), "rmt": (2,)})
    found = {(growth.row, growth.other): growth for growth in growths(report(), chosen)}
    linear = found["infini_linear", "local"]
    assert [effect.n_seeds for effect in (*linear.differences, *linear.changes)] == [1] * 6
    of_seed_1 = [[run for run in chosen.runs[row] if run.seed == 1] for row in ("linear_16x", "local_16x")]
    alone = paired_difference(*of_seed_1)
    assert alone is not None and linear.differences[-1].mean == alone.mean
    # RMT has seed 2 at the first budget, local attention seed 1 at the second.
    assert ("rmt", "local") not in found


def test_rows_with_other_numbers_of_tokens_are_not_compared() -> None:
    """Rows are paired by their order, so a missing budget must not shift a model to another's next one."""
    chosen = selection()
    for seed in (1, 2):
        chosen.parents[f"train-linear_4x-{seed}"].cost["tokens_seen"] = 36_800_000
    linear = growths(report(), chosen)[0]
    assert (linear.row, linear.tokens) == ("infini_linear", (2_300_000, 36_800_000))


def test_the_table_has_a_column_for_each_budget_and_change() -> None:
    table = growth_table(report(), "published", selection())
    columns = ("2.3M", "9.2M", "36.8M", "2.3M to 9.2M", "9.2M to 36.8M", "2.3M to 36.8M", "Seeds")
    assert table.columns == columns
    assert [row.title for row in table.rows] == [
        "infini_linear minus local",
        "rmt minus local",
        "infini_linear minus rmt",
    ]
    rmt = dict(zip(columns, table.rows[1].cells, strict=True))
    assert [name for name, cell in rmt.items() if cell.origin == "missing"] == [
        "36.8M", "9.2M to 36.8M", "2.3M to 36.8M",
    ]  # fmt: skip
    assert rmt["2.3M"].spread_kind == "ci" and rmt["Seeds"].text == "2"
    assert growth_table(report(budgets={}, budgets_over=[]), "published", selection()).rows == ()


def test_the_figure_counts_the_models_whose_gain_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []

    def keep(figure: Any, path: Path) -> list[Path]:
        drawn.append(figure.axes[0])
        return [path]

    monkeypatch.setattr(budgets, "save", keep)
    chosen = selection()
    assert draw(report(), "laptop", chosen, tmp_path, kinds=["gain_by_tokens"])
    (axes,) = drawn
    words = " ".join(" ".join(text.get_text() for text in axes.texts).split())
    linear, rmt, *_ = growths(report(), chosen)
    assert linear.changes[-1].interval[1] < 0 and len(rmt.tokens) == 2
    # RMT has no run at the last budget.
    assert 'Gain over "local" from 2.3M to 36.8M training tokens: it grows in 1 of 1 models' in words
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["2.3M", "9.2M", "36.8M"]
    assert draw(report(budgets={}, budgets_over=[]), "laptop", chosen, tmp_path, kinds=["gain_by_tokens"]) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"budgets": {"local": ["local_4x", "local"]}}, "report.budgets"),
        ({"budgets": {"local": ["local", "locl_4x"]}}, "no row 'locl_4x'"),
        ({"budgets_over": ["linear_4x"]}, "report.budgets_over"),
    ],
)
def test_budgets_of_other_rows_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        report(**changes)
