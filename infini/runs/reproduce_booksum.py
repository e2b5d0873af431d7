"""Runs of `infini reproduce` for a table of summaries: each system's training and evaluation, and the references."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import cast

from infini import records
from infini.config.compose import compose
from infini.config.lengths import format_length, parse_lengths
from infini.config.schema import Config
from infini.errors import InputError
from infini.records import RunRecord, value_at
from infini.report.summaries import SummaryReport
from infini.report.tables import DASH
from infini.runs.common import newest_on_the_data
from infini.runs.evaluate import evaluate_reference
from infini.runs.reproduce import evaluations, fill, learned, own_setting, run_jobs
from infini.runs.workers import Worker
from infini.tasks.booksum.config import REFERENCES, BooksumConfig


def reproduce(
    report: SummaryReport, cfg: Config, overrides: list[str], seeds: list[int], worker: Worker, models: Sequence[str]
) -> None:
    """The systems and references of `report.run`."""
    taken = ("task=", "model=", "seed=", "task.split=", "task.reference=")
    asked = [text for text in overrides if not text.startswith(taken)]
    names_lengths = any(text.startswith("length=") for text in asked)
    asked += [f"task={report.task}", f"task.split={report.split}"]
    scale = cfg.scale.name
    rows = report.rows_of(models)
    for name in rows:
        settings = report.systems[name].settings_at(scale)
        for text in asked:
            if setting := own_setting(settings, text):
                raise InputError(f"{text}: row {name} has {setting}; leave it out, or other rows with report.run")
        if (model := report.model_of(name)) not in REFERENCES:
            compose([*asked, f"model={model}", *settings])

    def one_cell(name: str, seed: int) -> str:
        model, row, words = report.model_of(name), report.systems[name], [*asked, f"seed={seed}"]
        if not names_lengths:
            words.append(f"length=[{','.join(map(str, row.lengths or report.input_lengths))}]")
        if model in REFERENCES:
            record = _reference([*words, f"task.reference={model}"], model, worker)
        else:
            record = _system([*words, f"model={model}", *row.settings_at(scale)], worker, row.untrained)
        overall = record.metric("overall")
        return f"{record.run_id}: overall {DASH if overall is None else f'{overall:.1f}'}"

    jobs = [
        (f"{report.systems[name].title}, seed {seed}", partial(one_cell, name, seed)) for seed in seeds for name in rows
    ]
    run_jobs(jobs, worker)


def _reference(overrides: list[str], name: str, worker: Worker) -> RunRecord:
    cfg = compose(overrides)
    # A reference depends neither on a model nor on decoding.
    decides = ("data_dir", "hub_id", "split", "references", "reference", "reference_words")

    def find() -> RunRecord | None:
        known = [
            run
            for run in records.load_records(cfg.results_dir)
            if (run.verb, run.task, run.model) == ("eval", cfg.task.name, name)
            and (run.seed, run.scale) == (cfg.seed, cfg.scale.name)
            and all(value_at(run.config, f"task.{key}") == getattr(cfg.task, key) for key in decides)
        ]
        return newest_on_the_data(cfg, known, cast(BooksumConfig, cfg.task).split)

    return find() or worker.make("eval", cfg, None, find, lambda: evaluate_reference(cfg, overrides, name))


def _system(overrides: list[str], worker: Worker, untrained: bool) -> RunRecord:
    cfg = compose(overrides)

    def known(training: RunRecord | None) -> tuple[list[RunRecord], list[int]]:
        """Evaluations on record, newest first, and the lengths that none of them has."""
        found = evaluations(cfg, overrides, training, cast(BooksumConfig, cfg.task).split)
        # Books chosen, scored and decoded as `cfg` says, at any length.
        keys = ("split", "references")
        asked = {key: getattr(cfg.task, key) for key in keys}
        alike = (run for run in found if {key: value_at(run.config, f"task.{key}") for key in keys} == asked)
        runs = [run for run in alike if run.config.get("decoding") == vars(cfg.decoding)]
        measured = {cell.get("length") for run in runs for cell in run.series.get("cells", ())}
        return runs, [length for length in parse_lengths(cfg.length) if length not in measured]

    def find(training: RunRecord | None) -> RunRecord | None:
        runs, missing = known(training)
        return None if missing else runs[0]

    def missing(training: RunRecord | None) -> list[str]:
        lengths = ",".join(map(format_length, known(training)[1]))
        return [*(text for text in overrides if not text.startswith("length=")), f"length=[{lengths}]"]

    if untrained:
        return fill(cfg, overrides, worker, find, missing=missing)
    return fill(cfg, overrides, worker, find, *learned(cfg, overrides, worker), missing=missing)
