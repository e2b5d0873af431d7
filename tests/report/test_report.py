"""Tables from records: every cell has a run, and every number is in a record."""

from __future__ import annotations

import csv
import io
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from report_runs import TOKENS, make_eval, make_train, report_settings, synthetic, variants_report
from rich.console import Console

from infini.config.compose import compose
from infini.errors import InputError
from infini.report import render
from infini.report.footprint import TABLE1
from infini.report.load import draw, load_report
from infini.report.selection import Selection, select_runs
from infini.report.tables import DASH, PLUS_MINUS, Cell, RenderedReport, Row, Table
from infini.report.text_report import Report, Variant


@pytest.fixture
def report_config() -> dict[str, Any]:
    return report_settings()


@pytest.fixture
def report(report_config: dict[str, Any]) -> Report:
    return Report.from_config(report_config)


def test_two_runs_for_one_cell_are_an_error_that_names_both(report: Report) -> None:
    runs = [make_eval("local", 1), make_eval("local", 1, 4.1, run_id="again", started="2024-06-01T00:00:00+00:00")]
    with pytest.raises(InputError, match=r"eval-local-1 and again.*report\.aggregate=newest"):
        select_runs(report, "laptop", runs)


def test_an_evaluation_made_again_is_no_rival_of_itself(report: Report) -> None:
    once = make_eval("local", 1, 4.0)
    again = replace(once, run_id="again", started="2100-01-01T00:00:00Z", data={**once.data, "beside": {".jsonl": {}}})
    table = report.render("laptop", [], [once, again]).tables[0]
    assert [row.cells for row in table.rows if "again" in str(row.cells)] and "eval-local-1" not in str(table)
    others: list[dict[str, Any]] = [{"parent": "another"}, {"config_hash": "another"}, {"results": {}}, {"series": {}}]
    for other in (replace(again, **changes) for changes in [*others, {"data": {**once.data, "documents": 2}}]):
        with pytest.raises(InputError, match="two runs for seed 1"):
            report.render("laptop", [once, other])


@pytest.mark.parametrize("newer_has_more", [True, False])
def test_an_evaluation_with_less_of_the_same_is_no_rival(report: Report, newer_has_more: bool) -> None:
    """One with `scale.knockouts=false` measures the same loss and less beside it."""
    more, less = make_eval("infini_linear", 1), make_eval("infini_linear", 1, run_id="less")
    more.results["reset_delta"], more.series["normaliser_growth"] = {"value": 0.1, "n": 1}, [[1.0, 2.0]]
    less = replace(less, started="2000-01-01T00:00:00Z" if newer_has_more else "2100-01-01T00:00:00Z")
    assert select_runs(report, "laptop", [more, less]).runs["infini_linear"] == [more]
    less.results["perplexity"] = {**less.results["perplexity"], "value": 1.0}
    with pytest.raises(InputError, match="two runs for seed 1"):
        select_runs(report, "laptop", [more, less])


def test_rival_runs_of_the_reader_leave_the_rest_of_the_table(report: Report) -> None:
    """Published ones are an error: what is published says how to choose."""
    published = [make_eval("local", 1), make_eval("infini_linear", 1)]
    mine = [make_eval("local", 1, run_id="mine"), make_eval("infini_linear", 1, run_id="a", parent="one")]
    rival = make_eval("infini_linear", 1, 4.1, run_id="b", parent="two", started="2024-06-01T00:00:00+00:00")
    rendered = report.render("laptop", published, [*mine, rival])
    table, (note,) = rendered.tables[0], [note for note in rendered.notes if note.startswith("‡")]
    assert table.cell("infini_linear", "PG19 yours").text == "runs differ ‡"
    assert table.cell("infini_linear", "PG19 published").run_ids == ("eval-infini_linear-1",)
    assert table.cell("local", "PG19 yours").run_ids == ("mine",)
    assert note.startswith(
        "‡ PG19, yours: table2_lm at scale laptop, infini_linear: two runs for seed 1: a and b; choose"
    )
    assert note in rendered.short().notes
    with pytest.raises(InputError, match="two runs for seed 1: a and b"):
        report.render("laptop", [*mine, rival])
    # If the data differ, none of the reader's rows can be beside another.
    rival.data["revision"] = "other"
    rendered = report.render("laptop", published, [*mine, rival])
    texts = [rendered.tables[0].cell(row, "PG19 yours").text for row in ("local", "infini_linear", "rmt")]
    assert texts == ["runs differ ‡", "runs differ ‡", DASH]
    (note,) = [note for note in rendered.notes if note.startswith("‡")]
    assert "different data in one table: mine and b (revision" in note


def test_other_data_than_the_published_ones_is_marked(report: Report) -> None:
    published, mine = make_eval("local", 1), make_eval("local", 1, run_id="mine")
    same = report.render("laptop", [published], [mine])
    assert "§" not in str(same)
    mine.data |= {"revision": "other", "documents": 2, "tokenizer": "bpe-300"}
    rendered = report.render("laptop", [published], [mine])
    assert rendered.tables[0].cell("local", "PG19 yours").text.endswith(" §")
    assert "§" not in rendered.tables[0].cell("local", "PG19 published").text
    assert rendered.short().notes == (
        "rows without a run, not shown: Compressive Transformer; AutoCompressors; Full attention.",
        "§ PG19, yours: other documents (2 instead of 3) and another tokenizer (bpe-300 instead of bpe_4096) than "
        "published; perplexities cannot be compared",
    )


def test_the_report_may_name_the_aggregate(report_config: dict[str, Any]) -> None:
    runs = [make_eval("local", 1, 4.0), make_eval("local", 1, 5.0, run_id="z", started="2024-06-01T00:00:00+00:00")]
    newest = Report.from_config({**report_config, "aggregate": "newest"}).render("laptop", runs)
    assert newest.tables[0].cell("local", "PG19 published").run_ids == ("z",)
    mean = Report.from_config({**report_config, "aggregate": "mean"}).render("laptop", runs)
    cell = mean.tables[0].cell("local", "PG19 published")
    assert cell.run_ids == ("eval-local-1", "z")
    assert cell.n_seeds == 1
    assert cell.value == pytest.approx(sum(run.results["perplexity"]["value"] for run in runs) / 2)


def test_seeds_trained_with_different_settings_do_not_share_a_cell(report: Report) -> None:
    runs = [make_train("local", 1), make_train("local", 2), make_eval("local", 1), make_eval("local", 2)]
    assert len(select_runs(report, "laptop", runs).runs["local"]) == 2
    runs[1].config["recipe"] = {"steps": 20}
    with pytest.raises(InputError, match=r"eval-local-1 and eval-local-2 \(recipe\.steps 1200 and 20\)"):
        select_runs(report, "laptop", runs)


def test_seeds_that_started_elsewhere_do_not_share_a_cell(report: Report) -> None:
    """A start of one kind goes with each seed; a fresh one, one of other steps and an unknown one do not go with it."""
    starts = [make_train("full", seed, run_id=f"start-{seed}") for seed in (1, 2)]
    trainings = [make_train("local", seed) for seed in (1, 2)]
    for training in trainings:
        training.config["init_from"] = f"outputs/checkpoints/start-{training.seed}"
    runs = [*starts, *trainings, make_eval("local", 1), make_eval("local", 2)]
    assert len(select_runs(report, "laptop", runs).runs["local"]) == 2
    with pytest.raises(InputError, match=r"init_from \"full\" and \"unknown\""):
        select_runs(report, "laptop", [runs[0], *runs[2:]])
    # However the folder is named, if its run is on record.
    for training in trainings:
        named, training.config["init_from"] = training.config["init_from"], f"somewhere/best-{training.seed}"
        with pytest.raises(InputError, match=r"init_from \"full\" and \"unknown\"|init_from \"unknown\" and \"full\""):
            select_runs(report, "laptop", runs)
        known, training.environment = training.environment, {**training.environment, "started_from": Path(named).name}
        assert len(select_runs(report, "laptop", runs).runs["local"]) == 2
        training.config["init_from"], training.environment = named, known
    # So does what these started from.
    firsts = [make_train("full", seed, run_id=f"first-{seed}") for seed in (1, 2)]
    for start in starts:
        start.config["init_from"] = f"outputs/checkpoints/first-{start.seed}"
    assert len(select_runs(report, "laptop", [*firsts, *runs]).runs["local"]) == 2
    firsts[1].config["recipe"] = {"steps": 20}
    with pytest.raises(InputError, match=r"start start recipe\.steps 1200 and 20"):
        select_runs(report, "laptop", [*firsts, *runs])
    for start in starts:
        start.config["init_from"] = None
    starts[1].config["recipe"] = {"steps": 20}
    with pytest.raises(InputError, match=r"start recipe\.steps 1200 and 20"):
        select_runs(report, "laptop", runs)
    trainings[1].config["init_from"] = None
    with pytest.raises(InputError, match=r"init_from \"full\" and unset"):
        select_runs(report, "laptop", runs)


def test_settings_that_change_no_result_may_differ(report: Report) -> None:
    runs = [make_eval("local", 1), make_eval("local", 2)]
    runs[0].config |= {"recipe": {"steps": 1200, "loss_chunk": 64}, "task": {"data_dir": "a"}, "results_dir": "b"}
    runs[1].config |= {"task": {"data_dir": "c", "positions": "t5"}}
    assert len(select_runs(report, "laptop", runs).runs["local"]) == 2


def test_one_table_is_one_corpus(report: Report, report_config: dict[str, Any]) -> None:
    old, new = make_eval("local", 1), make_eval("infini_linear", 2)
    new.data["revision"] = "other"
    with pytest.raises(InputError, match=r"different data in one table: eval-local-1 and eval-infini_linear-2"):
        select_runs(report, "laptop", [old, new])
    newest = Report.from_config({**report_config, "aggregate": "newest"})
    assert list(select_runs(newest, "laptop", [old, new]).runs) == ["infini_linear"]


def test_scales_splits_and_other_tasks_do_not_mix(report: Report) -> None:
    validation = make_eval("local", 1, run_id="v")
    validation.data["split"] = "validation"
    others = [make_eval("local", 1, run_id="g", scale="gpu"), make_eval("local", 1, run_id="t", task="arxiv_math")]
    chosen = select_runs(report, "laptop", [validation, *others, make_eval("local", 1), make_train("local", 1)])
    assert [run.run_id for run in chosen.all_runs] == ["eval-local-1"]


def test_every_task_fills_its_own_columns(report: Report) -> None:
    """Books and mathematics are different data in one table, and are no rivals for a cell."""
    books, mathematics = make_eval("local", 1, 4.0), make_eval("local", 1, 2.0, run_id="m", task="arxiv_math")
    mathematics.data |= {"revision": "other", "name": "arxiv_math"}
    rendered = report.render("laptop", [books], [mathematics])
    main = rendered.tables[0]
    assert main.cell("local", "PG19 published").run_ids == ("eval-local-1",)
    assert main.cell("local", "Arxiv-math yours").run_ids == ("m",)
    for column in ("PG19 yours", "Arxiv-math published"):
        assert main.cell("local", column).origin == "missing"
    assert [table.title.split(":")[0] for table in rendered.tables[2:]] == ["PG19", "Arxiv-math"]
    assert [part.name for part in report.parts] == ["table2_lm", "table2_lm_arxiv_math"]


def test_a_report_with_an_unknown_key_or_value_is_refused(report_config: dict[str, Any]) -> None:
    with pytest.raises(
        InputError, match="report.agregate='mean': no such key of report; allowed: .*did you mean 'report.aggregate'"
    ):
        Report.from_config({**report_config, "agregate": "mean"})
    with pytest.raises(InputError, match=r"report\.aggregate='median'.*newest"):
        Report.from_config({**report_config, "aggregate": "median"})
    with pytest.raises(InputError, match=r"report\.baseline='locl'.*did you mean 'local'"):
        Report.from_config({**report_config, "baseline": "locl"})
    with pytest.raises(InputError, match=r"report\.memory_baseline='locl'.*did you mean 'local'"):
        Report.from_config({**report_config, "memory_baseline": "locl"})
    with pytest.raises(InputError, match=r"report\.baselines: no row 'locl'.*did you mean 'local'"):
        Report.from_config({**report_config, "baselines": {"infini_linear": "locl"}})
    with pytest.raises(InputError, match=r"report\.baselines=.*needs report\.baseline"):
        Report.from_config({**report_config, "baselines": {"infini_linear": "local"}, "baseline": None})
    with pytest.raises(InputError, match=r"report\.task='pg-19'.*did you mean 'pg19'"):
        Report.from_config({**report_config, "task": "pg-19"})


def test_missing_cells_print_as_a_dash_and_paper_values_as_the_paper_prints_them(report: Report) -> None:
    rendered = report.render("laptop", [], [])
    assert [row.model for row in rendered.tables[0].rows] == list(report.models)
    assert len(rendered.tables) == 2
    main, sizes = rendered.tables
    for column in ("PG19 published", "PG19 yours"):
        assert {main.cell(model, column).text for model in report.models} == {DASH}
        assert {main.cell(model, column).origin for model in report.models} == {"missing"}
    assert main.cell("local", "PG19 paper").text == DASH
    assert main.cell("infini_linear", "PG19 paper").text == "9.65"
    assert main.cell("infini_linear", "PG19 paper").origin == "quoted"
    assert sizes.cell("rmt", "XL cache paper").text == "None"
    assert sizes.cell("memorizing", "Memory size (comp.) paper").text == "183M (1x)"
    assert sizes.cell("memorizing", "Memory size (comp.) ours").origin == "missing"
    for row in csv.DictReader(io.StringIO(render.to_csv(rendered))):
        assert (row["origin"] == "missing") == (row["text"] == "" and row["value"] == "")


def test_evaluations_that_no_row_takes_are_named(report: Report) -> None:
    """Those that read whole documents, or another split. Those of another report's variant are looked for there."""
    read, whole, split, other = (make_eval("infini_linear", seed) for seed in (1, 2, 3, 4))
    whole.config["scale"] = {**whole.config.get("scale", {}), "eval_max_tokens": None}
    split.data["split"] = "validation"
    other.config["variant"] = "memory_sizes"
    for runs, n, why in (
        ([read, whole, other], 1, "it reads whole documents, this table is about their beginnings"),
        ([read, whole, split], 2, "it reads the validation split, this table is about the test split"),
    ):
        (note,) = [note for note in report.render("laptop", [], runs).notes if "without a cell" in note]
        assert note.startswith(f"yours: {n} evaluation") and note.endswith(why)
    assert not [note for note in report.render("laptop", [], [read, other]).notes if "without a cell" in note]
    (note,) = [note for note in report.render("laptop", [], [make_eval("seq2seq", 1)]).notes if "a cell here" in note]
    assert note.endswith("no row has model=seq2seq with the settings of its training")


def test_a_note_names_all_machines_of_an_evaluation(report: Report) -> None:
    """Its parts may have run on several."""
    run = make_eval("local", 1)
    run.environment["machines"] = ["one kind", "another"]
    (note,) = [note for note in report.render("laptop", [run]).notes if "hardware" in note]
    assert "hardware one kind and another (the last: " in note


def test_a_table_says_where_rows_have_different_seeds(report: Report) -> None:
    """Means of other seeds do not compare models."""
    equal = [make_eval(model, seed) for model in ("infini_linear", "local") for seed in (1, 2)]
    expected = (
        "PG19: not all rows have the same seeds; compare only rows with the same seeds, or look at the differences, "
        "which are paired by seed."
    )
    # It stays so if the reader's runs, which come last, have the same.
    for runs, yours, said in ((equal, None, False), (equal[:-1], None, True), (equal[:-1], equal[:1], True)):
        assert (expected in report.render("laptop", runs, yours).notes) is said


def test_rows_without_any_number_are_left_out_and_named(report: Report) -> None:
    """This holds if other rows have results; otherwise the table shows all rows."""
    empty = [name for name in report.models if not report.paper.get(name)]
    assert "local" in empty
    others = [make_eval(name, 1) for name in report.models if name not in empty]
    rendered = report.render("laptop", others)
    assert [row.model for row in rendered.tables[0].rows] == [name for name in report.models if name not in empty]
    titles = "; ".join(report.models[name] for name in empty)
    assert f"rows without a run, not shown: {titles}." in rendered.notes
    rendered = report.render("laptop", [], [make_eval(name, 1) for name in empty])
    assert [row.model for row in rendered.tables[0].rows] == list(report.models)
    assert not any("not shown" in note for note in rendered.notes)


def test_a_result_that_is_null_is_missing_and_not_zero(report: Report) -> None:
    run = make_eval("local", 1)
    run.results["perplexity"]["value"] = None
    cell = report.render("laptop", [run]).tables[0].cell("local", "PG19 published")
    assert (cell.text, cell.value, cell.origin) == (f"{DASH}, one seed not finite", None, "missing")


def test_seeds_are_averaged_with_their_spread(report: Report) -> None:
    runs = [make_eval("infini_linear", seed) for seed in (1, 2, 3)]
    for run, value in zip(runs, (10.0, 11.0, 12.0), strict=True):
        run.results["perplexity"]["value"] = value
    cell = report.render("laptop", [], runs).tables[0].cell("infini_linear", "PG19 yours")
    assert cell.text == "11.00 ± 1.00 (3)"
    assert (cell.value, cell.spread, cell.spread_kind, cell.n_seeds) == (11.0, 1.0, "sd", 3)
    assert cell.run_ids == tuple(run.run_id for run in runs)


def test_whole_documents_and_their_beginnings_fill_different_tables(report_config: dict[str, Any]) -> None:
    """One model, read both ways: each table takes its own; a scale that never stops early has one of them."""
    begun, whole = make_eval("local", 1, 4.0), make_eval("local", 1, 3.0, run_id="whole")
    whole.config["scale"] = {"eval_max_tokens": None}
    tables = {flag: Report.from_config(report_config | {"whole_documents": flag}) for flag in (False, True)}
    for flag, run in ((False, begun), (True, whole)):
        assert select_runs(tables[flag], "laptop", [begun, whole]).runs["local"] == [run]
    for run in (begun, whole):
        run.scale = "gpu"
    assert not select_runs(tables[True], "gpu", [begun]).runs
    assert select_runs(tables[False], "gpu", [whole]).runs["local"] == [whole]
    assert tables[True].evaluation_settings() == ["scale.eval_max_tokens=null", "scale.knockouts=false"]
    assert not tables[False].evaluation_settings()
    with pytest.raises(InputError, match=r"report\.whole_documents='yes': true or false"):
        Report.from_config(report_config | {"whole_documents": "yes"})


def test_a_report_may_read_further_than_its_rows(report_config: dict[str, Any]) -> None:
    """The limit of the report is that of all its evaluations, and a run that read otherwise is marked."""
    report = Report.from_config(report_config | {"eval_max_tokens": 32768})
    assert report.evaluation_settings() == ["scale.eval_max_tokens=32768"]
    run = make_eval("local", 1, 4.0)
    for read, found in ((32768, {}), (8192, ["reads up to 8192 tokens of a document instead of 32768"])):
        run.config["scale"] = {"eval_max_tokens": read}
        ways = report.find_mismatches("local", [run], Selection({}, {})).get(run.run_id, [])
        assert [way for way in ways if way.startswith("reads up to")] == list(found)
    # The rows of this report say 8,192 themselves.
    test = load_report(compose(["report=llm_continual_test"]).report)
    assert isinstance(test, Report) and "scale.eval_max_tokens=8192" in (test.settings_of("linear", "laptop") or ())
    for read, ways in ((32768, 0), (8192, 1)):
        run = make_eval("llm", 1, 4.0)
        run.config["scale"] = {"eval_max_tokens": read}
        found = test.find_mismatches("linear", [run], Selection({}, {})).get(run.run_id, [])
        assert sum(way.startswith("reads up to") for way in found) == ways
    number, whole_or_not = "an integer or null", "null or a positive number; null with whole_documents"
    for wrong, whole, allowed in (
        (0, False, whole_or_not),
        ("8K", False, number),
        (True, False, number),
        (8192, True, whole_or_not),
    ):
        with pytest.raises(InputError, match=rf"report\.eval_max_tokens={wrong!r}: must be {allowed}"):
            Report.from_config(report_config | {"eval_max_tokens": wrong, "whole_documents": whole})


def test_a_row_takes_a_training_whose_own_evaluations_read_otherwise() -> None:
    """A training of report=llm_passkey fills rows of running text, although its scale reads documents further."""
    variant = Variant("local", {"laptop": ["optimizer.lr=0.1", "scale.eval_max_tokens=8192", "scale.knockouts=false"]})
    trained = {"optimizer": {"lr": 0.1}, "scale": {"eval_max_tokens": 65536, "knockouts": True}}
    assert variant.fits(make_eval("local", 1, 4.0), trained)
    assert not variant.fits(make_eval("local", 1, 4.0), trained | {"optimizer": {"lr": 0.2}})


def test_rows_that_read_different_lengths_are_not_compared(report: Report) -> None:
    runs = [make_eval("local", 1), make_eval("infini_linear", 1)]
    runs[1].config = runs[1].config | {"scale": {"eval_max_tokens": 512}}
    with pytest.raises(InputError, match=r"different data in one table: .*scale\.eval_max_tokens"):
        select_runs(report, "laptop", runs)


def full_report(report: Report) -> RenderedReport:
    models = {"infini_linear": 3.9, "infini_delta": 3.92, "local": 4.0}
    runs = [make_eval(model, seed, loss, model != "local") for model, loss in models.items() for seed in (1, 2)]
    trained = [make_train(model, seed) for model in models for seed in (1, 2)]
    runs[0].documents[0]["nll"] -= 30
    return report.render("laptop", [*runs, *trained], [*runs, *trained])


def test_what_the_memory_is_worth_has_errors_and_runs(report: Report) -> None:
    rendered = full_report(report)
    _, sizes, measures, memory, by_position = rendered.tables
    assert [row.model for row in memory.rows] == ["infini_linear", "infini_delta"]
    cell = memory.cell("infini_linear", "Minus baseline")
    assert cell.value == pytest.approx(-0.1 - 30 / 14000)
    assert cell.spread_kind == "ci" and cell.spread is not None and cell.value is not None
    low, high = cell.value - cell.spread, cell.value + cell.spread
    assert cell.text == f"{cell.value:+.4f} [{low:+.4f}, {high:+.4f}]"
    # Six differences are tested in this table, and each of them knows.
    assert "adjusted for the 6 comparisons of this table (Holm)" in memory.title
    assert {"eval-local-1", "eval-infini_linear-2"} <= set(cell.run_ids)
    assert memory.cell("infini_linear", "Reset").text.startswith("+0.1004 [")
    assert memory.cell("infini_delta", "Documents (effective)").text == "3 (2.3)"
    assert measures.cell("local", "Training tokens").text == "1,000,000"
    assert sizes.cell("local", "Memory size (comp.) ours").text == "12,345"
    assert by_position.columns == ("0 to 250", "250 to 1000", "1000 to 4000", "Seeds")
    assert {by_position.cell(row.model, "Seeds").text for row in by_position.rows} == {"2"}
    assert [row.model for row in by_position.rows] == ["infini_linear", "infini_delta"]
    cell = by_position.cell("infini_delta", "1000 to 4000")
    assert cell.text == "-0.0800 ± 0.0000"
    assert set(cell.run_ids) == {f"eval-{model}-{seed}" for model in ("infini_delta", "local") for seed in (1, 2)}


def test_one_seed_has_no_p_value_beside_rows_of_several(report: Report) -> None:
    """It is tested over documents alone, which is another hypothesis and would be one of the family's smallest p."""
    seeds = {"infini_linear": (1, 2), "infini_delta": (1,), "local": (1, 2)}
    runs = [
        make_eval(model, seed, 4.0 if model == "local" else 3.9, model != "local")
        for model, of in seeds.items()
        for seed in of
    ]
    runs[0].documents[0]["nll"] -= 30
    memory = report.render("laptop", runs).tables[3]
    for name in ("Reset", "Foreign", "Minus baseline"):
        assert memory.cell("infini_delta", f"{name}: p").text == "—"
        assert "[" in memory.cell("infini_delta", name).text
        assert memory.cell("infini_linear", f"{name}: p").value is not None
    said = "p: two-sided, adjusted for the 3 comparisons of this table with two seeds or more (Holm), — with one seed;"
    assert said in memory.title
    several = [run for run in runs if run.model != "infini_delta"]
    alone = report.render("laptop", several).tables[3]
    assert alone.cell("infini_linear", "Minus baseline: p") == memory.cell("infini_linear", "Minus baseline: p")


def test_the_table_says_how_far_its_knock_outs_read(report: Report) -> None:
    """Beside a difference over whole documents they would seem to be of whole documents, too."""
    most, loss = max(TOKENS), "loss added, in the first"
    runs = [make_eval("infini_linear", 1, 3.9, knockouts=True), make_eval("local", 1, 4.0)]
    assert f"{loss} {most:,} tokens of a document, by resetting it" in report.render("laptop", runs).tables[3].title
    shorter = make_eval("infini_delta", 1, 3.9, knockouts=True)
    for entry in shorter.documents:
        entry |= {"reset_tokens": 50, "foreign_tokens": 40}
    title = report.render("laptop", [*runs, shorter]).tables[3].title
    assert f"{loss} 50 to {most:,} tokens of a document, by resetting it" in title


def test_a_table_of_one_seed_alone_says_what_its_p_values_are_of(report: Report) -> None:
    runs = [make_eval("infini_linear", 1, 3.9, knockouts=True), make_eval("local", 1, 4.0)]
    memory = report.render("laptop", runs).tables[3]
    assert memory.cell("infini_linear", "Minus baseline: p").value is not None
    said = "p: two-sided, of one seed over documents alone, adjusted for the 3 comparisons of this table (Holm);"
    assert said in memory.title


def test_a_row_may_have_a_baseline_of_its_own(report_config: dict[str, Any], tmp_path: Path) -> None:
    """Rows of another segment length have one."""
    report = Report.from_config({**report_config, "baselines": {"infini_delta": "rmt"}})
    runs = [make_eval("infini_linear", 1, 3.9), make_eval("infini_delta", 1, 3.9)]
    runs += [make_eval("local", 1, 4.0), make_eval("rmt", 1, 4.2), make_eval("full", 1, 3.5)]
    rendered = report.render("laptop", [], runs)
    memory, by_position = rendered.tables[3:5]
    assert memory.cell("infini_linear", "Minus baseline").value == pytest.approx(-0.1)
    assert memory.cell("infini_delta", "Minus baseline").value == pytest.approx(-0.3)
    assert set(memory.cell("infini_delta", "Minus baseline").run_ids) >= {"eval-infini_delta-1", "eval-rmt-1"}
    assert [row.model for row in by_position.rows] == ["rmt", "infini_linear", "infini_delta", "full"]
    assert by_position.cell("infini_delta", "0 to 250").value == pytest.approx(-0.3)
    assert "loss of the row's baseline" in by_position.title
    written = draw(report, "laptop", select_runs(report, "laptop", runs), tmp_path)
    assert written[0].name == "table2_lm_laptop_gap_by_position.png"


def test_terminal_table_fits_120_columns(report: Report) -> None:
    console = Console(width=120, file=io.StringIO(), color_system=None)
    render.print_report(full_report(report), console)
    assert isinstance(console.file, io.StringIO)
    printed = console.file.getvalue()
    assert max(map(len, printed.splitlines())) <= 120
    assert re.search(r"Infini-Transformer \(Linear \+ Delta\) +1\.6M \(114x\) +12,345 +None", printed)
    assert re.search(r"Infini-Transformer \(Linear \+ Delta\) +9\.67 .*2\.23", printed)
    assert "Transformer-XL" in printed
    assert "synthetic" not in printed.lower()


def test_a_table_that_is_too_wide_is_printed_in_parts_and_nothing_is_cut() -> None:
    columns = tuple(f"{start} to {start + 8}" for start in range(0, 128, 8))
    cells = tuple(Cell(f"+{number / 7:.4f} {PLUS_MINUS} 0.0123", "computed") for number in range(len(columns)))
    table = Table("By place", columns, tuple(Row(name, f"Linear, {name}", cells) for name in ("usual", "longer")))
    console = Console(width=120, file=io.StringIO(), color_system=None)
    render.print_report(RenderedReport("wide", "laptop", "Wide", (table,), ()), console)
    assert isinstance(console.file, io.StringIO)
    printed = console.file.getvalue()
    assert "…" not in printed and max(map(len, printed.splitlines())) <= 120
    assert printed.count("Linear, longer") == printed.count("Model") > 1
    for number in range(len(columns)):
        assert f"+{number / 7:.4f}" in printed
    for column in columns:
        # A long heading is broken at a space.
        assert re.search(rf"\b{column.rsplit(' ', 1)[0]}\b", printed)


def test_markdown_leads_from_every_measured_cell_to_its_runs(report: Report) -> None:
    rendered = full_report(report)
    text = render.to_markdown(rendered, links={"yours": "../runs"})
    for grid in rendered.tables:
        for row in grid.rows:
            for cell in row.cells:
                assert (cell.origin == "measured") == bool(cell.run_ids)
                for run_id in cell.run_ids:
                    assert f"`{run_id}`" in text
    assert "[`eval-local-1`](../runs/eval-local-1.json)" in text
    assert "commit abcdefabcdef" in text
    assert "training tokens 1,000,000" in text


@given(st.text("ab1 _*[](){}<>!|:\\#/-", min_size=1, max_size=12).map(str.strip).filter(bool))
def test_markdown_shows_a_text_as_it_is(text: str) -> None:
    table = Table("Table", (text,), (Row("a", text, (Cell(text, "measured"),)),))
    rendered = RenderedReport("t", "laptop", "Title", (table,), (f"about {text}",))
    tokens = MarkdownIt("commonmark").enable("table").parse(render.to_markdown(rendered))
    inline = [token.children or [] for token in tokens if token.type == "inline"]
    shown = ["".join(child.content for child in children) for children in inline]
    assert shown == ["Title", "Table", "Model", text, text, text, f"about {text}"]


def test_markdown_has_no_more_backslashes_than_it_needs() -> None:
    note = "arxiv_math: +0.05 [-0.1, 0.2], 3 < 4, `report=_a` | "
    rendered = RenderedReport("t", "laptop", "Title", (), (note + "`a|b`",))
    assert render.to_markdown(rendered).endswith(note.replace("|", r"\|") + r"\`a\|b\`" + "\n")


def test_latex_is_escaped(report: Report) -> None:
    text = render.to_latex(full_report(report))
    visible = [line for line in text.splitlines() if not line.startswith("%")]
    assert any(r"A \& B CPU" in line for line in visible)
    assert any(r"bpe\_4096" in line for line in visible)
    for line in visible:
        assert not re.search(r"(?<!\\)[_%#]", line)
        if "tabular" not in line:
            ends = line.rstrip().endswith(r"\\")
            assert len(re.findall(r"(?<!\\)&", line)) in ((6, 3, 8, 4) if ends else (0,))
    assert r"\toprule" in text
    assert r"$\pm$" in text
    assert text.isascii()
    assert render.latex_escape("50% of {a_b} \\ ~^ #$&") == (
        r"50\% of \{a\_b\} \textbackslash{} \textasciitilde{}\textasciicircum{} \#\$\&"
    )


def test_csv_holds_one_line_a_cell_with_unrounded_numbers_and_runs(report: Report) -> None:
    rendered = full_report(report)
    rows = list(csv.DictReader(io.StringIO(render.to_csv(rendered))))
    assert len(rows) == sum(len(row.cells) for grid in rendered.tables for row in grid.rows)
    found = next(row for row in rows if row["model"] == "local" and row["column"] == "PG19 yours")
    assert float(found["value"]) == rendered.tables[0].cell("local", "PG19 yours").value
    assert found["run_ids"].split() == ["eval-local-1", "eval-local-2"]


def test_synthetic_runs_are_labelled_step_back_for_real_ones_and_are_never_published_cells(report: Report) -> None:
    runs = [synthetic(make_eval("local", 1))]
    assert "[SYNTHETIC CORPUS: shows" in report.render("laptop", [], runs).title
    mixed = [*runs, make_eval("local", 1, run_id="mathematics", task="arxiv_math")]
    assert "[SYNTHETIC CORPUS in PG19: shows" in report.render("laptop", [], mixed).title
    beside = report.render("laptop", [make_eval("local", 2, run_id="published")], runs)
    assert "[SYNTHETIC CORPUS of the rows that are yours: shows" in beside.title
    rendered = report.render("laptop", runs, [*runs, make_eval("local", 1, run_id="real")])
    assert "SYNTHETIC" not in rendered.title
    assert rendered.tables[0].cell("local", "PG19 published").origin == "missing"
    assert rendered.tables[0].cell("local", "PG19 yours").run_ids == ("real",)


def test_unequal_training_tokens_are_pointed_out(report: Report) -> None:
    runs = [make_eval("local", 1), make_eval("full", 1), make_train("local", 1), make_train("full", 1)]
    runs[3].cost["tokens_seen"] = 5
    notes = "\n".join(report.render("laptop", [], runs).notes)
    assert "NOT equal between runs (1,000,000 for Local attention only; 5 for Full attention)" in notes


def test_training_tokens_are_equal_where_they_are_within_every_seed(report: Report) -> None:
    """Other padding at every seed is no inequality; another number at one seed is one."""
    runs = [make_eval(model, seed) for model in ("local", "full") for seed in (1, 2)]
    trained = [make_train(model, seed) for model in ("local", "full") for seed in (1, 2)]
    for training in trained:
        training.cost["tokens_seen"] = 1_000_000 + 20_000 * training.seed
    notes = "\n".join(report.render("laptop", [], [*runs, *trained]).notes)
    assert "training tokens 1,020,000 to 1,040,000, equal to 0.1% within each seed;" in notes
    trained[0].cost["tokens_seen"] = 1_040_000
    notes = "\n".join(report.render("laptop", [], [*runs, *trained]).notes)
    listed = "1,040,000 for Local attention only; 1,020,000 to 1,040,000 for Full attention"
    assert f"NOT equal between runs ({listed})" in notes


def sized(model: str, floats: int, **options: Any) -> list[Any]:
    """An evaluation and its training, of a model that carries so many numbers and was built with these options."""
    run, training = make_eval(model, 1), make_train(model, 1)
    run.cost["state_floats"] = floats
    dims = {"segment_length": 16, "d_key": 16, "d_value": 64, "n_heads": 4, "n_kv_heads": None, "n_layers": 3}
    training.config |= {"dims": dims, "model": {"name": model, **options}}
    return [run, training]


def test_memory_is_compared_with_that_of_the_row_that_the_report_names(report_config: dict[str, Any]) -> None:
    runs = [*sized("memorizing", 100_000), *sized("infini_linear", 8_000)]
    for named, shown in (("infini_linear", ["100,000 (0.08x)", "8,000 (1x)"]), (None, ["100,000", "8,000"])):
        report = Report.from_config({**report_config, "memory_baseline": named})
        (_, sizes, *_) = report.render("laptop", [], runs).tables
        column = next(name for name in sizes.columns if name.startswith("Memory size") and name.endswith("ours"))
        assert [sizes.cell(row, column).text for row in ("memorizing", "infini_linear")] == shown


def test_sizes_stand_beside_the_papers(report: Report) -> None:
    runs = [*sized("memorizing", 100_000), *sized("infini_linear", 8_000), *sized("transformer_xl", 30_000)]
    runs += [*sized("compressive", 20_000, memory_segments=2), *sized("local", 0)]
    runs += sized("full", 0, window_segments=24)
    (_, sizes, *_) = report.render("laptop", [], runs).tables
    assert sizes.columns[:2] == ("Memory size (comp.) paper", "Memory size (comp.) ours")
    found = {row.model: [sizes.cell(row.model, f"{name} ours").text for name in SIZE_COLUMNS] for row in sizes.rows}
    # Attention over 24 segments carries the keys and values of 23: (16 + 64) x 4 heads x 3 layers x 23 x 16.
    assert found == {
        "transformer_xl": ["30,000 (3.33x)", "16", "16"],
        "compressive": ["20,000 (5x)", "32", "16"],
        "memorizing": ["100,000 (1x)", "16", "16"],
        "rmt": [DASH] * 3,
        "infini_linear": ["8,000 (12.5x)", "None", "16"],
        "infini_delta": [DASH] * 3,
        "local": ["0", "None", "16"],
        "full": ["353,280 (0.283x)", "None", "16"],
    }
    assert sizes.cell("infini_linear", "Memory size (comp.) paper").text == "1.6M (114x)"
    assert sizes.cell("full", "Memory size (comp.) ours").run_ids == ("eval-full-1",)
    # The comparison needs Memorizing Transformers, and the column of the paper's sizes needs these sizes.
    (_, alone, *_) = report.render("laptop", [], sized("rmt", 128)).tables
    assert alone.cell("rmt", "Memory size (comp.) ours").text == "128"
    others = variants_report({"laptop": ["recipe.length_extension=100"]})
    (_, own, *_) = others.render("laptop", [], sized("infini_linear", 8_000)).tables
    assert own.columns == ("Memory size", *SIZE_COLUMNS[1:]) and [row.model for row in own.rows] == ["infini_linear"]
    assert ["in brackets" in table.title for table in (sizes, alone, own)] == [True, True, False]


SIZE_COLUMNS = ("Memory size (comp.)", "XL cache", "Segment length")


def test_table_2_has_all_nine_models(report: Report) -> None:
    assert list(report.models) == [*list(TABLE1)[:5], "infini_linear", "infini_delta", "local", "full"]


def test_measures_that_no_row_has_are_left_out(report: Report) -> None:
    runs = [make_eval("local", seed, 4.0) for seed in (1, 2)]
    measures = report.render("laptop", runs).tables[2]
    assert measures.rows and not any(name.startswith("Training") for name in measures.columns)
    measures = report.render("laptop", [*runs, make_train("local", 1, run_id=runs[0].parent)]).tables[2]
    assert "Training tokens" in measures.columns


def test_what_was_never_scored_is_not_called_not_finite(report: Report) -> None:
    run = make_eval("local", 1)
    run.results["perplexity"] |= {"value": None, "n": 0}
    assert report.render("laptop", [run]).tables[0].cell("local", "PG19 published").text == DASH


def test_a_seed_whose_perplexity_is_not_finite_is_said(report: Report) -> None:
    runs = [make_eval("local", seed, 4.0) for seed in (1, 2, 3)]
    runs[1].results["perplexity"]["value"] = None
    table = report.render("laptop", runs).tables[0]
    (cell,) = (cell for cell in table.rows[[row.model for row in table.rows].index("local")].cells if cell.run_ids)
    assert cell.text.endswith("one seed not finite") and cell.n_seeds == 2


def test_rows_whose_products_are_of_another_format_are_named(report: Report) -> None:
    runs = [make_eval(model, seed) for model in ("local", "infini_linear") for seed in (1, 2, 3)]
    trained = [make_train(run.model, run.seed, run_id=run.parent) for run in runs]
    for run in (*runs, *trained):
        run.environment["bfloat16"] = True
    alike = report.render("laptop", [*runs, *trained]).notes
    assert not any("matrix products" in note for note in alike)
    runs[1].environment["bfloat16"] = False
    trained[2].environment["bfloat16"] = False
    (note,) = (note for note in report.render("laptop", [*runs, *trained]).notes if "matrix products" in note)
    assert note.endswith("matrix products in bfloat16, but in float32: Local attention only (seeds 2, 3)")


def test_each_training_has_its_start_and_seconds(report: Report) -> None:
    """The table goes by seed, for the training behind an evaluation; a seed without a recorded training has none."""
    runs = [make_eval("infini_linear", seed) for seed in (1, 2)]
    training = make_train("infini_linear", 1, started="2024-05-01T13:30:00+02:00")
    training.cost["wall_seconds"] = 1234.4
    rendered = report.render("laptop", [*runs, training])
    (table,) = [table for table in rendered.tables if "wall-clock seconds of each training" in table.title]
    ((cell,),) = [row.cells for row in table.rows]
    assert table.columns == ("Seed 1",)
    assert (cell.text, cell.value, cell.run_ids) == ("2024-05-01 11:30, 1,234 s", 1234.4, (training.run_id,))
