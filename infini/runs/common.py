"""What several commands share: data of a task, devices, the checkpoint a user means, and the head of a record."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console

from infini import records
from infini.commands import verbs
from infini.config.compose import config_hash
from infini.config.schema import Config
from infini.config.words import key_of
from infini.errors import DivergedError, InputError
from infini.models import kind_of
from infini.records import RunRecord, value_at
from infini.report.search import KEY
from infini.system.devices import emulated_bfloat16, pick_device, uses_bfloat16
from infini.training.checkpoint import TOKENIZER, checkpoint_folder, named_folder, read_description

T = TypeVar("T")


def catch_divergence(make: Callable[[], T]) -> T | DivergedError:
    """The result of `make`, or the error where its training diverged."""
    try:
        return make()
    except DivergedError as error:
        return error


def diverged_before(cfg: Config) -> RunRecord | None:
    """The newest training of exactly this configuration, on the data as it is now, that is on record as diverged.

    Raises InputError when there is one of this configuration and the data cannot be had.
    """
    runs = []
    for path in sorted((Path(cfg.results_dir) / "runs").glob("*-train-*.json")):
        # A training does not depend on the others: a damaged record of one is not what stops it.
        with contextlib.suppress(InputError):
            runs.append(records.read_record(path))
    runs = [run for run in runs if run.diverged is not None and config_hash(run.config) == config_hash(cfg)]
    return newest_on_the_data(cfg, runs, "train")


def describe_divergence(record: RunRecord, results_dir: str, newest: str = "") -> str:
    """What happened to a training that is on record as diverged, and how to have it made again.

    newest: a sentence on its newest checkpoint.
    """
    rate, reason = value_at(record.config, KEY), (record.diverged or {}).get("reason")
    again = f"To try this one again, remove {records.record_path(results_dir, record.run_id)}"
    return f"{KEY}={rate}: {reason}; a lower one starts from the beginning. {newest}{'. ' * bool(newest)}{again}"


def name_diverged(cells: Sequence[str]) -> None:
    """Raises DivergedError that names the cells of a report whose training diverged; does nothing where none did."""
    if cells:
        raise DivergedError(f"{KEY}: too high for {'; '.join(cells)}; the other cells are filled")


def load_task(name: str) -> Any:
    """The module `infini.tasks.<name>.task`: DataModule and evaluate. InputError where the task has no such module."""
    module = f"infini.tasks.{name}.task"
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):
            raise
        raise InputError(f"task={name}: has no module tasks/{name}/task.py; see docs/extending.md") from error


def load_data_module(cfg: Config) -> Any:
    """The LightningDataModule of `cfg.task`, not set up yet."""
    return load_task(cfg.task.name).DataModule(cfg)


def keep_large_buffers() -> None:
    """Tell glibc to keep freed buffers: given back and faulted in again every step they cost a third of the time."""
    if sys.platform.startswith("linux"):
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            for parameter in (-3, -1):  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
                mallopt(parameter, 2**31 - 1)


def check_kind(cfg: Config) -> None:
    """Raise InputError where the task does not take models of this kind."""
    kind = kind_of(cfg.model["name"])
    if kind is not None and cfg.task.kind not in (kind, "any"):
        raise InputError(f"model={cfg.model['name']}: is a {kind}, and task={cfg.task.name} takes a {cfg.task.kind}")


def find_checkpoint(cfg: Config, overrides: list[str], any_model: bool = False) -> Path:
    """The folder of the trained model that `cfg.checkpoint` names, or of the newest run of this task, model and scale.

    A seed or a recipe given on the command line must match too; of several runs those are taken that were trained with
    the settings given. any_model: one that is not named may be any. Raises InputError when there is none.
    """
    if cfg.checkpoint is not None:
        return named_folder("checkpoint", cfg.checkpoint, cfg.results_dir)
    wanted: dict[str, Any] = {"task": cfg.task.name, "model": cfg.model["name"], "scale": cfg.scale.name}
    keys = keys_of(overrides)
    if any_model and not any(key == "model" or key.startswith("model.") for key in keys):
        del wanted["model"]
    if any(text.startswith("seed=") for text in overrides):
        wanted["seed"] = cfg.seed
    runs = [run for run in records.load_records(cfg.results_dir) if run.verb == "train"]
    if any(text.startswith("recipe=") for text in overrides):
        runs = [run for run in runs if run.config["recipe"]["name"] == cfg.recipe.name]
    runs = [run for run in runs if all(getattr(run, key) == value for key, value in wanted.items())]
    runs = [run for run in runs if checkpoint_folder(cfg.results_dir, run.run_id).is_dir()]
    if not runs:
        described = " ".join(f"{key}={value}" for key, value in wanted.items())
        command = f"infini train task={cfg.task.name}" + (f" model={wanted['model']}" if "model" in wanted else "")
        raise InputError(
            f"checkpoint=null: no trained model for {described} in {cfg.results_dir}; train one with `{command}`"
        )
    asked, groups = asdict(cfg), ("model", "dims", "recipe", "optimizer")
    settings = {key: value_at(asked, key) for key in keys if "." in key and key.partition(".")[0] in groups}
    # An option may be asked anew of a model that was trained with another: then the newest will do.
    as_asked = [run for run in runs if all(value_at(run.config, key) == value for key, value in settings.items())]
    return checkpoint_folder(cfg.results_dir, (as_asked or runs)[-1].run_id)


def eval_overrides(cfg: Config, overrides: list[str], held: dict[str, Any]) -> dict[str, Any]:
    """What an evaluation may set otherwise than the training did, for it changes no weight: how an encoder-decoder
    looks at its source. held: the options of the model in the checkpoint. InputError where that would name a training
    that was another."""
    if kind_of(cfg.model["name"]) != "seq2seq" or held["name"] != cfg.model["name"]:
        return {}
    asked = keys_of(overrides)
    anew = {key: cfg.model[key] for key in ("unlimiformer", "k", "search") if f"model.{key}" in asked}
    was, now = held.get("unlimiformer"), anew.get("unlimiformer")
    if now == "alternating" and was != now:
        raise InputError(
            f"model.unlimiformer={now!r}: is another training, and the checkpoint was trained with {was!r}; train it, "
            "or take test, the whole source in evaluations"
        )
    if now == "test" and was == "alternating":
        # In an evaluation the two are one.
        anew["unlimiformer"] = was
    return anew


def settle_contradictions(rows: Mapping[str, Sequence[str]], asked: Sequence[str], console: Console) -> None:
    """Say for which rows of a report a setting that is asked is not used, for they have their own.

    rows: row -> what is set for it alone. Raises InputError where that is so for all rows.
    """
    for text in asked:
        own = {row: own_setting(settings, text) for row, settings in rows.items()}
        having = {row: setting for row, setting in own.items() if setting is not None}
        if having and len(having) == len(rows):
            row, setting = next(iter(having.items()))
            raise InputError(f"{text}: row {row} has {setting}; leave it out, or choose other rows")
        for row, setting in having.items():
            console.print(f"{text}: not for row {row}, which has {setting}", markup=False, soft_wrap=True)


def own_setting(settings: Sequence[str], asked: str) -> str | None:
    """What a row has of its own in place of a setting that is asked; None where it has nothing, or the same."""
    own = {key_of(text): text for text in settings}.get(key_of(asked))
    return None if own == asked.lstrip("+") else own


def keys_of(overrides: list[str]) -> list[str]:
    """The keys that a command line sets, in its order."""
    return [override.lstrip("+").partition("=")[0] for override in overrides]


def asked_of_model(cfg: Config, overrides: list[str], folder: Path) -> dict[str, Any]:
    """The options of a checkpoint's model that a command line sets otherwise than its training did, and may.

    Raises InputError where it names another model, or an option that the weights were trained with.
    """
    description = read_description(folder)
    _refuse_other_training(cfg, overrides, folder, description.get("config") or {})
    named = [key for key in keys_of(overrides) if key == "model" or key.startswith("model.")]
    if not named:
        return {}
    held = description["model"]
    if held["name"] != cfg.model["name"]:
        raise InputError(f"checkpoint={str(folder)!r}: holds {held['name']}; add model={held['name']}")
    anew = eval_overrides(cfg, overrides, held)
    for key in named:
        option = key.removeprefix("model.")
        if key != option and option not in anew and cfg.model[option] != held.get(option):
            raise InputError(f"{key}={cfg.model[option]!r}: the checkpoint was trained with {held.get(option)!r}")
    return anew


def _refuse_other_training(cfg: Config, overrides: list[str], folder: Path, held: Any) -> None:
    """Raise InputError where a command line names a task, a scale, sizes, a recipe or an optimizer that the checkpoint
    was not trained with: nothing of them would be read."""
    asked = asdict(cfg)
    for key in keys_of(overrides):
        group = key.partition(".")[0]
        # Where the texts lie is no property of a model.
        if group not in ("task", "scale", "dims", "recipe", "optimizer") or key in ("task.data_dir", "task.hub_id"):
            continue
        name = f"{key}.name" if key == group else key
        was, now = value_at(held, name), value_at(asked, name)
        if was is not None and now != was:
            raise InputError(f"{key}={now!r}: checkpoint={str(folder)!r} was trained with {was!r}")


def load_tokenizer(folder: Path, description: dict[str, Any]) -> Any:
    """The tokenizer of a checkpoint; InputError where it is not the one the model was trained with."""
    from infini.tasks.text.documents import TextTokenizer

    tokenizer = TextTokenizer.load(folder / TOKENIZER)
    if tokenizer.hash != description.get("tokenizer_hash"):
        raise InputError(f"checkpoint={str(folder)!r}: {TOKENIZER} is not the one the model was trained with")
    return tokenizer


def trained_on(description: dict[str, Any]) -> str:
    """What is to be said with the run id of a model that has seen nothing but made-up text; nothing of any other."""
    made_up = description["config"]["task"].get("data_dir") == "synthetic"
    return " (trained on made-up text: it shows that this runs, and nothing else)" if made_up else ""


def names_a_task(overrides: list[str]) -> bool:
    """Whether a task is named, or something of it set: what is said of one task's data is said of no other's."""
    return any(text.startswith(("task=", "task.")) for text in overrides)


def find_training(cfg: Config, with_model: bool = True) -> RunRecord | None:
    """The newest training run of exactly this configuration, on the data as it is now, whose model is still there.

    with_model: whether it must be; a training that diverged has none, and is not taken in any case. Raises InputError
    when the data cannot be had.
    """
    runs = [
        run
        for run in records.load_records(cfg.results_dir)
        if run.verb == "train"
        and run.diverged is None
        and config_hash(run.config) == config_hash(cfg)
        and (not with_model or checkpoint_folder(cfg.results_dir, run.run_id).is_dir())
        # What was trained as a variant of another report fills no cell of a report without it.
        and (cfg.variant is not None or not run.config.get("variant"))
    ]
    return newest_on_the_data(cfg, runs, "train")


def newest_on_the_data(cfg: Config, runs: Sequence[RunRecord], split: str) -> RunRecord | None:
    """Of runs, oldest first, the newest that read a split of the task as it is now; None where none did."""
    return next(on_the_data(cfg, runs, split), None)


def on_the_data(cfg: Config, runs: Sequence[RunRecord], split: str) -> Iterator[RunRecord]:
    """Of runs, oldest first, those that read a split of the task as it is now, newest first.

    Raises InputError when there are any and the data cannot be had.
    """
    if runs:
        data = load_data_module(cfg)
        yield from (run for run in reversed(runs) if data.has_read(run.data, split))


def _to_be_pasted(verb: str, overrides: Sequence[str]) -> list[str]:
    """The settings of a command line that the verb takes: `infini reproduce` also hands on those of other verbs, and
    some several times, of which the last holds."""
    last = {key_of(text): text for text in overrides}
    return [text for key, text in last.items() if verbs()[verb].reads(key)]


def start_record(
    verb: str, cfg: Config, overrides: list[str], parent: str | None = None, model: str | None = None
) -> RunRecord:
    """A record with everything that is known when a run starts. model: what it is of, where not of cfg.model.

    Raises InputError when results_dir cannot be written: better known now than after the run.
    """
    records.check_writable(cfg.results_dir)
    model = model or str(cfg.model["name"])
    device = pick_device(cfg.parallel.accelerator)
    if slow := emulated_bfloat16(cfg.parallel.precision, device):
        print(slow, file=sys.stderr)
    running = {
        "threads": torch.get_num_threads(),
        "device": device.type,
        # What `auto` came to.
        "bfloat16": uses_bfloat16(cfg.parallel.precision, device),
    }
    return RunRecord(
        run_id=records.new_run_id(verb, cfg.task.name, model, cfg.seed),
        verb=verb,
        task=cfg.task.name,
        model=model,
        scale=cfg.scale.name,
        seed=cfg.seed,
        parent=parent,
        command=shlex.join(["infini", verb, *_to_be_pasted(verb, overrides)]),
        overrides=list(overrides),
        config=asdict(cfg),
        config_hash=config_hash(cfg),
        started=records.utc_now(),
        environment={**records.environment(), **running},
    )
