"""Checks and messages before torch and Lightning are imported, which takes many seconds."""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from infini import records
from infini.config.compose import data_folder
from infini.config.schema import Config, given_keys
from infini.errors import InputError
from infini.records import RunRecord, value_at
from infini.runs.common import TRAINING_SPLITS, check_base, check_data, segment_length
from infini.system.devices import may_have_gpu
from infini.system.progress import duration
from infini.training.checkpoint import named_folder, read_description
from infini.training.launcher import LAUNCHED, PLACE, check_shares, place_of
from infini.training.loggers import check_logger


def begin_training(cfg: Config, overrides: Sequence[str]) -> None:
    """Check what a training needs, and print what it will do; of several processes one prints."""
    check_training(cfg)
    if cfg.parallel.name == "single" or LAUNCHED not in os.environ or os.environ.get(PLACE[0]) == "0":
        print(describe_training(cfg, overrides), file=sys.stderr, flush=True)


def check_training(cfg: Config) -> None:
    """Raises InputError for devices, a folder, a logger, a start or data without which a training cannot begin."""
    if not cfg.task.is_trained_on:
        raise InputError(
            f"task={cfg.task.name}: can only be evaluated; train on another task, for example task=continual, and then "
            f"`infini eval task={cfg.task.name} checkpoint=RUN_ID`"
        )
    _, _, size, _ = place_of(cfg.parallel, by_launcher=True)
    if size is not None or cfg.parallel.accelerator == "cpu":
        check_shares(cfg, size or 1)
    check_optimizer(cfg)
    records.check_writable(cfg.results_dir)
    check_logger(cfg.logger.name)
    check_base(cfg.model)
    if "base" in cfg.model and (history := cfg.recipe.long_history) is not None:
        raise InputError(f"recipe.long_history={history}: must be null with model={cfg.model['name']}")
    if cfg.init_from is not None:
        read_description(named_folder("init_from", cfg.init_from, cfg.results_dir), "init_from")
    check_data(cfg, TRAINING_SPLITS)


def check_optimizer(cfg: Config) -> None:
    """Raises InputError for an optimizer that the devices cannot share."""
    if cfg.parallel.name == "fsdp2" and cfg.optimizer.name == "adafactor":
        raise InputError("optimizer=adafactor: parallel=fsdp2 takes adamw or muon; or use parallel=ddp")


def describe_training(cfg: Config, overrides: Sequence[str]) -> str:
    """One line on a training that begins: what is trained, on which device and data, where it is written, and how large
    published such models are and how long they took. Parameters are counted when torch has made the model."""
    recipe, found = cfg.recipe, data_folder(cfg.task.corpus, cfg.task.data_dir)
    tokens = recipe.batch_size * recipe.segments_per_sequence * segment_length(cfg, given_keys(overrides))
    if not cfg.task.reads_data:
        data = "data made from the seed"
    elif cfg.task.data_dir == "synthetic":
        data = "made-up text"
    else:
        of_hub = ", ".join(cfg.task.corpora) or cfg.task.hub_id
        data = f"data {found[0]}" if found is not None else f"data {of_hub} of the hub"
    known = _published(cfg)
    # Whoever has made a folder with infini inject must see at once if another base is trained.
    chosen = "".join(f" model.{key}={cfg.model[key]}" for key in ("base", "memory", "train") if key in cfg.model)
    return (
        f"training model={cfg.model['name']}{chosen} task={cfg.task.name} scale={cfg.scale.name} seed={cfg.seed}: "
        f"{recipe.steps:,} steps of {tokens:,} tokens on {_device(cfg)}; {_parameters(cfg, known)}; {data}; "
        f"results in {cfg.results_dir}{_seconds(cfg, known)}"
    )


def _published(cfg: Config) -> list[RunRecord]:
    """The published trainings of this model for this task."""
    # Files are chosen by name, because reading all records takes longer than everything else here.
    named = f"*-train-{cfg.task.name}-{cfg.model['name']}-s*.json"
    return [records.read_record(path) for path in sorted((records.published_dir() / "runs").glob(named))]


def _parameters(cfg: Config, known: Sequence[RunRecord]) -> str:
    """The number of parameters of a published model of these options and sizes, or that it follows."""
    asked = _sizes_of(asdict(cfg))
    for run in known:
        if _sizes_of(run.config) == asked and "parameters" in run.cost:
            return f"{run.cost['parameters']:,} parameters if the vocabulary is as large as the published one"
    return "the number of parameters follows"


def _sizes_of(config: Mapping[str, Any]) -> list[Any]:
    """The settings that decide the number of parameters. An option that is off equals one that did not exist yet."""
    groups = (value_at(config, name) or {} for name in ("model", "dims"))
    return [{key: value for key, value in group.items() if value is not None} for group in groups] + [
        value_at(config, "scale.vocab_size")
    ]


def _device(cfg: Config) -> str:
    """The device, as far as it is known without torch, which alone can say whether it can use a GPU that is there."""
    gpu = "the GPU" if cfg.parallel.name == "single" else "GPUs"
    if cfg.parallel.accelerator == "gpu":
        return gpu
    searched = cfg.parallel.accelerator == "auto" and may_have_gpu()
    return f"{gpu} if torch finds one, otherwise the CPU" if searched else "the CPU"


def _seconds(cfg: Config, known: Sequence[RunRecord]) -> str:
    """Says how long published trainings took; empty where none is like it, and for another number of steps."""
    from infini.runs.estimate import training_seconds

    by_cpu: dict[str, list[float]] = {}
    for run in known:
        if run.config["recipe"]["steps"] != cfg.recipe.steps:
            continue
        if (seconds := training_seconds(cfg, [run])) is not None:
            by_cpu.setdefault(str(run.environment["hardware"]["cpu"]), []).append(seconds)
    if not by_cpu:
        return ""
    cpu, seconds_of = max(by_cpu.items(), key=lambda item: len(item[1]))
    took = f"{duration(statistics.median(seconds_of))} on {cpu}"
    return f"; published trainings of this recipe took {took}; the time here is shown below"
