"""The search for learning rates: every model at the same rates, compared by the loss on the validation documents."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from infini.errors import require
from infini.records import RunRecord
from infini.report.kind import REPRODUCED, OwnVerb, ReportKind
from infini.report.selection import rows_of_models
from infini.report.tables import MISSING, Cell, RenderedReport, Row, Source, Table, counted

LEARNING_RATE = "optimizer.lr"
METRICS = ("validation_nll_per_token", "validation_summary_nll")
"""The loss that decides: on the validation documents, or on the summaries of the validation books."""


@dataclass(frozen=True)
class SearchReport(ReportKind):
    """A search, as `conf/report/<name>.yaml` declares it."""

    sign = "rates"
    has_one_seed = True
    verbs: ClassVar[Mapping[str, OwnVerb]] = {
        "reproduce": OwnVerb(REPRODUCED, (LEARNING_RATE,), "infini.runs.search"),
        "table": OwnVerb(None, (LEARNING_RATE,), "infini.runs.search"),
        "publish": OwnVerb(None, (LEARNING_RATE,), "infini.runs.search"),
    }

    models: list[str]
    benchmarks: dict[str, str]
    """Task name -> title of its table."""
    rates: list[float] = field(default_factory=list, metadata={"allowed": "must be two rates above 0, or more"})
    """Rates at which every model is trained first, ascending. The grid then grows, to as many rates for each model."""
    rates_at: dict[str, list[float]] = field(default_factory=dict)
    """Scale -> its rates; `rates` refers to those of the chosen scale."""
    factor: float = field(default=2.0, metadata={"allowed": "must be above 1"})
    """Ratio of a new rate to its neighbour. A grid grows while its best rate is at its edge."""
    most: int = 9
    """Maximum number of rates."""
    settings: dict[str, list[str]] = field(
        default_factory=dict, metadata={"allowed": "must be {scale: [key=value, ...]}"}
    )
    """Scale -> settings of every training, if they differ from the task's defaults. Then there are no other scales."""
    model_settings: dict[str, list[str]] = field(
        default_factory=dict, metadata={"allowed": "must be {model: [key=value, ...]}"}
    )
    """Model -> further settings of its trainings."""

    def __post_init__(self) -> None:
        rates = self.rates
        several = len(rates) > 1 and min(rates) > 0
        require(several, "report.rates", rates, "must be two rates above 0, or more")
        require(sorted(set(rates)) == list(rates), "report.rates", rates, "must ascend")
        require(self.factor > 1, "report.factor", self.factor, "must be above 1")
        require(self.most >= len(rates), "report.most", self.most, f"must be at least the {len(rates)} rates")
        for key, of in (("settings", "scale"), ("model_settings", "model")):
            found = getattr(self, key)
            right = all("=" in text for listed in found.values() for text in listed)
            require(right, f"report.{key}", found, f"must be {{{of}: [key=value, ...]}}")

    def limited_to(self, models: Sequence[str]) -> SearchReport:
        return replace(self, models=rows_of_models(self.name, {model: model for model in self.models}, models))


Outcome = RunRecord | None
"""A training, which may have diverged; None if there is none yet."""
Losses = Mapping[float, Outcome]
"""Rate -> its training."""


def loss_of(run: Outcome) -> float:
    """Validation loss of a training in nats per token; infinite if it has none."""
    found = [run.metric(name) for name in METRICS] if run else []
    return next((float(value) for value in found if value is not None and math.isfinite(value)), math.inf)


def best_rate(found: Losses) -> float | None:
    """The rate with the lowest loss; None before every rate has been tried."""
    if not found or any(run is None for run in found.values()):
        return None
    rate = min(found, key=lambda rate: loss_of(found[rate]))
    return rate if math.isfinite(loss_of(found[rate])) else None


def at_the_edge(found: Losses) -> bool:
    """Whether the best rate is the lowest or the highest that was tried, so that a better one may lie beyond."""
    return best_rate(found) in (min(found), max(found))


def next_rate(found: Losses, factor: float) -> float | None:
    """One more rate, beyond the edge of the grid that has the lower loss; None before every rate has been tried."""
    if best_rate(found) is None:
        return None
    low, high = min(found), max(found)
    return float(f"{(low / factor if loss_of(found[low]) <= loss_of(found[high]) else high * factor):.6g}")


def tuned_yaml(found: Losses) -> str | None:
    """A file for conf/tuned that sets the best rate and names the runs of the search.

    None if there is no best rate, or if it is at the edge of the grid.
    """
    best = best_rate(found)
    if best is None or at_the_edge(found):
        return None
    tried = []
    for rate, run in sorted(found.items()):
        if run is not None:
            outcome = f"{loss_of(run):.4f}" if run.diverged is None else run.diverged.get("reason")
            tried.append(f"# {rate:g}: {outcome} ({run.run_id})")
    said = f"# Best of {LEARNING_RATE} by the loss on the validation documents, in nats a token:"
    return "\n".join(["# @package _global_", said, *tried, "optimizer:", f"  lr: {best:g}", ""])


def build_search(
    report: SearchReport,
    scale: str,
    found: Mapping[str, Mapping[str, Losses]],
    published: Collection[str] = (),
    left_out: int = 0,
) -> RenderedReport:
    """Losses by model and rate.

    found: task -> model -> rate -> run. published: ids of the published runs; the others are yours. left_out: trainings
    on other texts.
    """
    tables, shown = [], Counter[Source]()
    for task, models in found.items():
        rates = sorted({rate for losses in models.values() for rate in losses})
        rows = []
        for model, losses in models.items():
            tried = {rate: run for rate, run in losses.items() if run is not None}
            best = best_rate(tried)
            cells = [_cell(losses.get(rate), rate == best, published) for rate in rates]
            shown.update(cell.source for cell in cells if cell.source)
            remarks = (
                [] if best is None or not at_the_edge(tried) else ["at the edge" if len(tried) > 1 else "the only one"]
            )
            remarks += ["so far"] if len(tried) < len(losses) else []
            said = f" ({', '.join(remarks)})" if remarks else ""
            chosen = MISSING if best is None else Cell(f"{best:g}{said}", "computed", best)
            rows.append(Row(model, model, (*cells, chosen)))
        columns = (*(f"{rate:g}" for rate in rates), "Best")
        title = f"{report.benchmarks[task]}: validation loss in nats a token by {LEARNING_RATE}"
        tables.append(Table(title, columns, tuple(rows)))
    whose = ", ".join(f"{count} {source}" for source, count in sorted(shown.items()))
    lowest = "*: the lowest of its row. So far: not all rates of the table have been tried."
    other = (
        f"{counted(left_out, 'training')} on other texts left out: their losses cannot be compared." if left_out else ""
    )
    return report.rendered(scale, tables, [lowest, whose and f"Trainings: {whose}.", other], legend=(other,))


def _cell(run: Outcome, best: bool, published: Collection[str]) -> Cell:
    if run is None:
        return MISSING
    source: Source = "published" if run.run_id in published else "yours"
    if run.diverged is not None:
        return Cell("failed", "computed", run_ids=(run.run_id,), source=source)
    value = loss_of(run)
    return Cell(f"{value:.4f}{'*' if best else ''}", "measured", value, n_seeds=1, run_ids=(run.run_id,), source=source)
