"""Common parts of all figures: size and style, titles, labels beside what they name, and reproducible files.

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
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from infini.config.lengths import format_length
from infini.records import write_atomically
from infini.report.palette import HEATMAP_TOP, MUTED, ink
from infini.system.process import headless_matplotlib

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
    "axes.edgecolor": MUTED,
}
_LABEL_SIZE, _LABEL_WIDTH = 8, 28
"""Points, and characters."""
_MARK, _BESIDE, _AS_NEAR = 9, 20, 3
"""Pixels: half of a mark, the farthest that a label is from its point without a line to it, and how much nearer another
point may be."""
_ANGLES: tuple[int, ...] = (0, 180, 30, -30, 150, -150, 60, -60, 120, -120, 90, -90)
_ANGLES += (15, -15, 165, -165, 45, -45, 135, -135, 75, -75, 105, -105)
"""Directions in which a label may be, in degrees, the preferred ones first."""
_ORDERS, _MOST_PLACES = 200, 40
"""Number of orders in which labels are tried, and number of places tried for each label."""
_LINE_ROOM, _LEADER_ROOM = 3, 1.5
"""Half of the width in pixels that a line takes, and the line of a label."""
_TEXT: dict[str, Any] = {"fontsize": _LABEL_SIZE, "linespacing": 1.0, "annotation_clip": False}
"""Text properties of a label."""
LABELS_END = 1.15
"""The right end of the labels of points, as a share of the panel's width."""
_LEADER = {"arrowstyle": "-", "linewidth": 0.5, "alpha": 0.7, "shrinkA": 0, "shrinkB": 0}
"""The line from a label to its point."""


@contextmanager
def new_figure(width: float, height: float, **options: Any) -> Iterator[Figure]:
    """A figure of this size in inches, drawn and saved inside the context, which sets the style. options: of Figure."""
    with headless_matplotlib():
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
    return cast("Figure", axes.get_figure())


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
    axes.annotate(lower, xytext=(0, above), fontsize=8, color=MUTED, **at)
    higher = above + 4 + 8 * 1.3 * (lower.count("\n") + 1)
    axes.annotate(upper, xytext=(0, higher), fontsize=10, fontweight="bold", **at)


def label_sides(figure: Figure, across: str, up: str) -> None:
    """Write what the axes of all panels are below and at the left of them."""
    width, height = figure.get_size_inches()
    figure.supxlabel(across, fontsize=9, y=figure.subplotpars.bottom - 0.5 / height)
    side = figure.supylabel(up, fontsize=9, x=figure.subplotpars.left - 0.62 / width)
    # Numbers may be wider than the place that is left for them.
    figure.draw_without_rendering()
    shown = (label for axes in figure.axes for label in axes.get_yticklabels() if label.get_text() and axes.axison)
    left = min((label.get_window_extent().x0 for label in shown), default=math.inf)
    label = side.get_window_extent()
    if label.x1 > left:
        side.set_x(side.get_position()[0] - (label.x1 - left + 4) / (width * figure.dpi))


def heatmap(axes: Axes, grid: np.ndarray, top: float) -> Any:
    """Draw a grid of values from 0 (white) to `top`, without lines between. NaN stays white."""
    from matplotlib.colors import LinearSegmentedColormap

    axes.grid(False)
    colours = LinearSegmentedColormap.from_list("infini", ["#FFFFFF", HEATMAP_TOP])
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
    """A text beside the point that it names; empty for a point that has no name, but is not to be covered."""

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
    # Of lines that end at one height, the label of the shortest is farthest from the nearer edge, from which labels are
    # pushed: their leaders do not cross.
    at = [float((x - box.x0) / box.width) for x, _ in points]
    heights = [height + 1e-6 * (0.5 - height) * (1 - x) for height, x in zip(heights, at, strict=True)]
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
    """Write each label at a free place around its point, as near as possible. Returns those for which there is none.

    A label that is not beside its point has a line to it, which passes no other point, label or line of a label.
    """
    figure = _figure_of(axes)
    figure.draw_without_rendering()
    points = axes.transData.transform([(label.x, label.y) for label in labels])
    panel = axes.get_window_extent()
    inside = panel.x0, panel.y0, panel.x0 + LABELS_END * panel.width, panel.y1
    along = _along_lines(axes)
    free = [
        _free_places(axes, label.text, index, points, inside, along) if label.text else []
        for index, label in enumerate(labels)
    ]
    places = _arranged(free)
    for index, place in sorted(places.items()):
        label, (x, y), (x0, y0, x1, y1) = labels[index], points[index], place.covered[0]
        end = (place.nearest[0] - x0) / (x1 - x0), (place.nearest[1] - y0) / (y1 - y0)
        axes.annotate(
            place.text,
            xy=(label.x, label.y),
            xytext=((x0 - x) * 72 / DPI, (y0 - y) * 72 / DPI),
            textcoords="offset points",
            color=ink(label.colour),
            va="bottom",
            **_TEXT,
            arrowprops=_LEADER | {"color": label.colour, "relpos": end, "shrinkB": 4} if place.has_leader else None,
        )
    return [label for index, label in enumerate(labels) if label.text and index not in places]


@dataclass(frozen=True)
class _Place:
    """A place of a label, in pixels."""

    text: str
    covered: np.ndarray
    """[boxes, 4]: the box of the text, and small ones along its line to the point if it has one."""
    nearest: np.ndarray
    """The point of the text's box that is nearest to the labelled point."""
    cost: float
    """The number of places that are preferred to it, and the length of its line, more if that crosses lines or if the
    label is beside other points, too."""

    @property
    def has_leader(self) -> bool:
        return len(self.covered) > 1


def _free_places(
    axes: Axes, text: str, index: int, points: np.ndarray, inside: tuple[float, ...], along: np.ndarray
) -> list[_Place]:
    """Places of the label of a point that cover no point or line, from near to far. inside: the box of all labels.
    along: of _along_lines."""
    point, others = points[index], points[(points != points[index]).any(1)]
    taken = np.concatenate([_around(points, _MARK), along])
    apart = np.abs(others - point).max(1)
    # Where marks overlap, a line from one can only avoid the middle of the other, if that.
    distinct = apart > _MARK / 2
    marks = _around(others[distinct], np.minimum(_MARK, apart[distinct] / 2)[:, None])
    found: list[_Place] = []
    for folded, box in _candidates(axes, text, point, inside):
        if _overlap(box[None], taken).any():
            continue
        nearest = np.clip(point, box[:2], box[2:])
        distance = math.dist(nearest, point)
        leader = _boxes_along(point, nearest, _LEADER_ROOM)[: None if distance > _BESIDE else 0]
        # A label beside another point would be read as its name.
        other_distances = np.hypot(*(np.clip(others, box[:2], box[2:]) - others).T)
        middle = (box[:2] + box[2:]) / 2
        nearer = (other_distances < min(distance - _AS_NEAR, _BESIDE)) | (
            (other_distances <= min(distance + _AS_NEAR, _BESIDE))
            & (np.hypot(*(others - middle).T) + _AS_NEAR < math.dist(point, middle))
        )
        if nearer.any() or _overlap(leader, marks).any():
            continue
        cost = float(len(found)) + _BESIDE * int((other_distances[apart > 2 * _MARK] < _BESIDE).sum())
        if len(leader):
            cost += distance + 8 * int(_overlap(leader, along).any(1).sum())
        found.append(_Place(folded, np.concatenate([box[None], leader]), nearest, cost))
        if len(found) == _MOST_PLACES:
            break
    return found


def _arranged(free: Sequence[Sequence[_Place]]) -> dict[int, _Place]:
    """Index of a label -> its place, for those that have one: of many orders in which labels take the nearest place
    that is left, the one with the fewest labels without a place, then with the lowest cost."""
    flat = [(index, place) for index, places in enumerate(free) for place in places]
    if not flat:
        return {}
    boxes = np.concatenate([place.covered for _, place in flat])
    starts = np.cumsum([0, *(len(place.covered) for _, place in flat[:-1])])
    meet = [np.logical_or.reduceat(_overlap(place.covered, boxes).any(0), starts) for _, place in flat]
    numbers = [[n for n, (of, _) in enumerate(flat) if of == index] for index in range(len(free))]
    generator = np.random.default_rng(0)
    best: tuple[int, float, list[int]] | None = None
    for _ in range(_ORDERS):
        blocked, chosen = np.zeros(len(flat), dtype=bool), []
        for index in generator.permutation(len(free)).tolist():
            number = next((n for n in numbers[index] if not blocked[n]), None)
            if number is not None:
                chosen.append(number)
                blocked |= meet[number]
        tried = len(free) - len(chosen), sum(flat[n][1].cost for n in chosen), chosen
        best = tried if best is None or tried < best else best
    assert best is not None
    return dict(flat[n] for n in best[2])


def _candidates(
    axes: Axes, text: str, point: np.ndarray, inside: tuple[float, ...]
) -> Iterator[tuple[str, np.ndarray]]:
    """The text in lines of two lengths, and boxes for it around a point, from near to far."""
    x, y = point.tolist()
    extents = {}
    for width in (_LABEL_WIDTH, _LABEL_WIDTH // 2):
        folded = textwrap.fill(text, width, break_long_words=False)
        drawn = axes.text(0, 0, folded, fontsize=_LABEL_SIZE, linespacing=1.0)
        extents[folded] = drawn.get_window_extent()
        drawn.remove()
    for far in (14, 24, 38, 55, 75, 100, 130, 165, 200):
        for folded, extent in extents.items():
            for angle in _ANGLES:
                across, up = math.cos(math.radians(angle)), math.sin(math.radians(angle))
                x0 = x + far * across - extent.width * (1 - across) / 2
                y0 = y + far * up - extent.height * (1 - up) / 2
                x1, y1 = x0 + extent.width, y0 + extent.height
                if inside[0] <= x0 and x1 <= inside[2] and inside[1] <= y0 and y1 <= inside[3]:
                    yield folded, np.array([x0, y0, x1, y1])


def _around(points: np.ndarray, reach: float | np.ndarray) -> np.ndarray:
    """[points, 4]: boxes (x0, y0, x1, y1) around points."""
    return np.concatenate([points - reach, points + reach], axis=1)


def _overlap(boxes: np.ndarray, others: np.ndarray) -> np.ndarray:
    """[boxes, others]: whether they overlap."""
    x0, y0, x1, y1 = boxes.T[:, :, None]
    left, low, right, top = others.T
    found: np.ndarray = (x0 < right) & (left < x1) & (y0 < top) & (low < y1)
    return found


def _boxes_along(start: np.ndarray, end: np.ndarray, reach: float) -> np.ndarray:
    """[boxes, 4]: small boxes in pixels along a straight line."""
    return _around(np.linspace(start, end, 2 + int(math.dist(start, end) / 8)), reach)


def _along_lines(axes: Axes) -> np.ndarray:
    """[boxes, 4]: small boxes in pixels along the lines and arrows of a panel, and along its error bars."""
    from matplotlib.text import Annotation

    paths = [line.get_xydata() for line in axes.lines]
    paths += [segment for bars in axes.collections for segment in getattr(bars, "get_segments", list)()]
    notes = [text for text in axes.texts if isinstance(text, Annotation) and text.arrow_patch and not text.get_text()]
    paths += [[note.xyann, note.xy] for note in notes]
    boxes = [
        _boxes_along(start, end, _LINE_ROOM)
        for path in paths
        for start, end in itertools.pairwise(axes.transData.transform(path))
    ]
    return np.concatenate(boxes) if boxes else np.empty((0, 4))
