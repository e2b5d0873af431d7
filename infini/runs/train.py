"""`infini train`: train a model, save it, write its record."""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import os
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from infini import records
from infini.config.compose import config_hash
from infini.config.schema import Config, key_of, settings_in
from infini.errors import DivergedError, InputError, first_line, one_of, too_large
from infini.evaluation.decoding import fingerprint
from infini.models import build_model
from infini.nn.protocols import optional
from infini.pretrained.seq2seq import Seq2Seq
from infini.report.tables import counted
from infini.runs.common import (
    check_kind,
    describe_divergence,
    diverged_before,
    find_training,
    keep_large_buffers,
    load_data_module,
    settings_of,
    start_record,
    with_base,
)
from infini.runs.preflight import check_optimizer
from infini.system.devices import begin_peak_memory, peak_memory_bytes, pick_device, uses_bfloat16
from infini.system.process import as_interrupt, redirected_interrupts
from infini.system.progress import duration, plain_console, warn
from infini.training.checkpoint import (
    TOKENIZER,
    checkpoint_folder,
    load_weights,
    named_folder,
    read_description,
    save_model,
)
from infini.training.compiled import check_compiler, compile_layers, uncompiled_by
from infini.training.launcher import check_shares
from infini.training.loggers import check_logger, close_loggers, labels_of, make_logger
from infini.training.module import LanguageModelModule
from infini.training.ranks import SINGLE_RANK, Ranks, is_lost, joined, ranks_of
from infini.training.resume import PlainFiles, SaveCheckpoints, UnfinishedRun, describe_checkpoint, step_of
from infini.training.strategies import ReplicatedModel, ShardedModel, whole
from infini.training.trainer import ignored_variables, make_trainer, without_launcher
from infini.training.training_curves import TrainingCurves, log_results

HIGHEST_LOSS = math.log(sys.float_info.max)
"""The highest loss in nats per token whose perplexity does not overflow a float."""


def run(cfg: Config, overrides: list[str]) -> int:
    """Train, write model and record, and print their paths."""
    record = train(cfg, overrides, launched=True)
    if record is not None:
        places = checkpoint_folder(cfg.results_dir, record.run_id), records.record_path(cfg.results_dir, record.run_id)
        print(f"model: {places[0]}\nrecord: {places[1]}", file=sys.stderr)
    return 0


# Slurm announces the end of a job's time with the signal that was asked for; submitit asks for the second.
@as_interrupt("SIGUSR1", unless_handled=True)
@as_interrupt("SIGUSR2", unless_handled=True)
def train(cfg: Config, overrides: list[str], launched: bool = False) -> records.RunRecord | None:
    """Train a model of `cfg`, save it below `<results_dir>/checkpoints/<run id>` and write its record.

    A training that was stopped resumes from its last checkpoint when the same configuration is started again. With
    several devices the other processes are started here, unless torchrun may have started this one (launched); None in
    a process of another rank than 0.
    Raises InputError when the data cannot be loaded or the configuration does not fit. Raises DivergedError, with the
    record, when the training diverges, or when a record says that it did.
    """
    check_kind(cfg)
    cfg = with_base(cfg, overrides)
    device = pick_device(cfg.parallel.accelerator)
    ranks = ranks_of(cfg.parallel, device, launched)
    check_shares(cfg, ranks.size)
    check_optimizer(cfg)
    # Checked before an hour of tokenization, not after it.
    records.check_writable(cfg.results_dir)
    _check_model(cfg)
    if ranks.rank == 0 and (before := diverged_before(cfg)) is not None:
        raise DivergedError(describe_divergence(before, cfg.results_dir), record=before)
    _quiet()
    keep_large_buffers()
    _check_strategy(cfg, device)
    check_compiler(cfg, device)
    check_logger(cfg.logger.name)
    if device.type == "cuda":
        device = torch.device("cuda", ranks.local_rank)
    training: _Training | None = None
    with _silent(ranks):
        try:
            with joined(ranks, settings_of("train", overrides), device):
                training = _prepare(cfg, overrides, device, ranks, launched)
                resumed = training.fit()
            if ranks.rank > 0:
                return None
            try:
                training.keep(resumed)
                return training.record
            except KeyboardInterrupt as stopped:
                again = "stopped after the last step: the same command resumes from there"
                raise KeyboardInterrupt(again) from stopped
        except DivergedError as error:
            if training is None or ranks.rank > 0:
                raise
            raise training.keep_diverged(error) from error
        finally:
            close_loggers()
            if training is not None:
                training.unfinished.release()


def _check_model(cfg: Config) -> None:
    """Raise InputError for options, sizes and stages that the model refuses. A pretrained model is not made here: that
    takes up to a minute, and with_base has checked its options."""
    if "base" not in cfg.model and cfg.model.get("weights") is None:
        # A user's model may read a tensor while it is made, which has no values here.
        with contextlib.suppress(RuntimeError), torch.device("meta"):
            _check_stages(cfg, build_model(cfg.model, cfg.dims, cfg.scale.vocab_size))


def _check_stages(cfg: Config, model: Any) -> None:
    """Raise InputError for a stage of the curriculum whose segments the model refuses. It keeps its own in the end."""
    for segment_length, *_ in cfg.recipe.curriculum or ():
        try:
            model.resize_segments(segment_length)
        except ValueError as error:
            raise InputError(f"recipe.curriculum={cfg.recipe.curriculum}: {error}") from error
    model.resize_segments(cfg.dims.segment_length)


def _prepare(cfg: Config, overrides: list[str], device: torch.device, ranks: Ranks, launched: bool) -> _Training:
    """Load the data, make the model and find what an earlier process left. launched: see train."""
    begin_peak_memory(device)
    console = plain_console()
    data = load_data_module(cfg)
    # One process tokenizes what is not in the cache yet.
    ranks.first_alone(lambda: data.setup("fit"))
    lightning.seed_everything(cfg.seed, verbose=False)
    model = build_model(cfg.model, cfg.dims, data.tokenizer.vocab_size)
    if any(p.requires_grad and p.dtype == torch.bfloat16 for p in model.parameters()):
        raise InputError(
            f"model.dtype='bfloat16': its rounding removes most steps of model.train={cfg.model['train']}; set "
            "model.dtype=float32 (parallel.precision=bf16 still multiplies in bfloat16), or model.train=lora or gates"
        )
    _say_what_has_no_effect(cfg, overrides, model, console)
    _check_stages(cfg, model)
    model.checkpoint_activations = cfg.recipe.checkpoint_activations
    # transformers loads a base in evaluation mode, in which it never computes activations again. Trainers leave modes
    # as they are.
    model.train()
    if isinstance(model, Seq2Seq) and (summary_tokens := getattr(cfg.task, "summary_tokens", None)) is not None:
        model.check_target("task.summary_tokens", summary_tokens)
    if cfg.init_from is None and cfg.recipe.name.endswith("_finetune") and "base" not in cfg.model:
        warn(
            console,
            f"recipe={cfg.recipe.name} is made for a trained model, and init_from is not set: training from scratch",
        )
    start = None if cfg.init_from is None else _start_from(cfg, overrides, model, data.tokenizer.hash)
    record = start_record("train", cfg, overrides)
    if start is not None:
        record.environment["started_from"] = start["run_id"]
    if ranks.size > 1:
        record.environment["ranks"] = ranks.size
    record.environment["compiled"] = compile_layers(cfg, model, device)
    running, parameters = record.environment, sum(p.numel() for p in model.parameters())
    if launched and ranks.rank == 0:
        # A damaged record of another training does not stop this one.
        with contextlib.suppress(InputError):
            if (before := find_training(cfg, with_model=False)) is not None:
                console.print(
                    f"trained before: {before.run_id}; this trains the same model once more (infini eval takes the "
                    f"newest; checkpoint={before.run_id} is that one)"
                )
    threads = counted(running["threads"], "thread")
    workers = threads if ranks.size == 1 else f"{ranks.size} processes of {threads}"
    about = (
        f"{parameters:,} parameters on {running['device']}, {workers}, "
        f"matrix products in {'bfloat16' if running['bfloat16'] else 'float32'}"
    )
    if record.environment["compiled"]:
        what = f"model={cfg.model['name']}: its layers are compiled at the first step, which takes half a minute"
        console.print(what)
    products = torch.bfloat16 if running["bfloat16"] else torch.float32
    parallel = (ranks, cfg.parallel.accumulate, ranks.sequence_group(), products)
    try:
        module = LanguageModelModule(model, cfg.optimizer, cfg.recipe, cfg.task.carry_state, cfg.seed, *parallel)
    except ValueError as error:
        raise InputError(f"parallel.sequence={ranks.sequence}: {error}") from error
    # The corpus and the weights that the training begins with are part of the name: a training never resumes with other
    # books or another vocabulary, or where another model led.
    named = [config_hash(cfg), data.identity]
    if start is not None:
        named.append(str(start["weights_sha256"])[:8])
    elif "base" in cfg.model:
        # Other weights may have been saved under the base's name.
        named.append(fingerprint(model)[:8])
    unfinished = UnfinishedRun(Path(cfg.results_dir) / "unfinished" / "-".join(named))
    return _Training(cfg, module, data, device, ranks, unfinished, record, about, console)


@contextlib.contextmanager
def _silent(ranks: Ranks) -> Iterator[None]:
    """Inside the block, nothing is printed by other ranks than 0, which reports for all what stops a training."""
    if ranks.rank == 0:
        yield
        return
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            try:
                yield
            except (KeyboardInterrupt, DivergedError) as error:
                raise SystemExit(1) from error
            except RuntimeError as error:
                if is_lost(error):
                    raise SystemExit(1) from error
                raise


@dataclass
class _Training:
    """The parts of a training."""

    cfg: Config
    module: LanguageModelModule
    data: Any
    device: torch.device
    ranks: Ranks
    unfinished: UnfinishedRun
    record: records.RunRecord
    about: str
    """The model and what computes it, in words."""
    console: Console
    loggers: Sequence[Any] = ()

    def fit(self) -> bool:
        """Train to the end, from the last checkpoint if there is one; returns whether there is."""
        cfg, module, console, ranks = self.cfg, self.module, self.console, self.ranks
        point = ranks.agreed(self._claim() if ranks.rank == 0 else None)
        # Here, because a training that resumes has the id of the one that was stopped.
        console.print(f"{self.record.run_id}: {self.about}")
        if point is not None:
            step = f"step {step_of(point):,} of {cfg.recipe.steps:,}"
            console.print(f"resuming from {step} ({point.parent})")
        if variables := ignored_variables():
            warn(console, f"{', '.join(variables)}: ignored; the configuration alone decides a training")
        saving = SaveCheckpoints(self.unfinished, cfg.recipe.save_every, point, ranks)
        trainer = _trainer(cfg, self.device, ranks, self.record, saving)
        self.loggers = trainer.loggers
        given = {"datamodule": self.data, "ckpt_path": None if point is None else str(point)}
        try:
            with (
                without_launcher() if ranks is SINGLE_RANK else contextlib.nullcontext(),
                redirected_interrupts(saving.ask_to_stop) as saving.take_signals,
            ):
                trainer.fit(module, **given, weights_only=True)
            module.read_losses()
        except SystemExit:
            if not trainer.interrupted:
                raise
        except InputError:
            raise
        except (RuntimeError, ValueError, TypeError, KeyError, AttributeError) as error:
            # A machine without room for the checkpoint says nothing against it, nor does a process that has ended.
            lost = isinstance(error, RuntimeError) and is_lost(error)
            if point is None or saving.started or too_large(error) or lost:
                raise
            raise InputError(
                f"{point}: does not fit this version of infini or of its packages ({first_line(error)}); remove "
                f"{point.parent} to start this training again"
            ) from error
        if trainer.interrupted or saving.stopping:
            effect = "starts again" if saving.newest_step is None else "resumes from it"
            newest = describe_checkpoint(saving.newest_step)
            raise KeyboardInterrupt(f"stopped after step {module.global_step}. {newest}: the same command {effect}")
        if not trainer.global_step == len(module.loss_curve) == cfg.recipe.steps:
            raise InputError(
                f"recipe.steps={cfg.recipe.steps}: the training ended after {trainer.global_step} optimizer steps on "
                f"{len(module.loss_curve)} batches, so nothing is recorded. {describe_checkpoint(saving.newest_step)}"
            )
        if module.sharded:
            weights = whole(module.model.state_dict())
            module.model = build_model(cfg.model, cfg.dims, self.data.tokenizer.vocab_size)
            module.model.load_state_dict(weights)
        return point is not None

    def _claim(self) -> Path | None:
        """Take up what an earlier process of this training left: its newest checkpoint, if there is one."""
        if self.unfinished.claim(self.record):
            warn(self.console, f"{self.record.run_id} was started at another commit: no single commit reproduces it")
        if products := self.record.environment.get("products"):
            what = f"was started with matrix products in {products[0]}: no single machine reproduces it"
            warn(self.console, f"{self.record.run_id} {what}")
        point, damaged = self.unfinished.newest()
        for path in damaged:
            warn(self.console, f"{path}: damaged, skipped")
        return point

    def keep(self, resumed: bool) -> None:
        """Validate, save the model, write the record, and remove the checkpoints of the training."""
        cfg, module, record, tokenizer = self.cfg, self.module, self.record, self.data.tokenizer
        seconds = module.seconds
        # Gradients and the optimizer's state, which the trainer holds, are three times the weights.
        module.zero_grad()
        module.trainer = self.data.trainer = None
        gc.collect()
        model = module.model.to(self.device).eval()
        record.results = self.data.validate(model, self.device)
        _check_validation(record.results, cfg.recipe.steps)
        log_results(self.loggers, record.results, cfg.recipe.steps)
        self._describe(seconds)
        record.cost |= {
            "resumed": resumed,
            "tokens_per_second": module.tokens_seen / seconds,
            "state_floats": model.state_floats(cfg.recipe.segments_per_sequence),
            "xl_cache": optional(model, "xl_cache"),
        }
        record.series["in_last_stage"] = module.in_last_stage
        if not module.in_last_stage:
            warn(
                self.console,
                f"the curriculum stopped at stage {module.stage + 1} of {len(cfg.recipe.curriculum or ()) + 1}: its "
                f"loss never fell below recipe.advance_below={cfg.recipe.advance_below}; increase recipe.steps",
            )
        if (gates := optional(model, "gates")()) is not None:
            record.series["gates"] = gates
        folder = checkpoint_folder(cfg.results_dir, record.run_id)
        tokenizer.save(folder / TOKENIZER)
        description = {
            "run_id": record.run_id,
            "model": cfg.model,
            "dims": asdict(cfg.dims),
            "vocab_size": tokenizer.vocab_size,
            "task": cfg.task.name,
            "config": asdict(cfg),
            "tokenizer_hash": tokenizer.hash,
        }
        save_model(folder, model, description)
        records.write_record(record, cfg.results_dir)
        self.unfinished.clear()
        name, result = next(iter(record.results.items()))
        self.console.print(
            f"trained {record.run_id}: {module.tokens_seen:,} tokens in {seconds:.0f} s, "
            f"{name.replace('_per_token', '').replace('_', ' ')} {result['value']:.4f} {result['unit']}"
            f"{' (made-up text)' if record.synthetic else ''}"
        )

    def keep_diverged(self, error: DivergedError) -> DivergedError:
        """Write the record of a training that diverged, so that it is not repeated. Its checkpoints stay: if the record
        is removed, the same command resumes from the last one. Returns what is to be raised."""
        self.record.results = {}
        self._describe(self.module.seconds)
        self.record.diverged = {"step": error.step, "reason": str(error)}
        records.write_record(self.record, self.cfg.results_dir)
        newest = self.unfinished.newest_step()
        if newest is None:
            self.unfinished.clear()
        said = describe_divergence(self.record, self.cfg.results_dir, describe_checkpoint(newest))
        return DivergedError(said, error.step, self.record)

    def _describe(self, seconds: float) -> None:
        """Fill the record with what every training has, whether it diverged or not."""
        module = self.module
        self.record.data = self.data.data_record("train")
        self.record.cost = {
            "wall_seconds": seconds,
            "peak_memory_bytes": peak_memory_bytes(self.device),
            "tokens_seen": module.tokens_seen,
            "parameters": sum(p.numel() for p in module.model.parameters()),
        }
        self.record.series = {"loss_curve": module.loss_curve, "stage_steps": module.stage_steps}
        if module.recall_curve:
            self.record.series["recall_curve"] = module.recall_curve


def _check_validation(results: dict[str, dict[str, Any]], step: int) -> None:
    """Raises DivergedError for a result that is not finite, or a loss whose perplexity overflows a float."""
    for name, entry in results.items():
        value = math.inf if entry["value"] is None else entry["value"]
        if not math.isfinite(value) or (entry["unit"].startswith("nats") and value > HIGHEST_LOSS):
            shown = f"{name.replace('_', ' ')} is {value:.6g} {entry['unit']}"
            raise DivergedError(f"after the last step, {step}, the {shown}, whose perplexity is not finite", step)


def _say_what_has_no_effect(cfg: Config, overrides: list[str], model: Any, console: Console) -> None:
    """Print a line for each key on the command line that changes nothing for this model or task, or beside other
    settings. It is no error: models are compared with the same words."""
    task, name = f"task={cfg.task.name}", f"model={cfg.model['name']}"
    is_a_sum, extension = optional(model, "memory_is_a_sum"), cfg.recipe.length_extension
    # A model to start from has a tokenizer of its own, whatever the task names.
    of_words = getattr(cfg.task, "tokenizer", None) == "words" and cfg.init_from is None
    uncompiled = uncompiled_by(cfg, model) if cfg.parallel.compile == "always" else None
    idle = {
        "recipe.excerpt_tokens": (not cfg.task.has_documents, task),
        "recipe.length_extension": (not is_a_sum, name),
        "recipe.length_extension_share": (
            not is_a_sum or extension is None,
            name if extension is not None else "recipe.length_extension=null",
        ),
        "recipe.sparse_writes": (not optional(model, "memory_layers"), name),
        "recipe.final_lr_fraction": (cfg.recipe.schedule == "constant", "recipe.schedule=constant"),
        "optimizer.betas": (cfg.optimizer.name == "adafactor", "optimizer=adafactor"),
        "scale.tokenizer": (of_words, "task.tokenizer=words"),
        "scale.vocab_size": (of_words, "task.tokenizer=words"),
        "parallel.compile": (uncompiled is not None, uncompiled),
    }
    for key in dict.fromkeys(map(key_of, overrides)):
        has_no_effect, other = idle.get(key, (False, ""))
        value = records.value_at(asdict(cfg), key)
        if value is not None and has_no_effect:
            warn(console, f"{key}={value}: has no effect with {other}")


def _start_from(cfg: Config, overrides: Sequence[str], model: torch.nn.Module, tokenizer_hash: str) -> dict[str, Any]:
    """Fill the model with the weights that cfg.init_from names -> their description."""
    assert cfg.init_from is not None
    folder = named_folder("init_from", cfg.init_from, cfg.results_dir)
    description = read_description(folder, "init_from")
    if description.get("tokenizer_hash") != tokenizer_hash:
        raise InputError(
            f"init_from={cfg.init_from!r}: was trained with another tokenizer; use the texts, scale.tokenizer and "
            "scale.vocab_size of that run, or choose another run"
        )
    _check_start(cfg, overrides, description)
    load_weights(model, folder, description, "init_from")
    return description


def _check_start(cfg: Config, overrides: Sequence[str], description: dict[str, Any]) -> None:
    """Raises InputError where the weights were trained with other options than the model is to have now, unless the
    command line names the option. Weights fit that were trained with another activation, scale or update rule."""
    now, before = (
        {**model, **{name: dims.get(name) for name in _OF_DIMS}}
        for model, dims in ((cfg.model, asdict(cfg.dims)), (description["model"], description["dims"]))
    )
    if "base" in now:
        kinds = {now["memory"], before.get("memory")}
        names = ["memory"]
        if "full" not in kinds:
            names += ["window", "sinks", "layers", "segment_length"]
        if kinds == {"infini"}:
            names += ["update_rule", "memory_decay", "input_gate"]
    else:
        # Where a value follows from other settings, as a window of the training's length, so does the difference.
        usual = settings_in("model", cfg.model["name"])
        names = [name for name in cfg.model if name in before and not str(usual.get(name)).startswith("${")]
        names += ["n_heads", "n_kv_heads", "d_key"]
    for name in names:
        key = f"{'dims' if name in _OF_DIMS else 'model'}.{name}"
        # Older checkpoints lack newer options.
        was, value = before.get(name), now[name]
        if was != value and key not in map(key_of, overrides):
            was, value = ("null" if each is None else each for each in (was, value))
            raise InputError(
                f"init_from={cfg.init_from!r}: was trained with {key}={was}, this training has {value}; add "
                f"{key}={was}, or {key}={value} to change it"
            )


_OF_DIMS = ("segment_length", "n_heads", "n_kv_heads", "d_key")


def _place(cfg: Config, device: torch.device, ranks: Ranks = SINGLE_RANK) -> dict[str, Any]:
    """The arguments of a Trainer that set where a training runs."""
    made = {"ddp": ReplicatedModel, "fsdp2": lambda: ShardedModel(ranks.size)}.get(cfg.parallel.name)
    return {
        "accelerator": "gpu" if device.type == "cuda" else "cpu",
        "devices": ranks.local_size,
        "num_nodes": ranks.nodes,
        "strategy": cfg.parallel.strategy if made is None else made(),
    }


def _check_strategy(cfg: Config, device: torch.device) -> None:
    """Raises InputError for a strategy that Lightning does not have, or that does not work here."""
    if cfg.parallel.strategy == "auto":
        return
    one_of("parallel.strategy", cfg.parallel.strategy, ("auto", *StrategyRegistry.available_strategies()))
    try:
        made = make_trainer(**_place(cfg, device), logger=False, enable_checkpointing=False, enable_model_summary=False)
        if isinstance(made.strategy.launcher, _MultiProcessingLauncher):
            raise ValueError("it starts processes, and a training is one process")
    except (ValueError, TypeError, ImportError, MisconfigurationException) as error:
        reason = first_line(error)
        needs_gpu = device.type == "cpu" and "requires a GPU" in reason
        what = "needs a GPU" if needs_gpu else f"not available here ({reason})"
        raise InputError(f"parallel.strategy={cfg.parallel.strategy!r}: {what}; use auto") from error


def _trainer(
    cfg: Config, device: torch.device, ranks: Ranks, record: records.RunRecord, saving: SaveCheckpoints
) -> lightning.Trainer:
    callbacks: list[Callback] = [saving]
    logger = False
    if ranks.rank == 0:
        callbacks.append(TrainingProgress(cfg.recipe.steps, Console(stderr=True)))
        logger = make_logger(cfg.logger, Path(cfg.results_dir) / "logs", labels_of(cfg, record))
    # One rank alone cannot read sharded weights.
    if logger and cfg.parallel.name != "fsdp2":
        callbacks.append(TrainingCurves(cfg.logger.validate_every))
    return make_trainer(
        ranks,
        **_place(cfg, device, ranks),
        precision="bf16-mixed" if uses_bfloat16(cfg.parallel.precision, device) else "32-true",
        max_steps=cfg.recipe.steps,
        max_epochs=-1,
        gradient_clip_val=cfg.optimizer.clip_norm,
        callbacks=callbacks,
        plugins=[PlainFiles()],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=logger,
        log_every_n_steps=10,
    )


class TrainingProgress(Callback):
    """Step, loss, tokens a second and time left: a bar on a terminal, elsewhere a line now and then.

    A training that resumes starts at its step; the rate is that of this process.
    """

    def __init__(self, steps: int, console: Console) -> None:
        self.steps, self.console = steps, console
        self.bar: Progress | None = None
        self.started = self.printed = 0.0
        self.first = self.first_tokens = 0
        self.measured = False
        """Whether the time of a step is known: the first one is over."""

    def on_train_start(self, trainer: lightning.Trainer, module: Any) -> None:
        self.started = self.printed = time.perf_counter()
        self.first, self.first_tokens = trainer.global_step, module.tokens_seen
        if self.console.is_terminal:
            self.bar = Progress(BarColumn(), TextColumn("{task.description}"), console=self.console, auto_refresh=False)
            self.bar.start()
            self.bar.add_task(f"step {self.first}/{self.steps}", total=self.steps, completed=self.first)

    def on_train_batch_end(
        self, trainer: lightning.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now, step = time.perf_counter(), trainer.global_step
        prepared, self.measured = self.measured, True
        if not prepared and step < self.steps and now - self.started > 5:
            # The first step includes preparations, as compiling, so that its time is no estimate.
            self._print(
                step, f"step {step}/{self.steps}  loss {module.last_loss:.3f}  after {now - self.started:.0f} s"
            )
            self.started, self.first, self.first_tokens = now, step, module.tokens_seen
            return
        if now - self.printed < (15 if self.bar is None else 0.5) and step < self.steps:
            return
        self.printed = now
        each = (now - self.started) / max(1, step - self.first)
        left = each * (self.steps - step)
        rate = (module.tokens_seen - self.first_tokens) / max(now - self.started, 1e-9)
        line = f"step {step}/{self.steps}  loss {module.last_loss:.3f}  {rate:,.0f} tokens/s  {duration(left)} left"
        self._print(step, line)

    def _print(self, step: int, line: str) -> None:
        if self.bar is None:
            self.console.print(line, highlight=False)
        else:
            self.bar.update(self.bar.task_ids[0], completed=step, description=line, refresh=True)

    def on_train_end(self, trainer: lightning.Trainer, module: Any) -> None:
        if self.bar is not None:
            self.bar.stop()

    def on_exception(self, trainer: lightning.Trainer, module: Any, exception: BaseException) -> None:
        self.on_train_end(trainer, module)


def _quiet() -> None:
    # Lightning's hints about workers and loggers address programmers, not users of a command.
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
