"""`infini table` and `infini publish` with the report of a suite of `infini bench`: its newest measurement."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from infini import records
from infini.config.schema import Config
from infini.errors import InputError
from infini.records import RunRecord
from infini.report.render import write_report
from infini.report.suites import SUITES, SuiteReport, newest
from infini.report.tables import RenderedReport, Source
from infini.runs.publish import check_publishable, copy_runs, without_svg


def table(
    report: SuiteReport,
    cfg: Config,
    overrides: list[str],
    published: Sequence[RunRecord],
    yours: Sequence[RunRecord] | None,
) -> RenderedReport:
    """Your newest measurement; without one, the published one."""
    suite = SUITES[report.suite]
    own = newest(yours or (), cfg.scale.name, suite.series)
    source: Source = "yours" if own else "published"
    assert suite.build is not None
    return suite.build(report, cfg.scale.name, own or newest(published, cfg.scale.name, suite.series), source)


def publish(report: SuiteReport, cfg: Config, overrides: list[str], published_dir: Path) -> list[Path]:
    """Copy your newest measurement, and write its tables and its figure.

    Raises InputError as infini.runs.publish.publish does, and if there is none.
    """
    results_dir, before = Path(cfg.results_dir), {run.run_id: run for run in records.load_records(published_dir)}
    suite = SUITES[report.suite]
    run = newest(records.load_records(results_dir), cfg.scale.name, suite.series)
    if run is None:
        raise InputError(f"{results_dir}: no measurement of suite={report.suite} at scale {cfg.scale.name} to publish")
    check_publishable(run, results_dir, before)
    rendered = table(report, cfg, overrides, [*before.values(), run], None)
    written = copy_runs({run.run_id: run}, results_dir, published_dir)
    written += write_report(rendered, published_dir / "tables", links={"published": "../runs"})
    return written + without_svg(suite.draw(run, published_dir / "figures"))
