"""The summarisation task: books and summaries, training examples, ROUGE, and its evaluation."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from books import row, write_books
from command_runner import Runner
from tiny_runs import SUMMARIES

from infini.config.compose import compose
from infini.errors import InputError
from infini.nn.ops.cross_entropy import IGNORE
from infini.report.book_scores import overall
from infini.report.load import load_report
from infini.tasks.booksum import references
from infini.tasks.booksum.books import BookSplit, load_books
from infini.tasks.booksum.data import Frame, SummaryBatches
from infini.tasks.booksum.evaluation import DECODE_COST
from infini.tasks.booksum.metrics import OVERALL, TYPES, over_books, rouge, sentences

PAPER = {
    "BART": (36.4, 7.6, 15.3, 16.2),
    "BART + Unlimiformer": (36.8, 8.3, 15.7, 16.9),
    "PRIMERA": (38.6, 7.2, 15.6, 16.3),
    "PRIMERA + Unlimiformer": (37.9, 8.2, 16.3, 17.2),
    "Infini (Linear)": (37.9, 8.7, 17.6, 18.0),
    "Infini (Linear + Delta)": (40.0, 8.8, 17.9, 18.5),
}


@pytest.mark.parametrize("system", PAPER)
def test_the_papers_overall_is_the_geometric_mean_of_its_columns(system: str) -> None:
    *columns, printed = PAPER[system]
    assert round(float(overall(np.array(columns))), 1) == printed


def test_books_come_with_all_their_summaries(tmp_path: Path) -> None:
    books = load_books("test", write_books(tmp_path), "none/none")
    assert list(books.documents.names) == ["1", "2"]
    assert books.documents[1].text.startswith("test tells of dogs")
    assert books.summaries == [("A man goes.",), ("Dogs.", "And cats.")]
    other = write_books(tmp_path / "other", summary=[{"text": "Another."}])
    assert load_books("test", other, "none/none").revision != books.revision
    assert load_books("test", other, "none/none").documents.revision == books.documents.revision


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"summary": []}, r"test\.jsonl, line 1: not a book \(no summary"),
        ({"summary": [{"text": " "}]}, "no summary, or an empty one"),
        ({"summary": "none"}, "not a book"),
        ({"text": "a\0b"}, None),
    ],
)
def test_a_row_that_is_no_book_is_named(tmp_path: Path, changes: dict[str, Any], message: str | None) -> None:
    data = write_books(tmp_path, **changes)
    if message is None:
        assert load_books("test", data, "none/none").documents.names[0] == "1"
        return
    with pytest.raises(InputError, match=message):
        load_books("test", data, "none/none")


def test_a_missing_file_or_folder_is_one_line(tmp_path: Path) -> None:
    data = write_books(tmp_path)
    (tmp_path / "test.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="not UTF-8"):
        load_books("test", data, "none/none")
    (tmp_path / "test.txt").unlink()
    with pytest.raises(InputError, match=r"the file of book 2, .*test\.txt, does not exist"):
        load_books("test", data, "none/none")
    with pytest.raises(InputError, match=r"train\.jsonl does not exist; the layout is"):
        load_books("train", tmp_path, "none/none")


def batches(length: int = 12, summary_tokens: int = 4, seed: int = 1) -> SummaryBatches:
    books = [np.arange(100, 130), np.arange(200, 203)]
    summaries = [[np.arange(10, 13)], [np.arange(20, 26), np.arange(30, 31)]]
    frame = Frame(np.array([0]), np.array([7, 8]), 0)
    return SummaryBatches(books, summaries, frame, length, summary_tokens, 2, seed)


def test_an_example_is_mark_book_separator_summary_mark() -> None:
    made = batches()
    first, second, third = (made.example(index) for index in range(3))
    assert first[0].tolist() == [0, *range(100, 106), 7, 8, 10, 11, 12, 0] and first[1] == 9
    # A long summary is cut, and does not end there; a short book is not filled up.
    assert second[0].tolist() == [0, 200, 201, 202, 7, 8, 20, 21, 22, 23] and second[1] == 6
    assert third[0].tolist() == [0, 200, 201, 202, 7, 8, 30, 0]


def test_the_loss_is_on_the_summary_and_its_end_alone() -> None:
    made = batches()
    batch = next(made.all_once())
    for number in range(2):
        ids, begin = made.example(number)
        targets = batch["targets_BT"][number]
        asked = (targets != IGNORE).nonzero().flatten().tolist()
        assert asked == list(range(begin - 1, len(ids) - 1))
        assert targets[asked].tolist() == ids[begin:].tolist()
        # Each target is the token after its input.
        assert batch["ids_BT"][number, : len(ids) - 1].tolist() == ids[:-1].tolist()
        assert batch["mask_BT"][number].tolist() == [True] * (len(ids) - 1) + [False] * (13 - len(ids))


def test_every_example_comes_once_before_any_comes_again() -> None:
    made = batches()
    numbers = [made._pair(number) for number in range(9)]
    assert all(sorted(numbers[start : start + 3]) == [0, 1, 2] for start in (0, 3, 6))
    assert [batches(seed=seed)._pair(0) for seed in range(20)] != [0] * 20
    assert torch.equal(made.batch(2)["ids_BT"], batches().batch(2)["ids_BT"])


def test_an_example_without_room_for_a_book_is_refused() -> None:
    with pytest.raises(InputError, match=r"6 tokens leave no room .* use 2 more"):
        batches(length=6)


def test_rouge_is_the_mean_or_the_maximum_over_references() -> None:
    same, other = "The cat sat on the mat. It ran.", "Dogs bark."
    assert rouge(same, [same]) == pytest.approx(dict.fromkeys(TYPES, 100.0))
    assert rouge("", [same]) == dict.fromkeys(TYPES, 0.0)
    assert rouge(same, [same, other]) == pytest.approx(dict.fromkeys(TYPES, 50.0))
    assert rouge(same, [same, other], "max") == pytest.approx(dict.fromkeys(TYPES, 100.0))
    # Two of three words on either side are shared; stems count.
    assert rouge("cats sat here", ["cat sat there"])["rouge1"] == pytest.approx(200 / 3)
    # Two words of two and of six: the harmonic mean of 1 and 1/3.
    assert rouge("the cat", ["the cat sat on this mat"])["rouge1"] == pytest.approx(50.0)
    with pytest.raises(ValueError, match="references"):
        rouge(same, [])


def test_sentences_of_r_lsum_end_at_full_stops_questions_and_exclamations() -> None:
    assert sentences("One two.  Three?\nFour! Mr. X went") == ["One two.", "Three?", "Four!", "Mr.", "X went"]
    # The order of sentences matters to R-L, not to R-Lsum.
    scores = rouge("It ran away. The cat sat.", ["The cat sat. It ran away."])
    assert scores["rougeLsum"] == pytest.approx(100.0) and scores["rougeL"] < 70
    # A reference has sentences, too.
    scores = rouge("The cat sat and it ran away.", ["It ran away. The cat sat."])
    assert scores["rougeLsum"] == pytest.approx(1200 / 13) and scores["rougeL"] == pytest.approx(600 / 13)


def test_overall_is_of_the_means_and_intervals_hold_them() -> None:
    scores = [dict.fromkeys(TYPES, value) | {"rouge2": value / 4} for value in (10.0, 20.0, 30.0)]
    found = over_books(scores)
    assert found["rouge1"][0] == pytest.approx(20.0)
    assert found[OVERALL][0] == pytest.approx(math.prod((20.0, 5.0, 20.0)) ** (1 / 3))
    for mean, low, high in found.values():
        assert low is not None and high is not None and low < mean < high
    assert over_books(scores[:1])["rouge1"] == (10.0, None, None)


def test_references_are_of_the_book_and_no_longer_than_asked() -> None:
    text = "One two three. Four five! " + "Cats and dogs sleep in the sun. " * 3 + "The end has come."
    assert references.lead(text, 4) == "One two three. Four"
    drawn = references.random_sentences(text, 9, seed=1)
    assert 0 < len(drawn.split()) <= 9 and all(part in sentences(text) for part in sentences(drawn)[:-1])
    assert drawn == references.random_sentences(text, 9, seed=1)
    assert len({references.random_sentences(text, 9, seed=seed) for seed in range(9)}) > 1
    # Sentences without a common word are not picked, and neither are those already there.
    assert references.oracle(text, "The dogs sleep in the sun at the end.", 30) == (
        "Cats and dogs sleep in the sun. The end has come."
    )
    assert references.oracle(text, "The dogs sleep in the sun at the end.", 7) == "Cats and dogs sleep in the sun."
    assert references.oracle(text, "Nothing like it.", 30) == ""


@pytest.mark.parametrize(("reference", "books"), [("lead", 2), ("random", 2), ("oracle", 2), ("human", 1)])
def test_references_are_evaluated_without_a_model(infini: Runner, tmp_path: Path, reference: str, books: int) -> None:
    infini("eval", "task=booksum", f"task.data_dir={write_books(tmp_path / 'data')}", f"task.reference={reference}")
    (run,) = infini.records("eval")
    assert (run.model, run.parent, run.results["overall"]["n"]) == (reference, None, books)
    scores = run.series["cells"][0]["books"]
    assert len(scores) == books
    if reference == "human":
        assert scores[0]["rouge1"] == pytest.approx(rouge("And cats.", ["Dogs."])["rouge1"])
    if reference == "lead":
        text = " ".join("test tells of dogs and cats." for _ in range(80))
        lead = references.lead(text, run.config["task"]["reference_words"])
        assert scores[1]["rouge1"] == pytest.approx(rouge(lead, ["Dogs.", "And cats."])["rouge1"], abs=1e-3)
    if reference == "oracle":
        assert scores[0]["rouge1"] == pytest.approx(100.0), "the summary is a sentence of the book"


def test_train_and_summarise(infini: Runner, tmp_path: Path) -> None:
    words = ["task=booksum", *SUMMARIES, f"task.data_dir={write_books(tmp_path / 'data')}"]
    infini("train", *words)
    (training,) = infini.records("train")
    assert training.data["examples"] == 3 and training.results["validation_summary_nll"]["n"] > 6
    infini("eval", *words, "length=64,1K")
    (run,) = infini.records("eval")
    cells = run.series["cells"]
    assert [cell["length"] for cell in cells] == [64, 1024]
    assert [book["tokens_read"] for book in cells[0]["books"]] == [64, 64]
    assert run.results["overall"]["value"] == cells[1]["overall"]
    kept = (infini.results / "runs" / f"{run.run_id}.jsonl").read_text("utf-8").splitlines()
    assert [json.loads(line)["name"] for line in kept] == ["64/1", "64/2", "1K/1", "1K/2"]
    assert all(json.loads(line)["tokens_drawn"] <= 6 for line in kept)
    content = (infini.results / "runs" / f"{run.run_id}.jsonl").read_bytes()
    assert run.data["beside"][".jsonl"] == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    # Whole books where no length is given; the same seeds draw the same summary, whatever else was read.
    infini("eval", *words, "task.input_length=64")
    again = infini.records("eval")[-1]
    assert again.series["cells"][0]["books"] == cells[0]["books"]


@pytest.mark.slow
def test_the_table_has_the_papers_rows_ours_and_the_references(infini: Runner, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    references = ("lead", "random", "oracle", "human")
    rows = ("bart", "bart_unlimiformer", "infini_delta", *references)
    words = [*SUMMARIES, f"task.data_dir={write_books(tmp_path / 'data')}", "report=table4_booksum"]
    words += [f"report.run=[{','.join(rows)}]", "recipe.segments_per_sequence=8"]
    out = infini("reproduce", *words)
    assert "model.k=1024: training sources have 128 tokens" in infini.err
    made = [(run.verb, run.model) for run in infini.records()]
    systems = [(verb, model) for model in ("bart", "bart", "infini_delta") for verb in ("train", "eval")]
    assert sorted(made) == sorted([*systems, *(("eval", name) for name in references)])
    labels = ("PRIMERA + Unlimiformer", "17.2", "Reference: the book's first words", "Infini-Transformers (Linear)")
    attention = {
        run.run_id: run.config["model"]["unlimiformer"] for run in infini.records("eval") if run.model == "bart"
    }
    assert sorted(attention.values()) == ["alternating", "none"]
    assert infini("reproduce", *words) == out and len(infini.records()) == 10
    run = next(run for run in infini.records("eval") if run.model == "infini_delta")
    table = (infini.results / "tables" / "table4_booksum_laptop.md").read_text("utf-8")
    # A title may take two lines on a terminal.
    assert all(label in table for label in labels)
    assert run.run_id in table and f"| {run.results['overall']['value']:.1f} " in table
    # Each run stands in the row of its attention.
    named = {"none": "BART", "alternating": "BART + Unlimiformer"}
    for run_id, how in attention.items():
        # Tiny ones are marked as trained otherwise.
        begins = f"- {named[how]} \N{DAGGER}, "
        assert any(line.startswith(begins) for line in table.splitlines() if run_id in line), how


def test_the_figure_by_length_has_a_point_a_length(infini: Runner, tmp_path: Path) -> None:
    words = [*SUMMARIES, f"task.data_dir={write_books(tmp_path / 'data')}", "report=booksum_lengths"]
    words += ["report.input_lengths=[64,128,1K]", "report.run=[infini_delta]"]
    out = infini("reproduce", *words)
    (run,) = infini.records("eval")
    assert run.data["split"] == "validation" and [cell["length"] for cell in run.series["cells"]] == [64, 128, 1024]
    # If every book has 0, there is no interval.
    assert all(f"{cell['overall']:.1f}{' [' if cell['overall'] else ''}" in out for cell in run.series["cells"])
    drawn = infini("figure", *words)
    assert "booksum_lengths_laptop_overall_by_length.png" in drawn


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"report.run": "[none]"}, "report.run='none': all, or names of"),
        ({"report.run": "brt"}, "report.run='brt': all, or names of .* did you mean 'bart'"),
        ({"report.aggregate": "mean"}, "report.aggregate='mean': null or newest"),
        ({"report.input_lengths": "[1X]"}, "^report.input_lengths='1X'"),
        ({"report.systems.bart.at_scale": "x"}, r"report.systems.bart.at_scale=.*must be \{scale"),
        ({"report.systems.bart.paper": "[1,2]"}, r"report.systems.bart.paper=\[1.0, 2.0\]: must be R-1, "),
    ],
)
def test_a_report_of_summaries_that_is_wrong_is_one_line(changes: dict[str, str], message: str) -> None:
    cfg = compose(["report=table4_booksum", *(f"{key}={value}" for key, value in changes.items())])
    with pytest.raises(InputError, match=message) as error:
        load_report(cfg.report)
    assert "\n" not in str(error.value)


def lines(folder: Path, *rows: Any) -> Path:
    """A folder whose test books are these lines of JSON."""
    (folder / "test.jsonl").write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
    return folder


def test_a_line_ends_where_json_lines_end(tmp_path: Path) -> None:
    odd = "One\u2028two\u2029three\x85four\x0cfive"
    books = load_books("test", lines(tmp_path, row(text=odd), row(bid=2, summary=[{"text": odd}])), "none/none")
    assert books.documents[0].text == odd and books.summaries[1] == (odd,)
    path = tmp_path / "test.jsonl"
    # An editor of another system leaves such a file.
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    assert load_books("test", tmp_path, "none/none").revision == books.revision


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"text": None}, "neither text nor book"),
        ({"text": 7}, "text must be a string"),
        ({"text": None, "book": ["a"]}, "book must be a string"),
        ({"bid": None}, "no bid, or no title"),
        ({"summary": None}, "NoneType"),
    ],
)
def test_a_field_that_is_none_of_a_book_is_named(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(InputError, match=rf"test\.jsonl, line 2: not a book \(.*{problem}"):
        load_books("test", lines(tmp_path, row(), row(**changes)), "none/none")
    with pytest.raises(InputError, match=r"line 1: not a book \(not a JSON object"):
        load_books("test", lines(tmp_path, "text"), "none/none")


def test_a_text_that_is_null_stands_in_the_file_that_is_named(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "book.txt").write_bytes(b"\xef\xbb\xbfA dog runs.")
    books = load_books("test", lines(tmp_path / "data", row(text=None, book="book.txt")), "none/none")
    assert books.documents[0].text == "A dog runs."


@pytest.mark.parametrize(("inside", "typed"), [("data", "."), ("data/more", ".."), ("data", "../data")])
def test_the_folder_above_is_found_from_inside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inside: str, typed: str
) -> None:
    (tmp_path / "data" / "more").mkdir(parents=True)
    (tmp_path / "book.txt").write_text("A dog runs.", "utf-8")
    lines(tmp_path / "data", row(text=None, book="book.txt"))
    monkeypatch.chdir(tmp_path / inside)
    assert load_books("test", typed, "none/none").documents[0].text == "A dog runs."


def test_rows_with_one_bid_are_one_book_or_refused(tmp_path: Path) -> None:
    twice = lines(tmp_path, row(), row(bid=2, text="B."), row(bid="1", summary=[{"text": "He goes."}, {"text": "He."}]))
    books = load_books("test", twice, "none/none")
    assert list(books.documents.names) == ["1", "2"]
    assert books.summaries == [("He goes.", "He."), ("He goes.",)] and books.documents[1].text == "B."
    with pytest.raises(InputError, match=r"test\.jsonl, line 2: two books have the bid 1; give each its own"):
        load_books("test", lines(tmp_path, row(), row(text="Another.")), "none/none")


def test_equal_summaries_are_one(tmp_path: Path) -> None:
    """They may be in one row or in several. Otherwise the second human summary is the first, and scores 100."""
    rows = [
        row(summary=[{"text": "He goes."}] * 2),
        row(summary=[{"text": "He goes."}]),
        row(summary=[{"text": text} for text in ("He.", "He goes.", "He.")]),
    ]
    assert load_books("test", lines(tmp_path, *rows), "none/none").summaries == [("He goes.", "He.")]


def of_hub(rows: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> BookSplit:
    import datasets

    monkeypatch.delenv("INFINI_DATA_DIR", raising=False)
    monkeypatch.setattr(datasets, "load_dataset", lambda *given, **options: datasets.Dataset.from_list(rows))
    return load_books("test", None, "some/books")


def test_rows_of_the_hub_that_are_no_books_are_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong: list[dict[str, Any]] = [
        {"summary": []},
        {"summary": [{"text": " "}]},
        {"summary": None},
        {"text": None},
        {"text": " "},
    ]
    rows = [row(bid=str(number), **changes) for number, changes in enumerate(wrong, 2)]
    good = row(bid="1", summary=[{"text": None}, {"text": "He goes."}])
    # Two texts with one bid, which here nobody can change.
    books = of_hub([*rows, good, row(bid="9"), row(bid="9", text="Another.")], monkeypatch)
    assert list(books.documents.names) == ["1", "9", "9-2"] and books.summaries[0] == ("He goes.",)
    assert books.documents[2].text == "Another."
    assert capsys.readouterr().err == "some/books, test: 5 of 8 rows lack text or summary and are left out\n"
    with pytest.raises(InputError, match="task.hub_id='some/books': no row of test has bid, text and summary"):
        of_hub(rows, monkeypatch)


def test_all_that_takes_time_says_how_far_it_is(
    infini: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bars: dict[str, list[float]] = {}

    @contextmanager
    def counted(title: str, total: float, *given: Any) -> Iterator[Callable[[float], None]]:
        done: list[float] = []
        yield done.append
        bars[title] = [total, sum(done)]

    for module in ("tasks.text.documents", "tasks.booksum.task", "tasks.booksum.evaluation", "evaluation.result_cache"):
        monkeypatch.setattr(f"infini.{module}.progress_bar", counted)
    words = ["task=booksum", *SUMMARIES, f"task.data_dir={write_books(tmp_path / 'data')}"]
    words.append(f"cache_dir={tmp_path / 'cache'}")
    infini("train", *words)
    infini("eval", *words, "length=64,1K")
    cells = infini.records("eval")[0].series["cells"]
    read = sum(book["tokens_read"] for cell in cells for book in cell["books"])
    # Two books at two lengths, at most six tokens drawn of each.
    expected = {
        "vocabulary of booksum": 2,
        "validating": 3,
        "infini_linear on booksum": read + 4 * 6 * DECODE_COST,
        "comparing summaries": 4,
    }
    assert bars == {title: [total, total] for title, total in expected.items()}
