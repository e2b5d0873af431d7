"""Runs of `infini reproduce` for a table of long-context benchmarks: the training of a row, then its answers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from infini.config.compose import compose
from infini.config.lengths import parse_lengths
from infini.config.schema import Config
from infini.records import RunRecord
from infini.report.long_context import LongContextReport, LongContextRow
from infini.runs.reproduce import check_row_settings, evaluations, fill, learned, run_jobs
from infini.runs.workers import Worker
from infini.tasks.long_context.config import LongContextConfig

_OF_TRAININGS = ("optimizer", "recipe")
_OF_QUESTIONS = ("length", "task.subtasks", "task.examples")


def reproduce(
    report: LongContextReport,
    cfg: Config,
    overrides: list[str],
    seeds: list[int],
    worker: Worker,
    models: Sequence[str],
) -> None:
    """The rows of `report.run`."""
    rows = report.rows_of(models)
    own = {name: report.rows[name].settings for name in rows}
    check_row_settings(own, {name: bool(report.rows[name].trained_on) for name in rows}, overrides, worker.console)
    asked = [text for text in overrides if text.partition("=")[0] not in ("task", "model", "seed")]
    if not any(text.startswith("task.subtasks=") for text in asked):
        asked.append(f"task.subtasks=[{','.join(report.subtasks)}]")
    jobs = [
        (f"{report.rows[name].title}, seed {seed}", partial(_fill, report, report.rows[name], asked, seed, worker))
        for seed in seeds
        for name in rows
    ]
    run_jobs(jobs, worker)


def _fill(report: LongContextReport, row: LongContextRow, asked: list[str], seed: int, worker: Worker) -> str:
    own = [f"model={row.model}", *row.settings, f"seed={seed}"]
    words = [text for text in asked if text.partition("=")[0].partition(".")[0] not in _OF_TRAININGS]
    if not any(text.startswith("length=") for text in words):
        words.append(f"length=[{','.join(map(str, row.lengths or report.lengths))}]")
    words += [f"task={report.task}", *own]
    cfg = compose(words)
    kept = [text for text in asked if text.partition("=")[0] not in _OF_QUESTIONS]
    training = [*kept, f"task={row.trained_on}", *own, *row.training]
    of_training = learned(compose(training), training, worker) if row.trained_on else ()
    record = fill(cfg, words, worker, partial(_evaluated, cfg, words), *of_training)
    return f"{record.run_id}: accuracy {100 * (record.metric('accuracy') or 0.0):.1f} % over all cells"


def _evaluated(cfg: Config, overrides: list[str], training: RunRecord | None) -> RunRecord | None:
    """The newest evaluation of this model that asked at least these questions."""
    task = cfg.task
    assert isinstance(task, LongContextConfig)
    wanted = {(name, length) for name in task.subtasks for length in parse_lengths(cfg.length)}

    def has_asked(run: RunRecord) -> bool:
        found = {(cell["subtask"], cell["length"]) for cell in run.series["cells"] if cell["examples"] >= task.examples}
        return found >= wanted

    return next(filter(has_asked, evaluations(cfg, overrides, training, "test")), None)
