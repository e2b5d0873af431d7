"""Compares a run with what its row declares: sizes, recipe, optimizer, options and data of the training, its initial
weights, and what is asked.

A training of three steps is a run like any other and fills a cell. Beside trainings of thousands of steps it says
nothing about the models, so its row is marked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache
from typing import TYPE_CHECKING, Any

from infini.config.schema import settings_in
from infini.records import RunRecord, start_of, value_at
from infini.report.kind import values_of
from infini.report.search import LEARNING_RATE
from infini.report.selection import IRRELEVANT_SETTINGS, NOT_LEARNED, Selection
from infini.report.tables import MISMATCH_MARK

if TYPE_CHECKING:
    from infini.report.summaries import SummaryReport
    from infini.report.text_report import Report

GROUPS = ("dims", "recipe", "optimizer", "model", "task", "scale")
NOT_COMPARED = {"dims.name", "recipe.name", "scale.name"} | IRRELEVANT_SETTINGS | NOT_LEARNED
"""Names add nothing to the values, irrelevant settings change no result, and keys of evaluations no training."""
HUB_KEYS = {"task.hub_id", "scale.hub_train_documents"}
"""Keys that only trainings on data of the hub read."""
MAX_NAMED = 4
"""Differences of a row that a note lists."""


Declared = Mapping[str, Mapping[str, Any]]
"""Group -> key -> value."""


@cache
def declared_at(task: str, scale: str) -> Declared:
    """Sizes, recipe, optimizer, task, documents of the hub and decoding of a task at a scale, with nothing set on the
    command line."""
    from infini.config.compose import compose

    cfg = compose([f"task={task}", f"scale={scale}"])
    groups = {"dims": asdict(cfg.dims), "recipe": asdict(cfg.recipe), "optimizer": asdict(cfg.optimizer)}
    # The vocabulary is compared by the tokenizer of the data.
    groups["scale"] = {"hub_train_documents": cfg.scale.hub_train_documents}
    # Options of models refer to keys of the task. Task and decoding say what an evaluation asks.
    return {**groups, "task": asdict(cfg.task), "decoding": asdict(cfg.decoding)}


def tuned_rate(task: str, scale: str, model: str, optimizer: str) -> float | None:
    """The rate that a search found for a model (conf/tuned), or None."""
    rate = value_at(settings_in("tuned", f"{task}_{scale}_{model}_{optimizer}"), LEARNING_RATE)
    return None if rate is None else float(rate)


def expected(report: Report | SummaryReport, row: str, scale: str, declared: Declared) -> dict[str, Any]:
    """Dotted key -> value that the row declares for its trainings at a scale. declared: of their task."""
    groups = {**declared, "model": settings_in("model", report.model_of(row))}
    if "base" in groups["model"]:
        # Sizes are the pretrained model's.
        groups["dims"] = {}
    found = {f"{group}.{key}": value for group, values in groups.items() for key, value in values.items()}
    # The rate is the one that the model's search found. Without a search any rate is accepted.
    task, optimizer = str(found.get("task.name", report.task)), str(found.get("optimizer.name"))
    found[LEARNING_RATE] = tuned_rate(task, scale, report.model_of(row), optimizer)
    if found[LEARNING_RATE] is None:
        del found[LEARNING_RATE]
    own = values_of(report.settings_of(row, scale) or ())
    found |= {key: value for key, value in own.items() if key.partition(".")[0] in GROUPS}
    if "recipe.steps" in own and "recipe.warmup_steps" not in own and "recipe.warmup_steps" in found:
        # A command with these settings shortens the warm-up in the same way.
        from infini.config.compose import short_warmup

        found["recipe.warmup_steps"] = short_warmup(own["recipe.steps"], found["recipe.warmup_steps"])
    # Options that refer to another key, for example a window of the training length.
    return {key: found.get(value[2:-1]) if str(value).startswith("${") else value for key, value in found.items()}


def mismatches(training: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """The differences of a training's configuration from the wanted one, such as "recipe.steps 3 instead of 2600".
    Keys that the configuration lacks are not compared: they did not exist yet, or are not known. No row that is
    compared here starts from another training."""
    found = {f"{group}.{key}": value for group in GROUPS for key, value in (training.get(group) or {}).items()}
    if "model.rope_base" in found:
        found.setdefault("model.positions", "rotary")
    ways = [
        f"{key} {_plain(found[key])} instead of {_plain(value)}"
        for key, value in wanted.items()
        if key in found and key not in NOT_COMPARED and found[key] != value
    ]
    start = start_of(training)
    return ways if start is None else [*ways, f"init_from {start} instead of null"]


def _plain(value: Any) -> str:
    return "null" if value is None else str(value)


def find_mismatches(
    report: Report | SummaryReport, row: str, runs: Sequence[RunRecord], known: Selection, trained_on: str | None = None
) -> dict[str, list[str]]:
    """Run id -> how its training differs from what the row declares; see RunReport.find_mismatches.

    trained_on: task of the trainings; None: the report's.
    A run without a training has the options of its model alone. Training on synthetic text is a mismatch unless the
    evaluation read synthetic text too, which the title of the table says.
    """
    scale = runs[0].scale
    wanted = expected(report, row, scale, declared_at(trained_on or report.task, scale))
    untrained = {key: value for key, value in wanted.items() if key.startswith("model.")}
    found = {run.run_id: mismatches(_known_config(run, known), wanted if run.parent else untrained) for run in runs}
    for run in runs:
        if known.learned_synthetic_text(run) and not run.synthetic:
            found[run.run_id].append("trained on made-up text")
    return {run_id: ways for run_id, ways in found.items() if ways}


def _known_config(run: RunRecord, known: Selection) -> dict[str, Any]:
    """The configuration of the training of a run, without what had no effect or is not known."""
    training, config = known.training(run), dict(known.training_config(run))
    if training is None:
        # The task is that of the evaluation.
        return {key: value for key, value in config.items() if key not in ("task", "scale")}
    if training.data.get("source") != "hub":
        for group in ("task", "scale"):
            values = config.get(group) or {}
            config[group] = {key: value for key, value in values.items() if f"{group}.{key}" not in HUB_KEYS}
    return config


def report_mismatches(selections: Mapping[str, Selection], scale: str, titles: Mapping[str, str]) -> list[str]:
    """Notes on the rows that are marked, and on the runs that were superseded. selections: by what the note begins
    with. titles: row -> its title."""
    marked, left_out = [], []
    for source, selection in selections.items():
        rows = []
        for row, ways in selection.mismatches.items():
            more = f" and {len(ways) - MAX_NAMED} more" if len(ways) > MAX_NAMED else ""
            rows.append(f"{titles[row]} ({', '.join(ways[:MAX_NAMED])}{more})")
        if rows:
            marked.append(f"{MISMATCH_MARK} {source}: not as the row is declared at scale {scale}: {'; '.join(rows)}")
        rows = []
        for row, runs in selection.superseded.items():
            differences = dict.fromkeys(way for ways in runs.values() for way in ways)
            rows.append(f"{titles[row]} ({', '.join(differences)}: {', '.join(runs)})")
        if rows:
            left_out.append(f"{source}: left out, trained otherwise than the row declares: {'; '.join(rows)}")
    return [*marked, *left_out]
