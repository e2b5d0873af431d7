"""A Lightning Trainer of one process whose every setting is given: a run is what its configuration says.

Left to itself, Lightning reads an argument that is not given from PL_TRAINER_<NAME>. It reads ranks, addresses and the
number of processes from the variables of torchrun, Slurm, LSF and MPI. In a Slurm job it saves a checkpoint in the
working folder at a signal, puts the job into the queue again, and loads any such checkpoint of that folder into the
next training there, whichever it is.
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
"""Of the variables that stand for an argument of Trainer."""
_DEFAULTS = {name: argument.default for name, argument in inspect.signature(lightning.Trainer).parameters.items()}
LAUNCHERS = ("TORCHELASTIC_", "TORCH_DIST_INIT_BARRIER", "STANDALONE_PORT", "MASTER_ADDR", "MASTER_PORT")
"""Beginnings of the variables by which a process group is made, where a strategy makes one."""


class OneProcess(ClusterEnvironment):
    """One process on one machine, whatever launched it. A strategy of several processes needs another one of these."""

    def __init__(self) -> None:
        self._port: int | None = None

    @staticmethod
    def detect() -> bool:
        return True

    @property
    def creates_processes_externally(self) -> bool:
        # There are none to create.
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
    """Trainer(**settings), with Lightning's own default for every argument that is not given.

    settings: arguments of Trainer but for default_root_dir, and plugins without a cluster environment. A checkpoint is
    loaded only where `fit` is given its path.
    """
    # Read from RANK, LOCAL_RANK or SLURM_PROCID when Lightning is imported: loggers of another rank write nothing.
    _write_as_rank_zero()
    plugins = [OneProcess(), *settings.pop("plugins", ())]
    # No folder, so that no checkpoint is found there.
    return lightning.Trainer(**{**_DEFAULTS, **settings, "plugins": plugins, "default_root_dir": os.devnull})


def _write_as_rank_zero() -> None:
    setattr(rank_zero_only, "rank", 0)  # noqa: B010 - its type does not say that it has this


def ignored_variables() -> list[str]:
    """Variables of this process that would change a Trainer's arguments, and do not."""
    return sorted(name for name, value in os.environ.items() if name.startswith(PREFIX) and value)


@contextlib.contextmanager
def without_launcher() -> Iterator[None]:
    """None of LAUNCHERS' variables is set inside the block; after it they are what they were before."""
    before = _remove_launcher()
    try:
        yield
    finally:
        # A strategy has set an address and a port, which are not for what runs next in this process.
        _remove_launcher()
        os.environ.update(before)


def _remove_launcher() -> dict[str, str]:
    names = [name for name in os.environ if name.startswith(LAUNCHERS)]
    return {name: os.environ.pop(name) for name in names}


@contextlib.contextmanager
def usr1_as_interrupt() -> Iterator[None]:
    """SIGUSR1, by which Slurm says that a job's time is nearly over, stops a training like Ctrl-C.

    Where there is a handler already, that of another program's launcher, it stays.
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
