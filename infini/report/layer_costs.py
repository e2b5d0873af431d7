"""The report of one attention layer against others, from records of `infini bench suite=layer`."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from infini.config.lengths import format_length
from infini.records import RunRecord
from infini.report.canvas import Label, entitle, label_axes, label_ends, new_figure, save
from infini.report.kind import ReportKind
from infini.report.palette import look_of
from infini.report.tables import MISSING, RenderedReport, Row, Source, Table, measured_cell, measured_on

SERIES = "layer"
WAYS = {
    "local": ("Local attention", look_of("local")),
    "linear": ("Infini-attention, Linear", look_of("infini_linear")),
    "delta": ("Infini-attention, Linear + Delta", look_of("infini_delta")),
    "full": ("Full attention", look_of("full")),
    "peer_linear": ("infini-transformer-pytorch, Linear", look_of("infini_linear", 1)),
    "peer_delta": ("infini-transformer-pytorch, Linear + Delta", look_of("infini_delta", 1)),
}
"""Way in a record -> its title and its look."""
PASSES = {"forward": "forward", "backward": "forward and backward"}
Found = Mapping[str, Any]


def build_layer_report(report: ReportKind, scale: str, run: RunRecord | None, source: Source) -> RenderedReport:
    """The tables of a record; no tables if there is none."""
    if run is None:
        return report.rendered(scale, (), ["no measurement yet: infini bench suite=layer"])
    measures: tuple[tuple[str, str, Callable[[Found], float]], ...] = (
        ("Seconds", ",.3f", lambda found: statistics.median(found["seconds"])),
        ("Times the seconds of local attention", ".2f", lambda found: float(found["to_local"])),
        (
            "Least time of the work over the time taken",
            ".0%",
            lambda found: found["least_seconds"] / statistics.median(found["seconds"]),
        ),
    )
    tables = [_table(title, form, value, run, source) for title, form, value in measures]
    measured = run.series[SERIES]
    rates = measured["rates"]
    products = "bfloat16" if run.environment.get("bfloat16") else "float32"
    equal = ", ".join(f"{WAYS[way][0]} {error:.0e}" for way, error in measured["peer_differences"].items())
    notes = [
        f"{measured['n_heads']} heads of {measured['d_key']}, d_model {measured['d_model']}, segments of "
        f"{measured['segment_length']:,}, one sequence; products in {products}. Medians of interleaved repeats. Equal "
        "weights; relative difference of the other package's outputs to ours over three segments in float32: "
        f"{equal or 'not installed'}.",
        f"Least time: products at {rates['product_flops'] / 1e12:.2f} TFLOP/s, exponentials at "
        f"{rates['exponentials'] / 1e9:.2f} a nanosecond and memory traffic at {rates['bytes'] / 1e9:.1f} GB/s, one "
        "after the other, each measured alone in the same run.",
        measured_on(run, source),
    ]
    return report.rendered(scale, tables, notes)


def _table(title: str, form: str, value: Callable[[Found], float], run: RunRecord, source: Source) -> Table:
    lengths, rows = run.series[SERIES]["lengths"], []
    columns = [(n, which) for which in PASSES for n in sorted(map(int, lengths)) if which in lengths[str(n)]]
    for way, (name, _) in WAYS.items():
        found = [lengths[str(n)][which].get(way) for n, which in columns]
        if any(found):
            cells = tuple(
                measured_cell(format(value(one), form), source, value(one), 1, [run.run_id]) if one else MISSING
                for one in found
            )
            rows.append(Row(way, name, cells))
    return Table(title, tuple(f"{format_length(n)}, {PASSES[which]}" for n, which in columns), tuple(rows), "Layer")


def draw_layer_costs(run: RunRecord, folder: Path) -> list[Path]:
    """Draw seconds of the forward pass by length of the sequence."""
    lengths = run.series[SERIES]["lengths"]
    ticks = sorted(map(int, lengths))
    with new_figure(5.4, 3.4) as figure:
        axes = figure.subplots()
        ends, longest = [], {}
        for way, (title, look) in WAYS.items():
            points = {
                n: statistics.median(found["seconds"]) for n in ticks if (found := lengths[str(n)]["forward"].get(way))
            }
            if not points:
                continue
            axes.plot(list(points), list(points.values()), **look.drawn)
            ends.append(Label(*list(points.items())[-1], title, look.colour))
            if ticks[-1] in points:
                longest[way] = points[ticks[-1]]
        label_axes({"seconds, forward pass": axes}, ticks, "the sequence")
        label_ends(axes, ends)
        times = ", ".join(
            f"{WAYS[way][0]} {seconds:,.1f} s"
            for way, seconds in longest.items()
            if way in ("local", "linear", "delta")
        )
        entitle(
            axes,
            f"Reading {format_length(ticks[-1])} tokens takes: {times}",
            "One attention layer of the paper's sizes; medians",
        )
        return save(figure, folder / f"layer_{run.scale}")
