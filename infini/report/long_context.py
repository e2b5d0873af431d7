"""The table of long-context benchmarks: accuracy by length, and of questions whose answer needs the memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

from infini.config.lengths import format_length, parse_lengths
from infini.records import RunRecord
from infini.report.intervals import effective_trials, proportion_interval
from infini.report.kind import REPRODUCED, OwnVerb, usual_options, values_of
from infini.report.passkey import percent
from infini.report.selection import Drawings, RowMatchingReport, Selection, cells_with_most, differences, select_sources
from infini.report.tables import (
    DASH_MEANS,
    MISSING,
    Cell,
    RenderedReport,
    Table,
    distinct,
    measured_cell,
    rows_by_source,
)


@dataclass(frozen=True)
class LongContextRow:
    """A model, and the training that it had, if any."""

    title: str
    model: str
    settings: list[str] = field(default_factory=list)
    """Settings of the model, as the command line takes them."""
    trained_on: str = ""
    """Task of its training; empty: a pretrained model as it is."""
    training: list[str] = field(default_factory=list)
    """Further settings of that training."""
    lengths: list[str | int] = field(default_factory=list)
    """Lengths that `infini reproduce` asks, if not all of the report."""


@dataclass(frozen=True)
class LongContextReport(RowMatchingReport):
    """A table of `task=long_context`, as `conf/report/long_context.yaml` declares it."""

    sign = "subtasks"
    figure_kinds = ()
    choices = ("largest",)
    verbs: ClassVar[Mapping[str, OwnVerb]] = {
        "reproduce": OwnVerb((*REPRODUCED, "length"), ("init_from",), "infini.runs.reproduce_long_context")
    }

    subtasks: dict[str, str]
    """Subtask -> what it asks, for the heading of its table."""
    lengths: list[str | int]
    rows: dict[str, LongContextRow]

    def __post_init__(self) -> None:
        parse_lengths(self.lengths, "report.lengths")
        self.check_rows()

    def row_mismatches(self, name: str, run: RunRecord, known: Selection) -> list[str]:
        row, training = self.rows[name], known.training(run)
        # Without the training's record it is unknown what the model learned.
        if (training is None) != (run.parent is None):
            return ["the record of its training is missing"]
        learned, config = ("", {}) if training is None else (training.task, training.config)
        of_training = values_of(row.training)
        of_model = {key: value for key, value in of_training.items() if key.startswith("model.")}
        found = differences({"model": run.model}, {"model": row.model})
        if learned != row.trained_on:
            found.append(f"it was trained on {learned or 'nothing'}, the row on {row.trained_on or 'nothing'}")
        found += differences(run.config, usual_options(run.config) | of_model | values_of(row.settings))
        if training is not None and training.started_from is not None:
            found.append(f"its training began with the weights of {training.started_from}")
        if training is not None and not training.series.get("in_last_stage", True):
            found.append("its training ended before the last stage of its recipe")
        if known.learned_synthetic_text(run):
            found.append("it was trained on made-up text")
        return found + differences(config, of_training, "the row's training")

    def cells_of(self, run: RunRecord) -> frozenset[Any]:
        wanted = {(name, length) for name in self.subtasks for length in parse_lengths(self.lengths)}
        return frozenset((cell["subtask"], cell["length"]) for cell in run.series.get("cells", ())) & wanted

    def render(
        self, scale: str, published: Iterable[RunRecord], yours: Iterable[RunRecord] | None = None
    ) -> RenderedReport:
        """Two tables for each subtask: all questions, and those whose answer lies in an earlier segment."""
        sources = select_sources(self, scale, published, yours)
        # A length that no row was asked has no column, unless there would be none at all.
        asked = {cell[1] for found in sources.values() for run in found.all_runs for cell in self.cells_of(run)}
        lengths = [length for length in parse_lengths(self.lengths) if length in asked or not asked]
        columns = ("Source", *map(format_length, lengths))
        measured = {cell[0] for found in sources.values() for run in found.all_runs for cell in self.cells_of(run)}
        tables: list[Table] = []
        for name, asks in self.subtasks.items():
            # A subtask without a run has no tables, unless there would be none at all.
            if name not in measured and (measured or tables):
                continue
            for text, of_cell in (
                ("accuracy in per cent, in brackets its 95 % interval", _all),
                (
                    "of the questions that need a memory, whose answer lies in an earlier segment, and their number",
                    _distant,
                ),
            ):
                cells = partial(self._cells, name, of_cell, lengths)
                rows = rows_by_source(self.titles, sources, {}, cells, self.rows)
                tables.append(Table(f"{name} ({asks}): {text}", columns, tuple(rows)))
        notes = [f"{DASH_MEANS}."]
        if unasked := [format_length(length) for length in parse_lengths(self.lengths) if length not in lengths]:
            notes.append(f"lengths without a run, not shown: {', '.join(unasked)}.")
        return self.with_provenance(scale, sources, tables, notes, self._questions, list(self.rows))

    def _questions(self, selection: Selection) -> list[str]:
        """Says how many questions a cell has, as in "20 questions a cell", in which rows if they differ, and their
        revision."""
        revision = f"prompts of {distinct(run.data['revision'] for run in selection.all_runs)}"
        rows: dict[str, list[str]] = {}
        for name, runs in selection.runs.items():
            examples = distinct(cell["examples"] for run in runs for cell in run.series["cells"])
            rows.setdefault(examples, []).append(self.titles[name])
        if len(rows) == 1:
            return [f"{next(iter(rows))} questions a cell", revision]
        # Titles have commas.
        named = {examples: ", ".join(f'"{title}"' for title in titles) for examples, titles in rows.items()}
        counts = ", ".join(f"{examples} ({titles})" for examples, titles in named.items())
        return [f"questions a cell: {counts}", revision]

    def _cells(
        self,
        subtask: str,
        of_cell: Callable[[Mapping[str, Any]], _Counts],
        lengths: Sequence[int],
        runs: Sequence[RunRecord],
        source: str,
    ) -> list[Cell]:
        """A cell for each length: of each seed the run with most questions, together over seeds."""

        def place(cell: Mapping[str, Any]) -> int | None:
            return cell["length"] if cell["subtask"] == subtask and of_cell(cell)[1] else None

        found = cells_with_most(runs, place, lambda cell: of_cell(cell)[1])
        cells, trained = [], any(run.parent is not None for run in runs)
        for length in lengths:
            chosen = [pair for (_, at), pair in found.items() if at == length]
            if not chosen:
                cells.append(MISSING)
                continue
            counts = [of_cell(cell) for _, cell in chosen]
            right, asked = map(sum, zip(*counts, strict=True))
            # Seeds of a trained row are models that may differ by more than chance. Without a training it is one model.
            trials = effective_trials([one / of for one, of in counts], asked) if trained else asked
            low, high = proportion_interval(right * trials / asked, trials)
            text = f"{percent(100 * right / asked)} [{percent(100 * low)}, {percent(100 * high)}]"
            text += f", {int(asked)}" if of_cell is _distant else ""
            ids = [run.run_id for run, _ in chosen]
            cells.append(measured_cell(text, source, 100 * right / asked, len(chosen), ids))
        return cells

    def drawings(self, scale: str, selection: Selection, known: Iterable[RunRecord]) -> Drawings:
        return {}


_Counts = tuple[float, float]
"""Sum of scores, and number of questions."""


def _all(cell: Mapping[str, Any]) -> _Counts:
    return cell["accuracy"] * cell["examples"], cell["examples"]


def _distant(cell: Mapping[str, Any]) -> _Counts:
    distant = cell["distant"]
    return distant.get("accuracy", 0.0) * distant["examples"], distant["examples"]
