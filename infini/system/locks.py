"""Locked files. The system ends a lock when its process ends, also when that is killed."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import BinaryIO

from infini.errors import BusyError, InputError


def lock_file(path: Path, busy: str, shared: bool = False) -> BinaryIO:
    """The file, opened for appending and locked for this process until it is closed. Folders are created.

    busy: what is said where another process has the lock. shared: other processes may have it too, if they share it.

    Raises:
        BusyError: another process has the lock.
        InputError: the disk has no locks.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        # It stays open as long as the lock is held.
        file = open(path, "a+b")  # noqa: SIM115
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            # The process that had it may have removed or replaced the file meanwhile.
            if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        except FileNotFoundError:
            pass
        except OSError as error:
            file.close()
            if isinstance(error, BlockingIOError):
                raise BusyError(f"{path}: {busy}", path) from error
            raise InputError(f"{path}: cannot be locked ({error.strerror})") from error
        file.close()


def is_locked(path: Path) -> bool:
    """Whether other processes have the lock of this file, alone or shared."""
    try:
        with open(path, "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False
