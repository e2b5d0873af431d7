"""A report as tables in memory: every cell has a value, its origin, and the runs behind it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from infini.records import RunRecord

if TYPE_CHECKING:
    from infini.report.selection import Selection
    from infini.report.stats import Effect

DASH = "\N{EM DASH}"
DASH_MEANS = f"{DASH}: not run, or there is no such number"
"""The note on cells without a number: of rows and lengths that nobody ran, of what the paper does not print, or of what
a row does not have, as the training of an untrained model."""
PLUS_MINUS = "\N{PLUS-MINUS SIGN}"
MISMATCH_MARK = "\N{DAGGER}"
"""Marks results of a model that was trained, or asked, differently from what its row declares."""
DISPUTE_MARK = "\N{DOUBLE DAGGER}"
"""Marks cells for which two runs of the reader compete."""
OTHER_DATA_MARK = "\N{SECTION SIGN}"
"""Marks results on other documents, or with another tokenizer, than the published ones beside them."""

SEVERAL_MARK = "\N{PILCROW SIGN}"
"""Marks rows of which one seed has several trainings."""

CLUSTERED = "clustered by document and seed, of one seed by document alone"
"""Describes the intervals of differences in loss."""

Origin = Literal["measured", "quoted", "computed", "missing"]
Source = Literal["", "paper", "published", "yours"]
YOURS: Source = "yours"
"""The source of the reader's own runs; headings of their columns end with it."""


@dataclass(frozen=True)
class Cell:
    """One cell: the printed text, and the runs or the source behind it."""

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
DISPUTED = f"runs differ {DISPUTE_MARK}"


@dataclass(frozen=True)
class Row:
    """A model's row."""

    model: str
    title: str
    cells: tuple[Cell, ...]
    """One cell a column."""


@dataclass(frozen=True)
class Table:
    """Rows under columns. `columns` does not include the column of the rows' titles."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    rows_are: str = "Model"
    """Heading of the column of the rows' titles."""
    short_columns: tuple[str, ...] = ()
    """The columns of the short form; empty: all."""
    is_prose: bool = False
    """Cells are words rather than numbers: they begin at the left of their columns."""

    def cell(self, model: str, column: str) -> Cell:
        """The cell of a model in a column, both by name."""
        row = next(row for row in self.rows if row.model == model)
        return row.cells[self.columns.index(column)]

    def with_columns(self, kept: Sequence[int]) -> Table:
        """The table with these of its columns, by index."""
        rows = tuple(replace(row, cells=tuple(row.cells[at] for at in kept)) for row in self.rows)
        return replace(self, columns=tuple(self.columns[at] for at in kept), rows=rows)

    def with_measured_columns(self) -> Table:
        """The table without columns in which nothing is measured."""
        found = range(len(self.columns))
        return self.with_columns([at for at in found if any(row.cells[at].origin == "measured" for row in self.rows)])


@dataclass(frozen=True)
class RenderedReport:
    """A report at one scale: the main table, the tables of other measurements, and the notes."""

    name: str
    scale: str
    title: str
    tables: tuple[Table, ...]
    notes: tuple[str, ...]
    totals: str = ""
    """Counts over the rows, printed below the title on a terminal and in Markdown."""
    main: int = 0
    """Index of the main table, which the short form prints."""
    legend: tuple[str, ...] = ()
    """The notes that the short form prints besides those of marks."""

    def short(self) -> RenderedReport:
        """The main table, or every table with a short form of its own, with the notes that explain their marks.

        Columns of the reader's runs are left out where there are no such runs. A table without any result keeps all
        notes: they say how to get one.
        """
        if not self.tables:
            return self
        main = self.tables[self.main]
        kept = tuple(_shortened(table) for table in self.tables if table is main or table.short_columns)
        rows = [row for table in kept for row in table.rows]
        cells = [cell for row in rows for cell in row.cells]
        shown = "".join([*(row.title for row in rows), *(cell.text for cell in cells)])
        has_results = any(cell.origin in ("measured", "computed") for cell in cells)
        marks = [note for note in self.notes if note in self.legend or (not note[0].isalnum() and note[0] in shown)]
        return replace(self, tables=kept, main=0, notes=tuple(marks) if has_results else self.notes)

    @property
    def stem(self) -> str:
        """Name of the report's files, without suffix."""
        return f"{self.name}_{self.scale}"


def _shortened(table: Table) -> Table:
    """The columns of the short form, without columns of the reader's runs that are empty."""
    at = [table.columns.index(name) for name in table.short_columns or table.columns]
    shown = {index for index in at if any(row.cells[index].text != DASH for row in table.rows)}
    return table.with_columns([index for index in at if index in shown or not table.columns[index].endswith(YOURS)])


def over_seeds(
    runs: Sequence[RunRecord], value: Callable[[RunRecord], Any], form: str | Callable[[float], str], source: str
) -> Cell:
    """A measured cell: the mean over seeds of the mean over the runs of a seed. It is missing if no run has the value.

    form: a format specification for format(), or a function that formats a number.
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
    return measured_cell(text, source, mean, len(means), used, spread, "sd" if spread is not None else "")


def measured_cell(
    text: str,
    source: str,
    value: float | None,
    n_seeds: int,
    run_ids: Iterable[str],
    spread: float | None = None,
    kind: Literal["", "sd", "ci"] = "",
) -> Cell:
    """A cell of runs. source: published or yours; kind: of the spread."""
    shown: Literal["published", "yours"] = "published" if source == "published" else "yours"
    return Cell(text, "measured", value, spread, kind, n_seeds, tuple(run_ids), shown)


def effect_cell(effect: Effect, source: str) -> Cell:
    """The cell of a difference in loss: its mean and, if it has one, its interval."""
    mean, half = effect.mean, effect.half_width
    if effect.df == 0:
        return measured_cell(f"{mean:+.4f}", source, mean, effect.n_seeds, effect.run_ids)
    text = f"{mean:+.4f} [{mean - half:+.4f}, {mean + half:+.4f}]"
    return measured_cell(text, source, mean, effect.n_seeds, effect.run_ids, half, "ci")


def source_label(source: str) -> str:
    """The runs of a table of one source, in words."""
    return "your runs" if source == "yours" else "published runs"


def quoted(value: Any) -> Cell:
    """A cell with a value that the paper prints; None is a missing cell."""
    if value is None:
        return MISSING
    number = float(value) if isinstance(value, (int, float)) else None
    return Cell(str(value), "quoted", number, source="paper")


def counted(number: int, what: str) -> str:
    """`1 seed`, `3 seeds`."""
    return f"{number} {what}{'s' * (number != 1)}"


def in_words(number: int, what: str) -> str:
    """`one seed`, `three seeds`; numbers above ten in digits."""
    return f"{_WORDS[number] if number < len(_WORDS) else number} {what}{'s' * (number != 1)}"


_WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def distinct(values: Iterable[Any]) -> str:
    """Each value once, in the order of their first occurrence."""
    return " | ".join(dict.fromkeys(str(value) for value in values))


def seconds_table(titles: Mapping[str, str], sources: Mapping[str, Selection], rows_are: str = "Model") -> list[Table]:
    """A table of what each row and source cost: wall-clock seconds of its training, if there is one, and of all of its
    evaluations, means over seeds. Empty where no run says."""
    rows = []
    for name, title in titles.items():
        for source, selection in sources.items():
            runs = selection.runs.get(name, [])
            # A seed may have a run for some lengths and another one for others.
            by_seed: dict[int, float] = {}
            for run in runs:
                by_seed[run.seed] = by_seed.get(run.seed, 0.0) + run.cost.get("wall_seconds", math.nan)
            cells = (
                over_seeds(runs, partial(selection.spent, cost="wall_seconds"), ",.0f", source),
                over_seeds(runs, partial(_seconds_of_seed, by_seed), ",.0f", source),
            )
            if any(cell.origin == "measured" for cell in cells):
                head = measured_cell(source, source, 0.0, 0, [run.run_id for run in runs])
                rows.append(Row(f"{name}/{source}", marked(title, selection, name), (head, *cells)))
    if not rows:
        return []
    what = (
        "Wall-clock seconds of the training and of all evaluations of a seed (longer where the machine was also doing "
        "other work)"
    )
    columns = ("Source", "Training seconds", "Evaluation seconds")
    table = Table(what, columns, tuple(rows), rows_are).with_measured_columns()
    if "Training seconds" not in table.columns:
        table = replace(table, title=what.replace("the training and of ", ""))
    return [table]


def _seconds_of_seed(by_seed: Mapping[int, float], run: RunRecord) -> float | None:
    """Those of the seed of a run; None if one of its runs does not say."""
    seconds = by_seed[run.seed]
    return None if math.isnan(seconds) else seconds


def provenance(source: str, runs: Sequence[RunRecord], details: Sequence[str]) -> str:
    """A note on the evaluation runs of a source: their number, details, hardware and commits."""
    if not runs:
        return f"{source}: no runs"
    machines, commits = distinct(map(hardware_of, runs)), distinct(map(commit_of, runs))
    return "; ".join(
        [f"{source}: {counted(len(runs), 'evaluation run')}", *details, f"hardware {machines}", f"commit {commits}"]
    )


def products(source: str, titles: Mapping[str, str], selection: Selection) -> list[str]:
    """A note on the rows and seeds whose training or evaluation multiplies in the rarer of two formats; none where all
    multiply in one."""
    found: dict[bool, dict[str, set[int]]] = {True: {}, False: {}}
    for row, runs in selection.runs.items():
        for run in runs:
            for made in filter(None, (run, selection.training(run))):
                if (in_bfloat16 := made.environment.get("bfloat16")) is not None:
                    found[in_bfloat16].setdefault(row, set()).add(run.seed)
    usual = sum(map(len, found[True].values())) >= sum(map(len, found[False].values()))
    if not all(found.values()):
        return []
    others = "; ".join(
        f"{titles[row]} (seed{'s' * (len(seeds) > 1)} {', '.join(map(str, sorted(seeds)))})"
        for row, seeds in found[not usual].items()
    )
    formats = {True: "bfloat16", False: "float32"}
    return [f"{source}: matrix products in {formats[usual]}, but in {formats[not usual]}: {others}"]


def rows_by_source(
    titles: Mapping[str, str],
    sources: Mapping[str, Selection],
    printed: Mapping[str, Sequence[Cell]],
    cells: Callable[[Sequence[RunRecord], str], Sequence[Cell]],
    expected: Iterable[str],
    label: Callable[[str, Sequence[RunRecord]], str] = lambda source, runs: source,
) -> list[Row]:
    """Lines of a table with a line for each row and source: the paper's, then published and yours.

    titles: row -> its title. printed: row -> the cells that the paper prints. cells: of the runs of a row and a source.
    expected: rows that have a line of published runs before there is any run, so that the table shows which rows there
    are. label: the name of a source's line.
    """
    rows, awaited = [], set() if _with_runs(sources) else set(expected)
    for name, title in titles.items():
        if name in printed:
            rows.append(Row(f"{name}/paper", title, (Cell("paper", "quoted", source="paper"), *printed[name])))
        for source, selection in sources.items():
            runs = selection.runs.get(name, [])
            head = Cell(source, "missing")
            if name in selection.disputed:
                head = Cell(f"{source} {DISPUTED}", "missing")
            elif runs:
                head = measured_cell(label(source, runs), source, 0.0, 0, [run.run_id for run in runs])
            elif source == "yours" or name not in awaited:
                continue
            shown = marked(title, selection, name) + f" {SEVERAL_MARK}" * bool(selection.several_trainings(name))
            rows.append(Row(f"{name}/{source}", shown, (head, *cells(runs, source))))
    return rows


def not_shown(titles: Iterable[str]) -> list[str]:
    """The note on rows that have no number where others have some; nothing if there are none. titles: theirs."""
    named = "; ".join(titles)
    return [f"rows without a run, not shown: {named}."] if named else []


def without_runs(titles: Mapping[str, str], sources: Mapping[str, Selection], expected: Iterable[str]) -> list[str]:
    """The note on rows that `rows_by_source` leaves out, whose arguments these are."""
    known = _with_runs(sources)
    return not_shown(titles[name] for name in expected if name not in known) if known else []


def _with_runs(sources: Mapping[str, Selection]) -> set[str]:
    """Rows that have runs, disputed ones too."""
    return {name for selection in sources.values() for name in (*selection.runs, *selection.disputed)}


def trainings(tables: Iterable[Table], titles: Mapping[str, str], sources: Mapping[str, Selection]) -> list[str]:
    """A note on each row and seed with several trainings: which of them fills which columns of the tables, whose rows
    are those of `rows_by_source`."""
    notes = []
    for source, selection in sources.items():
        for name, title in titles.items():
            cells = [
                (column, cell)
                for table in tables
                for row in table.rows
                if row.model == f"{name}/{source}"
                for column, cell in zip(table.columns[1:], row.cells[1:], strict=True)
            ]
            for seed, by_training in selection.several_trainings(name).items():
                filled = {
                    training: ", ".join(dict.fromkeys(column for column, cell in cells if ids & set(cell.run_ids)))
                    for training, ids in by_training.items()
                }
                shown = "; ".join(f"{training} ({columns or 'no cell'})" for training, columns in filled.items())
                notes.append(f"{SEVERAL_MARK} {source}: {title}: seed {seed} has {len(filled)} trainings: {shown}")
    return notes


def disputes(sources: Mapping[str, Selection]) -> list[str]:
    """A note on each row for whose cells two runs compete. sources: by what the note begins with."""
    return [
        f"{DISPUTE_MARK} {source}: {problem}"
        for source, selection in sources.items()
        for problem in dict.fromkeys(selection.disputed.values())
    ]


def left_out(sources: Mapping[str, Selection]) -> list[str]:
    """A note on the reader's evaluations that should fill a cell and do not, if there are any, and why the last does
    not."""
    reasons = sources["yours"].left_out if "yours" in sources else {}
    if not reasons:
        return []
    last = max(reasons)
    return [f"yours: {counted(len(reasons), 'evaluation')} without a cell here; the last is {last}: {reasons[last]}"]


def marked(title: str, selection: Selection, row: str) -> str:
    """A title with MISMATCH_MARK if the runs of its row differ from what it declares."""
    return f"{title} {MISMATCH_MARK}" if row in selection.mismatches else title


def measured_on(run: RunRecord, source: str) -> str:
    """A note on the machine and the commit of a benchmark."""
    threads = counted(run.environment.get("threads", 1), "thread")
    return f"{source}: hardware {hardware_of(run)}, {threads}; commit {commit_of(run)}"


def hardware_of(run: RunRecord) -> str:
    hardware = run.environment.get("hardware", {})
    described = f"{hardware.get('cpu')}, {hardware.get('cores')} cores, {hardware.get('memory_gb')} GB"
    if several := run.environment.get("machines"):
        # Parts of an evaluation, or of a training that was stopped, ran on each.
        return f"{' and '.join(several)} (the last: {described})"
    return f"{hardware['accelerator']} ({described})" if hardware.get("accelerator") else described


def commit_of(run: RunRecord) -> str:
    """The shortened commit of a run, or its commits if it was interrupted and resumed at another."""
    several = run.environment.get("git_revisions") or ()
    if len(several) > 1:
        both = " and ".join((revision or "unknown")[:12] for revision in several)
        return f"{both}, started at one and ended at another"
    revision = run.environment.get("git_revision")
    if revision is None:
        return "unknown"
    return f"{revision[:12]}{' with uncommitted changes' if run.environment.get('git_dirty') is not False else ''}"
