"""Results of an unfinished evaluation, one line of JSON each: a stopped evaluation resumes after the last one."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from infini.errors import InputError
from infini.records import RunRecord, naming, write_atomically
from infini.system.console import plain_console, warn


def cache_path(results_dir: str | Path, task: str, *identity: Any) -> Path:
    """The file of the measurements of `task` with this identity: anything JSON can hold that decides the results."""
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    return Path(results_dir) / "unfinished" / f"{task}-{digest[:16]}.jsonl"


def identity_of_model(record: RunRecord) -> str:
    """Names the model of an evaluation in cache_path: its training, or, of a pretrained model, what it was built as."""
    if record.parent is not None:
        return record.parent
    return f"{record.config_hash} {json.dumps(record.environment.get('base'), sort_keys=True)}"


def name_of_model(record: RunRecord) -> str:
    """The same for people."""
    if record.parent is not None:
        return record.parent
    return f"{record.model} {record.environment['base']['name']} without a training"


class ResultCache:
    """Entries by name, each appended as a line of JSON and flushed to disk, with the commit that measured it.

    As a context manager it locks the file for this process. Raises InputError when a line is damaged or lacks one of
    `fields`, or when another process holds the lock.
    """

    def __init__(self, path: Path, fields: Iterable[str], record: RunRecord | None = None) -> None:
        self.path = path
        environment = {} if record is None else record.environment
        self.commit = [environment.get("git_revision"), environment.get("git_dirty")]
        """Git revision, and whether the tree had uncommitted changes."""
        self.entries: dict[str, dict[str, Any]] = {}
        required = {"name", *fields}
        for line in path.read_bytes().splitlines(keepends=True) if path.exists() else ():
            if not line.endswith(b"\n"):
                break  # a kill cut this line short: it is measured again
            try:
                entry = json.loads(line)
                if not required <= set(entry):
                    raise ValueError("fields are missing")
                self.entries[entry["name"]] = entry
            except (ValueError, TypeError, RecursionError) as error:
                raise InputError(f"{path}: damaged ({error}); remove it to start the evaluation again") from error

    def __enter__(self) -> ResultCache:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "ab")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.close()
            locked = isinstance(error, BlockingIOError)
            reason = "another evaluation of this model is writing it; wait until that has ended"
            raise InputError(f"{self.path}: {reason if locked else f'cannot be locked ({error.strerror})'}") from error
        # Only under the lock: an incomplete last line may be one that another process is writing.
        self._file.truncate(self.path.read_bytes().rfind(b"\n") + 1)
        # Temporary files of a killed process.
        for partial in self.path.parent.glob(f".{self.path.stem}.*.tmp"):
            partial.unlink(missing_ok=True)
        return self

    def __exit__(self, *exception: object) -> None:
        # Closing writes what `add` could not write.
        with naming(self.path):
            self._file.close()

    def add(self, name: str, entry: dict[str, Any]) -> None:
        """Store one entry; it is on disk when this returns."""
        self.entries[name] = {"name": name, "commit": self.commit, **entry}
        with naming(self.path):
            self._file.write(to_line(self.entries[name]))
            self._file.flush()
            os.fsync(self._file.fileno())

    def record_commits(self, record: RunRecord, names: Iterable[str]) -> None:
        """Write the commits of these entries into `record`, unless all of them are the record's own.

        No single commit reproduces such a run, so it counts as made with uncommitted changes and is not published.
        """
        commits = [self.entries[name].get("commit", _UNKNOWN) for name in names]
        if all(commit == self.commit for commit in commits):
            return
        revisions = dict.fromkeys(commit[0] for commit in [*commits, self.commit])
        record.environment |= {"git_revisions": list(revisions), "git_dirty": True}
        warn(plain_console(), f"{record.run_id} was started at another commit: no single commit reproduces it")

    def drop(self, names: Iterable[str]) -> None:
        """Remove these entries, which are in a record now; the other entries stay."""
        for name in names:
            self.entries.pop(name, None)
        if self.entries:
            write_atomically(self.path, b"".join(map(to_line, self.entries.values())))
        else:
            self.path.unlink(missing_ok=True)


def to_line(entry: dict[str, Any]) -> bytes:
    """An entry as a line of JSON."""
    return json.dumps(entry, ensure_ascii=False).encode() + b"\n"


_UNKNOWN = [None, None]
"""Commit of an entry that does not name one."""
