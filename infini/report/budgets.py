"""How differences between models change with the number of training tokens: a table and a figure.

A report names the rows of each model from its smallest to its largest budget (`budgets`) and the models with which the
others are compared (`budgets_over`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from infini.records import RunRecord
from infini.report.canvas import SYNTHETIC_MARK, Label, entitle, label_ends, new_figure, save
from infini.report.palette import MUTED, drawn_as, looks
from infini.report.selection import Selection
from infini.report.stats import Effect, paired_difference
from infini.report.tables import CLUSTERED, MISSING, Row, Table, effect_cell, measured_cell, source_label
from infini.report.text_measures import equal_tokens

if TYPE_CHECKING:
    from infini.report.text_report import Report


@dataclass(frozen=True)
class Growth:
    """A model's loss minus that of another with as many training tokens, at each budget, and how it changes.

    All effects are of the seeds that the two models have at every budget: a change between other seeds would be partly
    one of seeds.
    """

    row: str
    """The model's row at its smallest budget, as `other` is."""
    other: str
    tokens: tuple[float, ...]
    """Training tokens of each budget."""
    differences: tuple[Effect, ...]
    changes: tuple[Effect, ...]
    """The changes from each budget to the next one, then from the first to the last."""

    @property
    def run_ids(self) -> tuple[str, ...]:
        """The runs behind it."""
        return tuple(dict.fromkeys(run_id for effect in self.differences for run_id in effect.run_ids))


def growths(report: Report, selection: Selection) -> list[Growth]:
    """The growth of each model over each of `budgets_over`, as far as two budgets or more have runs of both."""
    return [found for row, other in _pairs(report) if (found := _growth(report, selection, row, other)) is not None]


def _pairs(report: Report) -> Iterator[tuple[str, str]]:
    done: list[str] = []
    for other in report.budgets_over:
        done.append(other)
        # A difference between two of them is not shown a second time with the other sign.
        yield from ((row, other) for row in report.budgets if row not in done)


def _growth(report: Report, selection: Selection, row: str, other: str) -> Growth | None:
    found = zip(report.budgets[row], report.budgets[other], strict=False)
    sides = [(selection.runs.get(mine, []), selection.runs.get(theirs, [])) for mine, theirs in found]
    # Other numbers of tokens would be another budget.
    sides = [pair for pair in sides if all(pair) and equal_tokens(selection, pair)]
    seeds = [{run.seed for run in runs} for pair in sides for runs in pair]
    shared = set.intersection(*seeds) if seeds else set()
    budgets = [tuple([run for run in runs if run.seed in shared] for runs in pair) for pair in sides]
    if len(budgets) < 2 or not shared:
        return None
    differences = [paired_difference(*pair) for pair in budgets]
    steps = [*zip(budgets[1:], budgets[:-1], strict=True)]
    steps += [(budgets[-1], budgets[0])] * (len(budgets) > 2)
    changes = [paired_difference(*later, *earlier) for later, earlier in steps]
    known = [effect for effect in (*differences, *changes) if effect is not None and effect.df > 0]
    if len(known) < len(differences) + len(changes):
        # A loss that is not finite, or too few documents for an interval.
        return None
    tokens = tuple(_mean_tokens(selection, [*mine, *theirs]) for mine, theirs in budgets)
    return Growth(row, other, tokens, tuple(known[: len(budgets)]), tuple(known[len(budgets) :]))


def _mean_tokens(selection: Selection, runs: Sequence[RunRecord]) -> float:
    counts = [selection.spent(run, "tokens_seen") or 0 for run in runs]
    return sum(counts) / len(counts)


def in_millions(tokens: float) -> str:
    """`9.2M`, and `0.041M`: with one decimal all budgets far below a million would look alike."""
    return f"{tokens / 1e6:{'.1f' if tokens >= 1e6 else '.2g'}}M"


def growth_table(report: Report, source: str, selection: Selection) -> Table:
    """Differences at each budget and their changes; without rows if the report has no `budgets`."""
    found = growths(report, selection)
    most = max(found, key=lambda growth: len(growth.tokens), default=None)
    names = [in_millions(tokens) for tokens in most.tokens] if most else []
    columns = [*names, *(" to ".join(pair) for pair in _steps(names))]
    rows = []
    for growth in found:
        own = [in_millions(tokens) for tokens in growth.tokens]
        effects = dict(zip(own, growth.differences, strict=True))
        effects |= dict(zip((" to ".join(pair) for pair in _steps(own)), growth.changes, strict=True))
        cells = [effect_cell(effects[name], source) if name in effects else MISSING for name in columns]
        n_seeds = growth.differences[0].n_seeds
        cells.append(measured_cell(str(n_seeds), source, n_seeds, n_seeds, growth.run_ids))
        title = f"{report.models[growth.row]} minus {report.models[growth.other]}"
        rows.append(Row(f"{growth.row} minus {growth.other}", title, tuple(cells)))
    title = (
        f"{report.benchmarks[report.task]}: loss minus the loss of another model with as many training tokens, and "
        f"its change from one budget to another, in nats a token [95 % interval, {CLUSTERED}, each cell by itself] "
        f"({source_label(source)}), paired by document and by the seeds that both models have at every budget; a "
        "change below 0: the model gains on the other as training grows"
    )
    return Table(title, (*columns, "Seeds"), tuple(rows))


def _steps(names: Sequence[str]) -> list[tuple[str, str]]:
    """The budgets between which changes are: each and the next one, then the first and the last."""
    return [*itertools.pairwise(names), *([(names[0], names[-1])] if len(names) > 2 else [])]


def draw_gains(report: Report, selection: Selection, path: Path) -> list[Path]:
    """Draw each model's loss minus that of the first of `budgets_over` against the training tokens, with intervals.
    Returns the paths; empty if there is nothing to compare."""
    found = [growth for growth in growths(report, selection) if growth.other == report.budgets_over[0]]
    if not found:
        return []
    look = looks({growth.row: drawn_as(selection.runs[growth.row][0]) for growth in found})
    other = report.models[report.budgets_over[0]]
    ticks = max((growth.tokens for growth in found), key=len)
    first, last = in_millions(ticks[0]), in_millions(ticks[-1])
    with new_figure(6.4, 3.9) as figure:
        axes = figure.add_subplot()
        axes.axhline(0.0, color=MUTED, linewidth=0.8)
        for growth in found:
            means, reach = zip(*((effect.mean, effect.half_width) for effect in growth.differences), strict=True)
            drawn = look[growth.row].drawn | {"elinewidth": 1.0, "capsize": 2.5}
            axes.errorbar(growth.tokens, means, reach, **drawn)
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, list(map(in_millions, ticks)), minor=False)
        axes.set_xlabel("training tokens")
        axes.set_ylabel("loss minus the baseline's (nats a token)")
        whole = [growth for growth in found if len(growth.tokens) == len(ticks)]
        n_grown = sum(growth.changes[-1].interval[1] < 0 for growth in whole)
        n_seeds = sorted({growth.differences[0].n_seeds for growth in found})
        entitle(
            axes,
            f'Gain over "{other}" from {first} to {last} training tokens: it grows in {n_grown} of {len(whole)} models',
            f'{report.benchmarks[report.task]}{SYNTHETIC_MARK * selection.synthetic}. Below 0: better than "{other}" '
            f"after as many training tokens. Seeds: {' or '.join(map(str, n_seeds))}. Bars: 95 % intervals, each by "
            f"itself, {CLUSTERED}. It grows if the interval of the change is below 0",
        )
        ends = [(growth.row, growth.tokens[-1], growth.differences[-1].mean) for growth in found]
        label_ends(axes, [Label(x, y, report.models[row], look[row].colour) for row, x, y in ends])
        return save(figure, path)
