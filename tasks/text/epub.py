"""The text of an EPUB (2 or 3): the pages of its spine in their order, as paragraphs.

The standard library is enough for it. An EPUB is a zip archive: META-INF/container.xml names the package document; its
manifest names the files, and its spine orders them. Pages are read as events, so that elements may lie within each
other as deep as they like: as XML where they are well-formed, else as HTML. Nothing is fetched or written to the disk.
"""

from __future__ import annotations

import html
import lzma
import posixpath
import re
import sys
import unicodedata
import zipfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import unquote
from xml.parsers import expat

from infini.errors import InputError

MAX_BYTES = 1 << 28
"""Limit of all pages of a book, unpacked, and of their text. A larger book is refused: it may be a zip bomb."""
_MARKUP = re.compile(r".*html.*|.*[/+]xml|text/x-oeb1-document")
"""Media types of pages: XHTML, HTML, DTBook and what came before them."""
_PLAIN = "text/plain"
_BY_SUFFIX = {
    **dict.fromkeys((".xhtml", ".html", ".htm", ".xht", ".xml"), "application/xhtml+xml"),
    **dict.fromkeys((".svg", ".jpg", ".jpeg", ".png", ".gif", ".webp"), "image/*"),
    ".txt": _PLAIN,
}
"""Media types of files whose manifest entry has none."""
_TEXTLESS = ("image/", "audio/", "video/", "font/", "text/css", "application/smil", "application/x-dtbncx")
"""Prefixes of media types that contain no text of the book."""
_CONTAINER, _ENCRYPTION = "META-INF/container.xml", "META-INF/encryption.xml"
_PACKAGE = "application/oebps-package+xml"
_BLOCK = re.compile(
    r"address|article|aside|blockquote|body|caption|center|d[dlt]|details|dialog|dir|div|fieldset|figcaption|figure|footer"
    r"|form|h[1-6]|head|header|hgroup|hr|html|legend|li|main|menu|nav|noscript|[ou]l|opt(ion|group)|p|pre|section|summary"
    r"|t(able|body|foot|head|r)"
    # DTBook's.
    r"|doc(title|author)|byline|bridgehead|epigraph|level[1-6]?|line|linegroup|list|pagenum|poem|prodnote|sidebar"
)
"""Elements at whose beginnings and ends a paragraph ends."""
_SPACES = frozenset(("br", "td", "th"))
"""Elements at which words end."""
_HIDDEN = frozenset(("title", "script", "style", "svg", "template"))
"""Elements whose text is not the book's."""
_SUBSET = re.compile(r"<!DOCTYPE[^<>\[]*\[", re.IGNORECASE)
_SUBSET_END = re.compile(r"\]\s*>")
_SECTION = re.compile(r"<!\[[^<>]*>")
"""Conditional section as Word writes it: <![if !vml]>."""
_DECLARED = re.compile(rb"\s*<\?xml[^>]*?encoding\s*=\s*[\"']([\w.:-]+)")
_META = re.compile(rb"<meta\b[^>]*?charset\s*=\s*[\"']?\s*([\w.:-]+)", re.IGNORECASE)
_LETTERS = re.compile(r"[^\W\d_]{1,2}")
_SOFT_HYPHEN = "\N{SOFT HYPHEN}"
"""Marks a place where a word may be broken at the end of a line."""
_CONTROL = re.compile(r"[\0-\x08\x0e-\x1f]")
_LABELS = {
    **dict.fromkeys(("iso-8859-1", "iso8859-1", "latin-1", "latin1", "us-ascii", "ascii"), "cp1252"),
    **dict.fromkeys(("gb2312", "gbk"), "gb18030"),
    **dict.fromkeys(("shift_jis", "shift-jis", "sjis"), "cp932"),
    **dict.fromkeys(("euc-kr", "ks_c_5601-1987"), "cp949"),
}
"""Names of encodings that in books and browsers stand for a larger one."""
_CHARSET = re.compile(r"charset\s*=\s*[\"']?\s*([\w.:-]+)", re.IGNORECASE)
_DAMAGE = (
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, NotImplementedError, RuntimeError, ValueError),
    # bz2 has no error of its own.
    OSError,
)
"""Exceptions of zipfile for an entry that it cannot unpack."""


def epub_text(path: Path) -> str:
    """The text of an EPUB's pages in the order of reading, a blank line between paragraphs.

    A page without text is passed over; pages that are images are named on standard error. Raises InputError when the
    file is no EPUB, and when a page of its spine is missing, encrypted, damaged or of a type that cannot be read.
    """
    try:
        with open(path, "rb") as file, zipfile.ZipFile(file) as archive:
            return _Book(archive, path).text()
    except InputError:
        raise
    except OSError as error:
        raise InputError(f"{str(path)!r}: cannot be read ({error.strerror or error})") from error
    except (zipfile.BadZipFile, expat.ExpatError, ValueError, NotImplementedError) as error:
        raise InputError(f"{str(path)!r}: cannot be read as an EPUB ({error})") from error


class _PageError(Exception):
    """A file of the book cannot be read; the message says why."""


@dataclass(frozen=True)
class _Item:
    """An entry of the manifest."""

    href: str
    media_type: str
    """The type as the manifest writes it, with its parameters."""
    fallback: str | None


class _Book:
    """An open EPUB."""

    def __init__(self, archive: zipfile.ZipFile, path: Path) -> None:
        self.archive, self.path, self.left = archive, path, MAX_BYTES
        self.files = {_name(info): info for info in archive.infolist() if not info.is_dir()}
        self.alike: dict[str, list[str]] = {}
        for name in self.files:
            self.alike.setdefault(_canonical_name(name), []).append(name)
        # Whatever was done to the files that it lists, obfuscation of fonts included, they are not as they should be.
        self.encrypted: set[str | None] = set()
        if (listing := self._find(_ENCRYPTION)) is not None:
            listed = [given.get("URI", "") for tag, given in self._elements(listing) if tag == "CipherReference"]
            self.encrypted.update(map(self._find, listed))
        self.package = self._find_package()

    def text(self) -> str:
        """All of it; see epub_text."""
        manifest, spine = self._read_package()
        paragraphs: list[str] = []
        missing, textless = [], []
        for idref in spine:
            try:
                page = self._page(idref, manifest)
                if page is None:
                    textless.append(manifest[idref].href)
                else:
                    paragraphs += page
            except _PageError as error:
                missing.append(str(error))
        if missing:
            self._fail(f"{len(missing)} of {len(spine)} pages cannot be read: {_few(missing)}")
        if len(textless) == len(spine):
            self._fail(f"all of its pages are images or the like, which have no text: {_few(textless)}")
        if textless:
            note = f"{len(textless)} of {len(spine)} pages are images or the like, which have no text: {_few(textless)}"
            print(f"{str(self.path)!r}: {note}", file=sys.stderr)
        return "\n\n".join(paragraphs)

    def _fail(self, why: str) -> NoReturn:
        raise InputError(f"{str(self.path)!r}: {why}")

    def _find(self, href: str, base: str = "") -> str | None:
        """The name in the archive of what `href` in a file of the folder `base` means; None where there is none."""
        for written in (href, href.partition("#")[0].partition("?")[0]):
            for name in (written, unquote(written)):
                full = posixpath.normpath(posixpath.join("/", base, name.replace("\\", "/"))).lstrip("/")
                if full in self.files:
                    return full
                if len(alike := self.alike.get(_canonical_name(full), [])) == 1:
                    return alike[0]
        return None

    def _read(self, name: str) -> bytes:
        info = self.files[name]
        if name in self.encrypted or info.flag_bits & 1:
            raise _PageError(f"{name} is encrypted")
        try:
            with self.archive.open(info) as file:
                content = file.read(self.left + 1)
        except _DAMAGE as error:
            raise _PageError(f"{name} is damaged ({error})") from error
        self.left -= len(content)
        if self.left < 0:
            self._fail(f"its pages hold more than {MAX_BYTES >> 20} MiB; is it a book?")
        return content

    def _elements(self, name: str) -> list[tuple[str, dict[str, str]]]:
        """The elements of a file of the container or of the package in their order, names without prefixes."""
        found: list[tuple[str, dict[str, str]]] = []

        def start(tag: str, attributes: dict[str, str]) -> None:
            short = {key.rpartition(":")[2]: value for key, value in attributes.items()}
            found.append((tag.rpartition(":")[2], short))

        try:
            _parse_xml(_decoded(self._read(name)), start, lambda tag: None, lambda text: None)
        except _PageError as error:
            self._fail(str(error))
        except expat.ExpatError as error:
            self._fail(f"cannot be read as an EPUB ({name}: {error})")
        return found

    def _find_package(self) -> str:
        """The name of the package document: the first that the container names and has."""
        named, container = [], self._find(_CONTAINER)
        for tag, attributes in self._elements(container) if container else ():
            if tag == "rootfile" and attributes.get("media-type", _PACKAGE).strip().lower() == _PACKAGE:
                named.append(attributes.get("full-path", ""))
        found = [name for name in map(self._find, named) if name is not None]
        # If no container names it, a single package document is taken.
        found = found or [name for name in self.files if name.lower().endswith(".opf")]
        if not found or (not named and len(found) > 1):
            why = f"no {_CONTAINER}" if container is None else f"{_CONTAINER} names no package document that is there"
            self._fail(f"cannot be read as an EPUB ({why})")
        return found[0]

    def _read_package(self) -> tuple[dict[str, _Item], list[str]]:
        """Manifest by id, and the ids of the spine."""
        manifest: dict[str, _Item] = {}
        spine: list[str] = []
        for tag, given in self._elements(self.package):
            if tag == "item":
                item = _Item(given.get("href", "").strip(), given.get("media-type", ""), given.get("fallback"))
                manifest.setdefault(given.get("id", "").strip(), item)
            elif tag == "itemref":
                spine.append(given.get("idref", "").strip())
        if not spine:
            self._fail(f"cannot be read as an EPUB (the spine in {self.package} is empty)")
        return manifest, spine

    def _page(self, idref: str, manifest: dict[str, _Item]) -> list[str] | None:
        """The paragraphs of an item of the spine, or of what the manifest gives in place of it; None where it has no
        text, as an image. Raises _PageError."""
        if idref not in manifest:
            raise _PageError(f"{idref!r} is not in the manifest")
        item = manifest[idref]
        seen, textless = {idref}, False
        while kind := _kind(item):
            if kind.startswith(_TEXTLESS):
                textless = True
            elif kind == _PLAIN or _MARKUP.fullmatch(kind):
                break
            if item.fallback is None or item.fallback in seen or item.fallback not in manifest:
                if textless:
                    return None
                raise _PageError(f"{manifest[idref].href} is of the media type {kind!r}, from which no text is read")
            seen.add(item.fallback)
            item = manifest[item.fallback]
        name = self._find(item.href, posixpath.dirname(self.package))
        if name is None:
            raise _PageError(f"{item.href} is not in the archive")
        charset = _CHARSET.search(item.media_type)
        text = _decoded(self._read(name), charset and charset[1])
        # A page may be encrypted even if no encryption.xml lists it.
        if "\0" in text or len(_CONTROL.findall(text)) > len(text) / 50:
            raise _PageError(f"{name} is not text; is it encrypted?")
        if kind == _PLAIN:
            text = text.replace("\r\n", "\n").replace(_SOFT_HYPHEN, "")
            return [" ".join(part.split()) for part in re.split(r"\n\s*\n", text) if part.strip()]
        return _paragraphs(text, name)


def _few(names: list[str]) -> str:
    return "; ".join(names[:3]) + (f"; and {len(names) - 3} more" if len(names) > 3 else "")


def _name(info: zipfile.ZipInfo) -> str:
    """The name of an entry, with slashes; UTF-8 is taken for UTF-8 even where the entry does not say that it is."""
    name = info.filename.replace("\\", "/")
    if not info.flag_bits & 0x800 and not name.isascii():
        with suppress(UnicodeError):
            return name.encode("cp437").decode("utf-8")
    return name


def _canonical_name(name: str) -> str:
    """Equal for names that a file system may take for one."""
    return unicodedata.normalize("NFC", name).casefold()


def _kind(item: _Item) -> str:
    """The media type without parameters, in lower case; by the file's name where the manifest does not say it."""
    kind = item.media_type.partition(";")[0].strip().lower()
    if kind in ("", "application/octet-stream"):
        return _BY_SUFFIX.get(posixpath.splitext(item.href.partition("#")[0])[1].lower(), "application/octet-stream")
    return kind


def _decoded(content: bytes, charset: str | None = None) -> str:
    """Bytes as text, by the first of: a byte-order mark, the encoding that the page declares, `charset`, UTF-8."""
    for mark, encoding in ((b"\xef\xbb\xbf", "utf-8"), (b"\xff\xfe", "utf-16-le"), (b"\xfe\xff", "utf-16-be")):
        if content.startswith(mark):
            return content[len(mark) :].decode(encoding, errors="replace")
    for mark, encoding in ((b"<\0", "utf-16-le"), (b"\0<", "utf-16-be")):
        if content.startswith(mark):
            return content.decode(encoding, errors="replace")
    match = _DECLARED.match(content) or _META.search(content[:4096])
    name = (match[1].decode("ascii") if match else charset or "utf-8").lower()
    name = _LABELS.get(name, name)
    # Letters of one byte show that it is not UTF-16, whatever it says; Python's escapes are no encodings of books.
    if not name.startswith(("utf", "ucs", "unicode", "raw")):
        try:
            return content.decode(name, errors="replace")
        except (LookupError, ValueError):
            pass
    text = content.decode("utf-8", errors="replace")
    wrong = text.count("\ufffd")
    # A few bytes are wrong in UTF-8; most are where it is not UTF-8.
    return text if wrong <= len(re.findall(r"[^\0-\x7f\ufffd]", text)) else content.decode("cp1252", errors="replace")


class _OpenQuoteError(Exception):
    """A quote in a tag that has no end in it: it has taken other elements. Arguments: the name of the tag's element and
    the tag as it was read."""


class _Reader(HTMLParser):
    """Takes elements and text as they come, of XML or, as a parser, of HTML, and gives paragraphs."""

    # Versions of Python differ in these.
    CDATA_CONTENT_ELEMENTS = ("script", "style")  # type: ignore[misc]
    RCDATA_CONTENT_ELEMENTS = ()  # type: ignore[misc]

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.paragraphs: list[str] = []
        self.parts: list[str] = []
        self.hidden: list[str] = []
        """Open elements whose text is not the book's."""
        self.left = MAX_BYTES

    def handle_starttag(self, tag: str, attrs: Any = ()) -> None:
        name = tag.rpartition(":")[2].lower()
        # Only HTML can have this; XML has no "<" in a tag.
        whole = self.get_starttag_text() or ""
        if "<" in whole[1:]:
            taken = re.compile(rf"<(/?({_BLOCK.pattern})|/{re.escape(name)})[\s>]", re.IGNORECASE)
            if taken.search(whole, 1):
                raise _OpenQuoteError(name, whole)
        self.open(name, attrs)

    def open(self, name: str, attrs: Any = ()) -> None:
        """An element of this name begins."""
        if name == "body":
            self.hidden.clear()
        if name in _HIDDEN:
            self.hidden.append(name)
        self._break(name)
        # The first letter of a chapter may be a picture.
        if name == "img" and _LETTERS.fullmatch(letters := (dict(attrs).get("alt") or "").strip()):
            self.handle_data(letters)

    def handle_endtag(self, tag: str) -> None:
        name = tag.rpartition(":")[2].lower()
        if name == "head":
            self.hidden.clear()
        if name in self.hidden:
            del self.hidden[len(self.hidden) - 1 - self.hidden[::-1].index(name) :]
        self._break(name)

    def handle_data(self, data: str) -> None:
        if not self.hidden:
            self.parts.append(data)
            self.left -= len(data)
            if self.left < 0:
                raise _PageError("its entities expand to too much text")

    def _break(self, name: str) -> None:
        if _BLOCK.fullmatch(name):
            self.finish()
        elif name in _SPACES:
            self.parts.append(" ")

    def finish(self) -> None:
        """The paragraph ends here."""
        if paragraph := " ".join("".join(self.parts).replace(_SOFT_HYPHEN, "").split()):
            self.paragraphs.append(paragraph)
        self.parts = []


def _paragraphs(text: str, name: str) -> list[str]:
    """The paragraphs of a page. name: of its file. Raises _PageError where the rest of a page cannot be told from what
    is hidden."""
    reader = _Reader()
    try:
        try:
            _parse_xml(text, reader.handle_starttag, reader.handle_endtag, reader.handle_data)
        except expat.ExpatError:
            reader = _html_read(_without_sections(text))
    except _PageError as error:
        raise _PageError(f"{name}: {error}") from error
    if reader.hidden:
        raise _PageError(f"{name}: its <{reader.hidden[0]}> has no end")
    reader.finish()
    return reader.paragraphs


def _html_read(text: str) -> _Reader:
    """The reader of a page that is not well-formed. A comment or a quote in a tag that never ends would take the rest
    of the page, and a quote without an end all up to the next one: they end at the first ">"."""
    reader = _Reader()
    while True:
        reader.reset()
        try:
            reader.feed(text)
            while not reader.hidden and reader.rawdata.startswith("<") and len(reader.rawdata) > 1:
                rest = reader.rawdata.partition(">")[2]
                reader.rawdata = ""
                reader.feed(rest)
            reader.close()
            return reader
        except _OpenQuoteError as error:
            name, tag = error.args
            reader.open(name)
            # The text before the tag has been read.
            text = text[text.find(tag) :].partition(">")[2]


def _parse_xml(
    text: str, start: Callable[[str, dict[str, str]], None], end: Callable[[str], None], data: Callable[[str], None]
) -> None:
    """Call these for the elements and the text of XML. Entities of HTML are known; those that stand for a file are
    refused. Raises expat.ExpatError where it is not well-formed."""
    parser = expat.ParserCreate()
    # This pretends that there is a document type, so that the names of HTML's entities are no errors.
    parser.UseForeignDTD(True)
    parser.buffer_text = True
    parser.StartElementHandler, parser.EndElementHandler, parser.CharacterDataHandler = start, end, data
    parser.SkippedEntityHandler = lambda entity, is_parameter: data(html.unescape(f"&{entity};"))
    parser.ExternalEntityRefHandler = lambda *names: 0
    # The text is decoded already: the encoding that it declares is ignored.
    parser.Parse(text.lstrip().encode("utf-8", errors="replace").decode(), True)


def _without_sections(text: str) -> str:
    """HTML without what only XML has: declarations in the document type, and sections, of which characters stay."""
    if (subset := _SUBSET.search(text)) and (end := _SUBSET_END.search(text, subset.end())):
        text = text[: subset.start()] + text[end.end() :]
    before, *sections = text.split("<![CDATA[")
    parts = [before]
    for section in sections:
        characters, end_mark, after = section.partition("]]>")
        parts.append(html.escape(characters) + after if end_mark else section)
    return _SECTION.sub("", "".join(parts)).replace("<![", "&lt;![")
