"""A copy of the project as it is installed: `tasks` and `conf` inside `infini`."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def installed_copy(project_root: Path, target: Path, ignore: tuple[str, ...] = ()) -> Path:
    """`target/infini`, a copy that can be changed; with `target` first on PYTHONPATH it is the one that is imported."""
    left_out = shutil.ignore_patterns("__pycache__", *ignore)
    shutil.copytree(project_root / "infini", target / "infini", ignore=left_out)
    for name in ("tasks", "conf"):
        shutil.copytree(project_root / name, target / "infini" / name, ignore=left_out)
    return target


def environment_of(copy: Path, **variables: str) -> dict[str, str]:
    """An environment in which the copy is the one that is imported."""
    return {**os.environ, "PYTHONPATH": str(copy), **variables}
