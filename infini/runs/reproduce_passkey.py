"""What `infini reproduce` runs for a passkey table: each row's training, its start, and its evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from infini import records
from infini.config.compose import compose
from infini.config.lengths import parse_depths, parse_lengths
from infini.config.schema import Config
from infini.records import RunRecord
from infini.report.passkey import PRETRAINING, PasskeyReport, PasskeyRow
from infini.report.selection import rows_of_models
from infini.runs.common import find_training, newest_on_the_data, settle_contradictions
from infini.runs.estimate import describe_time
from infini.runs.evaluate import evaluate
from infini.runs.preflight import check_data
from infini.runs.reproduce import run_jobs, trained
from infini.runs.workers import Worker
from infini.system.devices import pick_device
from infini.training.checkpoint import checkpoint_folder


@dataclass(frozen=True)
class _Job:
    """One row at one seed."""

    task: str
    row: PasskeyRow
    scale: str
    asked: tuple[str, ...]
    """Settings of the command line other than model, recipe and seed."""
    seed: int

    def pretraining(self) -> list[str]:
        """Overrides of the pretraining that the row starts from."""
        # Recipe, optimizer and task of the prompts do not apply to the model that the row starts from.
        ours = ("report", "results_dir", "cache_dir", "scale", "dims", "parallel", "logger", "model")
        kept = [text for text in self.asked if text.partition("=")[0].partition(".")[0] in ours]
        # It has the same positions as the row.
        positions = next((text for text in self.asked if text.startswith("task.positions=")), "task.positions=rotary")
        own = [text for text in self.row.overrides if text.startswith(("model.", "dims.", "parallel."))]
        own = [*own, *self.row.start_overrides] if self.row.start == "continual" else [positions]
        return [*kept, f"task={self.row.start}", f"model={self.row.model}", *own, f"seed={self.seed}"]

    def overrides(self, init_from: str | None) -> list[str]:
        """Overrides of the row's own training and evaluation."""
        base = [*self.asked, f"task={self.task}", f"model={self.row.model}", f"seed={self.seed}"]
        base.append(f"task.knockout={self.row.knockout}")
        if self.row.recipe:
            base.append(f"recipe={self.row.recipe.format(scale=self.scale)}")
        base += _own(self.row)
        if self.row.start == "pg19":
            sized = any(text.startswith("dims=") for text in self.asked)
            base += [] if sized else [f"dims=pg19_{self.scale}"]
        base += [f"length=[{','.join(map(str, self.row.lengths))}]"] if self.row.lengths else []
        base += [f"init_from={init_from}"] if init_from else []
        return base


def _own(row: PasskeyRow) -> list[str]:
    """Settings of a row of its own."""
    return [*(["optimizer.gate_lr=0", "model.gate_init=zeros"] if row.frozen_gates else []), *row.overrides]


def reproduce(
    report: PasskeyReport,
    cfg: Config,
    overrides: list[str],
    seeds: list[int],
    worker: Worker,
    models: Sequence[str] = (),
) -> list[str]:
    """Run what the rows of `report.run` still need; only rows of `models` if there are any. A job is done if it has a
    record.

    Returns:
        Row and seed of each job whose training, or a training it starts from, diverged.
    """
    known = {name: row.model for name, row in report.rows.items()}
    rows = rows_of_models(report.name, {name: known[name] for name in report.to_run}, models, known)
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
    own = {name: _own(report.rows[name]) if name in report.rows else [] for name in made}
    settle_contradictions(own, overrides, worker.console)
    for job in jobs:
        compose(job.overrides(None))
        if job.row.start in PRETRAINING:
            check_data(compose(job.pretraining()))
    if not worker.planning and (said := _time_left(jobs)) is not None:
        worker.console.print(said, markup=False, highlight=False, soft_wrap=True)
    return run_jobs(
        [(f"{job.row.title}, seed {job.seed}", partial(_fill, report, job, worker)) for job in jobs], worker
    )


def _time_left(jobs: Sequence[_Job]) -> str | None:
    """One line on how long the rows from scratch will take, by published records and the speed of this processor."""
    trainings, evaluations = [], []
    for job in jobs:
        cfg = compose(job.overrides(None))
        if job.row.start or job.row.questions or pick_device(cfg.parallel.accelerator).type != "cpu":
            continue
        known = find_training(cfg)
        if known is None:
            trainings.append(cfg)
        if known is None or _evaluated(records.load_records(cfg.results_dir), known.run_id, cfg) is None:
            evaluations.append(cfg)
    return describe_time(trainings, evaluations)


def _model(report: PasskeyReport, job: _Job, worker: Worker) -> str | None:
    """The run id of the training of a row's model, None for a pretrained model as it is. The training it starts from is
    run first."""
    start: str | None = None
    if job.row.start in PRETRAINING:
        start = trained(compose(job.pretraining()), job.pretraining(), worker).run_id
    elif job.row.start:
        start = _model(report, replace(job, row=report.rows[job.row.start]), worker)
    if job.row.recipe:
        return trained(compose(job.overrides(start)), job.overrides(start), worker).run_id
    return start


def _fill(report: PasskeyReport, job: _Job, worker: Worker) -> str:
    training = _model(report, job, worker)
    overrides = [*job.overrides(None), *(f"task.{key}={value}" for key, value in job.row.questions.items())]
    if job.row.start and not job.row.recipe:
        # The model was trained for another task, with its recipe and sizes.
        overrides = [text for text in overrides if not text.startswith(("recipe", "dims", "optimizer"))]
    cfg = compose(overrides)

    def find() -> RunRecord | None:
        return _evaluated(records.load_records(cfg.results_dir), training, cfg)

    def make() -> RunRecord:
        folder = None if training is None else checkpoint_folder(cfg.results_dir, training)
        return evaluate(cfg, overrides, folder)

    record = find() or worker.make("eval", cfg, training, find, make)
    accuracy = 100 * (record.metric("token_accuracy") or 0.0)
    return f"{record.run_id}: token accuracy {accuracy:.1f} % over all cells"


def _evaluated(known: list[RunRecord], parent: str | None, cfg: Config) -> RunRecord | None:
    """The newest evaluation of this training run with the same questions."""

    def asked(task: dict[str, Any], length: Any, depth: Any) -> Any:
        kept = {key: value for key, value in task.items() if key != "rows_per_call"}
        return kept, parse_lengths(length or []), parse_depths(depth or [])

    wanted = asked(asdict(cfg.task), cfg.length, cfg.depth)
    trained = next((run for run in known if run.run_id == parent), None)
    segment_length = (trained.config if trained else asdict(cfg))["dims"]["segment_length"]
    fitting = [
        run
        for run in known
        if run.verb == "eval"
        and run.task == cfg.task.name
        and run.parent == parent
        # Without a training the configuration says which model it is.
        and (parent is not None or {**run.config["model"], **cfg.model} == run.config["model"])
        and run.config["dims"]["segment_length"] == segment_length
        and asked(run.config.get("task", {}), run.config.get("length"), run.config.get("depth")) == wanted
    ]
    return newest_on_the_data(cfg, fitting, "test")
