"""The search for learning rates: every model at the same rates, judged by the loss on the validation documents."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from infini.errors import InputError
from infini.records import RunRecord
from infini.report.selection import checked
from infini.report.tables import MISSING, Cell, RenderedReport, Row, Source, Table

KEY = "optimizer.lr"
METRICS = ("validation_nll_per_token", "validation_summary_nll")
"""What a choice goes by: the loss on the validation documents, or on the summaries of the validation books."""


@dataclass(frozen=True)
class SearchReport:
    """A search, as `conf/report/<name>.yaml` declares it."""

    name: str
    title: str
    task: str
    """The task that `infini reproduce` takes where none is named."""
    models: list[str]
    benchmarks: dict[str, str]
    """Task name -> title of its table."""
    rates: list[float] = field(default_factory=list)
    """Rates that every model is trained at first, ascending; then each at others, as many for all."""
    rates_at: dict[str, list[float]] = field(default_factory=dict)
    """Scale -> its rates; `rates` are those of the scale that is chosen."""
    factor: float = 2.0
    """Between a rate and the next where a model's grid is extended: no best rate may be at the edge of its grid."""
    most: int = 9
    """Rates at most."""
    settings: dict[str, list[str]] = field(default_factory=dict)
    """Scale -> what is set for every training, where it is not the task's usual one; then there are no other scales."""
    model_settings: dict[str, list[str]] = field(default_factory=dict)
    """Model -> what is set for its trainings beside that."""
    note: str = ""

    def __post_init__(self) -> None:
        rates = self.rates
        if not isinstance(rates, list) or len(rates) < 2 or any(not _number(rate) or rate <= 0 for rate in rates):
            raise InputError(f"report.rates={rates}: must be two rates above 0, or more")
        if sorted(set(rates)) != list(rates):
            raise InputError(f"report.rates={rates}: must ascend")
        if not _number(self.factor) or not self.factor > 1:
            raise InputError(f"report.factor={self.factor!r}: must be above 1")
        if not isinstance(self.most, int) or self.most < len(rates):
            raise InputError(f"report.most={self.most!r}: must be at least the {len(rates)} rates")
        for key, of in (("settings", "scale"), ("model_settings", "model")):
            found = getattr(self, key)
            texts = found.values() if isinstance(found, dict) else [None]
            if not all(isinstance(listed, list) and all("=" in str(text) for text in listed) for listed in texts):
                raise InputError(f"report.{key}={found!r}: must be {{{of}: [key=value, ...]}}")

    @classmethod
    def from_config(cls, config: Any) -> SearchReport:
        """A report from the `report` group; InputError: a key is missing, unknown or has a value not allowed."""
        report: SearchReport = checked(cls, config, "title", "task", "models", "benchmarks", "rates")
        return report


def _number(value: object) -> bool:
    return isinstance(value, float | int) and not isinstance(value, bool)


Outcome = RunRecord | None
"""A training, which may have diverged; None where there is none yet."""
Losses = Mapping[float, Outcome]
"""Rate -> what became of it."""


def loss_of(run: Outcome) -> float:
    """Validation loss of a training in nats a token; infinite where it has none."""
    found = [run.metric(name) for name in METRICS] if isinstance(run, RunRecord) else []
    return next((float(value) for value in found if value is not None and math.isfinite(value)), math.inf)


def best_rate(found: Losses) -> float | None:
    """The rate with the lowest loss; None before every rate has been tried."""
    if not found or any(run is None for run in found.values()):
        return None
    rate = min(found, key=lambda rate: loss_of(found[rate]))
    return rate if math.isfinite(loss_of(found[rate])) else None


def at_the_edge(found: Losses) -> bool:
    """Whether the best rate is the lowest or the highest that was tried: a better one may lie beyond."""
    return best_rate(found) in (min(found), max(found))


def next_rate(found: Losses, factor: float) -> float | None:
    """One more rate, beyond the edge of the grid that has the lower loss; None before every rate has been tried."""
    if best_rate(found) is None:
        return None
    low, high = min(found), max(found)
    return float(f"{(low / factor if loss_of(found[low]) <= loss_of(found[high]) else high * factor):.6g}")


def tuned_yaml(found: Losses) -> str | None:
    """A file for conf/tuned that sets the best rate and names the runs it was found by.

    None where there is no best rate, or it is at the edge of the grid: the best may lie beyond.
    """
    best = best_rate(found)
    if best is None or at_the_edge(found):
        return None
    tried = [f"# {rate:g}: {_outcome(run)} ({run.run_id})" for rate, run in sorted(found.items()) if run is not None]
    head = ["# @package _global_", f"# Best of {KEY} by the loss on the validation documents, in nats a token:", *tried]
    return "\n".join([*head, "optimizer:", f"  lr: {best:g}", ""])


def _outcome(run: RunRecord) -> str:
    return f"{loss_of(run):.4f}" if run.diverged is None else str(run.diverged.get("reason"))


def build_search(
    report: SearchReport, scale: str, found: Mapping[str, Mapping[str, Losses]], published: Collection[str] = ()
) -> RenderedReport:
    """Losses by model and rate.

    found: task -> model -> rate -> run. published: ids of the runs that are; the others are yours.
    """
    tables, shown = [], Counter[Source]()
    for task, models in found.items():
        rates = sorted({rate for losses in models.values() for rate in losses})
        rows = []
        for model, losses in models.items():
            best = best_rate(losses)
            cells = [_cell(losses.get(rate), rate == best, published) for rate in rates]
            shown.update(cell.source for cell in cells if cell.source)
            edge = bool(losses) and at_the_edge(losses)
            chosen = MISSING if best is None else Cell(f"{best:g}{' (at the edge)' if edge else ''}", "computed", best)
            rows.append(Row(model, model, (*cells, chosen)))
        columns = (*(f"{rate:g}" for rate in rates), "Best")
        tables.append(
            Table(f"{report.benchmarks[task]}: validation loss in nats a token by {KEY}", columns, tuple(rows))
        )
    whose = ", ".join(f"{count} {source}" for source, count in sorted(shown.items()))
    notes = tuple(filter(None, [report.note, "*: the lowest of its row.", whose and f"Trainings: {whose}."]))
    return RenderedReport(report.name, scale, f"{report.title}, scale {scale}", tuple(tables), notes)


def _cell(run: Outcome, best: bool, published: Collection[str]) -> Cell:
    if run is None:
        return MISSING
    source: Source = "published" if run.run_id in published else "yours"
    if run.diverged is not None:
        return Cell("failed", "computed", run_ids=(run.run_id,), source=source)
    value = loss_of(run)
    return Cell(f"{value:.4f}{'*' if best else ''}", "measured", value, n_seeds=1, run_ids=(run.run_id,), source=source)
