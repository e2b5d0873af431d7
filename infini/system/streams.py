"""Standard streams that stop no work: closed, without a reader, on a full disk, or in an encoding without our marks."""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import Any

_LOOKALIKES = {
    "\N{EM DASH}": "-",
    "\N{EN DASH}": "-",
    "\N{MINUS SIGN}": "-",
    "\N{PLUS-MINUS SIGN}": "+/-",
    "\N{MULTIPLICATION SIGN}": "x",
    "\N{DAGGER}": "+",
    "\N{HORIZONTAL ELLIPSIS}": "...",
    "\N{BOX DRAWINGS HEAVY HORIZONTAL}": "-",
    "\N{BOX DRAWINGS HEAVY LEFT}": "-",
    "\N{BOX DRAWINGS HEAVY RIGHT}": "-",
    "\N{BOX DRAWINGS LIGHT HORIZONTAL}": "-",
    "\N{LEFT SINGLE QUOTATION MARK}": "'",
    "\N{RIGHT SINGLE QUOTATION MARK}": "'",
    "\N{LEFT DOUBLE QUOTATION MARK}": '"',
    "\N{RIGHT DOUBLE QUOTATION MARK}": '"',
}
"""Mark -> what stands for it where a stream's encoding does not have it."""
_ERRORS = "infini.lookalikes"


def _lookalike(error: UnicodeError) -> tuple[str, int]:
    """An error handler of codecs: a lookalike of a mark; of any other character the escape, which loses nothing."""
    assert isinstance(error, UnicodeEncodeError)
    letters = error.object[error.start : error.end]
    escaped = (letter.encode("ascii", "backslashreplace").decode() for letter in letters)
    return "".join(_LOOKALIKES.get(a, b) for a, b in zip(letters, escaped, strict=True)), error.end


codecs.register_error(_ERRORS, _lookalike)


def in_encoding(text: str, encoding: str) -> str:
    """`text` as a stream of this encoding shows it."""
    return text.encode(encoding, _ERRORS).decode(encoding)


OUTPUT = "standard output"
"""What errors of standard output name as their file."""


class _PatientFile(io.FileIO):
    """A descriptor whose writer goes on without a reader or a disk: what is written after that is dropped."""

    def __init__(self, descriptor: int, patient: bool) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self.patient = patient
        self.lost: OSError | None = None

    def write(self, content: Any) -> int:
        try:
            return super().write(content)
        except OSError as error:
            self.lost = error
            # Python and other packages write to this descriptor again, at the end at the latest.
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self.fileno())
            if self.patient:
                return len(content)
            error.filename = OUTPUT
            raise


class Streams:
    """What became of standard output; see robust_streams."""

    def __init__(self, out: _PatientFile | None) -> None:
        self._out = out

    def finish(self) -> None:
        """Write what is left. Raises OSError where standard output was lost otherwise than by its reader going."""
        sys.stdout.flush()
        lost = self._out.lost if self._out is not None else None
        if lost is not None and not isinstance(lost, BrokenPipeError):
            lost.filename = OUTPUT
            raise lost


@contextlib.contextmanager
def robust_streams(patient: bool) -> Iterator[Streams]:
    """Standard streams that are safe to use in here.

    A closed one reads as empty and takes whatever is written; characters that an encoding does not have become
    lookalikes or escapes. Writing to standard error never fails. patient: nor does writing to standard output while the
    work goes on; Streams.finish says what was lost. Otherwise it raises OSError with OUTPUT as its file.

    Streams that are not the process's own, as those of a notebook, stay as they are.
    """
    for descriptor in (0, 1, 2):
        _open_where_closed(descriptor)
    before = sys.stdin, sys.stdout, sys.stderr
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - it lives as long as the command
    out = _replace("stdout", 1, patient)
    _replace("stderr", 2, True)
    try:
        yield Streams(out)
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        with contextlib.suppress(OSError):
            sys.stderr.flush()
        sys.stdin, sys.stdout, sys.stderr = before


def _open_where_closed(descriptor: int) -> None:
    """A file that is opened later would get this number, and what is printed would be written into it."""
    try:
        os.fstat(descriptor)
    except OSError:
        # The lowest number that is free is this one.
        os.open(os.devnull, os.O_RDONLY if descriptor == 0 else os.O_WRONLY)


def _replace(name: str, descriptor: int, patient: bool) -> _PatientFile | None:
    """Put a patient file below sys.<name> and return it; None where the stream is not the process's own."""
    old = getattr(sys, name)
    if old is not getattr(sys, f"__{name}__") or not isinstance(old, io.TextIOWrapper | None):
        return None
    if old is not None:
        with contextlib.suppress(OSError):
            old.flush()
    file = _PatientFile(descriptor, patient)
    stream = io.TextIOWrapper(
        io.BufferedWriter(file),
        encoding=old.encoding if old is not None else "utf-8",
        errors=_ERRORS,
        line_buffering=old.line_buffering if old is not None else False,
        write_through=old.write_through if old is not None else False,
    )
    setattr(sys, name, stream)
    return file
