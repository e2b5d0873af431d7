"""The script with which docs/how-to/cluster.md trains over several nodes of Slurm, run without Slurm."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from infini.config.compose import compose

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "cluster.md"
NODES = "gpu[07-08]"
"""As Slurm abbreviates the names of two nodes."""
PROGRAMS = {
    "scontrol": f'[ "$*" = "show hostnames {NODES}" ] || exit 1; printf "gpu07\\ngpu08\\n"',
    "srun": 'printf "%s\\n" "$@" > srun.txt',
}
"""What the script finds in place of Slurm's programs."""


@pytest.fixture
def script() -> str:
    found = re.search(
        r"^`training\.sbatch`.*?```\n(#!/bin/bash\n.*?)```", PAGE.read_text(encoding="utf-8"), re.S | re.M
    )
    assert found
    return found[1]


def started_by(script: str, folder: Path) -> list[str]:
    """The words that the script gives to torchrun on each node of a job."""
    for name, does in PROGRAMS.items():
        (folder / name).write_text(f"#!/bin/sh\n{does}\n", encoding="utf-8")
        (folder / name).chmod(0o755)
    (folder / "training.sbatch").write_text(script, encoding="utf-8")
    of_job = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": NODES, "PATH": f"{folder}:{os.environ['PATH']}"}
    subprocess.run(["bash", "training.sbatch"], cwd=folder, env={**os.environ, **of_job}, check=True, timeout=60)
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
