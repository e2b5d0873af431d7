"""torch.compile for trainings of models that read segments one after the other with gradients through all of them."""

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

MIN_COMPILED_STEPS = 1000
"""Minimum number of steps for which `auto` compiles. Compilation takes the time that about 400 steps save
(results/LOG.md 143); with more than twice as many steps it pays off."""


def check_compiler(cfg: Config, device: torch.device) -> None:
    """Raises InputError for parallel.compile=always on a CPU without a compiler."""
    if cfg.parallel.compile == "always" and device.type == "cpu" and (missing := _missing()):
        raise InputError(f"parallel.compile='always': {missing}; use auto or never")


def uncompiled_by(cfg: Config, model: torch.nn.Module) -> str | None:
    """The setting with which the model's layers are not compiled, whatever parallel.compile asks for; None where there
    is none."""
    if not isinstance(model, Recurrence):
        return f"model={cfg.model['name']}"
    if cfg.recipe.checkpoint_activations:
        return "recipe.checkpoint_activations=True"
    return None if model.uncompiled_by is None else f"model.{model.uncompiled_by}"


def compile_layers(cfg: Config, model: torch.nn.Module, device: torch.device) -> bool:
    """Compile the model's layers if it supports that and `parallel.compile` asks for it; returns whether it did."""
    if cfg.parallel.compile == "never" or uncompiled_by(cfg, model) is not None:
        return False
    assert isinstance(model, Recurrence)
    worth = device.type == "cpu" and cfg.recipe.steps >= MIN_COMPILED_STEPS and _missing() is None
    if not (cfg.parallel.compile == "always" or worth) or not model.compile_layers():
        return False
    # If compilation fails the training continues without it. The compiler starts no processes.
    torch._dynamo.config.suppress_errors = True
    torch._inductor.config.compile_threads = 1
    logging.getLogger("torch._dynamo.convert_frame").addFilter(_in_one_line)
    return True


def _in_one_line(message: logging.LogRecord) -> bool:
    """Shorten the hundred lines that torch logs where compilation fails."""
    lines = [line for line in message.getMessage().splitlines() if "Error: " in line]
    if "WON'T CONVERT" in message.getMessage():
        reason = lines[-1].strip() if lines else "no reason"
        message.msg = f"parallel.compile: compilation failed, continuing without it ({reason})"
        message.args, message.exc_info, message.exc_text = None, None, None
    return True


def _missing() -> str | None:
    """The missing part of a C++ compiler; None where all is there."""
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(compiler) is None:
        return f"no C++ compiler here ({compiler})"
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    return None if header.exists() else f"no {header} here, which compiled code needs"
