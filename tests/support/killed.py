"""Processes that run an `infini` command line and kill themselves (SIGKILL) at one moment of it.

A server imports everything once and forks a process for each line of JSON that it is given:
{"moment", "when", "words", "environment", "folder", "output"}. It answers with the process's exit code. A line may also
have a list of these: the processes run at once, and the answer is a list.
moment "after seconds": `when` seconds since its first step; the process says in its output where it was.
Otherwise `when` is the occurrence, counted from 1, of one of the moments below.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MOMENTS = (
    "in a step",
    "in the optimizer",
    "in a point's write",
    "before a point's rename",
    "after a point's rename",
    "in the weights' write",
    "before the description",
    "before the record",
    "in the record's write",
    "after the record",
)
OF_EVALUATIONS = (
    "before an answer is kept",
    "in an answer's line",
    "before the record",
    "in the record's write",
    "before answers are dropped",
)
ELSEWHERE = "between these"


def arm(moment: str, occurrence: int) -> None:
    """Make this process kill itself the `occurrence`-th time, counted from 1, that it comes to `moment`."""
    import lightning
    import safetensors.torch
    import torch

    from infini import records
    from infini.training.module import LanguageModelModule

    left = occurrence

    def die() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def before(owner: Any, name: str, when: Callable[..., bool] = lambda *_: True) -> None:
        real = getattr(owner, name)

        def patched(*arguments: Any, **options: Any) -> Any:
            if when(*arguments):
                die()
            return real(*arguments, **options)

        setattr(owner, name, patched)

    def half_written(owner: Any, name: str, which: int) -> None:
        """Die when the file, argument number `which`, has half of its bytes."""
        real = getattr(owner, name)

        def patched(*arguments: Any, **options: Any) -> Any:
            done = real(*arguments, **options)
            path = str(arguments[which])
            if left == 1:
                os.truncate(path, os.path.getsize(path) // 2)
            die()
            return done

        setattr(owner, name, patched)

    def half_synced_below(folder: str, ending: str, divisor: int) -> None:
        """Die when such a file is to be on the disk, with its size over `divisor` there; 0: with its last line cut."""
        real = os.fsync

        def half_synced(file: int) -> None:
            path = os.readlink(f"/proc/self/fd/{file}")
            if os.sep + folder + os.sep in path and ending in path:
                if left == 1:
                    size = os.path.getsize(path)
                    os.truncate(path, size // divisor if divisor else size - 20)
                die()
            real(file)

        setattr(os, "fsync", half_synced)  # noqa: B010

    def renamed(ending: str) -> Callable[..., bool]:
        return lambda source, target, *_: str(target).endswith(ending)

    if moment == "in a step":
        before(LanguageModelModule, "_loss")
    elif moment == "in the optimizer":
        # Between the gradients and the new weights; the schedule's own step is also taken when it is made.
        before(torch.nn.utils, "clip_grad_norm_")
    elif moment == "in a point's write":
        half_written(lightning.Trainer, "save_checkpoint", 1)
    elif moment == "before a point's rename":
        before(os, "replace", renamed(".ckpt"))
    elif moment == "after a point's rename":
        from infini.training import resume

        before(resume, "_sync_folder")
    elif moment == "in the weights' write":
        half_written(safetensors.torch, "save_model", 1)
    elif moment == "before the description":
        before(os, "replace", renamed("config.json"))
    elif moment == "before the record":
        before(records, "write_record")
    elif moment in ("in the record's write", "in an answer's line"):
        if moment == "in the record's write":
            half_synced_below("runs", ".json.", 2)
        else:
            half_synced_below("unfinished", ".jsonl", 0)
    elif moment in ("before an answer is kept", "before answers are dropped"):
        from infini.evaluation.result_cache import ResultCache

        before(ResultCache, "add" if moment == "before an answer is kept" else "drop")
    elif moment == "never":
        pass
    elif moment == "after the record":
        from infini.training.resume import UnfinishedRun

        before(UnfinishedRun, "clear")
    else:
        raise ValueError(moment)


def arm_clock(seconds: float) -> None:
    """Make this process say on stderr what it is doing, and kill itself, so long after its first step began.

    A process that ends before says how long that was.
    """
    import lightning
    import safetensors.torch
    import torch

    from infini import records
    from infini.training.module import LanguageModelModule

    doing = [ELSEWHERE]
    started: list[float] = []

    def strike() -> None:
        os.write(2, f"\nkilled: {doing[-1]}\n".encode())
        os.kill(os.getpid(), signal.SIGKILL)

    def during(owner: Any, name: str, what: str, first: bool = False) -> None:
        real = getattr(owner, name)

        def patched(*arguments: Any, **options: Any) -> Any:
            if first and not started:
                started.append(time.perf_counter())
                clock = threading.Timer(seconds, strike)
                clock.daemon = True
                clock.start()
            doing.append(what)
            try:
                return real(*arguments, **options)
            finally:
                doing.pop()

        setattr(owner, name, patched)

    during(LanguageModelModule, "training_step", "a forward pass", first=True)
    during(torch.Tensor, "backward", "a backward pass")
    during(torch.nn.utils, "clip_grad_norm_", "the optimizer")
    during(torch.optim.lr_scheduler.LRScheduler, "step", "the schedule")
    during(lightning.Trainer, "save_checkpoint", "a point's write")
    during(safetensors.torch, "save_model", "the weights' write")
    during(records, "write_record", "the record's write")
    import atexit

    atexit.register(lambda: os.write(2, f"\nseconds: {time.perf_counter() - started[0]}\n".encode()))


@functools.cache
def server() -> subprocess.Popen[str]:
    """A server, as a process of its own; it ends with the pipe to it."""
    here = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(here.parent), str(here)])}
    command = [sys.executable, __file__]
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def serve() -> int:
    """Fork for every request until there are no more; in a forked process, the exit code of its command line."""
    import datasets  # noqa: F401 - every process needs it
    import lightning  # noqa: F401

    import infini.runs.evaluate
    import infini.runs.train  # noqa: F401

    for line in sys.stdin:
        given = json.loads(line)
        children = []
        for asked in given if isinstance(given, list) else [given]:
            child = os.fork()
            if child == 0:
                return run(asked)
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        print(json.dumps(codes if isinstance(given, list) else codes[0]), flush=True)
    return 0


def run(asked: dict[str, Any]) -> int:
    """Run the request in this process."""
    from infini.cli import main as cli

    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    output = os.open(asked["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.clear()
    os.environ.update(asked["environment"])
    os.chdir(asked["folder"])
    if asked["moment"] == "after seconds":
        arm_clock(asked["when"])
    else:
        arm(asked["moment"], asked["when"])
    sys.argv = ["infini", *asked["words"]]
    return cli.main(asked["words"])


if __name__ == "__main__":
    sys.exit(serve())
