"""Figures of the passkey table, from run records."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from infini.config.lengths import format_length, parse_depths, parse_lengths
from infini.records import RunRecord
from infini.report.canvas import Label, entitle, heatmap, in_cell, label_ends, label_sides, new_figure, save
from infini.report.kind import values_of
from infini.report.palette import MUTED, drawn_as, look_of, looks
from infini.report.passkey import FEWER_MARK, LOCAL_MARK, PasskeyReport, chosen_cells, is_local, percent
from infini.report.selection import Selection
from infini.report.tables import counted

RECALL_POINTS = 16
"""Points of a curve of recall, each of equally many steps."""

PAPER_LOOKS: tuple[tuple[Any, str, float, str], ...] = (
    ((0, (1, 2)), "o", 5.5, "dotted with circles"),
    ((0, (5, 2)), "v", 4.0, "dashed with triangles"),
    ((0, (5, 2, 1, 2)), "d", 3.0, "dash-dotted with diamonds"),
)
"""Line, open mark and its size of each of the paper's trainings, and their names. Marks of one value are in each
other."""


@dataclass
class _Accuracy:
    """Token accuracy of a row in per cent: (length, place) -> one value for each seed; and of how many prompts."""

    values: dict[tuple[int, str], list[float]] = field(default_factory=dict)
    prompts: Counter[tuple[int, str]] = field(default_factory=Counter)
    local: set[tuple[int, str]] = field(default_factory=set)
    """Cells in which key and question of every prompt are in one segment."""

    @property
    def of_fewer(self) -> set[tuple[int, str]]:
        """Cells that have fewer prompts than the fullest one."""
        return {cell for cell, count in self.prompts.items() if count < max(self.prompts.values())}

    def mean(self, length: int, depth: str) -> float:
        """The mean over seeds; NaN if it was not asked."""
        found = self.values.get((length, depth))
        return statistics.fmean(found) if found else np.nan


def _accuracy(report: PasskeyReport, runs: Sequence[RunRecord]) -> _Accuracy:
    found = _Accuracy()
    chosen = chosen_cells(report, runs)
    for (_, length, depth), (_, cell) in chosen.items():
        found.values.setdefault((length, depth), []).append(100 * cell["token_accuracy"])
        found.prompts[length, depth] += cell["examples"]
    needs_memory = {(length, depth) for (_, length, depth), (_, cell) in chosen.items() if not is_local(cell)}
    found.local = found.values.keys() - needs_memory
    return found


def accuracy_heatmap(report: PasskeyReport, scale: str, selection: Selection, path: Path) -> list[Path]:
    """Draw and print token accuracy in per cent, mean over seeds, of every row for every length and place of the key.
    Marks show where key and question are in one segment, and cells with fewer prompts than others of their row."""
    rows = {name: _accuracy(report, runs) for name, runs in selection.runs.items()}
    asked = [
        (length, depth)
        for length in parse_lengths(report.lengths)
        for depth in parse_depths(report.depths)
        if any((length, depth) in row.values for row in rows.values())
    ]
    grid = np.array([[row.mean(*cell) for cell in asked] for row in rows.values()])
    with new_figure(0.6 + 0.4 * len(asked), 0.5 + 0.3 * len(rows)) as figure:
        axes = figure.add_subplot()
        heatmap(axes, grid, 100.0)
        for place, row in enumerate(rows.values()):
            for column, cell in enumerate(asked):
                if cell in row.values:
                    value = grid[place, column]
                    text = percent(value) + LOCAL_MARK * (cell in row.local) + FEWER_MARK * (cell in row.of_fewer)
                    axes.text(column, place, text, **in_cell(value / 100))
        seeds = {name: counted(len({run.seed for run in selection.runs[name]}), "seed") for name in rows}
        titles = [
            f"{report.short_titles[name]} ({seeds[name]}, n={max(of.prompts.values())})" for name, of in rows.items()
        ]
        axes.set_yticks(range(len(rows)), titles)
        axes.set_xticks(range(len(asked)), [depth for _, depth in asked], rotation=45, ha="right", fontsize=7)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        lengths = [length for length, _ in asked]
        for length in dict.fromkeys(lengths):
            first, count = lengths.index(length), lengths.count(length)
            axes.text(first + (count - 1) / 2, -0.7, format_length(length), ha="center", va="bottom")
            axes.axvline(first - 0.5, color="white", linewidth=3)
        axes.set_xlabel("place of the key, by length in tokens")
        few = sorted({row.prompts[cell] for row in rows.values() for cell in row.of_fewer})
        # Neither an untouched base nor a knock-out shows what a training has reached.
        trained = [row for name, row in rows.items() if _is_trained(report, name, selection)]
        whole = sum(min(statistics.fmean(of) for of in row.values.values()) == 100 for row in trained)
        what = "row" if len(trained) == len(rows) else "trained row"
        entitle(
            axes,
            f"{whole or 'None'} of {counted(len(trained), what)} {'has' if whole <= 1 else 'have'} every digit right "
            "at every length and place that was asked",
            f"{report.title}, scale {scale}: token accuracy in per cent, mean over seeds"
            + "; empty cells were not asked" * bool(np.isnan(grid).any())
            + f"; {LOCAL_MARK} key and question in one segment" * any(row.local for row in rows.values())
            + f"; {FEWER_MARK} of {' or '.join(map(str, few))} prompts instead of n" * bool(few),
            above=22,
        )
        return save(figure, path)


def accuracy_by_length(report: PasskeyReport, scale: str, selection: Selection, path: Path) -> list[Path]:
    """Draw token accuracy against the length, a panel for each model and place of the key: rows that do what the paper
    did, and the paper's numbers for them (grey, open marks). Nothing is drawn if no such row has a run."""
    names = [name for name, row in report.rows.items() if row.paper and name in selection.runs]
    if not names:
        return []
    rows = {name: _accuracy(report, selection.runs[name]) for name in names}
    models = {name: report.rows[name].model for name in names}
    lengths, depths = parse_lengths(report.lengths), parse_depths(report.depths)
    across = list(dict.fromkeys(models.values()))
    look = looks(models)
    papers = {model: _paper(report, [name for name in names if models[name] == model]) for model in across}
    trainings = reversed(dict.fromkeys(title for printed in papers.values() for title in printed))
    paper_look = dict(zip(trainings, itertools.cycle(PAPER_LOOKS), strict=False))
    with new_figure(2.6 * len(depths), 1.9 * len(across)) as figure:
        grid = {"hspace": 0.3, "wspace": 0.12}
        panels = figure.subplots(len(across), len(depths), sharex=True, sharey=True, squeeze=False, gridspec_kw=grid)
        for line, model in zip(panels, across, strict=True):
            of_model = [name for name in names if models[name] == model]
            for axes, depth in zip(line, depths, strict=True):
                ends = []
                for name in of_model:
                    points = [(n, rows[name].mean(n, depth)) for n in lengths if (n, depth) in rows[name].values]
                    if points:
                        axes.plot(*zip(*points, strict=True), clip_on=False, **look[name].drawn)
                        title = report.rows[name].title.partition(", ")[2]
                        ends.append(Label(*points[-1], title, look[name].colour))
                for title, (line_style, marker, size, _) in paper_look.items():
                    if (printed := papers[model].get(title)) is None:
                        continue
                    known = {n: printed[n][depth] for n in lengths if depth in printed.get(n, {})}
                    if not known:
                        continue
                    values = list(known.values())
                    style = {"linestyle": line_style, "marker": marker, "markerfacecolor": "white", "markersize": size}
                    axes.plot(list(known), values, color=MUTED, linewidth=1.0, clip_on=False, **style)
                    ends.append(Label(list(known)[-1], values[-1], f"paper: {title}", MUTED))
                axes.set_xscale("log", base=2)
                axes.set_xticks(lengths, [format_length(n) for n in lengths], fontsize=7)
                axes.set_ylim(0, 104)
                axes.set_title(f"{report.rows[of_model[0]].title.partition(', ')[0]}, key at {depth}", fontsize=8)
                if axes is line[-1]:
                    label_ends(axes, ends)
        described = "; ".join(f"{title}: {name}" for title, (*_, name) in paper_look.items())
        label_sides(figure, "length of the text in tokens (training: at most 5K)", "tokens of the key right (per cent)")
        entitle(
            panels[0, 0],
            _found_at_the_longest(report, rows),
            f"{report.title}, scale {scale}: token accuracy by length, mean over seeds; grey with open marks: the "
            f"paper, whose models and data are other ones ({described})",
            above=20,
        )
        return save(figure, path)


def _paper(report: PasskeyReport, names: Sequence[str]) -> dict[str, Mapping[int, Mapping[str, float]]]:
    """Title -> the paper's numbers, each once: it has the same for training from scratch as for fine-tuning."""
    found: dict[str, Mapping[int, Mapping[str, float]]] = {}
    for name in reversed(names):
        row = report.rows[name]
        if (printed := row.printed()) not in found.values():
            found[row.title.rpartition(", ")[2]] = printed
    return found


def _found_at_the_longest(report: PasskeyReport, rows: Mapping[str, _Accuracy]) -> str:
    """The range of accuracy over models and places at the longest length, for the rows of each title."""
    length = max(cell[0] for row in rows.values() for cell in row.values)
    values: dict[str, list[float]] = {}
    for name, row in rows.items():
        title = report.rows[name].title.partition(", ")[2]
        values.setdefault(title, []).extend(row.mean(*cell) for cell in row.values if cell[0] == length)
    ranges = [
        f"{title} {percent(min(of))}" + f" to {percent(max(of))}" * (percent(min(of)) != percent(max(of))) + " %"
        for title, of in values.items()
        if of
    ]
    return f"Tokens of a key found in a text of {format_length(length)}: " + "; ".join(ranges)


def accuracy_by_updates(report: PasskeyReport, scale: str, selection: Selection, path: Path) -> list[Path]:
    """Draw token accuracy against the number of memory updates, length over segment length. Each point is a model
    trained with that segment length. Only places of the key that need a memory are drawn; nothing, if rows do not
    differ in their segment length."""
    points: dict[tuple[str, int, str], dict[int, list[float]]] = {}
    titles: dict[str, str] = {}
    segments = {name: values_of(row.overrides).get("dims.segment_length") for name, row in report.rows.items()}
    if len(set(segments.values()) - {None}) < 2:
        return []
    for name, runs in selection.runs.items():
        # The row from which the others start is not drawn.
        if segments[name] is None:
            continue
        for run, cell in chosen_cells(report, runs).values():
            if cell["same_segment"] == 0:
                segment = selection.training_config(run)["dims"]["segment_length"]
                titles.setdefault(run.model, report.rows[name].title.partition(",")[0])
                updates = points.setdefault((run.model, cell["length"], str(cell["depth"])), {})
                updates.setdefault(cell["length"] // segment, []).append(100 * cell["token_accuracy"])
    if not points:
        return []
    with new_figure(5.2, 3.2) as figure:
        axes = figure.add_subplot()
        ends = []
        drawn = Counter[str]()
        for (model, length, depth), updates in sorted(points.items()):
            look = look_of(model, drawn[model])
            drawn[model] += 1
            x = sorted(updates)
            y = [statistics.fmean(updates[count]) for count in x]
            axes.plot(x, y, **look.drawn)
            # Lines part at few updates; there is room for their names at the left.
            ends.append(Label(x[-1], y[-1], f"{titles[model]}, {format_length(length)}, {depth}", look.colour))
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set_ylim(0, 104)
        axes.axhline(10, color=MUTED, linewidth=0.8)
        axes.annotate("chance", (1.0, 10), xycoords=("axes fraction", "data"), ha="right", va="bottom", color=MUTED)
        axes.set_xlabel("memory updates: length over segment length")
        axes.set_ylabel("tokens of the key right (per cent)")
        label_ends(axes, ends)
        means: dict[str, list[tuple[float, int]]] = {}
        for (model, _, _), updates in points.items():
            means.setdefault(model, []).extend((statistics.fmean(of), count) for count, of in updates.items())
        lowest = {model: min(of) for model, of in means.items()}
        worst = "; ".join(f"{titles[model]} {percent(low)} % at {count:,}" for model, (low, count) in lowest.items())
        entitle(axes, f"Lowest accuracy by updates of the memory: {worst}", f"{report.title}, scale {scale}")
        return save(figure, path)


def exact_by_segments(report: PasskeyReport, scale: str, selection: Selection, path: Path) -> list[Path]:
    """Draw how many keys are found, all digits right, against the number of the text's segments, each of which is
    written to the memory once. A line is a trained row, a point the mean over its prompts of this many segments whose
    key lies in an earlier segment than the question. A row that finds no key is only counted. Nothing is drawn if no
    row finds one."""
    found: dict[str, dict[int, list[float]]] = {}
    for name, runs in selection.runs.items():
        if not _is_trained(report, name, selection):
            continue
        for run, cell in chosen_cells(report, runs).values():
            if cell["same_segment"] == 0:
                segments = cell["length"] // run.config["dims"]["segment_length"]
                whole = found.setdefault(name, {}).setdefault(segments, [])
                whole += [100 * cell["exact_match"]] * cell["examples"]
    drawn = {name: of for name, of in found.items() if any(map(any, of.values()))}
    if not drawn:
        return []
    curves = {name: {n: statistics.fmean(of[n]) for n in sorted(of)} for name, of in drawn.items()}
    look, titles = looks({name: drawn_as(selection.runs[name][0]) for name in drawn}), report.short_titles
    with new_figure(5.6, 3.2) as figure:
        axes = figure.add_subplot()
        for name, curve in curves.items():
            axes.plot(*zip(*curve.items(), strict=True), clip_on=False, **look[name].drawn)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set_ylim(0, 100)
        axes.set_xlabel("segments of the text")
        axes.set_ylabel("keys found (per cent)")
        label_ends(
            axes, [Label(*list(curve.items())[-1], titles[name], look[name].colour) for name, curve in curves.items()]
        )
        all_up_to = {name: _found_up_to(curve) for name, curve in curves.items()}
        best = max(all_up_to, key=lambda name: all_up_to[name])
        finding = f"Every key in texts of up to {all_up_to[best]:,} segments: {titles[best]}"
        if not all_up_to[best]:
            finding = "No row finds every key of its shortest texts"
        none = len(found) - len(drawn)
        prompts = [len(whole) for of in drawn.values() for whole in of.values()]
        entitle(
            axes,
            finding + f"; no key: {counted(none, 'row')} of {len(found)}" * bool(none),
            f"{report.title}, scale {scale}: all digits right, keys in an earlier segment than the question; "
            f"{min(prompts)} to {max(prompts)} prompts a point",
        )
        return save(figure, path)


def _is_trained(report: PasskeyReport, name: str, selection: Selection) -> bool:
    """Whether a row shows what a training has reached: not an untouched base, and no knock-out."""
    return report.rows[name].knockout == "none" and any(run.parent for run in selection.runs[name])


def recall_by_steps(report: PasskeyReport, scale: str, selection: Selection, path: Path) -> list[Path]:
    """Draw the token accuracy of a training's own prompts, of those whose key lies in an earlier segment, against the
    optimizer step: with the true digits before each, mean over each sixteenth of the steps and over seeds. Nothing is
    drawn if no training has recorded it."""
    trained: dict[str, list[RunRecord]] = {}
    for name, runs in selection.runs.items():
        for training in filter(None, map(selection.training, runs)) if _is_trained(report, name, selection) else ():
            # Rows that ask one model other questions have its training in common: it is drawn once.
            if training.series.get("recall_curve") and not any(training in drawn for drawn in trained.values()):
                trained.setdefault(name, []).append(training)
    if not trained:
        return []
    look = looks({name: drawn_as(runs[0]) for name, runs in trained.items()})
    last = {}
    with new_figure(5.6, 3.2) as figure:
        axes = figure.add_subplot()
        ends = []
        for name, runs in trained.items():
            curve = np.concatenate([np.asarray(run.series["recall_curve"], dtype=np.float64) for run in runs])
            edges = np.linspace(0, curve[:, 0].max(), RECALL_POINTS + 1)
            parts = [curve[(low < curve[:, 0]) & (curve[:, 0] <= high)] for low, high in itertools.pairwise(edges)]
            points = [(part[:, 0].mean(), 100 * part[:, 1].sum() / part[:, 2].sum()) for part in parts if len(part)]
            axes.plot(*zip(*points, strict=True), clip_on=False, **look[name].drawn)
            for end in (end for run in runs for end in run.series.get("stage_steps", ())):
                axes.axvline(end, color=look[name].colour, linewidth=0.8, linestyle=":")
            last[name] = points[-1][1]
            ends.append(Label(*points[-1], report.short_titles[name], look[name].colour))
        axes.set_ylim(0, 100)
        axes.set_xlabel("optimizer step (dotted: a stage of the curriculum ends)")
        axes.set_ylabel("tokens of the key right (per cent)")
        label_ends(axes, ends)
        best = max(last, key=lambda name: last[name])
        entitle(
            axes,
            f"Tokens of keys in earlier segments at the end of training: {'at most ' * (len(last) > 1)}"
            f"{percent(last[best])} % ({report.short_titles[best]})",
            f"{report.title}, scale {scale}: the training's own prompts, the true digits before each token given",
        )
        return save(figure, path)


def _found_up_to(curve: Mapping[int, float]) -> int:
    """The number of segments up to which every key is found; 0 if some are not found at the fewest."""
    whole = itertools.takewhile(lambda segments: curve[segments] == 100, sorted(curve))
    return max(whole, default=0)
