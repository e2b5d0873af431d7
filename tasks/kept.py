"""What an evaluation has measured so far, kept on the disk as it comes: stopped, it goes on from there."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console

from infini.errors import InputError
from infini.records import RunRecord, write_atomically


def kept_path(results_dir: str | Path, task: str, *decides: Any) -> Path:
    """The file for measurements of `task` that `decides`, anything JSON can hold, tells from all others."""
    digest = hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()
    return Path(results_dir) / "unfinished" / f"{task}-{digest[:16]}.jsonl"


class KeptEntries:
    """Entries by name: a line of JSON each, appended and flushed to the disk one by one, with the commit that it is of.

    Entered, the file belongs to this process. Raises InputError when a line is damaged or lacks one of `fields`, or
    when another process has the file.
    """

    def __init__(self, path: Path, fields: Iterable[str], record: RunRecord | None = None) -> None:
        self.path = path
        self.commit = _commit(record)
        self.entries: dict[str, dict[str, Any]] = {}
        needed = {"name", *fields}
        if path.exists():
            for line in path.read_bytes().splitlines(keepends=True):
                # A line that a kill cut short is measured again.
                if not line.endswith(b"\n"):
                    break
                try:
                    entry = json.loads(line)
                    if not needed <= set(entry):
                        raise ValueError("fields are missing")
                    self.entries[entry["name"]] = entry
                except (ValueError, TypeError) as error:
                    raise InputError(f"{path}: damaged ({error}); remove it to start the evaluation again") from error

    def __enter__(self) -> KeptEntries:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "ab")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.close()
            taken = isinstance(error, BlockingIOError)
            why = "another evaluation of this model is writing here; wait for its end"
            raise InputError(f"{self.path}: {why if taken else f'cannot be locked ({error.strerror})'}") from error
        # Only now: a line that another process is writing is no line that a kill cut short.
        content = self.path.read_bytes()
        self._file.truncate(content.rfind(b"\n") + 1)
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def add(self, name: str, entry: dict[str, Any]) -> None:
        """Keep one entry, on the disk when this returns."""
        self.entries[name] = {"name": name, "commit": self.commit, **entry}
        self._file.write(line_of(self.entries[name]))
        self._file.flush()
        os.fsync(self._file.fileno())

    def tell(self, record: RunRecord, names: Iterable[str]) -> None:
        """Say in a record at which commits these entries were measured, where it was not at its own alone.

        No one commit repeats it then: it counts as made with uncommitted changes, and is not published.
        """
        commits = [self.entries[name].get("commit", _UNKNOWN) for name in names]
        found = [commit for index, commit in enumerate(commits) if commit not in commits[:index]]
        if all(commit == self.commit for commit in found):
            return
        found += [] if self.commit in found else [self.commit]
        record.environment |= {"git_revisions": list(dict.fromkeys(commit[0] for commit in found)), "git_dirty": True}
        text = f"{record.run_id} was begun at another commit: no one commit repeats it"
        Console(stderr=True).print(text, style="bold yellow", markup=False, soft_wrap=True)

    def drop(self, names: Iterable[str]) -> None:
        """Forget these entries, which are kept elsewhere by now; what others there are stays."""
        for name in names:
            self.entries.pop(name, None)
        if self.entries:
            write_atomically(self.path, b"".join(map(line_of, self.entries.values())))
        else:
            self.path.unlink(missing_ok=True)


def line_of(entry: dict[str, Any]) -> bytes:
    """An entry as a line of its file."""
    return json.dumps(entry, ensure_ascii=False).encode() + b"\n"


_UNKNOWN = [None, None]
"""Of an entry that does not say at which commit it was measured."""


def _commit(record: RunRecord | None) -> list[Any]:
    """Commit, and whether anything differed from it."""
    environment = {} if record is None else record.environment
    return [environment.get("git_revision"), environment.get("git_dirty")]
