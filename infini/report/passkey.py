"""The passkey table: token accuracy by length and place of the key, the paper's numbers beside ours."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from infini.errors import InputError, did_you_mean
from infini.lengths import format_length, parse_depths, parse_lengths
from infini.records import RunRecord
from infini.report.selection import AGGREGATES, Selection, checked, select_runs
from infini.report.tables import (
    DASH,
    MISSING,
    PLUS_MINUS,
    Cell,
    RenderedReport,
    Row,
    Table,
    commit_of,
    hardware_of,
    measured_cell,
    over_seeds,
)

BEHIND = (
    "What stands behind it: token accuracy of the worst cell and exact match in per cent, the longest training input, "
    "and the tokens of filler that weigh as much as the key in the head that is best at it"
)
LOCAL_MARK = "*"
STANDARD = {"digits": 5, "distractors": 0, "filler": "block"}
"""Prompts that belong into this table."""


@dataclass(frozen=True)
class PasskeyRow:
    """A way to make a model answer, and what the paper prints for it."""

    title: str
    model: str
    recipe: str = ""
    """Name of the training recipe, `{scale}` standing for the scale; empty for a model not trained on prompts."""
    pretrained: bool = False
    """Whether it starts from the model of the PG19 task."""
    knockout: str = "none"
    frozen_gates: bool = False
    """Whether all gates stay at 0.5."""
    overrides: list[str] = field(default_factory=list)
    """Further settings of the training, as dims.segment_length=512."""
    paper: dict[str, str] = field(default_factory=dict)
    """Length -> start/middle/end in per cent, as printed."""

    def settings(self, scale: str) -> dict[str, Any]:
        """What tells the runs of this row from those of others."""
        return {
            "model": self.model,
            "recipe": self.recipe.format(scale=scale) if self.recipe else f"pg19_{scale}",
            "pretrained": self.pretrained and bool(self.recipe),
            "knockout": self.knockout,
            "frozen_gates": self.frozen_gates,
        }

    def overridden(self) -> dict[str, Any]:
        """Dotted key -> value of every override."""
        pairs = (text.partition("=") for text in self.overrides)
        return {key: yaml.safe_load(value) for key, _, value in pairs}


@dataclass(frozen=True)
class PasskeyReport:
    """Table 3, as `conf/report/table3_passkey.yaml` declares it."""

    name: str
    title: str
    task: str
    lengths: list[str | int]
    depths: list[str | float]
    rows: dict[str, PasskeyRow]
    run: list[str] | str = "all"
    """Rows that `infini reproduce` makes: names, or all."""
    aggregate: str | None = None
    note: str = ""

    def __post_init__(self) -> None:
        if self.aggregate not in AGGREGATES or self.aggregate == "mean":
            raise InputError(f"report.aggregate={self.aggregate!r}: null or newest")
        rows = {name: row if isinstance(row, PasskeyRow) else _row(name, row) for name, row in self.rows.items()}
        object.__setattr__(self, "rows", rows)
        for name in [self.run] if isinstance(self.run, str) else self.run:
            if name != "all" and name not in self.rows:
                raise InputError(f"report.run={name!r}: all, or names of {', '.join(rows)}{did_you_mean(name, rows)}")

    @property
    def titles(self) -> Mapping[str, str]:
        return {name: row.title for name, row in self.rows.items()}

    @property
    def to_run(self) -> list[str]:
        """The rows that `infini reproduce` makes, in the order of the table."""
        wanted = [self.run] if isinstance(self.run, str) else self.run
        return [name for name in self.rows if "all" in wanted or name in wanted]

    def row_of(self, run: RunRecord, training: Mapping[str, Any]) -> str | None:
        task = run.config.get("task", {})
        if run.task != self.task or any(task.get(key) != value for key, value in STANDARD.items()):
            return None
        if not self.cells_of(run):
            return None
        found = {
            "model": run.model,
            "recipe": training.get("recipe", {}).get("name"),
            "pretrained": training.get("init_from") is not None,
            "knockout": task.get("knockout"),
            "frozen_gates": training.get("optimizer", {}).get("gate_lr") == 0,
        }
        for name, row in self.rows.items():
            overridden = row.overridden()
            if row.settings(run.scale) == found and overridden == {key: _at(training, key) for key in overridden}:
                return name
        return None

    def cells_of(self, run: RunRecord) -> frozenset[Any]:
        wanted = {(length, depth) for length in parse_lengths(self.lengths) for depth in parse_depths(self.depths)}
        return frozenset((cell["length"], cell["depth"]) for cell in run.series.get("cells", ())) & wanted

    @classmethod
    def from_config(cls, config: Any) -> PasskeyReport:
        """A report from the `report` group; InputError for a key or value that is not allowed."""
        report: PasskeyReport = checked(cls, config, "title", "task", "lengths", "depths", "rows")
        return report


def _at(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = config.get(part) if isinstance(config, Mapping) else None
    return config


def _row(name: str, values: Any) -> PasskeyRow:
    try:
        return PasskeyRow(**values)
    except TypeError as error:
        raise InputError(f"report.rows.{name}: {error}") from error


def build_passkey_report(
    report: PasskeyReport, scale: str, published: Iterable[RunRecord], yours: Iterable[RunRecord] | None
) -> RenderedReport:
    """The table, a line for each row and source, and below it what stands behind each line."""
    sources = {"published": select_runs(report, scale, published)}
    if yours is not None:
        sources["yours"] = select_runs(report, scale, yours)
    lengths = [format_length(length) for length in parse_lengths(report.lengths)]
    accuracy, behind = [], []
    for name, row in report.rows.items():
        if row.paper:
            cells = tuple(
                Cell(row.paper[length], "quoted", source="paper") if length in row.paper else MISSING
                for length in lengths
            )
            accuracy.append(Row(f"{name}/paper", row.title, (Cell("paper", "quoted", source="paper"), *cells)))
        for source, selection in sources.items():
            runs = selection.runs.get(name, [])
            if not runs and (source == "yours" or row.paper):
                continue
            cells = tuple(_accuracy(report, runs, length, source) for length in parse_lengths(report.lengths))
            shown = "" if row.paper else row.title
            accuracy.append(Row(f"{name}/{source}", shown or row.title, (_label(source, runs), *cells)))
            if runs:
                behind.append(_behind(f"{name}/{source}", row.title, runs, selection, source))
    places = " / ".join(parse_depths(report.depths))
    tables = [Table(f"Token accuracy in per cent, key at {places}", ("Source", *lengths), tuple(accuracy))]
    if behind:
        columns = ("Source", "Examples a cell", "Seeds", "Worst cell", "Exact match", "Training tokens", "Longest")
        tables.append(Table(BEHIND, (*columns, "Half-dilution"), tuple(behind)))
    notes = [report.note] if report.note else []
    notes.append(f"{LOCAL_MARK}: key and question lie in one segment, no memory is needed. {DASH} not available.")
    notes += [_provenance(source, selection) for source, selection in sources.items()]
    title = f"{report.title}, scale {scale}"
    return RenderedReport(
        report.name, scale, title, tuple(tables), tuple(notes), sources["published"], sources.get("yours")
    )


def _label(source: str, runs: list[RunRecord]) -> Cell:
    return (
        measured_cell(source, source, 0.0, None, "", 0, [run.run_id for run in runs])
        if runs
        else Cell(source, "missing")
    )


def _accuracy(report: PasskeyReport, runs: list[RunRecord], length: int, source: str) -> Cell:
    """All places of one length, the mean over seeds of each."""
    texts, values, used = [], [], []
    for depth in parse_depths(report.depths):
        found = [
            (run, cell)
            for run in runs
            for cell in run.series["cells"]
            if (cell["length"], cell["depth"]) == (length, depth)
        ]
        if not found:
            texts.append(DASH)
            continue
        value = 100 * statistics.fmean(cell["token_accuracy"] for _, cell in found)
        values.append(value)
        used += [run.run_id for run, _ in found]
        mark = LOCAL_MARK if all(cell["same_segment"] == 1 for _, cell in found) else ""
        texts.append(_percent(value) + mark)
    if not values:
        return MISSING
    seeds = len({run.seed for run in runs})
    mean = statistics.fmean(values)
    return measured_cell("/".join(texts), source, mean, None, "", seeds, dict.fromkeys(used))


def _percent(value: float) -> str:
    """One decimal, except where it says nothing: never 100 for less than that."""
    return f"{value:.0f}" if value == round(value) else f"{min(value, 99.9):.1f}"


def _behind(name: str, title: str, runs: list[RunRecord], selection: Selection, source: str) -> Row:
    def of_cells(function: Any, key: str) -> Any:
        return lambda run: function(cell[key] for cell in run.series["cells"])

    def training_tokens(run: RunRecord) -> Any:
        training = selection.training(run)
        return training.cost.get("tokens_seen") if training else None

    def longest(run: RunRecord) -> Any:
        config = selection.training_config(run)
        recipe, dims = config.get("recipe", {}), config.get("dims", {})
        if "segments_per_sequence" not in recipe:
            return None
        last = recipe["segments_per_sequence"] * dims["segment_length"]
        return max([last, *(tokens for _, tokens in recipe.get("curriculum") or ())])

    ids = [run.run_id for run in runs]
    seeds = sorted({run.seed for run in runs})
    cells = (
        _label(source, runs),
        over_seeds(runs, of_cells(min, "examples"), ".0f", source),
        measured_cell(",".join(map(str, seeds)), source, len(seeds), None, "", len(seeds), ids),
        over_seeds(runs, lambda run: 100 * of_cells(min, "token_accuracy")(run), ".1f", source),
        over_seeds(runs, lambda run: 100 * (run.metric("exact_match") or 0.0), ".1f", source),
        over_seeds(runs, training_tokens, ",.0f", source),
        over_seeds(runs, longest, ",.0f", source),
        over_seeds(runs, lambda run: run.metric("half_dilution"), ",.0f", source),
    )
    return Row(name, title, cells)


def _provenance(source: str, selection: Selection) -> str:
    runs = selection.all_runs
    if not runs:
        return f"{source}: no runs"

    def distinct(values: Iterable[Any]) -> str:
        return " | ".join(dict.fromkeys(map(str, values)))

    tokenizers = distinct(run.data.get("tokenizer") for run in runs)
    return (
        f"{source}: {len(runs)} evaluation runs; lengths are tokens of {tokenizers}; "
        f"hardware {distinct(hardware_of(run) for run in runs)}; commit {distinct(commit_of(run) for run in runs)}; "
        f"mean {PLUS_MINUS} standard deviation over seeds, number of seeds in brackets"
    )
