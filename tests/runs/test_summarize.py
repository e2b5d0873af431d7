"""`infini summarize`: a book of the user's own, text or EPUB, and what it says when there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
from books import write_books
from command_runner import Runner
from epub_files import XHTML, archive_of, package
from tiny_runs import SUMMARIES

BOOK = "The dog ran to the sea.\n\nIt came back with a fish; nobody knew whose."


@pytest.fixture
def summarizer(infini: Runner, tmp_path: Path) -> Runner:
    """A Runner with a trained model."""
    infini("train", "task=booksum", *SUMMARIES, f"task.data_dir={write_books(tmp_path / 'data')}")
    return infini


def write_epub(path: Path, chapters: list[str]) -> Path:
    """An EPUB that is read in another order than it is stored in."""
    pages = {f"{number}.xhtml": f"<html><body>{body}</body></html>" for number, body in enumerate(chapters)}
    return archive_of(path, {**package(dict.fromkeys(pages, XHTML), list(pages)[::-1]), **pages})


def test_a_book_is_summed_up_to_the_terminal_or_a_file(summarizer: Runner, tmp_path: Path) -> None:
    book = tmp_path / "my book.txt"
    book.write_text(BOOK, "utf-8")
    said = summarizer("summarize", str(book), "decoding.max_new_tokens=6")
    assert "tokens read by" in summarizer.err
    target = tmp_path / "out" / "summary=1.txt"
    assert summarizer("summarize", str(book), "decoding.max_new_tokens=6", f"output={target}") == ""
    assert target.read_text("utf-8").strip() == said.strip()
    assert str(target) in summarizer.err.replace("\n", "")
    for folder in ("out", "none"):
        output = f"output={tmp_path}/{folder}/../my book.txt"
        summarizer("summarize", str(book), "decoding.max_new_tokens=6", output, code=2)
        assert "is the book itself" in summarizer.err and book.read_text("utf-8") == BOOK
    other = summarizer("summarize", str(book), "decoding.max_new_tokens=6", "seed=2")
    assert other != said, "the seed decides what is drawn"


def test_an_epub_is_its_chapters_in_the_order_of_reading(tmp_path: Path) -> None:
    from infini.runs.summarize import epub_text

    pages = ["<h1>Two</h1><p>Last <em>words</em>.</p>", "<h1>One</h1><ul><li><p>First.</p></li></ul><p>é</p>"]
    text = epub_text(write_epub(tmp_path / "book.epub", pages))
    assert text == "One\n\nFirst.\n\né\n\nTwo\n\nLast words."


def test_an_epub_and_its_text_have_one_summary(summarizer: Runner, tmp_path: Path) -> None:
    paragraphs = BOOK.split("\n\n")
    epub = write_epub(tmp_path / "book.epub", ["".join(f"<p>{paragraph}</p>" for paragraph in paragraphs)])
    (tmp_path / "book.txt").write_text(BOOK, "utf-8")
    assert summarizer("summarize", str(epub)) == summarizer("summarize", str(tmp_path / "book.txt"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.txt", None, "cannot be read (No such file or directory)"),
        ("none.epub", None, "cannot be read (No such file or directory)"),
        ("empty.txt", b"", "is empty"),
        ("blank.txt", b" \n\n", "is empty"),
        ("zero.txt", b"abc\0", "is not text (byte 3 is zero)"),
        ("bad.txt", b"abc\xff\xfe", "is not UTF-8 text (byte 3)"),
        ("bad.epub", b"PK no archive", "cannot be read as an EPUB"),
    ],
)
def test_a_book_that_is_none_is_one_line(
    summarizer: Runner, tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    summarizer("summarize", str(tmp_path / name), f"output={tmp_path / 'summary'}", code=2)
    assert message in summarizer.err and summarizer.err.count("\n") == 1 and name in summarizer.err
    assert not (tmp_path / "summary").exists()


def test_a_book_shorter_than_a_segment_and_one_with_a_mark_are_read(summarizer: Runner, tmp_path: Path) -> None:
    said = []
    for name, content in (("plain.txt", b"Hi."), ("marked.txt", b"\xef\xbb\xbfHi.")):
        (tmp_path / name).write_bytes(content)
        said.append(summarizer("summarize", str(tmp_path / name), "decoding.max_new_tokens=6"))
    assert said[0] == said[1]


def test_an_epub_without_text_is_one_line(infini: Runner, tmp_path: Path) -> None:
    infini("summarize", str(write_epub(tmp_path / "book.epub", ["<p> </p>"])), code=2)
    assert "book.epub': is empty" in infini.err


def test_one_book_is_asked_for(infini: Runner, tmp_path: Path) -> None:
    for words in ((), ("a.txt", "b.txt")):
        infini("summarize", *words, code=2)
        assert "give one book" in infini.err and "''" not in infini.err
    infini("summarize", str(tmp_path / "a.txt"), code=2)
    assert "cannot be read" in infini.err


def test_a_book_whose_name_has_a_mark_of_equality_is_read(
    summarizer: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a=1").mkdir()
    for name in ("E=mc2.txt", "a=1/book.txt", "seed=7"):
        (tmp_path / name).write_text(BOOK, "utf-8")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.txt").write_text(BOOK, "utf-8")
    said = summarizer("summarize", "book.txt", "decoding.max_new_tokens=3")
    for word in ("E=mc2.txt", "./E=mc2.txt", str(tmp_path / "E=mc2.txt"), "a=1/book.txt", "./seed=7"):
        assert summarizer("summarize", word, "decoding.max_new_tokens=3") == said
    # A key is a key, whatever files there are, and what is neither is none.
    assert "no book: give one book" in summarizer.error("summarize", "seed=7")
    assert "E='none.txt': no such key" in summarizer.error("summarize", "E=none.txt")
    assert "cannot be read (No such file or directory)" in summarizer.error("summarize", "./E=none.txt")
    assert "give one book" in summarizer.error("summarize", "E=mc2.txt", "book.txt")
