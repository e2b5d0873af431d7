"""The line that is printed for an error."""

from __future__ import annotations

import errno
import traceback

from infini.errors import InputError, too_large
from infini.system.process import OUTPUT

UNUSABLE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG)
"""Errors of a disk that is full or not writable, or of an impossible path: the user can fix them."""


def one_line(error: Exception) -> str | None:
    """A message for an error that the user can fix; None for a defect of the program."""
    if isinstance(error, InputError):
        return " ".join(str(error).split())
    if not isinstance(error, OSError):
        return too_large(error)
    if error.filename == OUTPUT:
        return f"{OUTPUT}: {error.strerror}; what was printed is not complete"
    # The user named a folder that the system refuses to create, as below /proc. Any other missing file is a defect.
    refused = traceback.extract_tb(error.__traceback__)[-1].name in ("mkdir", "makedirs")
    if error.errno not in UNUSABLE_DISK and not refused:
        return None
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror}; existing files are unchanged"


def interrupted(error: BaseException) -> bool:
    """Whether an error was raised while Ctrl-C was being handled, as by a library that could not clean up."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, KeyboardInterrupt):
            return True
        cause = cause.__context__
    return False
