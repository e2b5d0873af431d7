"""Whether a training reads segments by compiled code (torch.compile): models that read them one after the other."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from pathlib import Path

import torch
import torch._dynamo.config
import torch._inductor.config

from infini.config import Config
from infini.errors import InputError
from infini.recurrent import Recurrence

FEWEST_STEPS = 1000
"""Of a training that `auto` compiles for: compiling takes as long as is saved in some hundreds (results/LOG.md 143)."""


def compile_layers(cfg: Config, model: torch.nn.Module, device: torch.device) -> bool:
    """Make the model read by compiled code where `parallel.compile` says so; whether it does.

    Raises InputError where it is to be always, and nothing here compiles.
    """
    when = cfg.parallel.compile
    if when == "never" or not isinstance(model, Recurrence):
        return False
    missing = _missing() if device.type == "cpu" else None
    if when == "always" and missing is not None:
        raise InputError(f"parallel.compile='always': {missing}; take auto or never")
    worth = device.type == "cpu" and cfg.recipe.steps >= FEWEST_STEPS and not cfg.recipe.checkpoint_activations
    if when == "auto" and (missing is not None or not worth):
        return False
    # Whatever fails in compiling, a training goes on without; and no processes beside this one.
    torch._dynamo.config.suppress_errors = True
    torch._inductor.config.compile_threads = 1
    return model.compile_layers()


def _missing() -> str | None:
    """What of a compiler is not here."""
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(compiler) is None:
        return f"no C++ compiler here ({compiler})"
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    return None if header.exists() else f"no {header} here, of which compiled code is made"
