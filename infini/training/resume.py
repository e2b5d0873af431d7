"""Points from which a training that was stopped goes on: written aside, named after their content, then proven."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.io import TorchCheckpointIO

from infini import records
from infini.errors import InputError
from infini.training.checkpoint import sha256_of

KEPT = 2
"""Points that stay: the newest, and the one before it in case the newest is damaged."""
DAMAGED = ".damaged"
"""Suffix of points that were passed over."""
SECONDS_BETWEEN = 60.0
"""Between two points, where the recipe does not count steps."""


class UnfinishedRun:
    """The folder of a training that has not written its record yet.

    A point is a Lightning checkpoint named `step-<step>-<SHA-256 of its bytes>.ckpt`, so that one rename puts content
    and checksum in place together. Beside them: which run it is, and a lock that a killed process gives back.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock: Any = None

    def claim(self, record: records.RunRecord) -> bool:
        """Take the folder for this process. A run that was begun here before lends its id and start to `record`.

        Returns whether it was begun before at another commit, or with changes to it: no one commit repeats it then, and
        the record names those that it was made at.
        Raises InputError when another process is at it.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(self.folder / "lock")
        for partial in self.folder.glob(".*.partial"):
            # Of a process that was killed.
            partial.unlink(missing_ok=True)
        path = self.folder / "run.json"
        begun = self._begun()
        if begun.get("ended"):
            # Killed while it removed the rest: the record is there, and this is another training.
            for point in self._points():
                point.unlink(missing_ok=True)
        # Without a point there is nothing to go on from.
        if not self._points():
            begun = {}
        now = {key: record.environment.get(key) for key in ("git_revision", "git_dirty")}
        if not {"run_id", "started", "mixed", *now} <= set(begun):
            begun = {"run_id": record.run_id, "started": record.started, "mixed": False, **now}
            records.write_atomically(path, json.dumps(begun).encode())
        record.run_id, record.started = begun["run_id"], begun["started"]
        revisions = begun.setdefault("git_revisions", [begun["git_revision"]])
        if {key: begun[key] for key in now} != now and not (begun["mixed"] and now["git_revision"] in revisions):
            # Kept, for the next sitting may be at the first one's commit again.
            begun["mixed"] = True
            begun["git_revisions"] = list(dict.fromkeys([*revisions, now["git_revision"]]))
            records.write_atomically(path, json.dumps(begun).encode())
        if begun["mixed"]:
            record.environment |= {"git_revisions": begun["git_revisions"], "git_dirty": True}
        return bool(begun["mixed"])

    def save(self, step: int, write: Callable[[str], None]) -> Path:
        """Make a point: `write` puts it into the file it is given. Points but the newest two go once it is proven."""
        partial = self.folder / f".step-{step:08d}.partial"
        try:
            write(str(partial))
            digest = sha256_of(partial)
            with open(partial, "rb+") as file:
                os.fsync(file.fileno())
            path = self.folder / f"step-{step:08d}-{digest}.ckpt"
            os.replace(partial, path)
        except BaseException as error:
            partial.unlink(missing_ok=True)
            records.name_file(error, self.folder)
            raise
        _sync_folder(self.folder)
        if sha256_of(path) == digest:
            for old in self._points()[:-KEPT]:
                if old != path:
                    old.unlink(missing_ok=True)
        return path

    def newest(self) -> tuple[Path | None, list[Path]]:
        """The newest point whose content is what its name says and can be read; and those passed over on the way, which
        get another name: a point of fewer steps would else count as the older one."""
        damaged: list[Path] = []
        for path in reversed(self._points()):
            if _whole(path):
                return path, damaged
            damaged.append(path)
            path.rename(path.with_suffix(DAMAGED))
        return None, damaged

    def newest_step(self) -> int | None:
        """Step of the newest point, by its name; None where there is none."""
        points = self._points()
        return _step_of(points[-1]) if points else None

    def clear(self) -> None:
        """Remove the folder: the training has its record."""
        # Said first, for whoever is killed between two of the files; a disk that is full does not undo the training.
        with contextlib.suppress(OSError):
            records.write_atomically(self.folder / "run.json", json.dumps({"ended": True}).encode())
        self.release()
        made = [path for pattern in ("*.ckpt", f"*{DAMAGED}", ".*.partial") for path in self.folder.glob(pattern)]
        for path in (*made, self.folder / "run.json", self.folder / "lock"):
            path.unlink(missing_ok=True)
        # Unless something of the user's lies there too.
        with contextlib.suppress(OSError):
            self.folder.rmdir()

    def release(self) -> None:
        """Give the folder back."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _begun(self) -> dict[str, Any]:
        """What run.json says; nothing where there is none, or none that can be read."""
        try:
            found = json.loads((self.folder / "run.json").read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    def _points(self) -> list[Path]:
        """All points, oldest step first."""
        found = self.folder.glob("step-*-*.ckpt")
        return sorted(found, key=lambda path: (path.name.split("-")[1], path.stat().st_mtime))


class PlainFiles(TorchCheckpointIO):
    """Checkpoints written to the path that is given. Lightning's own writer goes by the system's folder for temporary
    files, which may be small, or another disk, and where a killed process leaves them."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        content = io.BytesIO()
        torch.save(checkpoint, content)
        with open(path, "wb") as file:
            file.write(content.getbuffer())


class SavePoints(Callback):
    """Makes a point every so many steps, or about once a minute, and one after the last step.

    point: what the training goes on from, if it does.
    """

    def __init__(self, unfinished: UnfinishedRun, every: int | None, point: Path | None = None) -> None:
        self.unfinished, self.every = unfinished, every
        self.newest_step = None if point is None else _step_of(point)
        """Step of the newest point."""
        self.begun = False
        """Whether everything that a point holds was put back."""
        self._saved = time.monotonic()

    def newest(self) -> str:
        """A sentence on the newest point, without its full stop, for who stops a training."""
        return newest_point(self.newest_step)

    def where_to_go_on(self) -> str:
        """The same, and what starting again does."""
        return (
            f"{self.newest()}: the same command {'starts again' if self.newest_step is None else 'goes on from there'}"
        )

    def on_train_start(self, trainer: lightning.Trainer, module: Any) -> None:
        self._saved = time.monotonic()
        self.begun = True

    def on_train_batch_end(
        self, trainer: lightning.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        due = step % self.every == 0 if self.every else time.monotonic() - self._saved >= SECONDS_BETWEEN
        if due or step == trainer.max_steps:
            self.unfinished.save(step, trainer.save_checkpoint)
            self.newest_step, self._saved = step, time.monotonic()


def newest_point(step: int | None) -> str:
    """A sentence on the newest point, that of a step, without its full stop."""
    return "No checkpoint was due yet" if step is None else f"The last good checkpoint is of step {step}"


def random_states(device: torch.device) -> dict[str, Any]:
    """The state of every random number generator that a training on `device` draws from, as weights_only=True reads
    it."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, internal, gauss_next = random.getstate()
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": [kind, [int(key) for key in keys], int(position), int(has_gauss), float(gauss)],
        "python": [version, list(internal), gauss_next],
    }
    if device.type == "cuda":
        states["cuda"] = [torch.cuda.get_rng_state(device)]
    return states


def set_random_states(states: dict[str, Any], device: torch.device) -> None:
    """Put back what random_states gave; on a GPU the state of that GPU, whichever number it has here."""
    torch.set_rng_state(states["torch"].cpu())
    kind, keys, position, has_gauss, gauss = states["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, gauss))
    version, internal, gauss_next = states["python"]
    random.setstate((version, tuple(internal), gauss_next))
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"][0].cpu(), device)


def _lock(path: Path) -> Any:
    file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - it stays open as long as the lock is held
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise InputError(
            f"{path.parent}: another process is at this very training; let it end, or set results_dir or seed"
        ) from error
    except (ImportError, OSError):
        # A system or a disk without file locks: two processes of one configuration are the user's to keep apart.
        pass
    return file


def _step_of(point: Path) -> int:
    return int(point.name.split("-")[1])


def _whole(path: Path) -> bool:
    try:
        if path.stem.rpartition("-")[2] != sha256_of(path):
            return False
        return "infini" in torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, EOFError, RuntimeError, ValueError, KeyError, pickle.UnpicklingError):
        # A bad disk, a foreign or a hostile file: it is no point of ours.
        return False


def _sync_folder(folder: Path) -> None:
    """Make a rename in it last through a power cut, where the system can."""
    if hasattr(os, "O_DIRECTORY"):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with records.naming(folder):
                os.fsync(handle)
        finally:
            os.close(handle)
