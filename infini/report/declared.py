"""Whether a model was trained as its row declares: sizes, recipe, optimizer and options, as the scale has them.

A training of three steps is a run like any other, and fills the cell of a table if it is let; beside one of thousands
it says nothing about the models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache
from importlib import resources
from typing import Any, Protocol

import yaml

from infini.records import RunRecord
from infini.report.search import KEY
from infini.report.selection import IRRELEVANT_SETTINGS, Selection

GROUPS = ("dims", "recipe", "optimizer", "model")
NOT_COMPARED = {"dims.name", "recipe.name"} | IRRELEVANT_SETTINGS
"""Names say nothing that the values do not, and the others change no result."""
APART_MARK = "\N{DAGGER}"
"""Behind what comes of a model that was trained, or asked, otherwise than its row declares."""
MAX_NAMED = 4
"""Ways in which a row is apart that a note lists."""
Declared = Mapping[str, Mapping[str, Any]]
"""Group -> key -> value."""


class Declares(Protocol):
    """What is to be known of a report."""

    @property
    def task(self) -> str: ...
    def model_of(self, row: str) -> str: ...
    def settings_of(self, row: str, scale: str) -> Sequence[str] | None:
        """Settings of a row's trainings beside those of its model and scale, as the command line takes them."""
        ...


@cache
def declared_at(task: str, scale: str) -> Declared:
    """Sizes, recipe, optimizer, task and decoding at a scale, where nothing is set on the command line."""
    from infini.config.compose import compose

    cfg = compose([f"task={task}", f"scale={scale}"])
    groups = {"dims": asdict(cfg.dims), "recipe": asdict(cfg.recipe), "optimizer": asdict(cfg.optimizer)}
    # The task has what options of models follow; it and decoding are what an evaluation is asked.
    return {**groups, "task": asdict(cfg.task), "decoding": asdict(cfg.decoding)}


@cache
def _options(model: str) -> Mapping[str, Any]:
    path = resources.files("infini.conf").joinpath("model", f"{model}.yaml")
    return dict(yaml.safe_load(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def tuned_rate(task: str, scale: str, model: str, optimizer: str) -> float | None:
    """The rate that a search found for a model (conf/tuned); None where none is there."""
    path = resources.files("infini.conf").joinpath("tuned", f"{task}_{scale}_{model}_{optimizer}.yaml")
    return float(yaml.safe_load(path.read_text(encoding="utf-8"))["optimizer"]["lr"]) if path.is_file() else None


def expected(report: Declares, row: str, scale: str, declared: Declared) -> dict[str, Any]:
    """Dotted key -> value that the trainings of a row have at a scale."""
    groups = {**declared, "model": _options(report.model_of(row))}
    found = {f"{group}.{key}": value for group, values in groups.items() for key, value in values.items()}
    # Each model's rate is that of its search, where there was one; otherwise any will do.
    found[KEY] = tuned_rate(report.task, scale, report.model_of(row), str(found.get("optimizer.name")))
    if found[KEY] is None:
        del found[KEY]
    for text in report.settings_of(row, scale) or ():
        key, _, value = text.partition("=")
        if key.partition(".")[0] in GROUPS:
            found[key] = yaml.safe_load(value)
    # What follows the recipe, as a window of the training length.
    return {key: found.get(value[2:-1]) if str(value).startswith("${") else value for key, value in found.items()}


def apart(training: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """How a training's configuration is not what is wanted: "recipe.steps 3 instead of 2600". What its configuration
    does not have did not exist yet, or is not known."""
    found = {f"{group}.{key}": value for group in GROUPS for key, value in (training.get(group) or {}).items()}
    if "model.rope_base" in found:
        found.setdefault("model.positions", "rotary")
    return [
        f"{key} {_plain(found[key])} instead of {_plain(value)}"
        for key, value in wanted.items()
        if key in found and key not in NOT_COMPARED and found[key] != value
    ]


def _plain(value: Any) -> str:
    return "null" if value is None else str(value)


def trained_otherwise(report: Declares, row: str, runs: Sequence[RunRecord], known: Selection) -> dict[str, list[str]]:
    """Run id -> how its model was trained otherwise than the row declares; runs as declared, and those without a model,
    are left out. runs: some, of one scale. known: has the training runs."""
    scale = runs[0].scale
    wanted = expected(report, row, scale, declared_at(report.task, scale))
    ways = {run.run_id: apart(known.training_config(run), wanted) for run in runs if run.parent is not None}
    return {run_id: found for run_id, found in ways.items() if found}


def find_mismatches(report: Declares, scale: str, selection: Selection, declared: Declared) -> Selection:
    """The same selection, which says of every row whose runs are not as declared how they are apart. A model that never
    saw the task's text is none of its models; where made-up text is read as well, the title of the table says so."""
    for row, runs in selection.runs.items():
        wanted = expected(report, row, scale, declared)
        # A reference has no training.
        found = [text for run in runs if run.parent for text in apart(selection.training_config(run), wanted)]
        if any(selection.learned_made_up_text(run) and not run.synthetic for run in runs):
            found.append("trained on made-up text")
        if found:
            selection.apart[row] = list(dict.fromkeys(found))
    return selection


def note_of_apart(source: str, scale: str, found: Mapping[str, Sequence[str]], titles: Mapping[str, str]) -> str:
    """A note on what is marked. found: row -> how it is apart."""
    rows = []
    for row, ways in found.items():
        more = f" and {len(ways) - MAX_NAMED} more" if len(ways) > MAX_NAMED else ""
        rows.append(f"{titles[row]} ({', '.join(ways[:MAX_NAMED])}{more})")
    return f"{APART_MARK} {source}: not as the row is declared at scale {scale}: {'; '.join(rows)}"
