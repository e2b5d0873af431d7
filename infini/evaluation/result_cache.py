"""Results of an unfinished evaluation, one line of JSON each: a stopped evaluation resumes after the last one.

Parts of an evaluation may be jobs of their own (part=2/4). Each writes a file of its own, so that they run at once. The
whole evaluation takes the results of all files, and runs alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from infini.errors import BusyError, InputError
from infini.records import RunRecord, naming, write_atomically
from infini.system.devices import autocast
from infini.system.paths import lock_file
from infini.system.progress import Advance, plain_console, progress_bar, warn

T = TypeVar("T")
BUSY = "another evaluation of this model is writing it; wait until that has ended"


class PartDone(Exception):  # noqa: N818 - nothing failed
    """An evaluation of one part is done: its results are in the cache, and there is nothing to record yet."""


def cache_path(results_dir: str | Path, task: str, *identity: Any) -> Path:
    """The file of the measurements of `task` with this identity: anything JSON can hold that decides the results."""
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    return Path(results_dir) / "unfinished" / f"{task}-{digest[:16]}.jsonl"


def identity_of_reader(record: RunRecord) -> tuple[str, bool]:
    """Names what reads in an evaluation for cache_path: the model, and the format in which its products are computed.

    The model is its training, or, of a pretrained model, what it was built as. parallel.precision=auto takes bfloat16
    on some machines and float32 on others; results of both are not mixed.
    """
    built = record.parent or f"{record.config_hash} {json.dumps(record.environment.get('base'), sort_keys=True)}"
    return built, record.environment["bfloat16"]


def name_of_model(record: RunRecord) -> str:
    """The model in messages: the run id of its training, or the name of a base without one."""
    if record.parent is not None:
        return record.parent
    base = record.environment["base"]
    return f"{record.model} {base['name']}" + (" without a training" if base["memory"] == "untrained" else "")


class ResultCache:
    """Entries by name, each appended as a line of JSON and flushed to disk, with the commit that measured it.

    part: number and count of the part that this process evaluates; None: the whole evaluation.
    As a context manager it locks its file for this process; the whole evaluation locks out all parts, too. Raises
    InputError when a line is damaged or lacks one of `fields`, and BusyError when another process holds the lock.
    """

    def __init__(
        self, path: Path, fields: Iterable[str], record: RunRecord | None = None, part: tuple[int, int] | None = None
    ) -> None:
        self.path, self.part = path, part
        self._parts = f"{path.stem}.*of*{path.suffix}"
        """Pattern of the files of all parts."""
        self._own = path if part is None else path.with_name(f"{path.stem}.{part[0]}of{part[1]}{path.suffix}")
        self._required = {"name", *fields}
        self._file: BinaryIO | None = None
        self._locks = contextlib.ExitStack()
        environment = {} if record is None else record.environment
        self.commit = [environment.get("git_revision"), environment.get("git_dirty")]
        """Git revision, and whether the tree had uncommitted changes."""
        hardware = environment.get("hardware", {})
        self.machine = hardware.get("accelerator") or hardware.get("cpu")
        self.entries = self._read()

    @contextlib.contextmanager
    def measuring(self, title: str, total: float, precision: str, device: Any) -> Iterator[Advance]:
        """Inside, the file is locked and products have the format of parallel.precision. Gives what advances a progress
        bar over `total` tokens."""
        bar = progress_bar(title, total, plain_console().is_terminal)
        with self, bar as advance, autocast(precision, device):
            yield advance

    def _read(self) -> dict[str, dict[str, Any]]:
        entries: dict[str, dict[str, Any]] = {}
        for path in (self.path, *sorted(self.path.parent.glob(self._parts))):
            try:
                lines = path.read_bytes().splitlines(keepends=True)
            except FileNotFoundError:
                # None yet, or the whole evaluation has just ended in another process.
                continue
            for line in lines:
                if not line.endswith(b"\n"):
                    break  # a kill cut this line short: it is measured again
                try:
                    entry = json.loads(line)
                    if not self._required <= set(entry):
                        raise ValueError("fields are missing")
                    entries[entry["name"]] = entry
                except (ValueError, TypeError, RecursionError) as error:
                    raise InputError(f"{path}: damaged ({error}); remove it to start the evaluation again") from error
        return entries

    def __enter__(self) -> ResultCache:
        with contextlib.ExitStack() as locks:
            self._file = locks.enter_context(lock_file(self.path, BUSY, shared=self.part is not None))
            if self.part is not None:
                self._file = locks.enter_context(lock_file(self._own, BUSY))
            # Only under the lock: an incomplete last line may be one that another process is writing.
            self._file.truncate(self._own.read_bytes().rfind(b"\n") + 1)
            # Of this file and of saved states.
            for left in self._own.parent.glob(f".{self._own.stem}.*.tmp"):
                left.unlink(missing_ok=True)
            self._locks = locks.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        # Closing writes what `add` could not write.
        with naming(self._own):
            self._locks.close()

    def share(self, units: Sequence[T]) -> list[T]:
        """Those of `units` that this part evaluates, one of every `count`; the whole evaluation takes all."""
        first, step = self.part or (1, 1)
        return list(units[first - 1 :: step])

    def end_part(self, names: Collection[str]) -> None:
        """Raises PartDone in a part. names: all results of the whole evaluation."""
        if self.part is None:
            return
        self._remove_states(self._own)
        found = len(self._read().keys() & set(names))
        raise PartDone(
            f"part={self.part[0]}/{self.part[1]}: done; {found:,} of {len(names):,} results are in the cache. The same "
            "command without part measures what is missing and writes the record"
        )

    def state_path(self, name: str) -> Path:
        """The file of a state of an unfinished reading; `drop` and the end of a part remove it."""
        return self._own.with_name(f"{self._own.stem}.{name}.state")

    def add(self, name: str, entry: dict[str, Any]) -> None:
        """Store one entry; it is on disk when this returns."""
        assert self._file is not None
        self.entries[name] = {"name": name, "commit": self.commit, "machine": self.machine, **entry}
        with naming(self._own):
            self._file.write(to_line(self.entries[name]))
            self._file.flush()
            os.fsync(self._file.fileno())

    def record_commits(self, record: RunRecord, names: Iterable[str]) -> None:
        """Write the commits and machines of these entries into `record`, unless all of them are the record's own.

        No single commit reproduces such a run, so it counts as made with uncommitted changes and is not published.
        """
        entries = [self.entries[name] for name in names]
        machines = list(dict.fromkeys(entry.get("machine", self.machine) for entry in entries))
        if machines not in ([], [self.machine]):
            record.environment["machines"] = machines
        commits = [entry.get("commit", [None, None]) for entry in entries]
        if all(commit == self.commit for commit in commits):
            return
        revisions = dict.fromkeys(commit[0] for commit in [*commits, self.commit])
        record.environment |= {"git_revisions": list(revisions), "git_dirty": True}
        warn(plain_console(), f"{record.run_id} was started at another commit: no single commit reproduces it")

    def hand_over(self, record: RunRecord, names: Sequence[str]) -> tuple[dict[str, bytes], Callable[[], None]]:
        """The file of these entries that belongs beside the record, by suffix, and a function that drops them once it
        is on disk. It also calls record_commits."""
        self.record_commits(record, names)
        return {".jsonl": b"".join(to_line(self.entries[name]) for name in names)}, lambda: self.drop(names)

    def drop(self, names: Iterable[str]) -> None:
        """Remove these entries, which are in a record now; the other entries stay. Where another evaluation has begun
        to add to them, all stay."""
        held = self._file is not None and not self._file.closed
        with contextlib.suppress(BusyError), contextlib.nullcontext() if held else lock_file(self.path, BUSY):
            self.entries = self._read()
            for name in names:
                self.entries.pop(name, None)
            if self.entries:
                write_atomically(self.path, b"".join(map(to_line, self.entries.values())))
            else:
                self.path.unlink(missing_ok=True)
            for path in self.path.parent.glob(self._parts):
                path.unlink(missing_ok=True)
            # Those of parts, too.
            self._remove_states(self.path)

    @staticmethod
    def _remove_states(path: Path) -> None:
        for state in path.parent.glob(f"{path.stem}.*.state"):
            state.unlink(missing_ok=True)


def to_line(entry: dict[str, Any]) -> bytes:
    """An entry as a line of JSON."""
    return json.dumps(entry, ensure_ascii=False).encode() + b"\n"
