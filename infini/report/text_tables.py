"""The table of running text: perplexities, the paper's and ours, and the tables of the other measurements."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from infini.config.lengths import format_length
from infini.records import RunRecord, value_at
from infini.report.declared import report_mismatches
from infini.report.intervals import holm, p_value
from infini.report.selection import Selection, select_sources
from infini.report.stats import BY_PLACE, BY_POSITION, Effect, gap, knockout_cost, paired_difference
from infini.report.tables import (
    DASH,
    DISPUTED,
    MISSING,
    OTHER_DATA_MARK,
    PLUS_MINUS,
    Cell,
    RenderedReport,
    Row,
    Table,
    disputes,
    distinct,
    marked,
    measured_cell,
    over_seeds,
    provenance,
    quoted,
)
from infini.report.text_measures import (
    REFERENCE,
    Counts,
    bits_per_byte,
    carried_floats,
    compression,
    counted,
    described_tokens,
    word_perplexity,
    xl_cache,
)
from infini.report.text_report import Report

BIN_GROWTH = 4.0
"""Each column of a table of positions ends at this many times its first position."""
CLUSTERED = "clustered by document and seed, of one seed by document alone"
SIZES = (
    "Floats carried from segment to segment (in brackets how many times less than Memorizing Transformers), and tokens "
    "of the XL cache and of a segment"
)


def build_report(
    report: Report,
    scale: str,
    published: Iterable[RunRecord],
    yours: Iterable[RunRecord] | None = None,
) -> RenderedReport:
    """The columns paper, published and yours of each task, and the other tables; see RunReport.render."""
    published, yours = list(published), None if yours is None else list(yours)
    # Task -> source -> selection.
    chosen = {part.task: select_sources(part, scale, published, yours) for part in report.parts}
    counts = counted([*published, *(yours or ())])
    mark = ""
    made_up = [task for task, sources in chosen.items() if any(found.synthetic for found in sources.values())]
    if made_up:
        with_runs = [task for task, sources in chosen.items() if any(found.runs for found in sources.values())]
        where = "" if made_up == with_runs else f" in {', '.join(report.benchmarks[task] for task in made_up)}"
        # Published runs are never synthetic.
        where += " of the rows that are yours" if any(chosen[task]["published"].runs for task in made_up) else ""
        mark = f" [SYNTHETIC CORPUS{where}: shows that the pipeline works, says nothing about the models]"
    main, without_run = _main_table(report, chosen)
    tables = [main, _sizes_table(report, chosen)]
    notes = []
    if without_run:
        notes.append(f"rows without a run, not shown: {'; '.join(without_run)}.")
    notes.append(f"mean {PLUS_MINUS} standard deviation over seeds, number of seeds in brackets; {DASH} not available.")
    for part in report.parts:
        sources = chosen[part.task]
        # The other tables compare runs in pairs, so they show the runs of one source.
        beside = "yours" if yours is not None and sources["yours"].runs else "published"
        if sources[beside].runs:
            shown = part, beside, sources[beside]
            # By position: does the gap keep growing? By place: at the beginning of a segment the baseline sees little.
            tables += [
                _measures_table(*shown, counts),
                _memory_table(*shown),
                _gap_table(*shown, BY_POSITION, BIN_GROWTH, "by position in the document"),
                _gap_table(*shown, BY_PLACE, 1.0, "by place in the segment"),
            ]
        named = {f"{report.benchmarks[part.task]}, {source}": selection for source, selection in sources.items()}
        notes += [
            provenance(source, selection.all_runs, _data(selection, part))
            for source, selection in named.items()
            if selection.runs or (part.task == report.task and not selection.disputed)
        ]
        notes += [*report_mismatches(named, scale, part.models), *disputes(named)]
        if other := _other_data(sources):
            notes.append(f"{OTHER_DATA_MARK} {report.benchmarks[part.task]}, yours: {other}")
    return report.rendered(scale, [table for table in tables if table.rows], notes, mark)


def _main_table(report: Report, chosen: dict[str, dict[str, Selection]]) -> tuple[Table, list[str]]:
    """The perplexities, and the titles of rows that are left out: those without any number, where others have one."""
    columns: list[str] = []
    for task, benchmark in report.benchmarks.items():
        columns += [f"{benchmark} paper", *(f"{benchmark} {source}" for source in chosen[task])]
    rows = []
    for model, title in report.models.items():
        paper = report.paper.get(model, {})
        cells: list[Cell] = []
        for task, sources in chosen.items():
            cells.append(quoted(paper.get(task)))
            for source, selection in sources.items():
                runs = selection.runs.get(model, ())
                cell = over_seeds(runs, lambda run: run.metric("perplexity"), ".2f", source)
                text = DISPUTED if model in selection.disputed else marked(cell.text, selection, model)
                if source == "yours" and runs and _other_data(sources):
                    text += f" {OTHER_DATA_MARK}"
                cells.append(replace(cell, text=text))
        rows.append(Row(model, title, tuple(cells)))
    empty = [row for row in rows if all(cell.origin == "missing" and cell.text == DASH for cell in row.cells)]
    if not any(cell.origin == "measured" for row in rows for cell in row.cells):
        # Before the first run the table shows which rows there are.
        empty = []
    kept = tuple(row for row in rows if row not in empty)
    return Table("Perplexity per token", tuple(columns), kept), [row.title for row in empty]


def _other_data(sources: Mapping[str, Selection]) -> str:
    """How the data of the reader's runs differ from those of the published ones; empty where they do not."""
    runs = [selection.all_runs[:1] for selection in sources.values()]
    if len(runs) < 2 or not all(runs):
        return ""
    # All runs of a selection read the same documents with the same tokenizer.
    published, yours = (found[0].data for found in runs)
    ways = [
        f"{what} ({_count(yours.get(name))} instead of {_count(published.get(name))})"
        for key, what, name in (
            ("revision", "other documents", "documents"),
            ("tokenizer", "another tokenizer", "tokenizer"),
        )
        if yours.get(key) != published.get(key)
    ]
    return f"{' and '.join(ways)} than published; perplexities cannot be compared" if ways else ""


def _sizes_table(report: Report, chosen: Mapping[str, Mapping[str, Selection]]) -> Table:
    """Memory, compression, XL cache and segment length: the paper's and ours, which are the same for every task."""
    printed = {"Memory size (comp.)": "memory", "XL cache": "xl_cache", "Segment length": "segment_length"}
    beside_paper = any(name in values for values in report.paper.values() for name in printed.values())
    found: dict[str, tuple[str, Selection]] = {}
    for sources in chosen.values():
        for source, selection in sources.items():
            for row in selection.runs:
                # The reader's own runs replace the published ones.
                if row not in found or source == "yours" != found[row][0]:
                    found[row] = source, selection
    first = {row: selection.runs[row][0] for row, (_, selection) in found.items()}
    floats = {row: carried_floats(run, found[row][1].training_config(run)) for row, run in first.items()}
    rows = []
    for row, title in report.models.items():
        paper = [quoted(report.paper.get(row, {}).get(name)) for name in printed.values()]
        ours = [MISSING, MISSING, MISSING]
        if row in found:
            source, selection = found[row]
            title = marked(title, selection, row)
            cache = xl_cache(first[row], selection.training(first[row]))
            size, length = floats[row], value_at(selection.training_config(first[row]), "dims.segment_length")
            ratio = "" if size is None else compression(size, floats.get(REFERENCE))
            run_ids = [run.run_id for run in selection.runs[row]]
            seeds = {run.seed for run in selection.runs[row]}
            shown = (
                (None if size is None else f"{size:,.0f}{ratio}", size),
                (str(cache), None if cache is None else float(cache)),
                (None if length is None else str(length), length),
            )
            ours = [
                MISSING if text is None else measured_cell(text, source, value, len(seeds), run_ids)
                for text, value in shown
            ]
        pairs = zip(paper, ours, strict=True)
        cells = [cell for pair in pairs for cell in (pair if beside_paper else pair[1:])]
        if any(cell is not MISSING for cell in cells):
            rows.append(Row(row, title, tuple(cells)))
    whose = ("paper", "ours") if beside_paper else ("",)
    columns = tuple(f"{name} {of}".rstrip() for name in printed for of in whose)
    return Table(SIZES, columns, tuple(rows))


def _measures_table(report: Report, source: str, selection: Selection, counts: Counts) -> Table:
    measures: dict[str, tuple[Callable[[RunRecord], Any], str]] = {
        "Training tokens": (lambda run: selection.spent(run, "tokens_seen"), ",.0f"),
        "Word perplexity": (partial(word_perplexity, counts=counts), ".1f"),
        "Bits per byte": (partial(bits_per_byte, counts=counts), ".3f"),
    }
    rows = []
    for model, runs in selection.runs.items():
        cells = tuple(over_seeds(runs, value, form, source) for value, form in measures.values())
        rows.append(Row(model, marked(report.models[model], selection, model), cells))
    return Table(f"{report.benchmarks[report.task]}: other measures ({_whose(source)})", tuple(measures), tuple(rows))


def _memory_table(report: Report, source: str, selection: Selection) -> Table:
    names = ("Reset", "Foreign", *([f"Minus {report.baseline}"] if report.baseline else []))
    found: dict[str, list[Effect | None]] = {}
    for model, runs in selection.runs.items():
        effects = [knockout_cost(runs, "reset"), knockout_cost(runs, "foreign")]
        if report.baseline:
            other = report.baseline_of(model)
            effects.append(paired_difference(runs, selection.runs.get(other, [])) if other else None)
        if any(effects):
            found[model] = effects
    # The tests of the table are one family.
    tested = [effect for effects in found.values() for effect in effects if effect and effect.estimate.df > 0]
    adjusted = dict(zip(map(id, tested), holm([effect.estimate.p for effect in tested]), strict=True))
    rows = []
    for model, effects in found.items():
        cells = [cell for effect in effects for cell in _effect_cells(effect, adjusted.get(id(effect)), source)]
        known = [effect for effect in effects if effect]
        ids = list(dict.fromkeys(run_id for effect in known for run_id in effect.run_ids))
        documents = [f"{effect.n_documents} ({effect.effective_documents:.1f})" for effect in known]
        for counts, last in ((documents, known[-1].n_documents), ([str(e.n_seeds) for e in known], known[-1].n_seeds)):
            text = "/".join(dict.fromkeys(counts))
            cells.append(measured_cell(text, source, last, known[-1].n_seeds, ids))
        rows.append(Row(model, marked(report.models[model], selection, model), tuple(cells)))
    title = (
        f"{report.benchmarks[report.task]}: what the memory is worth, in nats a token [95 % interval, {CLUSTERED}] "
        f"({_whose(source)}): "
        "loss added by resetting it at every segment, loss added by another document's memory"
    )
    if report.baseline:
        title += f", and loss minus the loss of {_baseline(report)} (below 0: better), paired by seed and document"
    title += f"; p: two-sided, adjusted for the {len(tested)} comparisons of this table (Holm)"
    title += "; effective: the number of documents of equal length with the same precision"
    columns = [heading for name in names for heading in (name, f"{name}: p")]
    return Table(title, (*columns, "Documents (effective)", "Seeds"), tuple(rows))


def _gap_table(report: Report, source: str, selection: Selection, series: str, growth: float, by_what: str) -> Table:
    """The gap to the baseline in bins of a series. growth: the end of a bin over its start, at least."""
    at_zero = {row: selection.runs.get(baseline, []) for row in selection.runs if (baseline := report.baseline_of(row))}
    gaps = {row: gap(selection.runs[row], baseline, growth, series) for row, baseline in at_zero.items()}
    bins = sorted({(first, last) for points in gaps.values() for first, last, _, _ in points.tolist()})
    rows = []
    for row, points in gaps.items():
        mine, theirs = ([run for run in runs if series in run.series] for runs in (selection.runs[row], at_zero[row]))
        shared = {run.seed for run in mine} & {run.seed for run in theirs}
        run_ids, found = [run.run_id for run in (*mine, *theirs) if run.seed in shared], {}
        for first, last, mean, half in points.tolist():
            text = f"{mean:+.4f} {PLUS_MINUS} {half:.4f}"
            found[first, last] = measured_cell(text, source, mean, len(shared), run_ids, half, "ci")
        if found:
            cells = [found.get(at, MISSING) for at in bins]
            ids = dict.fromkeys(run_id for cell in cells for run_id in cell.run_ids)
            cells.append(measured_cell(str(len(shared)), source, len(shared), len(shared), ids))
            rows.append(Row(row, marked(report.models[row], selection, row), tuple(cells)))
    columns = tuple(
        f"{format_length(int(first)) if first else 0} to {format_length(int(last))}" for first, last in bins
    )
    title = (
        f"{report.benchmarks[report.task]}: loss minus the loss of {_baseline(report)} {by_what}, in "
        f"nats a token {PLUS_MINUS} half of its 95 % interval, {CLUSTERED}, each cell by itself ({_whose(source)})"
    )
    return Table(title, (*columns, "Seeds"), tuple(rows))


def _baseline(report: Report) -> str:
    return f"{report.baseline} (of others where the note names them)" if report.baselines else str(report.baseline)


def _effect_cells(effect: Effect | None, adjusted: float | None, source: str) -> list[Cell]:
    if effect is None:
        return [MISSING, MISSING]
    mean, half = effect.mean, effect.estimate.half_width
    if adjusted is None:
        return [measured_cell(f"{mean:+.4f}", source, mean, effect.n_seeds, effect.run_ids), MISSING]
    text = f"{mean:+.4f} [{mean - half:+.4f}, {mean + half:+.4f}]"
    size = measured_cell(text, source, mean, effect.n_seeds, effect.run_ids, half, "ci")
    p = measured_cell(p_value(adjusted), source, adjusted, effect.n_seeds, effect.run_ids)
    return [size, p]


def _whose(source: str) -> str:
    return "your runs" if source == "yours" else "published runs"


def _data(selection: Selection, report: Report) -> list[str]:
    """Data, tokenizer and training tokens of the runs of a selection."""
    data = []
    for run in selection.all_runs:
        seen, scored = run.data, run.cost.get("tokens_seen")
        size = _count(seen.get("tokens"))
        # An evaluation may stop early.
        tokens = size if scored in (None, seen.get("tokens")) else f"the first {_count(scored)} of {size}"
        data.append(
            f"{seen.get('name')} {seen.get('split')} "
            f"({seen.get('source')}, revision {str(seen.get('revision'))[:12]}), "
            f"{_count(seen.get('documents'))} documents, {tokens} tokens"
        )
    by_title = {report.models[model]: found for model, found in selection.runs.items()}
    trained = described_tokens(selection, by_title)
    tokenizers = distinct(run.data.get("tokenizer") for run in selection.all_runs)
    return [f"data {distinct(data)}", f"tokenizer {tokenizers}", f"training tokens {trained}"]


def _count(value: Any) -> str:
    return f"{value:,}" if isinstance(value, (int, float)) else str(value or "unknown")
