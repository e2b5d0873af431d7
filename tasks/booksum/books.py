"""Whole books with human summaries, from a folder of JSON lines, the hub, or a synthetic corpus."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infini.config.compose import cache_folder, data_folder
from infini.config.data_files import BOOK_LAYOUT, book_file, no_data
from infini.config.schema import Config
from infini.errors import InputError, lone_surrogate
from infini.system.paths import is_file
from infini.tasks.text.documents import SPLITS, SYNTHETIC, Documents, read_text, synthetic_documents

NAME = "booksum"
HUB_CONFIG = "books"
"""The configuration of the hub's data set with whole books."""
_OPENING = re.compile(r"[^\n]*?[.!?](?=\s)")


@dataclass(frozen=True)
class BookSplit:
    """The books of one split and their summaries."""

    documents: Documents
    """The texts; names are the books' numbers (`bid`)."""
    summaries: Sequence[tuple[str, ...]]
    """Each book's summaries, at least one."""
    revision: str
    """Content hash of texts and summaries."""


def open_books(cfg: Config, split: str) -> BookSplit:
    """load_books for the task of a configuration."""
    return load_books(split, cfg.task.data_dir, cfg.task.hub_id, cache_folder(cfg), cfg.scale.hub_train_documents)


def load_books(
    split: str, data_dir: str | Path | None, hub_id: str, cache_dir: Path | None = None, limit: int | None = None
) -> BookSplit:
    """The books of `split`, from the first of: `data_dir`, $INFINI_DATA_DIR/booksum, the hub's `hub_id`.

    `data_dir` "synthetic" selects synthetic books, whose summaries are some of their sentences. The first `limit` books
    of the hub's train split are used (None: all). Raises InputError (one line) when a folder or a field is missing, or
    when neither folder nor hub can be read.
    """
    if split not in SPLITS:
        raise InputError(f"split={split!r}: one of {', '.join(SPLITS)}")
    if data_dir == SYNTHETIC:
        return _synthetic(split)
    if (found := data_folder(NAME, data_dir)) is not None:
        return _of_folder(split, *found)
    return _of_hub(split, hub_id, limit if split == "train" else None, cache_dir)


def _of_folder(split: str, data_dir: Path, setting: str) -> BookSplit:
    path = book_file(data_dir, split, setting)
    rows, numbers = [], []
    # splitlines would also split at other line ends of Unicode, which JSON strings may contain.
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            rows.append(json.loads(line))
            numbers.append(number)
            _check(rows[-1])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise InputError(f"{path}, line {number}: not a book ({error}); the layout is {BOOK_LAYOUT}") from error
    if not rows:
        raise InputError(f"{path} holds no book; the layout is {BOOK_LAYOUT}")

    def text_of(index: int) -> str:
        row = rows[index]
        if row.get("text") is not None:
            return str(row["text"])
        # The parent of `.` is `.`.
        file = Path(os.path.abspath(data_dir)).parent / row["book"]
        if not is_file(file):
            where = f"{path}, line {numbers[index]}"
            raise InputError(f"{where}: the file of book {row['bid']}, {file}, does not exist")
        return read_text(file)

    return _split(split, "folder", rows, text_of, lambda index: f"{path}, line {numbers[index]}")


def _check(row: Any) -> None:
    """Raises ValueError, KeyError or TypeError for a row that is not a book with a summary."""
    if not isinstance(row, Mapping):
        raise ValueError("not a JSON object")
    for key in ("text", "book"):
        if not isinstance(row.get(key), str | None):
            raise ValueError(f"{key} must be a string")
    if row.get("text") is None and row.get("book") is None:
        raise ValueError("neither text nor book")
    texts = [summary["text"] for summary in row["summary"]]
    if not texts or not all(isinstance(text, str) and text.strip() for text in texts):
        raise ValueError("no summary, or an empty one")
    if row["bid"] is None or row["title"] is None:
        raise ValueError("no bid, or no title")
    for key, text in (
        *((key, row.get(key)) for key in ("text", "book", "bid", "title")),
        *(("summary", t) for t in texts),
    ):
        if (letter := lone_surrogate(str(text))) is not None:
            raise ValueError(f"{key} contains {letter}, a lone surrogate: not valid text")


def _of_hub(split: str, hub_id: str, limit: int | None, cache_dir: Path | None) -> BookSplit:
    import datasets

    from infini.tasks.text.hub import caches_only, reachable

    try:
        with nullcontext() if reachable() else caches_only():
            # 187 books, so that the whole data set goes into the cache of `datasets`.
            found = datasets.load_dataset(
                hub_id, HUB_CONFIG, split=split, cache_dir=None if cache_dir is None else str(cache_dir / "hub")
            )
            rows = [dict(row) for row in (found if limit is None else found.select(range(min(limit, len(found)))))]
    except Exception as error:  # every layer below (network, hub, parser) raises its own kinds
        raise no_data(NAME, BOOK_LAYOUT, hub_id, error) from error
    usable = [
        row | {"summary": _summaries(row)}
        for row in rows
        if row.get("bid") is not None and str(row.get("text") or "").strip() and _summaries(row)
    ]
    if not usable:
        raise InputError(f"task.hub_id={hub_id!r}: no row of {split} has bid, text and summary")
    if left := len(rows) - len(usable):
        print(f"{hub_id}, {split}: {left} of {len(rows)} rows lack text or summary and are left out", file=sys.stderr)
    return _split(split, "hub", usable, lambda index: str(usable[index]["text"]), lambda index: hub_id)


def _summaries(row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The summaries of a row of the hub that are not empty."""
    given = (summary for summary in row.get("summary") or () if isinstance(summary, Mapping))
    return [summary for summary in given if str(summary.get("text") or "").strip()]


def _synthetic(split: str) -> BookSplit:
    """Synthetic books; a summary is the first sentence of every eighth paragraph."""
    made = synthetic_documents(split)
    rows = []
    for document in made:
        openings = [_OPENING.match(paragraph) for paragraph in document.text.split("\n\n")[::8]]
        summary = " ".join(match.group() for match in openings if match)
        rows.append({"bid": document.name, "title": document.name, "summary": [{"text": summary}]})
    return _split(split, SYNTHETIC, rows, made.read, lambda index: SYNTHETIC)


def _split(
    split: str, source: str, rows: Sequence[Mapping[str, Any]], read: Callable[[int], str], where: Callable[[int], str]
) -> BookSplit:
    """The books of these rows. Rows with the same bid and text are one book with all their summaries.

    where: the name of a row in messages. Raises InputError for two texts with the same bid; those of the hub, which the
    user cannot change, get a number.
    """
    books: dict[str, tuple[int, str, list[str]]] = {}
    for index, row in enumerate(rows):
        name, digest = str(row["bid"]), hashlib.sha256(read(index).encode()).hexdigest()
        if name in books and books[name][1] != digest:
            if source != "hub":
                raise InputError(f"{where(index)}: two books have the bid {name}; give each its own")
            name = f"{name}-{index}"
        summaries = books.setdefault(name, (index, digest, []))[2]
        for summary in row["summary"]:
            if (text := str(summary["text"])) not in summaries:
                summaries.append(text)
    texts, all_of_it = hashlib.sha256(), hashlib.sha256()
    for name, (_, digest, summaries) in books.items():
        texts.update(f"{name}\0{digest}\n".encode())
        all_of_it.update(json.dumps([name, digest, summaries]).encode())
    places = [index for index, _, _ in books.values()]
    corpus = SYNTHETIC if source == SYNTHETIC else NAME
    documents = Documents(corpus, split, source, texts.hexdigest(), list(books), lambda number: read(places[number]))
    return BookSplit(documents, [tuple(texts) for _, _, texts in books.values()], all_of_it.hexdigest())
