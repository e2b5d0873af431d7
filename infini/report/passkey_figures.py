"""Figures of the passkey table, from run records."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from infini.config.lengths import format_length
from infini.records import RunRecord
from infini.report.figures import LINES, draw_gates, new_figure, save
from infini.report.kind import values_of
from infini.report.passkey import LOCAL_MARK, PasskeyReport, chosen_cells, percent
from infini.report.selection import Selection


def accuracy_heatmap(report: PasskeyReport, runs: Sequence[RunRecord], path: Path, title: str) -> list[Path]:
    """Draw and print token accuracy in per cent for every length and place of the key, the mean over the runs. The mark
    of the table shows where key and question are in one segment. Cells with fewer prompts show their number.

    Args:
        report: gives the lengths and places.
        runs: evaluations of one row, which have the series `cells`.
        path: the figure's path without suffix.
        title: the title of the row.

    Returns:
        Paths of the PNG and the SVG.
    """
    found: dict[tuple[int, str], list[float]] = {}
    prompts = Counter[tuple[int, str]]()
    local = set()
    for (_, length, depth), (_, cell) in chosen_cells(report, runs).items():
        found.setdefault((length, depth), []).append(100 * cell["token_accuracy"])
        prompts[length, depth] += cell["examples"]
        if cell["same_segment"] > 0:
            local.add((length, depth))
    lengths = sorted({length for length, _ in found})
    depths = list(dict.fromkeys(depth for _, depth in found))
    grid = np.full((len(depths), len(lengths)), np.nan)
    for (length, depth), values in found.items():
        grid[depths.index(depth), lengths.index(length)] = statistics.fmean(values)
    with new_figure(2.0 + 0.62 * len(lengths), 1.4 + 0.32 * len(depths)) as figure:
        axes = figure.add_subplot()
        image = axes.imshow(grid, cmap="Greys", vmin=0.0, vmax=100.0, aspect="auto")
        for (row, column), value in np.ndenumerate(grid):
            if np.isfinite(value):
                colour = "white" if value > 50 else "black"
                place = lengths[column], depths[row]
                text = percent(value) + LOCAL_MARK * (place in local)
                fewer = prompts[place] < max(prompts.values())
                text += f"\nn={prompts[place]}" * fewer
                axes.text(column, row, text, ha="center", va="center", color=colour, fontsize=6 if fewer else 8)
        axes.set_xticks(range(len(lengths)), [format_length(length) for length in lengths])
        axes.set_yticks(range(len(depths)), depths)
        axes.set_xlabel("length in tokens" + f"\n{LOCAL_MARK} key and question in one segment" * bool(local))
        axes.set_ylabel("place of the key")
        seeds = ", ".join(str(seed) for seed in sorted({run.seed for run in runs}))
        asked = f"{max(prompts.values())} prompts a cell"
        axes.set_title(f"Pass key: {title}\nscale {runs[0].scale}, seed {seeds}, {asked}", fontsize=9)
        figure.colorbar(image, ax=axes, ticks=[0, 50, 100]).set_label("token accuracy in per cent")
        return save(figure, path)


def accuracy_by_updates(report: PasskeyReport, scale: str, selection: Selection, path: Path) -> list[Path]:
    """Draw token accuracy against the number of memory updates, length over segment length. Each point is a model
    trained with that segment length. Only places of the key that need a memory are drawn.

    Returns:
        Paths of the PNG and the SVG.
    """
    points: dict[tuple[str, int, str], dict[int, list[float]]] = {}
    titles: dict[str, str] = {}
    for name, runs in selection.runs.items():
        # The row from which the others start is not drawn.
        if "dims.segment_length" not in values_of(report.rows[name].overrides):
            continue
        for run in runs:
            segment = selection.training_config(run)["dims"]["segment_length"]
            for _, cell in chosen_cells(report, [run]).values():
                if cell["same_segment"] == 0:
                    titles.setdefault(run.model, report.rows[name].title.partition(",")[0])
                    updates = points.setdefault((run.model, cell["length"], str(cell["depth"])), {})
                    updates.setdefault(cell["length"] // segment, []).append(100 * cell["token_accuracy"])
    with new_figure(5.2, 3.2) as figure:
        axes = figure.add_subplot()
        for index, ((model, length, depth), updates) in enumerate(sorted(points.items())):
            line, marker, shade = LINES[index % len(LINES)]
            x = sorted(updates)
            y = [statistics.fmean(updates[count]) for count in x]
            label = f"{titles[model]}, {format_length(length)}, {depth}"
            axes.plot(x, y, linestyle=line, marker=marker, markersize=4, color=shade, label=label)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set_ylim(-3, 103)
        axes.axhline(10, color="0.7", linewidth=0.8)
        axes.set_xlabel("memory updates: length over segment length")
        axes.set_ylabel("token accuracy in per cent")
        axes.set_title(f"{report.title}, scale {scale}; grey line: chance", fontsize=9)
        axes.legend(fontsize=8)
        return save(figure, path)


def draw_passkey(report: PasskeyReport, scale: str, selection: Selection, folder: Path) -> list[Path]:
    """Draw a heatmap of accuracy for every row with runs, and the gates of its first seed. If rows differ in their
    segment length, draw accuracy by updates instead."""
    written: list[Path] = []
    lengths = {name: values_of(row.overrides).get("dims.segment_length") for name, row in report.rows.items()}
    if len(set(lengths.values()) - {None}) > 1:
        sized = [name for name in selection.runs if lengths[name] is not None]
        return accuracy_by_updates(report, scale, selection, folder / f"{report.name}_{scale}") if sized else []
    for name, runs in selection.runs.items():
        title = report.rows[name].title
        written += accuracy_heatmap(report, runs, folder / f"{report.name}_{scale}_accuracy_{name}", title)
    titles = {name: f"Pass key: {row.title}" for name, row in report.rows.items() if row.knockout == "none"}
    return written + draw_gates(report.name, scale, selection, folder, titles)
