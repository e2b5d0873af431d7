"""`infini reproduce`: run what a report still needs, and only that, then print it. Started again, it goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from rich.console import Console

from infini import records
from infini.config.compose import cache_folder, compose, config_hash, data_root
from infini.config.schema import Config, evaluation_keys, groups
from infini.errors import DivergedError, InputError
from infini.records import RunRecord
from infini.report.load import load_report, report_of_runs
from infini.report.passkey import PasskeyReport
from infini.report.search import SearchReport
from infini.report.summaries import SummaryReport
from infini.report.tables import DASH
from infini.runs import table
from infini.runs.common import (
    catch_divergence,
    find_training,
    name_diverged,
    names_a_task,
    newest_on_the_data,
    rows_of_models,
    settle_contradictions,
)
from infini.runs.evaluate import evaluate
from infini.runs.train import train
from infini.training.checkpoint import checkpoint_folder


def run(cfg: Config, overrides: list[str], seeds: list[int], models: Sequence[str] = ()) -> int:
    """Train and evaluate every model of the report for every seed, a cell at a time, then print the table.

    models: only rows of these are made; none: all rows. Of a report about several tasks all are run whose data is
    there, unless one is named, or something of its data. All cells' settings are checked before the first is made.
    A cell is done when a record of its configuration is in results_dir: a stopped reproduction picks up where it was.
    """
    console = Console(stderr=True)
    if records.environment().get("git_dirty"):
        console.print("uncommitted changes in the source tree: what is run now cannot be published", style="yellow")
    declared = load_report(cfg.report)
    if isinstance(declared, SearchReport):
        from infini.runs.search import run_search

        chosen = rows_of_models(declared.name, {model: model for model in declared.models}, models)
        cfg = replace(cfg, report={**cfg.report, "models": chosen})
        declared = replace(declared, models=chosen)
        run_search(declared, cfg, overrides, seeds, console)
        return table.run(cfg, overrides)
    report = report_of_runs(cfg.report, "reproduce")
    tasks = [part.task for part in report.parts]
    if cfg.task.name not in tasks:
        raise InputError(f"task={cfg.task.name}: report={report.name} is about task={' or '.join(tasks)}")
    if isinstance(report, PasskeyReport):
        from infini.runs.reproduce_passkey import run_rows

        diverged = run_rows(report, cfg, overrides, seeds, console, models)
        code = table.run(cfg, overrides)
        name_diverged(diverged)
        return code
    if isinstance(report, SummaryReport):
        from infini.runs.reproduce_booksum import run_systems

        diverged = run_systems(report, cfg, overrides, seeds, console, models)
        code = table.run(cfg, overrides)
        name_diverged(diverged)
        return code
    one = names_a_task(overrides)
    others = [text for text in overrides if not text.startswith(("task=", "model="))]
    of_task = {}
    for task in [cfg.task.name] if one else tasks:
        chosen = [f"task={task}", *others]
        composed = compose(chosen)
        folder = data_root(composed.task)
        if not one and task != report.task and folder is not None and not folder.is_dir():
            text = f"{folder}: no such folder; going on without {task}"
            console.print(text, style="yellow", markup=False, soft_wrap=True)
            continue
        of_task[task] = [*chosen, *_corpus_override(composed, console)]
    # A report also has rows that are only quoted from the paper, and rows that are not of this scale.
    ours = {row: report.model_of(row) for row in report.models if _is_ours(report.model_of(row))}
    chosen_rows = rows_of_models(report.name, ours, models)
    made = {
        (task, row): settings
        for task in of_task
        for row in chosen_rows
        if (settings := report.settings_of(row, cfg.scale.name, task)) is not None
    }
    if not made:
        raise InputError(f"scale={cfg.scale.name}: report={report.name} has no rows at this scale")
    settle_contradictions({row: settings for (_, row), settings in made.items()}, overrides, console)
    for (task, row), settings in made.items():
        compose([*of_task[task], f"model={report.model_of(row)}", *settings, *report.evaluation_settings()])
    cells = [(seed, task, row) for seed in seeds for task, row in made]
    diverged = []
    for number, (seed, task, row) in enumerate(cells, 1):
        cell = [*of_task[task], f"model={report.model_of(row)}", *made[task, row], f"seed={seed}"]
        cell += report.evaluation_settings()
        where = f"{task}, {report.models[row]}, seed {seed}"
        console.rule(f"{number} of {len(cells)}: {where}")
        found = catch_divergence(partial(_fill, compose(cell), cell, console))
        if isinstance(found, DivergedError):
            # One model's rate is no reason to leave the others out.
            console.print(str(found), style="yellow", markup=False, soft_wrap=True)
            diverged.append(where)
    code = table.run(cfg, overrides)
    name_diverged(diverged)
    return code


def _is_ours(model: str) -> bool:
    return model in groups()["model"]


def _fill(cfg: Config, overrides: list[str], console: Console) -> None:
    # A cell that is filled needs no model any more.
    trained = find_training(cfg, with_model=False)
    evaluated = _evaluated(cfg, trained)
    if evaluated is None:
        trained = find_training(cfg)
        evaluated = _evaluated(cfg, trained)
    if trained is None:
        trained = train(cfg, overrides)
    else:
        console.print(f"trained before: {trained.run_id}", markup=False, highlight=False)
    if evaluated is None:
        evaluated = evaluate(cfg, overrides, checkpoint_folder(cfg.results_dir, trained.run_id))
    perplexity = evaluated.metric("perplexity")
    shown = DASH if perplexity is None else f"{perplexity:.2f}"
    console.print(f"{evaluated.run_id}: perplexity {shown}", markup=False, highlight=False)


def _evaluated(cfg: Config, trained: RunRecord | None) -> RunRecord | None:
    """The newest evaluation of this training run on the report's split as it is now; None where there is no run."""
    if trained is None:
        return None
    asked = {key: getattr(cfg.scale, key) for key in evaluation_keys("scale")}
    fitting = [
        run
        for run in records.load_records(cfg.results_dir)
        if run.verb == "eval"
        and config_hash(run.config) == config_hash(cfg)
        and run.parent == trained.run_id
        and run.data.get("split") == cfg.report["split"]
        and asked == {key: run.config["scale"].get(key) for key in asked}
        # What was run as another report's variant fills no cell of a report without it.
        and (cfg.variant is not None or not run.config.get("variant"))
    ]
    return newest_on_the_data(cfg, fitting, cfg.report["split"])


def _corpus_override(cfg: Config, console: Console) -> list[str]:
    """Made-up text where neither a folder nor the hub can be had, so that the machinery can be watched anywhere."""
    if cfg.task.data_dir is not None or data_root(cfg.task) is not None:
        return []
    from infini.tasks.text.documents import load_documents

    try:
        load_documents(cfg.task.name, "test", None, cfg.task.hub_id, cache_folder(cfg))
    except InputError as error:
        console.print(
            f"{error}\nNo data here: going on with a SYNTHETIC corpus. Its numbers say nothing about {cfg.task.name} "
            "and cannot be published.",
            style="bold yellow",
            markup=False,
            soft_wrap=True,
        )
        return ["task.data_dir=synthetic"]
    return []
