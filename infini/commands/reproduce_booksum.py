"""What `infini reproduce report=table4_booksum` runs: each system's training and evaluation, and the references."""

from __future__ import annotations

from typing import cast

from rich.console import Console

from infini import records
from infini.commands.common import find_training, newest_on_the_data
from infini.commands.evaluate import evaluate, evaluate_reference
from infini.commands.train import train
from infini.config import Config, compose, config_identity
from infini.lengths import parse_lengths
from infini.records import RunRecord
from infini.report.summaries import SummaryReport
from infini.schema import REFERENCES, BooksumConfig
from infini.training.checkpoint import checkpoint_folder


def run_systems(report: SummaryReport, cfg: Config, overrides: list[str], seeds: list[int], console: Console) -> None:
    """Make what the rows of `report.run` still need. A job that is done is known by its record."""
    taken = ("task=", "model=", "seed=", "task.split=", "task.reference=")
    asked = [text for text in overrides if not text.startswith(taken)]
    if not any(text.startswith("length=") for text in asked):
        asked.append(f"length=[{','.join(map(str, report.input_lengths))}]")
    asked += [f"task={report.task}", f"task.split={report.split}"]
    jobs = [(seed, name) for seed in seeds for name in report.to_run]
    for number, (seed, name) in enumerate(jobs, 1):
        console.rule(f"{number} of {len(jobs)}: {report.systems[name].title}, seed {seed}")
        model = str(report.systems[name].model)
        if model in REFERENCES:
            record = _reference([*asked, f"seed={seed}", f"task.reference={model}"], model)
        else:
            settings = report.systems[name].settings
            record = _system([*asked, f"seed={seed}", f"model={model}", *settings], console)
        shown = f"{record.run_id}: overall {record.metric('overall') or 0.0:.1f}"
        console.print(shown, markup=False, highlight=False, soft_wrap=True)


def _reference(overrides: list[str], name: str) -> RunRecord:
    cfg = compose(overrides)
    known = [run for run in records.load_records(cfg.results_dir) if run.model == name and _same_question(run, cfg)]
    return newest_on_the_data(cfg, known, cast(BooksumConfig, cfg.task).split) or evaluate_reference(
        cfg, overrides, name
    )


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
    done = newest_on_the_data(cfg, known, cast(BooksumConfig, cfg.task).split)
    return done or evaluate(cfg, overrides, checkpoint_folder(cfg.results_dir, trained.run_id))


def _same_question(run: RunRecord, cfg: Config) -> bool:
    """Whether an evaluation asked what `cfg` asks: books, lengths, and how summaries are drawn."""
    if run.verb != "eval" or run.task != cfg.task.name or run.seed != cfg.seed:
        return False
    if parse_lengths(run.config.get("length") or [1]) != parse_lengths(cfg.length):
        return False
    wanted = config_identity(cfg)["task"]
    return config_identity(run.config)["task"] == wanted and run.config["decoding"] == vars(cfg.decoding)
