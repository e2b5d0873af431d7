"""The text of an EPUB: its pages in the order of reading, as paragraphs."""

from __future__ import annotations

import html
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from infini.errors import InputError

_BLOCK = re.compile(
    r"address|article|aside|blockquote|body|caption|center|d[dlt]|details|dialog|dir|div|fieldset|figcaption|figure|footer"
    r"|form|h[1-6]|header|hr|html|legend|li|main|menu|nav|[ou]l|p|pre|section|summary|t(able|body|foot|head|r)"
)
"""Elements at whose ends a paragraph ends."""
_SPACES = frozenset(("br", "td", "th"))
"""Elements at whose ends words end."""
_HIDDEN = frozenset(("head", "script", "style", "svg", "template"))
"""Elements whose text is none of the book's."""
_ENTITY = re.compile(r"&(?:#\w+;|(\w+);)?")


def epub_text(path: Path) -> str:
    """The text of an EPUB's pages in the order of reading, a blank line between paragraphs; a page without any is
    passed over.

    Raises InputError when the library for it is not installed, or the file is no EPUB.
    """
    try:
        from ebooklib import ITEM_DOCUMENT, epub
    except ImportError as error:
        raise InputError(f"{str(path)!r}: to read an EPUB, `pip install ebooklib`") from error
    if not path.is_file():
        raise InputError(f"{str(path)!r}: cannot be read (No such file or directory)")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            book = epub.read_epub(str(path), {"ignore_ncx": True})
        pages = [book.get_item_with_id(name) for name, _ in book.spine]
        read = (page for page in pages if page is not None and page.get_type() == ITEM_DOCUMENT)
        # As it lies: what the library makes of a page lacks text that stands in no element.
        return "\n\n".join(paragraph for page in read for paragraph in _paragraphs(page.content or b""))
    except Exception as error:  # every layer below (archive, XML, library) raises its own kinds
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"{str(path)!r}: cannot be read as an EPUB ({reason})") from error


def _paragraphs(page: bytes) -> Iterator[str]:
    """The paragraphs of a page of XHTML, however its elements lie within each other."""
    from lxml import etree

    # A parser of HTML would take what stands behind <title/> for the title.
    parser = etree.XMLParser(encoding="utf-8", recover=True, resolve_entities=False, no_network=True, huge_tree=True)
    text = _ENTITY.sub(_character, _decoded(page))
    root = etree.fromstring(text.encode(), parser) if text.strip() else None
    if root is None:
        return
    parts: list[str] = []
    hidden = 0
    for event, element in etree.iterwalk(root, events=("start", "end", "comment", "pi")):
        name = etree.QName(element).localname.lower() if event in ("start", "end") else ""
        if event == "start":
            hidden += bool(hidden or name in _HIDDEN)
        if _BLOCK.fullmatch(name):
            if paragraph := " ".join("".join(parts).split()):
                yield paragraph
            parts = []
        elif name in _SPACES:
            parts.append(" ")
        if event == "start":
            parts += [] if hidden else [element.text or ""]
            continue
        hidden -= bool(event == "end" and hidden)
        parts += [] if hidden else [element.tail or ""]
    if paragraph := " ".join("".join(parts).split()):
        yield paragraph


def _decoded(page: bytes) -> str:
    declared = re.match(rb"[^<]*<\?xml[^>]*encoding=[\"']([\w.-]+)", page)
    if page[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return page.decode("utf-16", errors="replace")
    try:
        return page.decode(declared[1].decode() if declared else "utf-8-sig", errors="replace").removeprefix("\ufeff")
    except LookupError:
        return page.decode("utf-8-sig", errors="replace")


def _character(entity: Any) -> str:
    """What XML has no name for by itself, as a no-break space; an ampersand that begins no entity by its name."""
    name = entity[1]
    if name in ("amp", "lt", "gt", "quot", "apos") or entity[0].startswith("&#"):
        return str(entity[0])
    meant = html.unescape(entity[0]) if name else "&"
    return html.escape(meant)
