"""`infini figure report=<name>`: the figures of a report, from the records of the results folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from infini import records
from infini.errors import InputError
from infini.report.load import draw, load_report
from infini.report.selection import Report, select_runs

if TYPE_CHECKING:
    from infini.config import Config


def run(cfg: Config, overrides: list[str]) -> int:
    """Write the report's figures to `<results_dir>/figures` as PNG and SVG.

    Raises:
        InputError: no run of the report at this scale holds anything to draw.
    """
    report = load_report(cfg.report)
    results_dir = Path(cfg.results_dir)
    selection = select_runs(report, cfg.scale.name, records.load_records(results_dir))
    paths = draw(report, cfg.scale.name, selection, results_dir / "figures")
    if not paths:
        raise InputError(
            f"{results_dir}: no evaluation runs of {report.name} at scale {cfg.scale.name} to draw; "
            f"make them with `infini reproduce report={report.name} scale={cfg.scale.name}`"
        )
    for path in paths:
        print(path)
    if isinstance(report, Report) and report.baseline and report.baseline not in selection.runs:
        print(f"no gap by position: it needs an evaluation of model={report.baseline} with the same seed")
    return 0
