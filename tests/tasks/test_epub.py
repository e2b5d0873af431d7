"""Text of EPUBs: all of it, in order, and no words glued to each other."""

from __future__ import annotations

import random
import zipfile
from pathlib import Path

import pytest
from epub_files import CONTAINER, XHTML, archive_of, package

from infini.errors import InputError
from infini.tasks.text.epub import epub_text

PAGE = """<?xml version="1.0" encoding="utf-8"?>
<!DOCTYPE html PUBLIC "-//W3C//DTD XHTML 1.1//EN" "http://www.w3.org/TR/xhtml11/DTD/xhtml11.dtd">
<html xmlns="http://www.w3.org/1999/xhtml"><head><title/><style>p {{ color: red }}</style></head>
<body>{body}</body></html>"""


def book(folder: Path, *pages: bytes) -> Path:
    """An EPUB of these pages as they are."""
    files: dict[str, str | bytes] = {f"{number}.xhtml": page for number, page in enumerate(pages)}
    names = list(files)
    return archive_of(folder / "book.epub", package(dict.fromkeys(names, XHTML), names) | files)


def page(text: str) -> bytes:
    return PAGE.format(body=f"<p>{text}</p>").encode()


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
        # A soft hyphen, which marks where a word may be broken, is no character of it.
        ("<p>extra\u00adordinary beau&shy;ti&#173;ful</p>", ["extraordinary beautiful"]),
        # The first letter as a picture, and a picture with a description.
        ('<p><img alt="T" src="t.png"/>he king</p><p><img alt="A king" src="k.png"/></p>', ["The king"]),
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


def test_no_depth_of_elements_is_too_deep(tmp_path: Path) -> None:
    """Elements that are never closed lie in each other, by the thousand."""
    words = [f"word{number}" for number in range(6000)]
    for mark in ("<br>", "<i>", "<p>", "<div><span>"):
        text = epub_text(book(tmp_path, PAGE.format(body=mark.join(words)).encode()))
        assert text.split() == (words if mark != "<i>" else ["".join(words)]), mark


@pytest.mark.parametrize(
    "kind",
    [
        "text/html",
        "Text/HTML; charset=utf-8",
        " application/XHTML+xml ",
        "text/x-oeb1-document",
        "application/x-dtbook+xml",
        "application/vnd.of-no-one+xml",
        "text/plain",
        "application/octet-stream",
        "",
    ],
)
def test_a_page_of_any_type_of_text_is_read(tmp_path: Path, kind: str) -> None:
    name = "a.txt" if kind == "text/plain" else "a.html"
    files = {
        name: "Erster.\n Satz.\n\nZweiter." if kind == "text/plain" else PAGE.format(body="<p>Erster. Satz.<p>Zweiter.")
    }
    made = archive_of(
        tmp_path / "book.epub",
        package({name: kind, "b.xhtml": XHTML}, [name, "b.xhtml"]) | files | {"b.xhtml": page("c")},
    )
    assert epub_text(made) == "Erster. Satz.\n\nZweiter.\n\nc"


ENCRYPTION = """<encryption xmlns="urn:oasis:names:tc:opendocument:xmlns:container">
<EncryptedData xmlns="http://www.w3.org/2001/04/xmlenc#"><EncryptionMethod Algorithm="{algorithm}"/>
<CipherData><CipherReference URI="{uri}"/></CipherData></EncryptedData></encryption>"""
AES = "http://www.w3.org/2001/04/xmlenc#aes128-cbc"


@pytest.mark.parametrize(
    "algorithm", [AES, "http://www.w3.org/2001/04/xmlenc#aes256-cbc", "http://itunes.apple.com/dataenc"]
)
@pytest.mark.parametrize("uri", ["chapter 1.xhtml", "chapter%201.xhtml", "/chapter%201.xhtml"])
def test_an_encrypted_book_is_not_read(tmp_path: Path, algorithm: str, uri: str) -> None:
    files = package({"t.xhtml": XHTML, "chapter%201.xhtml": XHTML}, ["t.xhtml", "chapter%201.xhtml"])
    files |= {"t.xhtml": page("Title"), "chapter 1.xhtml": page("looks like text")}
    files["META-INF/encryption.xml"] = ENCRYPTION.format(algorithm=algorithm, uri=uri)
    said = refused(archive_of(tmp_path / "book.epub", files))
    assert said.endswith("1 of 2 pages cannot be read: chapter 1.xhtml is encrypted")


def test_fonts_may_be_obfuscated(tmp_path: Path) -> None:
    files = package({"f.otf": "font/otf", "a.xhtml": XHTML}, ["a.xhtml"]) | {"f.otf": b"\0\1", "a.xhtml": page("text")}
    files["META-INF/encryption.xml"] = ENCRYPTION.format(algorithm="http://www.idpf.org/2008/embedding", uri="f.otf")
    files["META-INF/rights.xml"] = "<rights/>"
    assert epub_text(archive_of(tmp_path / "book.epub", files)) == "text"


def test_bytes_that_are_no_text_are_not_read_as_a_page(tmp_path: Path) -> None:
    noise = random.Random(0).randbytes(400)
    assert "1 of 2 pages cannot be read: 1.xhtml is not text" in refused(book(tmp_path, page("Title"), noise))
    assert "1.xhtml is not text" in refused(book(tmp_path, page("Title"), noise.replace(b"\0", b"")))


def refused(path: Path) -> str:
    """The one line that an EPUB is refused with."""
    with pytest.raises(InputError) as error:
        epub_text(path)
    assert "\n" not in str(error.value) and "book.epub'" in str(error.value)
    return str(error.value)


def test_what_no_page_needs_may_be_missing(tmp_path: Path) -> None:
    items = {"s.css": "text/css", "a.xhtml": XHTML, "i.png": "image/png", "https://example.org/v.mp4": "video/mp4"}
    assert (
        epub_text(archive_of(tmp_path / "book.epub", package(items, ["a.xhtml"]) | {"a.xhtml": page("text")})) == "text"
    )


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ({"b.xhtml": XHTML}, "'ia.xhtml' is not in the manifest"),
        ({"a.xhtml": XHTML}, "a.xhtml is not in the archive"),
        ({"a.xhtml": "application/pdf"}, "a.xhtml is of the media type 'application/pdf', from which no text is read"),
    ],
)
def test_a_page_that_is_missing_is_said(tmp_path: Path, items: dict[str, str], message: str) -> None:
    files = package({**items, "b.xhtml": XHTML}, ["b.xhtml", "a.xhtml"]) | {"b.xhtml": page("text")}
    said = refused(archive_of(tmp_path / "book.epub", files))
    assert said.endswith(f"1 of 2 pages cannot be read: {message}")


def test_many_pages_that_are_missing_are_one_line(tmp_path: Path) -> None:
    names = [f"{number}.xhtml" for number in range(9)]
    assert refused(archive_of(tmp_path / "book.epub", package({}, names))).endswith("; and 6 more")


def test_images_among_the_pages_are_named_and_have_no_text(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    files = package({"c.svg": "image/svg+xml", "a.xhtml": XHTML}, ["c.svg", "a.xhtml"])
    files |= {"c.svg": "<svg><text>cover</text></svg>", "a.xhtml": page("text")}
    path = archive_of(tmp_path / "book.epub", files)
    assert epub_text(path) == "text"
    assert "1 of 2 pages are images or the like, which have no text: c.svg" in capfd.readouterr().err
    files = package({"c.svg": "image/svg+xml"}, ["c.svg"]) | {"c.svg": "<svg/>"}
    assert "all of its pages are images" in refused(archive_of(tmp_path / "book.epub", files))


def test_an_image_with_a_page_in_its_place_is_that_page(tmp_path: Path) -> None:
    items = {
        "c.svg": 'image/svg+xml" fallback="id.pdf',
        "d.pdf": 'application/pdf" fallback="ia.xhtml',
        "a.xhtml": XHTML,
    }
    made = archive_of(tmp_path / "book.epub", package(items, ["c.svg"]) | {"a.xhtml": page("text")})
    assert epub_text(made) == "text"
    items = {"c.svg": 'image/svg+xml" fallback="id.svg', "d.svg": 'image/svg+xml" fallback="ic.svg'}
    assert "all of its pages are images" in refused(archive_of(tmp_path / "book.epub", package(items, ["c.svg"])))


@pytest.mark.parametrize(
    ("href", "name"),
    [
        ("Chapter%201.xhtml", "OEBPS/Chapter 1.xhtml"),
        ("Chapter%201.xhtml", "OEBPS/Chapter%201.xhtml"),
        ("../Text/a.xhtml", "Text/a.xhtml"),
        ("../../../a.xhtml", "a.xhtml"),
        ("/OEBPS/a.xhtml", "OEBPS/a.xhtml"),
        ("./x/../a.xhtml#begin", "OEBPS/a.xhtml"),
        ("a.xhtml", "OEBPS/A.XHTML"),
        ("Text\\a.xhtml", "OEBPS/Text/a.xhtml"),
        ("caf%C3%A9.xhtml", "OEBPS/café.xhtml"),
        ("café.xhtml", "OEBPS/cafe\u0301.xhtml"),
    ],
)
def test_a_page_is_found_by_its_address(tmp_path: Path, href: str, name: str) -> None:
    files = package({href: XHTML}, [href], CONTAINER.replace("book.opf", "OEBPS/book.opf"))
    files = {key.replace("book.opf", "OEBPS/book.opf"): content for key, content in files.items()} | {
        name: page("text")
    }
    assert epub_text(archive_of(tmp_path / "book.epub", files)) == "text"


def test_a_file_beside_the_book_is_none_of_its_pages(tmp_path: Path) -> None:
    (tmp_path / "secret.xhtml").write_bytes(page("secret"))
    for href in ("../secret.xhtml", str(tmp_path / "secret.xhtml"), f"file://{tmp_path}/secret.xhtml"):
        assert "is not in the archive" in refused(archive_of(tmp_path / "book.epub", package({href: XHTML}, [href])))


def test_the_first_package_document_counts(tmp_path: Path) -> None:
    roots = "".join(
        f'<rootfile full-path="{name}" media-type="{kind}"/>'
        for name, kind in (("a.pdf", "application/pdf"), ("book.opf", "application/oebps-package+xml"), ("b.opf", ""))
    )
    files = package({"a.xhtml": XHTML}, ["a.xhtml"], f"<container><rootfiles>{roots}</rootfiles></container>")
    files |= {"a.xhtml": page("text"), "b.opf": "<package/>"}
    assert epub_text(archive_of(tmp_path / "book.epub", files)) == "text"
    del files["b.opf"], files["META-INF/container.xml"], files["mimetype"]
    assert epub_text(archive_of(tmp_path / "book.epub", files)) == "text"


def test_entities_neither_grow_nor_fetch(tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("secret", encoding="utf-8")
    laughs = "".join(f'<!ENTITY l{n} "{f"&l{n - 1};" * 10}">' for n in range(1, 12))
    declared = f'<!ENTITY l0 "ha"><!ENTITY who "Jane &amp; Joe">{laughs}<!ENTITY file SYSTEM "{tmp_path}/secret.txt">'

    def text_of(body: str) -> str:
        head = PAGE[PAGE.index("<html") :].format(body=f"<p>{body}</p>")
        return epub_text(book(tmp_path, f"<!DOCTYPE html [{declared}]>{head}".encode()))

    assert text_of("by &who;&nbsp;&mdash; &l0;") == "by Jane & Joe — ha"
    assert len(text_of("&l11;")) < 10 and text_of("&file;") == "&file;"
    opf = package({"a.xhtml": XHTML}, ["a.xhtml"]) | {"a.xhtml": page("text")}
    opf["book.opf"] = (
        str(opf["book.opf"]).replace("?>", f"?><!DOCTYPE package [{declared}]>").replace("Made up", "&file;&l11;")
    )
    assert "cannot be read as an EPUB (book.opf: " in refused(archive_of(tmp_path / "book.epub", opf))


def test_a_bomb_is_no_book(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infini.tasks.text.epub.MAX_BYTES", 1 << 20)
    assert "hold more than 1 MiB" in refused(book(tmp_path, page("a"), page(" " * (1 << 20))))
    many = "<!DOCTYPE html [<!ENTITY a '" + "a" * 1000 + "'>]><html><body>" + "&a;" * 2000 + "</body></html>"
    assert "0.xhtml: its entities expand to too much text" in refused(book(tmp_path, many.encode()))


@pytest.mark.parametrize(
    ("page", "paragraphs"),
    [
        ("<p>a<![CDATA[ <b> & ]]>c</p>", ["a <b> & c"]),
        ("<p>a<![CDATA[ <b> & ]]>c<br></p>", ["a <b> & c"]),
        ("<p>a<?x b > c?>d</p>", ["ad"]),
        ("<!DOCTYPE html [<!ENTITY x 'y'>]><p>a<br></p>", ["a"]),
        ("<head><title>T</head><body><p>text", ["text"]),
        ("<p>a</p><!-- no end <p>b</p>", ["a", "b"]),
        ('<p>a</p><p class="no end>b</p><p>c</p>', ["a", "b", "c"]),
        # A later quote would end it, and all between them would be the value of an attribute.
        ('<p>a</p><p class="no end>b</p><p>c, "d."</p><p>e</p>', ["a", "b", 'c, "d."', "e"]),
        ('<p title="no end>b</p><p>c</p><p>d "x" e</p>', ["b", "c", 'd "x" e']),
        ("<p><a href='1><sup>1</sup></a></p><p>b <a href='2>2</a>.<br></p>", ["1", "b 2."]),
        ("<p>a <a href='1>1</a> b <a href='2>2</a>.<br></p>", ["a 1 b 2."]),
        ('<p title="1 < 2, a > b">c<img alt="x <i>y</i> z"><br></p>', ["c"]),
        ("<p<b>a</p><p>b<br></p>", ["a", "b"]),
        ("<a href='1>a</a> " * 3000, [" ".join("a" * 3000)]),
        ("<![if !x]><p>a</p><![endif]>", ["a"]),
        ("<P>a<BR>b<I>c</P>", ["a bc"]),
        ("<h:p xmlns:h='http://www.w3.org/1999/xhtml'>a</h:p><h:p xmlns:h='x'>b</h:p>", ["a", "b"]),
        ("<table><tr><td><table><tr><td>a</td><td>b</td></tr></table></td></tr></table>", ["a b"]),
        ("<script>if (a < b) { '<p>no text</p>' }</script><p>a<br>", ["a"]),
        ("<p>3 < 5 & 5 > 3</p>", ["3 < 5 & 5 > 3"]),
        ("text without an element", ["text without an element"]),
    ],
)
def test_a_page_that_is_not_well_formed_is_read_to_its_end(tmp_path: Path, page: str, paragraphs: list[str]) -> None:
    assert epub_text(book(tmp_path, page.encode())) == "\n\n".join(paragraphs)


@pytest.mark.parametrize("name", ["style", "script", "svg"])
def test_a_page_whose_end_is_hidden_is_said(tmp_path: Path, name: str) -> None:
    assert f"0.xhtml: its <{name}> has no end" in refused(book(tmp_path, f"<p>a</p><{name}>b<p>c</p>".encode()))


@pytest.mark.parametrize(
    ("head", "encoding", "text"),
    [
        ('<?xml version="1.0" encoding="windows-1251"?><html>', "cp1251", "Война и мир"),
        ('<html><head><meta charset="shift_jis"/></head>', "cp932", "吾輩は猫である①"),
        (
            '<html><head><meta http-equiv="Content-Type" content="text/html; charset=gb2312"></head>',
            "gb18030",
            "红楼梦镕",
        ),
        ('<?xml version="1.0" encoding="iso-8859-1"?><html>', "cp1252", "“né” où"),
        ('<?xml version="1.0" encoding="utf-16"?><html>', "utf-8", "né où"),
        ('<?xml version="1.0" encoding="none-such"?><html>', "utf-8", "né où"),
        ('<?xml version="1.0" encoding="rot13"?><html>', "utf-8", "né où"),
        ("<html>", "cp1252", "“né” où"),
        ("<html>", "utf-16-le", "né où"),
    ],
)
def test_a_page_is_read_in_the_encoding_it_declares(tmp_path: Path, head: str, encoding: str, text: str) -> None:
    assert epub_text(book(tmp_path, f"{head}<body><p>{text}</p></body></html>".encode(encoding))) == text


def test_a_wrong_byte_in_a_page_is_one_wrong_letter(tmp_path: Path) -> None:
    assert epub_text(book(tmp_path, page("né où, 北京").replace(b", ", b"\xff "))) == "né où\ufffd 北京"


@pytest.mark.parametrize("damage", ["crc", "password", "cut"])
def test_a_damaged_archive_is_one_line(tmp_path: Path, damage: str) -> None:
    path = book(tmp_path, page("one"), page("words " * 50))
    content = bytearray(path.read_bytes())
    if damage == "cut":
        content = content[: len(content) // 2]
    elif damage == "crc":
        at = content.rindex(b"1.xhtml", 0, content.index(b"PK\1\2"))
        content[at + 12] ^= 255
    else:
        at = content.rindex(b"PK\1\2")
        content[at + 8] |= 1
    path.write_bytes(content)
    why = {"crc": "1.xhtml is damaged (", "password": "1.xhtml is encrypted", "cut": "cannot be read as an EPUB ("}
    assert why[damage] in refused(path)


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_damaged_page_is_named_however_it_was_compressed(tmp_path: Path, method: int) -> None:
    path = book(tmp_path, page("one"), page("words " * 50))
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, entry in entries.items():
            archive.writestr(name, entry)
    content = bytearray(path.read_bytes())
    begin = content.index(b"1.xhtml", content.index(b"0.xhtml")) + len("1.xhtml")
    # Behind the header that LZMA has.
    content[begin + 12 : begin + 20] = b"\xff" * 8
    path.write_bytes(content)
    assert "1 of 2 pages cannot be read: 1.xhtml is damaged (" in refused(path)


def test_a_folder_or_a_package_that_is_none_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "book.epub").mkdir()
    assert "cannot be read (Is a directory)" in refused(tmp_path / "book.epub")
    (tmp_path / "book.epub").rmdir()
    files = package({"a.xhtml": XHTML}, ["a.xhtml"]) | {"a.xhtml": page("text")}
    whole = str(files["book.opf"])
    for content in (whole[: whole.index("</spine>")], whole.replace('<itemref idref="ia.xhtml"/>', ""), "no XML", ""):
        assert "cannot be read as an EPUB (" in refused(
            archive_of(tmp_path / "book.epub", {**files, "book.opf": content})
        )
