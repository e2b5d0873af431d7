"""Suites of `infini bench`: the figure of each, and the tables of some, from the newest record that has them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from infini.config.lengths import format_length
from infini.errors import one_of
from infini.records import RunRecord
from infini.report import layer_costs, prompt_costs
from infini.report.canvas import Label, entitle, label_axes, label_ends, new_figure, save
from infini.report.kind import OwnVerb, ReportKind
from infini.report.palette import MODELS, look_of
from infini.report.tables import RenderedReport, Source

TITLES = {
    "full": "all states",
    "exact": "the best of all states",
    "approximate": "the best by an approximate index",
}
"""A decoder's way to attend to the states of a source -> its title."""


def draw_source_costs(run: RunRecord, folder: Path) -> list[Path]:
    """Draw, by length of the source, milliseconds per token (bars: quartiles), and seconds of the first token, which
    projects all states or builds the index: `infini bench suite=sources`."""
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
        label_axes({"a token, milliseconds": later, "the first token, seconds": first}, lengths, "the source")
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
    and with those of one group of segments at a time (open marks): `infini bench suite=lengths`."""
    measured = run.series["training_lengths"]
    N, group = measured["segment_length"], measured["group"]
    with new_figure(7.2, 3.0) as figure:
        memory, time = figure.subplots(1, 2, gridspec_kw={"wspace": 0.3})
        ends, less = [], {}
        for model, ways in measured["models"].items():
            name = MODELS[model][2] if model in MODELS else model
            for variant, (way, title) in enumerate((("all", "all kept"), ("grouped", f"{group} segments kept"))):
                lengths = sorted(map(int, ways[way]))
                tokens = [length * N for length in lengths]
                look = look_of(model, variant)
                found = [ways[way][str(length)] for length in lengths]
                memory.plot(tokens, [one["peak_bytes"] / 2**20 for one in found], **look.drawn)
                time.plot(tokens, [one["seconds"] for one in found], **look.drawn)
                ends.append(Label(tokens[-1], found[-1]["seconds"], f"{name}, {title}", look.colour))
            last = str(lengths[-1])
            less[name] = ways["all"][last]["peak_bytes"] / ways["grouped"][last]["peak_bytes"]
        panels = {"peak memory above the model, MiB": memory, "a training step, seconds": time}
        label_axes(panels, tokens, "a training sequence", "{:,}".format)
        label_ends(time, ends)
        batch = f"{measured['batch_size']} sequences of segments of {N}"
        times = ", ".join(f"{name} {factor:.1f} times" for name, factor in less.items())
        entitle(
            memory,
            f"Keeping the activations of {group} segments at {tokens[-1]:,} tokens takes less memory: {times}",
            f"A training step, scale {run.scale}, {batch}, one measurement each",
        )
        return save(figure, folder / f"training_memory_{run.scale}")


@dataclass(frozen=True)
class Suite:
    """The figure and the tables of a suite's records."""

    series: str
    """The series of its records."""
    draw: Callable[[RunRecord, Path], list[Path]]
    """Record and folder -> paths of the figure."""
    build: Callable[[ReportKind, str, RunRecord | None, Source], RenderedReport] | None = None
    """Report, scale, record and whose record it is -> the tables; None if it has none."""


SUITES: Mapping[str, Suite] = {
    "sources": Suite("sources", draw_source_costs),
    "lengths": Suite("training_lengths", draw_training_memory),
    "llm_generate": Suite(prompt_costs.SERIES, prompt_costs.draw_prompt_costs, prompt_costs.build_prompt_report),
    "layer": Suite(layer_costs.SERIES, layer_costs.draw_layer_costs, layer_costs.build_layer_report),
}
_MODULE = OwnVerb(None, module="infini.runs.report_suite")


@dataclass(frozen=True)
class SuiteReport(ReportKind):
    """Tables of the newest measurement of a suite, as `conf/report/<name>.yaml` declares them."""

    sign = "suite"
    verbs: ClassVar[Mapping[str, OwnVerb]] = {"table": _MODULE, "publish": _MODULE}

    suite: str
    """The suite of `infini bench` that measures."""

    def __post_init__(self) -> None:
        one_of("report.suite", self.suite, [name for name, suite in SUITES.items() if suite.build])


def newest(runs: Iterable[RunRecord], scale: str, series: str) -> RunRecord | None:
    """The newest measurement at a scale that has a series."""
    found = [run for run in runs if run.verb == "bench" and run.scale == scale and run.series.get(series)]
    return found[-1] if found else None
