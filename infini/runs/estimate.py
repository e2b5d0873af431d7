"""Estimates of how long runs take, from the records of comparable runs.

The estimate for a reproduction of the passkey table uses published records of one processor. To convert their seconds
to this machine, the packaged model reads a prompt here, and its speed is compared with that of its published
evaluation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from infini import records
from infini.config.schema import Config
from infini.demo import FOLDER
from infini.records import RunRecord, value_at
from infini.report.tables import counted
from infini.system.devices import has_gpu, uses_bfloat16
from infini.system.progress import duration
from infini.training.checkpoint import read_description


def describe_time(trainings: Sequence[Config], evaluations: Sequence[Config], others: int = 0) -> str | None:
    """One line on the work that is left; None if there is none, or no published run is comparable.

    trainings, evaluations: configurations of runs of one task without a record yet. others: rows that are not among
    them, because they start from another model or ask other questions.
    """
    tasks = {cfg.task.name for cfg in (*trainings, *evaluations)}
    published = [run for run in records.load_records(records.published_dir()) if run.task in tasks]
    demo = read_description(FOLDER)["run_id"]
    reference = next((run for run in published if run.verb == "eval" and run.parent == demo), None)
    if reference is None:
        return None
    known = [run for run in published if run.environment["hardware"] == reference.environment["hardware"]]
    seconds = [training_seconds(cfg, known) for cfg in trainings]
    seconds += [evaluation_seconds(cfg, known) for cfg in evaluations]
    total = sum(value for value in seconds if value is not None)
    if total == 0:
        return None
    from infini.runs.demo import reading_speed

    cell = reference.series["cells"][0]
    speed = reading_speed(cell["length"]) / cell["tokens_per_second"]
    unknown = seconds.count(None)
    counts = f"{counted(len(trainings), 'training')} and {counted(len(evaluations), 'evaluation')}"
    return (
        f"{counts} to run, about {duration(total / speed)} here"
        + (f", not counting {counted(unknown, 'run')} without a comparable published run" if unknown else "")
        + f" (published runs on {reference.environment['hardware']['cpu']}: {duration(total)}; this machine "
        f"now reads a prompt at {speed:.2g} times its speed)"
        + (f"; not counted, done or not: {counted(others, 'row')} with another start or questions" if others else "")
    )


def training_seconds(cfg: Config, known: Sequence[RunRecord], here: bool = False) -> float | None:
    """Seconds of a training, from the fastest comparable one, since slower ones shared their machine; None where none
    is comparable. here: whether to compare only with trainings on the devices, and in the format of products, that
    this machine would use."""
    each = [
        run.cost["wall_seconds"] / run.config["recipe"]["steps"]
        for run in known
        if run.verb == "train"
        and run.diverged is None
        and _is_same_work(cfg, run)
        and value_at(run.config, "optimizer.name") in (None, cfg.optimizer.name)
        and not run.cost.get("resumed")
        and not (here and (_spread(run.config) != _spread(asdict(cfg)) or _is_elsewhere(cfg, run)))
    ]
    return min(each) * cfg.recipe.steps if each else None


def evaluation_seconds(cfg: Config, known: Sequence[RunRecord], here: bool = False) -> float | None:
    """Seconds of an evaluation, from the fastest one of a comparable model with the same questions; None where none is
    comparable. They are proportional to the number of prompts. here: see training_seconds."""
    values = asdict(cfg)
    asked = {key: value_at(values, key) for key in cfg.task.evaluation_reads if key != "part"}
    examples = values["task"].get("examples", 1)
    each = [
        run.cost["wall_seconds"] / run.config["task"].get("examples", 1)
        for run in known
        if run.verb == "eval"
        and run.task == cfg.task.name
        and _is_same_work(cfg, run)
        and {key: value_at(run.config, key) for key in asked} == asked
        and run.config["task"].get("examples", 1) >= min(10, examples)
        and not run.cost.get("resumed")
        and not (here and _is_elsewhere(cfg, run))
    ]
    return min(each) * examples if each else None


_NO_WORK = {
    *("steps", "warmup_steps", "schedule", "final_lr_fraction", "save_every", "advance_below", "sparse_loss_scale"),
    *("gate_init", "first_segment", "attention_scale", "rope_base"),
}
"""Numbers of a recipe, and options of a model, that change no step's work."""


def _spread(config: Mapping[str, Any]) -> list[Any]:
    """The settings that spread a training over devices."""
    name, *devices = (value_at(config, f"parallel.{key}") for key in ("name", "devices", "nodes"))
    return ["single"] if name in (None, "single") else [name, *devices]


def _is_elsewhere(cfg: Config, run: RunRecord) -> bool:
    """Whether a run was on another kind of device than this one would be, or multiplied in another format. Older
    records do not say it."""
    device = "cuda" if cfg.parallel.accelerator != "cpu" and has_gpu() else "cpu"
    if run.environment.get("device", device) != device:
        return True
    if "bfloat16" not in run.environment:
        return False
    import torch

    return bool(run.environment["bfloat16"] != uses_bfloat16(cfg.parallel.precision, torch.device(device)))


def _is_same_work(cfg: Config, run: RunRecord) -> bool:
    """Whether a run is of the same model, options, recipe and sizes."""
    was = run.config
    asked = _work(cfg.model, vars(cfg.recipe), vars(cfg.dims))
    return was["scale"]["name"] == cfg.scale.name and _work(was["model"], was["recipe"], was["dims"]) == asked


def _work(model: Mapping[str, Any], recipe: Mapping[str, Any], dims: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The settings that decide the seconds of a step: options of the model, recipe, sizes."""
    # An option that is off equals one that did not exist yet. Positions were rotary before there was a choice.
    options, steps = (
        {key: value for key, value in each.items() if value is not None and key not in _NO_WORK}
        for each in (model, recipe)
    )
    # A configuration does not have the sizes of a pretrained base before it is read.
    sizes = {"segment_length": dims["segment_length"]} if "base" in model else dict(dims)
    return [{"positions": "rotary"} | options, steps, sizes]
