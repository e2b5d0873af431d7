"""Names of files and folders as users write them: `~` is home, and an impossible name is a missing file."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from infini.errors import InputError

LONGEST_NAME = 255
"""Bytes of the name of a file or a folder at most, on all common file systems."""
_BESIDE = 14
"""What a file's temporary neighbour has more, while it is written."""


def home_expanded(key: str, name: str | Path) -> Path:
    """The path that a name means: `~` or `~user` at its beginning is that user's home folder.

    key: what messages call it. Raises InputError where no such home is known; ./~ is a folder of that very name.
    """
    expanded = os.path.expanduser(name)
    if str(name).startswith("~") and expanded == str(name):
        whose = str(name).partition("/")[0]
        raise InputError(f"{key}={str(name)!r}: the home folder {whose} is not known; write the whole path")
    return Path(expanded)


def is_file(path: str | Path) -> bool:
    """Whether there is a file of this name. False for a text that is too long for a name."""
    with suppress(OSError, ValueError):
        return Path(path).is_file()
    return False


def is_folder(path: str | Path) -> bool:
    """Whether there is a folder of this name; see is_file."""
    with suppress(OSError, ValueError):
        return Path(path).is_dir()
    return False


def check_name(key: str, path: Path) -> None:
    """Raise InputError where a file of this name could not be written because the name is too long. Checked before a
    long run, not after it."""
    *folders, name = path.parts or ("",)
    sizes = [*(len(os.fsencode(folder)) for folder in folders), len(os.fsencode(name)) + _BESIDE]
    if max(sizes) > LONGEST_NAME:
        raise InputError(f"{key}={str(path)!r}: a name in it is too long ({LONGEST_NAME - _BESIDE} bytes at most)")


DAY = 24 * 3600


@contextmanager
def scratch_folder(parent: Path) -> Iterator[Path]:
    """A new folder in `parent`, removed at the end, for a file that is moved to `parent` once it is complete.

    What killed processes left is removed: such folders in which nothing was written for a day.
    """
    prefix = ".incomplete-"
    for left in parent.glob(f"{prefix}*"):
        with suppress(OSError):
            newest = max(path.stat().st_mtime for path in (left, *left.iterdir()))
            if newest < time.time() - DAY:
                shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=parent, prefix=prefix) as made:
        yield Path(made)
