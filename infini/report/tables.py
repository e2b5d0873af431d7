"""A report as tables in memory: every cell is a value, where it comes from, and the runs behind it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from infini.records import RunRecord

DASH = "\N{EM DASH}"
PLUS_MINUS = "\N{PLUS-MINUS SIGN}"

Origin = Literal["measured", "quoted", "computed", "missing"]
Source = Literal["", "paper", "published", "yours"]


@dataclass(frozen=True)
class Cell:
    """One cell: what is printed, and what that rests on."""

    text: str
    origin: Origin
    value: float | None = None
    spread: float | None = None
    spread_kind: Literal["", "sd", "ci"] = ""
    """sd: standard deviation over seeds; ci: half of the 95 % interval, see infini.report.intervals."""
    n_seeds: int = 0
    run_ids: tuple[str, ...] = ()
    source: Source = ""


MISSING = Cell(DASH, "missing")


@dataclass(frozen=True)
class Row:
    """A model's row."""

    model: str
    title: str
    cells: tuple[Cell, ...]
    """One cell a column."""


@dataclass(frozen=True)
class Table:
    """Rows under columns; the column of the rows' titles is not counted among the columns."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    rows_are: str = "Model"
    """Heading of the column of the rows' titles."""

    def cell(self, model: str, column: str) -> Cell:
        """The cell of a model in a column, both by name."""
        row = next(row for row in self.rows if row.model == model)
        return row.cells[self.columns.index(column)]


@dataclass(frozen=True)
class RenderedReport:
    """A report at one scale: the main table first, then what was measured beside it, then the notes."""

    name: str
    scale: str
    title: str
    tables: tuple[Table, ...]
    notes: tuple[str, ...]

    @property
    def stem(self) -> str:
        """Name of the report's files, without suffix."""
        return f"{self.name}_{self.scale}"


def over_seeds(
    runs: Sequence[RunRecord], value: Callable[[RunRecord], Any], form: str | Callable[[float], str], source: str
) -> Cell:
    """A measured cell: the mean over seeds of the mean over the runs of a seed; missing where no run has the value.

    form: how a number is written, as for format(), or a function that writes it.
    """
    write = (lambda number: format(number, form)) if isinstance(form, str) else form
    measured: dict[int, list[float]] = {}
    used: list[str] = []
    for run in runs:
        found = value(run)
        if found is not None:
            measured.setdefault(run.seed, []).append(float(found))
            used.append(run.run_id)
    if not measured:
        return MISSING
    means = [statistics.fmean(values) for values in measured.values()]
    mean = statistics.fmean(means)
    spread = statistics.stdev(means) if len(means) > 1 else None
    text = write(mean)
    if spread:
        text += f" {PLUS_MINUS} {write(spread)} ({len(means)})"
    return measured_cell(text, source, mean, spread, "sd" if spread is not None else "", len(means), used)


def measured_cell(
    text: str,
    source: str,
    value: float | None,
    spread: float | None,
    kind: Literal["", "sd", "ci"],
    n_seeds: int,
    run_ids: Iterable[str],
) -> Cell:
    shown: Literal["published", "yours"] = "published" if source == "published" else "yours"
    return Cell(text, "measured", value, spread, kind, n_seeds, tuple(run_ids), shown)


def distinct(values: Iterable[Any]) -> str:
    """Each value once, in the order of the first of each."""
    return " | ".join(dict.fromkeys(str(value) for value in values))


def hardware_of(run: RunRecord) -> str:
    hardware = run.environment.get("hardware", {})
    described = f"{hardware.get('cpu')}, {hardware.get('cores')} cores, {hardware.get('memory_gb')} GB"
    return f"{hardware['accelerator']} ({described})" if hardware.get("accelerator") else described


def commit_of(run: RunRecord) -> str:
    """The commit of a run, or those of its sittings, shortened."""
    several = run.environment.get("git_revisions") or ()
    if len(several) > 1:
        return (
            f"{' and '.join((revision or 'unknown')[:12] for revision in several)}, begun at one and ended at another"
        )
    revision = run.environment.get("git_revision")
    if revision is None:
        return "unknown"
    return f"{revision[:12]}{' with uncommitted changes' if run.environment.get('git_dirty') is not False else ''}"
