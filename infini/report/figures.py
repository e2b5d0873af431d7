"""Figures from run records, as PNG and SVG. Their bytes depend only on the records and on matplotlib's version.

matplotlib is loaded when the first figure is drawn. No window system is needed.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from infini.errors import InputError
from infini.records import RunRecord, write_atomically
from infini.report.positions import BY_PLACE, BY_POSITION, gap
from infini.report.selection import Selection
from infini.report.text_report import Report
from infini.report.verdicts import counted
from infini.system.plotting import drawing_without_a_screen

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Lines differ without colour: first in style and marker, then in darkness.
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
SYNTHETIC_MARK = " [synthetic corpus]"


@contextmanager
def new_figure(width: float, height: float, **options: Any) -> Iterator[Figure]:
    """A figure of this size in inches, drawn and saved inside the context, which sets the style. options: of Figure."""
    with drawing_without_a_screen():
        import matplotlib
        from matplotlib.figure import Figure
    defaults = {key: value for key, value in matplotlib.rcParamsDefault.items() if not key.startswith("backend")}
    with matplotlib.rc_context({**defaults, "svg.hashsalt": "infini", "font.size": 9.0}):
        yield Figure(figsize=(width, height), **options)


def save(figure: Figure, path: Path) -> list[Path]:
    """Write `<path>.png` and `<path>.svg`, without dates or program names in their metadata."""
    written = []
    for suffix, metadata in (("png", {"Software": None}), ("svg", {"Date": None, "Creator": None})):
        content = io.BytesIO()
        figure.savefig(content, format=suffix, dpi=150, metadata=metadata, bbox_inches="tight")
        target = path.parent / f"{path.name}.{suffix}"
        write_atomically(target, content.getvalue())
        written.append(target)
    return written


def gate_heatmap(record: RunRecord, path: Path, title: str | None = None) -> list[Path]:
    """Draw and print sigmoid(beta), the weight of the memory, for every layer and head.

    Args:
        record: a run whose series `gates` has one list for each layer, with one number in [0, 1] for each head.
        path: the figure's path without suffix.
        title: the title of the model; None is its name.

    Returns:
        Paths of the PNG and the SVG.

    Raises:
        InputError: the record has no gates, or they are not a grid of numbers in [0, 1].
    """
    gates = _gates(record)
    n_layers, n_heads = gates.shape
    with new_figure(1.6 + 0.55 * n_heads, 1.3 + 0.38 * n_layers) as figure:
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
        in_all = n_layers == (record.config.get("dims") or {}).get("n_layers", n_layers)
        axes.set_ylabel("layer" if in_all else "layers with gates")
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
    rows: Mapping[str, Sequence[RunRecord]],
    path: Path,
    baseline: str = "local",
    titles: Mapping[str, str] | None = None,
    corpus: str = "Documents",
    series: str = BY_POSITION,
    compared_with: Mapping[str, str] | None = None,
) -> list[Path]:
    """Draw each row's loss minus the loss of `baseline`, in nats per token, against the position in the document.

    Positions are grouped into bins; each but the last ends at about twice its start. Places in the segment (BY_PLACE)
    have narrower bins. A point is the mean over documents and seeds, paired by both. The band is the 95 % interval,
    clustered by both. Positions that fewer than two documents reach are left out.

    Args:
        rows: row -> evaluation runs. Those with the series count: {edges: [token positions, one more than bins], nll
            and tokens: a list of the values of all bins for each document}, in the order of `documents`.
        path: the figure's path without suffix.
        baseline: the row at 0.
        titles: row -> its title in the legend.
        corpus: the name of the documents.
        compared_with: row -> the row it is compared with; None: all with `baseline`.

    Returns:
        Paths of the PNG and the SVG.

    Raises:
        InputError: there is nothing to compare, or two runs did not score the same documents in the same bins.
    """
    known = {row: [run for run in runs if series in run.series] for row, runs in rows.items()}
    zeros = {row: baseline for row in known if row != baseline} if compared_with is None else compared_with
    pairs = {row: (runs, known.get(zeros[row], [])) for row, runs in known.items() if row in zeros}
    curves = {row: _curve(*pair, series) for row, pair in pairs.items()}
    what, where = ("position", "document") if series == BY_POSITION else ("place", "segment")
    if not any(len(curve) for curve in curves.values()):
        raise InputError(f"no runs with losses by {what} of {baseline!r} and of another row with the same seed")
    with new_figure(6.4, 3.8) as figure:
        axes = figure.add_subplot()
        named = titles or {}
        axes.axhline(0.0, color="0.6", linewidth=0.8)
        drawn = [(row, curve) for row, curve in curves.items() if len(curve)]
        for index, (row, curve) in enumerate(drawn):
            style, marker, shade = LINES[index % len(LINES)]
            first, last, mean, half = curve.T
            # A place is that of the predicted token, counted from 1.
            position = (first + last) / 2 if series == BY_POSITION else (first + 1 + last) / 2
            label = named.get(row, row)
            axes.plot(
                position,
                mean,
                linestyle=style,
                marker=marker,
                markersize=3.5,
                fillstyle=("full", "none")[index // len(LINES) % 2],
                color=shade,
                linewidth=1.2,
                label=label,
            )
            axes.fill_between(position, mean - half, mean + half, color=shade, alpha=0.15, linewidth=0)
        axes.set_xscale("log")
        axes.set_xlabel(f"{what} in the {where} (tokens{', from 1' * (series == BY_PLACE)})")
        one = {zeros[row] for row, _ in drawn}
        axes.set_ylabel(
            f"loss minus loss of {baseline if one == {baseline} else 'its baseline'}\n(nats a token, below 0: better)"
        )
        zero = named.get(baseline, baseline) if one == {baseline} else "each row's baseline"
        shared = [{run.seed for run in pairs[row][0]} & {run.seed for run in pairs[row][1]} for row, _ in drawn]
        fewest, most = min(map(len, shared)), max(map(len, shared))
        seeds = counted(most, "seed") if fewest == most else f"{fewest} to {counted(most, 'seed')}"
        synthetic = SYNTHETIC_MARK if any(run.synthetic for row, _ in drawn for run in pairs[row][1]) else ""
        axes.set_title(
            f"{corpus}: gap by {what} to {zero}, {seeds}{synthetic}\n"
            "mean over documents and seeds, band: 95 % interval, clustered by both",
            fontsize=9,
        )
        # With many curves the legend is outside.
        if len(drawn) > 3:
            axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
        else:
            axes.legend(frameon=False)
        return save(figure, path)


def _curve(runs: Sequence[RunRecord], baseline: Sequence[RunRecord], series: str) -> np.ndarray:
    return gap(runs, baseline, 2.0 if series == BY_POSITION else 1.0, series)


def draw_report(report: Report, scale: str, selection: Selection, folder: Path) -> list[Path]:
    """Draw the gaps, and the gates of each model at its first seed. Returns the paths."""
    titles = {row: f"{report.benchmarks[report.task]}: {title}" for row, title in report.models.items()}
    gaps = draw_gaps(report, scale, selection, folder)
    return gaps + draw_gates(report.name, scale, selection, folder, titles)


def draw_gaps(report: Report, scale: str, selection: Selection, folder: Path) -> list[Path]:
    """Draw the gap to the baselines by position and by place. Returns the paths."""
    written: list[Path] = []
    baseline, corpus = report.baseline or "", report.benchmarks[report.task]
    for series, name in ((BY_POSITION, "gap_by_position"), (BY_PLACE, "gap_by_place")):
        zeros = {row: zero for row in selection.runs if (zero := report.baseline_of(row))}
        pairs = [(selection.runs[row], selection.runs.get(zero, [])) for row, zero in zeros.items()]
        if any(len(_curve(*pair, series)) for pair in pairs):
            path = folder / f"{report.name}_{scale}_{name}"
            written += gap_by_position(selection.runs, path, baseline, report.models, corpus, series, zeros)
    return written


def draw_gates(name: str, scale: str, selection: Selection, folder: Path, titles: Mapping[str, str]) -> list[Path]:
    """Draw the gates of each row in `titles` at its first seed, as `<name>_<scale>_gates_<row>`. Returns the paths."""
    written: list[Path] = []
    for row, runs in selection.runs.items():
        with_gates = [run for run in runs if run.series.get("gates")]
        if with_gates and row in titles:
            written += gate_heatmap(with_gates[0], folder / f"{name}_{scale}_gates_{row}", titles[row])
    return written
