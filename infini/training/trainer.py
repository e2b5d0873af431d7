"""A Lightning Trainer in one process that depends on its arguments alone, not on the environment.

By default, Lightning reads missing arguments from PL_TRAINER_<NAME>, and ranks, addresses and the number of processes
from the variables of torchrun, Slurm, LSF and MPI. In a Slurm job, on a signal, it saves a checkpoint in the working
folder and requeues the job; it then loads any such checkpoint into the next training in that folder.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import lightning
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import find_free_network_port
from lightning.pytorch.utilities.rank_zero import rank_zero_only

PREFIX = "PL_TRAINER_"
"""Prefix of the variables that set arguments of Trainer."""
_DEFAULTS = {name: argument.default for name, argument in inspect.signature(lightning.Trainer).parameters.items()}
LAUNCHERS = ("TORCHELASTIC_", "TORCH_DIST_INIT_BARRIER", "STANDALONE_PORT", "MASTER_ADDR", "MASTER_PORT")
"""Prefixes of the variables from which a strategy creates a process group."""


class OneProcess(ClusterEnvironment):
    """One process on one machine, however it was launched. Strategies with several processes need another class."""

    def __init__(self) -> None:
        self._port: int | None = None

    @staticmethod
    def detect() -> bool:
        return True

    @property
    def creates_processes_externally(self) -> bool:
        # There are no others to create.
        return True

    @property
    def main_address(self) -> str:
        return "127.0.0.1"

    @property
    def main_port(self) -> int:
        if self._port is None:
            self._port = find_free_network_port()
        return self._port

    def world_size(self) -> int:
        return 1

    def set_world_size(self, size: int) -> None:
        pass

    def global_rank(self) -> int:
        return 0

    def set_global_rank(self, rank: int) -> None:
        _write_as_rank_zero()

    def local_rank(self) -> int:
        return 0

    def node_rank(self) -> int:
        return 0


def make_trainer(**settings: Any) -> lightning.Trainer:
    """Trainer(**settings), with Lightning's own defaults for all other arguments.

    settings: arguments of Trainer except default_root_dir; plugins without a cluster environment. A checkpoint is
    loaded only if `fit` is given its path.
    """
    # On import Lightning reads the rank from RANK, LOCAL_RANK or SLURM_PROCID; loggers of other ranks write nothing.
    _write_as_rank_zero()
    plugins = [OneProcess(), *settings.pop("plugins", ())]
    # Not a folder, so that no checkpoint is found there.
    return lightning.Trainer(**{**_DEFAULTS, **settings, "plugins": plugins, "default_root_dir": os.devnull})


def _write_as_rank_zero() -> None:
    setattr(rank_zero_only, "rank", 0)  # noqa: B010 - its type does not declare it


def ignored_variables() -> list[str]:
    """Environment variables that would change a Trainer's arguments and are ignored."""
    return sorted(name for name, value in os.environ.items() if name.startswith(PREFIX) and value)


@contextlib.contextmanager
def without_launcher() -> Iterator[None]:
    """Unset the variables of LAUNCHERS inside the block, and restore them after it."""
    before = _remove_launcher()
    try:
        yield
    finally:
        # A strategy may have set an address and a port, which must not affect the next run in this process.
        _remove_launcher()
        os.environ.update(before)


def _remove_launcher() -> dict[str, str]:
    names = [name for name in os.environ if name.startswith(LAUNCHERS)]
    return {name: os.environ.pop(name) for name in names}


@contextlib.contextmanager
def usr1_as_interrupt() -> Iterator[None]:
    """SIGUSR1, with which Slurm announces the end of a job's time, stops a training like Ctrl-C.

    An existing handler, as of a launcher, stays.
    """
    number: signal.Signals | None = getattr(signal, "SIGUSR1", None)
    if number is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    if signal.getsignal(number) is not signal.SIG_DFL:
        yield
        return

    def stop(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    signal.signal(number, stop)
    try:
        yield
    finally:
        signal.signal(number, signal.SIG_DFL)
