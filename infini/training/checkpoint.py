"""A trained model on disk: weights as safetensors, a description as JSON, its tokenizer. Nothing is unpickled.

The description carries the SHA-256 of the weights and of itself; both are verified when they are read.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from infini import records
from infini.errors import InputError, did_you_mean, first_line
from infini.models import build_model
from infini.records import name_file, sync_and_rename, write_atomically
from infini.system.paths import home_expanded, is_file, is_folder

if TYPE_CHECKING:
    import torch

WEIGHTS, DESCRIPTION, TOKENIZER = "model.safetensors", "config.json", "tokenizer.json"


def checkpoint_folder(results_dir: str | Path, run_id: str) -> Path:
    """The folder of a training run's model."""
    return Path(results_dir) / "checkpoints" / run_id


def named_folder(key: str, name: str, results_dir: str | Path) -> Path:
    """The folder `name`, or the checkpoint of the run id `name`; InputError when neither exists.

    key: the key of the configuration whose value `name` is.
    """
    if not name:
        raise InputError(f"{key}='': must be a run id or a folder, or null")
    for folder in (home_expanded(key, name), checkpoint_folder(results_dir, name)):
        if is_folder(folder):
            return folder
    where = f"{results_dir}/checkpoints"
    if is_file(records.published_dir() / "runs" / f"{name}.json"):
        raise InputError(f"{key}={name!r}: published runs have no weights; no checkpoint in {where}")
    known = [path.name for path in checkpoint_folder(results_dir, "").glob("*")]
    raise InputError(f"{key}={name!r}: neither a folder nor a run id below {where}{did_you_mean(name, known)}")


def save_model(folder: Path, model: torch.nn.Module, description: dict[str, Any]) -> None:
    """Write weights and description (run_id, model, dims, vocab_size, tokenizer_hash), each to a temporary file that is
    renamed. The description comes last: a folder without it is not a checkpoint."""
    from safetensors import SafetensorError
    from safetensors.torch import save_model as save_weights

    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f".{WEIGHTS}.partial"
    try:
        try:
            # safetensors makes a new file that the owner alone can read; a common one has the mode that the user chose.
            partial.touch()
            mode = partial.stat().st_mode
            save_weights(model, str(partial))
            partial.chmod(mode)
        except SafetensorError as error:
            code = re.search(r"os error (\d+)", str(error))
            if code is None:
                raise
            raise OSError(int(code[1]), os.strerror(int(code[1])), str(folder / WEIGHTS)) from error
        digest = sha256_of(partial)
        sync_and_rename(partial, folder / WEIGHTS)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        name_file(error, folder / WEIGHTS)
        raise
    whole = description | {"weights_sha256": digest}
    whole["description_sha256"] = checksum(whole)
    write_atomically(folder / DESCRIPTION, json.dumps(whole, indent=1).encode())


_KINDS: dict[str, type] = {"run_id": str, "model": dict, "dims": dict, "vocab_size": int}
"""Keys of every description, and the types of their values."""


def read_description(folder: Path, setting: str = "checkpoint") -> dict[str, Any]:
    """The description that save_model wrote, with weights_sha256. setting: the key that names the folder.

    Raises InputError when the folder is not a checkpoint or is damaged.
    """
    path = folder / DESCRIPTION
    try:
        description = json.loads(path.read_text(encoding="utf-8"))
        if missing := sorted(set(_KINDS) - set(description)):
            raise ValueError(f"{', '.join(missing)} missing")
        stated = description.pop("description_sha256", None)
        if stated is None or "weights_sha256" not in description:
            raise ValueError("it has no checksum")
        if stated != checksum(description):
            raise ValueError("checksum mismatch")
        if wrong := [name for name, kind in _KINDS.items() if not isinstance(description[name], kind)]:
            raise ValueError(f"its {wrong[0]} is not of type {_KINDS[wrong[0]].__name__}")
        if not isinstance(description["model"].get("name"), str):
            raise ValueError("its model has no name")
    except (OSError, ValueError, TypeError, RecursionError) as error:
        problem = f"has no {path.name}: not a checkpoint" if not path.exists() else f"{path.name} is damaged ({error})"
        raise InputError(f"{setting}={str(folder)!r}: {problem}") from error
    return dict(description)


def checksum(description: dict[str, Any]) -> str:
    """SHA-256 of a description without its own checksum."""
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()


def sha256_of(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def load_model(
    folder: Path, device: torch.device, changes: Mapping[str, Any] | None = None
) -> tuple[Any, dict[str, Any]]:
    """The model in evaluation mode, and its description. changes: options that replace those of the training.

    Raises InputError when weights and description do not fit, or no model can be built from the description.
    """
    description = read_description(folder)
    try:
        options = description["model"] | dict(changes or {})
        model = build_model(options, SimpleNamespace(**description["dims"]), description["vocab_size"])
    except InputError:
        raise
    except Exception as error:  # wrong types, or sizes that are impossible or too large
        reason = first_line(error)
        if isinstance(error, AttributeError) and isinstance(error.obj, SimpleNamespace):
            reason = f"dims.{error.name} is missing"
        raise InputError(f"checkpoint={str(folder)!r}: {DESCRIPTION} is invalid: {reason}") from error
    load_weights(model, folder, description)
    return model.to(device).eval(), description


def load_weights(
    model: torch.nn.Module, folder: Path, description: dict[str, Any], setting: str = "checkpoint"
) -> None:
    """Fill a model from a checkpoint; InputError when a name or a shape differs, or a file is damaged. setting: the key
    that names the folder."""
    from safetensors.torch import load_model as load_tensors

    path = folder / WEIGHTS
    where = f"{setting}={str(folder)!r}"
    try:
        damaged = sha256_of(path) != description["weights_sha256"]
    except OSError as error:
        raise InputError(f"{where}: {WEIGHTS} cannot be read ({error.strerror})") from error
    if damaged:
        raise InputError(f"{where}: {WEIGHTS} is damaged: its checksum is not the one in {DESCRIPTION}")
    try:
        load_tensors(model, str(path))
    except Exception as error:
        # The first of several lines only says that something differs.
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        raise InputError(f"{where}: {WEIGHTS} does not fit this model ({lines[min(1, len(lines) - 1)]})") from error
