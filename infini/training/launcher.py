"""The number of training processes, from the configuration and from the environment variables of torchrun, which
rank 0 also sets for the processes that it starts. It does not import torch, so that an impossible split is refused at
once."""

from __future__ import annotations

import os

from infini.config.schema import Config, ParallelConfig
from infini.errors import InputError, require

PLACE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
"""Variables that say which process this is."""
LAUNCHED = "TORCHELASTIC_RUN_ID"
"""Variable that says that torchrun, or rank 0, started this process."""


def place_of(parallel: ParallelConfig, by_launcher: bool) -> tuple[int, int, int | None, int | None]:
    """Rank, rank on this node, number of processes, and number on each node; None: as many as there are GPUs.

    by_launcher: whether torchrun may have started this process; false for a training that another command runs. Raises
    InputError for numbers that do not go together.
    """
    numbers = (("devices", parallel.devices), ("nodes", parallel.nodes))
    if parallel.name == "single":
        for key, value in (*numbers, ("sequence", parallel.sequence)):
            allowed = "parallel=single takes one; add parallel=ddp or parallel=fsdp2"
            require(value in (None, 1), f"parallel.{key}", value, allowed)
        return 0, 0, 1, 1
    require(parallel.strategy == "auto", "parallel.strategy", parallel.strategy, f"parallel={parallel.name} takes auto")
    if by_launcher and LAUNCHED in os.environ:
        rank, local_rank, size, local_size = (_number(name) for name in PLACE)
        for (key, value), there in zip(numbers, (local_size, size // local_size), strict=True):
            allowed = f"torchrun started {there}; set this number, or leave the key out"
            require(value in (None, there), f"parallel.{key}", value, allowed)
        return rank, local_rank, size, local_size
    allowed = "several nodes need torchrun on each; see docs/how-to/many_devices.md"
    require(parallel.nodes in (None, 1), "parallel.nodes", parallel.nodes, allowed)
    return 0, 0, parallel.devices, parallel.devices


def check_shares(cfg: Config, size: int) -> None:
    """Raises InputError where `size` processes cannot share the rows of a step equally, or a sequence."""
    accumulate, sequence, recipe = cfg.parallel.accumulate, cfg.parallel.sequence, cfg.recipe
    allowed = f"must divide the number of devices, {size}"
    require(size % sequence == 0, "parallel.sequence", sequence, allowed)
    devices = f"devices, {size}," if sequence == 1 else f"devices, {size}, / parallel.sequence={sequence}"
    pieces = size // sequence * accumulate
    below = recipe.batch_size // pieces * pieces
    near = f"{below} or {below + pieces}" if below else f"{pieces}"
    allowed = f"must be a multiple of {pieces}: {devices} x parallel.accumulate={accumulate}; try {near}"
    require(recipe.batch_size % pieces == 0, "recipe.batch_size", recipe.batch_size, allowed)
    if sequence == 1:
        return
    allowed = f"each device needs a segment of recipe.segments_per_sequence={recipe.segments_per_sequence}"
    require(sequence <= recipe.segments_per_sequence, "parallel.sequence", sequence, allowed)
    for name in ("checkpoint_segments", "curriculum", "length_extension", "long_history", "sparse_writes"):
        if (value := getattr(recipe, name)) is not None:
            raise InputError(f"recipe.{name}={value}: must be null with parallel.sequence={sequence}")


def _number(name: str) -> int:
    try:
        return int(os.environ[name])
    except (KeyError, ValueError) as error:
        raise InputError(f"{name}={os.environ.get(name)!r}: torchrun sets this environment variable") from error
