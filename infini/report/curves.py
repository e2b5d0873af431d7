"""Training curves of a report's rows, from the records of their training runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from infini.records import RunRecord
from infini.report.canvas import SYNTHETIC_MARK, Label, entitle, label_ends, logarithmic, new_figure, save
from infini.report.palette import drawn_as, looks
from infini.report.selection import Selection
from infini.report.verdicts import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes

POINTS = 60
"""Number of means that a curve is drawn with."""
MOST_TOGETHER = 10
"""Rows that one panel holds. More have a panel for each model."""


def training_curves(
    trained: Mapping[str, Sequence[RunRecord]], titles: Mapping[str, str], path: Path, what: str
) -> list[Path]:
    """Draw the training loss of all rows against the optimizer step, the mean over their trainings, with the row's name
    at the line's end. More than MOST_TOGETHER rows have a panel for each model.

    Each point is the mean of a sixtieth of the steps. A stroke across a line marks the end of a stage of the
    curriculum.

    Args:
        trained: row name -> its training runs, which have the series `loss_curve`.
        titles: row name -> its title.
        path: the figure's path without suffix.
        what: what is shown.

    Returns:
        Paths of the PNG and the SVG.
    """
    models = {row: drawn_as(runs[0]) for row, runs in trained.items()}
    look = looks(models)
    together = len(trained) <= MOST_TOGETHER
    groups = (
        [list(trained)]
        if together
        else [[row for row in trained if models[row] == model] for model in dict.fromkeys(models.values())]
    )
    curves = {row: _mean_curve(runs) for row, runs in trained.items()}
    with new_figure(5.6, 3.2 * len(groups)) as figure:
        panels = figure.subplots(len(groups), 1, sharex=True, sharey=True, squeeze=False).flatten()
        for axes, rows in zip(panels, groups, strict=True):
            for row in rows:
                axes.plot(*curves[row], **look[row].drawn | {"marker": ""})
                ends = [end for run in trained[row] for end in run.series.get("stage_steps", ())]
                heights = np.interp(ends, *curves[row])
                axes.plot(ends, heights, linestyle="none", marker="|", markersize=9, color=look[row].colour)
        _scale_losses(panels[0], list(curves.values()))
        for axes, rows in zip(panels, groups, strict=True):
            ends = [(row, *(part[-1] for part in curves[row])) for row in rows]
            label_ends(axes, [Label(step, loss, titles[row], look[row].colour) for row, step, loss in ends])
            axes.set_ylabel("training loss (nats a token)")
        staged = any(run.series.get("stage_steps") for runs in trained.values() for run in runs)
        panels[-1].set_xlabel("optimizer step" + " (stroke: a stage of the curriculum ends)" * staged)
        lasts = {row: float(loss[-1]) for row, (_, loss) in curves.items()}
        best = min(lasts, key=lambda row: lasts[row])
        seeds = counted(len({run.seed for run in trained[best]}), "seed")
        finding = f"Lowest training loss at the end: {titles[best]}, {lasts[best]:.3f} nats a token ({seeds})"
        entitle(panels[0], finding, f"{what}; mean over seeds")
        return save(figure, path)


def _mean_curve(runs: Sequence[RunRecord]) -> tuple[np.ndarray, np.ndarray]:
    """Steps of the first training, and the mean loss of all at these steps."""
    curves = [smoothed(run.series["loss_curve"]) for run in runs]
    steps = curves[0][0]
    return steps, np.mean([np.interp(steps, *curve) for curve in curves], axis=0)


def _scale_losses(axes: Axes, curves: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
    """Logarithmic for losses close to 0; otherwise the range that is left after a tenth of each training."""
    losses = [loss for _, loss in curves]
    lowest, highest = min(loss.min() for loss in losses), max(loss.max() for loss in losses)
    if 0 < lowest < highest / 20:
        logarithmic(axes)
        return
    later = max(loss[len(loss) // 10 :].max() for loss in losses)
    axes.set_ylim(lowest - 0.05 * (later - lowest), later)


def smoothed(curve: Sequence[Sequence[float]]) -> tuple[np.ndarray, np.ndarray]:
    """Steps and losses of a curve of [step, loss], averaged over at most POINTS equal parts of it."""
    parts = np.array_split(np.asarray(curve, dtype=np.float64), min(POINTS, len(curve)))
    step, loss = np.array([part.mean(0) for part in parts]).T
    return step, loss


def draw_curves(selection: Selection, titles: Mapping[str, str], what: str, path: Path) -> list[Path]:
    """The curves of every training behind a report. A training behind several rows is drawn for the first of them."""
    trained: dict[str, list[RunRecord]] = {}
    drawn: set[str] = set()
    for name, runs in selection.runs.items():
        for run in runs:
            training = selection.training(run)
            if training is not None and training.run_id not in drawn and training.series.get("loss_curve"):
                drawn.add(training.run_id)
                trained.setdefault(name, []).append(training)
    return training_curves(trained, titles, path, f"{what}{SYNTHETIC_MARK * selection.synthetic}") if trained else []
