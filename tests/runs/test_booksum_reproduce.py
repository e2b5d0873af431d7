"""Runs that the table of summaries takes, those of them that it reuses, and those that are still missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from books import write_books
from command_runner import Runner
from summary_runs import summaries
from tiny_runs import SUMMARIES

from infini.config.compose import compose, config_hash
from infini.config.schema import evaluation_keys
from infini.records import RunRecord
from infini.report.load import load_report
from infini.report.selection import Selection, select_runs
from infini.report.summaries import SummaryReport

SMALL = ("model.window=32", "model.k=16")
LENGTH = 500 * 1024
DECODING = {"max_new_tokens": 1024, "temperature": 0.5, "top_p": 0.95}


@pytest.fixture(scope="module")
def table4() -> SummaryReport:
    report = load_report(compose(["report=table4_booksum"]).report)
    assert isinstance(report, SummaryReport)
    return report


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    return ["task=booksum", *SUMMARIES, f"task.data_dir={write_books(tmp_path / 'data')}"]


def rows(report: SummaryReport, runs: list[RunRecord]) -> set[str]:
    """The rows of the table that these runs fill."""
    return set(select_runs(report, "laptop", runs).runs)


@pytest.mark.parametrize(
    ("trained", "asked", "row"),
    [
        ("none", {}, {"bart"}),
        ("alternating", {}, {"bart_unlimiformer"}),
        # Other than it was trained: the row of neither.
        ("none", {"model.unlimiformer": "alternating"}, set()),
        ("none", {"model.unlimiformer": "test"}, set()),
        ("alternating", {"model.unlimiformer": "none"}, set()),
        ("alternating", {"model.k": 2}, set()),
    ],
)
def test_a_run_stands_in_the_row_of_its_training(
    table4: SummaryReport, trained: str, asked: dict[str, Any], row: set[str]
) -> None:
    runs = summaries("bart", {LENGTH: (1, 2, 3)}, trained={"model.unlimiformer": trained}, asked=asked)
    assert rows(table4, runs) == row


def test_weights_of_others_are_the_papers_scale(table4: SummaryReport) -> None:
    weights = {"model.weights": "facebook/bart-base", "task.summary_tokens": 1022, "decoding.max_new_tokens": 1022}
    runs = summaries("bart", {LENGTH: (1, 2, 3)}, trained=weights)
    assert rows(table4, runs) == set()
    for run in runs:
        run.scale = "paper"
    assert set(select_runs(table4, "paper", runs).runs) == {"bart"}
    runs[0].config["model"]["weights"] = runs[1].config["model"]["weights"] = None
    assert not select_runs(table4, "paper", runs).runs


def test_the_length_sets_how_much_of_a_book_is_read(infini: Runner, words: list[str]) -> None:
    message = infini.error("eval", *words, "scale.eval_max_tokens=100")
    tasks = "task=arxiv_math or task=continual or task=pg19"
    assert message == f"scale.eval_max_tokens=100: task=booksum does not read it; add {tasks}"


def test_what_a_row_has_of_its_own_is_not_asked_for(infini: Runner, words: list[str]) -> None:
    asked = ["model=bart", "report=table4_booksum", "report.run=bart", "model.weights=a/b"]
    message = infini.error("reproduce", *words[1:], *asked)
    assert message == "model.weights=a/b: row bart has model.weights=null; leave it out, or other rows with report.run"
    assert not infini.records()


def test_an_evaluation_looks_at_its_source_as_trained_or_tests_the_whole(infini: Runner, words: list[str]) -> None:
    pytest.importorskip("transformers")
    words = [*words, *SMALL, "model=bart"]
    infini("train", *words)
    message = infini.error("eval", *words, "length=64", "model.unlimiformer=alternating")
    assert message == (
        "model.unlimiformer='alternating': needs another training, the checkpoint was trained with 'none'; train it, "
        "or use test, the whole source in evaluations"
    )
    longer = [*words, "model.unlimiformer=alternating", "recipe.segments_per_sequence=8"]
    infini("train", *longer)
    for asked, read in (("none", 32), ("test", 64), ("alternating", 64)):
        infini("eval", *longer, "length=64", f"model.unlimiformer={asked}")
        run = infini.records("eval")[-1]
        assert [book["tokens_read"] for book in run.series["cells"][0]["books"]] == [read, read]
        assert f"of a book ({read} tokens on average): overall" in infini.out
        # The whole source is the whole source, by whichever name.
        assert run.config["model"]["unlimiformer"] == ("none" if asked == "none" else "alternating")


def test_the_newest_model_with_the_requested_options_is_taken(infini: Runner, words: list[str], tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    words = [*words, *SMALL, "recipe.segments_per_sequence=8"]
    infini("train", *words, "model=bart")
    infini("train", *words, "model=bart", "model.unlimiformer=alternating")
    plain, alternating = infini.records()
    for how, parent in (("none", plain), ("alternating", alternating), ("test", alternating)):
        infini("eval", *words, "model=bart", f"model.unlimiformer={how}", "length=32")
        assert infini.records("eval")[-1].parent == parent.run_id, how
    # A book of one's own needs no name of a model: the newest of the task sums it up.
    (tmp_path / "book.txt").write_text("A dog runs. " * 9, "utf-8")
    infini("summarize", str(tmp_path / "book.txt"), "decoding.max_new_tokens=2")
    assert f"tokens read by {alternating.run_id}" in infini.err


def test_what_only_an_evaluation_reads_makes_no_other_training() -> None:
    cfg = compose(["task=booksum"])
    other = compose(
        [
            "task=booksum",
            "task.split=validation",
            "task.input_length=1K",
            "task.references=max",
            "task.reference=lead",
            "task.reference_words=9",
        ]
    )
    assert config_hash(other) == config_hash(cfg)
    assert config_hash(compose(["task=booksum", "task.summary_tokens=9"])) != config_hash(cfg)
    assert {"split", "input_length", "references", "reference", "reference_words"} <= evaluation_keys("task")


def test_trainings_with_other_evaluation_keys_are_one_row(table4: SummaryReport) -> None:
    runs = summaries("infini_linear", {LENGTH: (1, 2, 3)})
    runs += summaries("infini_linear", {LENGTH: (1, 2, 3)}, seed=2, trained={"task.split": "validation"})
    runs += summaries("infini_linear", {LENGTH: (1, 2, 3)}, seed=3, asked={"task.input_length": LENGTH})
    for run in runs[1::2]:
        run.config["task"]["split"] = "test"
    assert len(select_runs(table4, "laptop", runs).runs["infini_linear"]) == 3


def test_train_evaluate_and_reproduce_make_one_run_for_a_cell(infini: Runner, words: list[str]) -> None:
    infini("train", *words)
    infini("eval", *words)
    made = infini.records()
    words = [text for text in words if text != "task=booksum"]
    out = infini("reproduce", *words, "report=table4_booksum", "report.run=infini_linear")
    overall = made[-1].results["overall"]["value"]
    # If every book has 0, there is no interval.
    assert infini.records() == made and f"{overall:.1f}{' [' if overall else ''}" in out
    # The figure's validation books are asked of the same model.
    figure = [*words, "report=booksum_lengths", "report.input_lengths=[64,128]", "report.run=infini_linear"]
    infini("reproduce", *figure)
    assert [run.verb for run in infini.records()] == ["train", "eval", "eval"]
    # Only missing lengths are asked.
    figure[-2] = "report.input_lengths=[64,1K,128]"
    infini("reproduce", *figure)
    *_, last = infini.records()
    assert [cell["length"] for cell in last.series["cells"]] == [1024] and len(infini.records()) == 4
    infini("reproduce", *figure)
    assert len(infini.records()) == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "other",
    ["decoding.temperature=0.7", "task.references=max", "parallel.precision=auto"],
)
def test_an_evaluation_that_asked_otherwise_is_not_taken_for_it(infini: Runner, words: list[str], other: str) -> None:
    infini("train", *words)
    infini("eval", *words, "length=64", other)
    (before,) = infini.records("eval")
    words = [text for text in words if text != "task=booksum"]
    asked = ["report=table4_booksum", "report.run=infini_linear", "report.input_lengths=[64]"]
    infini("reproduce", *words, *asked, "report.aggregate=newest")
    first, second = infini.records("eval")
    assert first == before and second.series["cells"][0]["length"] == 64


def test_an_evaluation_with_other_options_of_the_model_is_not_taken_for_it(infini: Runner, words: list[str]) -> None:
    pytest.importorskip("transformers")
    words = [*words, *SMALL]
    infini("train", *words, "model=bart")
    infini("eval", *words, "length=64", "model=bart", "model.unlimiformer=test")
    words = [text for text in words if not text.startswith("task=")]
    words += ["model=bart", "report=table4_booksum", "report.run=bart", "report.input_lengths=[64]"]
    out = infini("reproduce", *words)
    asked = [run.config["model"]["unlimiformer"] for run in infini.records("eval")]
    assert asked == ["test", "none"] and len(infini.records("train")) == 1 and "BART" in out


@pytest.mark.slow
def test_a_reference_is_made_at_every_scale_and_once(infini: Runner, words: list[str]) -> None:
    words = [text for text in words if text != "task=booksum"]
    asked = ["report=table4_booksum", "report.run=lead", "full=true"]
    for scale in ("laptop", "gpu", "laptop"):
        out = infini("reproduce", *words, *asked, f"scale={scale}")
        assert "yours: 1 evaluation run;" in out
    # No model reads: how it would, or would draw, makes no other reference.
    infini("reproduce", *words, *asked, "decoding.temperature=0.7", "task.summary_tokens=7")
    assert [(run.model, run.scale) for run in infini.records()] == [("lead", "laptop"), ("lead", "gpu")]
    infini("reproduce", *words, *asked, "task.reference_words=5", "report.aggregate=newest")
    assert len(infini.records()) == 3


def test_a_row_is_told_by_the_training(table4: SummaryReport) -> None:
    """The evaluation says alternating in both cases."""
    training, run = summaries("bart", {LENGTH: (1, 2, 3)}, trained={"model.unlimiformer": "alternating"})
    assert table4.row_of(run, Selection({}, {training.run_id: training}))[0] == "bart_unlimiformer"
    training.config["model"]["unlimiformer"] = "none"
    assert table4.row_of(run, Selection({}, {training.run_id: training}))[0] is None


def test_a_quick_try_steps_back_for_a_run_as_declared_and_alone_is_marked(table4: SummaryReport) -> None:
    training, whole = summaries("infini_linear", {LENGTH: (1, 2, 3)}, asked={"decoding": DECODING})
    short = {**DECODING, "max_new_tokens": 64}
    _, tried = summaries("infini_linear", {LENGTH: (0, 0, 1)}, asked={"decoding": short}, name="try-")
    tried.parent = training.run_id
    assert select_runs(table4, "laptop", [training, whole, tried]).runs["infini_linear"] == [whole]
    title, notes = marked(table4, [training, whole, tried])
    assert title == "Infini-Transformers (Linear)" and not notes
    title, notes = marked(table4, [training, tried])
    assert title == "Infini-Transformers (Linear) \N{DAGGER}"
    assert "decoding.max_new_tokens 64 instead of 1024" in notes[0]


def test_a_training_that_was_cut_short_is_marked(table4: SummaryReport) -> None:
    asked = {"decoding": DECODING}
    runs = summaries("infini_linear", {LENGTH: (1, 2, 3)}, trained={"recipe.steps": 10}, asked=asked)
    title, notes = marked(table4, runs, {"recipe": {"steps": 200}})
    assert title.endswith("\N{DAGGER}") and "recipe.steps 10 instead of 200" in notes[0]


def test_a_training_from_other_weights_or_with_other_summaries_is_marked(table4: SummaryReport) -> None:
    for trained, way in (
        ({"init_from": "train-other"}, "init_from train-other instead of null"),
        ({"task.summary_tokens": 9}, "task.summary_tokens 9 instead of 1024"),
    ):
        runs = summaries("infini_linear", {LENGTH: (1, 2, 3)}, trained=trained, asked={"decoding": DECODING})
        title, notes = marked(table4, runs, {"recipe": {"steps": 10}, "task": {"summary_tokens": 1024}})
        assert title.endswith("\N{DAGGER}") and way in notes[0]


def test_a_reference_of_another_length_is_marked(table4: SummaryReport) -> None:
    _, run = summaries("lead", {LENGTH: (1, 2, 3)}, asked={"task.reference_words": 50, "decoding.max_new_tokens": 5})
    run.parent = None
    title, notes = marked(table4, [run])
    assert title == "Reference: the book's first words \N{DAGGER}"
    assert "task.reference_words 50 instead of 640" in notes[0] and "decoding" not in notes[0]


def marked(
    report: SummaryReport, runs: list[RunRecord], declared: dict[str, dict[str, Any]] | None = None
) -> tuple[str, list[str]]:
    """The title of the one row with runs, and the notes on what is marked."""
    declared = declared or {"recipe": {"steps": 10}}
    with patch("infini.report.declared.declared_at", lambda task, scale: declared):
        made = report.render("laptop", runs, None)
    (title,) = [row.title for row in made.tables[0].rows if row.cells[0].run_ids]
    return title, [note for note in made.notes if "\N{DAGGER}" in note]
