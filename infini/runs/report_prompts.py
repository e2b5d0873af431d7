"""`infini table` and `infini publish` with report=llm_generate: the newest measurement of its suite."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from infini import records
from infini.config.schema import Config
from infini.errors import InputError
from infini.records import RunRecord
from infini.report.bench_figures import newest
from infini.report.prompt_costs import SERIES, PromptReport, build_prompt_report, draw_prompt_costs
from infini.report.render import write_report
from infini.report.tables import RenderedReport, Source
from infini.runs.publish import check_publishable, copy_runs, without_svg


def table(
    report: PromptReport,
    cfg: Config,
    overrides: list[str],
    published: Sequence[RunRecord],
    yours: Sequence[RunRecord] | None,
) -> RenderedReport:
    """Your newest measurement; without one, the published one."""
    own = newest(yours or (), cfg.scale.name, SERIES)
    source: Source = "yours" if own else "published"
    return build_prompt_report(report, cfg.scale.name, own or newest(published, cfg.scale.name, SERIES), source)


def publish(report: PromptReport, cfg: Config, overrides: list[str], published_dir: Path) -> list[Path]:
    """Copy your newest measurement, and write its tables and its figure.

    Raises InputError as infini.runs.publish.publish does, and if there is none.
    """
    results_dir, before = Path(cfg.results_dir), {run.run_id: run for run in records.load_records(published_dir)}
    run = newest(records.load_records(results_dir), cfg.scale.name, SERIES)
    if run is None:
        raise InputError(f"{results_dir}: no measurement of suite={report.suite} at scale {cfg.scale.name} to publish")
    check_publishable(run, results_dir, before)
    rendered = table(report, cfg, overrides, [*before.values(), run], None)
    written = copy_runs({run.run_id: run}, results_dir, published_dir)
    written += write_report(rendered, published_dir / "tables", links={"published": "../runs"})
    return written + without_svg(draw_prompt_costs(run, published_dir / "figures"))
