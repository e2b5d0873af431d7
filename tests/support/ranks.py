"""Processes of a torch.distributed group on the CPU, and what each of them compares with one process."""

from __future__ import annotations

import contextlib
import datetime
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing


def run_ranks(work: Callable[[], None], *worlds: int) -> None:
    """Run work() in gloo groups of so many processes, one group after the other. An error of a process is raised here,
    with its traceback.

    The processes are started once, as many as the largest group has: that takes most of the time.
    """
    with tempfile.TemporaryDirectory(prefix="infini-ranks-") as folder:
        torch.multiprocessing.spawn(_start, (worlds, Path(folder), work), nprocs=max(worlds))


def _start(rank: int, worlds: Sequence[int], folder: Path, work: Callable[[], None]) -> None:
    torch.set_num_threads(1)
    for n_ranks in worlds:
        if rank >= n_ranks:
            continue
        _join(rank, n_ranks, folder / f"{n_ranks}")
        try:
            work()
        except Exception:
            # The parent may raise another rank's lost connection instead.
            print(f"Rank {rank} of {n_ranks}:", file=sys.stderr)
            traceback.print_exc()
            raise
        dist.barrier()
        dist.destroy_process_group()


def _join(rank: int, n_ranks: int, store: str | Path) -> None:
    patience = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", f"file://{store}", patience, n_ranks, rank)


@contextlib.contextmanager
def group_of_one(folder: Path) -> Iterator[None]:
    """This process is the only rank of a gloo group, which meets in this folder."""
    _join(0, 1, folder / "store")
    try:
        yield
    finally:
        dist.destroy_process_group()


def own(x_BT: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """This rank's columns of a sequence, of which each rank reads so many."""
    return x_BT.split(list(lengths), 1)[dist.get_rank()]


def summed_gradients(module: Any) -> dict[str, torch.Tensor]:
    """The gradients of all parameters, summed over ranks; 0 where a parameter has none."""
    found = {}
    for name, parameter in module.named_parameters():
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        dist.all_reduce(grad)
        found[name] = grad
    return found


@contextlib.contextmanager
def messages() -> Iterator[dict[str, list[int]]]:
    """Bytes of each message this process sends to another rank, and of each gather and broadcast it takes part in."""
    sent: dict[str, list[int]] = {"states": [], "clocks": [], "broadcasts": []}

    def recorded(kind: str, function: Callable[..., Any], place: int) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            sent[kind].append(args[place].numel() * args[place].element_size())
            return function(*args, **kwargs)

        return call

    def batch(operations: list[Any]) -> Any:
        sends = [each.tensor for each in operations if each.op is dist.isend]
        sent["states"] += [tensor.numel() * tensor.element_size() for tensor in sends]
        return exchange(operations)

    exchange, gather, broadcast = dist.batch_isend_irecv, dist.all_gather, dist.broadcast
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "batch_isend_irecv", batch)
        patch.setattr(dist, "all_gather", recorded("clocks", gather, 1))
        patch.setattr(dist, "broadcast", recorded("broadcasts", broadcast, 0))
        yield sent
