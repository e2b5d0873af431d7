"""The evaluation of summaries: what a model is given, how its summary is drawn, and what is kept of it."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from books import row, write_books
from command_runner import Runner
from summary_runs import on_the_logit, summaries
from tiny_runs import SUMMARIES, TINY

from infini.cli import main as cli
from infini.config.compose import compose
from infini.evaluation.decoding import Reader
from infini.report.load import load_report
from infini.report.selection import Selection, select_runs
from infini.report.summaries import SummaryReport, _points, overall_by_length
from infini.tasks.booksum import evaluation
from infini.tasks.booksum.books import load_books, open_books
from infini.tasks.booksum.data import SEPARATOR, SummaryBatches
from infini.tasks.booksum.metrics import OVERALL, TYPES, over_books, rouge
from infini.tasks.booksum.task import DataModule

SIZES = tuple(text for text in SUMMARIES if not text.startswith("decoding."))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Books, and the results of a training on them."""
    folder = tmp_path_factory.mktemp("booksum")
    data = write_books(folder / "books")
    words = [*TINY, *SIZES, "logger=none", f"task.data_dir={data}", f"results_dir={folder / 'results'}"]
    assert cli.main(["train", "task=booksum", *words]) == 0
    return folder


@pytest.fixture
def data(trained: Path) -> Path:
    return trained / "books" / "booksum"


@pytest.fixture
def words(infini: Runner, trained: Path, data: Path) -> list[str]:
    shutil.copytree(trained / "results", infini.results)
    return ["task=booksum", *SIZES, f"task.data_dir={data}"]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """(max_new_tokens, temperature, top_p, seed) of every summary that would be drawn; none is."""
    found: list[tuple[Any, ...]] = []

    def told(reader: Any, max_new: int, temperature: float, top_p: float, generator: Any, end: int) -> Iterator[Any]:
        found.append((max_new, temperature, top_p, generator.initial_seed()))
        return iter(())

    for module in ("infini.tasks.booksum.evaluation", "infini.evaluation.decoding"):
        monkeypatch.setattr(f"{module}.generate", told)
    return found


def test_what_an_evaluation_reads_is_what_stands_before_the_summary_in_training(
    infini: Runner, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = compose([*TINY, *words])
    books, module = open_books(cfg, "test"), DataModule(cfg)
    batches = module._batches(books, module._tokens(books))
    assert isinstance(batches, SummaryBatches)
    ids, begin = batches.example(0)
    read: list[np.ndarray] = []
    original = Reader._ids

    def told(self: Reader, ids: np.ndarray) -> Any:
        read.append(ids)
        return original(self, ids)

    monkeypatch.setattr(Reader, "_ids", told)
    # The mark is not counted.
    infini("eval", *words, f"length={begin - 1}", "decoding.max_new_tokens=1")
    assert np.concatenate(read)[:begin].tolist() == ids[:begin].tolist()
    assert infini.records("eval")[0].series["cells"][0]["books"][0]["tokens_read"] == begin - 1


@pytest.mark.parametrize("key", ["length", "task.input_length"])
def test_a_length_without_room_for_a_book_is_refused(infini: Runner, words: list[str], key: str) -> None:
    """Otherwise every summary would be of nothing."""
    least = len(DataModule(compose([*TINY, *words])).tokenizer.encode(SEPARATOR)) + 1
    named = f"{key}={least - 1}" if key == "task.input_length" else f"length=64,{least - 1}"
    message = infini.error("eval", *words, named)
    assert message == f"{key}={least - 1}: must be at least {least}; {least - 1} tokens are read beside the book"
    infini("eval", *words, f"{key}={least}", "decoding.max_new_tokens=1")
    assert infini.records("eval")[0].series["cells"][0]["books"][0]["tokens_read"] == least


def test_decoding_is_the_papers_unless_it_is_set(
    infini: Runner, words: list[str], drawn: list[tuple[Any, ...]], tmp_path: Path
) -> None:
    others = ("decoding.max_new_tokens=7", "decoding.temperature=0.25", "decoding.top_p=0.5")
    (tmp_path / "book.txt").write_text("A dog runs.", "utf-8")
    for command in (["eval", *words, "length=64"], ["summarize", str(tmp_path / "book.txt")]):
        infini(*command)
        assert {found[:3] for found in drawn} == {(1024, 0.5, 0.95)}
        drawn.clear()
        infini(*command, *others)
        assert {found[:3] for found in drawn} == {(7, 0.25, 0.5)}
        drawn.clear()


def test_a_books_seed_is_its_own_whatever_else_is_read(
    infini: Runner, words: list[str], data: Path, drawn: list[tuple[Any, ...]], tmp_path: Path
) -> None:
    infini("eval", *words, "length=64,128")
    one, two, *again = [found[3] for found in drawn]
    assert one != two and again == [one, two], "the same at every length"
    shutil.copytree(data.parent, tmp_path / "books")
    (tmp_path / "books" / "booksum" / "test.jsonl").write_text(
        "".join(json.dumps(row(bid=bid, text="Another.")) + "\n" for bid in (9, 2)), "utf-8"
    )
    drawn.clear()
    infini("eval", *words, f"task.data_dir={tmp_path / 'books' / 'booksum'}", "length=64")
    assert drawn[0][3] not in (one, two) and drawn[1][3] == two
    # Another seed draws another summary.
    assert evaluation._seed(1, "2") == two != evaluation._seed(2, "2")


def test_scores_are_made_again_from_what_lies_beside_the_record(infini: Runner, words: list[str], data: Path) -> None:
    infini("eval", *words, "length=64,1K", "decoding.max_new_tokens=20", "decoding.temperature=0")
    (run,) = infini.records("eval")
    books = load_books("test", data, "none/none")
    references = dict(zip(books.documents.names, books.summaries, strict=True))
    content = (infini.results / "runs" / f"{run.run_id}.jsonl").read_bytes().decode()
    kept = {entry["name"]: entry["summary"] for entry in map(json.loads, content.split("\n")[:-1])}
    assert len(kept) == 4 and all(kept.values())
    for cell, length in zip(run.series["cells"], ("64", "1K"), strict=True):
        scored = [rouge(kept[f"{length}/{name}"], texts) for name, texts in references.items()]
        for book, scores in zip(cell["books"], scored, strict=True):
            assert {name: book[name] for name in TYPES} == pytest.approx(scores, abs=1e-4)
        for name, (mean, low, high) in over_books(scored).items():
            assert cell[name] == pytest.approx(mean, abs=1e-3)
            assert cell[f"{name}_interval"] == (None if low is None else pytest.approx([low, high], abs=0.1))
    assert run.results[OVERALL]["value"] == run.series["cells"][1][OVERALL]


def test_the_result_is_that_of_the_longest_input(
    infini: Runner, words: list[str], data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = " ".join(itertools.chain(*load_books("test", data, "none/none").summaries))
    original = evaluation.summarise

    def summarised(model: Any, tokenizer: Any, book: np.ndarray, *others: Any) -> dict[str, Any]:
        return original(model, tokenizer, book, *others) | {"summary": text if len(book) > 64 else ""}

    monkeypatch.setattr(evaluation, "summarise", summarised)
    infini("eval", *words, "length=1K,64", "decoding.max_new_tokens=1")
    (run,) = infini.records("eval")
    overall = {cell["length"]: cell[OVERALL] for cell in run.series["cells"]}
    assert run.results[OVERALL]["value"] == overall[1024] > overall[64] == 0


def test_an_evaluation_goes_on_with_the_books_that_are_missing(
    infini: Runner, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [*words, "length=64,1K", "decoding.max_new_tokens=5"]
    infini("eval", *asked)
    (whole,) = infini.records("eval")
    original, made = evaluation.summarise, 0

    def stopped_after(count: int) -> None:
        def counted(*given: Any, **named: Any) -> dict[str, Any]:
            nonlocal made
            if made == count:
                raise KeyboardInterrupt
            made += 1
            return original(*given, **named)

        monkeypatch.setattr(evaluation, "summarise", counted)

    stopped_after(3)
    infini("eval", *asked, code=130)
    assert len(infini.records("eval")) == 1
    made = 0
    stopped_after(1)
    # Summaries are found by book and length, in whatever order they are asked for.
    infini("eval", *words, "length=1K,64", "decoding.max_new_tokens=5")
    run = infini.records("eval")[-1]
    assert made == 1 and run.cost["resumed"] and not whole.cost["resumed"]
    drawn = []
    for record in (whole, run):
        lines = (infini.results / "runs" / f"{record.run_id}.jsonl").read_text("utf-8").split("\n")[:-1]
        drawn.append({entry["name"]: entry["summary"] for entry in map(json.loads, lines)})
    assert drawn[0] == drawn[1] and len(drawn[0]) == 4 and run.results == whole.results


@pytest.fixture
def by_length() -> SummaryReport:
    found = load_report(compose(["report=booksum_lengths"]).report)
    assert isinstance(found, SummaryReport)
    return found


def test_the_figure_has_the_mean_over_seeds_at_each_length_that_was_asked(
    by_length: SummaryReport, tmp_path: Path
) -> None:
    cells = {16 * 1024: (1.0, 2.0, 6.0), 32 * 1024: (2.0, 3.0, 4.0), 1000: (9.0, 9.0, 9.0)}
    runs = summaries("infini_linear", cells, split="validation")
    runs += summaries("infini_linear", {16 * 1024: (5.0, 5.0, 5.0)}, seed=2, split="validation")
    runs += summaries("infini_delta", {64 * 1024: (1.0, 1.0, 4.0)}, split="validation")
    selection = select_runs(by_length, "laptop", runs)
    # The interval of two seeds is that of their mean; a length that the report does not name has no point.
    for name, points in {
        "infini_linear": [(16384, 4.0, *on_the_logit([3, 3.5, 5.5])), (32768, 3.0, *on_the_logit([2, 3, 4]))],
        "infini_delta": [(65536, 2.0, *on_the_logit([1, 1, 4]))],
    }.items():
        np.testing.assert_allclose(_points(by_length, selection.runs[name]), points, rtol=1e-9)
    drawn = overall_by_length(by_length, "laptop", selection, tmp_path / "figure")
    assert [path.suffix for path in drawn] == [".png", ".svg"] and all(path.stat().st_size > 1000 for path in drawn)
    alone = Selection({"infini_delta": selection.runs["infini_delta"]}, {})
    assert overall_by_length(by_length, "laptop", alone, tmp_path / "none") == []
