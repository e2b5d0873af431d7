"""A Lightning Trainer that depends on its arguments alone, not on the environment.

By default, Lightning reads missing arguments from PL_TRAINER_<NAME>, and ranks, addresses and the number of processes
from the variables of torchrun, Slurm, LSF and MPI. In a Slurm job, on a signal, it saves a checkpoint in the working
folder and requeues the job; it then loads any such checkpoint into the next training in that folder.
"""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Iterator
from typing import Any

import lightning
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from infini.training.ranks import SINGLE_RANK, Ranks

PREFIX = "PL_TRAINER_"
"""Prefix of the variables that set arguments of Trainer."""
_DEFAULTS = {name: argument.default for name, argument in inspect.signature(lightning.Trainer).parameters.items()}
LAUNCHERS = ("TORCHELASTIC_", "TORCH_DIST_INIT_BARRIER", "STANDALONE_PORT", "MASTER_ADDR", "MASTER_PORT")
"""Prefixes of the variables from which a strategy creates a process group."""


class GivenRanks(LightningEnvironment):
    """Processes that have been started, however that was: those of `ranks`."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self.ranks = ranks

    @property
    def creates_processes_externally(self) -> bool:
        return True

    def world_size(self) -> int:
        return self.ranks.size

    def global_rank(self) -> int:
        return self.ranks.rank

    def local_rank(self) -> int:
        return self.ranks.local_rank

    def node_rank(self) -> int:
        return self.ranks.rank // self.ranks.local_size

    def teardown(self) -> None:
        # Lightning's would delete a launcher's WORLD_SIZE.
        pass


def make_trainer(ranks: Ranks = SINGLE_RANK, **settings: Any) -> lightning.Trainer:
    """Trainer(**settings), with Lightning's own defaults for all other arguments.

    settings: arguments of Trainer except default_root_dir; plugins without a cluster environment. A checkpoint is
    loaded only if `fit` is given its path.
    """
    # On import Lightning reads the rank from RANK, LOCAL_RANK or SLURM_PROCID; loggers of other ranks write nothing.
    setattr(rank_zero_only, "rank", ranks.rank)  # noqa: B010 - its type does not declare it
    plugins = [GivenRanks(ranks), *settings.pop("plugins", ())]
    # Not a folder, so that no checkpoint is found there.
    return lightning.Trainer(**{**_DEFAULTS, **settings, "plugins": plugins, "default_root_dir": os.devnull})


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
