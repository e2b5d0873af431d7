"""Figures of the summarisation task, from run records."""

from __future__ import annotations

import statistics
from pathlib import Path

from infini.config.lengths import format_length, parse_lengths
from infini.records import RunRecord
from infini.report.book_scores import interval_over_books
from infini.report.figures import LINES, SYNTHETIC_MARK, draw_gates, new_figure, save
from infini.report.selection import Selection
from infini.report.summaries import SummaryReport, cells_at


def overall_by_length(report: SummaryReport, scale: str, selection: Selection, path: Path) -> list[Path]:
    """Draw the overall value (geometric mean of R-1, R-2 and R-L) against the tokens of a book that were read: the mean
    over seeds, with bars for its interval over books.

    Returns:
        Paths of the PNG and the SVG; empty if no system was asked at two lengths.
    """
    curves = {name: points for name, runs in selection.runs.items() if (points := _points(report, runs))}
    if not any(len(points) > 1 for points in curves.values()):
        return []
    with new_figure(6.4, 4.0, layout="constrained") as figure:
        axes = figure.add_subplot()
        for index, (name, points) in enumerate(curves.items()):
            style, marker, shade = LINES[index % len(LINES)]
            x, mean, low, high = zip(*points, strict=True)
            bars = [[m - a for m, a in zip(mean, low, strict=True)], [b - m for m, b in zip(mean, high, strict=True)]]
            # Shifted, so that bars do not cover each other.
            moved = [value * 1.03**index for value in x]
            axes.errorbar(
                moved,
                mean,
                [[max(0.0, value) for value in side] for side in bars],
                fmt=marker,
                linestyle=style,
                color=shade,
                markersize=4,
                capsize=2,
                linewidth=1.2,
                label=report.systems[name].title,
            )
        ticks = parse_lengths(report.input_lengths)
        axes.set_xscale("log")
        axes.set_xticks(ticks, [format_length(tick) for tick in ticks])
        axes.set_xticks([], minor=True)
        axes.set_xlabel("tokens of the book that were read")
        axes.set_ylabel("overall ROUGE (per cent)")
        made_up = SYNTHETIC_MARK if selection.synthetic else ""
        axes.set_title(
            f"{report.title}\nscale {scale}, {report.split} books, bars: 95 % over books{made_up}", fontsize=9
        )
        # Below the plot, because the bars of a few books may reach everywhere.
        figure.legend(frameon=False, fontsize=8, loc="outside lower center", ncols=2)
        return save(figure, path)


def _points(report: SummaryReport, runs: list[RunRecord]) -> list[tuple[int, float, float, float]]:
    """(tokens read, overall, low, high) at every length that was asked."""
    points = []
    for length in parse_lengths(report.input_lengths):
        cells = [cell for _, cell in cells_at(runs, length) if cell["overall"] is not None]
        if cells:
            mean = statistics.fmean(cell["overall"] for cell in cells)
            # One book has no interval and no bar.
            low, high = interval_over_books(cells, "overall") or (mean, mean)
            points.append((length, mean, low, high))
    return points


def draw_summaries(report: SummaryReport, scale: str, selection: Selection, folder: Path) -> list[Path]:
    """The overall value by length if there are several, and the gates of each model at its first seed."""
    written: list[Path] = []
    if len(report.input_lengths) > 1:
        written += overall_by_length(report, scale, selection, folder / f"{report.name}_{scale}_overall_by_length")
    return written + draw_gates(report.name, scale, selection, folder, report.titles)
