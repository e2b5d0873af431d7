"""Figures of the summarisation task, from run records."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import numpy as np

from infini.config.lengths import format_length, parse_lengths
from infini.records import RunRecord
from infini.report.book_scores import interval_over_books
from infini.report.canvas import SYNTHETIC_MARK, Label, entitle, label_ends, new_figure, save
from infini.report.claims import difference_of_scores, slope_weights
from infini.report.palette import looks
from infini.report.selection import Selection
from infini.report.summaries import SummaryReport, cells_at


def overall_by_length(report: SummaryReport, scale: str, selection: Selection, path: Path) -> list[Path]:
    """Draw the overall value (geometric mean of R-1, R-2 and R-L) against the tokens of a book that were read: the mean
    over seeds, with bars for its interval over books. Nothing is drawn if no system was asked at two lengths."""
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
            ends.append(Label(float(moved[-1]), float(mean[-1]), report.systems[name].title, look[name].colour))
        ticks = parse_lengths(report.input_lengths)
        axes.set_xscale("log")
        axes.set_xticks(ticks, [format_length(tick) for tick in ticks])
        axes.set_xticks([], minor=True)
        axes.set_xlabel("tokens of the book that were read")
        axes.set_ylabel("overall ROUGE (per cent)")
        label_ends(axes, ends)
        synthetic = SYNTHETIC_MARK * selection.synthetic
        entitle(
            axes,
            _finding(report, selection, list(curves)),
            f"{report.title}. Scale {scale}, {report.split} books{synthetic}; mean over seeds, bars: 95 % over books",
        )
        return save(figure, path)


def _finding(report: SummaryReport, selection: Selection, rows: list[str]) -> str:
    """The slope over the logarithm of the length, with its interval, of each row that has all lengths."""
    lengths = parse_lengths(report.input_lengths)
    slopes = {
        row: found[0]
        for row in rows
        if (found := difference_of_scores(selection, [(row, n) for n in lengths], slope_weights(lengths)))
    }
    if not slopes:
        return "Overall ROUGE by tokens of the book that were read"
    texts = [
        f"{report.systems[row].title} {slope.mean:+.2f} ({slope.interval[0]:+.2f} to {slope.interval[1]:+.2f})"
        for row, slope in slopes.items()
    ]
    sure = [slope for slope in slopes.values() if slope.interval[0] > 0 or slope.interval[1] < 0]
    what = "Reading more of a book" + (" changes Overall ROUGE" if sure else ": no sure change of Overall ROUGE")
    return f"{what}, points a doubling: {'; '.join(texts)}"


def _points(report: SummaryReport, runs: list[RunRecord]) -> list[tuple[int, float, float, float]]:
    """(tokens read, overall, low, high) at every length that was asked."""
    points = []
    for length in parse_lengths(report.input_lengths):
        cells = [cell for _, cell in cells_at(runs, length) if cell["overall"] is not None]
        if cells:
            mean = fmean(cell["overall"] for cell in cells)
            # One book has no interval and no bar.
            low, high = interval_over_books(cells, "overall") or (mean, mean)
            points.append((length, mean, low, high))
    return points
