"""Figures hold what the records hold, and the same records give the same bytes."""

from __future__ import annotations

import filecmp
import itertools
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import one_in
from matplotlib.text import Text
from report_runs import make_eval, make_train, report_settings
from scipy.stats import t as student

from infini.config.compose import compose
from infini.errors import InputError
from infini.evaluation.perplexity import position_edges
from infini.records import RunRecord
from infini.report import canvas, costs, figures, stats
from infini.report.load import draw, load_report
from infini.report.palette import MODELS, look_of, looks
from infini.report.selection import Selection, select_runs
from infini.report.text_report import Report
from infini.runs.renew import renew, renew_figures


def test_figures_are_the_same_bytes_when_drawn_twice(tmp_path: Path) -> None:
    runs = [make_eval(model, seed, loss) for model, loss in (("infini_linear", 3.9), ("local", 4.0)) for seed in (1, 2)]
    runs[0].series["nll_by_position"]["nll"][0][0] += 5.0
    rows = {"infini_linear": runs[:2], "local": runs[2:]}
    for name in ("first", "second"):
        figures.gap_by_position(rows, tmp_path / name / "gap")
        figures.gate_heatmaps({"infini_linear": runs[0]}, tmp_path / name / "gates")
    for name in ("gap.png", "gap.svg", "gates.png", "gates.svg"):
        first, second = (tmp_path / folder / name for folder in ("first", "second"))
        assert first.read_bytes() == second.read_bytes()
        assert len(first.read_bytes()) > 1000
    assert b"<dc:date>" not in (tmp_path / "first" / "gap.svg").read_bytes()


def test_the_gap_of_every_model_of_the_table_can_be_drawn(tmp_path: Path) -> None:
    """A panel each; some line styles are patterns, which no format string can say."""
    rows = {f"model{number}": [make_eval("infini_linear", 1, 3.0 + number / 10)] for number in range(9)}
    figures.gap_by_position(rows | {"local": [make_eval("local", 1)]}, tmp_path / "gap")
    assert (tmp_path / "gap.png").is_file()


@pytest.mark.parametrize(("seeds", "said"), [((1, 2), b"2 seeds"), ((1,), b"1 to 2 seeds")])
def test_the_title_of_gaps_says_how_many_seeds_the_curves_have(
    seeds: tuple[int, ...], said: bytes, tmp_path: Path
) -> None:
    of = {"infini_linear": (1, 2), "rmt": seeds, "local": (1, 2)}
    rows = {row: [make_eval(row, seed) for seed in seeds] for row, seeds in of.items()}
    figures.gap_by_position(rows, tmp_path / "gap")
    assert b", " + said + b". Below 0" in (tmp_path / "gap.svg").read_bytes()


def test_gap_is_paired_by_book_and_weighed_by_tokens() -> None:
    runs, baseline = [make_eval("infini_linear", 1, 3.9)], [make_eval("local", 1, 4.0)]
    runs[0].series["nll_by_position"]["nll"][0][0] += 250 * 0.03
    first, last, gap, half = stats.gap(runs, baseline).T
    # The last bin holds one book only and is left out.
    assert list(first) == [0, 250, 500, 1000] and list(last) == [250, 500, 1000, 2000]
    assert gap == pytest.approx([-0.09, -0.1, -0.1, -0.1])
    # Three documents of one seed leave two degrees of freedom.
    error = math.sqrt(3 / 2 * ((5.0**2) + 2 * 2.5**2)) / 750
    assert half[0] == pytest.approx(student.ppf(0.975, 2) * error)


def test_bins_grow_with_position() -> None:
    edges = np.arange(0, 256 * 41, 256)
    starts = stats.growing_bins(edges, math.sqrt(2))
    bounds = edges[starts]
    assert list(bounds[:5]) == [0, 256, 512, 768, 1280]
    assert all(later >= earlier * 1.4 for earlier, later in itertools.pairwise(bounds[1:]))


def test_a_record_without_gates_cannot_be_drawn(tmp_path: Path) -> None:
    for gates in (None, [], [[0.5], [0.5, 0.1]], [[1.5]]):
        run = make_eval("infini_linear", 1, series={} if gates is None else {"gates": gates})
        with pytest.raises(InputError, match="eval-infini_linear-1"):
            figures.gate_heatmaps({"infini_linear": run}, tmp_path / "gates")
    with pytest.raises(InputError, match="'local'"):
        figures.gap_by_position({"infini_linear": [make_eval("infini_linear", 1)]}, tmp_path / "gap")
    assert list(tmp_path.iterdir()) == []


def test_rows_of_gates_are_numbered_as_layers_only_where_every_layer_has_them(tmp_path: Path) -> None:
    """Memorizing Transformers have gates in one layer, which is not their first."""
    for n_layers, said in ((2, b"<!-- layer -->"), (8, b"<!-- layers with gates -->")):
        run = make_eval("memorizing", 1)
        run.config["dims"]["n_layers"] = n_layers
        figures.gate_heatmaps({"memorizing": run}, tmp_path / "gates")
        assert said in (tmp_path / "gates.svg").read_bytes()


def selected() -> Selection:
    """Two models of two seeds; the trainings of one took 10 and 20 seconds, those of the other are not known."""
    runs = [make_eval(model, seed, loss) for model, loss in (("infini_linear", 3.9), ("local", 4.0)) for seed in (1, 2)]
    trainings = [make_train("infini_linear", seed) for seed in (1, 2)]
    for run in runs:
        run.cost["state_floats"] = 0 if run.model == "local" else 1000
    for training, seconds in zip(trainings, (10.0, 20.0), strict=True):
        training.cost["wall_seconds"] = seconds
    return select_runs(Report.from_config(report_settings()), "laptop", [*runs, *trainings])


def test_a_point_is_a_model_with_the_reach_of_its_seeds() -> None:
    points = costs.memory_points(selected())
    assert {model: point.cost for model, point in points.items()} == {"infini_linear": 1000, "local": 0}
    linear = points["infini_linear"]
    assert linear.lowest < linear.perplexity < linear.highest < points["local"].lowest
    assert {model: point.cost for model, point in costs.training_points(selected()).items()} == {"infini_linear": 15.0}


def test_points_are_means_over_the_seeds_that_all_rows_have(tmp_path: Path, drawn_axes: list[Any]) -> None:
    """Seeds of one model may differ by more than two models of one seed do: a row with the lucky seed alone would look
    better than a row that is better in that seed."""
    lucky = {1: 3.0, 2: 4.0, 3: 4.0}
    runs = [make_eval("local", seed, loss) for seed, loss in lucky.items()]
    runs.append(make_eval("infini_linear", 1, lucky[1] + 0.1))
    for run in runs:
        run.cost["state_floats"] = 0 if run.model == "local" else 1000
    report = Report.from_config(report_settings())
    selection = select_runs(report, "laptop", runs)
    points = costs.memory_points(selection)
    assert points["local"].perplexity < points["infini_linear"].perplexity
    assert points["local"].seeds == points["infini_linear"].seeds == (1,)
    # The bar has all seeds.
    assert points["local"].lowest == points["local"].perplexity < points["local"].highest
    costs.draw_costs(report, selection, tmp_path / "figure", points, "numbers", "numbers")
    said = " ".join(" ".join(text.get_text() for text in drawn_axes[0].texts).split())
    assert "Lowest perplexity on PG19: Local attention only, at 0 numbers" in said
    assert "Seed 1, which all rows have; bars: best and worst of all seeds of a row" in said
    apart = replace(selection, runs={"local": selection.runs["local"][1:], "infini_linear": [runs[-1]]})
    costs.draw_costs(report, apart, tmp_path / "figure", costs.memory_points(apart), "numbers", "numbers")
    said = " ".join(" ".join(text.get_text() for text in drawn_axes[1].texts).split())
    assert "Mean over seeds, which differ between rows; bars: best and worst seed" in said


def test_budgets_are_drawn_where_rows_differ_in_training_tokens(tmp_path: Path) -> None:
    """The axis is logarithmic, with a tick at each budget."""
    selection = selected()
    selection.parents.update({run.run_id: run for run in (make_train("local", seed) for seed in (1, 2))})
    report = Report.from_config(report_settings())

    def draw_budgets(tokens: dict[str, int], folder: str) -> list[Path]:
        for run in selection.parents.values():
            run.cost["tokens_seen"] = tokens[run.model]
        return draw(report, "laptop", selection, tmp_path / folder, kinds=["perplexity_by_tokens"])

    assert draw_budgets({"local": 2_300_000, "infini_linear": 2_300_000}, "equal") == []
    png, svg = draw_budgets({"local": 2_300_000, "infini_linear": 9_200_000}, "four")
    assert png.name == "table2_lm_laptop_perplexity_by_tokens.png"
    assert b"<!-- 2.3M -->" in svg.read_bytes() and b"<!-- 9.2M -->" in svg.read_bytes()


def test_costs_are_drawn_where_there_is_something_to_compare(tmp_path: Path) -> None:
    report = Report.from_config(report_settings())
    kinds = ("perplexity_by_memory", "perplexity_by_seconds")
    written = draw(report, "laptop", selected(), tmp_path / "one", kinds=kinds)
    # One model's trainings alone are no figure.
    assert [path.name for path in written] == [f"table2_lm_laptop_{kinds[0]}.{kind}" for kind in ("png", "svg")]
    again = draw(report, "laptop", selected(), tmp_path / "two", kinds=kinds)
    assert [path.read_bytes() for path in written] == [path.read_bytes() for path in again]


def on(run: RunRecord, cpu: str, accelerator: str | None = None) -> RunRecord:
    run.environment["hardware"] = {"cpu": cpu, "accelerator": accelerator}
    return run


def test_seconds_say_on_which_machines() -> None:
    """Seconds are those of the runs, or, if all rows have them, of steps timed beside each other at the rows' sizes."""
    report, selection = Report.from_config(report_settings()), selected()
    for run, cpu in zip(selection.parents.values(), ("one kind", "another"), strict=True):
        on(run, cpu)
    points, label = costs.by_seconds(report, selection, None)
    assert label == "seconds of training, as they were run (another and one kind)"
    assert points == costs.training_points(selection)
    on(selection.parents["train-infini_linear-2"], "another", "a GPU")
    measured = on(make_train("local", 1), "a third")
    measured.config["recipe"] = {**measured.config["recipe"], "batch_size": 5}
    measured.series["train"] = {"models": {"infini_linear": {"seconds": [0.01, 0.02, 0.03]}}}
    assert costs.by_seconds(report, selection, measured)[1].endswith("as they were run (a GPU and one kind)")
    resumed = selection.parents["train-infini_linear-2"].environment
    resumed["machines"] = ["a GPU", "another"]
    said = "as they were run (a GPU and another and one kind)"
    assert costs.by_seconds(report, selection, measured)[1].endswith(said)
    for run in selection.parents.values():
        run.config["recipe"] = {**run.config["recipe"], "batch_size": 5}
    points, label = costs.by_seconds(report, selection, measured)
    assert label == "seconds of training, by steps timed one after the other (a third)"
    assert {row: point.cost for row, point in points.items()} == {"infini_linear": pytest.approx(0.02 * 1200)}
    measured.series["train"]["models"] = {}
    assert costs.by_seconds(report, selection, measured)[0] == costs.training_points(selection)


@pytest.fixture
def drawn_axes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The axes of figures that would be written."""
    drawn: list[Any] = []

    def keep(figure: Any, path: Path) -> list[Path]:
        drawn.append(figure.axes[0])
        return [path]

    monkeypatch.setattr(costs, "save", keep)
    return drawn


def test_rows_of_one_model_have_its_marker_each_filled_in_its_own_way(tmp_path: Path, drawn_axes: list[Any]) -> None:
    costs_of = {"a": 1, "b": 4, "c": 3, "d": 2}
    points = {row: costs.Point(cost, 50.0 - cost, 50.0 - cost, 50.0 - cost, (1,), 1) for row, cost in costs_of.items()}
    models = {"a": "rmt", "b": "local", "c": "rmt", "d": "rmt"}
    costs.scatter(points, models, {"a": "RMT"}, tmp_path / "figure", "numbers", "finding", "detail")
    (axes,) = drawn_axes
    drawn_as = {bars.get_label(): bars[0] for bars in axes.containers}
    marks = {label: (line.get_marker(), line.get_fillstyle()) for label, line in drawn_as.items()}
    mark, other = MODELS["rmt"][1], MODELS["local"][1]
    assert marks == {"RMT": (mark, "full"), "c": (mark, "none"), "d": (mark, "left"), "b": (other, "full")}
    # The line goes from the smallest to the largest, not in the order of the rows.
    (joined,) = [line for line in axes.lines if len(line.get_xdata()) == 3]
    assert list(joined.get_xdata()) == [1, 2, 3] and list(joined.get_ydata()) == [49, 48, 47]


def test_a_line_has_one_name_at_its_end_if_asked_for(tmp_path: Path, drawn_axes: list[Any]) -> None:
    costs_of = {"a": 1, "b": 4, "c": 3, "d": 2}
    points = {row: costs.Point(cost, 50.0 - cost, 50.0 - cost, 50.0 - cost, (1,), 1) for row, cost in costs_of.items()}
    models, titles = {"a": "rmt", "b": "local", "c": "rmt", "d": "rmt"}, {"a": "RMT", "c": "RMT, 3 times", "b": "Local"}
    costs.scatter(points, models, titles, tmp_path / "figure", "numbers", "finding", "detail", budgets=True)
    (axes,) = drawn_axes
    # The names, then title and subtitle.
    names = {text.get_text(): text.xy for text in axes.texts if text.get_text() in {*titles.values(), "d"}}
    assert names == {"RMT": (3, 47), "Local": (4, 46)}


def test_small_budgets_have_names_of_their_own(tmp_path: Path, drawn_axes: list[Any]) -> None:
    budgets = {"a": 20_480, "b": 40_960, "c": 500_000, "d": 2_300_000, "e": 36_800_000}
    points = {row: costs.Point(cost, 50.0, 50.0, 50.0, (1,), 1) for row, cost in budgets.items()}
    models = dict.fromkeys(points, "rmt")
    costs.scatter(points, models, {}, tmp_path / "figure", "numbers", "finding", "detail", budgets=True)
    names = [label.get_text() for label in drawn_axes[0].get_xticklabels()]
    assert names == ["0.02M", "0.041M", "0.5M", "2.3M", "36.8M"]


def test_what_the_paper_compares_is_marked(tmp_path: Path, drawn_axes: list[Any]) -> None:
    """An arrow goes from the one to the other if both have a point, and the words below the title say so."""
    selection, report = selected(), Report.from_config(report_settings())
    points = {
        "local": costs.Point(1.0, 60.0, 60.0, 60.0, (1,), 1),
        "infini_linear": costs.Point(16.0, 50.0, 50.0, 50.0, (1,), 1),
    }
    for marked in ({"local": "infini_linear", "rmt": "infini_linear"}, {"rmt": "infini_linear"}):
        compared = replace(report, compared_in_paper=marked)
        costs.draw_costs(compared, selection, tmp_path / "figure", points, "tokens", "tokens", budgets=True)
    with_arrow, without = drawn_axes
    (arrow,) = [text for text in with_arrow.texts if text.arrow_patch is not None and not text.get_text()]
    assert (arrow.xyann, arrow.xy) == ((1.0, 60.0), (16.0, 50.0)) and arrow.arrow_patch.get_linestyle() == ":"
    assert not [text for text in without.texts if not text.get_text()]
    words = [" ".join(" ".join(text.get_text() for text in axes.texts).split()) for axes in drawn_axes]
    assert ["what the paper's Table 2 may compare" in said for said in words] == [True, False]


@pytest.mark.parametrize("height", [0.0, 1.0], ids=["at the bottom", "at the top"])
def test_the_leaders_of_lines_that_end_at_one_height_do_not_cross(height: float) -> None:
    ends = {"a": 0.5, "b": 0.3, "c": 0.9, "d": 0.4}
    with canvas.new_figure(5.6, 3.2) as figure:
        axes = figure.add_subplot()
        axes.set_xlim(0.0, 1.0)
        axes.set_ylim(0.0, 1.0)
        canvas.label_ends(axes, [canvas.Label(x, height, name, "black") for name, x in ends.items()])
        # Points and labels in parts of the panel.
        leaders = [(text.xy, text.xyann) for text in axes.texts]
    for ((x, y), (right, at)), ((other, _), (_, there)) in itertools.permutations(leaders, 2):
        if x < other:
            # Where the other's begins, this one is on the side of the panel's middle, and so must its label be.
            passed = y + (at - y) * (other - x) / (right - x)
            assert (passed > height) == (at > there)


def test_a_label_is_nearest_to_its_own_point_and_its_line_passes_no_other() -> None:
    """Rows of one budget are points in a column: a name beside another point would be read as that point's."""
    heights = {"RMT": 54.2, "Transformer-XL": 53.5, "Linear, with Transformer-XL's cache": 53.1, "Full attention": 52.2}
    heights |= {"Memorizing Transformers": 51.9, "Local attention only": 62.0, "Linear": 61.8}
    with canvas.new_figure(7.4, 4.2) as figure:
        axes = figure.add_subplot()
        for height in heights.values():
            axes.plot([1.0, 3.0], [height, height - 12], marker="o")
        axes.set_xlim(0.0, 6.0)
        axes.margins(y=0.1)
        left = canvas.label_points(axes, [canvas.Label(1.0, y, name, "black") for name, y in heights.items()])
        figure.draw_without_rendering()
        points = axes.transData.transform([(1.0, y) for y in heights.values()])
        texts = {text.get_text().replace("-\n", "-").replace("\n", " "): text for text in axes.texts}
        # An annotation's own extent has its line, too.
        boxes = {name: Text.get_window_extent(text) for name, text in texts.items()}
        leaders = {name for name, text in texts.items() if text.arrow_patch is not None}
    assert not left and boxes.keys() == heights.keys()
    for name, own in zip(heights, points, strict=True):
        box = boxes[name]
        extent = np.array([box.x0, box.y0]), np.array([box.x1, box.y1])
        far = {other: math.dist(np.clip(at, *extent), at) for other, at in zip(heights, points, strict=True)}
        assert far[name] <= min(far.values()) + 5 or (name in leaders and min(far.values()) > 15)
        if name in leaders:
            along = np.linspace(own, np.clip(own, *extent), 50)
            assert all(np.hypot(*(along - at).T).min() > 3 for at in points if (at != own).any())


def test_labels_keep_off_points_without_a_name() -> None:
    """A line may have one name at its end; its other points are drawn all the same."""
    with canvas.new_figure(7.4, 4.2) as figure:
        axes = figure.add_subplot()
        heights = [43.0, 47.6, 47.7, 48.1]
        axes.plot([1.0] * len(heights), heights, marker="o", linestyle="none")
        # Lines at both sides, which a line to a name should not cross.
        axes.plot([0.0, 0.9, 0.9], [43.0, 43.0, 49.0])
        axes.plot([2.0, 1.1, 1.1], [43.0, 43.0, 49.0])
        axes.set_ylim(42.5, 52.0)
        names = ["memory decays", "", "", ""]
        labels = [canvas.Label(1.0, y, name, "black") for y, name in zip(heights, names, strict=True)]
        left = canvas.label_points(axes, labels)
        figure.draw_without_rendering()
        marks = axes.transData.transform([(1.0, y) for y in heights[1:]])
        drawn = [Text.get_window_extent(text) for text in axes.texts]
        assert [one.text for one in left] + [text.get_text().replace("\n", " ") for text in axes.texts] == [names[0]]
    for text, box in zip(axes.texts, drawn, strict=True):
        own = axes.transData.transform((1.0, heights[0]))
        along = np.linspace(own, np.clip(own, [box.x0, box.y0], [box.x1, box.y1]), 50)
        assert all(np.hypot(*(along - at).T).min() > 3 for at in marks), text.get_text()


def test_labels_keep_off_the_arrows() -> None:
    with canvas.new_figure(7.4, 4.2) as figure:
        axes = figure.add_subplot()
        for x in (1.0, 5.0):
            axes.plot(x, 1.0, marker="o")
        axes.annotate("", xy=(5.0, 1.0), xytext=(1.0, 1.0), arrowprops={"arrowstyle": "->"})
        axes.set_xlim(0.0, 9.0)
        assert canvas.label_points(axes, [canvas.Label(1.0, 1.0, "a name", "black")]) == []
        figure.draw_without_rendering()
        (name,) = [text for text in axes.texts if text.get_text()]
        x, y = axes.transData.transform((1.0, 1.0))
        box = Text.get_window_extent(name)
        assert box.x1 < x or box.y0 > y or box.y1 < y


@pytest.mark.parametrize(("rows", "numbered"), [(3, [1, 2]), (7, [3, 4, 5, 6]), (8, [4, 5, 6, 7])])
def test_the_lowest_panel_of_each_column_has_numbers(
    rows: int, numbered: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Panels share their axis, and the slots that are left over are at the end."""
    drawn: list[Any] = []
    monkeypatch.setattr(figures, "save", lambda figure, path: drawn.append(figure) or [path])
    runs = {f"model{number}": [make_eval("infini_linear", 1, 3.0 + number / 10)] for number in range(rows)}
    figures.gap_by_position(runs | {"local": [make_eval("local", 1)]}, tmp_path / "gap")
    shown = [any(label.get_visible() for label in axes.get_xticklabels()) for axes in drawn[0].axes]
    assert [number for number in range(rows) if shown[number]] == numbered


@pytest.mark.parametrize(("loss", "scale"), [(3.6, "linear"), (3.4, "symlog")])
def test_a_row_that_differs_far_more_than_another_leaves_it_room(
    loss: float, scale: str, tmp_path: Path, drawn_axes: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The axis is logarithmic from a ratio of five on, and the words say so."""
    monkeypatch.setattr(figures, "save", lambda figure, path: drawn_axes.append(figure.axes[0]) or [path])
    runs = {"far": loss, "near": 3.9, "nearer": 3.95, "alike": 4.0, "local": 4.0}
    figures.gap_by_position({row: [make_eval(row, 1, nll)] for row, nll in runs.items()}, tmp_path / "gap")
    (axes,) = drawn_axes
    assert axes.get_yscale() == scale
    words = " ".join(" ".join(text.get_text() for text in axes.texts).split())
    assert ("logarithmic away from 0" in words) == (scale == "symlog")


@pytest.mark.parametrize("gaps", [(-3.0, -2.8, -0.1, -0.05), (0.0, 0.0), (-0.1, -0.2)])
def test_a_report_may_have_a_logarithmic_axis_of_gaps(
    gaps: tuple[float, ...], tmp_path: Path, drawn_axes: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pretrained model with its own cache and one with the segment before flattened all memories to lines."""
    monkeypatch.setattr(figures, "save", lambda figure, path: drawn_axes.append(figure.axes[0]) or [path])
    runs = {f"row{number}": [make_eval("llm", 1, 4.0 + gap)] for number, gap in enumerate(gaps)}
    figures.gap_by_position(runs | {"local": [make_eval("local", 1, 4.0)]}, tmp_path / "gap", log_gaps=True)
    (axes,) = drawn_axes
    assert axes.get_yscale() == "symlog"
    axes.figure.draw_without_rendering()
    boxes = [label.get_window_extent() for label in axes.get_yticklabels()]
    assert boxes and not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))


def test_gates_of_one_training_are_drawn_once() -> None:
    """Those of report=llm_continual were two equal pictures, named after the books and the mathematics."""
    for name, drawn in (("llm_continual", [True, False]), ("lm_gates", [True, True])):
        report = load_report(compose([f"report={name}"]).report)
        assert isinstance(report, Report)
        variant = next(iter(report.variants))
        selection = Selection({variant: [make_eval("llm", 1)]}, {})
        assert ["gates" in part.drawings("laptop", selection, []) for part in report.parts] == drawn


def test_gates_that_nobody_trained_are_not_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = load_report(compose(["report=llm_continual"]).report)
    assert isinstance(report, Report)
    run = replace(make_eval("llm", 1), series={"gates": [[0.5]]})
    drawn: list[str] = []
    monkeypatch.setattr(figures, "gate_heatmaps", lambda runs, *_: drawn.extend(runs) or [])
    selection = Selection({"linear_untrained": [run], "linear": [run]}, {})
    report.drawings("laptop", selection, [])["gates"](path=tmp_path / "gates")
    assert drawn == ["linear"]


def test_gaps_of_pretrained_models_have_a_logarithmic_axis(
    tmp_path: Path, drawn_axes: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "save", lambda figure, path: drawn_axes.append(figure.axes[0]) or [path])
    report = load_report(compose(["report=llm_continual"]).report)
    assert isinstance(report, Report)
    runs = {row: [make_eval("llm", 1, loss)] for row, loss in (("local", 4.0), ("local_trained", 4.0), ("linear", 3.9))}
    figures.draw_gap(report, Selection(runs, {}), stats.BY_POSITION, tmp_path / "gap")
    assert drawn_axes[0].get_yscale() == "symlog"


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ({"a": [[0.5004, 0.5]], "b": [[0.02, 0.03]]}, "0 of 4 heads weigh the memory above local attention"),
        (
            {"a": [[0.52, 0.48]], "b": [[0.02, 0.03]]},
            "1 of 4 heads weigh the memory above local attention (0.52 at most), in 1 of 2",
        ),
        ({"a": [[0.7, 0.8]], "b": [[0.6, 0.03]]}, "3 of 4 heads weigh the memory above local attention (0.80 at most)"),
    ],
)
def test_a_title_of_gates_counts_no_head_that_stayed_at_one_half(
    rows: dict[str, list[list[float]]], said: str, tmp_path: Path
) -> None:
    """Gates that begin at one half and do not learn lie by chance on one side of it."""
    runs = {row: make_eval("infini_linear", 1) for row in rows}
    for row, gates in rows.items():
        runs[row].series["gates"] = gates
    figures.gate_heatmaps(runs, tmp_path / "gates")
    title = figures._gates_finding({row: np.array(gates) for row, gates in rows.items()})
    assert title.startswith(said) and ("rows" in title) == ("in 1 of" in said)
    drawn = re.findall(r"<!-- (.*?) -->", (tmp_path / "gates.svg").read_text(encoding="utf-8"))
    assert title in " ".join(drawn)


@pytest.mark.parametrize("name", ["table2_lm", "rmt_sweep", "memory_sizes", "segment_lengths", "table2_100k"])
def test_no_two_points_of_a_report_look_alike(name: str, tmp_path: Path, drawn_axes: list[Any]) -> None:
    report = load_report(compose([f"report={name}"]).report)
    assert isinstance(report, Report)
    points = {row: costs.Point(7.0, 50.0, 50.0, 50.0, (1,), 1) for row in report.models}
    costs.scatter(
        points, {row: report.model_of(row) for row in points}, {}, tmp_path / "figure", "numbers", "finding", "detail"
    )
    (axes,) = drawn_axes
    marks = {(bars[0].get_marker(), bars[0].get_fillstyle(), bars[0].get_color()) for bars in axes.containers}
    # Points that cost the same are not joined, either.
    assert len(marks) == len(points) and not [line for line in axes.lines if len(line.get_xdata()) > 1]


@pytest.mark.parametrize(
    ("gained", "said"),
    [
        (
            (5.0, 5.0),
            "Better than local (95 %, each interval by itself): a at the first tokens of a document, a at its end",
        ),
        (
            (5.0, -5.0),
            "Better than local (95 %, each interval by itself): a at the first tokens of a document, none of 2 rows at "
            "its end",
        ),
        (
            (-5.0, -5.0),
            "Better than local (95 %, each interval by itself): none of 2 rows at the first tokens of a document, none "
            "of 2 rows",
        ),
    ],
)
def test_a_title_of_gaps_claims_no_more_than_the_intervals(gained: tuple[float, float], said: str) -> None:
    sure = np.array([(0, 250, -gained[0], 1.0), (250, 500, -gained[1], 1.0)])
    unsure = np.array([(0, 250, -5.0, 6.0), (250, 500, -5.0, 6.0)])
    names = {"a": "a", "b": "b"}
    n_seeds = {"a": 2, "b": 3}
    found = figures._gap_finding({"a": sure, "b": unsure}, n_seeds, names, "local", "first tokens", "document")
    assert found.startswith(said)


def test_a_title_of_gaps_counts_rows_of_one_seed_only_where_there_are_no_others() -> None:
    """Their intervals do not cover other seeds, so they are no finding beside rows of several."""
    curves = {
        "a": np.array([(0, 250, -5.0, 1.0), (250, 500, -5.0, 1.0)]),
        "b": np.array([(0, 250, -5.0, 6.0), (250, 500, -5.0, 1.0)]),
        "c": np.array([(0, 250, 5.0, 1.0), (250, 500, 5.0, 1.0)]),
    }
    names = {row: row for row in curves}
    places = "local", "first tokens", "document"
    assert figures._gap_finding(curves, {"a": 1, "b": 3, "c": 1}, names, *places) == (
        "Better than local (95 %, each interval by itself, rows with two seeds or more): no row at the first tokens of "
        "a document, b at its end"
    )
    assert figures._gap_finding(curves, {"a": 1, "b": 1, "c": 1}, names, *places) == (
        "Lower mean loss than local (one seed, so not tested): 2 of 3 rows at the first tokens of a document, 2 of 3 "
        "rows at its end"
    )


def test_a_title_of_gaps_shows_where_a_name_with_commas_ends() -> None:
    curves = {"a": np.array([(0, 250, -5.0, 1.0), (250, 500, -5.0, 6.0)])}
    names = {"a": "a memory, trained"}
    found = figures._gap_finding(curves, {"a": 2}, names, "segments, trained", "first token", "segment")
    better = 'Better than "segments, trained" (95 %, each interval by itself): '
    assert found == f'{better}"a memory, trained" at the first token of a segment, no row at its end'


def test_rows_of_a_pretrained_model_have_the_colours_of_their_memories(tmp_path: Path) -> None:
    report = load_report(compose(["report=llm_continual"]).report)
    assert isinstance(report, Report)
    rows = {"local": "local", "local_trained": "local", "linear": "infini_linear", "delta": "infini_delta"}
    options = {
        row: {
            "base": "smollm2",
            "memory": "none" if model == "local" else "infini",
            "update_rule": model[7:] or "delta",
        }
        for row, model in rows.items()
    }
    runs = {row: [make_eval("llm", 1, config={"model": options[row]})] for row in rows}
    paths = figures.draw_gap(report, Selection(runs, {}), stats.BY_POSITION, tmp_path / "gap")
    svg = paths[1].read_text(encoding="utf-8").upper()
    look = looks(rows)
    # The baseline is the line at 0.
    assert all(look[row].colour in svg for row in rows if row != report.baseline)
    assert look_of("llm").colour not in svg


@pytest.mark.parametrize(
    ("lowest", "highest", "shown"),
    [
        (1.0, 14.5, ["1", "2", "4", "8"]),
        (32, 49_152, ["32", "256", "2K", "16K"]),
        (1.0, 1.0, ["1"]),
        (5.0, 7.0, []),
        (2.0, 2**20, ["2", "32", "512", "8K", "128K"]),
    ],
)
def test_an_axis_of_tokens_has_few_plain_numbers_within_what_is_drawn(
    lowest: float, highest: float, shown: list[str]
) -> None:
    with canvas.new_figure(2, 2) as figure:
        axes = figure.add_subplot()
        axes.plot([lowest, highest], [0, 1])
        canvas.token_axis(axes, lowest, highest)
        assert [label.get_text() for label in axes.get_xticklabels()] == shown


def lowest_of(selection: Selection, **changes: Any) -> str:
    report = Report.from_config({**report_settings(), **changes})
    return costs._lowest(report, selection, costs.memory_points(selection), "numbers carried")


@pytest.mark.parametrize("low", [-1.0, -0.01275, -0.0000127])
def test_the_name_of_an_axis_stands_beside_its_numbers(low: float) -> None:
    with canvas.new_figure(5.2, 3.2) as figure:
        axes = figure.add_subplot()
        axes.set_ylim(low, 0.2 * abs(low))
        canvas.label_sides(figure, "position", "loss minus the baseline's (nats a token)")
        figure.draw_without_rendering()
        (side,) = (text for text in figure.findobj(Text) if text.get_text().startswith("loss minus"))
        numbers = [number.get_window_extent().x0 for number in axes.get_yticklabels() if number.get_text()]
        assert side.get_window_extent().x1 < min(numbers)


def test_a_title_names_the_lowest_perplexity_and_its_significance_in_the_table() -> None:
    selection = selected()
    # Every document of every seed has the same difference.
    found = lowest_of(selection)
    assert found == (
        "Lowest mean perplexity on PG19: Infini-Transformer (Linear), at 1,000 numbers carried; "
        "significantly below Local attention only (p < 0.0001)"
    )
    assert lowest_of(selection, baseline="infini_linear").endswith(
        "significantly below 1 of the 1 rows compared with it"
    )
    assert lowest_of(selection, baseline=None).endswith("at 1,000 numbers carried")
    # One of two documents gains as much as the other loses.
    for run in selection.runs["infini_linear"]:
        run.documents[0]["nll"] += 100
    assert "; not significantly below Local attention only (p = 0." in lowest_of(selection)
    assert lowest_of(selection, baseline="infini_linear").endswith(
        "significantly below 0 of the 1 rows compared with it"
    )


def test_a_title_has_the_p_value_of_the_table_however_many_rows_there_are() -> None:
    """Among all 28 pairs of eight rows nothing would be significant that is so among the comparisons of the table."""
    report = Report.from_config(report_settings())
    losses = {"memorizing": 3.9, "local": 4.0} | {
        row: 3.99 for row in report.models if row not in ("memorizing", "local", "infini_delta")
    }
    runs = [make_eval(row, seed, loss) for row, loss in losses.items() for seed in (1, 2, 3)]
    for run in runs:
        run.cost["state_floats"] = 1000
        if run.model == "memorizing":
            run.documents[2]["nll"] += 5 * run.seed
            run.documents[0]["nll"] -= 4 * run.seed
        elif run.model != "local":
            run.documents[0]["nll"] += 40
    trainings = [make_train(row, seed) for row in losses for seed in (1, 2, 3)]
    selection = select_runs(report, "laptop", [*runs, *trainings])
    memory = report.render("laptop", [*runs, *trainings]).tables[3]
    cell = memory.cell("memorizing", "Minus baseline: p")
    assert cell.value is not None and 0.0001 < cell.value < 0.05 < cell.value / 7 * 28
    assert lowest_of(selection).endswith(f"significantly below Local attention only (p = {cell.text})")


def test_a_title_of_one_seed_does_not_say_significantly() -> None:
    selection = selected()
    one = Selection({row: runs[:1] for row, runs in selection.runs.items()}, selection.parents)
    found = lowest_of(one)
    assert found.endswith(
        "at 1,000 numbers carried; p < 0.0001 against Local attention only, over documents of one seed"
    )
    # Beside rows of more seeds the table does not test it.
    mixed = Selection({**selection.runs, "infini_linear": selection.runs["infini_linear"][:1]}, selection.parents)
    mixed.runs["rmt"] = [make_eval("rmt", seed, 4.1) for seed in (1, 2)]
    assert lowest_of(mixed).endswith("at 1,000 numbers carried; one seed, so not tested for significance")


def test_the_interval_of_a_gap_knows_of_seeds() -> None:
    runs = [make_eval("infini_linear", seed, loss) for seed, loss in ((1, 3.9), (2, 3.7))]
    *_, gap, half = stats.gap(runs, [make_eval("local", seed) for seed in (1, 2)]).T
    # Two seeds, 0.1 apart from their mean, leave one degree of freedom.
    assert gap == pytest.approx([-0.2] * 4) and half == pytest.approx([0.1 * student.ppf(0.975, 1)] * 4)


def test_a_gap_by_place_is_known_where_both_have_it_for_segments_of_one_length() -> None:
    runs = {model: make_eval(model, 1, loss) for model, loss in (("infini_linear", 3.9), ("local", 4.0))}
    by_place = stats.BY_PLACE
    assert len(stats.gap([runs["infini_linear"]], [runs["local"]], 1.0, by_place)) == 0
    for run in runs.values():
        tokens = [[entry["tokens"] // 4, entry["tokens"] - entry["tokens"] // 4] for entry in run.documents]
        means = [entry["nll"] / entry["tokens"] for entry in run.documents]
        # All of what the memory gains is gained at the first token of a segment.
        first = [mean if run.model == "local" else mean - 0.3 for mean in means]
        rest = means if run.model == "local" else [mean + 0.1 for mean in means]
        nll = [[a * m, b * n] for (a, b), m, n in zip(tokens, first, rest, strict=True)]
        run.series[by_place] = {"edges": [0, 1, 4], "nll": nll, "tokens": tokens}
    start, stop, gap, _ = stats.gap([runs["infini_linear"]], [runs["local"]], 1.0, by_place).T
    assert list(start) == [0, 1] and list(stop) == [1, 4] and gap == pytest.approx([-0.4, 0.0])
    runs["local"].series[by_place] = {**runs["local"].series[by_place], "edges": [0, 1, 8]}
    assert len(stats.gap([runs["infini_linear"]], [runs["local"]], 1.0, by_place)) == 0


def test_a_window_of_tokens_is_no_empty_memory() -> None:
    """Attention over several segments carries their keys and values: its point is not that of a model without any."""
    run, training = make_eval("full", 1), make_train("full", 1)
    run.cost["state_floats"] = 0
    training.config["dims"] |= {"d_key": 16, "d_value": 64, "n_heads": 4, "n_kv_heads": 2, "n_layers": 3}
    training.config["model"]["window_segments"] = 24
    selection = select_runs(Report.from_config(report_settings()), "laptop", [run, training])
    assert costs.memory_points(selection)["full"].cost == 80 * 2 * 3 * 23 * 16
    del training.config["model"]["window_segments"]
    assert costs.memory_points(selection) == {}


def test_bins_of_an_evaluation_double() -> None:
    """The edges of a record are 64, 96, 128 and so on: the first that is the root of 2 farther is twice as far."""
    edges = np.array(position_edges(10**6))
    assert set(np.diff(edges)[3:] / edges[3:-1]) == {0.5, 1 / 3}
    bounds = edges[stats.growing_bins(edges, math.sqrt(2))]
    assert list(bounds[:5]) == [0, 64, 96, 192, 384]
    assert {later / earlier for earlier, later in itertools.pairwise(bounds[2:])} == {2.0}


@pytest.mark.slow
@pytest.mark.timeout(900)  # about 40 figures, and other tests beside them
def test_published_figures_are_drawn_again_byte_for_byte(project_root: Path, tmp_path: Path) -> None:
    """The published records and the libraries that drew and wrote the figures give the same bytes."""
    pinned = {f"{name}=={version(name)}" for name in ("matplotlib", "pillow")}
    if not pinned <= set((project_root / "constraints.txt").read_text().split()):
        pytest.skip(f"the figures were not drawn by {' and '.join(sorted(pinned))}")
    published = project_root / "results" / "figures"
    names = sorted(path.name for path in published.iterdir())
    assert [path.name for path in renew_figures(published.parent, tmp_path)] == names
    # Pages show the PNG files alone; test_figures_are_the_same_bytes_when_drawn_twice has the SVG files.
    assert filecmp.cmpfiles(published, tmp_path, names, shallow=False) == (names, [], [])


@pytest.mark.slow
def test_published_tables_and_claims_are_made_again_byte_for_byte(project_root: Path, tmp_path: Path) -> None:
    """The published records and the present code give the same bytes."""
    published = project_root / "results"
    made = renew(published, tmp_path)
    assert len(made) > 50
    for path in made:
        there = published / path.relative_to(tmp_path)
        assert path.read_bytes() == there.read_bytes(), f"{there}: `make results` makes it anew"


def python(code: str, folder: Path, root: Path, backend: str) -> None:
    """Run some code in a process whose surroundings name backends of matplotlib that are not here."""
    (folder / "matplotlibrc").write_text("backend: no_such_backend\n", encoding="utf-8")
    environment = {**os.environ, "MPLBACKEND": backend, "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("backend", one_in(3, ["module://matplotlib_inline.backend_inline", "qt", "nonsense"]))
def test_figures_are_drawn_whatever_the_surroundings_say(backend: str, project_root: Path, tmp_path: Path) -> None:
    drawing = (
        "from infini.report.canvas import new_figure, save\n"
        "from pathlib import Path\n"
        "with new_figure(6.4, 4.8) as figure:\n"
        "    save(figure, Path('drawn'))\n"
    )
    python(drawing, tmp_path, project_root, backend)
    assert (tmp_path / "drawn.png").read_bytes().startswith(b"\x89PNG") and (tmp_path / "drawn.svg").is_file()


@pytest.mark.slow
def test_trainings_start_whatever_the_surroundings_say(project_root: Path, tmp_path: Path) -> None:
    """torchmetrics, which Lightning needs, imports pyplot, and with it the backend that the environment names."""
    starting = (
        "import importlib, sys\nfrom infini.cli import main as cli\n"
        "cli._dispatch = lambda words: importlib.import_module('torchmetrics') and 0\n"
        "sys.exit(cli.main(['train']))\n"
    )
    python(starting, tmp_path, project_root, "module://matplotlib_inline.backend_inline")


def test_nothing_of_ours_imports_pyplot(project_root: Path) -> None:
    """It would choose a backend, and keep every figure."""
    sources = [path for folder in ("infini", "tasks") for path in (project_root / folder).rglob("*.py")]
    assert len(sources) > 100
    assert [str(path) for path in sources if "pyplot" in path.read_text(encoding="utf-8")] == []
