"""The table of summaries: ROUGE of every system, the paper's beside ours, and ROUGE by length of the input."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import yaml

from infini.config.lengths import format_length, parse_lengths
from infini.config.schema import groups
from infini.errors import InputError
from infini.records import RunRecord, value_at
from infini.report.book_scores import interval_over_books
from infini.report.declared import APART_MARK, Declared, declared_at, find_mismatches, note_of_apart
from infini.report.rows import RowsOfOneTask
from infini.report.selection import Selection, checked, select_runs
from infini.report.tables import (
    DASH,
    MISSING,
    PLUS_MINUS,
    Cell,
    RenderedReport,
    Row,
    Table,
    commit_of,
    distinct,
    hardware_of,
    measured_cell,
)

COLUMNS = {"rouge1": "R-1", "rouge2": "R-2", "rougeL": "R-L", "rougeLsum": "R-Lsum", "overall": "Overall"}
"""Metric -> heading."""
BESIDE = ("Books", "Tokens read")
"""What stands before the metrics of one length: how many books, and of a book on the average how many tokens."""


@dataclass(frozen=True)
class SummaryRow:
    """A system: `model` of this project, or, without one, only what the paper prints."""

    title: str
    model: str | None = None
    paper: tuple[float, ...] = ()
    """R-1, R-2, R-L and Overall as printed."""
    settings: tuple[str, ...] = ()
    """Of the model, as the command line takes them."""
    at_scale: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Scale -> settings there, beside those or instead of them."""

    def settings_at(self, scale: str) -> list[str]:
        """All settings at a scale, each key once."""
        texts = (*self.settings, *self.at_scale.get(scale, ()))
        return list({text.partition("=")[0]: text for text in texts}.values())

    def fits(self, run: RunRecord, trained: Mapping[str, Any]) -> bool:
        """Whether the run is of this system, trained so and asked with no other options of the model. trained: the
        configuration of its training."""
        wanted = [text.partition("=") for text in self.settings_at(run.scale)]
        same = all(
            # How a summary is drawn is the evaluation's.
            value_at(run.config if key.startswith("decoding.") else trained, key) == yaml.safe_load(value)
            for key, _, value in wanted
        )
        return self.model == run.model and same and trained.get("model") == run.config.get("model")


@dataclass(frozen=True)
class SummaryReport(RowsOfOneTask):
    """A table of summaries, as `conf/report/<name>.yaml` declares it."""

    choice: ClassVar[str] = "newest"

    name: str
    title: str
    task: str
    split: str
    input_lengths: list[str | int]
    """Tokens of a book that the systems read. Several make a column each, of the overall value."""
    systems: dict[str, SummaryRow]
    """Row name -> the system, in the order of the rows."""
    run: list[str] | str = "all"
    """Rows that `infini reproduce` makes, of those with a model; or all."""
    aggregate: str | None = None
    """What several runs of one row and seed are: null (an error) or newest."""
    note: str = ""

    def __post_init__(self) -> None:
        parse_lengths(self.input_lengths)
        if not isinstance(self.systems, Mapping):
            raise InputError(f"report.systems={self.systems!r}: names with what belongs to each, {{a: ..., b: ...}}")
        self.check_rows(self.systems)

    @property
    def titles(self) -> Mapping[str, str]:
        return {name: row.title for name, row in self.systems.items()}

    @property
    def to_run(self) -> list[str]:
        """The rows that `infini reproduce` makes, in the order of the table."""
        return self.chosen([name for name, row in self.systems.items() if row.model])

    def row_of(self, run: RunRecord, known: Selection) -> str | None:
        if run.task != self.task or run.data.get("split") != self.split or not self.cells_of(run):
            return None
        # The mean over references and the maximum are no one column.
        if value_at(run.config, "task.references") != "mean":
            return None
        trained = known.training_config(run)
        return next((name for name, row in self.systems.items() if row.fits(run, trained)), None)

    def model_of(self, row: str) -> str:
        return str(self.systems[row].model)

    def settings_of(self, row: str, scale: str) -> list[str]:
        return self.systems[row].settings_at(scale)

    def asked_otherwise(self, run: RunRecord, row: str) -> list[str]:
        """How an evaluation was asked otherwise than its row declares: "task.reference_words 50 instead of 640"."""
        declared = declared_at(self.task, run.scale)
        if self.systems[row].model not in groups()["model"]:
            wanted = {"task.reference_words": declared["task"]["reference_words"]}
        else:
            wanted = {f"decoding.{key}": value for key, value in declared["decoding"].items() if key != "name"}
            texts = [text.partition("=") for text in self.settings_of(row, run.scale)]
            wanted |= {key: yaml.safe_load(value) for key, _, value in texts if key in wanted}
        found = {key: value_at(run.config, key) for key in wanted}
        return [f"{key} {found[key]} instead of {value}" for key, value in wanted.items() if found[key] != value]

    def as_declared(self, runs: list[RunRecord], row: str, known: Selection) -> list[RunRecord]:
        """Evaluations that were asked otherwise than the row declares step back for one that was asked so."""
        return [run for run in runs if not self.asked_otherwise(run, row)] or runs

    def cells_of(self, run: RunRecord) -> frozenset[Any]:
        return frozenset(cell.get("length") for cell in run.series.get("cells", ()) if self._counts(cell))

    def _counts(self, cell: Mapping[str, Any]) -> bool:
        # What needs no model reads no length.
        return cell.get("length") is None or cell["length"] in parse_lengths(self.input_lengths)

    @classmethod
    def from_config(cls, config: Any) -> SummaryReport:
        """A report from the `report` group; InputError for a key or value that is not allowed."""
        report: SummaryReport = checked(cls, config, "title", "task", "split", "input_lengths", "systems")
        return replace(report, systems={name: _row(name, values) for name, values in dict(report.systems).items()})


def _row(name: str, values: Any) -> SummaryRow:
    try:
        made = SummaryRow(**values)
    except TypeError as error:
        raise InputError(f"report.systems.{name}: {error}") from error
    if len(made.paper) not in (0, 4):
        raise InputError(f"report.systems.{name}.paper={made.paper!r}: must be R-1, R-2, R-L and Overall, or empty")
    listed = isinstance(made.at_scale, Mapping) and all(isinstance(texts, list) for texts in made.at_scale.values())
    if not listed:
        raise InputError(f"report.systems.{name}.at_scale={made.at_scale!r}: must be {{scale: [key=value, ...]}}")
    at_scale = {scale: tuple(texts) for scale, texts in made.at_scale.items()}
    return replace(made, paper=tuple(made.paper), settings=tuple(made.settings), at_scale=at_scale)


def report_mismatches(report: SummaryReport, scale: str, selection: Selection, declared: Declared) -> Selection:
    """The same selection, which says of every row that was trained or asked otherwise than it declares how so."""
    find_mismatches(report, scale, selection, declared)
    for row, runs in selection.runs.items():
        if found := [text for run in runs for text in report.asked_otherwise(run, row)]:
            selection.apart[row] = list(dict.fromkeys([*selection.apart.get(row, ()), *found]))
    return selection


def build_summary_report(
    report: SummaryReport,
    scale: str,
    published: Iterable[RunRecord],
    yours: Iterable[RunRecord] | None,
    declared: Declared | None = None,
) -> RenderedReport:
    """The table, a line for each row and source.

    declared: what systems are trained with at this scale; what was trained or asked otherwise is marked.
    Raises InputError: there are two candidates for a cell.
    """
    known = {"published": [run for run in published if not run.synthetic]}
    if yours is not None:
        known["yours"] = list(yours)
    sources = {source: select_runs(report, scale, found) for source, found in known.items()}
    if declared is not None:
        for selection in sources.values():
            report_mismatches(report, scale, selection, declared)
    lengths = parse_lengths(report.input_lengths)
    several = len(lengths) > 1
    heads = [format_length(length) for length in lengths] if several else list(COLUMNS.values())
    rows = []
    for name, row in report.systems.items():
        if row.paper and not several:
            by_metric = dict(zip(("rouge1", "rouge2", "rougeL", "overall"), row.paper, strict=True))
            quoted = [
                Cell(str(by_metric[m]), "quoted", by_metric[m], source="paper") if m in by_metric else MISSING
                for m in COLUMNS
            ]
            label = Cell("paper", "quoted", source="paper")
            rows.append(Row(f"{name}/paper", row.title, (label, *[MISSING] * len(BESIDE), *quoted)))
        for source, selection in sources.items():
            runs = selection.runs.get(name, [])
            if not runs and (source == "yours" or row.paper or not row.model):
                continue
            label = measured_cell(source, source, 0.0, None, "", 0, [run.run_id for run in runs])
            wanted = [("overall", length) for length in lengths] if several else [(m, lengths[0]) for m in COLUMNS]
            cells = tuple(_score(runs, metric, length, source) for metric, length in wanted)
            beside = [] if several else [_books(runs, lengths[0], source), _tokens_read(runs, lengths[0], source)]
            title = f"{row.title} {APART_MARK}" if name in selection.apart else row.title
            rows.append(Row(f"{name}/{source}", title, (label, *beside, *cells)))
    what = "Overall, geometric mean of R-1, R-2 and R-L, by tokens read" if several else "ROUGE, F-measure in per cent"
    columns = ("Source", *heads) if several else ("Source", *BESIDE, *heads)
    made_up = any(selection.synthetic for selection in sources.values())
    title = f"{report.title}, scale {scale}{' [SYNTHETIC BOOKS: says nothing about the systems]' if made_up else ''}"
    notes = [report.note] if report.note else []
    notes.append(
        f"Mean {PLUS_MINUS} standard deviation over seeds (their number); in brackets the interval over books, "
        f"95 %, of the mean over seeds; {DASH}: not available."
    )
    notes += [_provenance(source, selection) for source, selection in sources.items()]
    notes += [
        note_of_apart(source, scale, selection.apart, report.titles)
        for source, selection in sources.items()
        if selection.apart
    ]
    return RenderedReport(report.name, scale, title, (Table(what, columns, tuple(rows), "System"),), tuple(notes))


def cells_at(runs: Iterable[RunRecord], length: int) -> list[tuple[RunRecord, dict[str, Any]]]:
    """The runs that have scores at an input length (what needs no model has the same at all), with these."""
    found = [(run, cell) for run in runs for cell in run.series.get("cells", ())]
    return [(run, cell) for run, cell in found if cell.get("length") in (None, length)]


def _score(runs: Iterable[RunRecord], metric: str, length: int, source: str) -> Cell:
    # Where no book could be scored there is no value.
    found = [(run, cell) for run, cell in cells_at(runs, length) if cell[metric] is not None]
    if not found:
        return MISSING
    cells = [cell for _, cell in found]
    values = [float(cell[metric]) for cell in cells]
    mean = statistics.fmean(values)
    spread = statistics.stdev(values) if len(values) > 1 and not _same_at_every_seed(cells) else None
    interval = interval_over_books(cells, metric)
    text = f"{mean:.1f}" + (f" {PLUS_MINUS} {spread:.1f} ({len(values)})" if spread is not None else "")
    text += f" [{interval[0]:.1f}, {interval[1]:.1f}]" if interval else ""
    ids = [run.run_id for run, _ in found]
    return measured_cell(text, source, mean, spread, "sd" if spread else "", len(found), ids)


def _same_at_every_seed(cells: Sequence[Mapping[str, Any]]) -> bool:
    """Whether no model reads and the seed changes nothing: such a reference is one text, not one more a seed."""
    return all(cell.get("length") is None and cell["books"] == cells[0]["books"] for cell in cells)


def _books(runs: Iterable[RunRecord], length: int, source: str) -> Cell:
    found = cells_at(runs, length)
    if not found:
        return MISSING
    count = len(found[0][1]["books"])
    return measured_cell(str(count), source, count, None, "", len(found), [run.run_id for run, _ in found])


def _tokens_read(runs: Iterable[RunRecord], length: int, source: str) -> Cell:
    found = [(run, [book.get("tokens_read") for book in cell["books"]]) for run, cell in cells_at(runs, length)]
    counts = [count for _, of in found for count in of]
    if not counts or None in counts:
        return MISSING
    mean = statistics.fmean(counts)
    return measured_cell(f"{mean:,.0f}", source, mean, None, "", len(found), [run.run_id for run, _ in found])


def _provenance(source: str, selection: Selection) -> str:
    runs = selection.all_runs
    if not runs:
        return f"{source}: no runs"

    books = distinct(f"{run.data.get('name')} {run.data.get('split')} ({run.data.get('source')})" for run in runs)
    tokenizers = distinct(run.data["tokenizer"] for run in runs if run.data.get("tokenizer"))
    return (
        f"{source}: {len(runs)} evaluation run{'s' * (len(runs) != 1)}; {books}; tokenizer {tokenizers or DASH}; "
        f"hardware {distinct(hardware_of(run) for run in runs)}; commit {distinct(commit_of(run) for run in runs)}"
    )
