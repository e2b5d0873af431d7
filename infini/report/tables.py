"""A report as tables in memory: every cell is a value, where it comes from, and the runs behind it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from infini.lengths import format_length
from infini.records import RunRecord
from infini.report.positions import gap
from infini.report.selection import Report, Selection, select_runs
from infini.report.stats import Effect, knockout_cost, paired_difference
from infini.report.training_tokens import described, trained_tokens

BIN_GROWTH = 4.0
"""Of the positions in a table: each column ends at about this many times where it begins."""

ERRORS = "standard error (the larger of those over documents and over seeds)"

DASH = "\N{EM DASH}"
PLUS_MINUS = "\N{PLUS-MINUS SIGN}"

Origin = Literal["measured", "quoted", "computed", "missing"]


@dataclass(frozen=True)
class Cell:
    """One cell: what is printed, and what that rests on."""

    text: str
    origin: Origin
    value: float | None = None
    spread: float | None = None
    spread_kind: Literal["", "sd", "se"] = ""
    """sd: standard deviation over seeds; se: standard error, see infini.report.stats."""
    n_seeds: int = 0
    run_ids: tuple[str, ...] = ()
    source: Literal["", "paper", "published", "yours"] = ""


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


def build_report(
    report: Report, scale: str, published: Iterable[RunRecord], yours: Iterable[RunRecord] | None = None
) -> RenderedReport:
    """Fill a report from records: paper, published and yours side by side, at one scale.

    Args:
        report: what the table is.
        scale: only runs of this scale fill cells.
        published: published records, synthetic ones are left out.
        yours: records of the results folder; None makes a report of the published records alone.

    Raises:
        InputError: there are two candidates for a cell, see `select_runs`.
    """
    known = {"published": [run for run in published if not run.synthetic]}
    if yours is not None:
        known["yours"] = list(yours)
    # Task -> whose -> runs.
    chosen = {
        part.task: {source: select_runs(part, scale, found) for source, found in known.items()} for part in report.parts
    }
    title = f"{report.title}, scale {scale}"
    made_up = [task for task, sources in chosen.items() if any(found.synthetic for found in sources.values())]
    if made_up:
        with_runs = [task for task, sources in chosen.items() if any(found.runs for found in sources.values())]
        where = "" if made_up == with_runs else f" in {', '.join(report.benchmarks[task] for task in made_up)}"
        title += f" [SYNTHETIC CORPUS{where}: shows that the pipeline works, says nothing about the models]"
    tables = [_main_table(report, chosen)]
    notes = [report.note] if report.note else []
    notes.append(f"mean {PLUS_MINUS} standard deviation over seeds, number of seeds in brackets; {DASH} not available.")
    for part in report.parts:
        sources = chosen[part.task]
        # What was measured beside perplexity is shown for one set of runs, so that pairs are pairs of one set.
        beside = "yours" if yours is not None and sources["yours"].runs else "published"
        if sources[beside].runs:
            builders = (_measures_table, _memory_table, _position_table)
            tables += [build(part, beside, sources[beside]) for build in builders]
        notes += [
            provenance(f"{report.benchmarks[part.task]}, {source}", selection, part)
            for source, selection in sources.items()
            if selection.runs or part.task == report.task
        ]
    return RenderedReport(report.name, scale, title, tuple(table for table in tables if table.rows), tuple(notes))


def over_seeds(runs: Sequence[RunRecord], value: Callable[[RunRecord], Any], form: str, source: str) -> Cell:
    """A measured cell: the mean over seeds of the mean over the runs of a seed; missing where no run has the value."""
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
    text = format(mean, form)
    if spread:
        text += f" {PLUS_MINUS} {format(spread, form)} ({len(means)})"
    return measured_cell(text, source, mean, spread, "sd" if spread is not None else "", len(means), used)


def measured_cell(
    text: str,
    source: str,
    value: float,
    spread: float | None,
    kind: Literal["", "sd", "se"],
    n_seeds: int,
    run_ids: Iterable[str],
) -> Cell:
    shown: Literal["published", "yours"] = "published" if source == "published" else "yours"
    return Cell(text, "measured", value, spread, kind, n_seeds, tuple(run_ids), shown)


def _quoted(value: Any) -> Cell:
    if value is None:
        return MISSING
    number = float(value) if isinstance(value, (int, float)) else None
    return Cell(str(value), "quoted", number, source="paper")


def _main_table(report: Report, chosen: dict[str, dict[str, Selection]]) -> Table:
    columns = ["Memory size (comp.)", "XL cache", "Segment length"]
    for task, benchmark in report.benchmarks.items():
        columns += [f"{benchmark} paper", *(f"{benchmark} {source}" for source in chosen[task])]
    rows = []
    for model, title in report.models.items():
        paper = report.paper.get(model, {})
        cells = [_quoted(paper.get(name)) for name in ("memory", "xl_cache", "segment_length")]
        for task, sources in chosen.items():
            cells.append(_quoted(paper.get(task)))
            cells += [
                over_seeds(selection.runs.get(model, ()), lambda run: run.metric("perplexity"), ".2f", source)
                for source, selection in sources.items()
            ]
        rows.append(Row(model, title, tuple(cells)))
    return Table("Perplexity per token", tuple(columns), tuple(rows))


def _measures_table(report: Report, source: str, selection: Selection) -> Table:
    measures: dict[str, tuple[Callable[[RunRecord], Any], str]] = {
        "Segment length": (lambda run: selection.training_config(run).get("dims", {}).get("segment_length"), ",.0f"),
        "State (floats)": (lambda run: run.cost.get("state_floats"), ",.0f"),
        "Training tokens": (lambda run: trained_tokens(selection, run), ",.0f"),
        "Word perplexity": (lambda run: run.metric("word_perplexity"), ".1f"),
        "Bits per byte": (lambda run: run.metric("bits_per_byte"), ".3f"),
    }
    rows = tuple(
        Row(
            model,
            report.models[model],
            tuple(over_seeds(runs, value, form, source) for value, form in measures.values()),
        )
        for model, runs in selection.runs.items()
    )
    return Table(f"{report.benchmarks[report.task]}: other measures ({_whose(source)})", tuple(measures), rows)


def _memory_table(report: Report, source: str, selection: Selection) -> Table:
    baseline = selection.runs.get(report.baseline or "", [])
    columns: list[str] = []
    for name in ("Reset", "Foreign", *([f"Minus {report.baseline}"] if report.baseline else [])):
        columns += [name, f"{name}: t"]
    columns += ["Documents (effective)", "Seeds"]
    rows = []
    for model, runs in selection.runs.items():
        effects = [knockout_cost(runs, "reset"), knockout_cost(runs, "foreign")]
        if report.baseline:
            effects.append(paired_difference(runs, baseline) if model != report.baseline else None)
        if not any(effects):
            continue
        cells = [cell for effect in effects for cell in _effect_cells(effect, source)]
        found = [effect for effect in effects if effect]
        ids = list(dict.fromkeys(run_id for effect in found for run_id in effect.run_ids))
        documents = [f"{effect.n_books} ({effect.effective_books:.1f})" for effect in found]
        for counts, last in ((documents, found[-1].n_books), ([str(e.n_seeds) for e in found], found[-1].n_seeds)):
            text = "/".join(dict.fromkeys(counts))
            cells.append(measured_cell(text, source, last, None, "", found[-1].n_seeds, ids))
        rows.append(Row(model, report.models[model], tuple(cells)))
    title = (
        f"{report.benchmarks[report.task]}: what the memory is worth, in nats a token {PLUS_MINUS} {ERRORS} "
        f"({_whose(source)}): "
        "loss gained by resetting it at every segment, loss gained by another document's memory"
    )
    if report.baseline:
        title += f", and loss minus the loss of {report.baseline} (below 0: better), paired by seed and document"
    title += "; effective: as many documents of one length would make a mean as sure"
    return Table(title, tuple(columns), tuple(rows))


def _position_table(report: Report, source: str, selection: Selection) -> Table:
    """Whether what a row gains over the baseline goes on growing with the position in the document."""
    baseline = selection.runs.get(report.baseline or "", [])
    gaps = {row: gap(runs, baseline, BIN_GROWTH) for row, runs in selection.runs.items() if row != report.baseline}
    bins = sorted({(first, last) for points in gaps.values() for first, last, _, _ in points.tolist()})
    rows = []
    for row, points in gaps.items():
        runs = [run for run in (*selection.runs[row], *baseline) if "nll_by_position" in run.series]
        shared = {run.seed for run in selection.runs[row]} & {run.seed for run in baseline}
        found = {
            (first, last): measured_cell(
                f"{mean:+.4f} {PLUS_MINUS} {error:.4f}",
                source,
                mean,
                error,
                "se",
                len(shared),
                [run.run_id for run in runs if run.seed in shared],
            )
            for first, last, mean, error in points.tolist()
        }
        if found:
            rows.append(Row(row, report.models[row], tuple(found.get(at, MISSING) for at in bins)))
    columns = tuple(
        f"{format_length(int(first)) if first else 0} to {format_length(int(last))}" for first, last in bins
    )
    title = (
        f"{report.benchmarks[report.task]}: loss minus the loss of {report.baseline} by position in the document, in "
        f"nats a token {PLUS_MINUS} {ERRORS} ({_whose(source)})"
    )
    return Table(title, columns, tuple(rows))


def _effect_cells(effect: Effect | None, source: str) -> list[Cell]:
    if effect is None:
        return [MISSING, MISSING]
    known = not math.isnan(effect.se)
    text = f"{effect.mean:+.4f}" + (f" {PLUS_MINUS} {effect.se:.4f}" if known else "")
    size = measured_cell(
        text, source, effect.mean, effect.se if known else None, "se" if known else "", effect.n_seeds, effect.run_ids
    )
    if not math.isfinite(effect.t):
        return [size, MISSING]
    return [size, measured_cell(f"{effect.t:.1f}", source, effect.t, None, "", effect.n_seeds, effect.run_ids)]


def _whose(source: str) -> str:
    return "your runs" if source == "yours" else "published runs"


def _scored(run: RunRecord) -> str:
    """Tokens that were scored, and of how many when the evaluation stopped early."""
    scored, size = run.cost.get("tokens_seen"), run.data.get("tokens")
    if scored is None or scored == size:
        return _count(size)
    return f"the first {_count(scored)} of {_count(size)}"


def provenance(source: str, selection: Selection, report: Report) -> str:
    """One line: tokenizer, data, training tokens, hardware and commit of the runs of a selection."""
    runs = selection.all_runs
    if not runs:
        return f"{source}: no runs"
    data = []
    for run in runs:
        seen = run.data
        data.append(
            f"{seen.get('name')} {seen.get('split')} "
            f"({seen.get('source')}, revision {str(seen.get('revision'))[:12]}), "
            f"{_count(seen.get('documents'))} documents, {_scored(run)} tokens"
        )
    training_tokens = described(selection, {report.models[model]: found for model, found in selection.runs.items()})
    return (
        f"{source}: {len(runs)} evaluation runs; data {distinct(data)}; "
        f"tokenizer {distinct(run.data.get('tokenizer') for run in runs)}; training tokens {training_tokens}; "
        f"hardware {distinct(hardware_of(run) for run in runs)}; commit {distinct(commit_of(run) for run in runs)}"
    )


def _count(value: Any) -> str:
    return f"{value:,}" if isinstance(value, (int, float)) else "unknown"


def distinct(values: Iterable[Any]) -> str:
    """Each value once, in the order of the first of each."""
    return " | ".join(dict.fromkeys(str(value) for value in values))


def hardware_of(run: RunRecord) -> str:
    hardware = run.environment.get("hardware", {})
    described = f"{hardware.get('cpu')}, {hardware.get('cores')} cores, {hardware.get('memory_gb')} GB"
    return f"{hardware['accelerator']} ({described})" if hardware.get("accelerator") else described


def commit_of(run: RunRecord) -> str:
    revision = run.environment.get("git_revision")
    if revision is None:
        return "unknown"
    return f"{revision[:12]}{' with uncommitted changes' if run.environment.get('git_dirty') is not False else ''}"
