"""Locked files. The system ends a lock when its process ends, also when that is killed."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import BinaryIO

from infini.errors import BusyError, InputError


def lock_file(
    path: Path, busy: str, shared: bool = False, required: bool = True, named: Path | None = None
) -> BinaryIO:
    """The file, opened for appending and locked for this process until it is closed. Folders are created.

    Args:
        path: The file.
        busy: What is said where another process has the lock.
        shared: Other processes may have it too, if they share it.
        required: Whether a system or a disk without locks is an error. Otherwise the file is returned unlocked there,
            and the user keeps two processes apart.
        named: What messages name instead of the file.

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
        with contextlib.suppress(FileNotFoundError):
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
