"""Where a training's curves go: a CSV file, Weights & Biases, TensorBoard, or nowhere."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from infini.errors import InputError


def make_logger(name: str, folder: Path, run_id: str) -> Any:
    """Lightning's logger `name` (see LoggerConfig), with its files below `folder`; False for none.

    Weights & Biases never asks anything: where nobody is logged in, and WANDB_MODE says nothing else, it goes offline.
    Raises InputError when the package is not installed.
    """
    try:
        if name == "csv":
            from lightning.pytorch.loggers import CSVLogger

            # A file that an earlier sitting began would be deleted.
            sittings = len(list(folder.glob(f"{run_id}*")))
            return CSVLogger(folder, name="", version=run_id if not sittings else f"{run_id}-{sittings + 1}")
        if name == "tensorboard":
            from lightning.pytorch.loggers import TensorBoardLogger

            return TensorBoardLogger(folder, name="", version=run_id)
        if name == "wandb":
            return _wandb(folder, run_id)
    except ModuleNotFoundError as error:
        raise InputError(f"logger={name}: needs a package that is not installed; pip install {name}") from error
    return False


def close_loggers() -> None:
    """End a Weights & Biases run that is open: the next training of this process would go on with it."""
    wandb = sys.modules.get("wandb")
    if wandb is not None and getattr(wandb, "run", None) is not None:
        wandb.finish()


def _wandb(folder: Path, run_id: str) -> Any:
    import wandb
    from lightning.pytorch.loggers import WandbLogger

    os.environ.setdefault("WANDB_SILENT", "true")
    folder.mkdir(parents=True, exist_ok=True)
    options: dict[str, Any] = {}
    if "WANDB_MODE" not in os.environ and not wandb.api.api_key:
        # Asked for the key, wandb has read its settings: for this process the environment comes too late.
        os.environ["WANDB_MODE"] = "offline"
    # Lightning's logger writes the older name for it.
    if os.environ.get("WANDB_MODE") in ("offline", "dryrun"):
        options = {"offline": True, "settings": wandb.Settings(mode="offline")}
    return WandbLogger(name=run_id, id=run_id, project="infini", save_dir=folder, resume="allow", **options)
