"""The published list of documents is that of the published runs."""

from __future__ import annotations

import csv
import hashlib
from pathlib import Path

import pytest

from infini.records import RunRecord, load_records, published_dir

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "documents.md"
COUNTS = {"pg19": (128, 9, 10), "arxiv_math": (198, 9, 8), "booksum": (52, 7, 8)}
SPLITS = ("train", "validation", "test")


def files_of(task: str, split: str) -> dict[str, str]:
    """File -> SHA-256, in the order of the names."""
    with PAGE.with_suffix(".csv").open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if (row["task"], row["split"]) == (task, split)]
    return {row["file"]: row["sha256"] for row in sorted(rows, key=lambda row: row["file"])}


@pytest.mark.parametrize("task", COUNTS)
def test_the_page_counts_the_documents(task: str) -> None:
    counts = tuple(len(files_of(task, split)) for split in SPLITS)
    assert counts == COUNTS[task]
    assert f"| `{task}` | " + " | ".join(map(str, counts)) + " |" in PAGE.read_text(encoding="utf-8")


def test_books_with_summaries_are_books_of_the_same_split() -> None:
    for split in SPLITS:
        assert set(files_of("booksum", split)) <= set(files_of("pg19", split))


@pytest.fixture(scope="module")
def published() -> list[RunRecord]:
    return load_records(published_dir())


@pytest.mark.parametrize("task", ["pg19", "arxiv_math"])
@pytest.mark.parametrize("split", ["train", "test"])
def test_checksums_of_the_list_are_those_of_the_records(task: str, split: str, published: list[RunRecord]) -> None:
    listed = files_of(task, split)
    lines = "".join(f"{name}\0{digest}\n" for name, digest in listed.items())
    revision = hashlib.sha256(lines.encode()).hexdigest()
    read = (task, split, revision)
    runs = [run for run in published if (run.task, *map(run.data.get, ("split", "revision"))) == read]
    assert len(runs) > 50
    named = {entry["name"] for run in runs for entry in run.documents}
    assert named == ({Path(name).stem for name in listed} if split == "test" else set())
