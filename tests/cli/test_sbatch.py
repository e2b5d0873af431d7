"""The script with which docs/how-to/cluster.md trains over several nodes of Slurm, run without Slurm."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from infini.config.compose import compose

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "cluster.md"
NODES = "gpu[07-08]"
"""As Slurm abbreviates the names of two nodes."""
PROGRAMS = {
    "scontrol": f'echo "$@" >> scontrol.txt; [ "$*" != "show hostnames {NODES}" ] || printf "gpu07\\ngpu08\\n"',
    "srun": f'printf "%s\\n" "$@" > srun.txt; [ ! -e long ] || exec {sys.executable} stopped.py',
}
"""What the script finds in place of Slurm's programs."""


@pytest.fixture
def script() -> str:
    found = re.search(
        r"^`training\.sbatch`.*?```\n(#!/bin/bash\n.*?)```", PAGE.read_text(encoding="utf-8"), re.S | re.M
    )
    assert found
    return found[1]


def job(script: str, folder: Path) -> subprocess.Popen[bytes]:
    """The script as a job of two nodes."""
    for name, does in PROGRAMS.items():
        (folder / name).write_text(f"#!/bin/sh\n{does}\n", encoding="utf-8")
        (folder / name).chmod(0o755)
    (folder / "training.sbatch").write_text(script, encoding="utf-8")
    of_job = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": NODES, "PATH": f"{folder}:{os.environ['PATH']}"}
    return subprocess.Popen(["bash", "training.sbatch"], cwd=folder, env={**os.environ, **of_job})


def started_by(script: str, folder: Path) -> list[str]:
    """The words that the script gives to torchrun on each node of a job."""
    assert job(script, folder).wait(60) == 0
    assert (folder / "scontrol.txt").read_text(encoding="utf-8") == f"show hostnames {NODES}\n"
    words = (folder / "srun.txt").read_text(encoding="utf-8").splitlines()
    return words[words.index("torchrun") + 1 :]


def test_the_script_starts_torchrun_on_each_node_as_slurm_was_asked(script: str, tmp_path: Path) -> None:
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", script, re.MULTILINE))
    torchrun = get_args_parser().parse_args(started_by(script, tmp_path))
    # The nodes meet at the first of them, under a name that is the job's own.
    assert (torchrun.rdzv_backend, torchrun.rdzv_endpoint, torchrun.rdzv_id) == ("c10d", "gpu07:29500", "4711")
    assert asked["ntasks-per-node"] == "1"
    assert (torchrun.nnodes, torchrun.nproc_per_node) == (asked["nodes"], asked["gpus-per-node"])
    assert torchrun.module and torchrun.training_script == "infini"
    verb, *words = torchrun.training_script_args
    assert verb == "train"
    cfg = compose(words)
    assert cfg.recipe.batch_size % (int(torchrun.nnodes) * int(torchrun.nproc_per_node)) == 0


@pytest.mark.parametrize("ended", [1, 0], ids=["stopped", "finished meanwhile"])
def test_a_job_at_the_end_of_its_time_stops_its_training_and_is_queued_again(
    ended: int, script: str, tmp_path: Path
) -> None:
    """Slurm does not queue a job again that ran out of time. `B:` sends the signal to the script alone. A training that
    ends before the signal arrives would train once more."""
    assert re.search(r"^#SBATCH --signal=B:USR1@\d+$", script, re.MULTILINE)
    (tmp_path / "long").touch()
    # A training that saves its step when srun passes SIGTERM on.
    (tmp_path / "stopped.py").write_text(
        "import pathlib, signal, sys, time\n"
        "def save(*_):\n"
        "    time.sleep(0.5)\n"
        "    asked = pathlib.Path('scontrol.txt').read_text()\n"
        "    pathlib.Path('saved.txt').write_text(asked)\n"
        f"    sys.exit({ended})\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "pathlib.Path('ready').touch()\n"
        "time.sleep(60)\n",
        encoding="utf-8",
    )
    running = job(script, tmp_path)
    until = time.monotonic() + 30
    while not (tmp_path / "ready").exists():
        assert time.monotonic() < until
        time.sleep(0.05)
    running.send_signal(signal.SIGUSR1)
    running.wait(30)
    # Slurm kills a job that it queues again: the training has saved before that.
    assert (tmp_path / "saved.txt").read_text(encoding="utf-8") == f"show hostnames {NODES}\n"
    assert (tmp_path / "scontrol.txt").read_text(encoding="utf-8").splitlines()[1:] == ["requeue 4711"] * ended
