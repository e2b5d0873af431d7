"""Checkpoints from which a stopped training resumes. Each is named after its content and checked before it is used."""

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
from infini.errors import InputError, too_large
from infini.system.paths import lock_file
from infini.training.checkpoint import sha256_of
from infini.training.ranks import SINGLE_RANK, Ranks

KEPT = 2
"""Checkpoints that are kept: the newest, and the one before it in case the newest is damaged."""
DAMAGED = ".damaged"
"""Suffix of checkpoints that were skipped."""
SECONDS_BETWEEN = 60.0
"""Seconds between two checkpoints where the recipe does not count steps."""
MAX_SECONDS_BETWEEN = 600.0
"""Most seconds between two checkpoints where the recipe counts steps."""
SECONDS_OF_ONE_STOP = 1.0
"""Signals within this many seconds are one request to stop: a launcher and a scheduler may both send one."""
STOPPING = "\nstopping after this step, with a checkpoint; Ctrl-C or a signal again stops at once, without one\n"


class UnfinishedRun:
    """The folder of a training whose record is not written yet.

    A checkpoint is Lightning's, named `step-<step>-<SHA-256 of its bytes>.ckpt`, so that one rename publishes content
    and checksum together. The folder also holds the identity of the run, and a lock that ends with its process.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock: Any = None

    def claim(self, record: records.RunRecord) -> bool:
        """Lock the folder for this process. If a run was started here before, `record` gets its id and start time.

        Returns whether parts of the run were made at another commit or with uncommitted changes: no single commit
        reproduces it then, and `record` lists the commits. Likewise `record` lists the formats of products, bfloat16 or
        float32, if `auto` chose another one on another machine, and the names of machines and numbers of threads, if
        there were several. Raises BusyError when another process holds the lock.
        """
        busy = "another process runs this training; wait until it has ended, or set results_dir or seed"
        self._lock = lock_file(self.folder / "lock", busy, required=False, named=self.folder)
        for partial in self.folder.glob(".*.partial"):
            partial.unlink(missing_ok=True)  # of a killed process
        found = self._read_run()
        if found.get("ended"):
            # The process was killed in `clear`: its record is written, and this is another training.
            for path in self._checkpoints():
                path.unlink(missing_ok=True)
        now = {key: record.environment.get(key) for key in ("git_revision", "git_dirty")}
        known = bool(self._checkpoints()) and {"run_id", "started", "mixed", *now} <= set(found)
        run: dict[str, Any] = {"run_id": record.run_id, "started": record.started, "mixed": False, **now}
        if known:
            run = dict(found)
        record.run_id, record.started = run["run_id"], run["started"]
        revisions = run.setdefault("git_revisions", [run["git_revision"]])
        if {key: run[key] for key in now} != now:
            # Written to disk: the next process may be at the first commit again.
            run |= {"mixed": True, "git_revisions": list(dict.fromkeys([*revisions, now["git_revision"]]))}
        if run["mixed"]:
            record.environment |= {"git_revisions": run["git_revisions"], "git_dirty": True}
        if "bfloat16" in record.environment:
            product = "bfloat16" if record.environment["bfloat16"] else "float32"
            run["products"] = list(dict.fromkeys([*run.get("products", ()), product]))
            if len(run["products"]) > 1:
                record.environment["products"] = run["products"]
        hardware = record.environment.get("hardware") or {}
        name, threads = hardware.get("accelerator") or hardware.get("cpu"), record.environment.get("threads")
        for key, value in (("machines", name), ("thread_counts", threads)):
            if value is not None:
                # An older version kept none: it is not known where the run was before.
                run[key] = list(dict.fromkeys([*run.get(key, ()), value]))
                if len(run[key]) > 1:
                    record.environment[key] = run[key]
        if run != found:
            self._write_run(run)
        return bool(run["mixed"])

    def save(self, step: int, write: Callable[[str], None]) -> Path:
        """Write a checkpoint: `write` is given the path. Once it is verified, only the newest KEPT stay."""
        partial = self.folder / f".step-{step:08d}.partial"
        try:
            write(str(partial))
            digest = sha256_of(partial)
            path = self.folder / f"step-{step:08d}-{digest}.ckpt"
            records.sync_and_rename(partial, path)
        except BaseException as error:
            partial.unlink(missing_ok=True)
            records.name_file(error, self.folder)
            raise
        _sync_folder(self.folder)
        if sha256_of(path) == digest:
            for old in self._checkpoints()[:-KEPT]:
                if old != path:
                    old.unlink(missing_ok=True)
        return path

    def newest(self) -> tuple[Path | None, list[Path]]:
        """The newest checkpoint that is intact, and the damaged ones that are newer.

        Damaged ones are renamed: a checkpoint of a later save with fewer steps would count as older. Raises InputError
        when one cannot be read, and what torch raises when there is no memory for it: neither is damage.
        """
        damaged: list[Path] = []
        for path in reversed(self._checkpoints()):
            if _is_intact(path):
                return path, damaged
            damaged.append(path)
            path.rename(path.with_suffix(DAMAGED))
        return None, damaged

    def newest_step(self) -> int | None:
        """Step of the newest checkpoint, by its name; None where there is none."""
        paths = self._checkpoints()
        return step_of(paths[-1]) if paths else None

    def clear(self) -> None:
        """Remove the folder: the training has its record."""
        # Marked as ended first, in case of a kill between two removals. A full disk does not undo the training.
        with contextlib.suppress(OSError):
            self._write_run({"ended": True})
        made = [path for pattern in ("*.ckpt", f"*{DAMAGED}", ".*.partial") for path in self.folder.glob(pattern)]
        # The lock last, and still held: a process that waits for it must not find its files removed.
        for path in (*made, self.folder / "run.json", self.folder / "lock"):
            path.unlink(missing_ok=True)
        self.release()
        # A folder that also holds files of the user stays.
        with contextlib.suppress(OSError):
            self.folder.rmdir()

    def release(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _read_run(self) -> dict[str, Any]:
        """The content of run.json; empty where it is missing or damaged."""
        try:
            found = json.loads((self.folder / "run.json").read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    def _write_run(self, run: dict[str, Any]) -> None:
        records.write_atomically(self.folder / "run.json", json.dumps(run).encode())

    def _checkpoints(self) -> list[Path]:
        """All checkpoints, oldest step first."""
        found = self.folder.glob("step-*-*.ckpt")
        return sorted(found, key=lambda path: (path.name.split("-")[1], path.stat().st_mtime))


class PlainFiles(TorchCheckpointIO):
    """Writes checkpoints to the given path. Lightning's own class first writes to the system's temporary folder, which
    may be small or on another disk, and where killed processes leave files behind."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        content = io.BytesIO()
        torch.save(checkpoint, content)
        with open(path, "wb") as file:
            file.write(content.getbuffer())


class SaveCheckpoints(Callback):
    """Saves a checkpoint every `every` steps, or about once a minute where it is None, after the last step, and after
    the step in which a signal asks for a stop.

    checkpoint: the one from which the training resumes. ranks: all of them take part, rank 0 writes.
    """

    def __init__(
        self, unfinished: UnfinishedRun, every: int | None, checkpoint: Path | None = None, ranks: Ranks = SINGLE_RANK
    ) -> None:
        self.unfinished, self.every, self.ranks = unfinished, every, ranks
        self.newest_step = None if checkpoint is None else step_of(checkpoint)
        self.started = False
        """Whether the training has started, with everything restored from the checkpoint."""
        self._saved = time.monotonic()
        self._asked: float | None = None
        self.take_signals: Callable[[], None] = lambda: None
        """Called when the training starts: from then on, signals call `ask_to_stop`."""

    @property
    def stopping(self) -> bool:
        """Whether a signal has asked this process or, once the step has ended, another rank to stop."""
        return self._asked is not None

    def ask_to_stop(self) -> None:
        """Stop after the running step, with a checkpoint. Raises KeyboardInterrupt when it is asked once more."""
        now = time.monotonic()
        if self._asked is None:
            self._asked = now
            if self.ranks.rank == 0:
                # Not print: a handler may run inside another print, whose buffer is locked.
                with contextlib.suppress(OSError):
                    os.write(2, STOPPING.encode())
        elif now - self._asked > SECONDS_OF_ONE_STOP:
            raise KeyboardInterrupt

    def on_train_start(self, trainer: lightning.Trainer, module: Any) -> None:
        self._saved = time.monotonic()
        self.started = True
        self.take_signals()

    def on_train_batch_end(
        self, trainer: lightning.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        due = self.every is not None and step % self.every == 0
        # A step takes milliseconds or a minute: a number of steps alone could mean hours.
        longest = SECONDS_BETWEEN if self.every is None else MAX_SECONDS_BETWEEN
        due = due or self.ranks.any(time.monotonic() - self._saved >= longest)
        # A signal may reach one rank alone, and all save together.
        stop = self.ranks.any(self.stopping)
        if due or stop or step == trainer.max_steps:
            if self.ranks.rank == 0:
                self.unfinished.save(step, trainer.save_checkpoint)
            else:
                trainer.save_checkpoint(os.devnull)
            self.newest_step, self._saved = step, time.monotonic()
        if stop:
            self._asked = self._asked or time.monotonic()
            # The first process that ends makes a launcher end the others, which must not be in the middle of saving.
            self.ranks.agreed(None)
            # Instead of an exception, which would skip what other callbacks do after this step.
            trainer.should_stop = True


def describe_checkpoint(step: int | None) -> str:
    """A sentence on the newest checkpoint, saved after `step`, without its full stop."""
    return "There is no checkpoint yet" if step is None else f"The last good checkpoint is of step {step}"


def random_states(device: torch.device) -> dict[str, Any]:
    """The states of all random number generators that a training on `device` uses, as weights_only=True loads them."""
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
    """Restore random_states; a GPU's state goes to `device`, whatever its number was."""
    torch.set_rng_state(states["torch"].cpu())
    kind, keys, position, has_gauss, gauss = states["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, gauss))
    version, internal, gauss_next = states["python"]
    random.setstate((version, tuple(internal), gauss_next))
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"][0].cpu(), device)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.split("-")[1])


def _is_intact(path: Path) -> bool:
    try:
        if path.stem.rpartition("-")[2] != sha256_of(path):
            return False
        return "infini" in torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        again = "the same command tries again, and without this file it resumes from an older one"
        raise InputError(f"{path}: cannot be read ({error.strerror or error}); {again}") from error
    except (EOFError, RuntimeError, ValueError, KeyError, pickle.UnpicklingError) as error:
        if too_large(error):
            raise
        return False


def _sync_folder(folder: Path) -> None:
    """Flush renames in a folder to disk, where the system can."""
    if hasattr(os, "O_DIRECTORY"):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with records.naming(folder):
                os.fsync(handle)
        finally:
            os.close(handle)
