"""`infini inject`: a pretrained language model with the memory put in, as a folder that transformers loads; or one that
`infini train model=llm` trained."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from infini.commands import verbs
from infini.config.schema import Config, key_of
from infini.errors import InputError
from infini.models import base_of, check_options
from infini.pretrained.base_names import local_path
from infini.system.paths import SCRATCH_PREFIX, check_name, check_place, home_expanded, scratch_folder
from infini.training.checkpoint import load_model, named_folder, read_description


def run(cfg: Config, overrides: list[str], texts: dict[str, str | None]) -> int:
    """Write the folder `out` with weights, tokenizer and model card, and print what it is.

    texts: base and out as they were typed. The weights keep the base's dtype unless model.dtype is set. With
    cfg.checkpoint the model is that of a training, and adapters are added into its weights. Raises InputError when the
    base cannot be read or injected, or the folder cannot be written.
    """
    name, out = texts.get("base"), texts.get("out")
    if cfg.checkpoint is not None:
        return _export(cfg, overrides, name, out)
    if not name:
        raise InputError("base=null: name a hub id, a folder, a .gguf file, or smollm2")
    local_path(name, "base")
    folder = _new_folder(out)
    # Reading a base takes up to a minute.
    check_options(cfg.model | {"base": name, "dtype": cfg.model["dtype"] or "float32"})
    import torch

    base = replace(base_of({**cfg.model, "base": name}), setting="base")
    print(f"reading {name}", file=sys.stderr, flush=True)

    from transformers.utils import logging

    from infini.pretrained.llm import inject

    # Its bar of a second would stand before the line that says where the folder is.
    logging.disable_progress_bar()
    options = cfg.model
    loaded = base.load(getattr(torch, options["dtype"]) if options["dtype"] else "auto")
    base.check_embedding(len(loaded.get_input_embeddings().weight))
    model = inject(
        loaded,
        cfg.dims.segment_length,
        options["update_rule"],
        options["layers"],
        gate_init=options["gate_init"],
        window=options["window"],
        sinks=options["sinks"],
        memory_decay=options["memory_decay"],
        input_gate=options["input_gate"],
    )
    _write(folder, model, base.tokenizer, "nothing is trained yet")
    return 0


def _export(cfg: Config, overrides: list[str], base: str | None, out: str | None) -> int:
    """Write the trained model of cfg.checkpoint as a folder for transformers."""
    typed = [key_of(text) for text in overrides[len(verbs()["inject"].fixed_settings) :]]
    given = ["base"] * (base is not None) + [key for key in typed if key.startswith(("model.", "dims."))]
    if given := [key for key in given if key != "model.dtype"]:
        raise InputError(f"{given[0]}: checkpoint={cfg.checkpoint} has its own; leave it out")
    assert cfg.checkpoint is not None
    trained = named_folder("checkpoint", cfg.checkpoint, cfg.results_dir)
    description = read_description(trained)
    options = description["model"]
    if options["name"] != "llm" or options["memory"] != "infini":
        has = options["name"] if options["name"] != "llm" else f"llm with model.memory={options['memory']}"
        raise InputError(f"checkpoint={cfg.checkpoint!r}: is of model={has}; it must be llm with model.memory=infini")
    folder = _new_folder(out)
    check_options(options | {"dtype": cfg.model["dtype"] or "float32"})
    import torch
    from transformers.utils import logging

    from infini.pretrained.llm.language_model import without_adapters

    logging.disable_progress_bar()
    model, _ = load_model(trained, torch.device("cpu"))
    llm = without_adapters(model.llm)
    llm.config.infini["training"] = f"run {description['run_id']} of infini, model.train={options['train']}"
    if cfg.model["dtype"]:
        llm = llm.to(getattr(torch, cfg.model["dtype"]))
    _write(folder, llm, base_of(options).tokenizer, f"trained by {description['run_id']}")
    return 0


def _write(folder: Path, model: Any, tokenizer: Any, trained: str) -> None:
    """Write all beside its place and move it there, so that nothing has the name if this is stopped. If the
    folder exists, the files are moved into it one by one, at the end."""
    from infini.pretrained.llm import model_card, settings_of

    print(f"writing {folder}", file=sys.stderr, flush=True)
    settings = settings_of(model.config)
    try:
        # An empty folder stays, because it may be a disk of its own, or the working folder.
        there = folder.is_dir()
        folder.parent.mkdir(parents=True, exist_ok=True)
        with scratch_folder(folder if there else folder.parent) as scratch:
            # A scratch folder is its owner's alone; a new one in it has the mode that the user chose.
            made = scratch / "made"
            made.mkdir()
            model.save_pretrained(made)
            if not settings.training:
                # Known here alone; the config does not say it, because a later training would leave it there.
                card = model_card(model, training="none since the memory was put in")
                (made / "README.md").write_text(card, encoding="utf-8")
            tokenizer.save_pretrained(made)
            if there:
                for path in sorted(made.iterdir()):
                    path.rename(folder / path.name)
            else:
                made.rename(folder)
    except OSError as error:
        raise InputError(f"out={str(folder)!r}: cannot be written ({error.strerror})") from error
    layers = f"{len(settings.layers)} of {model.config.num_hidden_layers} layers"
    print(
        f"{folder}: {type(model).__name__} with a memory in {layers} ({settings.update_rule}, segments of "
        f"{settings.segment_length:,} tokens); {trained}"
    )


def _new_folder(out: str | None) -> Path:
    """The folder to write. Raises InputError if none is named, or if it is not empty."""
    if not out:
        raise InputError("out=null: name the folder to write")
    folder = home_expanded("out", out)
    check_name("out", folder)
    if folder.exists() and not folder.is_dir():
        raise InputError(f"out={out!r}: exists and is not a folder; name another one")
    # Files that a killed process left do not count.
    if folder.is_dir() and any(not path.name.startswith(SCRATCH_PREFIX) for path in folder.iterdir()):
        raise InputError(f"out={out!r}: the folder is not empty; name another one")
    check_place("out", folder)
    return folder
