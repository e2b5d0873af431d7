"""Figures of several kinds of reports: the weights of memories, losses by position, and training curves."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from infini.errors import InputError
from infini.records import RunRecord
from infini.report.canvas import (
    SYNTHETIC_MARK,
    Label,
    entitle,
    heatmap,
    in_cell,
    label_ends,
    label_sides,
    logarithmic,
    new_figure,
    save,
    token_axis,
)
from infini.report.palette import MUTED, Look, drawn_as, ink, looks
from infini.report.selection import Selection, learned_from
from infini.report.stats import BY_POSITION, gap
from infini.report.tables import counted
from infini.report.text_report import Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_GAPS_PER_PANEL = 2
"""Maximum number of curves with bands in one panel."""
PANEL_TITLE = 25
"""Characters of a line of a panel's title."""
CURVE_POINTS = 60
"""Number of means that a training curve is drawn with."""
OUTLIER_RATIO = 5
"""The axis of gaps is logarithmic on both sides of 0 if the largest gap of one row exceeds this many times that of
every other row, of which there are two or more, or if the report says so (log_gaps)."""
ABOVE_HALF = 0.01
"""A head weighs the memory above local attention if its gate exceeds one half by more than this. Gates may begin at one
half; a smaller change of such a gate is not counted."""
MAX_CURVES_PER_PANEL = 10
"""Maximum number of training curves in one panel. With more, each model has its own panel."""


def gate_heatmaps(
    runs: Mapping[str, RunRecord], path: Path, titles: Mapping[str, str] | None = None, what: str = ""
) -> list[Path]:
    """Draw and print sigmoid(beta), the weight of the memory, for every layer and head, a panel a row.

    runs: row -> a run whose series `gates` has one list for each layer, with one number in [0, 1] for each head;
    InputError if it has none. titles: row -> the title of its panel; None is its name. what: what the rows are about.
    """
    grids = {row: _gates(run) for row, run in runs.items()}
    columns = min(len(grids), 4)
    n_rows = math.ceil(len(grids) / columns)
    tallest, widest = (max(grid.shape[axis] for grid in grids.values()) for axis in (0, 1))
    size = columns * max(1.9, 0.6 + 0.38 * widest), n_rows * (0.75 + 0.26 * tallest)
    with new_figure(max(4.5, size[0]), size[1], layout="constrained") as figure:
        panels = figure.subplots(n_rows, columns, squeeze=False).flatten()
        for axes, (row, grid) in zip(panels, grids.items(), strict=False):
            heatmap(axes, grid, 1.0)
            for (layer, head), value in np.ndenumerate(grid):
                axes.text(head, layer, f"{value:.2f}", **in_cell(value))
            n_layers, n_heads = grid.shape
            axes.set_xticks(range(n_heads), [str(head + 1) for head in range(n_heads)])
            axes.set_yticks(range(n_layers), [str(layer + 1) for layer in range(n_layers)])
            axes.tick_params(length=0, labelsize=7)
            axes.set_title(textwrap.fill((titles or {}).get(row, row), PANEL_TITLE), fontsize=8)
            axes.set_xlabel("head", fontsize=8)
            in_all = n_layers == (runs[row].config.get("dims") or {}).get("n_layers", n_layers)
            axes.set_ylabel("layer" if in_all else "layers with gates", fontsize=8)
        for axes in panels[len(grids) :]:
            axes.set_axis_off()
        first = next(iter(runs.values()))
        synthetic = SYNTHETIC_MARK if any(run.synthetic for run in runs.values()) else ""
        entitle(
            panels[0],
            _gates_finding(grids),
            f"{what}{synthetic}, scale {first.scale}, first seed: sigmoid(β), 0 local attention, 1 memory; above local "
            f"attention is above {0.5 + ABOVE_HALF:g}",
            above=8 + 11 * max(axes.get_title().count("\n") + 1 for axes in panels),
        )
        return save(figure, path)


def _gates_finding(grids: Mapping[str, np.ndarray]) -> str:
    """Says how many heads weigh the memory above local attention, how much at most, and in how many rows, if not in
    all."""
    above = {row: int(np.count_nonzero(grid > 0.5 + ABOVE_HALF)) for row, grid in grids.items()}
    total = sum(grid.size for grid in grids.values())
    having = sum(count > 0 for count in above.values())
    highest = f" ({max(grid.max() for grid in grids.values()):.2f} at most)" * bool(having)
    where = f", in {having} of {len(grids)} rows" * (0 < having < len(grids))
    return f"{sum(above.values())} of {total} heads weigh the memory above local attention{highest}{where}"


def _gates(record: RunRecord) -> np.ndarray:
    try:
        gates = np.asarray(record.series["gates"], dtype=np.float64)
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"run {record.run_id}: no grid of gates (layers x heads) in its record") from error
    if gates.ndim != 2 or gates.size == 0 or not ((gates >= 0) & (gates <= 1)).all():
        raise InputError(f"run {record.run_id}: gates are {gates.shape}, expected layers x heads in [0, 1]")
    return gates


def draw_gates(selection: Selection, path: Path, titles: Mapping[str, str], what: str) -> list[Path]:
    """Draw the gates of each row in `titles` at its first seed. Returns the paths; empty if no row has gates."""
    with_gates = {row: [run for run in runs if run.series.get("gates")] for row, runs in selection.runs.items()}
    first = {row: runs[0] for row, runs in with_gates.items() if runs and row in titles}
    return gate_heatmaps(first, path, titles, what) if first else []


def gap_by_position(
    rows: Mapping[str, Sequence[RunRecord]],
    path: Path,
    baseline: str = "local",
    titles: Mapping[str, str] | None = None,
    corpus: str = "Documents",
    series: str = BY_POSITION,
    compared_with: Mapping[str, str] | None = None,
    models: Mapping[str, str] | None = None,
    log_gaps: bool = False,
) -> list[Path]:
    """Draw each row's loss minus the loss of `baseline`, in nats per token, against the position in the document.

    Positions are grouped into bins; each but the last ends at about twice its start. Places in the segment (BY_PLACE)
    have narrower bins. A point is the mean over documents and seeds, paired by both. The band is the 95 % interval,
    clustered by both. Positions that are almost all one document's are left out. More than MAX_GAPS_PER_PANEL rows
    have a panel each, in which the means of the others are pale.

    rows: row -> evaluation runs; those with the series count. baseline: the row at 0. titles: row -> its title. corpus:
    the name of the documents. compared_with: row -> the row it is compared with; None: all with `baseline`. models: row
    -> the model whose look it has, if they differ. log_gaps: whether the axis of gaps is logarithmic on both sides of 0
    in any case. Raises InputError if there is nothing to compare, or if two runs did
    not score the same documents in the same bins.
    """
    known = {row: [run for run in runs if series in run.series] for row, runs in rows.items()}
    zeros = {row: baseline for row in known if row != baseline} if compared_with is None else compared_with
    pairs = {row: (runs, known.get(zeros[row], [])) for row, runs in known.items() if row in zeros}
    curves = {row: curve for row, pair in pairs.items() if len(curve := gap(*pair, series=series))}
    what, where = ("position", "document") if series == BY_POSITION else ("place", "segment")
    if not curves:
        raise InputError(f"no runs with losses by {what} of {baseline!r} and of another row with the same seed")
    named = {row: (titles or {}).get(row, row) for row in rows}
    look = looks({row: (models or {}).get(row, row) for row in rows})
    together = len(curves) <= MAX_GAPS_PER_PANEL
    columns = 1 if together else min(4, math.ceil(len(curves) / 2))
    n_rows = 1 if together else math.ceil(len(curves) / columns)
    lines = max(textwrap.fill(named[row], PANEL_TITLE).count("\n") + 1 for row in curves)
    size = (5.2, 3.2) if together else (2.1 * columns, (1.45 + 0.15 * lines) * n_rows)
    with new_figure(*size) as figure:
        options: dict[str, Any] = {"sharex": True, "sharey": True, "squeeze": False}
        options["gridspec_kw"] = {"hspace": 0.15 + 0.16 * lines, "wspace": 0.08}
        panels = figure.subplots(n_rows, columns, **options).flatten()
        # A place is that of the predicted token, counted from 1.
        shown = {
            row: (curve[:, :2].sum(1) / 2 + (series != BY_POSITION) / 2, *curve.T[2:]) for row, curve in curves.items()
        }
        for axes, row in zip(panels, curves, strict=False):
            _draw_gap(axes, shown, look, list(curves) if together else [row])
            if not together:
                axes.set_title(textwrap.fill(named[row], PANEL_TITLE), fontsize=8, color=ink(look[row].colour))
        for axes in panels[len(curves) :]:
            axes.set_axis_off()
        for axes in panels[max(0, len(curves) - columns) : len(curves)]:
            # Panels that share an axis have its numbers in the lowest row alone, which may be empty below this one.
            axes.tick_params(axis="x", labelbottom=True)
        positions = np.concatenate([position for position, _, _ in shown.values()])
        token_axis(panels[0], positions.min(), positions.max())
        # The bands of few documents would leave no room for the means.
        means = np.concatenate([[0.0], *(mean for _, mean, _ in shown.values())])
        peaks = sorted(float(np.abs(mean).max()) for _, mean, _ in shown.values())
        spread = log_gaps or (len(peaks) > 2 and peaks[-2] * OUTLIER_RATIO < peaks[-1])
        if spread:
            # On a linear axis the other rows would look flat. It is linear up to the smallest peak above 0.
            threshold = next((peak for peak in peaks if peak > 0), 1.0)
            panels[0].set_yscale("symlog", linthresh=threshold, linscale=1.0)
            panels[0].yaxis.set_major_formatter(lambda value, _: f"{value:g}".replace("-", "\N{MINUS SIGN}"))
            panels[0].set_ylim(1.6 * means.min() or -threshold, 1.6 * means.max() or threshold)
            # Numbers below the threshold would cover that of 0.
            low, high = panels[0].get_ylim()
            decades = [sign * 10.0**power for sign in (-1, 1) for power in range(-6, 3)]
            panels[0].set_yticks([0.0, *(at for at in decades if abs(at) > threshold and low <= at <= high)])
            panels[0].set_yticks([], minor=True)
        else:
            margin = 0.25 * (means.max() - means.min()) or 0.01
            panels[0].set_ylim(means.min() - margin, means.max() + margin)
        if together:
            ends = [(row, *(part[-1] for part in shown[row])) for row in curves]
            label_ends(panels[0], [Label(x, y, named[row], look[row].colour) for row, x, y, _ in ends])
        from_1 = ", from 1" * (series != BY_POSITION)
        label_sides(figure, f"{what} in the {where} (tokens{from_1})", "loss minus the baseline's (nats a token)")
        one = {zeros[row] for row in curves}
        zero = named.get(baseline, baseline) if one == {baseline} else "each row's baseline"
        seeds_of = {row: [{run.seed for run in side} for side in pairs[row]] for row in curves}
        n_seeds = {row: len(mine & theirs) for row, (mine, theirs) in seeds_of.items()}
        fewest, most = min(n_seeds.values()), max(n_seeds.values())
        seeds = counted(most, "seed") if fewest == most else f"{fewest} to {counted(most, 'seed')}"
        synthetic = SYNTHETIC_MARK if any(run.synthetic for row in curves for run in pairs[row][1]) else ""
        entitle(
            panels[0],
            _gap_finding(curves, n_seeds, named, zero, f"first token{'s' * (series == BY_POSITION)}", where),
            f"{corpus}{synthetic}, {seeds}. Below 0: better than {zero}. Mean over documents and seeds; band: 95 % "
            f"interval, clustered by both{'; of one seed over documents alone' * (fewest == 1)}."
            f"{' The axis is logarithmic away from 0.' * spread}",
            above=6 if together else 8 + 11 * lines,
        )
        return save(figure, path)


def _draw_gap(axes: Axes, shown: Mapping[str, Any], look: Mapping[str, Look], rows: Sequence[str]) -> None:
    """Curves of `rows` with their bands, before the pale means of the others."""
    axes.axhline(0.0, color=MUTED, linewidth=0.8)
    for row, (position, mean, _) in shown.items():
        if row not in rows:
            axes.plot(position, mean, color="0.85", linewidth=0.8, zorder=1)
    for row in rows:
        position, mean, half = shown[row]
        axes.fill_between(position, mean - half, mean + half, color=look[row].colour, alpha=0.18, linewidth=0)
        axes.plot(position, mean, **look[row].drawn | {"markersize": 3.5})


def _gap_finding(
    curves: Mapping[str, np.ndarray],
    n_seeds: Mapping[str, int],
    named: Mapping[str, str],
    zero: str,
    first: str,
    where: str,
) -> str:
    """Says which rows with two seeds or more are below 0 with their whole interval at the first and at the last bin.
    Rows of one seed count only if there are no others, and then by their means: their intervals do not cover other
    seeds. A name with a comma is in quotation marks, which show where it ends."""
    tested = [row for row in curves if n_seeds[row] > 1]
    among = tested or list(curves)

    def quoted(name: str) -> str:
        return f'"{name}"' if "," in name else name

    def below(place: int) -> str:
        tops = {row: curves[row][place, 2] + curves[row][place, 3] * bool(tested) for row in among}
        rows = [row for row, top in tops.items() if top < 0]
        if len(rows) == 1:
            return quoted(named[rows[0]])
        if len(among) == 1:
            return "no row"
        if len(rows) == len(among):
            return f"all {len(rows)} rows" if len(rows) > 2 else "both rows"
        return f"{len(rows) or 'none'} of {len(among)} rows"

    if not tested:
        how = f"Lower mean loss than {quoted(zero)} (one seed, so not tested)"
    else:
        some = ", rows with two seeds or more" * (len(tested) < len(curves))
        how = f"Better than {quoted(zero)} (95 %, each interval by itself{some})"
    return f"{how}: {below(0)} at the {first} of a {where}, {below(-1)} at its end"


def draw_gap(report: Report, selection: Selection, series: str, path: Path) -> list[Path]:
    """Draw the gap of a report's rows to their baselines. Returns the paths; empty if no row has both."""
    zeros = {row: zero for row in selection.runs if (zero := report.baseline_of(row))}
    pairs = [(selection.runs[row], selection.runs.get(zero, [])) for row, zero in zeros.items()]
    if not any(len(gap(*pair, series=series)) for pair in pairs):
        return []
    corpus, models = report.benchmarks[report.task], {row: drawn_as(runs[0]) for row, runs in selection.runs.items()}
    shown: dict[str, Any] = {"compared_with": zeros, "models": models, "log_gaps": report.log_gaps}
    return gap_by_position(selection.runs, path, report.baseline or "", report.models, corpus, series, **shown)


def training_curves(
    trained: Mapping[str, Sequence[RunRecord]], titles: Mapping[str, str], path: Path, what: str
) -> list[Path]:
    """Draw the training loss of all rows against the optimizer step, the mean over their trainings, with the row's name
    at the line's end. More than MAX_CURVES_PER_PANEL rows have a panel for each model.

    Each point is the mean of a sixtieth of the steps. A stroke across a line marks the end of a stage of the
    curriculum. trained: row -> its training runs, which have the series `loss_curve`. titles: row -> its title. what:
    what is shown.
    """
    models = {row: drawn_as(runs[0]) for row, runs in trained.items()}
    look = looks(models)
    groups = [[row for row in trained if models[row] == model] for model in dict.fromkeys(models.values())]
    if len(trained) <= MAX_CURVES_PER_PANEL:
        groups = [list(trained)]
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
        entitle(panels[0], _lowest_loss(trained, curves, titles), f"{what}; mean over seeds")
        return save(figure, path)


def _lowest_loss(
    trained: Mapping[str, Sequence[RunRecord]],
    curves: Mapping[str, tuple[np.ndarray, np.ndarray]],
    titles: Mapping[str, str],
) -> str:
    """Says which row ends with the lowest loss, if all have learned by the same recipe."""
    first, *others = (learned_from(run.config) for runs in trained.values() for run in runs)
    if any(other != first for other in others):
        return f"Training loss of {counted(len(trained), 'row')}, whose recipes differ: the lowest need not be the best"
    lasts = {row: float(loss[-1]) for row, (_, loss) in curves.items()}
    best = min(lasts, key=lambda row: lasts[row])
    seeds = counted(len({run.seed for run in trained[best]}), "seed")
    return f"Lowest training loss at the end: {titles[best]}, {lasts[best]:.3f} nats a token ({seeds})"


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
    """Steps and losses of a curve of [step, loss], averaged over at most CURVE_POINTS equal parts of it."""
    parts = np.array_split(np.asarray(curve, dtype=np.float64), min(CURVE_POINTS, len(curve)))
    step, loss = np.array([part.mean(0) for part in parts]).T
    return step, loss


def draw_curves(selection: Selection, titles: Mapping[str, str], what: str, path: Path) -> list[Path]:
    """The curves of every training behind a report. A training behind several rows is drawn for the first of them, and
    one on another task than that of the evaluations only if all are."""
    trained: dict[str, list[RunRecord]] = {}
    drawn: set[str] = set()
    trainings = [training for run in selection.all_runs if (training := selection.training(run))]
    own = {run.task for run in selection.all_runs}
    some_on_own = any(training.task in own for training in trainings)
    for name, runs in selection.runs.items():
        for run in runs:
            training = selection.training(run)
            if training is None or (some_on_own and training.task not in own):
                continue
            if training.run_id not in drawn and training.series.get("loss_curve"):
                drawn.add(training.run_id)
                trained.setdefault(name, []).append(training)
    return training_curves(trained, titles, path, f"{what}{SYNTHETIC_MARK * selection.synthetic}") if trained else []
