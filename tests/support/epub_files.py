"""Small EPUB files."""

from __future__ import annotations

import zipfile
from pathlib import Path

XHTML = "application/xhtml+xml"
CONTAINER = """<?xml version="1.0"?>
<container version="1.0" xmlns="urn:oasis:names:tc:opendocument:xmlns:container">
<rootfiles><rootfile full-path="book.opf" media-type="application/oebps-package+xml"/></rootfiles></container>"""
PACKAGE = """<?xml version="1.0" encoding="utf-8"?>
<package xmlns="http://www.idpf.org/2007/opf" version="2.0" unique-identifier="id">
<metadata xmlns:dc="http://purl.org/dc/elements/1.1/"><dc:title>Made up</dc:title>
<dc:identifier id="id">x</dc:identifier><dc:language>en</dc:language></metadata>
<manifest>{items}</manifest><spine>{spine}</spine></package>"""


def archive_of(path: Path, files: dict[str, str | bytes]) -> Path:
    """A zip archive of these files, deflated."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def package(items: dict[str, str], spine: list[str], container: str = CONTAINER) -> dict[str, str | bytes]:
    """The files of an EPUB besides its pages. items: href -> media type; spine: hrefs."""
    manifest = "".join(f'<item id="i{href}" href="{href}" media-type="{kind}"/>' for href, kind in items.items())
    order = "".join(f'<itemref idref="i{href}"/>' for href in spine)
    made = PACKAGE.format(items=manifest, spine=order)
    return {"mimetype": "application/epub+zip", "META-INF/container.xml": container, "book.opf": made}
