"""`infini inject`: a pretrained language model with the memory put in, as a folder that transformers loads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from infini.config.schema import Config
from infini.errors import InputError
from infini.models import base_of
from infini.pretrained.base_names import local_path
from infini.system.paths import check_name, home_expanded


def run(cfg: Config, overrides: list[str], texts: dict[str, str | None]) -> int:
    """Write the folder `out` with weights, tokenizer and model card, and print what it is.

    texts: base and out as they were typed. The weights keep the base's dtype unless model.dtype is set. Raises
    InputError when the base cannot be read or injected, or the folder cannot be written.
    """
    name, out = texts.get("base"), texts.get("out")
    if not name:
        raise InputError("base=null: name a hub id, a folder, a .gguf file, or smollm2")
    local_path(name, f"base={name!r}")
    folder = _new_folder(out)
    import torch

    base = replace(base_of({**cfg.model, "base": name}), setting="base")

    from transformers.utils import logging

    from infini.pretrained.llm import inject, settings_of

    # Its bar of a second would stand before the line that says where the folder is.
    logging.disable_progress_bar()
    options = cfg.model
    model = inject(
        base.load(getattr(torch, options["dtype"]) if options["dtype"] else "auto"),
        cfg.dims.segment_length,
        options["update_rule"],
        options["layers"],
        gate_init=options["gate_init"],
        window=options["window"],
        sinks=options["sinks"],
    )
    tokenizer = base.tokenizer
    try:
        folder.mkdir(parents=True, exist_ok=True)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    except OSError as error:
        raise InputError(f"out={out!r}: cannot be written ({error.strerror})") from error
    settings = settings_of(model.config)
    layers = f"{len(settings.layers)} of {model.config.num_hidden_layers} layers"
    print(
        f"{folder}: {type(model).__name__} with a memory in {layers} ({settings.update_rule}, segments of "
        f"{settings.segment_length:,} tokens); nothing is trained yet"
    )
    return 0


def _new_folder(out: str | None) -> Path:
    """The folder to write; InputError where there is none to write to, or something stands there."""
    if not out:
        raise InputError("out=null: name the folder to write")
    folder = home_expanded("out", out)
    check_name("out", folder)
    if folder.exists() and not folder.is_dir():
        raise InputError(f"out={out!r}: exists and is not a folder; name another one")
    if folder.is_dir() and any(folder.iterdir()):
        raise InputError(f"out={out!r}: the folder is not empty; name another one")
    return folder
