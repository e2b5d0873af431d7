"""Files and folders: names as users write them, scratch folders, and locked files."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from infini.errors import BusyError, InputError

LONGEST_NAME = 255
"""Bytes of the name of a file or a folder at most, on all common file systems."""
_TEMP_SUFFIX_BYTES = 14
"""Bytes by which the name of a file's temporary neighbour is longer while it is written."""


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
    sizes = [*(len(os.fsencode(folder)) for folder in folders), len(os.fsencode(name)) + _TEMP_SUFFIX_BYTES]
    if max(sizes) > LONGEST_NAME:
        raise InputError(
            f"{key}={str(path)!r}: a name in it is too long ({LONGEST_NAME - _TEMP_SUFFIX_BYTES} bytes at most)"
        )


def check_place(key: str, path: Path) -> None:
    """Raise InputError where no file can be written at a path, or in it if it is a folder. Folders that do not exist
    would be made. Checked before long work, not after it."""
    folder = path if path.is_dir() else next(place for place in path.absolute().parents if place.exists())
    if not folder.is_dir():
        raise InputError(f"{key}={str(path)!r}: {folder} is not a folder; name another place")
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InputError(f"{key}={str(path)!r}: {folder} is not writable ({error.strerror})") from error


DAY = 24 * 3600
SCRATCH_PREFIX = ".incomplete-"
"""Prefix of the names of scratch folders."""


@contextmanager
def scratch_folder(parent: Path) -> Iterator[Path]:
    """A new folder in `parent`, removed at the end, for files that are moved to `parent` once they are complete.

    It also removes the folders that killed processes left and in which nothing was written for a day.
    """
    for left in parent.glob(f"{SCRATCH_PREFIX}*"):
        with suppress(OSError):
            newest = max(path.stat().st_mtime for path in (left, *left.iterdir()))
            if newest < time.time() - DAY:
                shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=parent, prefix=SCRATCH_PREFIX) as made:
        yield Path(made)


def lock_file(
    path: Path, busy: str, shared: bool = False, required: bool = True, named: Path | None = None
) -> BinaryIO:
    """The file, opened for appending and locked for this process until it is closed. Folders are created.

    Args:
        path: The file.
        busy: The message where another process has the lock.
        shared: Other processes may have it too, if they share it.
        required: Whether a system or a disk without locks is an error. Otherwise the file is returned unlocked there,
            and the user keeps two processes apart.
        named: The file that messages name instead.

    Raises:
        BusyError: another process has the lock.
        InputError: the disk has no locks.
    """
    while True:
        # The process that had it may remove the folder, too.
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            # It stays open as long as the lock is held.
            file = open(path, "a+b")  # noqa: SIM115
        except FileNotFoundError:
            if path.is_symlink():
                raise
            continue
        try:
            import fcntl

            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.close()
            raise BusyError(f"{named or path}: {busy}", path) from error
        except (ImportError, OSError) as error:
            if not required:
                return file
            file.close()
            raise InputError(f"{named or path}: cannot be locked ({getattr(error, 'strerror', error)})") from error
        # The process that had it may have removed or replaced the file after it was opened here.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        file.close()


def is_locked(path: Path) -> bool:
    """Whether other processes have the lock of this file, alone or shared."""
    import fcntl

    try:
        with open(path, "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False
