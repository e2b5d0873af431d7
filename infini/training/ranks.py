"""The processes (ranks) of a training on several devices: which one this is, how the others start, what they exchange.

Rank 0 prints, logs and writes; the others compute. A batch is made whole by every rank, which then takes its own rows:
all numbers of ranks see the same tokens at a step.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.lightning import find_free_network_port

from infini.config.schema import ParallelConfig
from infini.errors import InputError, require
from infini.nn.state import join_rows
from infini.records import SOURCE_ROOT
from infini.system.process import children_ignore_sigterm
from infini.training.launcher import LAUNCHED, PLACE, place_of

CONNECTION_ERRORS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Socket closed",
    "recvValue failed",
    "Timed out",
)
"""Messages of torch.distributed when another process has ended, or does not answer."""
LONGEST_PREPARATION = timedelta(days=1)
"""Time that ranks wait for rank 0 to prepare the data. torch.distributed's own limits are 30 minutes with gloo and 10
with NCCL; a tokenizer that is trained on many books takes longer."""
PR_SET_PDEATHSIG = 1
"""Option of Linux's prctl for the signal that this process gets when its parent ends."""
STARTED_BY = "INFINI_STARTED_BY"
"""Environment variable with the process number of the rank 0 that started this process."""
SECONDS_TO_END = 10.0
"""Seconds that rank 0 waits for the others to end."""


@dataclass(frozen=True)
class Ranks:
    """Place of this process among those of a training."""

    rank: int = 0
    local_rank: int = 0
    """Rank on this node; the number of its GPU."""
    size: int = 1
    local_size: int = 1
    """Processes on each node."""
    launched: bool = False
    """Whether torchrun, or rank 0, started this process."""
    grouped: bool = False
    """Whether there is a process group, of one rank or more."""
    sequence: int = 1
    """Ranks that share each sequence; they have consecutive numbers, in the order of its segments."""

    @property
    def nodes(self) -> int:
        return self.size // self.local_size

    def bounds(self, n_rows: int) -> tuple[int, int]:
        """The first of this rank's rows of a batch, and the row after its last one."""
        place, places = self.rank // self.sequence, self.size // self.sequence
        return n_rows * place // places, n_rows * (place + 1) // places

    def segments(self, n_segments: int) -> tuple[int, int]:
        """The first of this rank's segments of a sequence, and the segment after its last one."""
        place = self.rank % self.sequence
        return n_segments * place // self.sequence, n_segments * (place + 1) // self.sequence

    def sequence_group(self) -> Any:
        """The process group of the ranks that share this rank's sequences; None if this rank reads them alone. Every
        rank must call it."""
        if self.sequence == 1:
            return None
        group, _ = dist.new_subgroups(self.sequence)
        return group

    def summed(self, value: torch.Tensor) -> torch.Tensor:
        """The sum over ranks of a number, on every rank."""
        if self.size > 1:
            value = value.clone()
            dist.all_reduce(value)
        return value

    def any(self, value: bool) -> bool:
        """Whether it is true on any rank."""
        return bool(self.summed(torch.tensor(float(value))))

    def gathered(self, rows: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors of all ranks, joined along their rows, on rank 0, and `rows` on the others. Ranks that share
        sequences give the same rows."""
        if self.size == 1:
            return rows
        found: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object({name: tensor.cpu() for name, tensor in rows.items()}, found)
        if found is None:
            return rows
        return {name: join_rows(*(part[name] for part in found[:: self.sequence])) for name in rows}

    def agreed(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        values = [value]
        if self.size > 1:
            dist.broadcast_object_list(values)
        return values[0]

    def first_alone(self, prepare: Callable[[], None]) -> None:
        """Rank 0 prepares, and then the others, who find what it left. Every rank must call this."""
        if self.size == 1:
            prepare()
            return
        # Only this wait is long. Elsewhere a rank that does not answer is an error after minutes, not after a day. The
        # group is made before the wait: its ranks meet within the usual limit.
        group = dist.new_group(timeout=LONGEST_PREPARATION, backend="gloo")
        if self.rank == 0:
            prepare()
        dist.barrier(group)
        if self.rank > 0:
            prepare()
        dist.destroy_process_group(group)


SINGLE_RANK = Ranks()


def ranks_of(parallel: ParallelConfig, device: torch.device, launched: bool) -> Ranks:
    """The ranks that a configuration asks for. launched: whether torchrun may have started this process; false for a
    training that another command runs.

    Raises InputError for devices or nodes that there are not.
    """
    rank, local_rank, size, local_size = place_of(parallel, launched)
    if parallel.name == "single":
        return SINGLE_RANK
    local_size = local_size or (torch.cuda.device_count() if device.type == "cuda" else 1)
    by_launcher = launched and LAUNCHED in os.environ
    made = Ranks(
        rank, local_rank, size or local_size, local_size, launched=by_launcher, grouped=True, sequence=parallel.sequence
    )
    if device.type == "cuda":
        there = torch.cuda.device_count()
        allowed = f"this machine has {there}; at most that many"
        require(made.local_size <= there, "parallel.devices", made.local_size, allowed)
    return made


@contextlib.contextmanager
def joined(ranks: Ranks, words: Sequence[str], device: torch.device) -> Iterator[None]:
    """The process group of a training, inside the block; nothing where the training needs none.

    Rank 0 starts the other processes, by `infini train` and these words, unless a launcher did; they end with the
    block. A launched process ends when its launcher has gone. Raises InputError on rank 0 where another process has
    failed.
    """
    if not ranks.grouped:
        yield
        return
    address = "env://"
    others: list[subprocess.Popen[bytes]] = []
    if ranks.launched:
        _end_with_launcher()
    else:
        port = find_free_network_port()
        address = f"tcp://127.0.0.1:{port}"
        # A scheduler may send SIGTERM to all processes of a job; those that stop by it would stop the training.
        with children_ignore_sigterm():
            others = [_start(rank, ranks, port, words) for rank in range(1, ranks.size)]
    threads = torch.get_num_threads()
    try:
        if device.type == "cuda":
            torch.cuda.set_device(ranks.local_rank)
        elif "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, threads // ranks.local_size))
        backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, init_method=address, rank=ranks.rank, world_size=ranks.size)
        yield
    except RuntimeError as error:
        if ranks.rank > 0 or not is_lost(error):
            raise
        said = f"another process of this training has ended{_first_failure(others)}; the same command resumes it"
        raise InputError(said) from error
    finally:
        torch.set_num_threads(threads)
        if dist.is_initialized():
            dist.destroy_process_group()
        _end(others, gently=sys.exc_info()[0] is None)


def is_lost(error: RuntimeError) -> bool:
    """Whether the cause of an error is that another process has ended."""
    return any(said in str(error) for said in CONNECTION_ERRORS)


def _start(rank: int, ranks: Ranks, port: int, words: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start a process as torchrun does. The working folder stays; -P keeps it out of the search path for modules."""
    place = (rank, rank, ranks.size, ranks.local_size)
    path = os.pathsep.join(filter(None, (str(SOURCE_ROOT), os.environ.get("PYTHONPATH"))))
    environment = {
        **os.environ,
        **{name: str(value) for name, value in zip(PLACE, place, strict=True)},
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        LAUNCHED: "infini",
        STARTED_BY: str(os.getpid()),
        "PYTHONPATH": path,
    }
    command = [sys.executable, "-P", "-m", "infini", "train", *words]
    return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


def _end_with_launcher() -> None:
    """End this process when its parent has ended: killed, it could not end it."""
    # The parent may have ended while this process imported what it needs; only torchrun does not say who it is.
    parent = int(os.environ.get(STARTED_BY, os.getppid()))
    if sys.platform == "linux":
        # The watch does not run while torch, at the end of a process, waits for a thread with the interpreter's lock.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _first_failure(others: Sequence[subprocess.Popen[bytes]]) -> str:
    """The first process that failed, and its exit code."""
    until = time.monotonic() + SECONDS_TO_END
    while others and time.monotonic() < until:
        for rank, other in enumerate(others, 1):
            if other.poll() not in (None, 0):
                return f" (rank {rank}, exit code {other.returncode})"
        time.sleep(0.05)
    return ""


def _end(others: Sequence[subprocess.Popen[bytes]], gently: bool) -> None:
    """Wait for the other processes. gently: they end by themselves."""
    for other in others:
        if not gently:
            other.terminate()
    for other in others:
        try:
            other.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            other.kill()
            other.wait()
