"""The files of Arrow in a cache."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from infini.system.progress import plain_console, warn

_END = b"\xff\xff\xff\xff\0\0\0\0"


def open_arrow(path: Path) -> Any:
    """The `datasets.Dataset` in a file, memory-mapped; None where there is no such file, or a damaged one, which is
    printed."""
    from datasets import Dataset

    try:
        with open(path, "rb") as file:
            file.seek(-len(_END), os.SEEK_END)
            # A file that is cut between two documents would open with fewer of them.
            if file.read() == _END:
                return Dataset.from_file(str(path))
    except FileNotFoundError:
        return None
    except Exception:  # every layer below raises its own kinds
        pass
    warn(plain_console(), f"{path}: is damaged, and is made again")
    return None
