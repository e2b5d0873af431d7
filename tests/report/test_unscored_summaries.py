"""Summaries without a word that ROUGE counts: what can be scored is, and of the rest it is said that it is not."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from books import row
from command_runner import Runner
from summary_runs import summaries
from test_book_scores import reference
from tiny_runs import SUMMARIES

from infini.config.compose import compose
from infini.report import summaries as summary_report
from infini.report.book_scores import _scores, difference_of_scores, slope_weights, tokens_read
from infini.report.load import load_report
from infini.report.selection import Selection, select_runs
from infini.report.summaries import SummaryReport, _finding, overall_by_length
from infini.tasks.booksum.metrics import OVERALL, TYPES, over_books, rouge, scorable

CHINESE = "狐狸遇见了母鸡。"
ENGLISH = "A fox meets a hen."
TEXT = "A fox meets a hen. They talk about corn. " * 40


def write_all(folder: Path, books: list[tuple[str, list[str]]]) -> str:
    """The same books (text, summaries) in every split; the setting that names them."""
    (folder / "booksum").mkdir(parents=True)
    rows = [
        row(bid=bid, text=text, summary=[{"text": summary} for summary in found])
        for bid, (text, found) in enumerate(books, 1)
    ]
    for split in ("train", "validation", "test"):
        content = "".join(json.dumps(entry) + "\n" for entry in rows)
        (folder / "booksum" / f"{split}.jsonl").write_text(content, encoding="utf-8")
    return f"task.data_dir={folder / 'booksum'}"


def test_a_summary_is_compared_with_what_has_words() -> None:
    assert scorable([CHINESE, ENGLISH, "…", "Привет"]) == [ENGLISH]
    assert rouge(ENGLISH, [CHINESE, ENGLISH]) == pytest.approx(dict.fromkeys(TYPES, 100.0))
    # A summary without any of the reference's words has the lowest score, not none.
    assert rouge(CHINESE, [ENGLISH]) == rouge("", [ENGLISH]) == dict.fromkeys(TYPES, 0.0)
    with pytest.raises(ValueError, match="references with words"):
        rouge(ENGLISH, [CHINESE])
    with pytest.raises(ValueError, match="no book has scores"):
        over_books([])


@pytest.mark.parametrize(
    ("asked", "scored", "note"),
    [
        ("lead", ["2", "3"], "2 of 5 summaries by people have no word of a-z or 0-9; ROUGE counts no others"),
        ("random", ["2", "3"], "; not scored: 1 of 3 books (1)"),
        ("oracle", ["2", "3"], "; not scored: 1 of 3 books (1)"),
        ("human", ["3"], "1 of 2 summaries by people"),
    ],
)
def test_references_score_what_can_be_scored(
    infini: Runner, tmp_path: Path, asked: str, scored: list[str], note: str
) -> None:
    data = write_all(
        tmp_path,
        [(TEXT, [CHINESE]), (TEXT + "2", [CHINESE, ENGLISH]), (TEXT + "3", [ENGLISH, f"{ENGLISH} They talk."])],
    )
    out = infini("eval", "task=booksum", f"task.reference={asked}", "length=64", data)
    assert f"length: has no effect: task.reference={asked} evaluates no model" in infini.err.splitlines()
    (run,) = infini.records("eval")
    (cell,) = run.series["cells"]
    assert [book["name"] for book in cell["books"]] == scored
    assert {entry["n"] for entry in run.results.values()} == {len(scored)}
    assert note in out and note in run.results[OVERALL]["note"]
    assert run.metric("rouge1") == cell["rouge1"] > 0


@pytest.mark.usefixtures("elsewhere")
def test_where_nothing_can_be_scored_summaries_are_kept_and_scores_are_not(infini: Runner, tmp_path: Path) -> None:
    data = write_all(tmp_path, [(CHINESE * 60, [CHINESE]), (CHINESE * 70, [CHINESE, CHINESE * 2])])
    words = ["task=booksum", *SUMMARIES, data]
    infini("train", *words)
    out = infini("eval", *words, "length=500K", "decoding.max_new_tokens=3")
    for asked in ("lead", "random", "oracle", "human"):
        out += infini("eval", *words, f"task.reference={asked}")
    assert out.count("—") == 5 * 5 and "3 of 3 summaries by people" in out and "0.0000" not in out
    for run in infini.records("eval"):
        assert all(entry["value"] is None and entry["n"] == 0 for entry in run.results.values())
    (kept,) = (infini.results / "runs").glob("*.jsonl")
    assert len(kept.read_text("utf-8").splitlines()) == 2
    infini("table", "report=table4_booksum", "report.aggregate=newest")
    infini("figure", "report=table4_booksum", "report.aggregate=newest")


def without_scores(runs: list[Any]) -> list[Any]:
    for run in runs:
        for cell in run.series.get("cells", ()):
            cell |= {name: None for name in cell if name not in ("length", "books")} | {"books": []}
    return runs


def test_tables_figures_and_claims_have_nothing_of_what_was_not_scored(tmp_path: Path) -> None:
    report = load_report(compose(["report=table4_booksum"]).report)
    assert isinstance(report, SummaryReport)
    length = 500 * 1024
    runs = summaries("infini_linear", {length: (1, 2, 6)}) + without_scores(
        summaries("infini_delta", {length: (1, 2, 6)})
    )
    runs += without_scores(summaries("infini_linear", {length: (1, 2, 6)}, seed=2)) + without_scores(
        reference("lead", [(1, 2, 6)])
    )
    (table,) = report.render("laptop", runs, None).tables
    cells = {line.model: line.cells[table.columns.index("Overall")].text for line in table.rows}
    assert cells["infini_linear/published"].startswith("3.0 ")
    assert cells["infini_delta/published"] == cells["lead/published"] == "—"
    selection = select_runs(report, "laptop", runs)
    assert _scores(selection, [("infini_linear", length), ("infini_delta", length)]) == ({}, [], ())

    by_length = load_report(compose(["report=booksum_lengths"]).report)
    assert isinstance(by_length, SummaryReport)
    at_two = {16 * 1024: (1.0, 2.0, 6.0), 32 * 1024: (2.0, 3.0, 4.0)}
    runs = summaries("infini_linear", at_two, split="validation")
    runs += without_scores(summaries("infini_delta", at_two, split="validation"))
    selection = select_runs(by_length, "laptop", runs)
    assert len(overall_by_length(by_length, "laptop", selection, tmp_path / "figure")) == 2
    alone = Selection({"infini_delta": selection.runs["infini_delta"]}, {})
    assert overall_by_length(by_length, "laptop", alone, tmp_path / "none") == []


def test_a_book_that_ends_before_a_length_counts_with_what_was_read(tmp_path: Path, monkeypatch: Any) -> None:
    """Two of three books have 32K tokens, so the mean of 64K is of 40K, and a doubling is shorter there. A note says
    so."""
    report = load_report(compose(["report=booksum_lengths"]).report)
    assert isinstance(report, SummaryReport)
    lengths = [16 * 1024, 32 * 1024, 64 * 1024]
    scores = {length: [3 + doublings] * 3 for length, doublings in zip(lengths, (0, 1, 4 / 3), strict=True)}
    runs = summaries("infini_linear", scores, split="validation")
    for cell in runs[1].series["cells"]:
        for book, whole in zip(cell["books"], (32 * 1024, 32 * 1024, 10**6), strict=True):
            book["tokens_read"] = min(whole, cell["length"])
    mean = round(32 * 1024 * 2 ** (1 / 3))
    assert [round(tokens_read([runs[1]], length)) for length in lengths] == [*lengths[:2], mean]
    selection = select_runs(report, "laptop", runs)
    drawn: list[Any] = []
    titled: list[str] = []
    monkeypatch.setattr(summary_report, "label_ends", lambda axes, labels: drawn.extend(labels))
    monkeypatch.setattr(summary_report, "entitle", lambda axes, finding, detail: titled.append(finding))
    monkeypatch.setattr(summary_report, "parse_lengths", lambda *_: lengths)
    overall_by_length(report, "laptop", selection, tmp_path / "figure")
    assert [round(label.x) for label in drawn] == [mean]
    (note,) = [note for note in report.render("laptop", runs, None).notes if "end before" in note]
    assert note == (
        "published: books that end before a length are read whole, which are, with the geometric mean of what is read: "
        f"64K: 2 of 3 ({mean:,} tokens read)."
    )
    # The score rises by one a doubling of what was read.
    assert "Linear) +1.00 (" in " ".join(titled[0].split())


def test_books_that_are_all_read_whole_have_no_slope() -> None:
    lengths = {16 * 1024: (1.0, 2.0, 6.0), 32 * 1024: (1.0, 2.0, 6.0)}
    runs = summaries("infini_linear", lengths, split="validation")
    for cell in runs[1].series["cells"]:
        for book in cell["books"]:
            book["tokens_read"] = 1000
    report = load_report(compose(["report=booksum_lengths"]).report)
    selection = select_runs(report, "laptop", runs)
    weights = slope_weights([tokens_read(runs[1:], length) for length in lengths])
    assert weights is None
    assert difference_of_scores(selection, [("infini_linear", length) for length in lengths], weights) is None


def test_an_evaluation_that_no_row_takes_is_named() -> None:
    """A reader whose run is in no cell learns why; the scores over references by their maximum are other scores."""
    report = load_report(compose(["report=table4_booksum"]).report)
    runs = summaries("infini_linear", {500 * 1024: (1, 2, 6)}, asked={"task.references": "max"})
    (note,) = [note for note in report.render("laptop", [], runs).notes if "without a cell" in note]
    why = "its scores are the max over the summaries of a book, this table's the mean"
    assert note == f"yours: 1 evaluation without a cell here; the last is {runs[1].run_id}: {why}"


SLOPES = "Overall ROUGE, points a doubling"
EACH = "(each interval by itself)"


@pytest.mark.parametrize(
    ("linear", "delta", "finding"),
    [
        ((2, 3, 4), (2, 9, 1), f"Reading more of a book changes {SLOPES} {EACH}: Linear; no sure change: Delta"),
        ((2, 3, 4), (1, 2, 3), f"Reading more of a book changes {SLOPES} {EACH}: Linear"),
        ((1, 2, 3), (2, 9, 1), f"Reading more of a book: no sure change of {SLOPES}: Delta"),
        ((1, 2, 3), (1, 2, 3), "Overall ROUGE by tokens of the book that were read"),
    ],
)
def test_the_title_names_sure_changes_and_leaves_out_scores_that_no_length_changes(
    linear: tuple[float, ...], delta: tuple[float, ...], finding: str
) -> None:
    """A reference reads no more of a book where more is asked, so its score says nothing about reading more."""
    report = load_report(compose(["report=booksum_lengths", "report.input_lengths=[16K,32K]"]).report)
    assert isinstance(report, SummaryReport)
    systems = {name: replace(row, short=name.removeprefix("infini_").title()) for name, row in report.systems.items()}
    report = replace(report, systems=systems)
    runs = []
    for model, at_32k in (("infini_linear", linear), ("infini_delta", delta)):
        runs += summaries(model, {16 * 1024: (1, 2, 3), 32 * 1024: at_32k}, split="validation")
    title = _finding(report, select_runs(report, "laptop", runs), list(systems))
    assert re.sub(r" [+-]\d\.\d\d \(.*?\)", "", title) == finding
