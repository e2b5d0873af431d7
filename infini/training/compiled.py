"""Whether a training reads segments by compiled code (torch.compile): models that read them one after the other, with
gradients through all of them."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import sysconfig
from pathlib import Path

import torch
import torch._dynamo.config
import torch._inductor.config

from infini.config.schema import Config
from infini.errors import InputError
from infini.nn.recurrent import Recurrence

FEWEST_STEPS = 1000
"""Of a training that `auto` compiles for. Compiling takes as long as some 400 steps save (results/LOG.md 143): of more
than twice as many it is worth its wait."""


def check_compiler(cfg: Config, device: torch.device) -> None:
    """Raises InputError where a training is to be compiled in any case, and nothing here compiles."""
    if cfg.parallel.compile == "always" and device.type == "cpu" and (missing := _missing()):
        raise InputError(f"parallel.compile='always': {missing}; take auto or never")


def compile_layers(cfg: Config, model: torch.nn.Module, device: torch.device) -> bool:
    """Make the model read by compiled code where it can and `parallel.compile` says so; whether it does."""
    if cfg.parallel.compile == "never" or not isinstance(model, Recurrence) or cfg.recipe.checkpoint_activations:
        return False
    worth = device.type == "cpu" and cfg.recipe.steps >= FEWEST_STEPS and _missing() is None
    if not (cfg.parallel.compile == "always" or worth) or not model.compile_layers():
        return False
    # Whatever fails in compiling, a training goes on without; and no processes beside this one.
    torch._dynamo.config.suppress_errors = True
    torch._inductor.config.compile_threads = 1
    logging.getLogger("torch._dynamo.convert_frame").addFilter(_in_one_line)
    return True


def _in_one_line(message: logging.LogRecord) -> bool:
    """What torch says in a hundred lines where compiling fails."""
    told = [line for line in message.getMessage().splitlines() if "Error: " in line]
    if "WON'T CONVERT" in message.getMessage():
        message.msg = (
            f"parallel.compile: compiling failed, going on without ({told[-1].strip() if told else 'no reason'})"
        )
        message.args, message.exc_info, message.exc_text = None, None, None
    return True


def _missing() -> str | None:
    """What of a compiler is not here."""
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(compiler) is None:
        return f"no C++ compiler here ({compiler})"
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    return None if header.exists() else f"no {header} here, of which compiled code is made"
