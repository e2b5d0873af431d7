"""Memory of training on longer sequences: with all activations kept, or those of one group of segments at a time."""

from __future__ import annotations

import time
from typing import Any

import torch
from rich.table import Table

from infini.bench.training import VOCABULARY, Setting, start_peak, training_step
from infini.system.memory_use import peak_memory_bytes
from infini.system.progress import progress_bar
from infini.training.activation_checkpointing import grouped


def training_lengths(setting: Setting) -> dict[str, Any]:
    """Seconds and peak memory, in bytes above the use before, of one training step (forward, loss, backward).

    Measured for every model and every length of `suite.training_segments`, with all activations kept ("all") and with
    those of `suite.training_group` segments at a time ("grouped"), on random tokens and the recipe's batch size.

    Raises InputError if peak memory cannot be reset, as on a CPU outside Linux.
    """
    cfg, device, console = setting.cfg, setting.device, setting.console
    N, group = cfg.dims.segment_length, cfg.suite.training_group
    lengths = sorted(cfg.suite.training_segments)
    ways = ("all", "grouped")
    table = Table(
        title=f"training step, {cfg.recipe.batch_size} sequences, segments of {N}; groups of {group} segments"
    )
    for column in ("model", "segments", "tokens", "activations kept", "seconds", "peak above model (MB)"):
        table.add_column(column, no_wrap=True)
    rows: dict[str, Any] = {}
    total = 2 * sum(1 + length for length in lengths) * len(cfg.suite.models)
    with progress_bar("training steps", total, console.is_terminal) as advance:
        for name in cfg.suite.models:
            model = setting.language_model(name)
            found: dict[str, Any] = {way: {} for way in ways}
            for length in lengths:
                ids = torch.randint(VOCABULARY, (cfg.recipe.batch_size, length * N), device=device)
                for way in ways:
                    read = model if way == "all" else grouped(model, group * N)
                    # The first call allocates memory of compilers and libraries.
                    training_step(setting, model, read, ids[:, :N])
                    base = start_peak(device, "suite.training_segments", "[]")
                    begin = time.perf_counter()
                    training_step(setting, model, read, ids)
                    seconds, peak = time.perf_counter() - begin, peak_memory_bytes(device) - base
                    found[way][str(length)] = {"seconds": seconds, "peak_bytes": peak}
                    kept = "all" if way == "all" else f"of {group} segments"
                    table.add_row(
                        name, f"{length:,}", f"{length * N:,}", kept, f"{seconds:.2f}", f"{peak / 2**20:,.0f}"
                    )
                    advance(1 + length)
            rows[name] = found
    console.print(table)
    return {"models": rows, "segment_length": N, "batch_size": cfg.recipe.batch_size, "group": group}
