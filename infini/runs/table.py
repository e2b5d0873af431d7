"""`infini table report=<name>`: the paper's numbers, the published ones and yours, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from infini import records
from infini.errors import InputError
from infini.report.claims import ClaimsReport
from infini.report.footprint import MemoryReport
from infini.report.load import load_report, refuse_seed, render
from infini.report.render import print_report, write_report
from infini.report.search import SearchReport
from infini.system.paths import is_folder

if TYPE_CHECKING:
    from infini.config.schema import Config

WIDTH_WITHOUT_TERMINAL = 120


def run(cfg: Config, overrides: list[str]) -> int:
    """Print the report and write it to `<results_dir>/tables/<report>_<scale>.{md,tex,csv}`."""
    results_dir = Path(cfg.results_dir)
    if not is_folder(results_dir) and any(text.startswith("results_dir=") for text in overrides):
        raise InputError(f"results_dir={cfg.results_dir!r}: no such folder")
    records.check_writable(cfg.results_dir)
    declared = load_report(cfg.report)
    if not isinstance(declared, SearchReport):
        refuse_seed("table", overrides)
    if isinstance(declared, MemoryReport):
        # Only this table builds models, which are slow to import.
        from infini.runs.table_memory import measure_report

        report = measure_report(declared, cfg, overrides)
    elif isinstance(declared, SearchReport):
        from infini.runs.search import table_of_search

        report = table_of_search(declared, cfg, overrides)
    elif isinstance(declared, ClaimsReport):
        from infini.runs.claims import judged

        report = judged(declared, cfg.scale.name, records.load_records(records.published_dir()))
    else:
        published = records.load_records(records.published_dir())
        report = render(declared, cfg.scale.name, published, records.load_records(results_dir))
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH_WITHOUT_TERMINAL)
    print_report(report, console)
    paths = write_report(report, results_dir / "tables", links={"yours": "../runs"})
    console.print(f"written: {', '.join(map(str, paths))}", markup=False, highlight=False, soft_wrap=True)
    return 0
