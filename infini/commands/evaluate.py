"""`infini eval`: stream a split through a trained model, memory carried, and measure what the memory is worth."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from infini import records
from infini.commands.common import find_checkpoint, keep_large_buffers, start_record
from infini.config import Config, DimsConfig, OptimizerConfig, RecipeConfig
from infini.errors import InputError
from infini.memory_use import peak_memory_bytes
from infini.precision import autocast, pick_device
from infini.progress import progress_bar
from infini.training.checkpoint import TOKENIZER, load_model


def run(cfg: Config, overrides: list[str]) -> int:
    """Evaluate and print the metrics."""
    record = evaluate(cfg, overrides, find_checkpoint(cfg, overrides))
    console = Console()
    for name, entry in record.results.items():
        console.print(f"{name:<18} {entry['value']:>12.4f}  {entry['unit']}  (n = {entry['n']:,})", highlight=False)
    console.print(f"record: {records.record_path(cfg.results_dir, record.run_id)}", markup=False, soft_wrap=True)
    return 0


def evaluate(cfg: Config, overrides: list[str], folder: Path) -> records.RunRecord:
    """Measure the model in `folder` on the report's split, and write the record.

    Raises InputError when the checkpoint is damaged or another model's, or the data cannot be had.
    """
    from tasks.language_modelling import metrics, stream_documents, stream_with_foreign_memory
    from tasks.text import TextTokenizer
    from tasks.token_cache import open_split

    keep_large_buffers()
    device = pick_device(cfg.parallel.accelerator)
    model, description = load_model(folder, device)
    cfg = _as_trained(cfg, overrides, description, folder)
    split_name = str(cfg.report["split"])
    tokenizer = TextTokenizer.load(folder / TOKENIZER)
    if tokenizer.hash != description["tokenizer_hash"]:
        raise InputError(f"checkpoint={str(folder)!r}: {TOKENIZER} is not the one the model was trained with")
    split, _ = open_split(cfg, split_name, tokenizer)
    record = start_record("eval", cfg, overrides, parent=description["run_id"])
    console = Console(stderr=True)
    console.print(f"evaluating {description['run_id']} on {len(split)} documents", markup=False, highlight=False)

    N = cfg.dims.segment_length
    limit = cfg.scale.eval_max_tokens
    knock_limit = min(cfg.scale.knockout_max_tokens, limit or cfg.scale.knockout_max_tokens)
    knockouts = cfg.scale.knockouts and model.gates() is not None and len(split) > 1
    total = int(np.minimum(split.n_tokens, limit or split.n_tokens.max()).sum())
    knocked = int(np.minimum(split.n_tokens, knock_limit).sum()) * knockouts
    call = cfg.scale.eval_segments_per_call * N
    read = partial(stream_documents, model, split, tokenizer.bos_id, tokens_per_call=call)

    started = time.perf_counter()
    title = f"{cfg.model['name']} on {split_name}"
    with progress_bar(title, total + 4 * knocked, console.is_terminal) as advance:
        with autocast(cfg.parallel.precision, device):
            streamed = read(max_tokens=limit, advance=advance)
            seconds = time.perf_counter() - started
            if knockouts:
                own, foreign = stream_with_foreign_memory(
                    model, split, tokenizer.bos_id, max_tokens=knock_limit, advance=lambda n: advance(2 * n)
                )
                reset = read(max_tokens=knock_limit, reset_every=N, advance=advance)
                base = read(max_tokens=knock_limit, advance=advance)

    share = streamed.tokens / split.n_tokens
    record.data = split.data_record()
    record.results = metrics(streamed, split.n_words * share, split.n_bytes * share)
    record.documents = [
        {"name": name, "tokens": tokens, "words": words, "bytes": size, "nll": nll}
        for name, tokens, words, size, nll in zip(
            split.names, streamed.tokens, split.n_words * share, split.n_bytes * share, streamed.nll, strict=True
        )
    ]
    record.series["nll_by_position"] = {
        "edges": streamed.edges,
        "nll": np.round(streamed.nll_by_position, 3),
        "tokens": streamed.tokens_by_position,
    }
    if knockouts:
        _add_knockouts(record, own, foreign, reset, base)
    if (gates := model.gates()) is not None:
        record.series["gates"] = gates
    record.cost = {
        "wall_seconds": time.perf_counter() - started,
        "streaming_seconds": seconds,
        "tokens_per_second": total / seconds,
        "peak_memory_bytes": peak_memory_bytes(device),
        "tokens_seen": int(streamed.tokens.sum()),
        "state_floats": model.state_floats(int(max(split.n_tokens)) // N),
        "parameters": sum(p.numel() for p in model.parameters()),
    }
    records.write_record(record, cfg.results_dir)
    return record


def _as_trained(cfg: Config, overrides: list[str], description: dict[str, Any], folder: Path) -> Config:
    """`cfg` with model, sizes, optimizer, recipe and seed of the checkpoint: its record must describe what was run.

    Raises InputError when the command line asks for anything else.
    """
    held = description["config"]
    name = held["model"]["name"]
    if name != cfg.model["name"]:
        raise InputError(f"checkpoint={str(folder)!r}: holds {name}; add model={name}")
    if held["task"]["name"] != cfg.task.name:
        raise InputError(f"checkpoint={str(folder)!r}: was trained on task={held['task']['name']}")
    asked = asdict(cfg)
    for override in overrides:
        key = override.lstrip("+").partition("=")[0]
        path = key.split(".")
        if path[0] in _TRAINED and _at(asked, path) != _at(held, path):
            raise InputError(f"{key}={_at(asked, path)!r}: the checkpoint was trained with {_at(held, path)!r}")
    groups = {"dims": DimsConfig, "optimizer": OptimizerConfig, "recipe": RecipeConfig}
    trained = {name: groups[name](**held[name]) if name in groups else held[name] for name in _TRAINED}
    return replace(cfg, **trained)


_TRAINED = ("model", "dims", "optimizer", "recipe", "seed", "init_from")


def _at(config: Any, path: list[str]) -> Any:
    for key in path:
        config = config.get(key) if isinstance(config, dict) else None
    return config


def _add_knockouts(record: records.RunRecord, own: Any, foreign: Any, reset: Any, base: Any) -> None:
    rows = zip(record.documents, own.tokens, own.nll, foreign.nll, reset.tokens, reset.nll, base.nll, strict=True)
    for entry, tokens, nll, nll_foreign, reset_tokens, nll_reset, nll_base in rows:
        entry |= {"foreign_tokens": tokens, "nll_foreign": nll_foreign, "nll_foreign_base": nll}
        entry |= {"reset_tokens": reset_tokens, "nll_reset": nll_reset, "nll_reset_base": nll_base}
    for name, knocked, normal in (("reset", reset, base), ("foreign", foreign, own)):
        n = int(normal.tokens.sum())
        cost = float((knocked.nll - normal.nll).sum()) / n
        record.results[f"{name}_delta"] = {"value": cost, "n": n, "unit": "nats/token", "higher_is_better": True}
    record.series["normaliser_growth"] = own.growth
