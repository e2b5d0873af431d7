"""Reports whose cells are filled by runs: their rows, and which runs fill a cell and why others do not."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

from infini.config.lengths import parse_lengths
from infini.config.schema import evaluation_keys, training_keys
from infini.errors import InputError, did_you_mean, require
from infini.records import RunRecord, start_of, value_at
from infini.report.kind import ReportKind
from infini.report.tables import (
    RenderedReport,
    Table,
    disputes,
    left_out,
    products,
    provenance,
    seconds_table,
    trainings,
    without_runs,
)

IRRELEVANT_SETTINGS = {
    "task.data_dir",
    "scale.knockouts",
    "scale.eval_segments_per_call",
    # The number and the length of the examples are compared cell by cell.
    "task.examples",
    "task.input_length",
    "task.rows_per_call",
    "recipe.checkpoint_activations",
    "recipe.checkpoint_segments",
    "recipe.loss_chunk",
    "recipe.save_every",
}
"""Settings that change neither the training nor the measurement. They change where, how fast, or what else is done."""
# task.positions acts through model.positions alone; older runs of models without positions do not have it.
_LEFT_OUT = IRRELEVANT_SETTINGS | {"task.positions"}
NOT_LEARNED = {f"{group}.{key}" for group in ("task", "scale") for key in evaluation_keys(group)} | {"task.positions"}
"""Keys that only an evaluation reads, although a training's configuration has them too, and one without effect."""
_NOT_ASKED = {f"task.{key}" for key in training_keys("task")}
"""Keys that only a training reads, although an evaluation's configuration has them, too: perhaps the defaults."""
_TRAINING_GROUPS = ("model", "dims", "optimizer", "recipe")


Drawings = Mapping[str, Callable[[Path], list[Path]]]
"""Kind of figure -> a function of the figure's path without suffix, which draws it and returns the files; empty if
there is nothing to draw."""


@dataclass(frozen=True)
class Selection:
    """The evaluation runs behind a report, their training runs, and what differs from the report's declaration."""

    runs: dict[str, list[RunRecord]]
    """Row name -> its evaluation runs, ordered by seed. Rows without a run are not in it."""
    parents: dict[str, RunRecord]
    """Run id -> training record, for every training among the records."""
    mismatches: dict[str, list[str]] = field(default_factory=dict)
    """Row name -> how its runs differ from what the row declares. Rows that match are not in it."""
    disputed: dict[str, str] = field(default_factory=dict)
    """Row name -> which runs compete for a cell, and how they differ. Its runs are in none of the others."""
    superseded: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    """Row name -> run id -> how the run differs from what the row declares. Runs that differ less take its place."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Run id -> why an evaluation of this task and scale fills no cell, for those that a reader would look for."""

    @property
    def all_runs(self) -> list[RunRecord]:
        """Every evaluation run of the selection."""
        return [run for runs in self.runs.values() for run in runs]

    @property
    def synthetic(self) -> bool:
        """Whether any of these runs was measured on synthetic text."""
        return any(run.synthetic for run in self.all_runs)

    def learned_synthetic_text(self, run: RunRecord) -> bool:
        """Whether the model of `run`, or a model its training started from, was trained on synthetic text."""
        ancestor = self.training(run)
        while ancestor is not None and not ancestor.synthetic:
            ancestor = self.parents.get(ancestor.started_from or "")
        return ancestor is not None

    def training(self, run: RunRecord) -> RunRecord | None:
        """The training run that made the checkpoint of `run`."""
        return self.parents.get(run.parent) if run.parent else None

    def several_trainings(self, row: str) -> dict[int, dict[str, set[str]]]:
        """Seed -> training -> its evaluation runs, for each seed of a row that has several trainings."""
        found: dict[int, dict[str, set[str]]] = {}
        for run in self.runs.get(row, ()):
            if run.parent:
                found.setdefault(run.seed, {}).setdefault(run.parent, set()).add(run.run_id)
        return {seed: by_training for seed, by_training in found.items() if len(by_training) > 1}

    def spent(self, run: RunRecord, cost: str) -> Any:
        """A cost of the training that made the checkpoint of `run`, for example tokens_seen; None if it is unknown."""
        training = self.training(run)
        return training.cost.get(cost) if training else None

    def training_config(self, run: RunRecord) -> dict[str, Any]:
        """The configuration the model of `run` was trained with, by run ids (traced_config). If its training is
        unknown, that of `run`."""
        training = self.training(run)
        return training.traced_config if training else run.config


class DisputedError(InputError):
    """Two runs compete for a cell. problem: which, without how a reader may choose."""

    def __init__(self, problem: str, choose: str) -> None:
        super().__init__(f"{problem}; {choose}")
        self.problem = problem


@dataclass(frozen=True, kw_only=True)
class RunReport(ReportKind, ABC):
    """A kind of report whose cells are filled by evaluation runs."""

    one_corpus: ClassVar[bool] = False
    """Whether all rows must have been measured on the same data with the same tokenizer. Otherwise each row may have
    its own."""
    figure_kinds: ClassVar[tuple[str, ...]]
    """Figures that can be drawn."""
    choices: ClassVar[tuple[str, ...]]
    """Values of `aggregate` that allow several runs for one cell. The first is the one that claims use."""
    one_match_is_enough: ClassVar[bool] = False
    """Whether a run also supersedes runs of other seeds that differ more from what the row declares."""
    names_replaced: ClassVar[bool] = False
    """Whether runs of a row that fill no cell, because others do, are among those that are left out."""
    published_figures: list[str] | None = None
    """Kinds of the figures that are published, of `figure_kinds`; null: all that can be drawn."""
    aggregate: str | None = None
    """The choice among several runs of one row, scale and seed: null (an error) or one of `choices`. newest; mean; or
    largest, with which all are kept and the report takes, cell by cell, the run with most examples, the newest of
    several such runs. If they come from several trainings of one seed, the table says so."""
    run: list[str] | str = "all"
    """Rows that `infini reproduce` makes, of those with a model: names, or all."""

    @property
    def wanted(self) -> list[str]:
        """The names in `run`."""
        return [self.run] if isinstance(self.run, str) else self.run

    def check_choices(self) -> None:
        """Raise InputError for an `aggregate`, or a name in `run` or `published_figures`, that is not allowed."""
        named, rows = self.published_figures, self.titles
        fits = named is None or (isinstance(named, list) and set(map(str, named)) <= set(self.figure_kinds))
        kinds = ", ".join(self.figure_kinds)
        require(fits, "report.published_figures", named, f"null, or a list of {kinds}")
        *others, last = self.choices
        choices = f"{', '.join(['null', *others])} or {last}"
        require(self.aggregate in (None, *self.choices), "report.aggregate", self.aggregate, choices)
        require(isinstance(self.run, str | list), "report.run", self.run, "all, or names of rows")
        for name in self.wanted:
            if name != "all" and name not in rows:
                raise InputError(f"report.run={name!r}: all, or names of {', '.join(rows)}{did_you_mean(name, rows)}")

    @property
    def parts(self) -> Sequence[Self]:
        """The report of each task. Runs are selected, and figures drawn, for each task separately."""
        return (self,)

    @property
    @abstractmethod
    def titles(self) -> Mapping[str, str]:
        """Row name -> its title, in the order of the rows."""

    @abstractmethod
    def row_of(self, run: RunRecord, known: Selection) -> tuple[str | None, str]:
        """The row that an evaluation of this task belongs to; or None, and why it belongs to none, which is empty if no
        reader would look for it in this table. known: has the training runs."""

    @abstractmethod
    def cells_of(self, run: RunRecord) -> frozenset[Any]:
        """The cells of its row that a run fills. Two runs of a row and seed compete only for cells that both fill."""

    def limit_to_cells(self, run: RunRecord, cells: Collection[Any]) -> RunRecord:
        """A run with some of its cells alone. Kinds whose runs fill several cells, and that offer the aggregate newest,
        must define it."""
        assert set(cells) == set(self.cells_of(run)), f"{type(self).__name__} needs a limit_to_cells of its own"
        return run

    def find_mismatches(self, row: str, runs: Sequence[RunRecord], known: Selection) -> dict[str, list[str]]:
        """Run id -> how the run differs from what its row declares. Runs that match are not in it.

        runs: some, of one row and scale. known: has the training runs.
        """
        return {}

    @abstractmethod
    def render(
        self,
        scale: str,
        published: Iterable[RunRecord],
        yours: Iterable[RunRecord] | None = None,
    ) -> RenderedReport:
        """The tables of the report at one scale. Rows whose runs differ from what they declare are marked.

        published: published records; synthetic ones are left out. InputError if two of them compete for a cell, see
        `select_runs`. yours: records of the results folder; None renders the published records alone. A row of which
        two of them compete for a cell has a mark, and a note names the runs.
        """

    @abstractmethod
    def drawings(self, scale: str, selection: Selection, known: Iterable[RunRecord]) -> Drawings:
        """Kind of figure -> what draws it. known: all records beside the selection."""


class RowsOfOneTask(RunReport, ABC):
    """A report with one task, with rows of a class of their own."""

    rows_key: ClassVar[str] = "rows"
    """The key of its rows."""

    @property
    def by_name(self) -> Mapping[str, Any]:
        """Row name -> the row, in the order of the table."""
        rows: Mapping[str, Any] = getattr(self, self.rows_key)
        return rows

    def check_rows(self) -> None:
        """Raise InputError for what is not allowed."""
        for name, row in self.by_name.items():
            if row.lengths:
                parse_lengths(row.lengths, f"report.{self.rows_key}.{name}.lengths")
        self.check_choices()

    @property
    def titles(self) -> Mapping[str, str]:
        return {name: row.title for name, row in self.by_name.items()}

    @property
    def short_titles(self) -> Mapping[str, str]:
        """Titles in figures, where there is little room: `short` of the rows that have it."""
        return {name: getattr(row, "short", "") or row.title for name, row in self.by_name.items()}

    @property
    def to_run(self) -> list[str]:
        """The rows that `infini reproduce` makes, in the order of the table."""
        runnable = [name for name, row in self.by_name.items() if row.model]
        return [name for name in runnable if "all" in self.wanted or name in self.wanted]

    def rows_of(self, models: Sequence[str]) -> list[str]:
        """Those of `to_run` whose model is one of `models`, or all of them if `models` is empty; see rows_of_models."""
        known = {name: str(row.model) for name, row in self.by_name.items() if row.model}
        return rows_of_models(self.name, {name: known[name] for name in self.to_run}, models, known)


class RowMatchingReport(RowsOfOneTask):
    """A report whose rows say why an evaluation does not belong to them."""

    names_replaced = True

    @abstractmethod
    def row_mismatches(self, name: str, run: RunRecord, known: Selection) -> list[str]:
        """Reasons why an evaluation of this task does not belong to a row, one phrase each; empty if it does."""

    def row_of(self, run: RunRecord, known: Selection) -> tuple[str | None, str]:
        if not self.cells_of(run):
            return None, "it measures nothing that this table has a cell for"
        of_model = [name for name, row in self.by_name.items() if row.model == run.model]
        if not of_model:
            return None, f"no row has model={run.model}"
        mismatches = {name: self.row_mismatches(name, run, known) for name in of_model}
        # The first that fits, else the row that it differs least from.
        nearest = min(mismatches, key=lambda name: len(mismatches[name]))
        if ways := mismatches[nearest]:
            return None, f"it is not {self.titles[nearest]!r}: {'; '.join(ways)}"
        return nearest, ""

    def with_provenance(
        self,
        scale: str,
        sources: Mapping[str, Selection],
        tables: Sequence[Table],
        notes: Sequence[str],
        details: Callable[[Selection], Sequence[str]],
        expected: Sequence[str],
        behind: Sequence[Table] = (),
    ) -> RenderedReport:
        """These tables and notes, with the notes on the runs of each source and the table of what they cost.

        tables: those of `rows_by_source`, which has `expected`. behind: tables of how their cells were measured.
        details: what the runs of a source read.
        """
        missing, notes = left_out(sources), list(notes)
        for source, selection in sources.items():
            if (runs := selection.all_runs) or source != "yours" or not missing:
                notes += [provenance(source, runs, details(selection)), *products(source, self.titles, selection)]
        missing = [*without_runs(self.titles, sources, expected), *missing]
        notes += [*missing, *trainings(tables, self.titles, sources), *disputes(sources)]
        shown = [*tables, *behind, *seconds_table(self.titles, sources)]
        return self.rendered(scale, shown, notes, legend=tuple(missing))


def differences(config: Mapping[str, Any], wanted: Mapping[str, Any], whose: str = "the row") -> list[str]:
    """Dotted keys of `wanted` whose value in `config` is another one, with both."""
    found = {key: value_at(config, key) for key in wanted}
    return [f"{key}={found[key]}, {whose} has {value}" for key, value in wanted.items() if found[key] != value]


def rows_of_models(
    report: str, rows: Mapping[str, str], models: Sequence[str], known: Mapping[str, str] | None = None
) -> list[str]:
    """The rows whose model is one of `models`, or all rows if `models` is empty.

    rows: row -> its model, for the rows to run. known: the same for all rows among which report.run chooses; None if
    the report has no report.run. Raises InputError for a model that has no row.
    """
    for model in models:
        if model in rows.values():
            continue
        others = [row for row, of in (known or {}).items() if of == model]
        if others:
            raise InputError(
                f"model={model}: report={report} has rows of it that report.run leaves out; add "
                f"report.run=[{','.join(others)}]"
            )
        has = ", ".join(dict.fromkeys((known or rows).values()))
        raise InputError(f"model={model}: report={report} has no row of this model; it has rows of {has}")
    return [row for row, model in rows.items() if not models or model in models]


def select_sources(
    report: RunReport,
    scale: str,
    published: Iterable[RunRecord],
    yours: Iterable[RunRecord] | None,
) -> dict[str, Selection]:
    """Source (published, yours) -> its selection. Arguments as for `RunReport.render`."""
    known = {"published": [run for run in published if not run.synthetic]}
    if yours is not None:
        known["yours"] = list(yours)
    return {source: select_runs(report, scale, records, source == "yours") for source, records in known.items()}


def select_runs(report: RunReport, scale: str, records: Iterable[RunRecord], keep_disputes: bool = False) -> Selection:
    """Select the evaluation runs that fill the cells of `report` at `scale`.

    Runs on synthetic text are dropped if there are runs on real text: in the whole table if it has one corpus, else in
    the same row. A run that differs from what its row declares is superseded by a run of the same row and seed with
    only some of these differences, or none (see RunReport.one_match_is_enough). The remaining runs must agree: one
    corpus and tokenizer for the whole table, one setting for each row over all its seeds, one run for each seed. If an
    evaluation was repeated with the same outcome, the newest is kept. With `aggregate: newest` the newest run
    decides each of these, cell by cell where runs of one setting fill several; with `mean` all runs of a seed are kept.

    keep_disputes: leave out rows whose runs compete for a cell, and say so in Selection.disputed; otherwise InputError
    names the runs.
    """
    known = list(records)
    selection = Selection({}, {record.run_id: record for record in known if record.verb == "train"})
    asked = [run for run in known if (run.verb, run.task, run.scale) == ("eval", report.task, scale)]
    found = {run.run_id: report.row_of(run, selection) for run in asked}
    rows = {run_id: row for run_id, (row, _) in found.items() if row is not None}
    selection.left_out.update({run_id: why for run_id, (_, why) in found.items() if why})
    candidates = [run for run in asked if run.run_id in rows]
    if report.one_corpus:
        candidates = _without_synthetic(candidates)
        for name in report.titles:
            # What steps back has no say in which data the table is about.
            of_row = [run for run in candidates if rows[run.run_id] == name]
            if not of_row:
                continue
            replaced = _superseded(report, of_row, report.find_mismatches(name, of_row, selection))
            candidates = [run for run in candidates if run.run_id not in replaced]
            if replaced:
                selection.superseded[name] = replaced
        what = f"{report.name} at scale {scale}: different data in one table"
        try:
            candidates = _agreeing(candidates, _corpus, report, what)
        except DisputedError as error:
            if not keep_disputes:
                raise
            present = {rows[record.run_id] for record in candidates}
            return replace(selection, disputed={name: str(error) for name in report.titles if name in present})
    for name in report.titles:
        runs = _without_synthetic([record for record in candidates if rows[record.run_id] == name])
        if not runs:
            continue
        try:
            _select_row(report, name, runs, selection)
        except DisputedError as error:
            if not keep_disputes:
                raise
            selection.disputed[name] = str(error)
    if report.names_replaced:
        for run_id in rows.keys() - {run.run_id for run in selection.all_runs}:
            if rows[run_id] in selection.disputed:
                # The row's cells say so themselves.
                continue
            selection.left_out[run_id] = f"another run fills the row {report.titles[rows[run_id]]!r}"
    return selection


def _select_row(report: RunReport, name: str, runs: list[RunRecord], selection: Selection) -> None:
    """Select the runs of one row."""
    where = f"{report.name} at scale {runs[0].scale}, {name}"
    mismatches = report.find_mismatches(name, runs, selection)
    if replaced := _superseded(report, runs, mismatches):
        selection.superseded[name] = replaced
        runs = [run for run in runs if run.run_id not in replaced]
    runs = _agreeing(runs, _corpus, report, f"{where}: different data in one row")
    settings = partial(_settings, selection=selection)
    runs = _agreeing(runs, settings, report, f"{where}: runs with different settings in one cell")
    chosen: list[RunRecord] = []
    for seed in sorted({run.seed for run in runs}):
        chosen.extend(_of_seed(report, sorted((run for run in runs if run.seed == seed), key=age), where))
    selection.runs[name] = chosen
    if found := dict.fromkeys(text for run in chosen for text in mismatches.get(run.run_id, ())):
        selection.mismatches[name] = list(found)


def _superseded(
    report: RunReport, runs: Sequence[RunRecord], mismatches: Mapping[str, list[str]]
) -> dict[str, list[str]]:
    """Run id -> how the run differs from what its row declares, for those of which another differs only in some ways.

    runs: of one row. mismatches: theirs, see RunReport.find_mismatches. With an `aggregate` none steps back: the reader
    has chosen.
    """
    if report.aggregate is not None:
        return {}
    differing = {run.run_id: set(mismatches.get(run.run_id, ())) for run in runs}
    return {
        run.run_id: mismatches[run.run_id]
        for run in runs
        if any(
            differing[other.run_id] < differing[run.run_id]
            for other in runs
            if other.seed == run.seed or report.one_match_is_enough
        )
    }


def _without_synthetic(runs: list[RunRecord]) -> list[RunRecord]:
    """The runs on real text, or all if there are none."""
    return [run for run in runs if not run.synthetic] or runs


def _of_seed(report: RunReport, runs: list[RunRecord], where: str) -> list[RunRecord]:
    """The runs that count. runs: those of one row and seed, oldest first."""
    if report.aggregate in ("mean", "largest"):
        return runs
    chosen: list[RunRecord] = []
    for run in reversed(runs):
        if report.aggregate == "newest":
            # A newer run that fills some of its cells leaves it the others.
            cells = report.cells_of(run)
            if left := cells.difference(*map(report.cells_of, chosen)):
                chosen.append(run if left == cells else report.limit_to_cells(run, left))
            continue
        rivals = [other for other in chosen if report.cells_of(other) & report.cells_of(run)]
        if all(_is_part_of(run, rival) for rival in rivals):
            if not rivals:
                chosen.append(run)
        elif all(_is_part_of(rival, run) for rival in rivals):
            chosen = [*(other for other in chosen if other not in rivals), run]
        else:
            raise DisputedError(
                f"{where}: two runs for seed {run.seed}: {run.run_id} and {rivals[-1].run_id}",
                f"choose with {' or '.join(f'report.aggregate={name}' for name in report.choices)}",
            )
    return chosen[::-1]


def _is_part_of(run: RunRecord, other: RunRecord) -> bool:
    """Whether another run evaluates the same model on the same data and has all of this one's outcome, so that it can
    take its place."""
    if (run.parent is None and "base" not in run.environment) or run.parent != other.parent:
        return False
    # The files beside the records contain times.
    read, others = ({key: value for key, value in one.data.items() if key != "beside"} for one in (run, other))
    if (run.config_hash, read) != (other.config_hash, others):
        return False
    measured = (run.results, other.results), (run.series, other.series)
    # What measured nothing says nothing about the outcome.
    return all(mine == theirs or (mine and mine == {key: theirs.get(key) for key in mine}) for mine, theirs in measured)


def age(run: RunRecord) -> tuple[str, str]:
    """The older of two runs comes first."""
    return run.started, run.run_id


def cells_with_most(
    runs: Iterable[RunRecord],
    place: Callable[[Mapping[str, Any]], Any],
    asked: Callable[[Mapping[str, Any]], float] = lambda cell: cell["examples"],
) -> dict[tuple[int, Any], tuple[RunRecord, dict[str, Any]]]:
    """(seed, place) -> run and cell: the cell with most examples, and of several such cells the newest. place: of a
    cell; None leaves it out. asked: its number of examples."""
    chosen: dict[tuple[int, Any], tuple[RunRecord, dict[str, Any]]] = {}
    for run in sorted(runs, key=age):
        for cell in run.series.get("cells", ()):
            key = run.seed, place(cell)
            if key[1] is not None and (key not in chosen or asked(cell) >= asked(chosen[key][1])):
                chosen[key] = run, cell
    return chosen


def _agreeing(
    runs: Sequence[RunRecord], key: Callable[[RunRecord], dict[str, str]], report: RunReport, problem: str
) -> list[RunRecord]:
    """All runs if `key` is the same for all of them; with `aggregate: newest`, the runs that agree with the newest."""
    if not runs:
        return []
    last = max(runs, key=age)
    expected = key(last)
    agreeing = [run for run in runs if key(run) == expected]
    if len(agreeing) == len(runs) or report.aggregate == "newest":
        return agreeing
    other = next(run for run in runs if key(run) != expected)
    found = key(other)
    differing = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    detail = ", ".join(f"{name} {found.get(name, 'unset')} and {expected.get(name, 'unset')}" for name in differing[:3])
    newest = "take the newest with report.aggregate=newest"
    choose = newest if "newest" in report.choices else "move one of them elsewhere"
    raise DisputedError(f"{problem}: {other.run_id} and {last.run_id} ({detail})", choose)


def _corpus(run: RunRecord) -> dict[str, str]:
    found = {name: json.dumps(run.data.get(name), sort_keys=True) for name in ("revision", "tokenizer")}
    # Tokens of each document that are read.
    read = value_at(run.config, "scale.eval_max_tokens")
    return found if read is None else found | {"scale.eval_max_tokens": json.dumps(read)}


def _settings(run: RunRecord, selection: Selection) -> dict[str, str]:
    # A run with neither parent nor base used no model, whatever its configuration says.
    of_model = run.parent or "base" in run.environment
    training, evaluation = selection.training_config(run) if of_model else {}, run.config
    # A pretrained model that was not trained has a recipe and an optimizer in its configuration all the same.
    groups = _TRAINING_GROUPS if run.parent else ("model", "dims")
    asked = {name: value for name, value in _flat(evaluation, "task", "scale").items() if name not in _NOT_ASKED}
    settings = _start(training, selection) | _flat(training, *groups) | asked
    # The prompts of the training may differ from those of the evaluation.
    learned = _flat(training, "task") if run.parent else {}
    kept = {name: value for name, value in settings.items() if name not in _LEFT_OUT}
    return kept | {f"training {name}": learned[name] for name in learned.keys() - _LEFT_OUT - NOT_LEARNED}


def _start(training: Mapping[str, Any], selection: Selection) -> dict[str, str]:
    """Settings of the training that a training started from; empty if it started from fresh weights."""
    name = start_of(training)
    if name is None:
        return {}
    start = selection.parents.get(name)
    if start is None:
        return {"init_from": json.dumps("unknown")}
    settings = _start(start.traced_config, selection) | _flat(start.config, "task", *_TRAINING_GROUPS)
    kept = {f"start {key}": value for key, value in settings.items() if key not in _LEFT_OUT | NOT_LEARNED}
    return kept | {"init_from": json.dumps(start.model)}


def learned_from(training: Mapping[str, Any]) -> dict[str, str]:
    """Settings of the task and the recipe that a training has learned by."""
    found = _flat(training, "task", "recipe")
    return {key: value for key, value in found.items() if key not in _LEFT_OUT | NOT_LEARNED}


def _flat(values: Mapping[str, Any], *names: str) -> dict[str, str]:
    """Dotted key -> value as JSON, below these names, for values that are set."""
    found: dict[str, str] = {}
    for name in names:
        value = values.get(name)
        if isinstance(value, Mapping):
            found |= {f"{name}.{key}": text for key, text in _flat(value, *value).items()}
        elif value is not None:
            found[name] = json.dumps(value, sort_keys=True)
    return found
