"""The table of summaries, ROUGE of every system, the paper's and ours; and its figure by length of the input."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from infini.config.lengths import format_length, parse_lengths
from infini.config.schema import groups
from infini.errors import require
from infini.records import RunRecord, value_at
from infini.report.book_scores import (
    METRICS,
    cells_at,
    difference_of_scores,
    interval_over_books,
    slope_weights,
    tokens_read,
)
from infini.report.canvas import SYNTHETIC_MARK, Label, entitle, label_ends, new_figure, save
from infini.report.declared import declared_at, find_mismatches, report_mismatches
from infini.report.kind import REPRODUCED, OwnVerb, values_of
from infini.report.palette import looks
from infini.report.selection import Drawings, RowsOfOneTask, Selection, select_sources
from infini.report.tables import (
    DASH,
    DASH_MEANS,
    MISSING,
    PLUS_MINUS,
    Cell,
    RenderedReport,
    Table,
    disputes,
    distinct,
    left_out,
    measured_cell,
    products,
    provenance,
    quoted,
    rows_by_source,
    seconds_table,
    trainings,
    without_runs,
)

COLUMNS = {"rouge1": "R-1", "rouge2": "R-2", "rougeL": "R-L", "rougeLsum": "R-Lsum", "overall": "Overall"}
"""Metric -> heading."""
COUNT_COLUMNS = ("Books", "Tokens read")
"""Columns before the metrics of one length: number of books, and mean number of tokens that are read of a book."""


@dataclass(frozen=True)
class SummaryRow:
    """A system. Without `model` the row has only the paper's numbers."""

    title: str
    short: str = ""
    """Title in figures, where there is little room; empty: the title."""
    model: str | None = None
    paper: list[float] = field(default_factory=list)
    """R-1, R-2, R-L and Overall as printed."""
    settings: list[str] = field(default_factory=list)
    """Settings of the model, as the command line takes them."""
    at_scale: Mapping[str, list[str]] = field(
        default_factory=dict, metadata={"allowed": "must be {scale: [key=value, ...]}"}
    )
    """Scale -> further settings there; they override `settings`."""
    untrained: bool = False
    """Whether the model is a pretrained one that is evaluated as it is."""
    lengths: list[str | int] = field(default_factory=list)
    """Lengths that `infini reproduce` asks, if not all of the report."""

    def settings_at(self, scale: str) -> list[str]:
        """All settings at a scale, each key once."""
        texts = (*self.settings, *self.at_scale.get(scale, ()))
        return list({text.partition("=")[0]: text for text in texts}.values())

    def fits(self, run: RunRecord, trained: Mapping[str, Any]) -> bool:
        """Whether the run is of this system: trained with its settings, and evaluated with the model's options of the
        training. trained: the configuration of its training."""
        # Only a pretrained model is evaluated without a training.
        if self.untrained != (run.parent is None and "base" in run.config.get("model", {})):
            return False
        same = all(
            # The evaluation decides how summaries are decoded.
            value_at(run.config if key.startswith("decoding.") else trained, key) == value
            for key, value in values_of(self.settings_at(run.scale)).items()
        )
        return self.model == run.model and same and trained.get("model") == run.config.get("model")


@dataclass(frozen=True)
class SummaryReport(RowsOfOneTask):
    """A table of summaries, as `conf/report/<name>.yaml` declares it."""

    sign = rows_key = "systems"
    figure_kinds = ("overall_by_length", "gates", "training")
    choices = ("newest",)
    one_match_is_enough = True
    verbs: ClassVar[Mapping[str, OwnVerb]] = {
        "reproduce": OwnVerb(
            (*REPRODUCED, "length", "decoding.*"),
            ("init_from", "task.split", "task.reference", "task.input_length"),
            "infini.runs.reproduce_booksum",
        )
    }

    split: str
    input_lengths: list[str | int]
    """Tokens of a book that the systems read. Several lengths make a column each, with the overall value."""
    systems: dict[str, SummaryRow]
    """Row name -> the system, in the order of the rows."""

    def __post_init__(self) -> None:
        parse_lengths(self.input_lengths, "report.input_lengths")
        self.check_rows()
        for name, row in self.systems.items():
            allowed = "must be R-1, R-2, R-L and Overall, or empty"
            require(len(row.paper) in (0, 4), f"report.systems.{name}.paper", row.paper, allowed)

    def row_of(self, run: RunRecord, known: Selection) -> tuple[str | None, str]:
        if (split := run.data.get("split")) != self.split:
            return None, f"it reads the {split} split, this table is about the {self.split} split"
        # The mean over references and their maximum do not belong in one column.
        if (references := value_at(run.config, "task.references")) != "mean":
            return None, f"its scores are the {references} over the summaries of a book, this table's the mean"
        if not self.cells_of(run):
            return None, "it reads none of the lengths of this table"
        trained = known.training_config(run)
        name = next((name for name, row in self.systems.items() if row.fits(run, trained)), None)
        return name, "" if name else f"no row has model={run.model} with its settings"

    def model_of(self, row: str) -> str:
        return str(self.systems[row].model)

    def settings_of(self, row: str, scale: str) -> list[str]:
        return self.systems[row].settings_at(scale)

    def find_mismatches(self, row: str, runs: Sequence[RunRecord], known: Selection) -> dict[str, list[str]]:
        found = find_mismatches(self, row, runs, known)
        for run in runs:
            if asked := self._evaluation_mismatches(run, row):
                found[run.run_id] = [*found.get(run.run_id, ()), *asked]
        return found

    def _evaluation_mismatches(self, run: RunRecord, row: str) -> list[str]:
        """The differences of an evaluation from its row, such as "task.reference_words 50 instead of 640"."""
        declared = declared_at(self.task, run.scale)
        if self.systems[row].model not in groups()["model"]:
            wanted = {"task.reference_words": declared["task"]["reference_words"]}
        else:
            wanted = {f"decoding.{key}": value for key, value in declared["decoding"].items() if key != "name"}
            own = values_of(self.settings_of(row, run.scale))
            wanted |= {key: value for key, value in own.items() if key in wanted}
        found = {key: value_at(run.config, key) for key in wanted}
        return [f"{key} {found[key]} instead of {value}" for key, value in wanted.items() if found[key] != value]

    def cells_of(self, run: RunRecord) -> frozenset[Any]:
        # References read no input, so they have no length.
        known = {cell.get("length") for cell in run.series.get("cells", ())}
        return frozenset(known & {None, *parse_lengths(self.input_lengths)})

    def limit_to_cells(self, run: RunRecord, cells: Collection[Any]) -> RunRecord:
        kept = [cell for cell in run.series["cells"] if cell.get("length") in cells]
        return replace(run, series={**run.series, "cells": kept})

    def render(
        self, scale: str, published: Iterable[RunRecord], yours: Iterable[RunRecord] | None = None
    ) -> RenderedReport:
        """A table or two, a line for each row and source."""
        sources = select_sources(self, scale, published, yours)
        lengths = parse_lengths(self.input_lengths)
        paper: dict[str, list[Cell]] = {}
        cells_of: dict[str, Callable[[Sequence[RunRecord], str], list[Cell]]]
        if len(lengths) > 1:
            columns = [*map(format_length, lengths)]
            cells_of = {
                "Overall, geometric mean of R-1, R-2 and R-L, by tokens read at most": lambda runs, source: [
                    _score(runs, "overall", length, source) for length in lengths
                ],
                "R-1 / R-2 / R-L, F-measure in per cent, by tokens read at most": lambda runs, source: [
                    _types(runs, length, source) for length in lengths
                ],
            }
        else:
            columns = [*COUNT_COLUMNS, *COLUMNS.values()]
            for name, row in self.systems.items():
                if row.paper:
                    by_metric = dict(zip((*METRICS, "overall"), row.paper, strict=True))
                    beside = [MISSING] * len(COUNT_COLUMNS)
                    paper[name] = [*beside, *(quoted(by_metric.get(metric)) for metric in COLUMNS)]
            cells_of = {
                "ROUGE, F-measure in per cent": lambda runs, source: [
                    *_counts(runs, lengths[0], source),
                    *(_score(runs, metric, lengths[0], source) for metric in COLUMNS),
                ]
            }
        expected = [name for name, row in self.systems.items() if row.model and not row.paper]
        tables = []
        for what, cells in cells_of.items():
            rows = rows_by_source(self.titles, sources, paper, cells, expected)
            tables.append(Table(what, ("Source", *columns), tuple(rows), "System"))
        notes = [
            f"Mean {PLUS_MINUS} standard deviation over seeds (their number); in brackets the interval over books, "
            f"95 %, of the mean over seeds; {DASH_MEANS}."
        ]
        for source, selection in sources.items():
            runs = selection.all_runs
            notes += _shorter_books(runs, lengths, source)
            books = distinct(
                f"{run.data.get('name')} {run.data.get('split')} ({run.data.get('source')})" for run in runs
            )
            tokenizers = distinct(run.data["tokenizer"] for run in runs if run.data.get("tokenizer"))
            notes.append(provenance(source, runs, [books, f"tokenizer {tokenizers or DASH}"]))
            notes += products(source, self.titles, selection)
        notes += [*report_mismatches(sources, scale, self.titles), *trainings(tables, self.titles, sources)]
        absent = [*without_runs(self.titles, sources, expected), *left_out(sources)]
        notes += [*absent, *disputes(sources)]
        synthetic = any(selection.synthetic for selection in sources.values())
        mark = " [SYNTHETIC BOOKS: says nothing about the systems]" * synthetic
        tables += seconds_table(self.titles, sources, "System")
        return self.rendered(scale, tables, notes, mark, legend=tuple(absent))

    def drawings(self, scale: str, selection: Selection, known: Iterable[RunRecord]) -> Drawings:
        from infini.report.figures import draw_curves, draw_gates

        return {
            "overall_by_length": partial(overall_by_length, self, scale, selection),
            "gates": partial(draw_gates, selection, titles=self.titles, what=self.title),
            "training": partial(draw_curves, selection, self.titles, f"{self.title}, scale {scale}"),
        }


def _shorter_books(runs: Sequence[RunRecord], lengths: Sequence[int], source: str) -> list[str]:
    """A note on the lengths before which books end, if there are several lengths."""
    ended = []
    for length in lengths if len(lengths) > 1 else ():
        read = {book["name"]: book.get("tokens_read") for _, cell in cells_at(runs, length) for book in cell["books"]}
        if n := sum(tokens is not None and tokens < length for tokens in read.values()):
            ended.append(f"{format_length(length)}: {n} of {len(read)} ({tokens_read(runs, length):,.0f} tokens read)")
    return [
        f"{source}: books that end before a length are read whole, which are, with the geometric mean of what is read: "
        f"{'; '.join(ended)}."
    ] * bool(ended)


def _score(runs: Iterable[RunRecord], metric: str, length: int, source: str) -> Cell:
    # If no book could be scored there is no value.
    found = [(run, cell) for run, cell in cells_at(runs, length) if cell[metric] is not None]
    if not found:
        return MISSING
    cells = [cell for _, cell in found]
    values = [float(cell[metric]) for cell in cells]
    mean = statistics.fmean(values)
    # Scores of one reference text that does not depend on the seed have no spread.
    fixed = all(cell.get("length") is None and cell["books"] == cells[0]["books"] for cell in cells)
    spread = statistics.stdev(values) if len(values) > 1 and not fixed else None
    interval = interval_over_books(cells, metric)
    text = f"{mean:.1f}" + (f" {PLUS_MINUS} {spread:.1f} ({len(values)})" if spread is not None else "")
    text += f" [{interval[0]:.1f}, {interval[1]:.1f}]" if interval else ""
    ids = [run.run_id for run, _ in found]
    return measured_cell(text, source, mean, len(found), ids, spread, "sd" if spread else "")


def _types(runs: Iterable[RunRecord], length: int, source: str) -> Cell:
    """Means over books and seeds of R-1, R-2 and R-L in one cell, whose value is R-1."""
    found = [(run, cell) for run, cell in cells_at(runs, length) if cell["overall"] is not None]
    if not found:
        return MISSING
    means = [statistics.fmean(float(cell[metric]) for _, cell in found) for metric in METRICS]
    ids = [run.run_id for run, _ in found]
    return measured_cell(" / ".join(f"{mean:.1f}" for mean in means), source, means[0], len(found), ids)


def _counts(runs: Iterable[RunRecord], length: int, source: str) -> list[Cell]:
    """The columns of COUNT_COLUMNS."""
    found = cells_at(runs, length)
    if not found:
        return [MISSING] * len(COUNT_COLUMNS)
    of_runs = len(found), [run.run_id for run, _ in found]
    books = len(found[0][1]["books"])
    read = [book.get("tokens_read") for _, cell in found for book in cell["books"]]
    cells = [measured_cell(str(books), source, books, *of_runs), MISSING]
    if read and None not in read:
        mean = statistics.fmean(read)
        cells[1] = measured_cell(f"{mean:,.0f}", source, mean, *of_runs)
    return cells


def overall_by_length(report: SummaryReport, scale: str, selection: Selection, path: Path) -> list[Path]:
    """Draw the overall value (geometric mean of R-1, R-2 and R-L) against the tokens of a book that were read, fewer
    than asked for where books end before: the mean over seeds, with bars for its interval over books. Nothing is drawn
    if no system was asked at two lengths."""
    curves = {name: points for name, runs in selection.runs.items() if (points := _points(report, runs))}
    if not any(len(points) > 1 for points in curves.values()):
        return []
    look = looks({name: report.model_of(name) for name in curves})
    with new_figure(5.8, 3.4) as figure:
        axes = figure.add_subplot()
        ends = []
        for index, (name, points) in enumerate(curves.items()):
            x, mean, low, high = map(np.array, zip(*points, strict=True))
            bars = np.maximum(0.0, [mean - low, high - mean])
            # Shifted, so that bars do not cover each other.
            moved = x * 1.04**index
            axes.errorbar(moved, mean, bars, capsize=2, elinewidth=0.8, **look[name].drawn)
            ends.append(Label(float(moved[-1]), float(mean[-1]), report.short_titles[name], look[name].colour))
        ticks = parse_lengths(report.input_lengths)
        axes.set_xscale("log")
        axes.set_xticks(ticks, [format_length(tick) for tick in ticks])
        axes.set_xticks([], minor=True)
        axes.set_xlabel("tokens of the book that were read (geometric mean over books)")
        axes.set_ylabel("overall ROUGE (per cent)")
        label_ends(axes, ends)
        synthetic = SYNTHETIC_MARK * selection.synthetic
        counts = sorted({len({run.seed for run in selection.runs[name]}) for name in curves})
        seeds = "one seed" if counts == [1] else f"mean over {' or '.join(map(str, counts))} seeds"
        entitle(
            axes,
            _finding(report, selection, list(curves)),
            f"{report.title}. Scale {scale}, {report.split} books{synthetic}; {seeds}, bars: 95 % over books",
        )
        return save(figure, path)


def _finding(report: SummaryReport, selection: Selection, rows: list[str]) -> str:
    """The slope over the logarithm of the tokens read, with its interval, of each row that has all lengths. Rows whose
    scores are the same at every length, as of references that do not read to a length, are not named."""
    lengths = parse_lengths(report.input_lengths)
    sure: list[str] = []
    unsure: list[str] = []
    for row in rows:
        read = [tokens_read(selection.runs[row], length) for length in lengths]
        found = difference_of_scores(selection, [(row, n) for n in lengths], slope_weights(read))
        if found and (found[0].mean, *found[0].interval) != (0, 0, 0):
            mean, (low, high) = found[0].mean, found[0].interval
            of = unsure if low <= 0 <= high else sure
            of.append(f"{report.short_titles[row]} {mean:+.2f} ({low:+.2f} to {high:+.2f})")
    if not sure and not unsure:
        return "Overall ROUGE by tokens of the book that were read"
    what = "Reading more of a book: no sure change of Overall ROUGE, points a doubling"
    if sure:
        what = "Reading more of a book changes Overall ROUGE, points a doubling (each interval by itself)"
    if sure and unsure:
        unsure[0] = f"no sure change: {unsure[0]}"
    return f"{what}: {'; '.join([*sure, *unsure])}"


def _points(report: SummaryReport, runs: list[RunRecord]) -> list[tuple[float, float, float, float]]:
    """(tokens read, overall, low, high) at every length that was asked."""
    points = []
    for length in parse_lengths(report.input_lengths):
        cells = [cell for _, cell in cells_at(runs, length) if cell["overall"] is not None]
        if cells:
            mean = statistics.fmean(cell["overall"] for cell in cells)
            # One book has no interval and no bar.
            low, high = interval_over_books(cells, "overall") or (mean, mean)
            points.append((tokens_read(runs, length), mean, low, high))
    return points
