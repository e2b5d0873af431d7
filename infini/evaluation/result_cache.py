"""What an evaluation has measured so far, kept on the disk as it comes: stopped, it goes on from there."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.console import Console

from infini.errors import InputError
from infini.nn.tensor_file import read_tensors, write_tensors
from infini.records import RunRecord, naming, write_atomically

Tensors = dict[str, torch.Tensor]


class Points(Protocol):
    """Where a reading is put down between two calls of the model, to be gone on with by another process."""

    def found(self) -> Tensors | None:
        """What was put down last, if anything was."""

    def due(self) -> bool:
        """Whether it is time, asked after every call of the model."""

    def put(self, tensors: Tensors) -> None:
        """Put this down in place of what was there."""


def cache_path(results_dir: str | Path, task: str, *decides: Any) -> Path:
    """The file for measurements of `task` that `decides`, anything JSON can hold, tells from all others."""
    digest = hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()
    return Path(results_dir) / "unfinished" / f"{task}-{digest[:16]}.jsonl"


class ResultCache:
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
                except (ValueError, TypeError, RecursionError) as error:
                    raise InputError(f"{path}: damaged ({error}); remove it to start the evaluation again") from error

    @property
    def begun(self) -> bool:
        """Whether an evaluation that was stopped left anything, an entry or a point on the way to one."""
        return bool(self.entries) or self.point_path.exists()

    @property
    def point_path(self) -> Path:
        return self.path.with_suffix(".safetensors")

    def __enter__(self) -> ResultCache:
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
        # What a killed process had begun to write.
        for left in self.path.parent.glob(f".{self.path.stem}.*.tmp"):
            left.unlink(missing_ok=True)
        return self

    def __exit__(self, *exception: object) -> None:
        # What add could not write is tried once more.
        with naming(self.path):
            self._file.close()

    def add(self, name: str, entry: dict[str, Any]) -> None:
        """Keep one entry, on the disk when this returns."""
        self.entries[name] = {"name": name, "commit": self.commit, **entry}
        with naming(self.path):
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


class EvalCheckpoint:
    """How far the reading for what is not measured yet has come, in a file beside that of `kept`. name: what is read.

    A point is due POINT_SECONDS after the last, later where writing one takes so long that more than WRITE_SHARE of the
    time would go into it. What another commit put down is not gone on with: an entry is of one commit.
    """

    def __init__(self, kept: ResultCache, name: str) -> None:
        self.path = kept.point_path
        self.about = {"name": name, "commit": json.dumps(kept.commit)}
        self.before = 0.0
        self.started = self.last = time.perf_counter()
        self.pause = POINT_SECONDS

    @property
    def seconds(self) -> float:
        """Spent on what has been read, by whichever process; what a kill threw away is not in it."""
        return self.before + time.perf_counter() - self.started

    def found(self) -> dict[str, torch.Tensor] | None:
        """The point's tensors; None where there is none of this entry, or none to go on from, which is said."""
        if not self.path.exists():
            return None
        try:
            tensors, about = read_tensors(self.path)
            seconds = float(about.pop("seconds"))
            if about["name"] != self.about["name"]:
                return None
            if about != self.about:
                raise ValueError("of another commit")
        except (ValueError, KeyError) as error:
            text = f"{self.path}: {error}; it is read from its start again"
            Console(stderr=True).print(text, style="bold yellow", markup=False, soft_wrap=True)
            return None
        self.before = seconds
        return tensors

    def due(self) -> bool:
        return time.perf_counter() - self.last >= self.pause

    def put(self, tensors: dict[str, torch.Tensor]) -> None:
        begun = time.perf_counter()
        write_tensors(self.path, tensors, {**self.about, "seconds": repr(self.seconds)})
        self.last = time.perf_counter()
        self.pause = max(POINT_SECONDS, (self.last - begun) / WRITE_SHARE)

    def drop(self) -> None:
        self.path.unlink(missing_ok=True)


POINT_SECONDS = 20.0
WRITE_SHARE = 0.05


def line_of(entry: dict[str, Any]) -> bytes:
    """An entry as a line of its file."""
    return json.dumps(entry, ensure_ascii=False).encode() + b"\n"


_UNKNOWN = [None, None]
"""Of an entry that does not say at which commit it was measured."""


def _commit(record: RunRecord | None) -> list[Any]:
    """Commit, and whether anything differed from it."""
    environment = {} if record is None else record.environment
    return [environment.get("git_revision"), environment.get("git_dirty")]
