"""Figures of perplexity against cost: one point for each row, by memory size and by seconds of training."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infini.records import RunRecord, carried_floats
from infini.report.budgets import in_millions
from infini.report.canvas import LABELS_END, SYNTHETIC_MARK, Label, entitle, label_points, new_figure, save
from infini.report.intervals import LEVEL, p_value
from infini.report.palette import drawn_as, look_of, looks
from infini.report.selection import Selection
from infini.report.stats import Effect
from infini.report.text_report import Report, tested_effects

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Point:
    """A row: means over seeds, and the lowest and highest perplexity of all its seeds."""

    cost: float
    perplexity: float
    lowest: float
    highest: float
    seeds: tuple[int, ...]
    """Those of the means."""
    n_seeds: int
    """The row's number of seeds."""


def memory_points(selection: Selection) -> dict[str, Point]:
    """Row -> perplexity against the floats that it carries from segment to segment."""
    return _points(selection, lambda run: carried_floats(run, selection.training_config(run)))


def training_points(selection: Selection) -> dict[str, Point]:
    """Row -> perplexity against the seconds of its training."""
    return _points(selection, lambda run: selection.spent(run, "wall_seconds"))


def token_points(selection: Selection) -> dict[str, Point]:
    """Row -> perplexity against the tokens that it was trained on; empty unless rows differ by half or more."""
    points = _points(selection, lambda run: selection.spent(run, "tokens_seen"))
    counts = [point.cost for point in points.values()]
    return points if counts and max(counts) >= 1.5 * min(counts) else {}


def step_points(selection: Selection, measured: RunRecord) -> dict[str, Point]:
    """Row -> perplexity against the seconds of its steps as `infini bench suite=models` measured them. Rows that were
    trained at other sizes are left out."""
    models, sizes = measured.series["train"]["models"], _step_sizes(measured)

    def seconds(run: RunRecord) -> float | None:
        training = selection.training(run)
        if training is None or training.model not in models or _step_sizes(training) != sizes:
            return None
        _, median, _ = models[training.model]["seconds"]
        return float(median * training.config["recipe"]["steps"])

    return _points(selection, seconds)


def _step_sizes(run: RunRecord) -> list[Any]:
    """Settings that decide how long a step of a model takes."""
    recipe = ("batch_size", "segments_per_sequence")
    dims = {key: value for key, value in (run.config.get("dims") or {}).items() if key != "name"}
    return [dims, *((run.config.get("recipe") or {}).get(key) for key in recipe)]


def machines(trainings: Iterable[RunRecord | None]) -> list[str]:
    """Names of the machines of the trainings, each once, as far as records name them."""
    names: set[str] = set()
    for training in filter(None, trainings):
        hardware = training.environment.get("hardware") or {}
        # A training that was resumed elsewhere names several.
        names |= set(training.environment.get("machines") or [hardware.get("accelerator") or hardware.get("cpu")])
    return sorted(filter(None, names))


def _points(selection: Selection, cost: Callable[[RunRecord], float | None]) -> dict[str, Point]:
    """Row -> its point. The means are over the seeds that all rows have: the seeds of one model may differ by more than
    two models of the same seed do. If the rows share no seed, each has its own."""
    known: dict[str, list[tuple[int, float, float]]] = {}
    for row, runs in selection.runs.items():
        of_runs = [(run.seed, cost(run), run.metric("perplexity")) for run in runs]
        if found := [(seed, c, p) for seed, c, p in of_runs if c is not None and p is not None]:
            known[row] = found
    by_row = [{seed for seed, _, _ in found} for found in known.values()]
    shared = set.intersection(*by_row) if by_row else set()
    points = {}
    for row, found in known.items():
        means = [one for one in found if not shared or one[0] in shared]
        spent, perplexities = zip(*(one[1:] for one in means), strict=True)
        every = [p for _, _, p in found]
        points[row] = Point(
            statistics.fmean(spent),
            statistics.fmean(perplexities),
            min(every),
            max(every),
            tuple(sorted({seed for seed, _, _ in means})),
            len({seed for seed, _, _ in found}),
        )
    return points


def _which_seeds(points: Iterable[Point]) -> str:
    """Says which seeds the means and bars of a figure cover."""
    points = list(points)
    bars = "; bars: best and worst seed" * any(point.lowest < point.highest for point in points)
    of_means = {point.seeds for point in points}
    if len(of_means) > 1:
        return f"Mean over seeds, which differ between rows{bars}"
    (seeds,) = of_means
    if all(point.n_seeds == len(seeds) for point in points):
        return f"Mean over seeds{bars}"
    means = f"Seed {seeds[0]}" if len(seeds) == 1 else f"Mean over seeds {', '.join(map(str, seeds))}"
    return f"{means}, which all rows have; bars: best and worst of all seeds of a row"


def draw_costs(
    report: Report,
    selection: Selection,
    path: Path,
    points: Mapping[str, Point],
    label: str,
    unit: str,
    budgets: bool = False,
) -> list[Path]:
    """Draw perplexity against a cost, if two rows or more have a point. Returns the paths.

    points: row -> its point. label: of the axis of costs. unit: of a cost, for the title. budgets: costs are budgets of
    tokens, see scatter; an arrow joins the rows that the paper compares.
    """
    if len(points) < 2:
        return []
    corpus = report.benchmarks[report.task]
    models = {row: drawn_as(selection.runs[row][0]) for row in points}
    # A report with budgets says which rows are one model after more and more tokens; elsewhere a model's name does.
    budget_of = {row: model for model, rows in report.budgets.items() for row in rows}
    kinds = {row: budget_of.get(row, row) for row in points} if report.budgets else models
    finding = _lowest(report, selection, points, unit)
    scale = next(iter(selection.all_runs)).scale
    detail = (
        f"{corpus}, scale {scale}{SYNTHETIC_MARK * selection.synthetic}. Significance: by the p-value of the table, "
        "adjusted for all its comparisons (Holm)"
    )
    arrows = [(a, b) for a, b in report.compared_in_paper.items() if budgets and {a, b} <= points.keys()]
    if arrows:
        detail += ". Dotted arrows: what the paper's Table 2 may compare"
    return scatter(points, models, report.models, path, label, finding, detail, kinds, arrows, budgets)


def _lowest(report: Report, selection: Selection, points: Mapping[str, Point], unit: str) -> str:
    """Says which row has the lowest mean perplexity, and whether that is significantly below the row's baseline.

    The p-value is that of the report's table, so that title and table cannot disagree. If the lowest is the baseline of
    other rows, the title says how many of them are significantly above it.
    """
    best = min(points, key=lambda row: points[row].perplexity)
    mean = "mean " * any(len(point.seeds) != 1 for point in points.values())
    lowest = (
        f"Lowest {mean}perplexity on {report.benchmarks[report.task]}: {report.models.get(best, best)}, at "
        f"{points[best].cost:,.0f} {unit}"
    )
    if not report.baseline:
        return lowest
    differences = {row: effects[-1] for row, effects in tested_effects(report, selection).items()}
    zero, found = report.baseline_of(best), differences.get(best)
    if zero is not None and found is not None:
        against = report.models.get(zero, zero)
        if (p := found.adjusted_p) is None:
            return f"{lowest}; {_too_few(found)}, so not tested for significance"
        shown = f"p {'' if p < 0.0001 else '= '}{p_value(p)}"
        if found.n_seeds < 2:
            return f"{lowest}; {shown} against {against}, over documents of one seed"
        below = "significantly" if p <= 1 - LEVEL and found.mean < 0 else "not significantly"
        return f"{lowest}; {below} below {against} ({shown})"
    above = [of for row, of in differences.items() if row in points and of and report.baseline_of(row) == best]
    tested = [of for of in above if of.adjusted_p is not None and of.n_seeds > 1]
    if not tested:
        return f"{lowest}; {_too_few(above[0])}, so not tested for significance" if above else lowest
    significant = sum((of.adjusted_p or 0.0) <= 1 - LEVEL and of.mean > 0 for of in tested)
    return f"{lowest}; significantly below {significant} of the {len(tested)} rows compared with it"


def _too_few(effect: Effect) -> str:
    """Says whether seeds or documents are too few for a test."""
    return "one seed" if effect.n_seeds < 2 else "one document"


def by_seconds(report: Report, selection: Selection, measured: RunRecord | None) -> tuple[dict[str, Point], str]:
    """The points, and a label that says where the seconds were measured, because machines and load differ.

    measured: a record of `infini bench suite=models`. If it has the models of all rows, with default settings, its
    steps give the seconds, all on one machine. Otherwise the trainings give them.
    """
    points = training_points(selection)
    if measured is not None and not report.variants.keys() & selection.runs.keys():
        steps = step_points(selection, measured)
        if steps.keys() == points.keys():
            return steps, f"seconds of training, by steps timed one after the other ({', '.join(machines([measured]))})"
    where = machines(selection.training(run) for run in selection.all_runs)
    return points, "seconds of training" + (f", as they were run ({' and '.join(where)})" if where else "")


def scatter(
    points: Mapping[str, Point],
    models: Mapping[str, str],
    titles: Mapping[str, str],
    path: Path,
    label: str,
    finding: str,
    detail: str,
    kinds: Mapping[str, str] | None = None,
    arrows: Iterable[tuple[str, str]] = (),
    budgets: bool = False,
) -> list[Path]:
    """Draw the points, each with its name and bars from the best to the worst seed. The cost axis is logarithmic if it
    spans more than a factor of 20. A thin line joins the rows of one kind if their costs differ.

    models: row -> its model. kinds: row -> its kind; None: its model. arrows: pairs of rows that a dotted arrow joins.
    budgets: the cost axis is logarithmic, and of a line only the last point has a name, that of the first.
    """
    kinds = models if kinds is None else kinds
    # A line of budgets has one look.
    look = looks({kind: models[row] for row, kind in reversed(list(kinds.items()))} if budgets else models)
    look = {row: look[kinds[row]] for row in points} if budgets else look
    names = {row: titles.get(row, row) for row in points}
    with new_figure(7.4, 4.2) as figure:
        axes = figure.add_subplot()
        for kind in dict.fromkeys(kinds.values()):
            of_kind = [row for row in points if kinds[row] == kind]
            joined = sorted((points[row].cost, points[row].perplexity) for row in of_kind)
            if len({cost for cost, _ in joined}) == len(joined) > 1:
                colour = look_of(models[of_kind[0]]).colour
                axes.plot(*zip(*joined, strict=True), color=colour, linewidth=0.7, alpha=0.6)
                if budgets:
                    first, *_, last = sorted(of_kind, key=lambda row: points[row].cost)
                    own_name = names[first]
                    names = {row: name for row, name in names.items() if row not in of_kind} | {last: own_name}
        for start, end in arrows:
            tail, head = ((points[row].cost, points[row].perplexity) for row in (start, end))
            dotted = {"arrowstyle": "->", "linestyle": ":", "color": "0.35", "shrinkA": 5, "shrinkB": 5}
            axes.annotate("", xy=head, xytext=tail, arrowprops=dotted)
        for row, point in points.items():
            below, above = point.perplexity - point.lowest, point.highest - point.perplexity
            drawn = look[row].drawn | {"linestyle": "none", "markersize": 7, "elinewidth": 1.0, "capsize": 2.5}
            axes.errorbar(point.cost, point.perplexity, [[below], [above]], label=names.get(row), **drawn)
        if budgets:
            axes.set_xscale("log", base=2)
            ticks = sorted({point.cost for point in points.values()})
            axes.set_xticks(ticks, list(map(in_millions, ticks)), minor=False)
            axes.margins(x=0.25)
        else:
            _scale_costs(axes, [point.cost for point in points.values()])
        axes.margins(y=0.1)
        axes.set_xlabel(label)
        axes.set_ylabel("perplexity a token (lower: better)")
        entitle(axes, finding, f"{detail}. {_which_seeds(points.values())}")
        named = [
            Label(point.cost, point.perplexity, names.get(row, ""), look[row].colour) for row, point in points.items()
        ]
        if left := {one.text for one in label_points(axes, named)}:
            bars = [bar for bar in axes.containers if bar.get_label() in left]
            # Labels of points may end right of the axes.
            axes.legend(handles=bars, frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(LABELS_END, 0.5))
        return save(figure, path)


def _scale_costs(axes: Axes, costs: Sequence[float]) -> None:
    if min(costs) > max(costs) / 20:
        axes.set_xlim(0, 1.08 * max(costs))
    elif min(costs) > 0:
        axes.set_xscale("log")
    else:
        # Models without a memory are drawn at the left edge.
        smallest = min((cost for cost in costs if cost > 0), default=1.0)
        axes.set_xscale("symlog", linthresh=smallest, linscale=0.4)
