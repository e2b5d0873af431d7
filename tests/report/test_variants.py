"""Rows of a report that are a model with settings other than its usual ones."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
from report_runs import make_eval, make_train, report_settings, variants_report

from infini.config.compose import compose
from infini.errors import InputError
from infini.records import load_records, published_dir
from infini.report.kind import values_of
from infini.report.load import load_report
from infini.report.selection import select_runs
from infini.report.text_report import Report

BUDGETS = "table2_budget"


@pytest.fixture
def report() -> Report:
    return Report.from_config(report_settings())


def test_a_row_trained_on_another_task_has_no_settings_of_the_task() -> None:
    """They reached the evaluation alone, and the row then refused the run that was made for it."""
    declared = compose(["report=llm_continual"]).report
    row = declared["variants"]["linear"]
    changed = {**row, "settings": {"laptop": [*row["settings"]["laptop"], "task.carry_state=false"]}}
    key = r"^report\.variants\.linear\.settings\.laptop=\['task\.carry_state=false'\]"
    with pytest.raises(InputError, match=f"{key}: no setting of the task, which is continual in training$"):
        load_report({**declared, "variants": {**declared["variants"], "linear": changed}})


def test_a_variant_is_known_by_its_settings_and_fills_no_usual_cell(report: Report) -> None:
    usual, other = make_eval("infini_linear", 1), make_eval("infini_linear", 2)
    parents = [make_train("infini_linear", seed) for seed in (1, 2)]
    parents[1].config["recipe"]["length_extension"] = 100.0
    parents[1].config["variant"] = other.config["variant"] = "others"
    others = variants_report({"laptop": ["recipe.length_extension=100"]})
    found = select_runs(others, "laptop", [usual, other, *parents])
    assert {row: [run.seed for run in runs] for row, runs in found.runs.items()} == {"infini_linear": [1], "other": [2]}
    found = select_runs(report, "laptop", [usual, other, *parents])
    assert {row: [run.seed for run in runs] for row, runs in found.runs.items()} == {"infini_linear": [1]}
    # A training of another report's variant is none of this one's, whatever else they share.
    parents[1].config["variant"] = "longer"
    found = select_runs(others, "laptop", [usual, other, *parents])
    assert {row: [run.seed for run in runs] for row, runs in found.runs.items()} == {"infini_linear": [1]}
    parents[1].config["variant"] = "others"
    # Evaluated by hand it is the variant still; and the model as it is, in whatever report, is no variant.
    other.config["variant"], usual.config["variant"] = None, "lm_gates"
    again = select_runs(report, "laptop", [usual, other, *parents])
    assert {row: [run.seed for run in runs] for row, runs in again.runs.items()} == {"infini_linear": [1]}


def test_runs_of_a_report_that_was_merged_into_another_fill_its_rows() -> None:
    run, parent = make_eval("infini_linear", 1), make_train("infini_linear", 1)
    parent.config["recipe"]["length_extension"] = 100.0
    parent.config["variant"] = run.config["variant"] = "older"
    others = variants_report({"laptop": ["recipe.length_extension=100"]})
    assert not select_runs(others, "laptop", [run, parent]).runs
    assert [*select_runs(replace(others, former_names=["older"]), "laptop", [run, parent]).runs] == ["other"]
    with pytest.raises(InputError, match=r"^report\.former_names='older': a list of names$"):
        replace(others, former_names="older")  # type: ignore[arg-type]


def test_a_variant_is_trained_with_its_settings_and_named_after_its_report() -> None:
    others = variants_report({"laptop": ["recipe.length_extension=100"]})
    assert others.settings_of("other", "laptop") == ["recipe.length_extension=100", "variant=others"]
    assert others.settings_of("other", "paper") is None
    assert others.settings_of("infini_linear", "paper") == []
    assert (others.model_of("other"), others.model_of("local")) == ("infini_linear", "local")


def test_rows_share_settings_by_lists_inside_of_their_lists() -> None:
    shared = ["recipe.steps=3", ["optimizer.lr=0.1"]]
    for settings in ([shared, "model.rope_base=5"], [*shared, ["model.rope_base=5"]]):
        variant = {"model": "local", "settings": {"laptop": settings}}
        models = {"local": "Local", "other": "Other"}
        rows = {"models": models, "memory_baseline": None, "paper": {}, "variants": {"other": variant}}
        report = load_report(report_settings() | rows)
        assert isinstance(report, Report)
        assert report.variants["other"].settings["laptop"] == [shared[0], "optimizer.lr=0.1", "model.rope_base=5"]


def test_a_variant_may_have_a_learning_rate_of_its_own_in_each_task() -> None:
    others = variants_report({"laptop": ["dims.segment_length=256"]}, rates={"arxiv_math": 0.0025})
    rated = ["dims.segment_length=256", "optimizer.lr=0.0025", "variant=others"]
    assert others.settings_of("other", "laptop", "arxiv_math") == rated
    assert others.settings_of("other", "laptop", "pg19") == others.settings_of("other", "laptop")
    assert others.settings_of("other", "laptop") == ["dims.segment_length=256", "variant=others"]
    # The part of the report that is about that task compares with it.
    (part,) = [part for part in others.parts if part.task == "arxiv_math"]
    assert "optimizer.lr=0.0025" in (part.settings_of("other", "laptop") or ())


@pytest.mark.parametrize("rates", [0.01, {"pg19": "0.01"}, {"pg19": 0}, {"pg19": True}, None])
def test_rates_of_a_variant_are_numbers(rates: object) -> None:
    with pytest.raises(InputError, match=r"report\.variants\.other=.*rates: \{task: number above 0\}"):
        variants_report({"laptop": ["a=1"]}, rates=rates)


@pytest.mark.parametrize("settings", [[], {"laptop": "a=1"}, {"laptop": []}, {"laptop": ["a"]}, None])
def test_a_variant_that_sets_nothing_is_refused(settings: dict[str, object]) -> None:
    with pytest.raises(InputError, match=r"report\.variants\.other=.*key=value"):
        variants_report(settings)


def test_rows_to_run_are_named() -> None:
    """report.run is checked against the rows of the table."""
    config = dict(compose(["report=table2_budget", "report.run=[local_4x,linear_4x]"]).report)
    report = load_report(config)
    assert isinstance(report, Report) and report.wanted == ["local_4x", "linear_4x"]
    with pytest.raises(InputError, match="^report.run='locl_4x': all, or names of .* did you mean 'local_4x'"):
        load_report(config | {"run": "locl_4x"})


def test_a_report_may_show_the_runs_of_another_reports_rows() -> None:
    """Table 2 as the paper compared it has rows of the report on budgets: they are declared alike, and a run that is
    made for one fills the other."""
    shown, made = (load_report(dict(compose([f"report={name}"]).report)) for name in ("table2_as_compared", BUDGETS))
    assert isinstance(shown, Report) and isinstance(made, Report) and shown.variants_of == BUDGETS
    assert shown.variants and shown.variants.items() <= made.variants.items()
    for row in shown.variants:
        assert shown.settings_of(row, "laptop", "pg19") == made.settings_of(row, "laptop", "pg19")
    for report in (shown, made):
        assert "linear_16x" in select_runs(report, "laptop", load_records(published_dir())).runs


@pytest.mark.parametrize(
    "text",
    [
        *("optimizer.lr=5e-05", "optimizer.lr=1e-3", "optimizer.lr=.5", "optimizer.lr=1", "optimizer.lr=1_0"),
        *("model.gate_init=zeros", "model.gate_init='local'", "recipe.length_extension=1e4", "recipe.save_every=null"),
        *("recipe.curriculum=[[128,256],[256,512]]", "scale.knockouts=False", "recipe.sparse_writes=null"),
        *("dims.segment_length=128", "recipe.steps=1_000", "task.data_dir=010", "task.data_dir=yes"),
    ],
)
def test_a_setting_of_a_row_has_the_value_that_its_run_has(text: str) -> None:
    """A row whose own runs had another value would never show them."""
    ((key, value),) = values_of([text]).items()
    trained = asdict(compose(["task=passkey", "model=infini_linear", text]))
    group, _, last = key.partition(".")
    assert trained[group][last] == value


def test_a_row_with_a_small_rate_shows_its_own_runs() -> None:
    others = variants_report({"laptop": ["recipe.steps=10"]}, rates={"pg19": 0.00005})
    settings = others.settings_of("other", "laptop")
    assert settings is not None and "optimizer.lr=5e-05" in settings
    run, parent = make_eval("infini_linear", 1), make_train("infini_linear", 1)
    parent.config = run.config = asdict(compose(["task=pg19", "model=infini_linear", *settings]))
    selection = select_runs(others, "laptop", [run, parent])
    assert selection.runs == {"other": [run]}
    # It is not marked for the shorter warm-up of a shorter training, either.
    assert not selection.mismatches


@pytest.mark.parametrize("text", ["optimizer.lr", "optimizer.lr=1,2", "optimizer.lr=[1"])
def test_a_setting_of_a_row_that_cannot_be_read_is_one_line(text: str) -> None:
    with pytest.raises(InputError, match="optimizer.lr"):
        values_of([text])
