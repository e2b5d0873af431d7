"""What is read of an EPUB: all of its text, in order, and no words glued to each other."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from infini.epub import epub_text
from infini.errors import InputError

pytest.importorskip("ebooklib")

CONTAINER = """<?xml version="1.0"?>
<container version="1.0" xmlns="urn:oasis:names:tc:opendocument:xmlns:container">
<rootfiles><rootfile full-path="book.opf" media-type="application/oebps-package+xml"/></rootfiles></container>"""
PACKAGE = """<?xml version="1.0" encoding="utf-8"?>
<package xmlns="http://www.idpf.org/2007/opf" version="2.0" unique-identifier="id">
<metadata xmlns:dc="http://purl.org/dc/elements/1.1/"><dc:title>Made up</dc:title>
<dc:identifier id="id">x</dc:identifier><dc:language>en</dc:language></metadata>
<manifest>{items}</manifest><spine>{spine}</spine></package>"""
PAGE = """<?xml version="1.0" encoding="utf-8"?>
<!DOCTYPE html PUBLIC "-//W3C//DTD XHTML 1.1//EN" "http://www.w3.org/TR/xhtml11/DTD/xhtml11.dtd">
<html xmlns="http://www.w3.org/1999/xhtml"><head><title/><style>p {{ color: red }}</style></head>
<body>{body}</body></html>"""


def book(folder: Path, *pages: bytes) -> Path:
    """An EPUB of these pages as they are."""
    names = [f"{number}.xhtml" for number in range(len(pages))]
    items = "".join(f'<item id="i{name}" href="{name}" media-type="application/xhtml+xml"/>' for name in names)
    spine = "".join(f'<itemref idref="i{name}"/>' for name in names)
    with zipfile.ZipFile(folder / "book.epub", "w") as archive:
        archive.writestr("mimetype", "application/epub+zip")
        archive.writestr("META-INF/container.xml", CONTAINER)
        archive.writestr("book.opf", PACKAGE.format(items=items, spine=spine))
        for name, page in zip(names, pages, strict=True):
            archive.writestr(name, page)
    return folder / "book.epub"


@pytest.mark.parametrize(
    ("body", "paragraphs"),
    [
        ("<div>In a div.</div>text of the body<p>p</p>", ["In a div.", "text of the body", "p"]),
        ("<pre>Verse one,\n  verse two.</pre>", ["Verse one, verse two."]),
        ("<table><tr><td>left</td><td>right</td></tr><tr><td>below</td></tr></table>", ["left right", "below"]),
        ("<p>One line,<br/>the next.</p>", ["One line, the next."]),
        ("<li>own <p>inner</p> tail</li>", ["own", "inner", "tail"]),
        ("<div><div><section>deep<span>er</span></section></div></div>", ["deeper"]),
        ("<p>in <em>one</em>wo<b>rd</b>s</p>", ["in onewords"]),
        ("<p>a<!-- no text -->b<?none?>c</p>", ["abc"]),
        ("<script>no text</script><p>text</p><style>none</style>", ["text"]),
        ("<p>caf&eacute;&nbsp;&amp;&#160;&mdash; &lt;tag&gt; AT&T</p>", ["café & — <tag> AT&T"]),
        ("<p>not closed<p>and so on", ["not closed", "and so on"]),
        ("<svg><title>no text</title></svg><p>text</p>", ["text"]),
    ],
)
def test_all_of_a_pages_text_is_read(tmp_path: Path, body: str, paragraphs: list[str]) -> None:
    text = epub_text(book(tmp_path, PAGE.format(body=body).encode()))
    assert text == "\n\n".join(paragraphs)


def test_a_page_without_text_is_passed_over(tmp_path: Path) -> None:
    pages = [PAGE.format(body=f"<p>{word}</p>").encode() for word in ("one", "two")]
    assert epub_text(book(tmp_path, pages[0], b"", b" \n", PAGE.format(body="").encode(), pages[1])) == "one\n\ntwo"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "latin-1"])
def test_a_page_is_read_in_its_own_encoding(tmp_path: Path, encoding: str) -> None:
    name = "utf-8" if encoding == "utf-8-sig" else encoding
    page = PAGE.format(body="<p>né où</p>").replace('"utf-8"', f'"{name}"').encode(encoding)
    assert epub_text(book(tmp_path, page)) == "né où"


def test_a_book_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "book.epub"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("mimetype", "application/epub+zip")
    with pytest.raises(InputError, match=r"book\.epub': cannot be read as an EPUB \(") as error:
        epub_text(path)
    assert "\n" not in str(error.value)
