"""Shared by several commands: a task's data, the checkpoint that a command line selects, and new records."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import shlex
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infini import records
from infini.commands import verbs
from infini.config.compose import cache_folder, config_hash, data_folder
from infini.config.data_files import no_data
from infini.config.schema import Config, given_keys, key_of, settings_in
from infini.errors import InputError
from infini.models import base_of, build_model, check_options, kind_of
from infini.pretrained.base_names import SEGMENT, injected, local_path
from infini.records import RunRecord, value_at
from infini.report.search import LEARNING_RATE
from infini.system.devices import emulated_bfloat16, pick_device, uses_bfloat16
from infini.system.network import is_cached, reachable
from infini.system.paths import is_folder
from infini.training.checkpoint import TOKENIZER, checkpoint_folder, load_model, named_folder, read_description

if TYPE_CHECKING:
    import torch


TRAINING_SPLITS = ("train", "validation")
"""Splits that a training reads."""


def diverged_before(cfg: Config) -> RunRecord | None:
    """The newest recorded training of exactly this configuration, on the current data, that diverged.

    Raises InputError when there is one of this configuration and the data cannot be loaded.
    """
    runs = []
    for path in sorted((Path(cfg.results_dir) / "runs").glob("*-train-*.json")):
        # A damaged record of another training does not stop this one.
        with contextlib.suppress(InputError):
            runs.append(records.read_record(path))
    runs = [run for run in runs if run.diverged is not None and config_hash(run.config) == config_hash(cfg)]
    return newest_on_the_data(cfg, runs, "train")


def describe_divergence(record: RunRecord, results_dir: str, newest: str = "") -> str:
    """Says how a recorded training diverged, and how to repeat it. newest: a sentence on its newest checkpoint."""
    rate, reason = value_at(record.config, LEARNING_RATE), (record.diverged or {}).get("reason")
    again = f"To rerun with this rate, remove {records.record_path(results_dir, record.run_id)}"
    return f"{LEARNING_RATE}={rate}: {reason}; try a lower {LEARNING_RATE}. {newest}{'. ' * bool(newest)}{again}"


def load_task(name: str) -> Any:
    """The module `infini.tasks.<name>.task`, with DataModule and evaluate; InputError where it does not exist."""
    module = f"infini.tasks.{name}.task"
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):
            raise
        raise InputError(f"task={name}: has no module tasks/{name}/task.py; see docs/how-to/extending.md") from error


def load_data_module(cfg: Config) -> Any:
    """The LightningDataModule of `cfg.task`, not set up yet."""
    return load_task(cfg.task.name).DataModule(cfg)


def check_data(cfg: Config, splits: Sequence[str] = ()) -> None:
    """Raises InputError where a folder of data is named and lacks the files of a split; without splits, where it does
    not exist. Raises it for splits also where no folder is named and the hub is neither cached nor reachable."""
    if cfg.task.data_dir == "synthetic" or not cfg.task.reads_data:
        return
    found = data_folder(cfg.task.corpus, cfg.task.data_dir)
    if found is None:
        # A mixture takes the corpora that are there. Whether a task takes an encoder-decoder, whose weights are named,
        # is checked first, with its class.
        checked = splits and not cfg.task.corpora and (cfg.task.kind == "any" or "weights" not in cfg.model)
        if checked and not is_cached(cfg.task.hub_id, cache_folder(cfg, create=False)) and not reachable():
            raise no_data(cfg.task.corpus, cfg.task.data_layout, cfg.task.hub_id, ConnectionError())
        return
    folder, setting = found
    for split in splits or (() if is_folder(folder) else TRAINING_SPLITS[:1]):
        cfg.task.data_files(folder, split, setting)


def check_base(model: Mapping[str, Any]) -> None:
    """Raises InputError where the base among a model's options is a path that does not exist."""
    if "base" in model:
        local_path(str(model["base"]), "model.base")


def keep_large_buffers() -> None:
    """Make glibc keep freed buffers. Returned to the system and faulted in again, they cost a third of every step."""
    if sys.platform.startswith("linux"):
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            for parameter in (-3, -1):  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
                mallopt(parameter, 2**31 - 1)


def check_kind(cfg: Config) -> None:
    """Raise InputError where the task does not support models of this kind."""
    if cfg.task.kind == "language_model" and kind_of(cfg.model["name"]) == "seq2seq":
        raise InputError(
            f"model={cfg.model['name']}: is an encoder-decoder; task={cfg.task.name} needs a language model, for "
            "example model=infini_linear"
        )


def with_base(cfg: Config, overrides: Sequence[str]) -> Config:
    """`cfg` with the sizes and the tokenizer of the pretrained model that it names; `cfg` itself for other models.

    Raises InputError where the command line sets others, an option of the model is wrong, there is no such checkpoint,
    or the pretrained model cannot be read.
    """
    check_base(cfg.model)
    if "base" in cfg.model:
        # Reading a base takes up to a minute.
        check_options(cfg.model)
        if cfg.checkpoint is not None:
            named_folder("checkpoint", cfg.checkpoint, cfg.results_dir)
    base = base_of(cfg.model)
    if base is None:
        return cfg
    sizes, keys = base.sizes(), list(map(key_of, overrides))
    for key in keys:
        group, _, name = key.partition(".")
        if group == "dims" and name in sizes and getattr(cfg.dims, name) != sizes[name]:
            value = getattr(cfg.dims, name)
            raise InputError(f"{key}={value!r}: model={cfg.model['name']} has the sizes of its base; leave it out")
        if key in ("scale.tokenizer", "scale.vocab_size"):
            value = value_at(asdict(cfg), key)
            raise InputError(f"{key}={value!r}: model={cfg.model['name']} has the tokenizer of its base; leave it out")
    given = given_keys(overrides)
    sizes["segment_length"] = segment_length(cfg, given)
    dims = replace(cfg.dims, name="base", **sizes)
    scale = replace(cfg.scale, tokenizer="base", vocab_size=len(base.tokenizer))
    return replace(cfg, dims=dims, scale=scale, model=model_options(cfg, given))


def segment_length(cfg: Config, keys: Collection[str]) -> int:
    """Tokens of a segment: of a pretrained language model those that it was injected with, else SEGMENT, where no key
    says otherwise. keys: of given_keys."""
    usual = settings_in("dims", cfg.dims.name).get("segment_length")
    # The sizes "base" were taken from the base before, and the segment with them.
    asked = "base" not in cfg.model or cfg.dims.name == "base" or {"dims", "dims.segment_length"} & set(keys)
    if asked or usual not in (None, cfg.dims.segment_length):
        return cfg.dims.segment_length
    return int(injected(cfg.model["base"]).get("segment_length", SEGMENT))


def model_options(cfg: Config, keys: Collection[str]) -> dict[str, Any]:
    """The model's options: of a base that has a memory already its own, where no key says otherwise. keys: of
    given_keys."""
    if "base" not in cfg.model or cfg.model["memory"] == "full":
        return cfg.model
    usual, own = settings_in("model", cfg.model["name"]), injected(cfg.model["base"])
    names = ["update_rule", "window", "sinks", "layers"]
    if cfg.model["memory"] == "infini":
        # Without a memory they have no effect.
        names += ["memory_decay", "input_gate"]
    return cfg.model | {
        name: own[name]
        for name in names
        if name in own and f"model.{name}" not in keys and cfg.model[name] == usual.get(name)
    }


def _with_models(cfg: Config) -> Iterator[RunRecord]:
    """The trainings in the results folder whose models still exist, oldest first."""
    for run in records.load_records(cfg.results_dir):
        if run.verb == "train" and checkpoint_folder(cfg.results_dir, run.run_id).is_dir():
            yield run


@dataclass(frozen=True)
class Opened:
    """A model in evaluation mode, with its tokenizer."""

    model: Any
    tokenizer: Any
    name: str
    """Name in messages and saved states: the run id, or, for an untrained model, the base and the options that decide
    what it computes."""
    note: str = ""
    """Text behind the name, which says that the model was trained on synthetic text."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Configuration of its training; empty if there was none."""


def tokenizer_of_base(cfg: Config) -> Any:
    """The tokenizer of the pretrained model of `cfg`."""
    from infini.tasks.text.documents import TextTokenizer

    return TextTokenizer(base_of(cfg.model).backend_tokenizer())


def untrained(cfg: Config, device: torch.device) -> Opened:
    """The pretrained model of `cfg`, of with_base, without any training."""
    base, tokenizer = base_of(cfg.model), tokenizer_of_base(cfg)
    model = build_model(cfg.model, cfg.dims, tokenizer.vocab_size).to(device).eval()
    left_out = ("name", "base", "train", "lora_rank")
    options = [f"{key}={value}" for key, value in cfg.model.items() if key not in left_out]
    name = f"{base.describe()['name']} ({', '.join(options)}, segment_length={cfg.dims.segment_length})"
    return Opened(model, tokenizer, name)


def open_model(cfg: Config, overrides: list[str], folder: Path | None, device: torch.device) -> Opened:
    """The trained model in `folder` with the options on the command line (see model_changes), or if there is no folder
    the pretrained model of `cfg` as it is."""
    if folder is None:
        return untrained(cfg, device)
    model, description = load_model(folder, device, model_changes(cfg, overrides, folder))
    note = ""
    if description["config"]["task"].get("data_dir") == "synthetic":
        note = " (trained on made-up text: it shows that this runs, and nothing else)"
    tokenizer = load_tokenizer(folder, description)
    return Opened(model, tokenizer, str(description["run_id"]), note, description["config"])


def find_model(cfg: Config, overrides: list[str], any_model: bool = False) -> Path | None:
    """The folder of the trained model `cfg.checkpoint`, or of the newest run of this task, model and scale; None for a
    pretrained model that was not trained with exactly these options: it is used as it is. cfg: of with_base.

    A seed or a recipe on the command line must match. Runs that were trained with the given settings are preferred.
    any_model: without a model on the command line, a run of any model matches, a pretrained one too. Raises InputError
    where a model from scratch has no such run.
    """
    if cfg.checkpoint is not None:
        return named_folder("checkpoint", cfg.checkpoint, cfg.results_dir)
    from_base = base_of(cfg.model) is not None
    if from_base and not any(
        (run.task, run.scale, run.config.get("model")) == (cfg.task.name, cfg.scale.name, cfg.model)
        and value_at(run.config, "dims.segment_length") == cfg.dims.segment_length
        for run in _with_models(cfg)
    ):
        return None
    wanted: dict[str, Any] = {"task": cfg.task.name, "model": cfg.model["name"], "scale": cfg.scale.name}
    keys = list(map(key_of, overrides))
    if any_model and not from_base and not any(key == "model" or key.startswith("model.") for key in keys):
        del wanted["model"]
    if "seed" in keys:
        wanted["seed"] = cfg.seed
    runs = [
        run
        for run in _with_models(cfg)
        if all(getattr(run, key) == value for key, value in wanted.items())
        and ("recipe" not in keys or run.config["recipe"]["name"] == cfg.recipe.name)
    ]
    if not runs:
        described = " ".join(f"{key}={value}" for key, value in wanted.items())
        command = f"infini train task={cfg.task.name}" + (f" model={wanted['model']}" if "model" in wanted else "")
        raise InputError(
            f"checkpoint=null: no trained model for {described} in {cfg.results_dir}; train one with `{command}`"
        )
    asked, groups = asdict(cfg), ("model", "dims", "recipe", "optimizer")
    settings = {key: value_at(asked, key) for key in keys if "." in key and key.partition(".")[0] in groups}
    # An evaluation may change an option of the model: then no run matches, and the newest is used.
    matching = [run for run in runs if all(value_at(run.config, key) == value for key, value in settings.items())]
    return checkpoint_folder(cfg.results_dir, (matching or runs)[-1].run_id)


def eval_overrides(cfg: Config, overrides: list[str], trained: dict[str, Any]) -> dict[str, Any]:
    """Model options on the command line that an evaluation may change, because no weight depends on them: how an
    encoder-decoder reads its source. trained: the options in the checkpoint. InputError where a change needs another
    training."""
    if kind_of(cfg.model["name"]) != "seq2seq" or trained["name"] != cfg.model["name"]:
        return {}
    keys = list(map(key_of, overrides))
    changes = {key: cfg.model[key] for key in ("unlimiformer", "k", "search") if f"model.{key}" in keys}
    was, now = trained.get("unlimiformer"), changes.get("unlimiformer")
    if now == "alternating" and was != now:
        raise InputError(
            f"model.unlimiformer={now!r}: needs another training, the checkpoint was trained with {was!r}; train it, "
            "or use test, the whole source in evaluations"
        )
    if now == "test" and was == "alternating":
        # They are the same in an evaluation.
        changes["unlimiformer"] = was
    return changes


def model_changes(cfg: Config, overrides: list[str], folder: Path) -> dict[str, Any]:
    """The model options on the command line that replace those of the checkpoint in `folder`.

    Raises InputError for another model, for an option on which the weights depend, and for settings of task, scale,
    sizes, recipe or optimizer that differ from the training, because they would have no effect.
    """
    description = read_description(folder)
    training, values, keys = description.get("config") or {}, asdict(cfg), list(map(key_of, overrides))
    for key in keys:
        group = key.partition(".")[0]
        # The location of the texts is not a property of a model.
        if group not in ("task", "scale", "dims", "recipe", "optimizer") or key in ("task.data_dir", "task.hub_id"):
            continue
        name = f"{key}.name" if key == group else key
        was, now = value_at(training, name), value_at(values, name)
        if was is not None and now != was:
            raise InputError(f"{key}={now!r}: checkpoint={str(folder)!r} was trained with {was!r}")
    options = [key.removeprefix("model.") for key in keys if key.startswith("model.")]
    if not options and "model" not in keys:
        return {}
    trained = description["model"]
    if trained["name"] != cfg.model["name"]:
        name = trained["name"]
        raise InputError(f"checkpoint={str(folder)!r}: is a checkpoint of {name}; add model={name}")
    changes = eval_overrides(cfg, overrides, trained)
    for option in options:
        if option not in changes and cfg.model[option] != trained.get(option):
            raise InputError(
                f"model.{option}={cfg.model[option]!r}: the checkpoint was trained with {trained.get(option)!r}"
            )
    return changes


def load_tokenizer(folder: Path, description: dict[str, Any]) -> Any:
    """The tokenizer of a checkpoint; InputError where it is not that of the training."""
    from infini.tasks.text.documents import TextTokenizer

    tokenizer = TextTokenizer.load(folder / TOKENIZER)
    if tokenizer.hash != description.get("tokenizer_hash"):
        raise InputError(f"checkpoint={str(folder)!r}: {TOKENIZER} is not the one the model was trained with")
    return tokenizer


def names_a_task(overrides: list[str]) -> bool:
    """Whether a command line chooses a task or sets one of its keys, which then apply to that task only."""
    return any(text.startswith(("task=", "task.")) for text in overrides)


def find_training(cfg: Config, with_model: bool = True) -> RunRecord | None:
    """The newest training run of exactly this configuration, on the current data, that did not diverge.

    with_model: only runs whose model still exists. Raises InputError when the data cannot be loaded.
    """
    wanted = config_hash(cfg)
    runs = [
        run
        for run in (_with_models(cfg) if with_model else records.load_records(cfg.results_dir))
        if run.verb == "train" and run.diverged is None and config_hash(run.config) == wanted and fits_variant(cfg, run)
    ]
    return newest_on_the_data(cfg, runs, "train")


def fits_variant(cfg: Config, run: RunRecord) -> bool:
    """Whether a run may fill a cell of the report of `cfg`: a variant of another report is another model."""
    own = {cfg.variant, *cfg.report.get("former_names", ())} if cfg.variant else ()
    return run.config.get("variant") in {None, *own}


def newest_on_the_data(cfg: Config, runs: Sequence[RunRecord], split: str) -> RunRecord | None:
    """The newest of `runs` (oldest first) that read the current texts of a split; None where none did."""
    return next(on_the_data(cfg, runs, split), None)


def on_the_data(cfg: Config, runs: Sequence[RunRecord], split: str) -> Iterator[RunRecord]:
    """Those of `runs` (oldest first) that read the current texts of a split, newest first.

    Raises InputError when there are any and the data cannot be loaded.
    """
    if runs:
        data = load_data_module(cfg)
        yield from (run for run in reversed(runs) if data.has_read(run.data, split))


def is_up_to_date(cfg: Config, overrides: list[str], run_id: str) -> bool:
    """Whether a run of `cfg` need not be repeated: its record exists, for a training its model, too, and the texts that
    it read are unchanged. An evaluation that names no checkpoint must be of the model that it would take now."""
    try:
        run = records.read_record(records.record_path(cfg.results_dir, run_id))
        if run.verb == "train" and not checkpoint_folder(cfg.results_dir, run_id).is_dir():
            return False
        of_a_model = run.verb == "eval" and getattr(cfg.task, "reference", None) is None
        if of_a_model and cfg.checkpoint is None and run.parent != _model_now(cfg, overrides):
            return False
        # An evaluation reads the data that its training names.
        cfg = replace(cfg, task=type(cfg.task)(**run.config["task"]))
        split = run.data.get("split")
        return split is None or newest_on_the_data(cfg, [run], split) is not None
    except InputError:
        # A record that is gone or damaged, or data that cannot be loaded: the run itself says what is wrong.
        return False


def _model_now(cfg: Config, overrides: list[str]) -> str | None:
    """Run id of the training whose model an evaluation of `cfg` takes; None for a pretrained model as it is."""
    folder = find_model(with_base(cfg, overrides), overrides)
    return None if folder is None else str(read_description(folder)["run_id"])


def settings_of(verb: str, overrides: Sequence[str]) -> list[str]:
    """The settings of a command line that a verb reads.

    `infini reproduce` also passes settings of other verbs, and may set a key several times; the last one counts.
    """
    last = {key_of(text): text for text in overrides}
    return [text for key, text in last.items() if verbs()[verb].reads(key)]


def start_record(
    verb: str, cfg: Config, overrides: list[str], parent: str | None = None, model: str | None = None
) -> RunRecord:
    """A record with everything known when a run starts. model: replaces the name of cfg.model.

    Raises InputError when results_dir cannot be written, before the run and not after it.
    """
    import torch

    records.check_writable(cfg.results_dir)
    model = model or str(cfg.model["name"])
    device = pick_device(cfg.parallel.accelerator)
    if slow := emulated_bfloat16(cfg.parallel.precision, device):
        print(slow, file=sys.stderr)
    running = {
        "threads": torch.get_num_threads(),
        "device": device.type,
        # The choice that `auto` made.
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
        command=shlex.join(["infini", verb, *settings_of(verb, overrides)]),
        overrides=list(overrides),
        config=asdict(cfg),
        config_hash=config_hash(cfg),
        started=records.utc_now(),
        environment={**records.environment(), **running},
    )
