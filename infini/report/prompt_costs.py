"""The report of what a prompt costs a pretrained language model, from records of `infini bench suite=llm_generate`:
with a memory, and with the base's own cache of keys and values."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from infini.config.lengths import format_length
from infini.records import RunRecord
from infini.report.canvas import Label, entitle, label_axes, label_ends, new_figure, save
from infini.report.kind import ReportKind
from infini.report.palette import look_of
from infini.report.tables import Cell, RenderedReport, Row, Source, Table, measured_cell, measured_on

SERIES = "prompts"
BASE_CACHE = "own"
"""Key of the base with its own cache in a record; the other keys are segment lengths. See infini.bench.prompts."""


@dataclass(frozen=True)
class Measure:
    """Something measured for each length and way. Less is better."""

    key: str
    """Its key in the record."""
    title: str
    better: str
    """Heading of its crossing point."""
    scale: float
    """Divides what is recorded."""
    form: str
    """Format specification."""


MEASURES = (
    Measure("read_seconds", "Seconds to read a prompt", "Reads faster from", 1.0, ",.2f"),
    Measure(
        "decode_milliseconds", "Milliseconds per token generated after the prompt", "Generates faster from", 1.0, ",.1f"
    ),
    Measure("cache_bytes", "Cache or state after the prompt, MiB", "Cache smaller from", 2**20, ",.1f"),
    Measure("peak_bytes", "Peak memory above the model's, MiB", "Peak lower from", 2**20, ",.0f"),
)


def crossing(lengths: Sequence[float], ours: Sequence[float], theirs: Sequence[float]) -> float | None:
    """The length from which on `ours` is below `theirs`, up to the last length; 0 if it is at all lengths, None if it
    is not at the last.

    lengths: ascending. Between two lengths the logarithms are straight lines over the logarithm of the length, as they
    are drawn. All values are above 0.
    """
    gap = [math.log(a) - math.log(b) for a, b in zip(ours, theirs, strict=True)]
    if gap[-1] >= 0:
        return None
    last = max((i for i, value in enumerate(gap) if value >= 0), default=-1)
    if last < 0:
        return 0.0
    part = gap[last] / (gap[last] - gap[last + 1])
    return math.exp((1 - part) * math.log(lengths[last]) + part * math.log(lengths[last + 1]))


def curves(run: RunRecord, measure: Measure) -> dict[str, dict[int, float]]:
    """Way -> length in tokens -> median over the repeats, in the unit of the measure. The own cache is first."""
    lengths = run.series[SERIES]["lengths"]
    ways = next(iter(lengths.values()))
    return {
        # Sorted, because records sort their keys as text.
        way: {
            n: max(statistics.median(lengths[str(n)][way][measure.key]) / measure.scale, 1e-9)
            for n in sorted(map(int, lengths))
        }
        for way in sorted(ways, key=lambda way: -math.inf if way == BASE_CACHE else -int(way))
    }


def title_of(way: str) -> str:
    """The title of a row or line."""
    return "its own cache" if way == BASE_CACHE else f"memory, segments of {int(way):,}"


def build_prompt_report(report: ReportKind, scale: str, run: RunRecord | None, source: Source) -> RenderedReport:
    """The tables of a record; no tables if there is none."""
    if run is None:
        return report.rendered(scale, (), ["no measurement yet: infini bench suite=llm_generate model.base=<base>"])
    found = {measure: curves(run, measure) for measure in MEASURES}
    tables = [_table(measure.title, found[measure], run, source, measure.form) for measure in MEASURES]
    later = run.series[SERIES]["new_tokens"] // 2
    speed = {
        way: {n: max(1, n - later) / value for n, value in points.items()} for way, points in found[MEASURES[0]].items()
    }
    tables.insert(1, _table("Tokens a second while reading", speed, run, source, ",.0f"))
    tables.append(_crossings(found, run, source))
    return report.rendered(scale, tables, _notes(run, source))


def _table(title: str, points: Mapping[str, Mapping[int, float]], run: RunRecord, source: Source, form: str) -> Table:
    columns, rows = tuple(format_length(n) for n in next(iter(points.values()))), []
    for way, of in points.items():
        cells = tuple(measured_cell(format(value, form), source, value, 1, [run.run_id]) for value in of.values())
        rows.append(Row(way, title_of(way), cells))
    return Table(title, columns, tuple(rows), "Cache")


def _crossings(found: Mapping[Measure, Mapping[str, Mapping[int, float]]], run: RunRecord, source: Source) -> Table:
    def cell(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Cell:
        lengths = list(ours)
        at = crossing(lengths, list(ours.values()), list(theirs.values()))
        text = f"{at / 1024:.1f}K" if at else f"the shortest ({format_length(lengths[0])})"
        text = f"not up to {format_length(lengths[-1])}" if at is None else text
        return Cell(text, "computed", at, run_ids=(run.run_id,), source=source)

    ways = [way for way in next(iter(found.values())) if way != BASE_CACHE]
    rows = [Row(way, title_of(way), tuple(cell(of[way], of[BASE_CACHE]) for of in found.values())) for way in ways]
    title = "Where the memory overtakes the base's own cache, in tokens"
    return Table(title, tuple(measure.better for measure in MEASURES), tuple(rows), "Cache")


def _notes(run: RunRecord, source: Source) -> list[str]:
    measured = run.series[SERIES]
    repeats: dict[int, list[str]] = {}
    for n in sorted(map(int, measured["lengths"])):
        count = len(measured["lengths"][str(n)][BASE_CACHE]["read_seconds"])
        repeats.setdefault(count, []).append(format_length(n))
    repeated = "; ".join(
        f"{', '.join(names)}: {f'medians of {count} interleaved repeats' if count > 1 else 'read once'}"
        for count, names in repeats.items()
    )
    options = ", ".join(f"{key}={value}" for key, value in measured["options"].items() if value is not None)
    products = "bfloat16" if run.environment.get("bfloat16") else "float32"
    return [
        f"{measured['base']['name']} ({options}), products in {products}. A memory reads in calls of "
        f"{measured['tokens_per_call']:,} tokens, as infini generate does; the base in one call, as stock generate() "
        f"does. {measured['new_tokens']} tokens are decoded greedily, half of them before the length is reached.",
        f"{repeated}. Crossing points are interpolated between two lengths, linearly on logarithmic axes.",
        measured_on(run, source),
    ]


def draw_prompt_costs(run: RunRecord, folder: Path) -> list[Path]:
    """Draw, by length of the prompt, seconds to read it, milliseconds per token generated after it, and peak memory
    (filled marks) with the cache in it (open marks)."""
    read, decode, cache, peak = (curves(run, measure) for measure in MEASURES)
    with new_figure(9.6, 3.2) as figure:
        first, second, third = figure.subplots(1, 3, gridspec_kw={"wspace": 0.4})
        ends = []
        for variant, way in enumerate(read):
            look = look_of("full") if way == BASE_CACHE else look_of("llm", variant - 1)
            for axes, points in ((first, read[way]), (second, decode[way]), (third, peak[way])):
                axes.plot(list(points), list(points.values()), **look.drawn | {"fillstyle": "full"})
            held = cache[way]
            third.plot(list(held), list(held.values()), **look.drawn | {"fillstyle": "none"})
            for points, what in ((peak[way], "peak"), (held, "cache")):
                ends.append(Label(*list(points.items())[-1], f"{title_of(way)}: {what}", look.colour))
        lengths = list(next(iter(read.values())))
        panels = {
            "seconds to read the prompt": first,
            "milliseconds of a token after it": second,
            "MiB: peak (filled), cache (open)": third,
        }
        label_axes(panels, lengths, "the prompt")
        label_ends(third, ends)
        measured = run.series[SERIES]
        times = "; ".join(f"{title_of(way)} {points[lengths[-1]]:,.0f} s" for way, points in read.items())
        entitle(
            first,
            f"Reading {format_length(lengths[-1])} tokens takes: {times}",
            f"{measured['base']['name']}, weights in {measured['options']['dtype']}: a memory and its own cache, by "
            "length of the prompt; medians",
        )
        return save(figure, folder / f"llm_generate_{run.scale}")
