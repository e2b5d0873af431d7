"""Figures of `infini bench`, each from the newest record with its measurements."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from infini.config.lengths import format_length
from infini.records import RunRecord
from infini.report.canvas import Label, entitle, label_ends, logarithmic, new_figure, save
from infini.report.palette import NAMES, look_of
from infini.report.suites import SUITES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TITLES = {
    "full": "all states",
    "exact": "the best of all states",
    "approximate": "the best by an approximate index",
}
"""How a decoder attends to the states of a source -> its title."""


def _label_axes(panels: Mapping[str, Axes], ticks: list[int], names: list[str], tokens_of: str) -> None:
    """Two logarithmic axes of each panel. panels: label of the vertical axis -> panel."""
    for label, axes in panels.items():
        axes.set_xscale("log", base=2)
        logarithmic(axes)
        axes.set_xticks(ticks, names)
        axes.set_xlabel(f"tokens of {tokens_of}")
        axes.set_ylabel(label)


def draw_source_costs(run: RunRecord, folder: Path) -> list[Path]:
    """Draw, by length of the source, milliseconds per token (bars: quartiles), and seconds of the first token, which
    projects all states or builds the index: `infini bench suite=sources`.

    Returns:
        Paths of the PNG and the SVG.
    """
    sources = run.series["sources"]
    lengths = sorted(map(int, sources["lengths"]))
    with new_figure(7.2, 3.0) as figure:
        later, first = figure.subplots(1, 2, gridspec_kw={"wspace": 0.3})
        ends, longest = [], {}
        for index, (way, title) in enumerate(TITLES.items()):
            found = {n: sources["lengths"][str(n)]["ways"].get(way) for n in lengths}
            known = [n for n in lengths if found[n]]
            if not known:
                continue
            quartiles = [found[n]["milliseconds"] for n in known]
            middle = [median for _, median, _ in quartiles]
            bars = [[m - low for low, m, _ in quartiles], [high - m for _, m, high in quartiles]]
            look = look_of("bart", index)
            seconds = [found[n]["first_seconds"] for n in known]
            later.errorbar(known, middle, bars, capsize=2, **look.drawn)
            first.plot(known, seconds, **look.drawn)
            ends.append(Label(known[-1], seconds[-1], title, look.colour))
            if known[-1] == lengths[-1]:
                longest[title] = middle[-1]
        panels = {"a token, milliseconds": later, "the first token, seconds": first}
        _label_axes(panels, lengths, [format_length(n) for n in lengths], "the source")
        label_ends(first, ends)
        times = "; ".join(
            f"{title} {value:.0f} ms" for title, value in sorted(longest.items(), key=lambda pair: pair[1])
        )
        entitle(
            later,
            f"A token after a source of {format_length(lengths[-1])} tokens takes: {times}",
            f"Cross-attention to a long source, scale {run.scale}, k = {sources['k']:,}; medians, bars: quartiles",
        )
        return save(figure, folder / f"source_costs_{run.scale}")


def draw_training_memory(run: RunRecord, folder: Path) -> list[Path]:
    """Draw, by sequence length, peak memory and seconds of a training step: with all activations kept (filled marks),
    and with those of one group of segments at a time (open marks): `infini bench suite=lengths`.

    Returns:
        Paths of the PNG and the SVG.
    """
    measured = run.series["training_lengths"]
    N, group = measured["segment_length"], measured["group"]
    with new_figure(7.2, 3.0) as figure:
        memory, time = figure.subplots(1, 2, gridspec_kw={"wspace": 0.3})
        ends, less = [], {}
        for name, ways in measured["models"].items():
            for variant, (way, title) in enumerate((("all", "all kept"), ("grouped", f"{group} segments kept"))):
                lengths = sorted(map(int, ways[way]))
                tokens = [length * N for length in lengths]
                look = look_of(name, variant)
                found = [ways[way][str(length)] for length in lengths]
                memory.plot(tokens, [one["peak_bytes"] / 2**20 for one in found], **look.drawn)
                time.plot(tokens, [one["seconds"] for one in found], **look.drawn)
                ends.append(Label(tokens[-1], found[-1]["seconds"], f"{NAMES.get(name, name)}, {title}", look.colour))
            last = str(lengths[-1])
            less[name] = ways["all"][last]["peak_bytes"] / ways["grouped"][last]["peak_bytes"]
        panels = {"peak memory above the model, MB": memory, "a training step, seconds": time}
        _label_axes(panels, tokens, [f"{n:,}" for n in tokens], "a training sequence")
        label_ends(time, ends)
        batch = f"{measured['batch_size']} sequences of segments of {N}"
        times = ", ".join(f"{NAMES.get(name, name)} {factor:.1f} times" for name, factor in less.items())
        entitle(
            memory,
            f"Keeping the activations of {group} segments at {tokens[-1]:,} tokens takes less memory: {times}",
            f"A training step, scale {run.scale}, {batch}, one measurement each",
        )
        return save(figure, folder / f"training_memory_{run.scale}")


DRAWN_BY: Mapping[str, tuple[str, Callable[[RunRecord, Path], list[Path]]]] = {
    "sources": ("sources", draw_source_costs),
    "lengths": ("training_lengths", draw_training_memory),
    **{name: (suite.series, suite.draw) for name, suite in SUITES.items()},
}
"""Suite -> the series of its records, and the function that draws it."""


def newest_of_models(runs: Iterable[RunRecord], scale: str) -> RunRecord | None:
    """The newest measurement of a training step of every model (`infini bench suite=models`)."""
    return newest((run for run in runs if "models" in run.series.get("train", {})), scale, "train")


def newest(runs: Iterable[RunRecord], scale: str, series: str) -> RunRecord | None:
    """The newest measurement at a scale that has a series."""
    found = [run for run in runs if run.verb == "bench" and run.scale == scale and run.series.get(series)]
    return found[-1] if found else None
