"""A trained model on disk: weights as safetensors, what built it as JSON, its tokenizer. Nothing is unpickled."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from infini.errors import InputError, did_you_mean
from infini.models import build_model

WEIGHTS, DESCRIPTION, TOKENIZER = "model.safetensors", "config.json", "tokenizer.json"


def checkpoint_folder(results_dir: str | Path, run_id: str) -> Path:
    """Where a training run keeps its model."""
    return Path(results_dir) / "checkpoints" / run_id


def named_folder(key: str, name: str, results_dir: str | Path) -> Path:
    """The folder that `name`, the value of the configuration's `key`, means: itself, or that of a run id.

    Raises InputError when there is none.
    """
    for folder in (Path(name), checkpoint_folder(results_dir, name)):
        if folder.is_dir():
            return folder
    known = [path.name for path in checkpoint_folder(results_dir, "").glob("*")]
    where = f"{results_dir}/checkpoints"
    raise InputError(f"{key}={name!r}: neither a folder nor a run id below {where}{did_you_mean(name, known)}")


def save_model(folder: Path, model: torch.nn.Module, description: dict[str, Any]) -> None:
    """Write weights and description (run_id, model, dims, vocab_size, identity); the description last, by rename."""
    from safetensors.torch import save_model as save_weights

    folder.mkdir(parents=True, exist_ok=True)
    save_weights(model, str(folder / WEIGHTS))
    partial = folder / (DESCRIPTION + ".partial")
    partial.write_text(json.dumps(description, indent=1), encoding="utf-8")
    partial.replace(folder / DESCRIPTION)


def read_description(folder: Path) -> dict[str, Any]:
    """What save_model was told. InputError when the folder is not a checkpoint."""
    path = folder / DESCRIPTION
    try:
        description = json.loads(path.read_text(encoding="utf-8"))
        if not {"run_id", "model", "dims", "vocab_size"} <= set(description):
            raise ValueError("keys are missing")
    except (OSError, ValueError, TypeError) as error:
        problem = f"has no {path.name}: not a checkpoint" if not path.exists() else f"{path.name} is damaged ({error})"
        raise InputError(f"checkpoint={str(folder)!r}: {problem}") from error
    return description


def load_model(folder: Path, device: torch.device) -> tuple[Any, dict[str, Any]]:
    """The model in evaluation mode, and its description. InputError when weights and description do not fit."""
    description = read_description(folder)
    model = build_model(description["model"], SimpleNamespace(**description["dims"]), description["vocab_size"])
    load_weights_into(model, folder)
    return model.to(device).eval(), description


def load_weights_into(model: torch.nn.Module, folder: Path) -> None:
    """Fill a model from a checkpoint's weights; InputError when a name or a shape differs or the file is damaged."""
    from safetensors.torch import load_model as load_weights

    try:
        load_weights(model, str(folder / WEIGHTS))
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"checkpoint={str(folder)!r}: {WEIGHTS} does not fit this model ({reason})") from error
