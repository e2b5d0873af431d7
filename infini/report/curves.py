"""Training curves of a report's rows, from the records of their training runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from infini.records import RunRecord
from infini.report.figures import LINES, new_figure, save
from infini.report.selection import Selection

POINTS = 60
"""Number of means that a curve is drawn with."""
_COLUMNS = 3


def training_curves(
    trained: Mapping[str, Sequence[RunRecord]], titles: Mapping[str, str], path: Path, heading: str
) -> list[Path]:
    """Draw the training loss of each row against the optimizer step, one panel per row and one line per seed.

    Each point is the mean of a sixtieth of the steps. Dotted vertical lines mark the end of a stage of the curriculum.

    Args:
        trained: row name -> its training runs, which have the series `loss_curve`.
        titles: row name -> title of its panel.
        path: the figure's path without suffix.
        heading: title of the figure.

    Returns:
        Paths of the PNG and the SVG.
    """
    n_rows = math.ceil(len(trained) / _COLUMNS)
    with new_figure(7.2, 0.7 + 1.9 * n_rows, layout="constrained") as figure:
        curves = [smoothed(run.series["loss_curve"])[1] for runs in trained.values() for run in runs]
        lowest, highest = (pick([pick(curve) for curve in curves]) for pick in (np.min, np.max))
        panels = figure.subplots(n_rows, min(_COLUMNS, len(trained)), sharey=True, squeeze=False).flatten()
        for axes, (name, runs) in zip(panels, trained.items(), strict=False):
            for index, run in enumerate(runs):
                style, _, shade = LINES[index % len(LINES)]
                step, loss = smoothed(run.series["loss_curve"])
                again = sum(other.seed == run.seed for other in runs[:index])
                label = f"seed {run.seed}" + f", training {again + 1}" * bool(again)
                axes.plot(step, loss, linestyle=style, color=shade, linewidth=1.0, label=label)
                for end in run.series.get("stage_steps", ()):
                    axes.axvline(end, color=shade, linewidth=0.6, linestyle=":")
            axes.set_title("\n".join(_halves(titles[name])), fontsize=8)
            axes.tick_params(labelsize=7)
            if len(runs) > 1:
                axes.legend(fontsize=6, frameon=False)
        # A loss close to 0 is visible only on a logarithmic scale.
        if 0 < lowest < highest / 20:
            panels[0].set_yscale("log")
        for axes in panels[len(trained) :]:
            axes.set_axis_off()
        staged = any(run.series.get("stage_steps") for runs in trained.values() for run in runs)
        figure.supxlabel("optimizer step" + " (dotted: a stage of the curriculum ends)" * staged, fontsize=8)
        figure.supylabel("training loss (nats a token)", fontsize=8)
        figure.suptitle(heading, fontsize=9)
        return save(figure, path)


def smoothed(curve: Sequence[Sequence[float]]) -> tuple[np.ndarray, np.ndarray]:
    """Steps and losses of a curve of [step, loss], averaged over at most POINTS equal parts of it."""
    parts = np.array_split(np.asarray(curve, dtype=np.float64), min(POINTS, len(curve)))
    step, loss = np.array([part.mean(0) for part in parts]).T
    return step, loss


def draw_curves(selection: Selection, titles: Mapping[str, str], path: Path, heading: str) -> list[Path]:
    """The curves of every training behind a report. A training behind several rows is drawn for the first of them."""
    trained: dict[str, list[RunRecord]] = {}
    drawn: set[str] = set()
    for name, runs in selection.runs.items():
        for run in runs:
            training = selection.training(run)
            if training is not None and training.run_id not in drawn and training.series.get("loss_curve"):
                drawn.add(training.run_id)
                trained.setdefault(name, []).append(training)
    return training_curves(trained, titles, path, heading) if trained else []


def _halves(title: str) -> list[str]:
    """A long title in two lines, split at the space nearest to its middle."""
    spaces = [place for place, letter in enumerate(title) if letter == " "]
    if len(title) < 28 or not spaces:
        return [title]
    cut = min(spaces, key=lambda place: abs(place - len(title) / 2))
    return [title[:cut], title[cut + 1 :]]
