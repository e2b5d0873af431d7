"""Figures from run records, as PNG and SVG whose bytes depend on the records (and matplotlib's version) alone.

matplotlib is loaded when the first figure is drawn, and no window system is needed.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from infini.errors import InputError
from infini.records import RunRecord, write_atomically
from infini.report.selection import Report, Selection
from infini.report.stats import by_seed, check_same_books, clustered_ratio

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Told apart without colour: by line style and marker first, by darkness second.
LINES: tuple[tuple[Any, str, str], ...] = (
    ("-", "o", "0.0"),
    ("--", "s", "0.35"),
    (":", "^", "0.5"),
    ("-.", "D", "0.2"),
    ((0, (6, 1)), "v", "0.45"),
    ((0, (1, 1)), "P", "0.1"),
    ((0, (4, 1, 1, 1, 1, 1)), "X", "0.3"),
    ((0, (8, 2, 2, 2)), "*", "0.55"),
    ((0, (2, 3)), "h", "0.25"),
)
_BIN_GROWTH = math.sqrt(2)
SYNTHETIC_MARK = " [synthetic corpus]"


def paper_style() -> AbstractContextManager[None]:
    import matplotlib

    defaults = {key: value for key, value in matplotlib.rcParamsDefault.items() if not key.startswith("backend")}
    return matplotlib.rc_context({**defaults, "svg.hashsalt": "infini", "font.size": 9.0})


def save(figure: Figure, path: Path) -> list[Path]:
    """Write `<path>.png` and `<path>.svg`, without dates or the name of the program in them."""
    written = []
    for suffix, metadata in (("png", {"Software": None}), ("svg", {"Date": None, "Creator": None})):
        content = io.BytesIO()
        figure.savefig(content, format=suffix, dpi=150, metadata=metadata, bbox_inches="tight")
        target = path.parent / f"{path.name}.{suffix}"
        write_atomically(target, content.getvalue())
        written.append(target)
    return written


def gate_heatmap(record: RunRecord, path: Path, title: str | None = None) -> list[Path]:
    """Draw sigmoid(beta), the weight of the memory, for every layer and head, with the values printed.

    Args:
        record: a run whose series `gates` holds one list a layer of one number in [0, 1] a head.
        path: the figure's path without suffix.
        title: what the model is called; None is its name.

    Returns:
        Paths of the PNG and the SVG.

    Raises:
        InputError: the record has no gates, or they are no grid of numbers in [0, 1].
    """
    gates = _gates(record)
    n_layers, n_heads = gates.shape
    with paper_style():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(1.6 + 0.55 * n_heads, 1.3 + 0.38 * n_layers))
        axes = figure.add_subplot()
        image = axes.imshow(gates, cmap="Greys", vmin=0.0, vmax=1.0, aspect="auto")
        for layer in range(n_layers):
            for head in range(n_heads):
                value = gates[layer, head]
                colour = "white" if value > 0.5 else "black"
                axes.text(head, layer, f"{value:.2f}", ha="center", va="center", color=colour, fontsize=8)
        axes.set_xticks(range(n_heads), [str(head + 1) for head in range(n_heads)])
        axes.set_yticks(range(n_layers), [str(layer + 1) for layer in range(n_layers)])
        axes.set_xticks(np.arange(n_heads + 1) - 0.5, minor=True)
        axes.set_yticks(np.arange(n_layers + 1) - 0.5, minor=True)
        axes.grid(which="minor", color="0.5", linewidth=0.5)
        axes.tick_params(which="minor", length=0)
        axes.set_xlabel("head")
        axes.set_ylabel("layer")
        synthetic = SYNTHETIC_MARK if record.synthetic else ""
        axes.set_title(f"{title or record.model}{synthetic}\nscale {record.scale}, seed {record.seed}", fontsize=9)
        bar = figure.colorbar(image, ax=axes, ticks=[0.0, 0.5, 1.0])
        bar.set_label("sigmoid(β): 0 local, 1 memory")
        return save(figure, path)


def _gates(record: RunRecord) -> np.ndarray:
    try:
        gates = np.asarray(record.series["gates"], dtype=np.float64)
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"run {record.run_id}: no grid of gates (layers x heads) in its record") from error
    if gates.ndim != 2 or gates.size == 0 or not ((gates >= 0) & (gates <= 1)).all():
        raise InputError(f"run {record.run_id}: gates are {gates.shape}, expected layers x heads in [0, 1]")
    return gates


def gap_by_position(
    records: Iterable[RunRecord], path: Path, baseline: str = "local", titles: Mapping[str, str] | None = None
) -> list[Path]:
    """Draw each model's loss minus the loss of `baseline`, in nats a token, against the position in the book.

    Positions are put into bins that grow by a factor of about 1.4. A point is the mean over books and seeds, paired
    by both; the band is one standard error clustered by book. Positions that fewer than two books reach are left out.

    Args:
        records: evaluation runs with the series `nll_by_position`: {edges: [token positions, one more than bins],
            nll: [[nats a bin] a document], tokens: [[tokens a bin] a document]}, in the order of `documents`.
        path: the figure's path without suffix.
        baseline: the model at 0.
        titles: model name -> what the legend calls it.

    Returns:
        Paths of the PNG and the SVG.

    Raises:
        InputError: there is nothing to compare, or two runs did not score the same books in the same bins.
    """
    runs = [record for record in records if "nll_by_position" in record.series]
    models: dict[str, list[RunRecord]] = {}
    for run in runs:
        models.setdefault(run.model, []).append(run)
    at_zero = models.pop(baseline, [])
    curves = {model: _gap(model_runs, at_zero) for model, model_runs in models.items()}
    if not any(len(curve) for curve in curves.values()):
        raise InputError(f"no runs with losses by position of {baseline!r} and of another model with the same seed")
    with paper_style():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6.4, 3.8))
        axes = figure.add_subplot()
        named = titles or {}
        axes.axhline(0.0, color="0.6", linewidth=0.8)
        drawn = [(model, curve) for model, curve in curves.items() if len(curve)]
        for index, (model, curve) in enumerate(drawn):
            style, marker, shade = LINES[index % len(LINES)]
            position, gap, error = curve.T
            label = named.get(model, model)
            axes.plot(position, gap, style, marker=marker, markersize=3.5, color=shade, linewidth=1.2, label=label)
            axes.fill_between(position, gap - error, gap + error, color=shade, alpha=0.15, linewidth=0)
        axes.set_xscale("log")
        axes.set_xlabel("position in the book (tokens)")
        axes.set_ylabel(f"loss minus loss of {baseline}\n(nats a token, below 0: better)")
        n_seeds = len({run.seed for run in at_zero})
        synthetic = SYNTHETIC_MARK if any(run.synthetic for run in runs) else ""
        axes.set_title(
            f"Gap by position to {named.get(baseline, baseline)}, {n_seeds} seed{'s' * (n_seeds != 1)}{synthetic}\n"
            "mean over books and seeds, band: one standard error clustered by book",
            fontsize=9,
        )
        axes.legend(frameon=False)
        return save(figure, path)


def _gap(runs: Sequence[RunRecord], baseline: Sequence[RunRecord]) -> np.ndarray:
    """Rows of (position, gap, standard error) of a model over the seeds it shares with the baseline."""
    mine, theirs = by_seed(runs), by_seed(baseline)
    shared = sorted(mine.keys() & theirs.keys())
    if not shared:
        return np.empty((0, 3))
    reference = mine[shared[0]][0]
    edges = np.asarray(reference.series["nll_by_position"]["edges"], dtype=np.float64)
    starts = _growing_bins(edges)
    differences, tokens, names = [], [], []
    for seed in shared:
        nll_a, counts = _binned(mine[seed], reference, starts)
        nll_b, _ = _binned(theirs[seed], reference, starts)
        differences.append(nll_a - nll_b)
        tokens.append(counts)
        names += [str(document["name"]) for document in reference.documents]
    difference, weight = np.concatenate(differences), np.concatenate(tokens)
    bounds = np.append(edges[starts], edges[-1])
    points = []
    for index in range(len(starts)):
        reached = np.flatnonzero(weight[:, index] > 0)
        books = [names[row] for row in reached]
        if len(set(books)) < 2:
            continue
        gap, error = clustered_ratio(list(difference[reached, index]), list(weight[reached, index]), books)
        if math.isfinite(gap):
            points.append(((bounds[index] + bounds[index + 1]) / 2, gap, error))
    return np.array(points).reshape(-1, 3)


def _growing_bins(edges: np.ndarray) -> list[int]:
    """Indices of the edges that open bins of which each ends at about 1.4 times its start."""
    starts = [0]
    for index in range(1, len(edges) - 1):
        if edges[index] >= edges[starts[-1]] * _BIN_GROWTH:
            starts.append(index)
    return starts


def _binned(runs: Sequence[RunRecord], reference: RunRecord, starts: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Loss in nats, averaged over `runs`, and tokens: one row a document of `reference`, one column a bin."""
    losses = []
    counts = np.empty((0, 0))
    edges = reference.series["nll_by_position"]["edges"]
    for run in runs:
        check_same_books(run, reference)
        series = run.series["nll_by_position"]
        if series["edges"] != edges:
            raise InputError(f"runs {run.run_id} and {reference.run_id} have losses at different positions")
        rows = {document["name"]: row for row, document in enumerate(run.documents)}
        order = [rows[document["name"]] for document in reference.documents]
        loss, counts = (
            np.add.reduceat(_grid(series[name], len(edges) - 1)[order], starts, axis=1) for name in ("nll", "tokens")
        )
        losses.append(loss)
    return np.mean(losses, axis=0), counts


def _grid(rows: Sequence[Sequence[Any]], width: int) -> np.ndarray:
    """Rows of one width: documents may stop before the last bin, and a loss that is null becomes NaN."""
    return np.array([[*row, *[0.0] * (width - len(row))] for row in rows], dtype=np.float64)


def draw_report(report: Report, scale: str, selection: Selection, folder: Path) -> list[Path]:
    """Draw all figures of a report: the gap by position, and the gates of each model at its first seed.

    Returns:
        Paths of the files written to `folder`; empty where the runs hold nothing that can be drawn.
    """
    written: list[Path] = []
    with_positions = [run for run in selection.all_runs if "nll_by_position" in run.series]
    baseline = report.baseline or ""
    seeds = {run.seed for run in with_positions if run.model == baseline}
    if any(run.model != baseline and run.seed in seeds for run in with_positions):
        path = folder / f"{report.name}_{scale}_gap_by_position"
        written += gap_by_position(with_positions, path, baseline, report.models)
    for model, runs in selection.runs.items():
        with_gates = [run for run in runs if run.series.get("gates")]
        if with_gates:
            path = folder / f"{report.name}_{scale}_gates_{model}"
            written += gate_heatmap(with_gates[0], path, report.models[model])
    return written
