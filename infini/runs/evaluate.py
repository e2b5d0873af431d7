"""`infini eval`: measure a trained model on its task, and write the record."""

from __future__ import annotations

import hashlib
import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from infini import records
from infini.config.compose import data_folder
from infini.config.schema import Config, DimsConfig, OptimizerConfig, RecipeConfig, groups, key_of, task_schema
from infini.errors import InputError
from infini.evaluation.result_cache import PartDone
from infini.models import base_of
from infini.pretrained.base_names import injected
from infini.records import value_at
from infini.report.tables import DASH
from infini.runs.common import (
    check_base,
    check_data,
    check_kind,
    eval_overrides,
    find_model,
    keep_large_buffers,
    load_task,
    load_tokenizer,
    start_record,
    tokenizer_of_base,
    untrained,
    with_base,
)
from infini.system.devices import begin_peak_memory, peak_memory_bytes, pick_device
from infini.system.progress import plain_console
from infini.training.checkpoint import load_model, read_description

MODEL_KEYS = ("model", "checkpoint", "part")
"""Keys and groups that evaluations without a model refuse."""
IGNORED_WITHOUT_MODEL = (
    *("length", "decoding", "tuned", "dims", "recipe", "optimizer", "init_from"),
    *("task.input_length", "task.chat", "task.summary_tokens"),
)
"""Keys and groups that say what a model is, or is given. Evaluations without one name them in a line: reports compare
both with the same words."""
MEANINGS = {
    "half_dilution": "as many tokens of filler together weigh as much as the key's sentence",
    "reset_delta": "how much the loss rises when the memory is emptied before every segment",
    "foreign_delta": "how much the loss rises when every segment reads the memory of another document",
}
"""Measures whose names do not say what they measure, and their meanings."""


def run(cfg: Config, overrides: list[str]) -> int:
    """Evaluate and print the metrics; of a part (cfg.part), how many of all results are there."""
    _refuse_keys_of_other_tasks(cfg, overrides)
    reference = getattr(cfg.task, "reference", None)
    if reference is None and "task.reference_words" in map(key_of, overrides):
        words = value_at(asdict(cfg), "task.reference_words")
        raise InputError(
            f"task.reference_words={words}: has no effect without task.reference; set both, or leave it out"
        )
    if reference is not None:
        for key in map(key_of, overrides):
            if key.partition(".")[0] in MODEL_KEYS:
                raise InputError(f"{key}: task.reference={reference} evaluates no model, so this key has no effect")
            if key in IGNORED_WITHOUT_MODEL or key.partition(".")[0] in IGNORED_WITHOUT_MODEL:
                print(f"{key}: has no effect: task.reference={reference} evaluates no model", file=sys.stderr)
        record = evaluate_reference(cfg, overrides, reference)
    else:
        cfg = with_base(cfg, overrides)
        folder = find_model(cfg, overrides)
        cfg = _on_the_data_of_the_training(cfg, overrides, folder)
        _say_if_zero_shot(cfg, folder)
        records.check_writable(cfg.results_dir)
        split = getattr(cfg.task, "split", cfg.report.get("split"))
        check_data(cfg, () if split is None else (split,))
        try:
            record = evaluate(cfg, overrides, folder)
        except PartDone as done:
            plain_console(stderr=False).print(str(done))
            return 0
    console = plain_console(stderr=False)
    for name, entry in record.results.items():
        console.print(f"{name:<18} {_shown(entry['value']):>12}  {entry['unit']}  (n = {entry['n']:,})")
    for name, meaning in MEANINGS.items():
        if name in record.results:
            console.print(f"{name}: {meaning}", highlight=False)
    for note in dict.fromkeys(entry["note"] for entry in record.results.values() if entry.get("note")):
        names = [name for name, entry in record.results.items() if entry.get("note") == note]
        console.print(f"{', '.join(names)}: {note}")
    if (details := getattr(load_task(cfg.task.name), "details", None)) is not None:
        for line in details(record):
            console.print(line)
    if record.synthetic:
        console.print("measured on made-up text: it shows that this runs, and nothing else")
    path = records.record_path(cfg.results_dir, record.run_id)
    beside = [f", {path.with_suffix(suffix).name}" for suffix in record.data.get("beside", ())]
    console.print(f"record: {path}{''.join(beside)}")
    return 0


def _on_the_data_of_the_training(cfg: Config, overrides: list[str], folder: Path | None) -> Config:
    """`cfg` with the data that the training of the same task read, its folder, its data set of the hub and the sources
    of its mixture, unless the command line names others."""
    held = None if folder is None else value_at(read_description(folder), "config.task")
    if held is None or held.get("name") != cfg.task.name:
        return cfg
    named = list(map(key_of, overrides))
    # A data set that is named is read, not the folder of the training.
    if not {"task.data_dir", "task.hub_id"} & set(named):
        cfg = _with_data(cfg, "data_dir", held.get("data_dir"))
    of_hub = cfg.task.reads_data and data_folder(cfg.task.corpus, cfg.task.data_dir) is None
    if of_hub and "task.hub_id" not in named:
        cfg = _with_data(cfg, "hub_id", held.get("hub_id"), " of the hub")
    return cfg if "task.sources" in named else _with_data(cfg, "sources", held.get("sources"))


def _say_if_zero_shot(cfg: Config, folder: Path | None) -> None:
    """Print a line where a task that asks any model asks one that was trained on another."""
    trained_on = None if folder is None else value_at(read_description(folder), "config.task.name")
    if cfg.task.evaluates_any_model and trained_on not in (None, cfg.task.name):
        print(f"checkpoint: was trained on task={trained_on}, so its answers are zero-shot", file=sys.stderr)


def _with_data(cfg: Config, key: str, value: Any, where: str = "") -> Config:
    """`cfg` with this value of the training for a key of its task, and a line that says so where it is another."""
    if value is None or value == getattr(cfg.task, key):
        return cfg
    shown, other = (", ".join(value), "others") if isinstance(value, list) else (value, "another")
    print(f"data: {shown}{where}, as the training; task.{key}= names {other}", file=sys.stderr)
    return replace(cfg, task=replace(cfg.task, **{key: value}))


def _refuse_keys_of_other_tasks(cfg: Config, overrides: list[str]) -> None:
    """Raise InputError for a key that evaluations of other tasks read and this task's does not."""
    readers: dict[str, list[str]] = {}
    for task in groups()["task"]:
        for key in task_schema(task).evaluation_reads:
            readers.setdefault(key, []).append(task)
    for key in map(key_of, overrides):
        tasks = readers.get(key) or readers.get(key.partition(".")[0]) or [cfg.task.name]
        if cfg.task.name not in tasks:
            asked = " or ".join(f"task={name}" for name in tasks)
            raise InputError(f"{key}={value_at(asdict(cfg), key)}: task={cfg.task.name} does not read it; add {asked}")


def _shown(value: float | None) -> str:
    """A number, or a dash for a missing one."""
    if value is None or not math.isfinite(value):
        return DASH
    return f"{value:.4f}" if abs(value) < 10_000 else f"{value:,.0f}"


def evaluate(cfg: Config, overrides: list[str], folder: Path | None) -> records.RunRecord:
    """Run the task's evaluation of the model in `folder`, and write the record and the files beside it.

    folder: None evaluates the pretrained model that `cfg` names, without a training.
    Raises InputError when the checkpoint is damaged or of another model, or the data cannot be loaded; PartDone when a
    part of the evaluation (cfg.part) is in the cache.
    """
    check_kind(cfg)
    keep_large_buffers()
    device = pick_device(cfg.parallel.accelerator)
    begin_peak_memory(device)
    cfg = with_base(cfg, overrides)
    task = load_task(cfg.task.name)
    if folder is None:
        tokenizer, parent = tokenizer_of_base(cfg), None
    else:
        description = read_description(folder)
        check_base(description["model"])
        changes = eval_overrides(cfg, overrides, description["model"])
        try:
            cfg = _as_trained(cfg, overrides, description, folder, changes)
        except (KeyError, TypeError, AttributeError) as error:
            raise InputError(f"checkpoint={str(folder)!r}: does not say how it was trained ({error!r})") from error
        tokenizer, parent = load_tokenizer(folder, description), description["run_id"]
    if (check := getattr(task, "check_evaluation", None)) is not None:
        # Checked before the weights are read, which may take long.
        check(cfg, tokenizer)
    model = untrained(cfg, device).model if folder is None else load_model(folder, device, changes)[0]
    try:
        model.resize_segments(cfg.dims.segment_length)
    except ValueError as error:
        raise InputError(f"dims.segment_length={cfg.dims.segment_length}: {error}") from error
    record = start_record("eval", cfg, overrides, parent=parent)
    if (base := base_of(cfg.model)) is not None:
        trained = folder is not None or injected(base.name).get("training")
        record.environment["base"] = base.describe() | {"memory": "trained" if trained else "untrained"}
        if folder is None:
            # Other weights may be saved under the same name before an evaluation is resumed.
            from infini.evaluation.decoding import fingerprint

            record.environment["base"]["weights"] = fingerprint(model)
    started = time.perf_counter()
    from infini.nn.protocols import optional

    # First: an error here must not follow hours of reading.
    gates = optional(model, "gates")()
    beside, finish = task.evaluate(cfg, model, tokenizer, record, device)
    if gates is not None:
        record.series["gates"] = gates
    record.cost |= {
        "wall_seconds": time.perf_counter() - started,
        # The task may have measured its parts.
        "peak_memory_bytes": max(peak_memory_bytes(device), record.cost.get("peak_memory_bytes", 0)),
        "parameters": sum(p.numel() for p in model.parameters()),
    }
    return _write(record, cfg, beside, finish)


def evaluate_reference(cfg: Config, overrides: list[str], reference: str) -> records.RunRecord:
    """Run an evaluation without a model, and write the record under the name of the reference."""
    record = start_record("eval", cfg, overrides, model=reference)
    started = time.perf_counter()
    task = load_task(cfg.task.name)
    beside = task.evaluate_reference(cfg, record)
    record.cost = {"wall_seconds": time.perf_counter() - started}
    return _write(record, cfg, beside, lambda: None)


def _write(
    record: records.RunRecord, cfg: Config, beside: dict[str, bytes], finish: Callable[[], None]
) -> records.RunRecord:
    path = records.record_path(cfg.results_dir, record.run_id)
    for suffix, content in beside.items():
        found = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        record.data.setdefault("beside", {})[suffix] = found
        records.write_atomically(path.with_suffix(suffix), content)
    records.write_record(record, cfg.results_dir)
    finish()
    return record


def _as_trained(
    cfg: Config, overrides: list[str], description: dict[str, Any], folder: Path, changes: dict[str, Any]
) -> Config:
    """`cfg` with what was chosen for the training of the checkpoint, so that the record describes the run.

    changes: options of the model that replace those of the checkpoint. Raises InputError for any other setting on the
    command line that differs from the training.
    """
    held = description["config"]
    name = held["model"]["name"]
    if name != cfg.model["name"]:
        raise InputError(f"checkpoint={str(folder)!r}: is a checkpoint of {name}; add model={name}")
    trained_on = held["task"]["name"]
    same_task = trained_on == cfg.task.name
    if not (same_task or cfg.task.evaluates_any_model or task_schema(trained_on).measured_by_any_task):
        raise InputError(f"checkpoint={str(folder)!r}: was trained on task={trained_on}")
    values = asdict(cfg)
    keys = list(map(key_of, overrides))
    own = set(cfg.task.evaluation_changes) & set(keys)
    allowed = own | {f"model.{key}" for key in changes}
    trained_task = {f"task.{field.name}" for field in fields(cfg.task) if field.metadata.get("training")}
    for key in keys:
        if key in allowed:
            continue
        # A group is chosen by its name; its other keys may have been set one by one.
        chosen = f"{key}.name" if isinstance(value_at(held, key), dict) else key
        was, now = value_at(held, chosen), value_at(values, chosen)
        # Older checkpoints lack newer keys.
        of_training = same_task and key in trained_task and key.partition(".")[2] in held["task"]
        if (key.partition(".")[0] in _TRAINED or key in _TOKENIZER or of_training) and now != was:
            raise InputError(f"{key}={now!r}: the checkpoint was trained with {was!r}")
    groups = {"dims": DimsConfig, "optimizer": OptimizerConfig, "recipe": RecipeConfig}
    try:
        trained = {name: _group(groups[name], held[name]) if name in groups else held[name] for name in _TRAINED}
    except TypeError as error:
        raise InputError(f"checkpoint={str(folder)!r}: made by another version of infini ({error})") from error
    trained["model"] = trained["model"] | changes
    for key in own:
        group, _, field = key.partition(".")
        trained[group] = replace(trained[group], **{field: value_at(values, key)})
    task = cfg.task
    if same_task:
        inherited = [key for key in task.evaluation_inherits if f"task.{key}" not in keys]
        inherited += [key.partition(".")[2] for key in trained_task]
        # Older checkpoints lack newer keys.
        task = replace(task, **{key: held["task"][key] for key in inherited if key in held["task"]})
    # The text is read with the tokenizer of the checkpoint.
    names = [key.partition(".")[2] for key in _TOKENIZER]
    scale = replace(cfg.scale, **{name: held["scale"][name] for name in names})
    return replace(cfg, task=task, scale=scale, **trained)


def _group(schema: Any, held: dict[str, Any]) -> Any:
    """A group of a checkpoint's configuration. Optional fields that did not exist when it was trained are None; fields
    that do not exist any more are left out if they were None."""
    names = [field.name for field in fields(schema)]
    newer = {field.name: None for field in fields(schema) if field.name not in held and "None" in str(field.type)}
    return schema(**newer, **{name: value for name, value in held.items() if name in names or value is not None})


_TOKENIZER = ("scale.tokenizer", "scale.vocab_size")
_TRAINED = ("model", "dims", "optimizer", "recipe", "seed", "init_from")
