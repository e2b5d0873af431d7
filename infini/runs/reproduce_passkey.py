"""Runs of `infini reproduce` for a passkey table: each row's training, its start, and its evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from infini.config.compose import compose, config_hash
from infini.config.lengths import parse_depths, parse_lengths
from infini.config.schema import Config, key_of, settings_in
from infini.errors import InputError
from infini.records import RunRecord, value_at
from infini.report.passkey import PasskeyReport, PasskeyRow, declared_options, pretraining_tasks
from infini.runs.common import check_data, find_training
from infini.runs.estimate import describe_time
from infini.runs.reproduce import check_row_settings, evaluations, fill, run_jobs, trained
from infini.runs.workers import Worker
from infini.system.devices import pick_device


@dataclass(frozen=True)
class _Job:
    """One row at one seed."""

    task: str
    row: PasskeyRow
    scale: str
    asked: tuple[str, ...]
    """Settings of the command line other than model, recipe and seed."""
    seed: int

    @property
    def has_base(self) -> bool:
        """Whether its model is a pretrained one, with sizes and positions of its own."""
        return "base" in settings_in("model", self.row.model)

    def pretraining(self) -> list[str]:
        """Overrides of the pretraining that the row starts from."""
        # Recipe, optimizer and task of the prompts do not apply to the model that the row starts from.
        ours = ("report", "results_dir", "cache_dir", "scale", "dims", "parallel", "logger", "model")
        kept = [text for text in self.asked if text.partition("=")[0].partition(".")[0] in ours]
        # It has the same positions as the row.
        positions = next((text for text in self.asked if text.startswith("task.positions=")), "task.positions=rotary")
        own = [text for text in self.row.overrides if text.startswith(("model.", "dims.", "parallel."))]
        own = [*(own if self.has_base else [positions]), *self.row.start_overrides]
        return [*kept, f"task={self.row.start}", f"model={self.row.model}", *own, f"seed={self.seed}"]

    def overrides(self, init_from: str | None) -> list[str]:
        """Overrides of the row's own training and evaluation."""
        base = [*self.asked, f"task={self.task}", f"model={self.row.model}", f"seed={self.seed}"]
        base.append(f"task.knockout={self.row.knockout}")
        if self.row.recipe:
            base.append(f"recipe={self.row.recipe.format(scale=self.scale)}")
        base += self.row.overrides
        if self.row.start in pretraining_tasks() and not self.has_base:
            sized = any(text.startswith("dims=") for text in self.asked)
            base += [] if sized else [f"dims={self.row.start}_{self.scale}"]
        base += [f"length=[{','.join(map(str, self.row.lengths))}]"] if self.row.lengths else []
        base += [f"init_from={init_from}"] if init_from else []
        return base


def reproduce(
    report: PasskeyReport, cfg: Config, overrides: list[str], seeds: list[int], worker: Worker, models: Sequence[str]
) -> None:
    """The rows of `report.run`, each trained after the row or the model that it starts from."""
    rows = report.rows_of(models)
    taken = ("task", "model", "recipe", "seed", "init_from", "task.knockout")
    # The table's lengths and places are asked, unless the command line sets others.
    named = any(text.startswith("length=") for text in overrides)
    for key, values in (("length", report.lengths), ("depth", report.depths)):
        if not any(text.startswith(f"{key}=") for text in overrides):
            overrides = [*overrides, f"{key}=[{','.join(map(str, values))}]"]
    asked = tuple(text for text in overrides if text.partition("=")[0] not in taken)
    own_lengths = {name: [] if named else report.rows[name].lengths for name in rows}
    jobs = [
        _Job(report.task, replace(report.rows[name], lengths=own_lengths[name]), cfg.scale.name, asked, seed)
        for seed in seeds
        for name in rows
    ]
    # The models that rows start from are trained with the same settings.
    made = [*rows, *(start for name in rows if (start := report.rows[name].start))]
    own = {name: report.rows[name].overrides if name in report.rows else [] for name in made}
    check_row_settings(
        own, {name: _learns_prompts(report, report.rows[name]) for name in rows}, overrides, worker.console
    )
    for job in jobs:
        _refuse_other_options(report, job, compose(job.overrides(None)))
        if job.row.start in pretraining_tasks():
            check_data(compose(job.pretraining()))
    if not worker.planning and (said := _time_left(jobs)) is not None:
        worker.console.print(said, markup=False, highlight=False, soft_wrap=True)
    run_jobs([(f"{job.row.title}, seed {job.seed}", partial(_fill, report, job, worker)) for job in jobs], worker)


def _refuse_other_options(report: PasskeyReport, job: _Job, cfg: Config) -> None:
    """Raise InputError for an option of the model on the command line with which a run would fill no cell."""
    config = asdict(cfg)
    declared = declared_options(job.row, config)
    for key in map(key_of, job.asked):
        wanted = declared.get(key)
        if key.startswith("model.") and "base" not in cfg.model and (now := value_at(config, key)) != wanted:
            has = "null" if wanted is None else wanted
            raise InputError(
                f"{key}={now}: row {job.row.title!r} of report={report.name} has {has}; leave it out, or take "
                "infini train and infini eval"
            )


def _learns_prompts(report: PasskeyReport, row: PasskeyRow) -> bool:
    """Whether a row, or one that it starts from, is trained on prompts."""
    return bool(row.recipe) or (row.start in report.rows and _learns_prompts(report, report.rows[row.start]))


def _time_left(jobs: Sequence[_Job]) -> str | None:
    """One line on how long the rows from scratch will take, by published records and the speed of this processor."""
    # Rows may share a training.
    trainings: dict[str, Config] = {}
    asked, others = [], set()
    for job in jobs:
        words = job.overrides(None)
        cfg = compose(words)
        if pick_device(cfg.parallel.accelerator).type != "cpu":
            continue
        if job.row.start or job.row.questions:
            others.add(job.row.title)
            continue
        known = find_training(cfg, with_model=False)
        if known is not None and _evaluated(cfg, words, known) is not None:
            continue
        if find_training(cfg) is None:
            trainings[config_hash(cfg)] = cfg
        asked.append(cfg)
    return describe_time(list(trainings.values()), asked, len(others))


def _on_record(report: PasskeyReport, job: _Job, with_model: bool) -> RunRecord | None:
    """The newest training of a row's model on record. with_model: only if the model still exists; those of the
    trainings before it are not needed."""
    start: RunRecord | None = None
    if job.row.start in pretraining_tasks():
        start = find_training(compose(job.pretraining()), with_model and not job.row.recipe)
    elif job.row.start:
        start = _on_record(report, replace(job, row=report.rows[job.row.start]), with_model and not job.row.recipe)
    if not job.row.recipe or (job.row.start and start is None):
        return start
    return find_training(compose(job.overrides(None if start is None else start.run_id)), with_model)


def _model(report: PasskeyReport, job: _Job, worker: Worker) -> RunRecord | None:
    """The training of a row's model, None for a pretrained model as it is. If its model is not there, it is trained,
    after the training it starts from."""
    if job.row.recipe and (known := _on_record(report, job, with_model=True)) is not None:
        worker.say(f"trained before: {known.run_id}")
        return known
    start: RunRecord | None = None
    if job.row.start in pretraining_tasks():
        start = trained(compose(job.pretraining()), job.pretraining(), worker)
    elif job.row.start:
        start = _model(report, replace(job, row=report.rows[job.row.start]), worker)
    if job.row.recipe:
        words = job.overrides(None if start is None else start.run_id)
        return trained(compose(words), words, worker)
    return start


def _questions(job: _Job) -> list[str]:
    """Overrides of the evaluation of a row's model."""
    words = [*job.overrides(None), *(f"task.{key}={value}" for key, value in job.row.questions.items())]
    if job.row.start and not job.row.recipe:
        # The model was trained for another task, with its recipe and sizes.
        words = [text for text in words if not text.startswith(("recipe", "dims", "optimizer"))]
    return words


def _fill(report: PasskeyReport, job: _Job, worker: Worker) -> str:
    words = _questions(job)
    cfg = compose(words)
    known = _on_record(report, job, with_model=False)
    find, train = partial(_evaluated, cfg, words), partial(_model, report, job, worker)
    record = fill(cfg, words, worker, find, known, train)
    accuracy = 100 * (record.metric("token_accuracy") or 0.0)
    return f"{record.run_id}: token accuracy {accuracy:.1f} % over all cells"


def _evaluated(cfg: Config, overrides: list[str], training: RunRecord | None) -> RunRecord | None:
    """The newest evaluation of this model that asked the same questions, and no others."""

    def asked(config: Mapping[str, Any]) -> Any:
        places = parse_lengths(config.get("length") or []), parse_depths(config.get("depth") or [])
        return places, [value_at(config, f"task.{key}") for key in ("knockout", "examples")]

    known = evaluations(cfg, overrides, training, "test")
    return next((run for run in known if asked(run.config) == asked(asdict(cfg))), None)
