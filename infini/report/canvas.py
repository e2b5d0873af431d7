"""What all figures share: size and style, titles, labels beside what they name, and files that are the same bytes.

Figures are written as PNG and SVG. Their bytes depend only on the records and on the versions of matplotlib and Pillow.
matplotlib is loaded when the first figure is drawn. No window system is needed.
"""

from __future__ import annotations

import io
import itertools
import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from infini.config.lengths import format_length
from infini.records import write_atomically
from infini.report.palette import GROUND, QUIET, ink
from infini.system.process import drawing_without_a_screen

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.transforms import Bbox

SYNTHETIC_MARK = " [synthetic corpus]"
DPI = 150
_STYLE: dict[Any, Any] = {
    "svg.hashsalt": "infini",
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "0.92",
    "grid.linewidth": 0.6,
    "axes.edgecolor": QUIET,
}
_LABEL_SIZE, _LABEL_WIDTH = 8, 28
"""Points, and characters."""
_TEXT: dict[str, Any] = {"fontsize": _LABEL_SIZE, "linespacing": 1.0, "annotation_clip": False}
"""Of a label."""
_LEADER = {"arrowstyle": "-", "linewidth": 0.5, "alpha": 0.7, "shrinkA": 0, "shrinkB": 0}
"""The line from a label to its point."""


@contextmanager
def new_figure(width: float, height: float, **options: Any) -> Iterator[Figure]:
    """A figure of this size in inches, drawn and saved inside the context, which sets the style. options: of Figure."""
    with drawing_without_a_screen():
        import matplotlib
        from matplotlib.figure import Figure
    defaults = {key: value for key, value in matplotlib.rcParamsDefault.items() if not key.startswith("backend")}
    with matplotlib.rc_context({**defaults, **_STYLE}):
        yield Figure(figsize=(width, height), dpi=DPI, **options)


def save(figure: Figure, path: Path) -> list[Path]:
    """Write `<path>.png`, of 256 colours, and `<path>.svg`, without dates or program names in their metadata, and
    return their paths, as all functions that draw do."""
    from PIL import Image

    drawn, small, vector = io.BytesIO(), io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png", dpi=DPI, metadata={"Software": None}, bbox_inches="tight")
    Image.open(drawn).convert("RGB").quantize(256).save(small, format="png", optimize=True, dpi=(DPI, DPI))
    figure.savefig(vector, format="svg", metadata={"Date": None, "Creator": None}, bbox_inches="tight")
    written = {path.parent / f"{path.name}.png": small, path.parent / f"{path.name}.svg": vector}
    for target, content in written.items():
        write_atomically(target, content.getvalue())
    return list(written)


def _figure_of(axes: Axes) -> Figure:
    from matplotlib.figure import Figure

    figure = axes.get_figure()
    assert isinstance(figure, Figure)
    return figure


def entitle(axes: Axes, finding: str, detail: str, above: float = 6.0) -> None:
    """Write what the figure says, and below it what is shown, over its upper left panel. above: points between the
    panel and the text, more if the panel has a title of its own."""
    figure = _figure_of(axes)
    # The text is beside the panels, whose layout it must not change.
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    width = figure.get_figwidth()
    lower = textwrap.fill(detail, int(17.5 * width))
    upper = textwrap.fill(finding, int(13.5 * width))
    at: dict[str, Any] = {
        "xy": (0.02, 1.0),
        "xycoords": ("figure fraction", "axes fraction"),
        "textcoords": "offset points",
        "va": "bottom",
        "linespacing": 1.25,
    }
    axes.annotate(lower, xytext=(0, above), fontsize=8, color=QUIET, **at)
    higher = above + 4 + 8 * 1.3 * (lower.count("\n") + 1)
    axes.annotate(upper, xytext=(0, higher), fontsize=10, fontweight="bold", **at)


def label_sides(figure: Figure, across: str, up: str) -> None:
    """Write what the axes of all panels are below and at the left of them."""
    width, height = figure.get_size_inches()
    figure.supxlabel(across, fontsize=9, y=figure.subplotpars.bottom - 0.5 / height)
    figure.supylabel(up, fontsize=9, x=figure.subplotpars.left - 0.62 / width)


def heatmap(axes: Axes, grid: np.ndarray, top: float) -> Any:
    """Draw a grid of values from 0 (white) to `top`, without lines between. NaN stays white."""
    from matplotlib.colors import LinearSegmentedColormap

    axes.grid(False)
    colours = LinearSegmentedColormap.from_list("infini", ["#FFFFFF", GROUND])
    return axes.imshow(grid, cmap=colours, vmin=0.0, vmax=top, aspect="auto")


def logarithmic(axes: Axes) -> None:
    """A logarithmic vertical axis with plain numbers."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0,) if high > 1000 * low else (1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


def label_axes(
    panels: Mapping[str, Axes], lengths: list[int], tokens_of: str, named: Callable[[int], str] = format_length
) -> None:
    """Two logarithmic axes of each panel, the lower one of lengths. panels: label of the vertical axis -> panel."""
    for label, axes in panels.items():
        axes.set_xscale("log", base=2)
        logarithmic(axes)
        axes.set_xticks(lengths, [named(n) for n in lengths])
        axes.set_xlabel(f"tokens of {tokens_of}")
        axes.set_ylabel(label)


def token_axis(axes: Axes, lowest: float, highest: float) -> None:
    """A logarithmic horizontal axis of tokens, with at most five powers of two in this range, named as lengths are."""
    exponents = range(math.ceil(math.log2(lowest)), math.floor(math.log2(highest)) + 1)
    ticks = [2**exponent for exponent in exponents][:: math.ceil(len(exponents) / 5) or 1]
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [format_length(tick) for tick in ticks])
    axes.set_xticks([], minor=True)


def in_cell(share: float) -> dict[str, Any]:
    """Keywords of a number in a cell of a heatmap. share: its value over the highest."""
    return {"ha": "center", "va": "center", "color": "white" if share > 0.6 else "black", "fontsize": 7}


@dataclass(frozen=True)
class Label:
    """A text beside the point that it names."""

    x: float
    y: float
    text: str
    colour: str


def spread(wanted: Sequence[float], sizes: Sequence[float], low: float, high: float) -> list[float]:
    """Middles as near to `wanted` as can be of things of these sizes that do not overlap, between `low` and `high`
    where there is room."""
    from scipy.optimize import isotonic_regression

    order = np.argsort(wanted, kind="stable")
    heights = np.asarray(sizes)[order]
    # The lowest place of each middle.
    below = low + np.cumsum(heights) - heights / 2
    # Neighbours in each other's way share the mean of what is wanted less that place.
    moved = isotonic_regression(np.asarray(wanted)[order] - below).x
    found = np.empty(len(wanted))
    found[order] = below + np.clip(moved, 0.0, max(0.0, high - low - heights.sum()))
    return list(map(float, found))


def label_ends(axes: Axes, labels: Sequence[Label]) -> None:
    """Write the labels of lines at the right of a panel, at their heights or as near as there is room for them."""
    figure = _figure_of(axes)
    figure.draw_without_rendering()
    box = axes.get_window_extent()
    points = axes.transData.transform([(label.x, label.y) for label in labels])
    heights = [float((y - box.y0) / box.height) for _, y in points]
    texts = [textwrap.fill(label.text, _LABEL_WIDTH) for label in labels]
    line = _LABEL_SIZE * 1.25 / 72 * DPI / box.height
    sizes = [line * (text.count("\n") + 1.15) for text in texts]
    for label, text, height in zip(labels, texts, spread(heights, sizes, -0.05, 1.05), strict=True):
        axes.annotate(
            text,
            xy=(label.x, label.y),
            xytext=(1.05, height),
            textcoords="axes fraction",
            color=ink(label.colour),
            va="center",
            **_TEXT,
            arrowprops=_LEADER | {"color": label.colour, "relpos": (0.0, 0.5)},
        )


def label_points(axes: Axes, labels: Sequence[Label]) -> list[Label]:
    """Write each label at the nearest free place around its point. Returns those for which there is none."""
    from matplotlib.transforms import Bbox

    figure = _figure_of(axes)
    figure.draw_without_rendering()
    panel = axes.get_window_extent()
    inside = Bbox.from_extents(panel.x0, panel.y0, panel.x1 + 0.15 * panel.width, panel.y1)
    points = axes.transData.transform([(label.x, label.y) for label in labels])
    taken = [Bbox.from_extents(x - 9, y - 9, x + 9, y + 9) for x, y in points] + _along_lines(axes)
    left = []
    for index in sorted(range(len(labels)), key=lambda i: (-points[i][1], points[i][0])):
        label, (x, y) = labels[index], points[index]
        text = textwrap.fill(label.text, _LABEL_WIDTH)
        drawn = axes.text(0, 0, text, fontsize=_LABEL_SIZE, linespacing=1.0)
        place = _free_place(x, y, drawn.get_window_extent(), inside, taken)
        drawn.remove()
        if place is None:
            left.append(label)
            continue
        taken.append(place)
        nearest = min(max(x, place.x0), place.x1), min(max(y, place.y0), place.y1)
        end = (nearest[0] - place.x0) / place.width, (nearest[1] - place.y0) / place.height
        far = math.hypot(nearest[0] - x, nearest[1] - y) > 20
        axes.annotate(
            text,
            xy=(label.x, label.y),
            xytext=((place.x0 - x) * 72 / DPI, (place.y0 - y) * 72 / DPI),
            textcoords="offset points",
            color=ink(label.colour),
            va="bottom",
            **_TEXT,
            arrowprops=_LEADER | {"color": label.colour, "relpos": end, "shrinkB": 4} if far else None,
        )
    return left


def _along_lines(axes: Axes) -> list[Bbox]:
    """Small boxes in pixels along the lines of a panel, and along its error bars."""
    from matplotlib.transforms import Bbox

    paths = [line.get_xydata() for line in axes.lines]
    paths += [segment for bars in axes.collections for segment in getattr(bars, "get_segments", list)()]
    boxes = []
    for path in paths:
        for start, end in itertools.pairwise(axes.transData.transform(path)):
            points = np.linspace(start, end, 2 + int(np.hypot(*(end - start)) / 8))
            boxes += [Bbox.from_extents(x - 3, y - 3, x + 3, y + 3) for x, y in points]
    return boxes


def _free_place(x: float, y: float, extent: Bbox, inside: Bbox, taken: Sequence[Bbox]) -> Bbox | None:
    """The nearest box of this extent around a point, in pixels, that covers nothing."""
    from matplotlib.transforms import Bbox

    for far in (14, 24, 38, 55, 75, 100, 130, 165, 200):
        for angle in (0, 180, 30, -30, 150, -150, 60, -60, 120, -120, 90, -90):
            across, up = math.cos(math.radians(angle)), math.sin(math.radians(angle))
            x0 = x + far * across - extent.width * (1 - across) / 2
            y0 = y + far * up - extent.height * (1 - up) / 2
            box = Bbox.from_bounds(x0, y0, extent.width, extent.height)
            within = inside.x0 <= box.x0 and box.x1 <= inside.x1 and inside.y0 <= box.y0 and box.y1 <= inside.y1
            if within and not any(box.overlaps(other) for other in taken):
                return box
    return None
