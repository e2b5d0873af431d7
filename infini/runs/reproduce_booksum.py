"""What `infini reproduce report=table4_booksum` runs: each system's training and evaluation, and the references."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import cast

from rich.console import Console

from infini import records
from infini.config.compose import compose, config_identity
from infini.config.lengths import format_length, parse_lengths
from infini.config.schema import Config
from infini.errors import DivergedError, InputError
from infini.records import RunRecord, value_at
from infini.report.summaries import SummaryReport
from infini.report.tables import DASH
from infini.runs.common import (
    catch_divergence,
    find_training,
    newest_on_the_data,
    on_the_data,
    own_setting,
    rows_of_models,
)
from infini.runs.evaluate import evaluate, evaluate_reference
from infini.runs.train import train
from infini.tasks.booksum.config import REFERENCES, BooksumConfig
from infini.training.checkpoint import checkpoint_folder


def run_systems(
    report: SummaryReport,
    cfg: Config,
    overrides: list[str],
    seeds: list[int],
    console: Console,
    models: Sequence[str] = (),
) -> list[str]:
    """Make what the rows of `report.run` still need, or those of them that are of `models`. A job that is done is known
    by its record.

    Returns row and seed of each job whose training diverged.
    """
    taken = ("task=", "model=", "seed=", "task.split=", "task.reference=")
    asked = [text for text in overrides if not text.startswith(taken)]
    if not any(text.startswith("length=") for text in asked):
        asked.append(f"length=[{','.join(map(str, report.input_lengths))}]")
    asked += [f"task={report.task}", f"task.split={report.split}"]
    scale = cfg.scale.name
    known = {name: str(row.model) for name, row in report.systems.items() if row.model}
    rows = rows_of_models(report.name, {name: known[name] for name in report.to_run}, models, known)
    for name in rows:
        settings = report.systems[name].settings_at(scale)
        for text in asked:
            if setting := own_setting(settings, text):
                raise InputError(f"{text}: row {name} has {setting}; leave it out, or other rows with report.run")
        if known[name] not in REFERENCES:
            compose([*asked, f"model={known[name]}", *settings])
    jobs = [(seed, name) for seed in seeds for name in rows]
    diverged = []
    for number, (seed, name) in enumerate(jobs, 1):
        where = f"{report.systems[name].title}, seed {seed}"
        console.rule(f"{number} of {len(jobs)}: {where}")
        model = str(report.systems[name].model)
        if model in REFERENCES:
            record = _reference([*asked, f"seed={seed}", f"task.reference={model}"], model)
        else:
            settings = report.systems[name].settings_at(scale)
            words = [*asked, f"seed={seed}", f"model={model}", *settings]
            found = catch_divergence(partial(_system, words, console))
            if isinstance(found, DivergedError):
                console.print(str(found), style="yellow", markup=False, soft_wrap=True)
                diverged.append(where)
                continue
            record = found
        overall = record.metric("overall")
        shown = f"{record.run_id}: overall {DASH if overall is None else f'{overall:.1f}'}"
        console.print(shown, markup=False, highlight=False, soft_wrap=True)
    return diverged


def _reference(overrides: list[str], name: str) -> RunRecord:
    cfg = compose(overrides)
    # No model reads the books, and nothing is drawn by decoding.
    decides = ("data_dir", "hub_id", "split", "references", "reference", "reference_words")
    known = [
        run
        for run in records.load_records(cfg.results_dir)
        if run.model == name
        and _is_evaluation(run, cfg)
        and all(value_at(run.config, f"task.{key}") == getattr(cfg.task, key) for key in decides)
    ]
    done = newest_on_the_data(cfg, known, cast(BooksumConfig, cfg.task).split)
    return done or evaluate_reference(cfg, overrides, name)


def _system(overrides: list[str], console: Console) -> RunRecord:
    cfg = compose(overrides)
    trained = find_training(cfg)
    if trained is None:
        trained = train(cfg, overrides)
    else:
        console.print(f"trained before: {trained.run_id}", markup=False, highlight=False)
    known = [
        run
        for run in records.load_records(cfg.results_dir)
        if run.parent == trained.run_id and _same_question(run, cfg)
    ]
    known = list(on_the_data(cfg, known, cast(BooksumConfig, cfg.task).split))
    measured = {cell.get("length") for run in known for cell in run.series.get("cells", ())}
    missing = [length for length in parse_lengths(cfg.length) if length not in measured]
    if not missing:
        return known[0]
    overrides = [text for text in overrides if not text.startswith("length=")]
    overrides.append(f"length=[{','.join(map(format_length, missing))}]")
    return evaluate(compose(overrides), overrides, checkpoint_folder(cfg.results_dir, trained.run_id))


def _is_evaluation(run: RunRecord, cfg: Config) -> bool:
    return (run.verb, run.task, run.seed, run.scale) == ("eval", cfg.task.name, cfg.seed, cfg.scale.name)


def _same_question(run: RunRecord, cfg: Config) -> bool:
    """Whether an evaluation asked what `cfg` asks, whatever the lengths: the same books, compared with their summaries
    in the same way, read by the model with the same options and in the same precision, and summaries drawn alike."""
    read_alike = run.config["model"] == cfg.model and run.config["parallel"]["precision"] == cfg.parallel.precision
    same_task = config_identity(run.config)["task"] == config_identity(cfg)["task"]
    compared_alike = all(
        value_at(run.config, f"task.{key}") == getattr(cfg.task, key) for key in ("split", "references")
    )
    drawn_alike = run.config["decoding"] == vars(cfg.decoding)
    return _is_evaluation(run, cfg) and read_alike and same_task and compared_alike and drawn_alike
