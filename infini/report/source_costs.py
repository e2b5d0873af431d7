"""The figure of the cost of a long source for an encoder-decoder, from records of `infini bench suite=sources`."""

from __future__ import annotations

from pathlib import Path

from infini.config.lengths import format_length
from infini.records import RunRecord
from infini.report.figures import LINES, paper_style, save

TITLES = {
    "full": "all states",
    "exact": "the best of all states",
    "approximate": "the best by an approximate index",
}
"""How the decoder attends to the states -> its title in the legend."""


def draw_source_costs(run: RunRecord, folder: Path) -> list[Path]:
    """Draw, by length of the source, milliseconds per token (bars: quartiles), and seconds of the first token, which
    projects all states or builds the index.

    Returns:
        Paths of the PNG and the SVG.
    """
    sources = run.series["sources"]
    lengths = sorted(map(int, sources["lengths"]))
    with paper_style():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7.2, 3.4), layout="constrained")
        later, first = figure.subplots(1, 2)
        for index, (way, title) in enumerate(TITLES.items()):
            found = {n: sources["lengths"][str(n)]["ways"].get(way) for n in lengths}
            known = [n for n in lengths if found[n]]
            if not known:
                continue
            style, marker, shade = LINES[index % len(LINES)]
            quartiles = [found[n]["milliseconds"] for n in known]
            middle = [median for _, median, _ in quartiles]
            bars = [[m - low for low, m, _ in quartiles], [high - m for _, m, high in quartiles]]
            drawn = {"linestyle": style, "marker": marker, "color": shade, "markersize": 4, "linewidth": 1.2}
            later.errorbar(known, middle, bars, capsize=2, label=title, **drawn)
            first.plot(known, [found[n]["first_seconds"] for n in known], label=title, **drawn)
        for axes, label in ((later, "a token, milliseconds"), (first, "the first token, seconds")):
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_xticks(lengths, [format_length(n) for n in lengths])
            axes.set_xlabel("tokens of the source")
            axes.set_ylabel(label)
        later.legend(frameon=False, fontsize=8)
        figure.suptitle(f"Cross-attention to a long source, scale {run.scale}, k = {sources['k']:,}", fontsize=9)
        return save(figure, folder / f"source_costs_{run.scale}")
