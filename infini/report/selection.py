"""Which runs stand behind a report: one corpus, one scale, and for each model one setting and one run a seed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from infini.config.schema import evaluation_keys
from infini.errors import InputError, did_you_mean
from infini.records import RunRecord, value_at

AGGREGATES = (None, "newest", "mean")

IRRELEVANT_SETTINGS = {
    "task.data_dir",
    "scale.knockouts",
    "scale.eval_segments_per_call",
    # How many were asked, and how long, is chosen cell by cell.
    "task.examples",
    "task.input_length",
    "task.rows_per_call",
    "recipe.checkpoint_activations",
    "recipe.checkpoint_segments",
    "recipe.loss_chunk",
    "recipe.save_every",
}
"""Settings that change neither what was trained nor what was measured, only where, how fast or what beside it."""
# What model.positions follows, of models that have it, says nothing beside it; older runs of the others do not have it.
_LEFT_OUT = IRRELEVANT_SETTINGS | {"task.positions"}
# Of the task: what only an evaluation reads, whatever stands in a training's configuration.
_NOT_LEARNED = {f"task.{key}" for key in evaluation_keys("task")}
_TRAINING_GROUPS = ("model", "dims", "optimizer", "recipe")
_EVALUATION_GROUPS = ("task", "scale")


class AnyReport(Protocol):
    """What choosing runs needs to know of a report."""

    @property
    def name(self) -> str: ...
    @property
    def aggregate(self) -> str | None:
        """What several runs of one row, scale and seed are: null (an error), newest, mean, or largest (all are kept,
        the report chooses cell by cell)."""
        ...

    @property
    def task(self) -> str:
        """The task whose runs fill the cells."""
        ...

    @property
    def one_corpus(self) -> bool:
        """Whether all rows must have been measured on the same data with the same tokenizer, or each by itself."""
        ...

    @property
    def ways_to_choose(self) -> tuple[str, ...]:
        """Values of `aggregate` that allow several runs."""
        ...

    @property
    def titles(self) -> Mapping[str, str]:
        """Row name -> its title, in the order of the rows."""
        ...

    def row_of(self, run: RunRecord, known: Selection) -> str | None:
        """The row that an evaluation run belongs to; None when it belongs to none. known: has the training runs."""
        ...

    def cells_of(self, run: RunRecord) -> frozenset[Any]:
        """Which of its row's cells a run fills; runs of one row and seed that share none do not compete."""
        ...

    def as_declared(self, runs: list[RunRecord], row: str, known: Selection) -> list[RunRecord]:
        """A row's runs without those that are not what it declares and step back for others that are. known: has the
        training runs."""
        ...


def checked(cls: Any, config: Any, *required: str) -> Any:
    """A report of a dataclass, from a mapping or a dataclass; InputError for a key that is missing or unknown."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        config = dataclasses.asdict(config)
    known = {entry.name for entry in dataclasses.fields(cls)}
    for key in config:
        if key not in known:
            raise InputError(f"report.{key}: no such key in a report{did_you_mean(str(key), known)}")
    if missing := sorted({"name", *required} - set(config)):
        raise InputError(f"report: missing {', '.join(missing)}")
    return cls(**config)


@dataclass(frozen=True)
class Selection:
    """The runs behind a report, and the training runs behind those."""

    runs: dict[str, list[RunRecord]]
    """Row name -> its evaluation runs, ordered by seed; rows without a run are left out."""
    parents: dict[str, RunRecord]
    """Run id -> training record, for every parent that was among the records."""
    apart: dict[str, list[str]] = field(default_factory=dict)
    """Row name -> how its runs are not what the row declares; rows whose runs are so are left out."""
    aside: dict[str, list[RunRecord]] = field(default_factory=dict)
    """Row name -> runs that were left out beside others as the row declares; rows without any are not named."""

    @property
    def all_runs(self) -> list[RunRecord]:
        """Every evaluation run of the selection."""
        return [run for runs in self.runs.values() for run in runs]

    @property
    def synthetic(self) -> bool:
        """Whether these runs were measured on made-up text."""
        return any(run.synthetic for run in self.all_runs)

    def learned_made_up_text(self, run: RunRecord) -> bool:
        """Whether the model of `run`, or the one its training started from, was trained on made-up text."""
        ancestor = self.training(run)
        while ancestor is not None and not ancestor.synthetic:
            ancestor = self.parents.get(ancestor.config.get("init_from") or "")
        return ancestor is not None

    def training(self, run: RunRecord) -> RunRecord | None:
        """The training run that made the checkpoint of `run`."""
        return self.parents.get(run.parent) if run.parent else None

    def training_config(self, run: RunRecord) -> dict[str, Any]:
        """The configuration the model of `run` was trained with, as far as it is known."""
        training = self.training(run)
        return training.config if training else run.config


def select_runs(report: AnyReport, scale: str, records: Iterable[RunRecord]) -> Selection:
    """Choose the evaluation runs that fill the cells of `report` at `scale`.

    Runs on real text put synthetic ones aside, in the whole table where it has one corpus, else in their row, and runs
    as a row declares those that are not (AnyReport.as_declared). What remains must agree: one corpus and tokenizer for
    the whole table, one setting a row over all its seeds, one run for each seed (of an evaluation that was made again
    with the same outcome the newest). With `aggregate: newest` the newest run decides each of these; with `mean` all
    runs of a seed are kept.

    Raises:
        InputError: there are two candidates for a cell, and the report does not say what to do; both are named.
    """
    known = list(records)
    parents = {record.run_id: record for record in known if record.verb == "train"}
    selection = Selection({}, parents)
    rows = {
        record.run_id: report.row_of(record, selection)
        for record in known
        if record.verb == "eval" and record.scale == scale
    }
    candidates = [record for record in known if rows.get(record.run_id) is not None]
    newest = report.aggregate == "newest"
    if report.one_corpus:
        candidates = _real(candidates)
        what = f"{report.name} at scale {scale}: different data in one table"
        candidates = _agreeing(candidates, _corpus, newest, what)
    for name in report.titles:
        where = f"{report.name} at scale {scale}, {name}"
        runs = _real([record for record in candidates if rows[record.run_id] == name])
        counting = report.as_declared(runs, name, selection)
        kept = {run.run_id for run in counting}
        if left_out := [run for run in runs if run.run_id not in kept]:
            selection.aside[name] = left_out
        runs = counting
        runs = _agreeing(runs, _corpus, newest, f"{where}: different data in one row")
        runs = _agreeing(
            runs, lambda run: _settings(run, selection), newest, f"{where}: runs with different settings in one cell"
        )
        chosen: list[RunRecord] = []
        for seed in sorted({run.seed for run in runs}):
            chosen.extend(_of_seed(report, sorted((run for run in runs if run.seed == seed), key=_age), where))
        if chosen:
            selection.runs[name] = chosen
    return selection


def _real(runs: list[RunRecord]) -> list[RunRecord]:
    """Runs on real text put those on made-up text aside."""
    return [run for run in runs if not run.synthetic] or runs


def _of_seed(report: AnyReport, runs: list[RunRecord], where: str) -> list[RunRecord]:
    """Of the runs of one row and seed, oldest first, those that count."""
    if report.aggregate in ("mean", "largest"):
        return runs
    chosen: list[RunRecord] = []
    for run in reversed(runs):
        rivals = [other for other in chosen if report.cells_of(other) & report.cells_of(run)]
        if rivals and report.aggregate is None and not all(_made_again(run, rival) for rival in rivals):
            raise InputError(
                f"{where}: two runs for seed {run.seed}: {run.run_id} and {rivals[-1].run_id}; "
                f"choose with {' or '.join(f'report.aggregate={name}' for name in report.ways_to_choose)}"
            )
        if not rivals:
            chosen.append(run)
    return chosen[::-1]


def _made_again(run: RunRecord, later: RunRecord) -> bool:
    """Whether a later run is this evaluation once more: which of them is taken makes no difference."""
    ours, theirs = ((one.parent, one.config_hash, one.results, one.series) for one in (run, later))
    if run.parent is None or ours != theirs:
        return False
    # Files beside them say how long each took.
    read, read_later = ({key: value for key, value in one.data.items() if key != "beside"} for one in (run, later))
    return read == read_later


def _age(run: RunRecord) -> tuple[str, str]:
    return run.started, run.run_id


def _agreeing(
    runs: Sequence[RunRecord], key: Callable[[RunRecord], dict[str, str]], newest: bool, problem: str
) -> list[RunRecord]:
    """All runs when `key` is the same for them; with `newest`, those that agree with the newest run."""
    if not runs:
        return []
    last = max(runs, key=_age)
    expected = key(last)
    agreeing = [run for run in runs if key(run) == expected]
    if len(agreeing) == len(runs) or newest:
        return agreeing
    other = next(run for run in runs if key(run) != expected)
    found = key(other)
    differing = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    detail = ", ".join(f"{name} {found.get(name, 'unset')} and {expected.get(name, 'unset')}" for name in differing[:3])
    raise InputError(
        f"{problem}: {other.run_id} and {last.run_id} ({detail}); take the newest with report.aggregate=newest"
    )


def _corpus(run: RunRecord) -> dict[str, str]:
    found = {name: json.dumps(run.data.get(name), sort_keys=True) for name in ("revision", "tokenizer")}
    # How much of each document was read.
    read = value_at(run.config, "scale.eval_max_tokens")
    return found if read is None else found | {"scale.eval_max_tokens": json.dumps(read)}


def _settings(run: RunRecord, selection: Selection) -> dict[str, str]:
    # What has no parent was made without a model, whatever stands in its configuration.
    training, evaluation = selection.training_config(run) if run.parent else {}, run.config
    settings = _start(training, selection)
    for config, groups in ((training, _TRAINING_GROUPS), (evaluation, _EVALUATION_GROUPS)):
        for group in groups:
            _flatten(config.get(group), group, settings)
    # A model may be trained on other prompts than it is asked.
    learned: dict[str, str] = {}
    _flatten(training.get("task"), "task", learned)
    kept = {name: value for name, value in settings.items() if name not in _LEFT_OUT}
    return kept | {f"training {name}": learned[name] for name in learned.keys() - _LEFT_OUT - _NOT_LEARNED}


def _start(training: Mapping[str, Any], selection: Selection) -> dict[str, str]:
    """How the model was trained that a training started from; nothing where it started from fresh weights."""
    name = training.get("init_from")
    if not name:
        return {}
    start = selection.parents.get(Path(name).name)
    if start is None:
        return {"init_from": json.dumps("unknown")}
    settings = _start(start.config, selection)
    for group in ("task", *_TRAINING_GROUPS):
        _flatten(start.config.get(group), group, settings)
    kept = {f"start {key}": value for key, value in settings.items() if key not in _LEFT_OUT | _NOT_LEARNED}
    return kept | {"init_from": json.dumps(start.model)}


def _flatten(value: Any, name: str, into: dict[str, str]) -> None:
    if isinstance(value, Mapping):
        for key, entry in value.items():
            _flatten(entry, f"{name}.{key}", into)
    elif value is not None:
        into[name] = json.dumps(value, sort_keys=True)
