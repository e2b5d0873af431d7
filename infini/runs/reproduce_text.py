"""Runs of `infini reproduce` for a table of running text: each row's training and evaluation, in every task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from rich.console import Console

from infini.config.compose import cache_folder, compose, data_root
from infini.config.schema import Config, groups
from infini.errors import InputError
from infini.records import RunRecord
from infini.report.selection import rows_of_models
from infini.report.tables import DASH
from infini.report.text_report import Report
from infini.runs.common import names_a_task
from infini.runs.reproduce import check_row_settings, evaluations, fill, learned, run_jobs
from infini.runs.workers import Worker


def reproduce(
    report: Report, cfg: Config, overrides: list[str], seeds: list[int], worker: Worker, models: Sequence[str]
) -> None:
    """Every row of the report in all of its tasks whose data exists, unless a task or a setting of its data is given.
    The settings of all cells are checked before the first is run."""
    console = worker.console
    tasks = list(report.benchmarks)
    one = names_a_task(overrides)
    others = [text for text in overrides if not text.startswith(("task=", "model="))]
    of_task = {}
    for task in [cfg.task.name] if one else tasks:
        chosen = [f"task={task}", *others]
        composed = compose(chosen)
        folder = data_root(composed.task)
        if not one and task != report.task and folder is not None and not folder.is_dir():
            console.print(f"{folder}: no such folder; continuing without {task}", style="yellow")
            continue
        of_task[task] = [*chosen, *_corpus_override(composed, console)]
    # A report also has rows that are only quoted from the paper, and rows that do not exist at this scale.
    known = {row: model for row in report.models if (model := report.model_of(row)) in groups()["model"]}
    ours = {row: model for row, model in known.items() if "all" in report.wanted or row in report.wanted}
    chosen_rows = rows_of_models(report.name, ours, models, known)
    made = {
        (task, row): settings
        for task in of_task
        for row in chosen_rows
        if (settings := report.settings_of(row, cfg.scale.name, task)) is not None
    }
    if not made:
        raise InputError(f"scale={cfg.scale.name}: report={report.name} has no rows at this scale")
    own_settings = {row: settings for (_, row), settings in made.items()}
    check_row_settings(own_settings, {row: row not in report.untrained for row in own_settings}, overrides, console)

    def words(task: str, row: str, *own: str) -> list[str]:
        base = [*of_task[task], f"model={report.model_of(row)}", *made[task, row]]
        return [*base, *own, *report.evaluation_settings()]

    def one_cell(task: str, row: str, seed: int) -> str:
        cell = words(task, row, f"seed={seed}")
        if row in report.untrained:
            return _fill(compose(cell), cell, worker, untrained=True)
        if report.trained_on is None:
            return _fill(compose(cell), cell, worker)
        # The documents of the evaluation are not those of the training.
        training = [text for text in cell if not text.startswith("task")]
        training.append(f"task={report.trained_on}")
        training += [text for text in cell if text == "task.data_dir=synthetic"]
        learning = compose(training)
        return _fill(replace(learning, task=compose(cell).task), cell, worker, (learning, training))

    for task, row in made:
        compose(words(task, row))
    cells = [(task, row, seed) for seed in seeds for task, row in made]
    jobs = [
        (f"{task}, {report.models[row]}, seed {seed}", partial(one_cell, task, row, seed)) for task, row, seed in cells
    ]
    run_jobs(jobs, worker)


def _fill(
    cfg: Config,
    overrides: list[str],
    worker: Worker,
    training: tuple[Config, list[str]] | None = None,
    untrained: bool = False,
) -> str:
    """Fill a cell. training: configuration and overrides of the training; None: those of the evaluation."""
    of_training = () if untrained else learned(*(training or (cfg, overrides)), worker)
    run = fill(cfg, overrides, worker, partial(_evaluated, cfg, overrides), *of_training)
    perplexity = run.metric("perplexity")
    return f"{run.run_id}: perplexity {DASH if perplexity is None else f'{perplexity:.2f}'}"


def _evaluated(cfg: Config, overrides: list[str], training: RunRecord | None) -> RunRecord | None:
    """The newest evaluation of this model on the report's split that read as much of every document and measured at
    least what is asked."""

    def measures(run: RunRecord) -> bool:
        asked, was = cfg.scale, run.config["scale"]
        knocked_out = was.get("knockouts") and was.get("knockout_max_tokens") == asked.knockout_max_tokens
        return was.get("eval_max_tokens") == asked.eval_max_tokens and bool(knocked_out or not asked.knockouts)

    return next(filter(measures, evaluations(cfg, overrides, training, cfg.report["split"])), None)


def _corpus_override(cfg: Config, console: Console) -> list[str]:
    """Synthetic text if neither a folder nor the hub is available, so that the command can be tried anywhere."""
    if cfg.task.data_dir is not None or data_root(cfg.task) is not None:
        return []
    from infini.tasks.text.documents import load_documents

    try:
        load_documents(cfg.task.name, "test", None, cfg.task.hub_id, cache_folder(cfg))
    except InputError as error:
        console.print(
            f"{error}\nNo data here: continuing with a SYNTHETIC corpus. Its numbers say nothing about {cfg.task.name} "
            "and cannot be published.",
            style="bold yellow",
        )
        return ["task.data_dir=synthetic"]
    return []
