"""The short form of a report on a terminal, and its tables in Weights & Biases."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_runner import Runner
from report_runs import make_eval
from rich.console import Console
from wandb_files import records_in, run_of

from infini.cli import main as cli
from infini.config.compose import compose
from infini.config.schema import WandbConfig
from infini.records import load_records, published_dir
from infini.report.load import load_report
from infini.report.render import print_report, to_markdown
from infini.report.selection import Selection, select_runs
from infini.report.tables import MISSING, Cell, RenderedReport, Row, Table, seconds_table
from infini.runs.claims import claims_text, declared_report, judged, totals_of
from infini.training.loggers import log_tables

MAIN = Table("Accuracy", ("32K", "Verdict"), (Row("a", "Linear †", (Cell("98*", "measured"), MISSING)),))
OTHER = Table("Behind it", ("Seeds",), (Row("a", "Linear", (Cell("3", "measured"),)),))
NOTES = ("*: one segment", "†: not as declared", "‡: something else", "published: 3 runs")
REPORT = RenderedReport("t", "laptop", "A table", (MAIN, OTHER), NOTES, "3 claims: holds 1, inconclusive 2")


def printed(report: RenderedReport) -> str:
    console = Console(width=120, file=io.StringIO(), color_system=None)
    print_report(report, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_short_form_has_the_main_table_and_what_explains_its_marks() -> None:
    short = REPORT.short()
    assert short.tables == (MAIN,) and short.notes == NOTES[:2]
    assert printed(short).splitlines()[:2] == ["A table", "3 claims: holds 1, inconclusive 2"]


@pytest.mark.parametrize("name", ["llm_passkey", "llm_booksum", "long_context"])
def test_rows_without_a_run_are_named_once_others_have_one(name: str) -> None:
    """They stood in the table as lines of dashes."""
    report: Any = load_report(compose([f"report={name}"]).report)
    records = load_records(published_dir())
    runs = select_runs(report, "laptop", records).runs
    first = next(iter(runs))
    some = report.render("laptop", runs[first] + [run for run in records if run.verb == "train"])
    none = report.render("laptop", [])
    titles = {row.model: row.title for row in none.tables[0].rows if row.model.endswith("/published")}
    absent = [title for row, title in titles.items() if row != f"{first}/published"]
    assert {row.model for row in some.tables[0].rows if not row.model.endswith("/paper")} == {f"{first}/published"}
    assert absent and f"rows without a run, not shown: {'; '.join(absent)}." in some.short().notes
    assert not any(note.startswith("rows without a run") for note in none.notes)


def test_totals_stand_below_the_title_in_markdown_too() -> None:
    assert to_markdown(REPORT).splitlines()[:5] == ["# A table", "", REPORT.totals, "", "**Accuracy**"]
    without = replace(REPORT, totals="")
    assert to_markdown(without).splitlines()[:3] == ["# A table", "", "**Accuracy**"]
    # CLAIMS.md is made by the same function.
    first, _, totals, *_ = claims_text("laptop", load_records(published_dir())).splitlines()
    assert first.startswith("# Claims of the paper") and re.match(r"\d+ claims: holds \d+, does not hold \d+, ", totals)


def test_the_short_form_leaves_out_the_columns_that_a_table_names() -> None:
    table = Table(MAIN.title, MAIN.columns, MAIN.rows, short_columns=("Verdict",))
    (short,) = RenderedReport("t", "laptop", "A table", (table,), ()).short().tables
    assert short.columns == ("Verdict",) and short.rows[0].cells == (MISSING,)


def test_the_short_form_has_every_table_with_a_short_form_of_its_own() -> None:
    parts = tuple(Table(name, MAIN.columns, MAIN.rows, short_columns=("32K",)) for name in ("first", "second"))
    short = RenderedReport("t", "laptop", "A table", (*parts, OTHER), ()).short()
    assert [(table.title, table.columns) for table in short.tables] == [("first", ("32K",)), ("second", ("32K",))]


def test_columns_of_the_readers_own_runs_stand_in_the_short_form_where_there_are_such_runs() -> None:
    names, found = ("PG19 published", "PG19 yours", "Math yours"), Cell("7", "measured", source="yours")
    table = Table("Perplexity", names, (Row("a", "Linear", (found, MISSING, MISSING)),))
    (short,) = RenderedReport("t", "laptop", "A table", (table,), ()).short().tables
    assert short.columns == names[:1] and short.rows[0].cells == (found,)
    table = Table("Perplexity", names, (Row("a", "Linear", (found, MISSING, found)),))
    (short,) = RenderedReport("t", "laptop", "A table", (table,), ()).short().tables
    assert short.columns == (names[0], names[2])


def test_a_table_without_results_says_how_to_get_them() -> None:
    table = Table("Accuracy", ("32K",), (Row("a", "Linear", (Cell("97", "quoted"),)),))
    notes = ("published: no runs", "no measurement yet: infini bench")
    assert RenderedReport("t", "laptop", "A table", (table, OTHER), notes).short().notes == notes
    none = RenderedReport("t", "laptop", "A table", (), notes)
    assert none.short() == none


def test_the_command_prints_the_short_form_and_writes_everything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["table", "report=lm_gates", f"results_dir={tmp_path}"]
    assert cli.main(words) == 0
    short = capsys.readouterr().out
    written = {path.name: path.read_bytes() for path in (tmp_path / "tables").iterdir()}
    assert cli.main([*words, "full=true"]) == 0
    full = capsys.readouterr().out
    assert {path.name: path.read_bytes() for path in (tmp_path / "tables").iterdir()} == written
    assert re.search(
        r"^full=true prints the rest: \d+ more tables?, \d+ notes?, and the runs behind the rows$", short, re.MULTILINE
    )
    assert re.search(r"^Claims about this table.*: \d+ claims?: holds \d+, does not hold \d+", short, re.MULTILINE)
    assert "full=true" not in full and len(short.splitlines()) < len(full.splitlines()) / 2


def test_claims_begin_with_their_totals_and_those_of_a_report_are_the_same_verdicts() -> None:
    known = load_records(published_dir())
    report = declared_report("claims")
    rendered = judged(report, "laptop", known)  # type: ignore[arg-type]
    about_claims = [table for table in rendered.tables if "Verdict" in table.columns]
    found = {row.model: row.cells[3].text for table in about_claims for row in table.rows}
    verdicts = [found[claim.name] for claim in report.claims]  # type: ignore[attr-defined]
    order = ("holds", "does not hold", "inconclusive", "not testable")
    counts = ", ".join(f"{verdict} {verdicts.count(verdict)}" for verdict in order)
    assert rendered.totals == f"{len(verdicts)} claims: {counts}"
    about = [
        verdict
        for claim, verdict in zip(report.claims, verdicts, strict=True)  # type: ignore[attr-defined]
        if claim.report == "table3_passkey"
    ]
    counts = ", ".join(f"{verdict} {about.count(verdict)}" for verdict in order)
    assert totals_of("table3_passkey", "laptop", known) == f"{len(about)} claims: {counts}"
    assert totals_of("lr_search", "laptop", known) == ""


@pytest.mark.usefixtures("offline_wandb")
def test_tables_are_logged_to_wandb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    log_tables(WandbConfig("wandb", None, "mine", None, None, "final", []), tmp_path / "logs", REPORT)
    (folder,) = (tmp_path / "logs" / "wandb").glob("offline-run-*")
    assert f"to send it: wandb sync {folder}" in capfd.readouterr().err.splitlines()
    run = run_of(folder)
    assert (run.project, run.run_group, run.job_type, run.display_name) == ("mine", "t", "table", "final")
    assert sum(record.HasField("history") for record in records_in(folder)) == 2
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.rglob("*.table.json"))]
    assert {"columns": ["Model", "32K", "Verdict"], "data": [["Linear †", "98*", MISSING.text]]} in [
        {key: table[key] for key in ("columns", "data")} for table in found
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("offline_wandb", "elsewhere")
def test_the_command_line_logs_a_reproduction_and_its_table_to_wandb(infini: Runner) -> None:
    """`infini reproduce` logs its training and then the table, `infini table` the same table once more."""
    words = ["report=table2_lm", "logger=wandb", "logger.project=mine"]
    infini("reproduce", *words, "model=local")
    made = offline_runs(infini.results)
    assert {run_of(folder).job_type for folder in made} == {"train", "table"} and len(made) == 2
    infini("table", *words)
    (again,) = set(offline_runs(infini.results)) - set(made)
    (table,) = (folder for folder in made if run_of(folder).job_type == "table")
    assert f"to send it: wandb sync {again}" in infini.err.splitlines()
    (training,) = infini.records("train")
    assert training.run_id in {run_of(folder).run_id for folder in made}
    for folder in (table, again):
        run = run_of(folder)
        assert (run.project, run.run_group, run.job_type) == ("mine", "table2_lm", "table")
    logged = [sorted(path.read_bytes() for path in folder.rglob("*.table.json")) for folder in (table, again)]
    assert logged[0] == logged[1] and any(b"Local attention only" in text for text in logged[0])


def offline_runs(results: Path) -> list[Path]:
    """Folders of the runs that were logged."""
    return sorted((results / "logs" / "wandb").glob("offline-run-*"))


def test_a_table_goes_to_no_other_logger(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["table", "logger=tensorboard", f"results_dir={tmp_path}"]) == cli.USAGE_ERROR
    assert "logger=tensorboard: infini table logs to wandb alone; leave it out" in capfd.readouterr().err


@pytest.mark.parametrize("name", ["llm_passkey", "llm_booksum", "long_context", "table3_passkey"])
def test_every_row_says_what_it_cost(name: str) -> None:
    """Only the table of running text had a column of seconds."""
    report: Any = load_report(compose([f"report={name}"]).report)
    records = load_records(published_dir())
    selection = select_runs(report, "laptop", records)
    table = report.render("laptop", records).tables[-1]
    assert table.title.startswith("Wall-clock seconds") and len(table.rows) == len(selection.runs)
    for row, runs in selection.runs.items():
        seeds = {run.seed for run in runs}
        spent = sum(run.cost["wall_seconds"] for run in runs) / len(seeds)
        assert table.cell(f"{row}/published", "Evaluation seconds").value == pytest.approx(spent)
        if not any(run.parent for run in runs):
            assert "Training seconds" not in table.columns or (
                table.cell(f"{row}/published", "Training seconds").text == "\N{EM DASH}"
            )
    trained = [run for runs in selection.runs.values() for run in runs if run.parent]
    assert ("Training seconds" in table.columns) == bool(trained)


def test_a_cost_that_a_record_lacks_is_not_counted_as_nothing() -> None:
    runs = [make_eval("local", 1), make_eval("local", 1), make_eval("local", 2)]
    for run, seconds in zip(runs, (10.0, 20.0, 50.0), strict=True):
        run.cost["wall_seconds"] = seconds
    (table,) = seconds_table({"local": "Local"}, {"published": Selection({"local": runs}, {})})
    assert table.columns == ("Source", "Evaluation seconds") and table.rows[0].cells[1].text.startswith("40 ")
    del runs[1].cost["wall_seconds"]
    (table,) = seconds_table({"local": "Local"}, {"published": Selection({"local": runs}, {})})
    assert table.rows[0].cells[1].text == "50"
    assert seconds_table({"local": "Local"}, {"published": Selection({}, {})}) == []
