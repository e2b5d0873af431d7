"""Figures of perplexity against cost: one point for each row, by memory size and by seconds of training."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infini.records import RunRecord
from infini.report.figures import LINES, SYNTHETIC_MARK, new_figure, save
from infini.report.selection import Selection
from infini.report.sizes import carried_floats
from infini.report.text_report import Report

if TYPE_CHECKING:
    from matplotlib.typing import FillStyleType

FILLS: tuple[FillStyleType, ...] = ("full", "none", "left", "top", "right", "bottom")
"""Fill styles that distinguish the rows of one model."""


@dataclass(frozen=True)
class Point:
    """A row: means over its seeds, and the lowest and highest perplexity of a seed."""

    cost: float
    perplexity: float
    lowest: float
    highest: float


def memory_points(selection: Selection) -> dict[str, Point]:
    """Row -> perplexity against the floats that it carries from segment to segment."""
    return _points(selection, lambda run: carried_floats(run, selection.training_config(run)))


def training_points(selection: Selection) -> dict[str, Point]:
    """Row -> perplexity against the seconds of its training."""

    def seconds(run: RunRecord) -> float | None:
        training = selection.training(run)
        return None if training is None else training.cost.get("wall_seconds")

    return _points(selection, seconds)


def step_points(selection: Selection, measured: RunRecord) -> dict[str, Point]:
    """Row -> perplexity against the seconds of its steps as `infini bench suite=models` measured them. Rows that were
    trained at other sizes are left out."""
    models, sizes = measured.series["train"]["models"], _step_sizes(measured)

    def seconds(run: RunRecord) -> float | None:
        training = selection.training(run)
        if training is None or training.model not in models or _step_sizes(training) != sizes:
            return None
        _, median, _ = models[training.model]["seconds"]
        return float(median * training.config["recipe"]["steps"])

    return _points(selection, seconds)


def _step_sizes(run: RunRecord) -> list[Any]:
    """Settings that decide how long a step of a model takes."""
    recipe = ("batch_size", "segments_per_sequence")
    dims = {key: value for key, value in (run.config.get("dims") or {}).items() if key != "name"}
    return [dims, *((run.config.get("recipe") or {}).get(key) for key in recipe)]


def machines(trainings: Iterable[RunRecord | None]) -> list[str]:
    """Names of the machines of the trainings, each once, as far as records name them."""
    found = set()
    for training in trainings:
        hardware = (training.environment.get("hardware") if training else None) or {}
        found.add(hardware.get("accelerator") or hardware.get("cpu"))
    return sorted(name for name in found if name)


def _points(selection: Selection, cost: Callable[[RunRecord], float | None]) -> dict[str, Point]:
    points = {}
    for row, runs in selection.runs.items():
        pairs = [(cost(run), run.metric("perplexity")) for run in runs]
        known = [(c, p) for c, p in pairs if c is not None and p is not None]
        if known:
            perplexities = [p for _, p in known]
            mean = statistics.fmean(perplexities)
            points[row] = Point(statistics.fmean(c for c, _ in known), mean, min(perplexities), max(perplexities))
    return points


def draw_costs(
    report: Report, scale: str, selection: Selection, folder: Path, measured: RunRecord | None = None
) -> list[Path]:
    """Both figures, `<report>_<scale>_perplexity_by_{memory,seconds}`, each if two rows or more have a point.

    measured: a record of `infini bench suite=models`. If it has the models of all rows, with default settings, its
    steps give the seconds, all on one machine. Otherwise the trainings give them.

    Returns:
        Paths of the files written.
    """
    heading = f"{report.benchmarks[report.task]}, scale {scale}{SYNTHETIC_MARK if selection.synthetic else ''}"
    kinds = {
        "memory": (memory_points(selection), "numbers carried from segment to segment (0: none)"),
        "seconds": _by_seconds(report, selection, measured),
    }
    written: list[Path] = []
    for kind, (points, label) in kinds.items():
        if len(points) > 1:
            path = folder / f"{report.name}_{scale}_perplexity_by_{kind}"
            models = {row: report.model_of(row) for row in points}
            written += scatter(points, models, report.models, path, label, f"Perplexity a token: {heading}")
    return written


def _by_seconds(report: Report, selection: Selection, measured: RunRecord | None) -> tuple[dict[str, Point], str]:
    """The points, and a label that says where the seconds were measured, because machines and load differ."""
    points = training_points(selection)
    if measured is not None and not report.variants.keys() & selection.runs.keys():
        steps = step_points(selection, measured)
        if steps.keys() == points.keys():
            return steps, f"seconds of training, by steps timed one after the other ({', '.join(machines([measured]))})"
    where = machines(selection.training(run) for run in selection.all_runs)
    return points, "seconds of training" + (f", as they were run ({' and '.join(where)})" if where else "")


def scatter(
    points: Mapping[str, Point],
    models: Mapping[str, str],
    titles: Mapping[str, str],
    path: Path,
    label: str,
    heading: str,
) -> list[Path]:
    """Draw the points with one marker for each model and bars from the best to the worst seed. The cost axis is
    logarithmic if it spans more than a factor of 20.

    models: row -> its model. Rows of one model differ in the filling of the marker, and a thin line joins them if their
    costs differ.
    """
    with new_figure(6.4, 3.8) as figure:
        axes = figure.add_subplot()
        rows_of: dict[str, list[str]] = {}
        for row in points:
            rows_of.setdefault(models[row], []).append(row)
        for index, rows in enumerate(rows_of.values()):
            joined = sorted((points[row].cost, points[row].perplexity) for row in rows)
            if len({cost for cost, _ in joined}) == len(rows) > 1:
                axes.plot(*zip(*joined, strict=True), color=LINES[index % len(LINES)][2], linewidth=0.7)
            for place, row in enumerate(rows):
                # If all fillings are used, the next rows take a marker that no model has.
                another = place // len(FILLS)
                _, marker, shade = LINES[(len(rows_of) + another - 1 if another else index) % len(LINES)]
                point = points[row]
                below, above = point.perplexity - point.lowest, point.highest - point.perplexity
                axes.errorbar(
                    point.cost,
                    point.perplexity,
                    [[below], [above]],
                    fmt=marker,
                    color=shade,
                    fillstyle=FILLS[place % len(FILLS)],
                    markersize=7,
                    capsize=3,
                    label=titles.get(row, row),
                )
        costs = [point.cost for point in points.values()]
        if min(costs) > max(costs) / 20:
            axes.set_xlim(0, 1.08 * max(costs))
        elif min(costs) > 0:
            axes.set_xscale("log")
        else:
            # Models without a memory are drawn at the left edge.
            smallest = min((cost for cost in costs if cost > 0), default=1.0)
            axes.set_xscale("symlog", linthresh=smallest)
        axes.set_xlabel(label)
        axes.set_ylabel("perplexity a token (lower: better)")
        several = any(point.lowest < point.highest for point in points.values())
        axes.set_title(heading + "\nmean over seeds, bars: best and worst seed" * several, fontsize=9)
        axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
        return save(figure, path)
