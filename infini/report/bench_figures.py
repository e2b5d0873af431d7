"""Figures of `infini bench`, each from the newest record with its measurements."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from infini.records import RunRecord
from infini.report.source_costs import draw_source_costs
from infini.report.training_memory import draw_training_memory

DRAWN_BY: Mapping[str, tuple[str, Callable[[RunRecord, Path], list[Path]]]] = {
    "sources": ("sources", draw_source_costs),
    "lengths": ("training_lengths", draw_training_memory),
}
"""Suite -> the series of its records, and the function that draws it."""


def newest_of_models(runs: Iterable[RunRecord], scale: str) -> RunRecord | None:
    """The newest measurement of a training step of every model (`infini bench suite=models`)."""
    return newest((run for run in runs if "models" in run.series.get("train", {})), scale, "train")


def newest(runs: Iterable[RunRecord], scale: str, series: str) -> RunRecord | None:
    """The newest measurement at a scale that has a series."""
    found = [run for run in runs if run.verb == "bench" and run.scale == scale and run.series.get(series)]
    return found[-1] if found else None
