"""Small folders of books with summaries."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write_books(folder: Path, **changes: Any) -> Path:
    """Three splits of two books; the second has two summaries and its text in a file of its own."""
    data = folder / "booksum"
    data.mkdir(parents=True)
    for split in ("train", "validation", "test"):
        (folder / f"{split}.txt").write_text(" ".join(f"{split} tells of dogs and cats." for _ in range(80)), "utf-8")
        rows: list[dict[str, Any]] = [
            {"bid": 1, "title": "One", "text": "A man goes. A dog runs. " * 60, "summary": [{"text": "A man goes."}]},
            {"bid": "2", "title": "Two", "book": f"{split}.txt", "summary": [{"text": "Dogs."}, {"text": "And cats."}]},
        ]
        rows[0] |= changes
        (data / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return data


def row(**changes: Any) -> dict[str, Any]:
    return {"bid": 1, "title": "One", "text": "A man goes.", "summary": [{"text": "He goes."}], **changes}
