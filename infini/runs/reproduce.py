"""`infini reproduce`: run what a report still needs, then print it. A stopped reproduction resumes when run again.

The same command may be started several times with one results folder: the processes share its runs (workers.py).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from rich.console import Console

from infini import records
from infini.config.compose import compose, config_identity
from infini.config.schema import Config, given_keys, key_of
from infini.errors import BusyError, DivergedError, InputError
from infini.records import RunRecord
from infini.report.load import load_report, report_of_runs
from infini.report.search import LEARNING_RATE
from infini.runs import table
from infini.runs.common import (
    check_base,
    check_data,
    describe_divergence,
    diverged_before,
    eval_overrides,
    find_training,
    fits_variant,
    model_options,
    on_the_data,
    segment_length,
)
from infini.runs.evaluate import evaluate
from infini.runs.workers import Worker, describe
from infini.system.progress import plain_console
from infini.training.checkpoint import checkpoint_folder
from infini.training.loggers import check_logger


def run(cfg: Config, overrides: list[str], seeds: list[int], models: Sequence[str] = ()) -> int:
    """Run what is missing for the report and every seed, then print the table. With cfg.plan print what is missing.

    models: only rows of these are run; all rows if there are none. Runs with a record in results_dir are not repeated.
    Each kind of report has a `reproduce`, which runs what its rows still need.
    """
    console = plain_console()
    report = load_report(cfg.report)
    if "reproduce" not in report.verbs:
        report = report_of_runs(cfg.report, "reproduce")
    if report.parts and cfg.task.name not in (tasks := [part.task for part in report.parts]):
        # Otherwise it is the default of every command, because the report's YAML does not choose its own.
        typed = any(key_of(text) == "task" for text in overrides)
        hint = f"; add task={tasks[0]}, or choose it in the defaults of conf/report/{report.name}.yaml"
        about = f"report={report.name} is about task={' or '.join(tasks)}"
        raise InputError(f"task={cfg.task.name}: {about}{'' if typed else hint}")
    if not cfg.plan:
        records.check_writable(cfg.results_dir)
    check_logger(cfg.logger.name)
    check_base(cfg.model)
    check_data(cfg)
    if not cfg.plan and (environment := records.environment()).get("git_dirty"):
        what = f"uncommitted changes in the source tree{records.describe_changes(environment)}"
        console.print(f"{what}: what is run now cannot be published", style="yellow", soft_wrap=True)
    report = report.limited_to(models)
    work = importlib.import_module(report.verbs["reproduce"].module)
    worker = Worker(console, cfg.plan)
    work.reproduce(report, cfg, overrides, seeds, worker, models)
    if cfg.plan:
        lines = plain_console(stderr=False)
        for line in describe(worker, cfg.results_dir):
            lines.print(line)
        return 0
    table.show(report, cfg, overrides)
    if worker.diverged:
        raise DivergedError(f"{LEARNING_RATE}: too high for {'; '.join(worker.diverged)}; the other cells are filled")
    return 0


def check_row_settings(
    own: Mapping[str, Sequence[str]], trained: Mapping[str, bool], asked: Sequence[str], console: Console
) -> None:
    """Print which rows of a report ignore a setting of the command line: those with their own value of it, and those
    without a training that reads it.

    own: row -> its own settings. trained: row -> whether it has a training with the recipe and the optimizer of the
    command line. Raises InputError where this leaves no row: the setting would change nothing.
    """
    for text in asked:
        of_training = key_of(text).partition(".")[0] in ("optimizer", "recipe", "tuned")
        settings = {row: own_setting(words, text) for row, words in own.items()}
        has_own = {row: f"has {setting}" for row, setting in settings.items() if setting is not None}
        unread = {row: "has no training that reads it" for row, has in trained.items() if of_training and not has}
        for not_for, rows in ((has_own, own), (unread, trained)):
            if not_for and len(not_for) == len(rows):
                row, why = next(iter(not_for.items()))
                raise InputError(f"{text}: row {row} {why}; leave it out, or choose other rows")
            for row, why in not_for.items():
                console.print(f"{text}: not for row {row}, which {why}")


def own_setting(settings: Sequence[str], asked: str) -> str | None:
    """The row's own setting of the same key; None where it has none, or the same."""
    own = {key_of(text): text for text in settings}.get(key_of(asked))
    return None if own == asked.lstrip("+") else own


def run_jobs(jobs: Sequence[tuple[str, Callable[[], str]]], worker: Worker) -> None:
    """Do all jobs, or plan them. A job whose training diverges does not stop the others.

    jobs: a heading and a function that returns a line to print.
    """

    def do(number: int, where: str, make: Callable[[], str]) -> None:
        if not worker.planning:
            worker.console.rule(f"{number} of {len(jobs)}: {where}")
        try:
            worker.say(make())
        except BusyError:
            worker.say("another process runs this; continuing with the other runs")
            raise
        except DivergedError as error:
            worker.diverged[where] = str(error)
            worker.say(str(error), style="yellow")

    worker.do_all([(where, partial(do, number, where, make)) for number, (where, make) in enumerate(jobs, 1)])


def trained(cfg: Config, overrides: list[str], worker: Worker) -> RunRecord:
    """A training of this configuration: the newest on record whose model still exists, or a new one. overrides:
    composed to `cfg`.

    Raises DivergedError where the training diverges, or a record says that it did.
    """

    def make() -> RunRecord:
        from infini.runs.train import train

        made = train(cfg, overrides)
        assert made is not None
        return made

    found = find_training(cfg)
    if found is None:
        if worker.planning and (before := diverged_before(cfg)) is not None:
            # A training is not repeated, and says so itself.
            raise DivergedError(describe_divergence(before, cfg.results_dir), record=before)
        return worker.make("train", cfg, cfg.init_from, lambda: find_training(cfg), make)
    worker.say(f"trained before: {found.run_id}")
    return found


def learned(
    cfg: Config, overrides: list[str], worker: Worker
) -> tuple[RunRecord | None, Callable[[], RunRecord | None]]:
    """The arguments of `fill` for the training of this configuration. overrides: composed to `cfg`."""
    return find_training(cfg, with_model=False), partial(trained, cfg, overrides, worker)


def fill(
    cfg: Config,
    overrides: list[str],
    worker: Worker,
    find: Callable[[RunRecord | None], RunRecord | None],
    on_record: RunRecord | None = None,
    train: Callable[[], RunRecord | None] = lambda: None,
    missing: Callable[[RunRecord | None], list[str]] | None = None,
) -> RunRecord:
    """The evaluation that fills a cell: one on record, or a new one.

    Args:
        cfg, overrides: of the evaluation.
        worker: makes what is missing, or plans it.
        find: the evaluation on record of a training's model; of None: of the pretrained model as it is.
        on_record: the newest training of the cell's model. A cell that is filled does not need the model any more.
        train: finds a training whose model still exists, or makes one; None for the pretrained model as it is.
        missing: overrides of an evaluation of only what the evaluations on record lack.
    """
    if on_record is not None and (found := find(on_record)) is not None:
        worker.say(f"trained before: {on_record.run_id}")
        return found
    training = train()
    parent = None if training is None else training.run_id

    def make() -> RunRecord:
        folder = None if parent is None else checkpoint_folder(cfg.results_dir, parent)
        if missing is None:
            return evaluate(cfg, overrides, folder)
        words = missing(training)
        return evaluate(compose(words), words, folder)

    return find(training) or worker.make("eval", cfg, parent, lambda: find(training), make)


def evaluations(cfg: Config, overrides: list[str], training: RunRecord | None, split: str) -> list[RunRecord]:
    """Evaluations on record of this training, or without one of the pretrained model as it is, on the current texts of
    a split, newest first.

    They are of the task, seed, scale, precision, sizes and options of the model that an evaluation of `cfg` would have.
    Keys that only evaluations read are for the caller to compare. overrides: composed to `cfg`.
    """
    parent, made = (None if training is None else training.run_id), asdict(cfg)
    runs = [run for run in records.load_records(cfg.results_dir) if run.verb == "eval" and run.parent == parent]
    if runs and training is not None:
        changes = eval_overrides(cfg, overrides, training.config["model"])
        made |= {"model": training.config["model"] | changes, "seed": training.seed}
        own = {"segment_length"} if "dims.segment_length" in given_keys(overrides) else set()
        made["dims"] = training.config["dims"] | {key: made["dims"][key] for key in own}
    elif runs:
        keys = given_keys(overrides)
        made["dims"]["segment_length"] = segment_length(cfg, keys)
        made["model"] = model_options(cfg, keys)
    wanted, model = _evaluation_identity(made), made["model"]["name"]
    fitting = [
        run
        for run in runs
        if run.model == model and _evaluation_identity(run.config) == wanted and fits_variant(cfg, run)
    ]
    return list(on_the_data(cfg, fitting, split))


def _evaluation_identity(config: Mapping[str, Any]) -> dict[str, Any]:
    """The questions of a configuration, and the model that it asks. Recipe and optimizer belong to the training."""
    identity = config_identity(config)
    return {key: identity.get(key) for key in ("task", "model", "dims", "scale", "parallel", "seed")}
